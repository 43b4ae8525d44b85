"""Whose fault it is: errors out of a method or a model become sentences that name it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

from fnrfl import usercode
from fnrfl.config import registry
from fnrfl.core.errors import CompatibilityError, FnrflError, from_system, out_of_memory

if TYPE_CHECKING:
    from fnrfl.config import RunConfig


@contextmanager
def method_errors(config: RunConfig, when: str) -> Iterator[None]:
    """Inside, a method is at work: what it raises names it, and what was asked of it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if _has_words(error):
            raise
        method = config.algorithm
        usual = {f.name: f.default for f in fields(registry.load_method(method.name))} if method.options else {}
        chosen = {key: value for key, value in method.options.items() if usual.get(key) != value}
        asked = ", ".join(f"algorithm.{key} = {value}" for key, value in chosen.items())
        ours = ":" not in method.name
        way = "Bring them nearer to their defaults; --debug shows where." if ours and asked else "--debug shows where."
        raise FnrflError(
            f'algorithm = "{method.name}"{f" ({asked})" if asked else ""} failed {when}: {_told(error)} {way}'
        ) from error


@contextmanager
def model_errors(config: RunConfig, what: str) -> Iterator[None]:
    """Inside, a model is called: what it raises names it, and says what could not be done."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if _has_words(error):
            raise
        raise CompatibilityError(
            f'model = "{config.model.name}" {what}: {_told(error)} '
            f"Correct its forward, or choose another model; --debug shows where."
        ) from error


def _has_words(error: BaseException) -> bool:
    return isinstance(error, FnrflError) or out_of_memory(error) or from_system(error) is not None


def _told(error: BaseException) -> str:
    """What was raised, and where in a user's own code if it was there."""
    said, place = str(error).strip().partition("\n")[0], usercode.where(error)
    told = f"{type(error).__name__}{f': {said}' if said else ''}{f' ({place})' if place else ''}"
    return told if told.endswith(".") else f"{told}."
