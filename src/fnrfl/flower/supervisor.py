"""Start, find and end a federation on this machine: a SuperLink, and for every client a SuperNode and its executor.

A record has a process's number and the time of its start, so that a number that the system has given to another
process since is never touched. What these processes start ends with them: Flower's programs and the node's worker watch
the process that they were started for, and `stop` looks for those that work in the deployment's folder.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.flower.deployment import Address, Deployment
from fnrfl.flower.node_settings import NodeSettings
from fnrfl.flower.superlink import num_online, register_nodes
from fnrfl.rundir import files

HOST = "127.0.0.1"
START_SECONDS = 90.0  # seconds until a process must be up: two cores that start four of them are slow
GRACE = 8.0  # seconds that processes have to end by themselves
PROGRAMS = ("flower-superlink", "flower-supernode", "flower-superexec", "flwr-", "fnrfl.flower.worker")
SAME_START = 5.0  # seconds by which a process's start may seem to change when the clock is set


@dataclass(frozen=True)
class Recorded:
    """A process that was started."""

    name: str
    pid: int
    started: float

    @property
    def handle(self) -> psutil.Process | None:
        """The process, or None once it has ended."""
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.pid)
            if abs(found.create_time() - self.started) < SAME_START and found.status() != psutil.STATUS_ZOMBIE:
                return found
        return None


def recorded(deployment: Deployment) -> list[Recorded]:
    """Return all processes that were started and not ended by `stop`."""
    file = deployment.home / "processes.json"
    if not file.is_file():
        return []
    try:
        return [Recorded(one["name"], one["pid"], float(one["started"])) for one in json.loads(file.read_text())]
    except (ValueError, TypeError, KeyError) as error:
        raise FnrflError(f"{file} is not a list of processes ({error}). Remove it.") from None


def alive(deployment: Deployment) -> list[Recorded]:
    """Return the recorded processes that run."""
    return [one for one in recorded(deployment) if one.handle]


def _record(deployment: Deployment, records: Iterable[Recorded]) -> None:
    deployment.home.mkdir(parents=True, exist_ok=True)
    files.write(deployment.home / "processes.json", json.dumps([asdict(one) for one in records], indent=1))


def start(deployment: Deployment, name: str, command: Sequence[str], folder: Path) -> Recorded:
    """Start a process in a new session, whose output and files only this user can read, and record it."""
    deployment.logs.mkdir(parents=True, exist_ok=True)
    with open(os.open(_log(deployment, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        started = subprocess.Popen(
            [str(Path(sys.executable).with_name(command[0])), *command[1:]], stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, env=deployment.environment(), cwd=folder, start_new_session=True, umask=0o077,
        )  # fmt: skip
    one = Recorded(name, started.pid, psutil.Process(started.pid).create_time())
    _record(deployment, [*(other for other in alive(deployment) if other.name != name), one])
    return one


def _log(deployment: Deployment, name: str) -> Path:
    return deployment.logs / f"{name.replace(' ', '-')}.log"


def stop(deployment: Deployment) -> int:
    """End the recorded processes and all that they have started; return how many had to be killed."""
    family = _family(deployment)
    _signal(family, signal.SIGTERM)
    left = {*psutil.wait_procs(family, GRACE)[1], *_family(deployment)}
    _signal(left, signal.SIGKILL)
    psutil.wait_procs(left, GRACE)
    _record(deployment, alive(deployment))
    return len(left)


def _family(deployment: Deployment) -> set[psutil.Process]:
    """Return the recorded processes, what they have started, and what a killed one has left at work in the folder."""
    family = {handle for one in recorded(deployment) if (handle := one.handle)}
    for handle in [*family]:
        with suppress(psutil.NoSuchProcess):
            family |= set(handle.children(recursive=True))
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        folder, words = process.info["cwd"], " ".join(process.info["cmdline"] or ())
        if folder and Path(folder).is_relative_to(deployment.root) and any(name in words for name in PROGRAMS):
            family |= {process} if process.info["status"] != psutil.STATUS_ZOMBIE else set()
    return family


def _signal(handles: Iterable[psutil.Process], which: signal.Signals) -> None:
    for handle in handles:
        with suppress(psutil.NoSuchProcess):
            handle.send_signal(which)


# -- a federation -----------------------------------------------------------------------------------------------------


def start_federation(
    deployment: Deployment, nodes: int, port: int, *, secure: bool, tell: Callable[[str], None], listen: str = HOST
) -> None:
    """Start the SuperLink and the nodes, and wait until all are online; 0 nodes: they are on other machines.

    The SuperLink listens on an address of this machine, 0.0.0.0 for all of them.
    """
    _check(deployment, nodes, secure, listen)
    if taken := [one for one in range(port, port + nodes + 1) if listens(HOST, one)]:
        raise ConfigError(f"Something else listens on {HOST}:{taken[0]}. Give another port with --port.")
    address = Address(HOST if listen == "0.0.0.0" else listen, port, secure)
    address.write(deployment)
    if nodes:  # nodes that were killed are still online in the old database, and their keys would be refused
        for file in deployment.home.glob(f"{deployment.database.name}*"):
            file.unlink()
    try:
        start_superlink(deployment, listen)
        tell(f"SuperLink  {address}  {'TLS' if address.secure else 'without TLS'}")
        if address.secure:
            labels = {folder: NodeSettings.of({"folder": str(folder)}).label for folder in deployment.nodes}
            register_nodes(deployment, labels)
        started = [start_node(deployment, client) for client in range(nodes)]
        if nodes:
            _wait(deployment, started, lambda: num_online(deployment)[0] >= nodes)
            tell(f"nodes      {nodes} online")
    except BaseException:
        stop(deployment)  # half of it is of no use
        raise


def start_superlink(deployment: Deployment, listen: str = HOST) -> None:
    """Start the SuperLink, and wait until it answers."""
    address, certs = Address.read(deployment), deployment.certs
    tls = ["--ssl-ca-certfile", f"{certs / 'ca.crt'}", "--ssl-certfile", f"{certs / 'server.crt'}"]
    tls += ["--ssl-keyfile", f"{certs / 'server.key'}", "--enable-supernode-auth"]
    command = [
        *("flower-superlink", "--host", listen, "--port", str(address.port)),
        *("--database", str(deployment.database), "--disable-runtime-dependency-installation"),
        *(tls if address.secure else ["--insecure"]),
    ]
    link = start(deployment, "superlink", command, deployment.root)
    _wait(deployment, [link], lambda: listens(address.host, address.port))


def start_node(deployment: Deployment, client: int) -> Recorded:
    """Start the SuperNode of a client, and the executor that starts the app for each of its messages.

    The two share a secret, so that no other user of this machine can take the node's messages. The SuperNode checks the
    app's signature, if there is a key.
    """
    address, folder, certs = Address.read(deployment), deployment.node(client), deployment.certs
    secret = folder / "executor.secret"
    if not secret.is_file():
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
    tls = ["--root-certificates", f"{certs / 'ca.crt'}", "--auth-supernode-private-key", f"{folder / 'node.key'}"]
    tls += ["--trusted-entities", f"{certs / 'trusted.yaml'}"]
    shared, port = ["--superexec-auth-secret-file", str(secret)], str(address.port + 1 + client)
    node = [
        *("flower-supernode", "--superlink", str(address), *(tls if address.secure else ["--insecure"])),
        *("--host", HOST, "--port", port, "--isolation", "process", *shared),
        *("--node-config", f'folder="{folder}"'),
    ]
    started = start(deployment, f"node {client}", node, folder)
    executor = ["flower-superexec", "--insecure", "--runtime-api-address", f"{HOST}:{port}", *shared]
    start(deployment, f"executor {client}", [*executor, "--parent-pid", str(started.pid)], folder)
    return started


def _check(deployment: Deployment, nodes: int, secure: bool, listen: str) -> None:
    """Raise if something that a federation needs is not there."""
    there = len(deployment.nodes)
    wanted = [deployment.certs / "server.crt", *(folder / "node.pub" for folder in deployment.nodes)]
    missing = [path for path in wanted if not path.is_file()]
    if alive(deployment):
        raise ConfigError(f"{deployment.root} is running already. `fnrfl deploy down {deployment.typed}` ends it.")
    if not 0 <= nodes <= there:
        raise ConfigError(f"{nodes} nodes were asked for, and {deployment.root}/nodes has {there}. Give 1 to {there}.")
    if secure and missing:
        raise ConfigError(f"{missing[0]} is not there. Make keys with: fnrfl deploy certs {deployment.typed}")
    if '"' in str(deployment.root):
        raise ConfigError(f"The path {deployment.root} has a quotation mark in it, which Flower cannot read. Move it.")
    if listen != HOST and not secure:
        raise ConfigError(f"A server that listens on {listen} must have TLS and node keys. Leave --insecure out.")


def listens(host: str, port: int) -> bool:
    """Return whether a program listens on a port."""
    with socket.socket() as door:
        return door.connect_ex((host, port)) == 0


def _wait(deployment: Deployment, processes: Sequence[Recorded], ready: Callable[[], bool]) -> None:
    """Wait until something is ready; a process that ends before is an error with the end of its log."""
    until = time.monotonic() + START_SECONDS
    while not ready():
        for one in processes:
            log = _log(deployment, one.name)
            if not one.handle or time.monotonic() > until:
                state = f"is not up after {START_SECONDS:.0f} s" if one.handle else "has ended"
                end = " ".join(log.read_text(errors="replace").split()[-60:])
                raise FnrflError(f"The process {one.name!r} {state}. The end of {log}: {end}")
        time.sleep(0.2)
