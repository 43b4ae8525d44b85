"""The command line: it parses and delegates, and decides nothing."""

from __future__ import annotations

import atexit
import os
import sys

from fnrfl.cli import deploy, listing, look, train, use
from fnrfl.cli.commands import KeyValueCommand, PlainCommand
from fnrfl.cli.common import app
from fnrfl.rundir.interrupt import OutputClosed

__all__ = ["app", "main"]

app.command(cls=KeyValueCommand)(train.run)
app.command(cls=KeyValueCommand)(train.compare)
app.command()(train.resume)
app.add_typer(look.scenario, name="scenario")
app.command()(use.report)
app.command()(use.evaluate)
app.command()(use.predict)
app.add_typer(look.data, name="data")
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(use.reproduce)
app.add_typer(deploy.deploy, name="deploy")
app.command("list")(listing.list_)
app.command()(look.doctor)
for group in (app, look.scenario, look.data, deploy.deploy):
    for command in group.registered_commands:
        if not issubclass(command.cls or PlainCommand, PlainCommand):
            command.cls = PlainCommand


def main() -> None:
    """The `fnrfl` command."""
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show must not be an error
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code: object = 0
    try:
        app()
    except SystemExit as end:
        code = end.code
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except BrokenPipeError:
        code = OutputClosed.exit_code
    except (OSError, ValueError):  # closed in another way; there is nobody to tell
        pass
    if isinstance(code, int) and code > 128:
        atexit._run_exitfuncs()  # folders for what does not fit in memory
        os._exit(code)  # an ordinary exit would wait for threads in training, or for an output that was closed
    sys.exit(code)  # type: ignore[arg-type]
