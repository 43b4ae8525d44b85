"""Keys and certificates of a deployment: who the server is, who the nodes are, and whose app nodes run."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fnrfl.core.errors import ConfigError
from fnrfl.flower.deployment import Deployment

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

DAYS = 365
HOST_NAME = re.compile(
    r"(?=.{1,253}$)(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I
)
LOOPBACK = ("localhost", "127.0.0.1")


def write_certificates(deployment: Deployment, nodes: int, hosts: Sequence[str] = ()) -> list[Path]:
    """A CA, the server's certificate for its hosts and for loopback, a key for each node and one that signs the app.

    Whoever has `certs/ca.key` can pretend to be the server, whoever has `certs/app.key` can have nodes run any app, and
    whoever has a `node.key` can pretend to be that node: these files are readable by their owner alone.
    """
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    curve = ec.SECP384R1()
    ca, server = ec.generate_private_key(curve), ec.generate_private_key(curve)
    app = ed25519.Ed25519PrivateKey.generate()
    root = _certificate("fnrfl deployment CA", ca, None, ca, None)
    named = _certificate([*hosts, *LOOPBACK][0], server, root, ca, [*hosts, *LOOPBACK])
    public = _openssh(app)
    written = {
        "certs/ca.crt": _pem(root),
        "certs/ca.key": _private(ca),
        "certs/server.crt": _pem(named),
        "certs/server.key": _private(server),
        "certs/app.key": _private(app, ssh=True),
        "certs/app.pub": public,
        "certs/trusted.yaml": json.dumps({"fnrfl-deploy": public.decode().strip()}).encode() + b"\n",  # JSON is YAML
    }
    for client in range(nodes):
        key = ec.generate_private_key(curve)
        written |= {f"nodes/{client}/node.key": _private(key, ssh=True), f"nodes/{client}/node.pub": _openssh(key)}
    return _write_all(deployment.root, written)


def _write_all(root: Path, content: dict[str, bytes]) -> list[Path]:
    """Write files, the secret ones for their owner alone; nothing is written if one of them is there."""
    paths = {root / name: data for name, data in content.items()}
    there = [path for path in paths if path.exists() or path.is_symlink()]
    if there:
        raise ConfigError(
            f"{there[0]} is there already, and a new key would shut out everybody who knows the old one. "
            "Move the folder certs and the node keys away if you want new ones."
        )
    for path, data in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        os.chmod(path.parent, 0o700)
        mode = 0o600 if path.suffix == ".key" else 0o644
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
    return list(paths)


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Certificate | None, signer: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str] | None,
) -> x509.Certificate:  # fmt: skip
    """A certificate for hosts, or of a CA if there are none."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name[:64])])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=hosts is None, path_length=0 if hosts is None else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    unused = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
    usage = dict.fromkeys(unused.split(), False)
    usage |= {"digital_signature": hosts is not None, "key_cert_sign": hosts is None, "crl_sign": hosts is None}
    made = made.add_extension(x509.KeyUsage(**usage), critical=True)
    if hosts is not None:
        made = made.add_extension(x509.SubjectAlternativeName([_host(one) for one in hosts]), critical=False)
        server = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
        made = made.add_extension(server, critical=False)
    return made.sign(signer, hashes.SHA384())


def _host(name: str) -> x509.GeneralName:
    """A host as a certificate names it: an address or a name."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if HOST_NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is no host. Give a name such as example.org, or an address.")
    return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private(key: PrivateKey, *, ssh: bool = False) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH if ssh else PrivateFormat.PKCS8, NoEncryption())


def _openssh(key: PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
