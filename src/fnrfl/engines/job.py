"""A task for some clients, with everything that their steps need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fnrfl.core.net import Net
from fnrfl.core.step import Carry, Gradient, by_autograd, local_step
from fnrfl.core.types import Batch, Feed, LocalTask, Part, Plan, State, Step, Training, Tree


@dataclass(frozen=True)
class Job:
    """A task for a chunk of the cohort, with everything its steps need."""

    clients: list[int]
    task: LocalTask
    training: Training
    start: State  # [M, P]
    own: Tree  # [M, ...]
    plans: list[Plan]
    draws: list[Callable[[int, int], Tree]]  # steps, batch size -> the uniform numbers of client m's next steps
    carry: Carry  # [M, ...]
    lr: Tensor

    @cached_property
    def steps(self) -> list[int]:
        """How many steps each client takes."""
        return [plan.steps for plan in self.plans]

    def batches(self, at: Mapping[int, int], steps: int, feed: Feed, idle: int = 0) -> Batch:
        """Some clients' next batches, [steps, clients, ...], all of one size; to be asked for in order.

        `at` has each row's first step; `idle` more rows repeat the first row's.
        """
        positions = [self.plans[m].stretch(first, first + steps) for m, first in at.items()]
        crops = [crop for m, first in at.items() if (crop := self.plans[m].crops_of(first, first + steps)) is not None]
        noise = [self.draws[m](*positions[0].shape) for m in at]
        filled = lambda rows: torch.stack(rows + rows[:1] * idle, 1)  # noqa: E731
        index = filled(positions)
        x, y = feed.take(self.task.data, index, filled(crops) if crops else None)
        for i, m in enumerate(at):
            lay = self.plans[m].noise
            if lay is not None:
                for batch in x[:, i]:
                    batch.copy_(lay(batch))
        uniform = {k: filled([draw[k] for draw in noise]).to(x.device, non_blocking=True) for k in noise[0]}
        return Batch(x, y, index.to(x.device, non_blocking=True), uniform)

    def step(self, net: Net, gradient: Gradient) -> Step:
        """One step of one client as a function of all that it reads and writes."""
        if self.training.frozen:
            net.mask(self.training.frozen)  # made now and kept: what is made while recording is made in every step

        def step(
            params: Tensor, buffers: Tree, memory: Tree, begin: Tensor, begin_buffers: Tree, own: Tree, shared: Tree,
            lr: Tensor, x: Tensor, y: Tensor, index: Tensor, noise: Tree,
        ) -> Tensor:  # fmt: skip
            by = self.training.lr if gradient is by_autograd else lr  # autograd is never recorded
            return local_step(
                net,
                self.task.objective,
                self.training,
                Carry(params, buffers, memory),
                State(begin, begin_buffers),
                Batch(x, y, index, noise),
                shared,
                own,
                by,
                gradient,
            )

        return step

    def fixed(self, carry: Carry, start: State, own: Tree) -> tuple[Part, ...]:
        """The arguments of `step` that stay the same objects from step to step."""
        device = carry.params.device
        return (
            carry.params, carry.buffers, carry.memory, start.params, start.buffers, own,
            moved(self.task.shared, device), self.lr.to(device),
        )  # fmt: skip

    @cached_property
    def key(self) -> Hashable:
        """What a recorded step depends on beside the number of clients."""
        own = tuple((k, v.shape[1:], v.dtype) for k, v in sorted(self.own.items()))
        shared = tuple((k, v.shape, v.stride(), v.dtype) for k, v in sorted(self.task.shared.items()))
        return self.task.objective, replace(self.training, lr=0.0), own, shared


def parts(batch: Batch) -> tuple[Part, ...]:
    """The arguments of a step that differ from step to step."""
    return batch.x, batch.y, batch.index, batch.noise


def moved(tree: Tree, device: torch.device) -> Tree:
    """A tree elsewhere."""
    return {k: v.to(device) for k, v in tree.items()}


def row(tree: Tree, m: int) -> Tree:
    """Client m of a stacked tree."""
    return {k: v[m] for k, v in tree.items()}


def model_row(state: State, m: int) -> State:
    """Client m of stacked models."""
    return State(state.params[m], row(state.buffers, m))
