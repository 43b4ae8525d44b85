"""Starts, shows and ends a federation on this machine: a SuperLink and a SuperNode for every client."""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.flower.deployment import MARK, Address, Deployment
from fnrfl.flower.own_config import OwnConfig
from fnrfl.flower.processes import Processes, Recorded
from fnrfl.flower.superlink import SuperLink
from fnrfl.flower.supernode import TRY_UNTIL

HOST = "127.0.0.1"
START_SECONDS = 90.0  # seconds until a process must be up: two cores that start four of them are slow


def processes(deployment: Deployment) -> Processes:
    """The records of a deployment."""
    return Processes(deployment.home / "processes.json", (MARK, deployment.mark))


def start_federation(
    deployment: Deployment, nodes: int, port: int, *, secure: bool, tell: Callable[[str], None]
) -> None:
    """Start the SuperLink and the nodes, and wait until all are online."""
    here = processes(deployment)
    if here.alive:
        raise ConfigError(f"{deployment.root} is running already. `fnrfl deploy down {deployment.typed}` ends it.")
    _check(deployment, nodes, secure)
    for one in range(port, port + nodes + 1):
        _check_free(one)
    deployment.quiet_here()
    try:
        _start(deployment, nodes, Address(HOST, port, secure), tell)
    except BaseException:
        end_federation(deployment)  # half of it is of no use
        raise


def _start(deployment: Deployment, nodes: int, address: Address, tell: Callable[[str], None]) -> None:
    here = processes(deployment)
    address.write(deployment)
    begun = here.start(
        "superlink", _superlink(deployment, address), log=deployment.logs / "superlink.log",
        environment=deployment.environment(), folder=deployment.root,
    )  # fmt: skip
    superlink = SuperLink(deployment, address)
    _wait(begun, deployment, lambda: _answers(superlink))
    tell(f"SuperLink  {address}  {'TLS' if address.secure else 'without TLS'}")
    if address.secure:
        for folder in map(deployment.node, range(nodes)):
            superlink.register(OwnConfig.of({"folder": str(folder)}).label, (folder / "node.pub").read_bytes())
    for client in range(nodes):
        start_node(deployment, client)
    for client in range(nodes):
        _wait(_named(here, f"node {client}"), deployment, lambda: _online(superlink) >= nodes)
    tell(f"nodes      {nodes} online")


def start_node(deployment: Deployment, client: int) -> Recorded:
    """Start the SuperNode of a client."""
    address = Address.read(deployment)
    return processes(deployment).start(
        f"node {client}", _supernode(deployment, address, client), log=deployment.logs / f"node-{client}.log",
        environment=deployment.environment() | {TRY_UNTIL: str(time.time() + START_SECONDS)},
        folder=deployment.node(client),
    )  # fmt: skip


def _superlink(deployment: Deployment, address: Address) -> list[str]:
    certs = deployment.certs
    tls = ["--ssl-ca-certfile", f"{certs / 'ca.crt'}", "--ssl-certfile", f"{certs / 'server.crt'}"]
    tls += ["--ssl-keyfile", f"{certs / 'server.key'}", "--enable-supernode-auth"]
    return [
        str(Path(sys.executable).with_name("flower-superlink")),
        *("--host", address.host, "--port", str(address.port), "--database", str(deployment.database)),
        *(tls if address.secure else ["--insecure"]),
        "--disable-runtime-dependency-installation",
    ]


def _supernode(deployment: Deployment, address: Address, client: int) -> list[str]:
    """With Flower's own check of the app's signature, if there is a key; apps are started by our executor."""
    folder, certs = deployment.node(client), deployment.certs
    secret = folder / "executor.secret"
    if not secret.is_file():
        secret.touch(mode=0o600)
        secret.write_bytes(secrets.token_hex(32).encode())
    tls = ["--root-certificates", f"{certs / 'ca.crt'}", "--auth-supernode-private-key", f"{folder / 'node.key'}"]
    tls += ["--trusted-entities", f"{certs / 'trusted.yaml'}"]
    return [
        *(sys.executable, "-m", "fnrfl.flower.supernode", "--superlink", str(address)),
        *(tls if address.secure else ["--insecure"]),
        *("--host", HOST, "--port", str(address.port + 1 + client)),
        *("--isolation", "process", "--superexec-auth-secret-file", str(secret)),
        *("--node-config", f'folder="{folder}"'),
    ]


def end_federation(deployment: Deployment) -> list[str]:
    """End every process of a deployment; those that had to be killed."""
    return processes(deployment).stop()


def _check(deployment: Deployment, nodes: int, secure: bool) -> None:
    """What must be there before anything is started."""
    there = len(deployment.nodes)
    if not 1 <= nodes <= there:
        raise ConfigError(f"{nodes} nodes were asked for, and {deployment.root}/nodes has {there}. Give 1 to {there}.")
    wanted = [deployment.certs / "server.crt", *(deployment.node(n) / "node.key" for n in range(nodes))]
    missing = [path for path in wanted if not path.is_file()]
    if secure and missing:
        raise ConfigError(f"{missing[0]} is not there. Make keys with: fnrfl deploy certs {deployment.typed}")
    if '"' in str(deployment.root):
        raise ConfigError(f"The path {deployment.root} has a quotation mark in it, which Flower cannot read. Move it.")


def _check_free(port: int) -> None:
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((HOST, port))
        except OSError:
            raise ConfigError(f"Something else listens on {HOST}:{port}. Give another port with --port.") from None


def _named(here: Processes, name: str) -> Recorded:
    return next(one for one in here.recorded if one.name == name)


def _answers(superlink: SuperLink) -> bool:
    import httpx

    try:
        superlink.nodes()
    except httpx.TransportError as error:
        if "CERTIFICATE" in str(error):
            raise FnrflError(f"The server's certificate is not valid ({error}). Make new keys.") from None
        return False
    return True


def _online(superlink: SuperLink) -> int:
    return sum(one.status == "online" for one in superlink.nodes())


def _wait(process: Recorded, deployment: Deployment, ready: Callable[[], bool]) -> None:
    """Until something is ready; a process that ends before is an error with the end of its log."""
    until = time.monotonic() + START_SECONDS
    while not ready():
        log = deployment.logs / f"{process.name.replace(' ', '-')}.log"
        if not process.alive:
            told = " ".join(log.read_text(errors="replace").split()[-60:])
            raise FnrflError(f"The process {process.name!r} has ended. The end of {log}: {told}")
        if time.monotonic() > until:
            raise FnrflError(f"The process {process.name!r} is not up after {START_SECONDS:.0f} s. Look into {log}.")
        time.sleep(0.2)
