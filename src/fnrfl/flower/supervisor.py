"""Start, find, use and end a federation here: a SuperLink, and for every client a SuperNode and its executor.

A record has a process's number and the time of its start, so that a number that the system has given to another
process since is never touched. What these processes start ends with them: Flower's programs and the node's worker watch
the process that they were started for, and `stop` looks for those that work in the deployment's folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.flower.deployment import FLOWER_QUIET, Address, Deployment, NodeSettings
from fnrfl.flower.progress import Progress, read_progress
from fnrfl.rundir import files

HOST = "127.0.0.1"
START_SECONDS = 90.0  # seconds until a process must be up: two cores that start four of them are slow
GRACE = 8.0  # seconds that processes have to end by themselves
PROGRAMS = ("flower-superlink", "flower-supernode", "flower-superexec", "flwr-", "fnrfl.flower.worker")
SIGNER = "fnrfl-deploy"  # the name of the deployment's key in `trusted.yaml`
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
    listed = json.loads(file.read_text()) if file.is_file() else []
    return [Recorded(one["name"], one["pid"], float(one["started"])) for one in listed]


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
    _check(deployment, nodes, port, secure, listen)
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


def _check(deployment: Deployment, nodes: int, port: int, secure: bool, listen: str) -> None:
    """Raise if something that a federation needs is not there."""
    there, root, typed = len(deployment.nodes), deployment.root, deployment.typed
    needed = [deployment.certs / "server.crt", *(folder / "node.pub" for folder in deployment.nodes)]
    missing = next((path for path in needed if not path.is_file()), None) if secure else None
    taken = next((one for one in range(port, port + nodes + 1) if listens(HOST, one)), None)
    for broken, reason in (
        (alive(deployment), f"{root} is running already. `fnrfl deploy down {typed}` ends it."),
        (not 0 <= nodes <= there, f"{nodes} nodes were asked for, and {root}/nodes has {there}. Give 1 to {there}."),
        (missing, f"{missing} is not there. Make keys with: fnrfl deploy certs {typed}"),
        ('"' in str(root), f"The path {root} has a quotation mark in it, which Flower cannot read. Move it."),
        (listen != HOST and not secure, f"A server that listens on {listen} must have TLS. Leave --insecure out."),
        (taken, f"Something else listens on {HOST}:{taken}. Give another port with --port."),
    ):
        if broken:
            raise ConfigError(reason)


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


# -- Flower's command `flwr` -------------------------------------------------------------------------------------------


def _command(*words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("flwr")), *words, "deployment"]


def flwr(deployment: Deployment, *words: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run `flwr WORDS deployment OPTIONS --format json`; return what it prints, or raise what it says went wrong."""
    address, command = Address.read(deployment), [*_command(*words), *options, "--format", "json"]
    done = subprocess.run(command, env=deployment.environment(), capture_output=True, text=True)
    try:
        printed: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        printed = {"error-message": (done.stderr or done.stdout)[-500:]}
    if not printed.get("success"):
        why = " ".join(str(printed.get("error-message", "no reason given")).split())
        raise FnrflError(
            f"The SuperLink at {address} has refused `flwr {' '.join(words[:2])}`, or does not answer: {why} "
            "`fnrfl deploy status` shows what runs."
        )
    return printed


def num_online(deployment: Deployment) -> tuple[int, int]:
    """Return how many nodes are online, and how many are registered."""
    status = [node["status"] for node in flwr(deployment, "supernode", "list")["nodes"]]
    return status.count("online"), len(status) - status.count("unregistered")


def register_nodes(deployment: Deployment, labels: Mapping[Path, str]) -> None:
    """Let nodes in by their public keys, each under its label; those that are registered stay so."""
    refusals = []
    for folder, label in labels.items():
        try:
            flwr(deployment, "supernode", "register", str(folder / "node.pub"), options=("--name", label))
        except FnrflError as error:  # perhaps because it is registered
            refusals.append(error)
    if refusals and num_online(deployment)[1] < len(labels):
        raise refusals[-1]


def run_app(deployment: Deployment, config: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Sign the app, run it and tell what it prints, until it ends; raise if it has not completed."""
    Address.read(deployment)
    Progress("starting", deployment.home)  # until the server's own begins
    signed = (deployment.certs / "app.key").is_file()
    app = store_signed_app(deployment) if signed else str(deployment.app)
    values = deployment.home / "run.toml"
    files.write(values, "".join(f"{k} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in config.items()))
    number = str(flwr(deployment, "run", app, options=("--run-config", str(values)))["run-id"])
    try:
        environment = deployment.environment() | {"PYTHONUNBUFFERED": "1"}
        following = [*_command("log", number), "--stream"]
        with subprocess.Popen(
            following, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
        ) as log:
            failed = False  # after that, the log has Flower's traceback; what went wrong is in the run's status
            for line in log.stdout or ():
                failed = failed or "ServerApp raised an exception" in line
                tell("" if failed else line)
    except KeyboardInterrupt as stop:
        flwr(deployment, "stop", number)
        stop.add_note("The run was stopped; `fnrfl deploy run DIR --resume RUN_DIR` goes on with it.")
        raise
    (run,) = flwr(deployment, "list", options=("--run-id", number))["runs"]
    if run["status"] != "finished:completed":
        known, whole = read_progress(deployment.home) or {}, _log(deployment, "superlink")
        why = known.get("error") or f"{run['status-details'] or 'no reason given'} ({run['status']})."
        on = known.get("run_dir") and (Path(known["run_dir"]) / "checkpoint.json").is_file()
        way = f" `fnrfl deploy run {deployment.typed} --resume {shlex.quote(known['run_dir'])}` goes on." if on else ""
        raise FnrflError(f"{why}{way} {whole} may say more.")


def store_signed_app(deployment: Deployment) -> str:
    """Put the app and its signature into the SuperLink's database, from where nodes are sent both; return its name.

    Flower has no command for this, since only its hub signs apps. So this is the one place that uses Flower's inner
    parts; `flower-supernode --trusted-entities` checks the signature.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    os.environ.update(FLOWER_QUIET | {"FLWR_HOME": str(deployment.home)})  # read when Flower is imported
    from flwr.cli.build import build_fab_from_disk
    from flwr.common.constant import NOOP_FLWR_AID
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
    from flwr.supercore.fab import Fab
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    content, now = build_fab_from_disk(deployment.app), int(time.time())
    digest = hashlib.sha256(content)
    key = load_ssh_private_key((deployment.certs / "app.key").read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    signature = urlsafe_b64encode(key.sign(now.to_bytes(8, "big") + digest.digest())).rstrip(b"=").decode()
    checks = {SIGNER: json.dumps({"signature": signature, "signed_at": now}), "valid_license": "Valid"}
    project = tomllib.loads((deployment.app / "pyproject.toml").read_text(encoding="utf-8"))
    name = f"@{project['tool']['flwr']['app']['publisher']}/{project['project']['name']}"
    database = str(deployment.database)
    state = LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database)).state()
    fab = Fab(digest.hexdigest(), content, checks)
    state.store_app(fab, NOOP_FEDERATION_ID, name, TaskType.SERVER_APP, NOOP_FLWR_AID, is_hub_app=True)
    return name
