"""Keys of the config: options under their full names, told in words. Pydantic checks their values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter

from fnrfl.config.typed import PassedLabel, as_known, toml
from fnrfl.core.options import Option, Value

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
SIGNS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


class _Member(NamedTuple):
    """One of the types that a key may have."""

    type: str
    words: str
    range: str = ""


@dataclass(frozen=True)
class Key(Option):
    """An option under its full name."""

    method: str = ""  # whose option it is; "" for keys of every run

    @classmethod
    def of(cls, name: str, option: Option, method: str = "") -> Key:
        """Return an option under another name."""
        return cls(name, option.type, option.default, option.help, option.bounds, method)

    @cached_property
    def _members(self) -> tuple[_Member, ...]:
        return tuple(_members(_bounded(self.type, self.bounds)))

    @property
    def meaning(self) -> str:
        """One line about it, with the method whose option it is."""
        return f"{self.method}: {self.help}" if self.method else self.help

    @property
    def type_name(self) -> str:
        """The types that it may have: `float | "auto"`."""
        return " | ".join(member.type for member in self._members)

    @property
    def range(self) -> str:
        """The bounds of its numbers: `>= 0 and < 1`."""
        return "; ".join(member.range for member in self._members if member.range)

    @property
    def rule(self) -> str:
        """Type and range as the end of a sentence: "it must be ..."."""
        *most, last = (f"{member.words} {member.range}".rstrip() for member in self._members)
        return f"{', '.join(most)} or {last}" if most else last

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be."""
        return tuple(json.loads(member.type) for member in self._members if member.type.startswith('"'))

    def spelled(self, value: object) -> object:
        """Return a word that is one of a few choices as the choice is written."""
        return as_known(value, self.choices) if isinstance(value, str) and self.choices else value

    def checked(self, value: Any) -> Value:
        """Return the value as the type has it: 1 becomes 1.0 for a number. Raise a ValidationError if it is none."""
        if isinstance(value, PassedLabel):
            return value
        return _checker(self.type, self.bounds).validate_python(value)


@cache
def _checker(type: Any, bounds: tuple[tuple[str, float], ...]) -> TypeAdapter[Value]:
    return TypeAdapter(_bounded(type, bounds), config=ConfigDict(strict=True, allow_inf_nan=False))


def _members(annotation: Any) -> Iterator[_Member]:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif origin is Literal:
        yield from (_Member(toml(choice), toml(choice)) for choice in get_args(annotation))
    else:
        kind, *fields = get_args(annotation) if origin is Annotated else (annotation,)
        bounds = [(bound, name, sign) for field in fields for bound in field.metadata for name, sign in SIGNS]
        shown = (f"{sign} {getattr(bound, name):g}" for bound, name, sign in bounds if hasattr(bound, name))
        yield _Member(kind.__name__, WORDS[kind], " and ".join(shown))


def _bounded(annotation: Any, bounds: tuple[tuple[str, Any], ...]) -> Any:
    """The bounds put on the members of a type that are numbers: in `float | Literal["client"]`, on the first."""
    if get_origin(annotation) in (Union, UnionType):
        return Union[tuple(_bounded(member, bounds) for member in get_args(annotation))]  # noqa: UP007
    return Annotated[annotation, Field(**dict(bounds))] if annotation in (int, float) and bounds else annotation
