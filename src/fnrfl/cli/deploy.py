"""`fnrfl deploy`: the same recipe on a network, with Flower."""

from __future__ import annotations

import shlex
import time
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fnrfl.cli.common import Overrides, Trust, command_group, console, print_table, quoted
from fnrfl.core.errors import ConfigError

if TYPE_CHECKING:
    from fnrfl.flower.deployment import Deployment

deploy = command_group("Run a recipe over a network, with Flower.")

Folder = Annotated[Path, Argument(metavar="DIR", show_default=False, help="Made by `fnrfl deploy init`.")]
LATE = 20.0  # seconds after which a node that has not answered is shown again
Nodes = Annotated[int | None, Option("--nodes", min=1, help="How many; as many as the recipe has clients.")]


def _deployment(folder: Path) -> Deployment:
    """The deployment of a folder, where Flower is installed."""
    if find_spec("flwr") is None or find_spec("psutil") is None:
        raise ConfigError("Flower is not installed. Install it with: pip install 'fnrfl[flower]'")
    from fnrfl.flower.deployment import Deployment

    return Deployment.at(folder)


@deploy.command("init")
def init(
    folder: Annotated[Path, Argument(metavar="DIR", show_default=False, help="A new folder.")],
    recipe: Annotated[str, Argument(metavar="RECIPE", show_default=False, help="A name or a TOML file.")],
    overrides: Overrides = None,
    nodes: Nodes = None,
    trust: Trust = False,
) -> None:
    """Write a Flower app from a recipe, and a folder for each node.

    fnrfl deploy init federation digits clients=3
    """
    from fnrfl.config import load
    from fnrfl.flower.app_files import write_app

    made = write_app(folder, load(recipe, overrides or (), trust=trust), nodes or 0)
    console().print(f"app    {quoted(folder / 'app')}")
    console().print(f"nodes  {len(made.nodes)}, in {quoted(folder / 'nodes')}")


@deploy.command("certs")
def certs(
    folder: Folder,
    nodes: Nodes = None,
    host: Annotated[list[str] | None, Option(metavar="NAME", help="Of the server; may be repeated.")] = None,
) -> None:
    """Make certificates, node keys and the key that signs the app.

    fnrfl deploy certs federation
    """
    there = _deployment(folder)
    from fnrfl.flower.certificates import write_certificates

    for path in write_certificates(there, nodes or len(there.nodes), host or ()):
        console().print(quoted(path.relative_to(there.root)))


@deploy.command("up")
def up(
    folder: Folder,
    nodes: Nodes = None,
    port: Annotated[int, Option("--port", min=1024, max=65000, help="The server's; nodes take the next.")] = 8000,
    listen: Annotated[str, Option(metavar="ADDRESS", help="Of this machine; 0.0.0.0: all.")] = "127.0.0.1",
    server_only: Annotated[bool, Option("--server-only", help="Nodes are on other machines.")] = False,
    insecure: Annotated[bool, Option("--insecure", help="Without TLS, node keys and signatures.")] = False,
) -> None:
    """Start a server and its nodes here, and wait until all are there.

    They use TLS and node keys, which `fnrfl deploy certs` has made.

    fnrfl deploy up federation --port 8000
    """
    there = _deployment(folder)
    from fnrfl.flower.supervisor import start_federation

    count = 0 if server_only else nodes or len(there.nodes)
    start_federation(there, count, port, secure=not insecure, tell=console().print, listen=listen)


@deploy.command("run")
def run(
    folder: Folder,
    overrides: Overrides = None,
    out: Annotated[Path | None, Option("--out", "-o", metavar="RUN_DIR", help="Where the run goes.")] = None,
    resume: Annotated[Path | None, Option(metavar="RUN_DIR", help="Go on with an interrupted run.")] = None,
    test: Annotated[Path | None, Option(help="The server's test set, where nodes are sites.")] = None,
    trust: Trust = False,
) -> None:
    """Sign the app, run it over the nodes and follow it.

    fnrfl deploy run federation rounds=20 algorithm=scaffold
    """
    there = _deployment(folder)
    from fnrfl.flower.app_files import check_before_run
    from fnrfl.flower.supervisor import run_app

    check_before_run(there, overrides or (), resume, test, trust=trust)
    paths = {"out": out, "resume": resume, "test": test}
    config = {key: str(path.resolve()) if path else "" for key, path in paths.items()}
    run_app(there, config | {"overrides": shlex.join(overrides or ())}, lambda text: typer.echo(text, nl=False))


@deploy.command("status")
def status(
    folder: Folder,
    follow: Annotated[bool, Option("--follow", help="Go on until the run has ended.")] = False,
    json: Annotated[bool, Option("--json", help="Print JSON; with --follow, a line for each change.")] = False,
) -> None:
    """Show the processes of a deployment, its nodes, and how far its run has come.

    fnrfl deploy status federation --follow
    """
    there = _deployment(folder)
    from fnrfl.flower.supervisor import num_online, recorded

    records = [(one.name, str(one.pid), "running" if one.handle else "has ended") for one in recorded(there)]
    up = any(name == "superlink" and state == "running" for name, _, state in records)
    online, registered = num_online(there) if up else (0, 0)
    facts = {"processes": records, "nodes_online": online, "nodes_registered": registered}
    if not json:
        print_table(records)
        console().print(f"nodes online: {online} of {registered}" if up else "no server is running")
    failed = _show_run(there.home, facts if json else None, follow=follow and up)
    whole = up and all(state == "running" for _, _, state in records)
    raise typer.Exit(0 if whole and not (failed and follow) else 1)


def _show_run(home: Path, facts: dict[str, Any] | None, *, follow: bool) -> bool:
    """Show how far a run has come, with `facts` as JSON; return whether it has failed."""
    from fnrfl.flower.progress import read_progress

    shown: object = None
    while True:
        run = read_progress(home)
        known = run or {"state": "none"}
        late = known.get("waiting") and time.time() - known["since"] > LATE
        now = run if facts else [known.get(key) for key in ("state", "phase", "round")] + [late]
        if now != shown or shown is None:
            typer.echo("\n".join(_run_in_words(run)) if facts is None else dumps(facts | {"run": run}))
        shown = now
        if not follow or known["state"] in ("finished", "failed"):
            return bool(known["state"] == "failed")
        time.sleep(1.0)


def _run_in_words(run: dict[str, Any] | None) -> list[str]:
    from fnrfl.flower.progress import in_words

    if run is None:
        return ["no run yet"]
    where = f" {quoted(run['run_dir'])}" if run.get("run_dir") else ""
    return [f"run {run['state']}{where}", *in_words(run), *([run["error"]] if "error" in run else [])]


@deploy.command("down")
def down(folder: Folder) -> None:
    """End every process of a deployment, and all that they have started.

    fnrfl deploy down federation
    """
    there = _deployment(folder)
    from fnrfl.flower.supervisor import stop

    killed = stop(there)
    console().print(f"ended{f'; killed: {killed}' if killed else ''}")
