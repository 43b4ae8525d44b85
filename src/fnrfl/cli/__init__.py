"""The command line: it parses and delegates, and decides nothing."""

from __future__ import annotations

import os
import sys

from fnrfl.cli import look, train, use
from fnrfl.cli.common import app
from fnrfl.cli.keywords import KeyValueCommand

__all__ = ["app", "main"]

app.command(cls=KeyValueCommand)(train.run)
app.command(cls=KeyValueCommand)(train.compare)
app.command()(train.resume)
app.add_typer(look.scenario, name="scenario")
app.command()(use.report)
app.command()(use.evaluate)
app.command()(use.predict)
app.add_typer(look.data, name="data")
app.command("list")(look.list_)
app.command()(look.doctor)


def main() -> None:
    """The `fnrfl` command."""
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show must not be an error
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except SystemExit as end:
        if end.code == 130:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130)  # an ordinary exit would wait for threads in the middle of training a client
        raise
