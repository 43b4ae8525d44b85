"""Flower's command `flwr` on the SuperLink of a deployment: registers nodes, runs the signed app and follows it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import tomllib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fnrfl.core.errors import FnrflError
from fnrfl.flower.deployment import FLOWER_QUIET, Address, Deployment
from fnrfl.rundir import files

SIGNER = "fnrfl-deploy"  # the name of the deployment's key in `trusted.yaml`


def _command(*words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("flwr")), *words, "deployment"]


def flwr(deployment: Deployment, *words: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run `flwr WORDS deployment OPTIONS --format json`; return what it prints, or raise what it says went wrong."""
    address = Address.read(deployment)
    command = [*_command(*words), *options, "--format", "json"]
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
    refusal: FnrflError | None = None
    for folder, label in labels.items():
        try:
            flwr(deployment, "supernode", "register", str(folder / "node.pub"), options=("--name", label))
        except FnrflError as error:  # perhaps because it is registered
            refusal = error
    if refusal and num_online(deployment)[1] < len(labels):
        raise refusal


def run_app(deployment: Deployment, config: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Sign the app, run it and tell what it prints, until it ends; raise if it has not completed."""
    Address.read(deployment)
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
            for line in log.stdout or ():
                tell(line)
    except KeyboardInterrupt as stop:
        flwr(deployment, "stop", number)
        stop.add_note("The run was stopped; `fnrfl deploy run DIR --resume RUN_DIR` goes on with it.")
        raise
    (run,) = flwr(deployment, "list", options=("--run-id", number))["runs"]
    if run["status"] != "finished:completed":
        why = run["status-details"] or "no reason given"
        raise FnrflError(f"The run has not completed ({run['status']}): {why}")


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
