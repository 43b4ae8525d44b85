"""`fnrfl deploy`: the same recipe on a network, with Flower."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fnrfl.cli.common import Overrides, Trust, command_group, console, print_table, quoted
from fnrfl.core.errors import ConfigError

if TYPE_CHECKING:
    from fnrfl.flower.deployment import Deployment

deploy = command_group("Run a recipe over a network, with Flower.")

Folder = Annotated[Path, Argument(metavar="DIR", show_default=False, help="Made by `fnrfl deploy init`.")]
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
def status(folder: Folder) -> None:
    """Show the processes of a deployment, and which nodes are online.

    fnrfl deploy status federation
    """
    there = _deployment(folder)
    from fnrfl.flower.supervisor import num_online, recorded

    records = [(one.name, one.pid, one.handle is not None) for one in recorded(there)]
    if not records:
        console().print("nothing is running")
        raise typer.Exit(1)
    print_table([(name, str(pid), "running" if alive else "has ended") for name, pid, alive in records])
    if any(name == "superlink" and alive for name, _, alive in records):
        online, registered = num_online(there)
        console().print(f"nodes online: {online} of {registered}")
    raise typer.Exit(0 if all(alive for _, _, alive in records) else 1)


@deploy.command("down")
def down(folder: Folder) -> None:
    """End every process of a deployment, and all that they have started.

    fnrfl deploy down federation
    """
    there = _deployment(folder)
    from fnrfl.flower.supervisor import stop

    killed = stop(there)
    console().print(f"ended{f'; killed: {killed}' if killed else ''}")
