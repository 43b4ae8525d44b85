"""Keys of the config: options under their full names. Pydantic checks their values; here they are told in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.fields import FieldInfo

from fnrfl.config.typed import toml
from fnrfl.core.options import Option, Value


@dataclass(frozen=True)
class Key:
    """One key of the config, in words."""

    name: str
    type: str
    default: Value
    range: str
    meaning: str
    rule: str  # type and range as the end of a sentence: "it must be ..."
    choices: tuple[str, ...] = ()  # words that it may be
    method: str = ""  # whose option it is; "" for keys of every run


def keys_of(options: Mapping[str, Option]) -> dict[str, Key]:
    """Options in words, by full name."""
    return {name: _key(name, option) for name, option in options.items()}


def keys_of_method(options: Iterable[Option]) -> dict[str, Key]:
    """The options of a method in words, by full name."""
    return keys_of({f"algorithm.{option.name}": option for option in options})


@cache
def _key(name: str, option: Option) -> Key:
    members = list(_members(_bounded_type(option), []))
    return Key(
        name,
        " | ".join(member.type for member in members),
        option.default,
        "; ".join(member.range for member in members if member.range),
        option.help,
        _either([" ".join(filter(None, (member.words, member.range))) for member in members]),
        tuple(json.loads(member.type) for member in members if member.type.startswith('"')),
    )


def checked(option: Option, value: object) -> Value:
    """The value as the option's type has it: 1 becomes 1.0 for a number. Raises a ValidationError if it is none."""
    return _checker(option).validate_python(value)


@cache
def _checker(option: Option) -> TypeAdapter[Value]:
    return TypeAdapter(_bounded_type(option), config=ConfigDict(strict=True, allow_inf_nan=False))


@dataclass(frozen=True)
class _Member:
    """One of the types that a key may have."""

    type: str
    words: str
    range: str = ""


def _members(annotation: Any, metadata: Sequence[Any]) -> Iterator[_Member]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [bound for extra in args[1:] for bound in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        yield from _members(args[0], [*metadata, *inner])
    elif origin in (Union, UnionType):
        for arg in args:
            yield from _members(arg, metadata)
    elif origin is Literal:
        for choice in args:
            yield _Member(toml(choice), toml(choice))
    else:
        signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        bounds = (
            f"{sign} {getattr(bound, name):g}" for bound in metadata for name, sign in signs if hasattr(bound, name)
        )
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        yield _Member(annotation.__name__, words[annotation], " and ".join(bounds))


def _either(choices: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


def _bounded_type(option: Option) -> Any:
    return _bounded(option.type, dict(option.bounds))


def _bounded(annotation: Any, bounds: dict[str, Any]) -> Any:
    """The bounds put on the members of a type that are numbers: in `float | Literal["client"]`, on the first."""
    if get_origin(annotation) in (Union, UnionType):
        return Union[tuple(_bounded(member, bounds) for member in get_args(annotation))]  # noqa: UP007
    return Annotated[annotation, Field(**bounds)] if annotation in (int, float) and bounds else annotation
