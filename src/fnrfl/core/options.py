"""Options: what a config can set. Each is declared once, as a field of the dataclass that uses it; no torch here.

A name may have options beside it, as they are typed: `resnet18(head=1000)`, `fedprox(mu=0.1)`.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_type_hints

from fnrfl.process import parser_lock

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


WITH_OPTIONS = re.compile(r"\s*([^\s()]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def read_call(text: str) -> tuple[str, dict[str, object]]:
    """Split `name(key=value, ...)`; values are numbers, true, false, or words with or without quotes.

    >>> read_call("resnet18(head=1000, norm=batch)")
    ('resnet18', {'head': 1000, 'norm': 'batch'})
    """
    match = WITH_OPTIONS.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        source = f"f({match[2] or ''})"
        with parser_lock:
            call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        found: dict[str, object] = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in found:
                raise ValueError
            found[keyword.arg] = _word_or_value(keyword.value, source)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text!r} is not a name with options") from error
    return match[1], found


def _word_or_value(node: ast.expr, source: str) -> object:
    if isinstance(node, ast.Name | ast.Call | ast.BinOp):  # batch, fedprox(mu=0.1), public-share
        words = str(ast.get_source_segment(source, node))
        if isinstance(node, ast.Call):
            read_call(words)
        return {"true": True, "false": False}.get(words, words)
    return ast.literal_eval(node)


def written(name: str, options: Mapping[str, object]) -> str:
    """Write a name and its options so that `read_call` reads them: fedprox(mu=0.1).

    >>> written("fedavgm", {"beta": 1.0, "inner": "fedprox(mu=0.1)"})
    'fedavgm(beta=1, inner=fedprox(mu=0.1))'
    """
    pairs = [f"{key}={_typed(value)}" for key, value in options.items()]
    return f"{name}({', '.join(pairs)})" if pairs else name


def _typed(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        with suppress(ValueError):  # without quotes where it stays what it is
            if read_call(f"f(x={value})")[1] == {"x": value}:
                return value
        return json.dumps(value, ensure_ascii=False)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e6 else repr(value)


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


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """How long the server waits for clients in other processes and on other machines, and what it does without them."""

    on_missing: Literal["fail", "wait", "proceed"] = option(
        "fail", "clients that do not answer: stop the run, ask again until they answer, or go on without them"
    )
    min_share: float = option(0.5, "with proceed: share of those asked that must answer", gt=0, le=1)
    max_share: float = option(1.0, "largest share of all training examples that one site may claim", gt=0, le=1)
    site_scores: bool = option(
        True, "sites with data of their own say how many of the examples that they keep aside each model answers right"
    )
    train_deadline: float = option(0.0, "seconds that clients have to train; 0: no limit", ge=0)
    refine_deadline: float = option(0.0, "seconds for refinement and other work on public data; 0: no limit", ge=0)
    measure_deadline: float = option(0.0, "seconds to answer a question about a model; 0: no limit", ge=0)
    retries: int = option(1, "how often a request is sent again before its client counts as missing", ge=0)
    address: str = option("", "of a Ray cluster, such as ray://host:10001; empty: Ray is started here")
    cpus: float = option(1.0, "processor cores that a Ray actor takes", gt=0)
    gpus: float = option(0.0, "GPUs that a Ray actor takes; a fraction shares one", ge=0)

    def deadline(self, *, private: bool) -> float | None:
        """Seconds for a training request, on private data or on other data; None: no limit."""
        return (self.train_deadline if private else self.refine_deadline) or None

    def may_proceed(self, answered: int, asked: int) -> bool:
        """Whether the round goes on with those who have answered."""
        return self.on_missing == "proceed" and answered >= 1 and answered >= self.min_share * asked - 1e-9
