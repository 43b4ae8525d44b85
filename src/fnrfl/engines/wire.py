"""Requests and replies as bytes. Values travel as JSON with their tensors beside them; code never travels.

A class goes by its name and its fields, and only the classes of messages, objectives and probes are known: an objective
or a probe of a user's own travels if both sides have imported it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from fnrfl.core.algorithm import Objective
from fnrfl.core.engine import Probe
from fnrfl.core.errors import FnrflError
from fnrfl.core.messages import Failure, MeasureRequest, MemoryRequest, TrainReply, TrainRequest
from fnrfl.core.training import Training
from fnrfl.core.values import LocalTask, Replies, State

T = TypeVar("T")
_MESSAGES: dict[str, type] = {
    cls.__name__: cls
    for cls in (TrainRequest, MeasureRequest, MemoryRequest, LocalTask, Training, State, TrainReply, Replies, Failure)
}
MOST_JSON = 2**24  # bytes of a message without its tensors


def travels(cls: type[T]) -> type[T]:
    """Let messages have objects of a dataclass."""
    _MESSAGES[cls.__name__] = cls
    return cls


def to_bytes(value: Any) -> bytes:
    """A message: the length of its JSON, the JSON, the tensors."""
    text, tensors = to_parts(value)
    stored = {str(i): t.detach().cpu().clone(memory_format=torch.contiguous_format) for i, t in enumerate(tensors)}
    return b"".join([len(text).to_bytes(8, "big"), text, save(stored)])


def from_bytes(message: bytes, known: Mapping[str, type] | None = None) -> Any:
    """Return the value of a message; `known` are the classes it may have.

    Tensors are on the CPU, in memory of their own. It takes memory in proportion to the message, whatever shapes the
    message claims.
    """
    return Parsed.of(message).value(known)


@dataclass(frozen=True)
class Parsed:
    """A message whose JSON has been read, and of which no object has been made."""

    plain: Any
    stored: bytes  # its tensors

    @staticmethod
    def of(message: bytes) -> Parsed:
        """Read the JSON of a message."""
        if (length := int.from_bytes(message[:8], "big")) > MOST_JSON:
            raise FnrflError(f"A message has {length:,} bytes beside its tensors; {MOST_JSON:,} are the most.")
        return Parsed(json.loads(message[8 : 8 + length]), message[8 + length :])

    @property
    def head(self) -> dict[str, Any]:
        """The name of its class, and its fields that are plain values."""
        plain = [(name, value) for name, value in self.plain["fields"] if not isinstance(value, dict | list)]
        return {**dict(plain), "class": self.plain["class"]}

    def value(self, known: Mapping[str, type] | None = None) -> Any:
        """Make the objects of the message."""
        stored = load(self.stored)
        return _value(self.plain, [stored[str(i)].clone() for i in range(len(stored))], known)


def to_parts(value: Any) -> tuple[bytes, list[Tensor]]:
    """(the JSON of a message, its tensors): for whoever has a way of its own to send tensors."""
    tensors: list[Tensor] = []
    return json.dumps(_plain(value, tensors)).encode(), tensors


def from_parts(text: bytes, tensors: Sequence[Tensor], known: Mapping[str, type] | None = None) -> Any:
    """The inverse of `to_parts`."""
    return _value(json.loads(text), tensors, known)


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """A value as JSON has it; tensors are put aside and named by their number."""
    inner = lambda one: _plain(one, tensors)  # noqa: E731
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list):
        return [*map(inner, value)]
    if isinstance(value, tuple):
        return {"tuple": [*map(inner, value)]}
    if isinstance(value, frozenset):
        return {"set": [*map(inner, sorted(value))]}
    if isinstance(value, dict):
        return {"dict": [[k, inner(v)] for k, v in value.items()]}
    name = type(value).__name__  # a message, an objective or a probe goes by its class and its fields
    if not is_dataclass(value) and not isinstance(value, Objective | Probe):
        raise TypeError(f"{name} cannot be sent: it is neither a plain value nor a message, an objective or a probe.")
    _class(name)
    held = fields(value) if is_dataclass(value) else ()
    return {"class": name, "fields": [[f.name, inner(getattr(value, f.name))] for f in held]}


def _value(plain: Any, tensors: Sequence[Tensor], known: Mapping[str, type] | None) -> Any:
    """The inverse of `_plain`."""
    inner = lambda one: _value(one, tensors, known)  # noqa: E731
    if isinstance(plain, list):
        return [*map(inner, plain)]
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        return tensors[plain["tensor"]]
    if "tuple" in plain:
        return tuple(map(inner, plain["tuple"]))
    if "set" in plain:
        return frozenset(map(inner, plain["set"]))
    if "dict" in plain:
        return {k: inner(v) for k, v in plain["dict"]}
    cls = _class(plain["class"]) if known is None else known[plain["class"]]
    return cls(**{k: inner(v) for k, v in plain["fields"]})


def _class(name: str) -> type:
    """The class of a name, if messages may have it."""
    known = _MESSAGES.get(name) or Objective.registry.get(name) or Probe.registry.get(name)
    if known is None:
        raise FnrflError(
            f"A message names the class {name}, which this side does not know. Import the module that defines it on "
            "both sides, and derive it from Objective or Probe."
        )
    return known
