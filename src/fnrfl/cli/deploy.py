"""`fnrfl deploy`: the same recipe on a network, with Flower."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fnrfl.cli.common import (
    Debug,
    OverridesArgument,
    Trust,
    command_group,
    console,
    errors_in_words,
    print_table,
    quoted,
)
from fnrfl.core.errors import ConfigError, FnrflError

if TYPE_CHECKING:
    from fnrfl.flower.deployment import Deployment
    from fnrfl.flower.superlink import SuperLink

deploy = command_group("Run a recipe over a network, with Flower.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="Made by `fnrfl deploy init`.")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, help="How many; as many as the recipe has clients.")]


def _there(folder: Path) -> Deployment:
    """The deployment of a folder, where Flower is installed."""
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise ConfigError("Flower is not installed. Install it with: pip install 'fnrfl[flower]'")
    from fnrfl.flower.deployment import Deployment

    return Deployment.at(folder)


@deploy.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="A new folder.")],
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", show_default=False, help="A name or a TOML file.")],
    overrides: OverridesArgument = None,
    nodes: Nodes = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Write a Flower app from a recipe, and a folder for each node.

    fnrfl deploy init federation digits clients=3
    """
    from fnrfl.config import load
    from fnrfl.flower.app_files import write_app

    with errors_in_words(debug):
        made = write_app(folder, load(recipe, overrides or (), trust=trust), nodes or 0)
        screen = console()
        screen.print(f"app    {quoted(folder / 'app')}")
        screen.print(f"nodes  {len(made.nodes)}, in {quoted(folder / 'nodes')}")


@deploy.command("certs")
def certs(
    folder: Folder,
    nodes: Nodes = None,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="Of the server, as nodes call it; may be repeated."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Make certificates, node keys and the key that signs the app.

    fnrfl deploy certs federation
    """
    with errors_in_words(debug):
        there = _there(folder)
        from fnrfl.flower.certificates import write_certificates

        for path in write_certificates(there, nodes or len(there.nodes), host or ()):
            console().print(quoted(path.relative_to(there.root)))


@deploy.command("up")
def up(
    folder: Folder,
    nodes: Nodes = None,
    port: Annotated[int, typer.Option("--port", min=1024, max=65000, help="The server's; nodes take the next.")] = 8000,
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS", help="Of this machine; 0.0.0.0: all.")
    ] = "127.0.0.1",
    server_only: Annotated[bool, typer.Option("--server-only", help="Nodes are on other machines.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS, node keys and signatures.")] = False,
    debug: Debug = False,
) -> None:
    """Start a server and its nodes here, and wait until all are there.

    They use TLS and node keys, which `fnrfl deploy certs` has made.

    fnrfl deploy up federation --port 8000
    """
    with errors_in_words(debug):
        there = _there(folder)
        from fnrfl.flower import federating

        count = 0 if server_only else nodes or len(there.nodes)
        federating.start_federation(there, count, port, secure=not insecure, tell=console().print, listen=listen)


@deploy.command("run")
def run(
    folder: Folder,
    overrides: OverridesArgument = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="RUN_DIR", help="Where the run goes.")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN_DIR", help="Go on with a run that was interrupted.")
    ] = None,
    test: Annotated[
        Path | None, typer.Option("--test", help="The server's test set, where nodes bring data of their own.")
    ] = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Sign the app, run it over the nodes and follow it.

    fnrfl deploy run federation rounds=20 algorithm=scaffold
    """
    import shlex

    with errors_in_words(debug):
        there = _there(folder)
        from fnrfl.flower.app_files import check_before_run

        check_before_run(there, overrides or (), resume, test, trust=trust)
        link = _running(there)
        told = {"overrides": shlex.join(overrides or ())}
        paths = {"out": out, "resume": resume, "test": test}
        told |= {key: str(path.resolve()) if path else "" for key, path in paths.items()}
        with link.reached():
            number = link.start(told)
            try:
                for text in link.log(number):
                    typer.echo(text, nl=False)
            except KeyboardInterrupt as stop:
                link.stop(number)
                stop.add_note("The run was stopped; `fnrfl deploy run DIR --resume RUN_DIR` goes on with it.")
                raise
            status, how, why = link.status(number)
        if how != "completed":
            raise FnrflError(f"The run has not completed ({status}, {how or 'no end'}): {why or 'no reason given'}")


@deploy.command("status")
def status(folder: Folder, debug: Debug = False) -> None:
    """Show the processes of a deployment, and which nodes are online.

    fnrfl deploy status federation
    """
    with errors_in_words(debug):
        there = _there(folder)
        from fnrfl.flower.federating import processes

        records = processes(there).recorded
        if not records:
            console().print("nothing is running")
            raise typer.Exit(1)
        print_table([(one.name, str(one.pid), "running" if one.alive else "has ended") for one in records])
        if any(one.name == "superlink" and one.alive for one in records):
            link = _running(there)
            with link.reached():
                nodes = link.nodes()
            online = sum(node.status == "online" for node in nodes)
            console().print(f"nodes online: {online} of {len(nodes)}")
        raise typer.Exit(0 if all(one.alive for one in records) else 1)


@deploy.command("down")
def down(folder: Folder, debug: Debug = False) -> None:
    """End every process of a deployment, and all that they have started.

    fnrfl deploy down federation
    """
    with errors_in_words(debug):
        there = _there(folder)
        from fnrfl.flower import federating

        killed = federating.end_federation(there)
        console().print(f"ended{f'; killed: {len(killed)}' if killed else ''}")


def _running(there: Deployment) -> SuperLink:
    """The SuperLink of a deployment that is running."""
    there.quiet_here()
    from fnrfl.flower.deployment import Address
    from fnrfl.flower.superlink import SuperLink

    return SuperLink(there, Address.read(there))
