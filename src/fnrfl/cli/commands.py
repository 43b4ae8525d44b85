"""The class of all commands: plain help, errors as sentences, stdout for the answer alone."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from typing import Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from fnrfl import usercode
from fnrfl.core.errors import FnrflError, from_system, out_of_memory, sentence
from fnrfl.rundir.interrupt import OutputClosed, exit_code, stoppable


class PlainGroup(TyperGroup):
    """Commands under one name: one that is not there is answered with those that may be meant, once."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As usual, but for what typer adds to the sentence where click itself names them since 8.4."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if getattr(error, "possibilities", None):
                error.message = error.message.partition(" Did you mean")[0]  # type: ignore[attr-defined]
            raise


class PlainCommand(TyperCommand):
    """A command whose errors are one line, or with --debug a traceback; with --json, stdout has the answer alone."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        about = "Show the traceback of an error."
        self.params.append(TyperOption(param_decls=["--debug"], is_flag=True, default=False, help=about))

    def get_help(self, ctx: Any) -> str:
        """The help, with brackets as they are: older versions of typer escape them for rich, even without it."""
        return super().get_help(ctx).replace(r"\[", "[")

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and say in words what goes wrong."""
        debug, answers = ctx.params.pop("debug"), ctx.params.get("json") or ctx.params.get("dry_run")
        with errors_in_words(debug), stdout_for_the_answer() if answers else nullcontext():
            return super().invoke(ctx)


class KeyValueCommand(PlainCommand):
    """A command with keys of the config among its arguments: `--rounds 5` is answered with rounds=5."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As usual, but for the sentence about an option that is not there."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as raised:
            error: Any = raised
            if type(error).__name__ == "NoSuchOption" and (said := _as_key(error.option_name, typed)):
                about = f"There is no option {error.option_name}. Keys of the config are typed without dashes"
                words = f"{about}: {said}"
                error.message = wrapped(f"Error: {words}").removeprefix("Error: ") if sys.stderr.isatty() else words
                error.possibilities = None
            raise


def _as_key(option: str, typed: Sequence[str]) -> str:
    """Return a hint if an unknown option is a key typed with dashes; "" if it is not."""
    from fnrfl.config import describe_keys
    from fnrfl.config.typed import same_key

    keys = dict.fromkeys(key.name for key in describe_keys() if not key.name.startswith("algorithm."))
    meant = same_key(option.lstrip("-"), [*keys, "algorithm.name"])
    if not meant:
        return ""
    place = next(i for i, word in enumerate(typed) if word.partition("=")[0] == option)
    _, sign, value = typed[place].partition("=")
    following = [*typed, ""][place + 1]
    if not sign:
        value = following if following and not following.startswith("--") else "VALUE"
    return " or ".join(f"{key.removesuffix('.name')}={value}" for key in meant)


# -- errors ------------------------------------------------------------------------------------------------------------


@contextmanager
def errors_in_words(debug: bool = False) -> Iterator[None]:
    """One line on stderr and an exit code for whatever goes wrong: 2 bad input, 3 a failure, 128 + n by signal n."""
    try:
        with stoppable():
            yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as stop:  # with notes of commands that know how to go on
        notes, closed = getattr(stop, "__notes__", []), isinstance(stop, OutputClosed)
        if notes or not closed:
            say(" ".join(["fnrfl:", "the output was closed." if closed else "stopped.", *notes]))
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


def _sentence(error: BaseException) -> str:
    place = None if isinstance(error, FnrflError) else usercode.where(error)
    if isinstance(error, SystemExit):
        return f"Your own code has called sys.exit({error.code!r}) ({place}). Leave that out."
    if place is None or out_of_memory(error) or from_system(error) is not None:
        return sentence(error)
    return f"Your own code has failed ({type(error).__name__}: {error}; {place}). Correct it; --debug shows more."


def say(line: str) -> None:
    """A line on stderr, if anybody listens there; a terminal gets it in lines that fit."""
    with suppress(OSError, ValueError):  # it may have been closed, and even that is no reason to fail
        typer.echo(wrapped(line) if sys.stderr.isatty() else line, err=True)


def wrapped(text: str, width: int | None = None) -> str:
    """Break lines at words to fit a terminal; a word that is longer, such as a path, stays whole for who copies it."""
    columns = max(20, width or shutil.get_terminal_size().columns)
    fit = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(fit.fill(line) if len(line) > columns else line for line in text.split("\n"))


# -- the answer --------------------------------------------------------------------------------------------------------

_answers: list[TextIO] = []  # where the answer goes while stdout is kept free for it


@contextmanager
def stdout_for_the_answer() -> Iterator[None]:
    """Inside, stdout is for `print_answer` alone: what a user's own code prints goes to stderr."""
    _answers.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.pop()


def print_answer(text: str) -> None:
    """Print what was asked for: the JSON object, the table, the config."""
    typer.echo(text.removesuffix("\n"), file=_answers[-1] if _answers else None)


def print_lines(text: str) -> None:
    """Print an answer in words; a terminal gets it in lines that fit."""
    print_answer(wrapped(text) if is_terminal() else text)


def is_terminal() -> bool:
    """Return whether stdout is a terminal that shows the answer."""
    return (_answers[-1] if _answers else sys.stdout).isatty()
