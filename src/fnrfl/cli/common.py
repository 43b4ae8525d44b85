"""Options, the console, tables and texts that commands share."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fnrfl.cli.commands import PlainGroup, print_answer, wrapped
from fnrfl.core.errors import ConfigError
from fnrfl.rundir.interrupt import OutputClosed

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 100  # columns of a paragraph, however wide the terminal is


def command_group(help: str, **more: Any) -> typer.Typer:
    """Commands under one name."""
    settings = {"help_option_names": ["-h", "--help"]}
    # No markup: brackets in the help mean optional arguments.
    return typer.Typer(
        help=help, cls=PlainGroup, no_args_is_help=True, rich_markup_mode=None, context_settings=settings, **more
    )


app = command_group(
    "Federated learning for skewed data.",
    epilog="`fnrfl COMMAND --help` has examples. `fnrfl run` alone runs the embedded example, in seconds.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Quiet = Annotated[bool, Option("--quiet", "-q", help="Say nothing but errors.")]
Json = Annotated[bool, Option("--json", help="Print the result as one JSON object; the rest goes to stderr.")]
Trust = Annotated[
    bool, Option("--trust", help="Run the code (module:function) that a recipe or a run names; it is remembered.")
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace a run that is already there.")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", show_default=False, help="Any of `fnrfl list keys`.")
]
RunDir = Annotated[Path, Argument(metavar="RUN_DIR", show_default=False, help="A folder made by `fnrfl run`.")]
Checkpoints = Annotated[
    float, Option("--checkpoint-every", metavar="SECONDS", min=0, help="How often to save what `fnrfl resume` needs.")
]
Metric = Annotated[
    str | None,
    Option(
        "--metric", metavar="NAME", show_default="see docs/metrics.md",
        help="What is compared and comes first: `fnrfl list metrics`, or module:function.",
    ),
]  # fmt: skip
Log = Annotated[
    list[str] | None,
    Option("--log", metavar="LOGGER", help="Also log to tensorboard, mlflow or wandb, offline; may be repeated."),
]


def _version(asked: bool) -> None:
    if asked:
        from fnrfl import __version__

        typer.echo(f"fnrfl {__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None: ...


def recipe_and_overrides(recipe: str | None, overrides: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """Which word is the recipe, wherever it stands, and which are key=value."""
    words = [word for word in (recipe, *(overrides or ())) if word is not None]
    recipes = [word for word in words if "=" not in word or os.path.isfile(word)]
    if len(recipes) > 1:
        raise ConfigError(
            f'"{recipes[0]}" and "{recipes[1]}" cannot both be the recipe. Give one, and changes to it as key=value.'
        )
    return recipes[0] if recipes else None, [word for word in words if word not in recipes]


def console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """Where people read: no markup in what they typed, no colours in a pipe."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise OutputClosed

        def print(self, *said: Any, **how: Any) -> None:
            """Print as usual, but break text at words where a terminal would break it anywhere."""
            fits = self.is_terminal and not how.get("end")
            super().print(*(wrapped(one, self.width) if fits and isinstance(one, str) else one for one in said), **how)

    return Screen(stderr=stderr, quiet=quiet, highlight=False, markup=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Print the answer as one JSON object."""
    print_answer(json.dumps(value, allow_nan=False))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns, folded to fit a terminal; in a pipe one row is one line."""
    screen = console()
    if screen.is_terminal:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for place in range(len(rows[0])):
            table.add_column(no_wrap=not place, overflow="fold")  # names stay whole
        for row in rows:
            table.add_row(*map(Text, row))
        screen.print(table, soft_wrap=False)
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def paragraph(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """Text in lines that fit, the first and the others with these indents; a word that does not fit is broken."""
    rest = first if rest is None else rest
    fitting = max(20, min(width, WIDEST))
    return textwrap.wrap(text, fitting, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def print_leaks(leaks: Sequence[str], *, quiet: bool = False, stderr: bool = False) -> None:
    """Whatever comes from a run with leaks says so."""
    if leaks:
        console(quiet=quiet, stderr=stderr).print(f"leak: {', '.join(leaks)}")


def print_notes(notes: Sequence[str], *, quiet: bool = False) -> None:
    """What one should know beside a result; on stderr, so that what a pipe carries stays what it is."""
    for note in notes:
        console(quiet=quiet, stderr=True).print(f"note: {note}")


def quoted(word: str | Path) -> str:
    """A word or a path as it is typed in a shell."""
    return shlex.quote(str(word))
