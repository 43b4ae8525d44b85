"""What all commands share: options, a console, tables, and errors in words."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from fnrfl import usercode
from fnrfl.core.errors import ConfigError, FnrflError, from_system, out_of_memory, sentence
from fnrfl.rundir.interrupt import OutputClosed, exit_code, stoppable

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 100  # columns of a paragraph, however wide the terminal is
HELP = {"help_option_names": ["-h", "--help"]}


def command_group(help: str) -> typer.Typer:
    """Commands under one name."""
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None, context_settings=HELP)


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
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code (module:function) that a recipe or a run names; it is remembered.")
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False, help="Any of `fnrfl list keys`.")
]
RunDirArgument = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="A folder made by `fnrfl run`.")
]
Checkpoints = Annotated[
    float,
    typer.Option("--checkpoint-every", metavar="SECONDS", min=0, help="How often to save what `fnrfl resume` needs."),
]


MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric", metavar="NAME", show_default="see docs/metrics.md",
        help="What is compared and comes first: `fnrfl list metrics`, or module:function.",
    ),
]  # fmt: skip
Log = Annotated[
    list[str] | None,
    typer.Option("--log", metavar="LOGGER", help="Also log to tensorboard, mlflow or wandb, offline; may be repeated."),
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

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise OutputClosed

    return Screen(stderr=stderr, quiet=quiet, highlight=False, markup=False, soft_wrap=True)


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
    return textwrap.wrap(
        text,
        max(20, min(width, WIDEST)),
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_on_hyphens=False,
    )


def print_leaks(leaks: Sequence[str], *, quiet: bool = False, stderr: bool = False) -> None:
    """Whatever comes from a run with leaks says so."""
    if leaks:
        console(quiet=quiet, stderr=stderr).print(f"leak: {', '.join(leaks)}")


def print_notes(notes: Sequence[str], *, quiet: bool = False) -> None:
    """What one should know beside a result; on stderr, so that what a pipe carries stays what it is."""
    for note in notes:
        console(quiet=quiet, stderr=True).print(f"note: {note}")


_answers: list[TextIO] = []  # where the answer goes while stdout is kept free for it


def print_answer(text: str) -> None:
    """Print what was asked for: the JSON object, the table, the config."""
    typer.echo(text.removesuffix("\n"), file=_answers[-1] if _answers else None)


def is_terminal() -> bool:
    """Whether people read the answer as it comes."""
    return (_answers[-1] if _answers else sys.stdout).isatty()


@contextmanager
def stdout_for_the_answer() -> Iterator[None]:
    """Inside, stdout is for `print_answer` alone: what a user's own code prints goes to stderr."""
    _answers.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.pop()


@contextmanager
def errors_in_words(debug: bool = False, *, answers: bool = False) -> Iterator[None]:
    """One line on stderr and an exit code for whatever goes wrong: 2 bad input, 3 a failure, 128 + n by signal n.

    With `answers`, stdout is kept for the answer.
    """
    try:
        with stoppable(), stdout_for_the_answer() if answers else nullcontext():
            yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as stop:
        _say_stopped(stop)
        raise typer.Exit(exit_code(stop)) from None
    except BrokenPipeError:  # `fnrfl list keys | head`
        raise typer.Exit(OutputClosed.exit_code) from None
    except (Exception, SystemExit) as error:
        if debug or (isinstance(error, SystemExit) and usercode.where(error) is None):
            raise
        say(f"fnrfl: {' '.join(_sentence(error).split())}")
        raise typer.Exit(error.exit_code if isinstance(error, FnrflError) else 3) from None


@contextmanager
def how_to_go_on(words: Callable[[], str]) -> Iterator[None]:
    """Inside, whoever stops the command is told these words; they are asked for when it is stopped."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(words())
        raise


def _say_stopped(stop: KeyboardInterrupt) -> None:
    """Why it was stopped, and the notes of commands that know how to go on; nothing to an output that was closed."""
    notes = getattr(stop, "__notes__", [])
    closed = isinstance(stop, OutputClosed)
    if notes or not closed:
        say(" ".join(["fnrfl:", "the output was closed." if closed else "stopped.", *notes]))


def _sentence(error: BaseException) -> str:
    place = None if isinstance(error, FnrflError) else usercode.where(error)
    if isinstance(error, SystemExit):
        return f"Your own code has called sys.exit({error.code!r}) ({place}). Leave that out."
    if place is None or out_of_memory(error) or from_system(error) is not None:
        return sentence(error)
    return f"Your own code has failed ({type(error).__name__}: {error}; {place}). Correct it; --debug shows more."


def say(line: str) -> None:
    """A line on stderr, if anybody listens there."""
    with suppress(OSError, ValueError):  # it may have been closed, and even that is no reason to fail
        typer.echo(line, err=True)


def quoted(word: str | Path) -> str:
    """A word or a path as it is typed in a shell."""
    return shlex.quote(str(word))
