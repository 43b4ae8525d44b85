"""Commands: their help is plain text, and those that take key=value say so to whoever types a key as an option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup


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
    """A command whose help has brackets as they are: older versions of typer escape them for rich, even without it."""

    def get_help(self, ctx: Any) -> str:
        """The help, without the escapes."""
        return super().get_help(ctx).replace(r"\[", "[")


class KeyValueCommand(PlainCommand):
    """A command with keys of the config among its arguments: `--rounds 5` is answered with rounds=5."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As usual, but for the sentence about an option that is not there."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # whether typer has it from click or brings its own
                _explain(error, typed)
            raise


def _explain(error: Any, typed: Sequence[str]) -> None:
    """Put what should have been typed into the error, if the option is a key."""
    said = _as_key(error.option_name, typed)
    if said is not None:
        error.message = f"There is no option {error.option_name}. Keys of the config are typed without dashes: {said}"
        error.possibilities = None


def _as_key(option: str, typed: Sequence[str]) -> str | None:
    """What should have been typed instead of an option, if it is a key; None if it is not."""
    from fnrfl.config import describe_keys
    from fnrfl.config.spelling import same_key

    keys = list(dict.fromkeys(key.name for key in describe_keys() if not key.name.startswith("algorithm.")))
    meant = same_key(option.lstrip("-"), [*keys, "algorithm.name"])
    if not meant:
        return None
    place = next(i for i, word in enumerate(typed) if word.partition("=")[0] == option)
    word, sign, value = typed[place].partition("=")
    if not sign:
        following = typed[place + 1] if place + 1 < len(typed) else ""
        value = following if following and not following.startswith("--") else "VALUE"
    return " or ".join(f"{key.removesuffix('.name')}={value}" for key in meant)
