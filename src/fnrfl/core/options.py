"""Options: what a config can set. Each is declared once, as a field of the dataclass that uses it; no torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast, get_type_hints

Value: TypeAlias = bool | int | float | str
T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """What is declared about one option."""

    name: str
    type: Any
    default: Value
    help: str
    bounds: tuple[tuple[str, float], ...] = ()  # of its numbers: ("ge", 0.0) stands for >= 0


def option(
    default: T,
    help: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> T:
    """A field of a dataclass that a config can set: its default, its one-line meaning and its range.

    All arguments are literals, so that the command line can read a method's options without importing torch.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    field: T = dataclasses.field(default=default, metadata={"help": help, **bounds})
    return field


def options_of(cls: type) -> tuple[Option, ...]:
    """The options of a dataclass, in order. Its other fields are set by code alone."""
    types = get_type_hints(cls, include_extras=True)
    return tuple(
        Option(
            field.name, types[field.name], cast(Value, field.default), field.metadata["help"], bounds_in(field.metadata)
        )
        for field in dataclasses.fields(cls)
        if "help" in field.metadata
    )


def bounds_in(declared: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """The bounds among the arguments of an `option`."""
    return tuple((sign, declared[sign]) for sign in ("ge", "gt", "le", "lt") if declared.get(sign) is not None)


def values_of(section: Any) -> dict[str, Any]:
    """The values that an object has for the options of its class."""
    return {
        field.name: getattr(section, field.name) for field in dataclasses.fields(section) if "help" in field.metadata
    }
