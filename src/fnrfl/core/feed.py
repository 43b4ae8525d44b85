"""Where engines get examples from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

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

    def positions(self, first: int, last: int) -> Tensor:
        """Positions of the batches from step `first` up to `last`, which are of one size, [steps, batch]."""
        return self._batches(self.order, first, last)

    def crops_of(self, first: int, last: int) -> Tensor | None:
        """The same of `crops`."""
        return None if self.crops is None else self._batches(self.crops, first, last)

    def _batches(self, of: Tensor, first: int, last: int) -> Tensor:
        size, before = self.sizes[first], sum(self.sizes[:first])
        return of[before : before + size * (last - first)].view(last - first, size)


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

    def all(self, data: Data) -> tuple[Tensor, Tensor]:
        """(x, y) of a split."""
        ...
