"""Keys of the config as they are declared: their types, ranges and meanings, checked by pydantic and told in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from fnrfl.config import registry
from fnrfl.config.registry import Value
from fnrfl.config.typed import toml


class Section(BaseModel):
    """A part of the config; its values cannot be changed, only replaced."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


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


def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, Key]:
    """The keys of a section and of those inside it, by dotted name."""
    keys: dict[str, Key] = {}
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys |= keys_of(field.annotation, f"{path}.")
        elif field.description:
            members = list(_members(field.annotation, field.metadata))
            keys[path] = Key(
                path,
                " | ".join(member.type for member in members),
                field.default,
                "; ".join(member.range for member in members if member.range),
                field.description,
                _either([" ".join(filter(None, (member.words, member.range))) for member in members]),
                tuple(json.loads(member.type) for member in members if member.type.startswith('"')),
            )
    return keys


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


@cache
def model_of(fields: tuple[registry.Field, ...]) -> type[Section]:
    """A method's fields as a section that can be validated."""
    declared: dict[str, Any] = {
        f.name: (_bounded(f.type, dict(f.bounds)), Field(f.default, description=f.help)) for f in fields
    }
    return create_model("Options", __base__=Section, **declared)


def _bounded(annotation: Any, bounds: dict[str, Any]) -> Any:
    """The bounds put on the members of a type that are numbers: in `float | Literal["client"]`, on the first."""
    if get_origin(annotation) in (Union, UnionType):
        return Union[tuple(_bounded(member, bounds) for member in get_args(annotation))]  # noqa: UP007
    return Annotated[annotation, Field(**bounds)] if annotation in (int, float) and bounds else annotation
