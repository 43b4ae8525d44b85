"""A task for some clients, with everything that their steps need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.engine import Step
from fnrfl.core.feed import Feed, Plan, plan_rows
from fnrfl.core.net import Net
from fnrfl.core.rng import generator
from fnrfl.core.step import Carry, Gradient, local_step
from fnrfl.core.training import Training
from fnrfl.core.trees import Tree
from fnrfl.core.values import Batch, LocalTask, Shapes, State
from fnrfl.engines.devices import Worker


class Fixed(NamedTuple):
    """What a step reads and does not change."""

    start: State
    own: Tree
    shared: Tree
    lr: Tensor | float
    scale: Tree  # of the net's inputs: an argument, so that runs on other data can use a recorded step


CLIENT_AXES = (0, Fixed(0, 0, None, None, None), 0)  # type: ignore[arg-type]  # of (carry, fixed, batch) under `vmap`


@dataclass(frozen=True)
class Job:
    """A task for a chunk of the cohort, with everything that its steps need."""

    clients: list[int]
    task: LocalTask
    training: Training
    start: State  # [M, P]
    own: Tree  # [M, ...]
    plans: list[Plan]
    draws: list[Callable[[int, int], Tree]]  # steps, batch size -> the uniform numbers of client m's next steps
    noise_shapes: Callable[[int], Shapes]  # batch size -> the shapes of the uniform numbers of a step
    carry: Carry  # [M, ...]
    scale: Tree  # of the net's inputs; empty if they are not scaled
    # (shared, learning rate, scale of inputs) on each device that was asked for
    _same_for_all: dict[torch.device, tuple[Tree, Tensor, Tree]] = field(default_factory=dict, compare=False)

    @cached_property
    def steps(self) -> list[int]:
        """How many steps each client takes."""
        return [plan.steps for plan in self.plans]

    def batches(
        self, at: Mapping[int, int], steps: int, feed: Feed, *, idle: int = 0, padded_to: int | None = None
    ) -> Batch:
        """Some clients' next batches, [steps, clients, ...]; to be asked for in order.

        `at` has each row's first step; `idle` more rows repeat the first row's. Batches are all of one size, or are
        padded to one.
        """
        rows = [*at.items(), *list(at.items())[:1] * idle]
        part = plan_rows([self.plans[m] for m, _ in rows], [first for _, first in rows], steps, padded_to)
        x, y = feed.take(self.task.data, part.order, part.crops)
        for i, (m, first) in enumerate(at.items()):
            self.plans[m].lay_noise(x[:, i], first)
        noise = [self._drawn(m, first, steps, padded_to) for m, first in at.items()] if self.noise_shapes(1) else [{}]
        filled = lambda drawn: torch.stack(drawn + drawn[:1] * idle, 1)  # noqa: E731
        uniform = {k: filled([draw[k] for draw in noise]).to(x.device, non_blocking=True) for k in noise[0]}
        real = part.real
        marks = {} if real is None else {"real": real.to(x.device, self.start.params.dtype, non_blocking=True)}
        return Batch(x, y, part.order.to(x.device, non_blocking=True), uniform, marks)

    def _drawn(self, m: int, first: int, steps: int, padded_to: int | None) -> Tree:
        """A client's uniform numbers of some steps, [steps, ...]: drawn for its examples, and 0 for padding."""
        sizes = self.plans[m].sizes[first : first + steps]
        if padded_to is None:
            return self.draws[m](steps, sizes[0])
        wanted, drawn = self.noise_shapes(padded_to), []
        for size, run in groupby(sizes):
            some = self.draws[m](len(list(run)), size)
            drawn.append({k: _padded(some[k], shape) for k, shape in wanted.items()})
        return {k: torch.cat([some[k] for some in drawn]) for k in wanted}

    def batches_of(self, m: int, first: int, last: int, worker: Worker) -> Iterator[tuple[int, Batch]]:
        """One client's batches from step `first` up to `last`: (size, [steps, size, ...]) of those of one size.

        Their examples are gathered at once: that takes as long as many small batches do.
        """
        plan = self.plans[m]
        index, crops = plan.part(first, last)
        x, y = worker.feed.take(self.task.data, index, crops)
        if plan.noise is not None:
            for batch in x.split(plan.sizes[first:last]):
                batch.copy_(plan.noise(batch))
        x, index, taken, draws = worker.net.laid_out(x), index.to(x.device), 0, bool(self.noise_shapes(1))
        for size, run in groupby(plan.sizes[first:last]):
            steps = len(list(run))
            some = slice(taken, taken + steps * size)
            x_, y_, index_ = (t[some].view(steps, size, *t.shape[1:]) for t in (x, y, index))
            yield size, Batch(x_, y_, index_, trees.moved(self.draws[m](steps, size), x.device) if draws else {})
            taken = some.stop

    def example_batch(
        self, rows: Sequence[int], size: int, feed: Feed, dtype: torch.dtype, *, padded: bool = False
    ) -> Batch:
        """A batch of some clients, [M, size, ...], that takes nothing from their random streams.

        A client may have fewer examples than a batch: they come again. With `padded`, its last example is padding.
        """
        orders = [order if len(order) else self.plans[rows[0]].order for order in (self.plans[m].order for m in rows)]
        index = torch.stack([order[torch.arange(size) % len(order)] for order in orders])
        x, y = feed.take(self.task.data, index)
        stream = generator(0, "example")
        drawn = {k: torch.rand(len(rows), *s, generator=stream) for k, s in self.noise_shapes(index.shape[1]).items()}
        noise = {k: v.to(x.device, dtype) for k, v in drawn.items()}  # examples may be whole numbers
        real = (torch.arange(size, device=x.device) < max(1, size - 1)).to(dtype).expand(len(rows), -1).contiguous()
        return Batch(x, y, index.to(x.device), noise, {"real": real} if padded else {})

    def step(self, net: Net, gradient: Gradient) -> Step:
        """One step of one client as a function of everything that it reads and writes."""
        if self.training.frozen:
            net.mask(self.training.frozen)  # made now and kept: a mask made while recording is made in every step

        def step(carry: Carry, fixed: Fixed, batch: Batch) -> Tensor:
            start, own, shared, lr, scale = fixed
            objective, training = self.task.objective, self.training
            return local_step(
                net.scaling_by(scale), objective, training, carry, start, batch, shared, own, lr, gradient
            )

        return step

    def fixed(self, start: State, own: Tree, device: torch.device) -> Fixed:
        """What the steps of some clients read, on a device; the learning rate is a tensor, for recorded steps."""
        if device not in self._same_for_all:
            lr = self.start.params.new_tensor(self.training.lr)
            self._same_for_all[device] = trees.moved((self.task.shared, lr, self.scale), device)
        shared, lr, scale = self._same_for_all[device]
        return Fixed(start, own, shared, lr, scale)

    def rows(self, rows: list[int], device: torch.device) -> tuple[Carry, Fixed]:
        """Copies of some clients' carries and of what their steps read, on a device."""
        where = torch.tensor(rows)
        picked = lambda t: t.index_select(0, where.to(t.device)).to(device)  # noqa: E731  (t[where]: number by number)
        carry, start, own = trees.mapped(picked, (self.carry, self.start, self.own))
        return carry, self.fixed(start, own, device)

    @cached_property
    def key(self) -> Hashable:
        """What a recorded step depends on beside the number of clients."""
        own = tuple((k, v.shape[1:], v.dtype) for k, v in sorted(self.own.items()))
        shared = tuple((k, v.shape, v.stride(), v.dtype) for k, v in sorted(self.task.shared.items()))
        objective = self.task.objective
        code = tuple(getattr(type(objective), name) for name in ("loss", "correct", "shift"))
        return objective, code, self.training.step_options(), own, shared


def _padded(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[steps, *shape] of a tensor whose other axes may be shorter: zeros come after it."""
    whole = t.new_zeros(len(t), *shape)
    whole[tuple(map(slice, t.shape))] = t
    return whole


def write_rows(carry: Carry, rows: list[int], other: Carry, there: slice | list[int]) -> None:
    """Take over some clients' rows of a carry from another."""
    where = torch.tensor(rows)
    for old, new in zip(trees.leaves(carry), trees.leaves(other), strict=True):
        old.index_copy_(0, where.to(old.device), new[there].to(old.device))
