"""Which examples a client sees, in which order, and how they become tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from fnrfl.core.errors import CompatibilityError
from fnrfl.core.feed import forward_batch
from fnrfl.core.ndarrays import Ragged
from fnrfl.core.rng import elsewhere, generator
from fnrfl.core.types import SERVER, Batch, Data, Plan, RandomStream, Training
from fnrfl.data import augment


def plan(n: int, training: Training, stream: RandomStream) -> Plan:
    """Which of n examples each step sees.

    run-on: the epochs' orders end to end, cut into full batches, the last one filled from its order's start;
    keep: a shorter last batch each epoch; drop: without it; even: as many batches as keep, as equal as can be.
    """
    batch, epochs = training.batch, training.epochs
    if not epochs:
        return Plan(torch.arange(0), [])
    if training.shuffle:
        order = stream("batches")
        orders = [torch.randperm(n, generator=order) for _ in range(epochs)]
    else:
        orders = [torch.arange(n)] * epochs
    if training.last_batch == "run-on":
        missing = -(epochs * n) % batch
        again = orders[-1] if missing <= n else orders[-1].repeat(-(-missing // n))
        filled = torch.cat([*orders, again[:missing]])
        return Plan(filled, [batch] * (len(filled) // batch))
    full, rest = divmod(n, batch)
    if training.last_batch == "drop":
        return Plan(torch.cat([order[: full * batch] for order in orders]), [batch] * full * epochs)
    if training.last_batch == "even":
        count = -(-n // batch)
        sizes = [n // count + (i < n % count) for i in range(count)]
    else:
        sizes = [batch] * full + [rest] * (rest > 0)
    return Plan(torch.cat(orders), sizes * epochs)


class Pool:
    """Examples of every split, and the clients' shards of the training set."""

    def __init__(
        self,
        parts: Mapping[str, tuple[Tensor, Tensor]],
        shards: Sequence[Tensor],
        num_classes: int,
        *,
        sizes: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        noise: Callable[[int, Tensor, torch.Generator], Tensor] | None = None,
        redraw: bool = True,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`parts` has "private" (what `shards` index), "public", "ranking", "distill", "validation", or some of them.

        They lie on `device`, as bytes if they are bytes. `noise(client, x, stream)` lays a client's feature noise over
        a batch: each time that the examples are used (`redraw`), or once, when the pool is made. Where the examples of
        some clients are elsewhere, their shards are empty, and `sizes` says how many everybody has.
        """
        self.num_classes, self.dtype, self.shards = num_classes, dtype, Ragged.joined(shards, torch.cat)
        held = self.shards.sizes
        self.examples = torch.tensor(held if sizes is None else sizes, dtype=torch.float64)
        self._elsewhere = set() if sizes is None else set(np.flatnonzero(held < np.array(sizes)).tolist())
        self.device = torch.device(device)
        self._parts = {k: (x.to(self.device), y.to(self.device)) for k, (x, y) in parts.items()}
        self._noise = noise if redraw else None
        if noise is not None and not redraw and "private" in parts:
            x, y = self._parts["private"]
            x = scaled(x, torch.float32).clone()
            for client, shard in enumerate(shards):
                x[shard] = noise(client, x[shard], self._on_device(generator(seed, client, "feature-noise")))
            self._parts["private"] = x, y

    def on_device(self, device: torch.device) -> Pool:
        """The same examples on another device."""
        if device == self.device:
            return self
        other = copy(self)
        other.device = device
        other._parts = {k: (x.to(device), y.to(device)) for k, (x, y) in self._parts.items()}
        return other

    def in_type(self, dtype: torch.dtype) -> Pool:
        """The same examples, handed out as numbers of another type."""
        other = copy(self)
        other.dtype = dtype
        return other

    def only(self, client: int | None) -> Pool:
        """The pool of a machine that has the private examples of one client, or of none: it knows how many there are.

        Nothing else of the clients' examples is kept.
        """
        other, (x, y) = copy(self), self._parts["private"]
        mine = torch.arange(0) if client is None else self._shard(client)
        here = np.where(np.arange(len(self.shards)) == client, len(mine), 0)
        other.shards = Ragged(torch.arange(len(mine)), here)
        other._elsewhere = set(range(len(self.shards))) - {client}
        other._parts = self._parts | {"private": (x[mine.to(self.device)], y[mine.to(self.device)])}
        return other

    def take(self, data: Data, positions: Tensor, crops: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x, y) at these positions, pixels as numbers in [0, 1]."""
        x, y = self._parts[data]
        flat = positions.to(self.device, non_blocking=True).reshape(-1)
        # index_select: many times faster than x[positions], which goes number by number
        picked, labels = (t.index_select(0, flat).view(*positions.shape, *t.shape[1:]) for t in (x, y))
        if crops is not None:
            picked = augment.crop_flip(picked, crops.to(self.device, non_blocking=True))
        return scaled(picked, self.dtype), labels

    def plan(self, client: int, data: Data, training: Training, stream: RandomStream) -> Plan:
        """The batches of one task of one client."""
        private = data == "private"
        shard = torch.arange(len(self._parts[data][1])) if not private else self._shard(client)
        made = plan(len(shard), training, stream)
        cropped = augment.resolve(training.augment, tuple(self._parts[data][0].shape[1:]))
        crops = augment.draw_crop_flip(len(made.order), stream("augment")) if cropped else None
        # The server, standing for everybody, sees examples without anybody's noise.
        noise = self._noise_of(client, stream) if private and client != SERVER else None
        return Plan(shard.index_select(0, made.order), made.sizes, crops, noise)

    def _shard(self, client: int) -> Tensor:
        """The positions of a client's examples; of everybody's for the server. Refused if they are elsewhere."""
        if self._elsewhere and (client == SERVER or client in self._elsewhere):
            whose = "the clients" if client == SERVER else f"client {client}"
            raise CompatibilityError(
                f"The private examples of {whose} are not on this machine: on a network each client keeps its own. "
                "Choose a method that trains at the clients, or run it in the simulator."
            )
        mine: Tensor = self.shards.flat if client == SERVER else self.shards[client]
        return mine

    def probe_batches(self, client: int, data: Data, stream: RandomStream) -> Iterator[Batch]:
        """All of a client's data, as a probe sees it: no augmentation, but the client's own noise."""
        private = data == "private"
        positions = self._shard(client) if private else torch.arange(len(self._parts[data][1]))
        noise = self._noise_of(client, stream) if private else None
        for chunk in positions.to(self.device).split(forward_batch(self.device)):
            x, y = self.take(data, chunk)
            yield Batch(x if noise is None else noise(x), y, chunk)

    def class_counts(self, client: int) -> Tensor:
        """How many private examples of each class a client has, [C]; of the server's, which stands for everybody."""
        mine = self._shard(client).to(self.device)
        return self._parts["private"][1][mine].bincount(minlength=self.num_classes)

    def all(self, data: Data) -> tuple[Tensor, Tensor]:
        """(x, y) of a split, pixels as numbers in [0, 1]."""
        if data == "private":
            self._shard(SERVER)  # refused where some are elsewhere
        return self.take(data, torch.arange(len(self._parts[data][1])))

    def _noise_of(self, client: int, stream: RandomStream) -> Callable[[Tensor], Tensor] | None:
        """A client's feature noise over a batch, drawn where the examples are; None if there is none."""
        if self._noise is None:
            return None
        noise, draws = self._noise, self._on_device(stream("noise"))
        return lambda x: noise(client, x, draws)

    def _on_device(self, stream: torch.Generator) -> torch.Generator:
        return elsewhere(stream, self.device)


def scaled(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Examples in a net's type: pixels stored as bytes become numbers in [0, 1]; anything else keeps its scale."""
    return x.to(dtype).div_(255) if x.dtype == torch.uint8 else x.to(dtype)


def check_fits(x: Tensor, dtype: torch.dtype, what: str) -> None:
    """Refuse examples that a net cannot take: numbers beyond its type, or fractions where it takes whole numbers."""
    if not dtype.is_floating_point and x.dtype != torch.int64:
        raise CompatibilityError(
            f"{what} holds {str(x.dtype).removeprefix('torch.')}, and the model takes whole numbers as they are "
            "(tokens). Store them as int64."
        )
    if dtype.is_floating_point and x.dtype == torch.float64 and dtype != x.dtype and x.numel():
        largest, most = x.nan_to_num(0.0).abs().max(), torch.finfo(dtype).max  # NaN: a missing value
        if largest > most:
            raise CompatibilityError(
                f"{what} holds a number as large as {float(largest):.3g}, and the model computes in "
                f"{str(dtype).removeprefix('torch.')}, which ends at {most:.3g}. Scale the data, or set "
                "engine.precision = float64."
            )
