"""Keys and certificates of a deployment: who the server is, who the nodes are, and whose app nodes run."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnrfl.core.errors import ConfigError
from fnrfl.flower.deployment import Deployment

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

DAYS = 365
HOST_NAME = re.compile(
    r"(?=.{1,253}$)(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I
)
LOOPBACK = ("localhost", "127.0.0.1")


def write_certificates(deployment: Deployment, nodes: int, hosts: Sequence[str] = ()) -> list[Path]:
    """Write a CA, the server's certificate for its hosts and for loopback, a key for each node and one for the app.

    With `certs/ca.key` one can pretend to be the server, with `certs/app.key` have nodes run any app, and with a
    `node.key` pretend to be that node: these files are readable by their owner alone.
    """
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    def private(key: Any, encoding: PrivateFormat = PrivateFormat.OpenSSH) -> bytes:
        return key.private_bytes(Encoding.PEM, encoding, NoEncryption())

    def public(key: Any) -> bytes:
        return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"

    ca, server, *clients = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2 + nodes))
    app, names = ed25519.Ed25519PrivateKey.generate(), [*hosts, *LOOPBACK]
    content = {
        "certs/ca.crt": _certificate("fnrfl deployment CA", ca, ca, []).public_bytes(Encoding.PEM),
        "certs/ca.key": private(ca, PrivateFormat.PKCS8),
        "certs/server.crt": _certificate(names[0], server, ca, names).public_bytes(Encoding.PEM),
        "certs/server.key": private(server, PrivateFormat.PKCS8),
        "certs/app.key": private(app),
        "certs/app.pub": public(app),
        "certs/trusted.yaml": json.dumps({"fnrfl-deploy": public(app).decode().strip()}).encode(),  # JSON is YAML
    }
    for client, key in enumerate(clients):
        content |= {f"nodes/{client}/node.key": private(key), f"nodes/{client}/node.pub": public(key)}
    paths = {deployment.root / name: data for name, data in content.items()}
    if there := [path for path in paths if path.exists() or path.is_symlink()]:
        raise ConfigError(
            f"{there[0]} is there already, and a new key would shut out everybody who knows the old one. "
            "Move the folder certs and the node keys away if you want new ones."
        )
    for path, data in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        mode = 0o600 if path.suffix == ".key" else 0o644
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
    return list(paths)


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, hosts: Sequence[str]
) -> x509.Certificate:
    """Return a server's certificate for its hosts, or that of a CA if there are none."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text[:64])])

    def as_host(host: str) -> x509.GeneralName:
        with suppress(ValueError):
            return x509.IPAddress(ipaddress.ip_address(host))
        if HOST_NAME.fullmatch(host) is None:
            raise ConfigError(f"{host!r} is no host. Give a name such as example.org, or an address.")
        return x509.DNSName(host)

    now, is_ca = datetime.now(UTC), not hosts
    usage = "digital_signature key_cert_sign crl_sign content_commitment key_encipherment data_encipherment"
    allowed = dict.fromkeys(f"{usage} key_agreement encipher_only decipher_only".split(), False)
    allowed |= {"digital_signature": not is_ca, "key_cert_sign": is_ca, "crl_sign": is_ca}
    critical = [x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), x509.KeyUsage(**allowed)]
    others: list[Any] = [
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    ]
    if hosts:
        others.append(x509.SubjectAlternativeName(list(map(as_host, hosts))))
        others.append(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]))
    made = x509.CertificateBuilder(named("fnrfl deployment CA"), named(name), key.public_key())
    made = made.serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(days=DAYS))
    for extension in (*critical, *others):
        made = made.add_extension(extension, extension in critical)
    return made.sign(signer, hashes.SHA384())
