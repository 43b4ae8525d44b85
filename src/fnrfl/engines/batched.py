"""Several clients in one batched step: the single-client step under `vmap`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor
from torch.func import vmap

from fnrfl.core.isolation import one_intra_op_thread
from fnrfl.core.net import Net
from fnrfl.core.step import Carry, by_transform, ready_to_transform
from fnrfl.core.types import SERVER, Data, Part, Probe, State, Step, Tree
from fnrfl.engines.base import InProcess, answered
from fnrfl.engines.job import Job, moved, parts
from fnrfl.engines.trace import leaves, of_leaves, one_by_one

ROWS = 16  # clients in a group, at most
FEW = 4  # sizes of last batches that are worth a program each
IN_DIMS = (0, 0, 0, 0, 0, 0, None, None, 0, 0, 0, 0)  # of a step: `shared` and `lr` have no client axis


class Batched(InProcess):
    """State has a client axis in front, [M, P]; groups of clients step together, the groups side by side.

    Groups are a rule of the clients' numbers of steps alone, so that results do not depend on the number of threads.
    """

    rows = ROWS

    def warm_up(self) -> None:
        ready_to_transform()

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public", at: State | None = None) -> Tree:
        masked = probe.training is not None and bool(self.net.drop_shapes)
        if data == "private" or not probe.asks_model or masked:  # everybody is asked about other examples, or masks
            return super().measure(cohort, probe, data=data, at=at)
        try:
            return self._measured_together(cohort, probe, data, at)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # of an operator that cannot be batched; one that is wrong says so again
            return super().measure(cohort, probe, data=data, at=at)

    def _measured_together(self, cohort: Tensor, probe: Probe, data: Data, at: State | None) -> Tree:
        clients = cohort.tolist()
        groups = [clients[i : i + self.rows] for i in range(0, len(clients), self.rows)]

        def ask(net: Net, g: int) -> list[Tree]:
            first = g * self.rows
            held = [self._asked(client, first + i, probe, at) or self.initial for i, client in enumerate(groups[g])]
            params = torch.stack([model.params for model in held]).to(net.device)
            buffers = {k: torch.stack([model.buffers[k] for model in held]).to(net.device) for k in held[0].buffers}
            total: Tree = {}
            for batch in self._shown(net, groups[g][0], probe, data):
                answer = lambda p, b, batch=batch: probe(answered(net, p, b, batch.x, probe, {}), batch)  # noqa: E731
                part = vmap(answer)(params, buffers)
                total = {k: total[k] + v if k in total else v for k, v in part.items()}
            return [probe.finish({k: v[i] for k, v in total.items()}) for i in range(len(held))]

        with torch.no_grad(), one_intra_op_thread():
            rows = [row for group in self.each(len(groups), ask) for row in group]
        return {k: torch.stack([row[k].to(self.net.device) for row in rows]) for k in rows[0]}

    def _run(self, job: Job) -> list[Tensor]:
        steps, sizes = job.steps, {size for plan in job.plans for size in plan.sizes}
        if not sizes:
            return [job.carry.params.new_zeros(0) for _ in steps]
        if len(sizes) > 1:
            return self._uneven(job)
        groups = in_groups(steps, self.rows)
        width, size = max(len(group) for group in groups), sizes.pop()
        if self.tracer is not None:
            worth = self._planned(job, width)
            for w in {w for group in groups for _, _, w in shrinking([steps[m] for m in group], width)}:
                self._program(job, groups[0], w, size, worth.get(w, 0))

        def train(net: Net, g: int) -> list[Tensor]:
            with self._blame(job, [job.clients[m] for m in groups[g]]):
                return self._group(net, job, groups[g], width, size)

        found = zip(groups, self.each(len(groups), train), strict=True)
        rows = {m: loss for group, losses in found for m, loss in zip(group, losses, strict=True)}
        return [rows[m] for m in range(len(steps))]

    def _planned(self, job: Job, width: int) -> dict[int, int]:
        """Steps of clients in groups of each number of rows, in all rounds.

        By the examples of all clients, whoever is in the cohort: a run that is gone on with must decide alike.
        """
        private, batch = job.task.data == "private", job.training.batch
        part = self.participation if private and job.clients != [SERVER] else 1.0
        sizes = self.sizes if private else [len(job.plans[0].order) // max(1, job.training.epochs)] * len(job.clients)
        steps = [-(-job.training.epochs * n // batch) for n in sizes]
        planned: dict[int, int] = {}
        for group in in_groups(steps, width):
            for first, last, w in shrinking([steps[m] for m in group], width):
                planned[w] = planned.get(w, 0) + (last - first) * w
        return {w: int(taken * self.rounds * part) for w, taken in planned.items()}

    def _group(self, net: Net, job: Job, group: list[int], width: int, size: int) -> list[Tensor]:
        """All steps of some clients, sorted by their number of steps; a group short of `width` has idle rows.

        A client that has finished is copied out, and its row goes on idly until the group shrinks past it: rows do not
        know of each other, and a step costs nearly the same with one row more.
        """
        steps = [job.steps[m] for m in group]
        carry, start, own = rows_of(job, padded(group, width), net.device)
        losses = carry.params.new_zeros(max(steps), width)
        for first, last, w in shrinking(steps, width):
            top = slice(0, w)
            fixed = job.fixed(carry.rows(top), State(start.params[top], _rows(start.buffers, top)), _rows(own, top))
            live = [m for m, n in zip(group, steps, strict=True) if n > first]
            for a, b in self._stretches(job, first, last, w):
                batch = parts(job.batches(dict.fromkeys(live, a), b - a, self._feed(net), idle=w - len(live)))
                losses[a:b, top] = self._steps(net, job, w, size, fixed, batch)
            for i, m in enumerate(group):
                if steps[i] == last:
                    _write(job.carry, m, carry, i)
        return [losses[:n, i].to(self.net.device) for i, n in enumerate(steps)]

    def _uneven(self, job: Job) -> list[Tensor]:
        """Batches of several sizes (`last_batch = "keep"`): clients wait for each other to have batches of one size."""
        losses: list[list[Tensor]] = [[] for _ in job.plans]
        at = [0] * len(job.plans)
        while True:
            waiting: dict[int, list[int]] = {}
            for m, plan in enumerate(job.plans):
                if at[m] < plan.steps:
                    waiting.setdefault(plan.sizes[at[m]], []).append(m)
            if not waiting:
                break
            size, rows = max(waiting.items(), key=lambda item: (len(item[1]), item[0]))
            rows = rows[: self.rows]
            width = next(w for w in halves(min(self.rows, len(job.plans))) if w >= len(rows))
            together = min(sum(1 for _ in takewhile(size.__eq__, job.plans[m].sizes[at[m] :])) for m in rows)
            if size == job.training.batch or self._few_sizes(job):
                self._program(job, rows, width, size)
            with self._blame(job, [job.clients[m] for m in rows]):
                carry, start, own = rows_of(job, padded(rows, width), self.net.device)
                fixed = job.fixed(carry, start, own)
                for a, b in self._stretches(job, 0, together, width):
                    batch = job.batches({m: at[m] + a for m in rows}, b - a, self.feed, idle=width - len(rows))
                    found = self._steps(self.net, job, width, size, fixed, parts(batch))
                    for i, m in enumerate(rows):
                        losses[m].append(found[:, i])
            for i, m in enumerate(rows):
                _write(job.carry, m, carry, i)
                at[m] += together
        return [torch.cat(row) if row else job.carry.params.new_zeros(0) for row in losses]

    def _few_sizes(self, job: Job) -> bool:
        """Whether the last batches of all clients have so few sizes that a program for each is worth it."""
        if job.task.data != "private":
            return True
        return len({n % job.training.batch for n in self.sizes}) <= FEW

    # -- one step, recorded or not ------------------------------------------------------------------------------------
    def _steps(
        self, net: Net, job: Job, width: int, size: int, fixed: tuple[Part, ...], batch: tuple[Part, ...]
    ) -> Tensor:
        """Steps of `width` clients with batches of a size, one after another."""
        program = None if self.tracer is None else self.tracer.get((width, size, job.key, net.device))
        if program is None:
            program = one_by_one(of_leaves(vmap(job.step(net, by_transform), in_dims=IN_DIMS), [*fixed, *batch]))
        return program(leaves(fixed), leaves(batch))

    def _program(self, job: Job, group: list[int], width: int, size: int, steps: int = 0) -> None:
        """Record such steps, if they are to be and have not been; clients will take about `steps` of them in all."""
        if self.tracer is None:
            return

        for net in self._everywhere():

            def example(net: Net = net) -> tuple[Step, tuple[Part, ...], tuple[Part, ...]]:
                rows = padded(group, width)[:width]
                step = vmap(job.step(net, by_transform), in_dims=IN_DIMS)
                batch = self._example(job, rows, size, self._feed(net))
                return step, job.fixed(*rows_of(job, rows, net.device)), parts(batch)

            self.tracer.program((width, size, job.key, net.device), example, steps)

    def _everywhere(self) -> list[Net]:
        """A net for each device."""
        return [self.net]


def in_groups(steps: Sequence[int], rows: int = ROWS) -> list[list[int]]:
    """Clients in groups of at most `rows`, those with the most steps first, as equal in number as can be.

    >>> in_groups([3, 9, 1, 8, 4])
    [[1, 3, 4, 0, 2]]
    """
    order = sorted(range(len(steps)), key=lambda m: -steps[m])  # stable
    size = -(-len(order) // -(-len(order) // rows))
    return [order[i : i + size] for i in range(0, len(order), size)]


def shrinking(steps: Sequence[int], width: int) -> list[tuple[int, int, int]]:
    """(first step, last step, rows): stretches between the ends of clients, rows halved as clients finish.

    Halves rather than as many as are left: every number of rows is another program.

    >>> shrinking([9, 4, 4, 2], 4)
    [(0, 2, 4), (2, 4, 4), (4, 9, 1)]
    """
    found, first = [], 0
    for last in sorted({n for n in steps if n}):
        live = sum(n > first for n in steps)
        found.append((first, last, next(w for w in halves(width) if w >= live)))
        first = last
    return found


def halves(width: int) -> list[int]:
    """1, ..., a half, the whole, rounded up.

    >>> halves(10)
    [1, 2, 3, 5, 10]
    """
    found = [width]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found[::-1]


def padded(rows: list[int], width: int) -> list[int]:
    """At least `width` rows, the last one again and again."""
    return rows + rows[-1:] * (width - len(rows))


def rows_of(job: Job, rows: list[int], device: torch.device) -> tuple[Carry, State, Tree]:
    """Copies of some clients' rows of a job, on a device."""
    where = torch.tensor(rows)
    carry = Carry(job.carry.params[where], _rows(job.carry.buffers, where), _rows(job.carry.memory, where))
    start = State(job.start.params[where], _rows(job.start.buffers, where))
    return carry.to(device), start.to(device), moved(_rows(job.own, where), device)


def _rows(tree: Tree, where: slice | Tensor) -> Tree:
    return {k: v[where] for k, v in tree.items()}


def _write(into: Carry, m: int, new: Carry, i: int) -> None:
    into.params[m] = new.params[i]
    for old, trees in ((into.buffers, new.buffers), (into.memory, new.memory)):
        for k in old:
            old[k][m] = trees[k][i]
