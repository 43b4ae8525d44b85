"""What all commands share: options, a console, tables, and errors in words."""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fnrfl.errors import ConfigError, FnrflError

if TYPE_CHECKING:
    from rich.console import Console

HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    help="Federated learning for skewed data.",
    epilog="`fnrfl COMMAND --help` has examples. `fnrfl run` alone runs the embedded example, in seconds.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # brackets in the help mean optional arguments, not markup
    pretty_exceptions_enable=False,
    context_settings=HELP,
)

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object; the rest goes to stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False, help="Any of `fnrfl list keys`.")
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="A folder made by `fnrfl run`.")]
Checkpoints = Annotated[
    float,
    typer.Option("--checkpoint-every", metavar="SECONDS", min=0, help="How often to save what `fnrfl resume` needs."),
]


def _version(asked: bool) -> None:
    if asked:
        from fnrfl import __version__

        typer.echo(f"fnrfl {__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
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

    return Console(stderr=stderr, quiet=quiet, highlight=False, markup=False, soft_wrap=True)


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


def print_leaks(leaks: Sequence[str], *, quiet: bool = False, stderr: bool = False) -> None:
    """Whatever comes from a run with leaks says so."""
    if leaks:
        console(quiet=quiet, stderr=stderr).print(f"leak: {', '.join(leaks)}")


@contextmanager
def errors_in_words(debug: bool = False) -> Iterator[None]:
    """One line on stderr and an exit code for whatever goes wrong: 2 bad input, 3 a failure, 130 stopped."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        typer.echo("fnrfl: stopped.", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # `fnrfl list keys | head`
        raise
    except Exception as error:
        if debug:
            raise
        typer.echo(f"fnrfl: {' '.join(_sentence(error).split())}", err=True)
        raise typer.Exit(error.exit_code if isinstance(error, FnrflError) else 3) from None


def _sentence(error: Exception) -> str:
    if isinstance(error, FnrflError):
        return str(error)
    if (system := from_system(error)) is not None:
        return f"{told_by_system(system)} Choose another place, or change who may write there."
    if isinstance(error, MemoryError):
        return "There is not enough memory. Set a smaller engine.clients_at_once, client.batch or model."
    return f"Unexpected {type(error).__name__}: {error}. --debug shows where; please report it."


def from_system(error: Exception) -> OSError | None:
    """What the system refused, if that is what went wrong; safetensors wraps it into an error of its own."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def told_by_system(error: OSError) -> str:
    """Its words, with the file where it is known."""
    where = f"{error.filename}: " if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{where}{error.strerror or error}.{' Make room.' if full else ''}"


def quoted(path: Path) -> str:
    """A path as it is typed in a shell."""
    return shlex.quote(str(path))
