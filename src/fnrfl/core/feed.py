"""Where engines get examples from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fnrfl.core.training import Training
from fnrfl.core.values import Batch, Data, RandomStream


def forward_batch(device: torch.device) -> int:
    """Examples in one forward pass of one model, without gradients: as many as fill a device."""
    return 2500 if device.type == "cuda" else 1000


@dataclass(frozen=True)
class Plan:
    """One client's batches of one task, end to end."""

    order: Tensor  # positions in the pool that `Feed.take` reads
    sizes: list[int]  # of the batches
    crops: Tensor | None = None  # how each example is cropped and flipped; see `augment.draw_crop_flip`
    noise: Callable[[Tensor], Tensor] | None = None  # lays feature noise over a batch; call once for each, in order

    @property
    def steps(self) -> int:
        """How many batches there are."""
        return len(self.sizes)

    @property
    def batches(self) -> tuple[Tensor, ...]:
        """Positions of each batch."""
        parts: tuple[Tensor, ...] = self.order.split(self.sizes)
        return parts

    def first(self, steps: int) -> Plan:
        """The plan's first steps alone."""
        sizes = self.sizes[:steps]
        return Plan(self.order[: sum(sizes)], sizes, self.crops, self.noise)

    def lay_noise(self, x: Tensor, first: int) -> None:
        """Lay noise over the batches from step `first` on, [steps, size, ...], and not over their padding."""
        if self.noise is not None:
            for size, batch in zip(self.sizes[first : first + len(x)], x, strict=True):
                batch[:size] = self.noise(batch[:size])

    def part(self, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """Positions and crops of the batches from step `first` up to `last`, end to end."""
        before = sum(self.sizes[:first])
        where = slice(before, before + sum(self.sizes[first:last]))
        return self.order[where], None if self.crops is None else self.crops[where]


class PlanRows(NamedTuple):
    """Some batches of several plans, [steps, plans, size]."""

    order: Tensor
    crops: Tensor | None
    real: Tensor | None  # whether each is an example and not padding; None: all are


def plan_rows(plans: Sequence[Plan], first: Sequence[int], steps: int, padded_to: int | None = None) -> PlanRows:
    """The next batches of several plans, each from a step of its own: all of one size, or padded to one.

    A batch that is shorter is padded with its first example.
    """
    orders, crops = zip(*[plan.part(a, a + steps) for plan, a in zip(plans, first, strict=True)], strict=True)
    cropped = crops[0] is not None
    if padded_to is None:
        rows = lambda parts: torch.stack([part.view(steps, -1) for part in parts], 1)  # noqa: E731
        return PlanRows(rows(orders), rows(crops) if cropped else None, None)
    # All plans at once, end to end: one by one, what little there is to do would take longer than gathering examples.
    each = torch.tensor([plan.sizes[a : a + steps] for plan, a in zip(plans, first, strict=True)])
    begin = each.flatten().cumsum(0).view_as(each) - each
    sizes, begin, column = each.t().unsqueeze(-1), begin.t().unsqueeze(-1), torch.arange(padded_to)
    real = column < sizes
    where = (begin + column * real).flatten()
    rows = lambda parts: torch.cat(parts).index_select(0, where).view(real.shape)  # noqa: E731
    return PlanRows(rows(orders), rows(crops) if cropped else None, real)


class Feed(Protocol):
    """The examples of every split, on one device."""

    num_classes: int
    examples: Tensor  # [N] private examples of every client

    def plan(self, client: int, data: Data, training: Training, stream: RandomStream) -> Plan:
        """The batches of a task."""
        ...

    def take(self, data: Data, positions: Tensor, crops: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x, y) at these positions, whatever their shape, cropped and flipped if asked."""
        ...

    def on_device(self, device: torch.device) -> Feed:
        """The same examples on another device."""
        ...

    def probe_batches(self, client: int, data: Data, stream: RandomStream) -> Iterator[Batch]:
        """All of the client's data once, in large batches, as a probe sees it."""
        ...

    def class_counts(self, client: int) -> Tensor:
        """How many examples of each class a client trains on, [C]."""
        ...

    def all(self, data: Data) -> tuple[Tensor, Tensor]:
        """(x, y) of a split."""
        ...
