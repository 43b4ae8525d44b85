"""All clients of a chunk in one batched step: the single-client step under `vmap`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap

from fnrfl.core.step import Carry, by_transform, local_step
from fnrfl.core.types import Batch, State, Tree
from fnrfl.engines.base import InProcess, Job


class Batched(InProcess):
    """State has a client axis in front, [M, P].

    Clients are sorted by their number of steps and the group shrinks as they finish, so nothing is padded or masked.
    Batches of different sizes (`last_batch = "keep"`) are stepped in groups of equal size.
    """

    def warm_up(self) -> None:
        vmap(grad(torch.sum))(torch.zeros(1, 1))  # imports hundreds of modules the first time

    def _run(self, job: Job) -> list[Tensor]:
        steps = [len(plan.positions) for plan in job.plans]
        order = sorted(range(len(steps)), key=lambda m: -steps[m])  # stable
        in_order = order == list(range(len(steps)))
        start, own, carry = job.start, job.own, job.carry
        if not in_order:
            rows = torch.tensor(order)
            start = State(start.params[rows], _rows(start.buffers, rows))
            own, carry = _rows(own, rows), _carry(carry, rows)
        losses: list[list[Tensor]] = [[] for _ in order]
        for step in range(max(steps)):
            active = [m for m in order if steps[m] > step]
            with self._blame(job, [job.clients[m] for m in active]):
                batches = [job.batch(m, step, self.feed) for m in active]
                for group in _equal_sizes(batches):
                    together = _stack([batches[i] for i in group])
                    for i, loss in zip(group, self._step(job, group, together, start, own, carry), strict=True):
                        losses[active[i]].append(loss)
        if not in_order:
            _write(job.carry, rows, carry)
        return [torch.stack(row) if row else job.carry.params.new_zeros(0) for row in losses]

    def _step(self, job: Job, group: list[int], batch: Batch, start: State, own: Tree, carry: Carry) -> Tensor:
        """One step of the rows in `group`; returns their losses."""
        prefix = group == list(range(len(group)))
        where: slice | Tensor = slice(0, len(group)) if prefix else torch.tensor(group)
        mine = carry.rows(where) if isinstance(where, slice) else _carry(carry, where)

        def one(
            params: Tensor, buffers: Tree, memory: Tree, travel: Tensor, x: Tensor, y: Tensor, index: Tensor,
            noise: Tree, begin: Tensor, begin_buffers: Tree, own: Tree,
        ) -> Tensor:  # fmt: skip
            return local_step(
                self.net,
                job.task.objective,
                job.training,
                Carry(params, buffers, memory, travel),
                State(begin, begin_buffers),
                Batch(x, y, index, noise),
                job.task.shared,
                own,
                by_transform,
            )

        loss: Tensor = vmap(one)(
            mine.params, mine.buffers, mine.memory, mine.travel, batch.x, batch.y, batch.index, batch.noise,
            start.params[where], _rows(start.buffers, where), _rows(own, where),
        )  # fmt: skip
        if not prefix:
            assert isinstance(where, Tensor)
            _write(carry, where, mine)
        return loss


def _equal_sizes(batches: list[Batch]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, batch in enumerate(batches):
        groups.setdefault(len(batch.y), []).append(i)
    return list(groups.values())


def _stack(batches: list[Batch]) -> Batch:
    noise = {k: torch.stack([b.noise[k] for b in batches]) for k in batches[0].noise}
    return Batch(
        torch.stack([b.x for b in batches]),
        torch.stack([b.y for b in batches]),
        torch.stack([b.index for b in batches]),
        noise,
    )


def _rows(tree: Tree, where: slice | Tensor) -> Tree:
    return {k: v[where] for k, v in tree.items()}


def _carry(carry: Carry, rows: Tensor) -> Carry:
    return Carry(carry.params[rows], _rows(carry.buffers, rows), _rows(carry.memory, rows), carry.travel[rows])


def _write(into: Carry, rows: Tensor, new: Carry) -> None:
    into.params[rows] = new.params
    into.travel[rows] = new.travel
    for old, trees in ((into.buffers, new.buffers), (into.memory, new.memory)):
        for k in old:
            old[k][rows] = trees[k]
