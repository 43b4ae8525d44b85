"""`dataset.scale = "standard"`: the mean and the spread of the inputs, from sums that clients send.

`dataset.missing = "mean"` takes the same mean, of the values that are known.

Each column of a table, or each channel of an image, has a mean and a spread: the first axis of an example says which.
Every client sends the count, the mean and the sum of squared deviations (M2) of the private examples that it holds, its
feature noise included. The server merges them, which is exact up to rounding, and tells every client the mean and the
spread of all. No test, validation or public example is looked at, unless a method has given public examples to clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.engine import Engine, Probe
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.modules import InputScale
from fnrfl.core.types import Batch, Out, Tree
from fnrfl.data.reading import Columns

UNEQUAL = 100  # how many times a spread, or a mean in spreads, may be another before inputs look unscaled
TOLD = 4  # bytes of each number that goes down: a mean or a spread, as float32


@dataclass(frozen=True)
class InputMoments(Probe):
    """Count, mean and M2 of a client's inputs, for each column or channel; with `gaps`, of those that are known.

    The numbers are float64 also on their way: `rest` is what the mean has beyond the digits of a float64. So the spread
    of a column of 1,000,000 and a bit keeps its digits when clients are merged.
    """

    asks_model = False
    gaps: bool = False  # NaN stands for a missing value, and every column has a count of its own

    def __call__(self, out: Out, batch: Batch) -> Tree:
        x = batch.x.double()
        x = x.reshape(len(x), 1, 1) if x.ndim == 1 else x.reshape(len(x), x.shape[1], -1)
        x = x.movedim(1, 0).flatten(1)  # [C, values]
        known = ~x.isnan() if self.gaps else torch.ones_like(x, dtype=torch.bool)
        count = known.sum(1) if self.gaps else torch.tensor(x.shape[1], dtype=torch.int64, device=x.device)
        # Around a value that is known: a constant column has exactly its mean, and M2 = 0.
        some = x.gather(1, known.int().argmax(1, keepdim=True)).nan_to_num()
        around = torch.where(known, x - some, 0.0)
        middle = around.sum(1, keepdim=True) / count.clamp(min=1).reshape(-1, 1)
        around = torch.where(known, around - middle, 0.0)
        m2 = around.square().sum(1) - around.sum(1).square() / count.clamp(min=1)
        mean, rest = _sum_and_rest(some[:, 0], middle[:, 0])
        return {"count": count, "mean": mean, "rest": rest, "m2": m2.clamp(min=0.0)}

    def add(self, total: Tree, part: Tree) -> Tree:
        return merged(total, part) if total else part

    def accepts(self, answer: Tree, one: Tree, examples: float) -> bool:
        most, largest = one["count"] * int(examples), torch.finfo(torch.float32).max  # inputs are float32
        right = all(bool((answer[name].abs() <= largest).all()) for name in ("mean", "rest"))
        return right and bool(((answer["count"] >= 0) & (answer["count"] <= most)).all() and (answer["m2"] >= 0).all())


def merged(one: Tree, other: Tree) -> Tree:
    """The moments of two sets of inputs taken together (Chan, Golub and LeVeque, 1979)."""
    count = one["count"] + other["count"]
    share = other["count"] / count.clamp(min=1).double()
    step = (other["mean"] - one["mean"]) + (other["rest"] - one["rest"])
    mean, rest = _sum_and_rest(one["mean"], one["rest"] + step * share)
    m2 = one["m2"] + other["m2"] + step.square() * share * one["count"]
    both = {"mean": mean, "rest": rest, "m2": m2}
    some = one["count"] > 0  # of nothing and the other, the other, to the last digit
    return {"count": count} | {name: torch.where(some, value, other[name]) for name, value in both.items()}


def _sum_and_rest(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b as a float64 has it, and what it has not: the two together are exact (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


@dataclass(frozen=True)
class Scaling:
    """What inputs are scaled with, and what crossed so that everybody knows it."""

    mean: tuple[float, ...]  # of each column or channel
    std: tuple[float, ...]
    bytes: dict[str, int]  # down, up, headers, as the log has them for every phase

    def layer(
        self, input_shape: Sequence[int], dtype: torch.dtype, *, scale: bool = True, fill: bool = False
    ) -> InputScale:
        """The first layer of a model that takes inputs of this shape; a column that does not vary is not stretched.

        Without `scale`, inputs stay as they are; with `fill`, missing ones become the mean.
        """
        shape = (*input_shape[:1], *[1] * (len(input_shape) - 1))
        mean, std = (torch.tensor(values, dtype=torch.float64).reshape(shape) for values in (self.mean, self.std))
        limits = torch.finfo(dtype)
        constant = std <= torch.maximum(mean.abs() * limits.eps, torch.tensor(limits.tiny, dtype=torch.float64))
        center, stretch = (mean, torch.where(constant, 1.0, std)) if scale else (mean * 0.0, torch.ones_like(std))
        # A tensor of its own: of two buffers that are one tensor, torch names the first alone.
        return InputScale(center.to(dtype), stretch.to(dtype), mean.to(dtype, copy=True) if fill else None)

    def as_tree(self) -> Tree:
        """The means and spreads as every client is told them."""
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("mean", "std")}

    def as_json(self) -> dict[str, Any]:
        """What inputs are scaled with, as plain values."""
        return {"mean": list(self.mean), "std": list(self.std), "bytes": self.bytes}

    @classmethod
    def from_json(cls, values: Any) -> Scaling | None:
        """The inverse of `as_json`; None if a log has none."""
        try:
            return None if values is None else TypeAdapter(cls).validate_python(values)
        except ValueError as error:
            raise ConfigError(
                f"The run's first event does not say how inputs are scaled as it must ({error}). Put events.jsonl back "
                "as it was, or run again."
            ) from error


def ask_clients(engine: Engine, what: str, *, gaps: bool = False, columns: Columns | None = None) -> Scaling:
    """Every client's moments, merged; `what` names the data in an error, and `columns` its inputs."""
    everybody = torch.arange(len(engine.examples))
    answers = trees.moved(engine.measure(everybody, InputMoments(gaps), data="private"), torch.device("cpu"))
    total = reduce(merged, [trees.rows(answers, client) for client in everybody.tolist()])
    if len(unknown := (total["count"].expand_as(total["mean"]) == 0).nonzero()):
        raise CompatibilityError(
            f"{what} has no known value in {_named_input(int(unknown[0, 0]), columns)}, so missing ones have no mean. "
            "Leave it out with dataset.ignore."
        )
    std = (total["m2"] / total["count"]).sqrt()
    if len(large := (~std.isfinite()).nonzero()):
        raise CompatibilityError(
            f"{what} holds numbers that are too large to be scaled, in {_named_input(int(large[0, 0]), columns)}. Set "
            'dataset.scale = "none" and scale them yourself.'
        )
    sent = sum(tensor.numel() * tensor.element_size() for name, tensor in answers.items() if name != "count")
    headers = answers["count"].numel() * answers["count"].element_size()
    down = len(everybody) * 2 * TOLD * len(std)
    return Scaling(tuple(total["mean"].tolist()), tuple(std.tolist()), {"down": down, "up": sent, "headers": headers})


def looks_unscaled(x: Tensor, columns: Columns | None) -> str | None:
    """A sentence about columns of numbers, [n, columns], that differ much in spread or lie far from 0; None if none do.

    It is for the person who runs a simulation: no client says any of it.
    """
    known = x.double()
    mean = known.nanmean(0)
    std = (known - mean).square().nanmean(0).sqrt()
    varied = (std > 0).nonzero()[:, 0]
    if not len(varied):
        return None
    least, most = (int(varied[at]) for at in (std[varied].argmin(), std[varied].argmax()))
    far = int(varied[(mean.abs() / std)[varied].argmax()])
    told = None
    if (times := float(std[most] / std[least])) > UNEQUAL:
        told = f"{_named_input(most, columns)} spreads {times:,.0f} times as far as {_named_input(least, columns)}"
    elif mean[far].abs() > UNEQUAL * std[far]:
        told = f"{_named_input(far, columns)} has the mean {float(mean[far]):.4g} and the spread {float(std[far]):.4g}"
    return told and f"Inputs look unscaled: {told}."


def _named_input(place: int, columns: Columns | None) -> str:
    """An input in a sentence."""
    return f"column or channel {place}" if columns is None else f"column {columns.encoded[place]!r}"
