"""Messages between machines with anything changed in them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch
from safetensors.torch import save

from fnrfl.engines.wire import to_parts

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 10**6, 10**30, -(10**30), 2**63, 0.5, math.nan, math.inf, -math.inf, 1e308),
    *("", "a", "\x00", "x" * 5000, "0" * 64, "test", "private", "public", "ranking", "validation", "local", "refine"),
    *("deliver", "keep", "../../etc", [], {}, [[]] * 3, {"tensor": 0}, {"tensor": 10**9}, {"tensor": "a"}),
    *({"tuple": [1]}, {"set": [[]]}, {"set": 3}, {"dict": []}, {"dict": [[1, 2], ["a", 3]]}, {"dict": [[[], 1]]}),
    *({"class": "Version", "fields": [["round", 10**30], ["number", None]]}, {"class": "Failure", "fields": []}),
    *({"class": "Failure", "fields": [["reason", None]]}, {"class": "LocalTask", "fields": []}, {"class": []}),
    *({"class": name, "fields": []} for name in ("Objective", "Keeping", "Accuracy")),
    {"class": "SoftPredictions", "fields": [["size", 12], ["temperature", 1.0]]},
    {"class": "LabelCounts", "fields": [["num_classes", 2]]},
    {"class": "InputMoments", "fields": [["gaps", False]]},
]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float16, torch.uint8]
NUMBERS = [0.0, 1.0, -1.0, 3e38, -3e38, 1e30, 1e-40, 1e-3, math.nan, math.inf, -math.inf, 255.0]


def spots(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something of a JSON value could be replaced."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from spots(inner, (*at, key))


def part(value: Any, at: Sequence[Any]) -> Any:
    """What lies at a spot."""
    for key in at:
        value = value[key]
    return value


def with_changes(value: Any, dice: Random, other: Any = None, count: int = 0) -> Any:
    """A JSON value with something else in some of its spots: odd values, or parts of another value."""
    made = json.loads(json.dumps(value))
    for _ in range(count or dice.choice([1, 1, 1, 2, 5])):
        at = dice.choice(list(spots(made)))
        new = copy.deepcopy(dice.choice(ODD))
        if other is not None and dice.random() < 0.3:
            new = copy.deepcopy(part(other, dice.choice(list(spots(other)))))
        if not at:
            return new
        inside = part(made, at[:-1])
        if dice.random() < 0.15:
            del inside[at[-1]]
        elif dice.random() < 0.15 and isinstance(inside, list):
            inside.append(copy.deepcopy(inside[at[-1]]))
        else:
            inside[at[-1]] = new
    return made


def other_tensor(tensor: torch.Tensor, dice: Random) -> torch.Tensor:
    """Another tensor: of another type, of another shape, or with another number in it."""
    kind = dice.random()
    if kind < 0.3:
        return (tensor.real if tensor.is_complex() else tensor).to(dice.choice(DTYPES))
    if kind < 0.5:
        return tensor.new_zeros(
            dice.choice([(), (0,), (2,), (1, 1), (3, 4), (1, 0), tensor.shape[1:], (1, *tensor.shape)])
        )
    made, number = tensor.clone(), dice.choice(NUMBERS)
    fits = made.is_floating_point() or abs(number) < 256
    made.view(-1)[: dice.choice([1, made.numel()])] = number if fits else 7
    return made


def spoilt(values: Sequence[Any], dice: Random) -> bytes:
    """The message of one of the values, or that with odd fields, fields of other values, or odd tensors."""
    (text, tensors), (others, _) = (to_parts(dice.choice(values)) for _ in range(2))
    plain = json.loads(text)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 4))):
        if tensors and dice.random() < 0.4:
            at = dice.randrange(len(tensors))
            tensors[at] = other_tensor(tensors[at], dice)
        else:
            plain = with_changes(plain, dice, json.loads(others), count=1)
    message = bytearray(from_text(json.dumps(plain).encode(), tensors))
    if dice.random() < 0.15:  # and some that are no messages any more
        for _ in range(dice.choice([1, 3, 30])):
            message[dice.randrange(len(message))] = dice.randrange(256)
        del message[dice.choice([len(message)] * 3 + [dice.randrange(len(message))]) :]
    return bytes(message)


def from_text(text: bytes, tensors: Sequence[torch.Tensor]) -> bytes:
    """A message of this JSON."""
    stored = {str(at): tensor.clone(memory_format=torch.contiguous_format) for at, tensor in enumerate(tensors)}
    return b"".join([len(text).to_bytes(8, "big"), text, save(stored)])
