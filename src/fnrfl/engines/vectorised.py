"""Several clients in one batched step: the single-client step under `vmap`."""

from __future__ import annotations

from itertools import takewhile

import torch
from torch import Tensor
from torch.func import vmap

from fnrfl.core import trees
from fnrfl.core.engine import Step, run_steps
from fnrfl.core.step import Carry, by_transform, ready_to_transform
from fnrfl.core.trees import Tree
from fnrfl.core.values import Batch
from fnrfl.engines.expected import NOTHING_KNOWN, ExpectedWork
from fnrfl.engines.groups import GROUP_SIZE, halves, in_groups, padded, shrinking
from fnrfl.engines.job import CLIENT_AXES, Fixed, Job
from fnrfl.engines.place import Place, Station
from fnrfl.engines.recorder import Program, Recorder, Wanted
from fnrfl.engines.runner import Blame, Probing, stretches


class Vectorised:
    """Models have a client axis in front, [M, P]; groups of clients step together, the groups side by side.

    Groups are a rule of the clients' numbers of steps alone, so that results do not depend on the number of threads.
    """

    def __init__(
        self, recorder: Recorder | None = None, expected: ExpectedWork = NOTHING_KNOWN, *, group_size: int = GROUP_SIZE
    ) -> None:
        self.recorder, self.expected, self.group_size = recorder, expected, group_size

    def warm_up(self) -> None:
        ready_to_transform()

    # -- probes -------------------------------------------------------------------------------------------------------
    def measure(self, probing: Probing, place: Place) -> list[Tree]:
        request = probing.request
        one_by_one = lambda: place.each(len(request.clients), probing.answer)  # noqa: E731
        masked = request.probe.training is not None and bool(place.net.drop_shapes)
        differ = request.data == "private" or masked  # each client sees other numbers
        if differ or not (request.probe.asks_model and place.probes_together):
            return one_by_one()
        try:
            return self._measure_together(probing, place)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # of an operator that cannot be batched; one that is wrong says so again
            return one_by_one()

    def _measure_together(self, probing: Probing, place: Place) -> list[Tree]:
        request = probing.request
        groups = [range(i, i + self.group_size) for i in range(0, len(request.clients), self.group_size)]

        def ask(station: Station, g: int) -> list[Tree]:
            net, rows = station.net, [m for m in groups[g] if m < len(request.clients)]
            models = trees.moved(trees.stacked([probing.model(m) for m in rows]), net.device)
            total: Tree = {}
            for batch in probing.batches(station, request.clients[rows[0]]):
                answer = lambda p, b, batch=batch: request.probe(probing.forward(net, p, b, batch), batch)  # noqa: E731
                total = request.probe.add(total, vmap(answer)(models.params, models.buffers))
            return [request.probe.finish({k: v[i] for k, v in total.items()}) for i in range(len(rows))]

        return [answer for group in place.each(len(groups), ask) for answer in group]

    # -- training -----------------------------------------------------------------------------------------------------
    def run(self, job: Job, place: Place, blame: Blame) -> list[Tensor]:
        steps, sizes = job.steps, {size for plan in job.plans for size in plan.sizes}
        if not sizes:
            return [job.carry.params.new_zeros(0) for _ in steps]
        groups = in_groups(steps, self.group_size)
        width, even = max(len(group) for group in groups), len(sizes) == 1
        programs = self._programs(job, place, groups, width, sizes)

        def train(station: Station, g: int) -> list[Tensor]:
            with blame([job.clients[m] for m in groups[g]]):
                train_group = self._train_group if even else self._train_uneven_group
                return train_group(station, place, job, groups[g], width, programs)

        losses = zip(groups, place.each(len(groups), train), strict=True)
        by_row = {m: loss for group, rows in losses for m, loss in zip(group, rows, strict=True)}
        return [by_row[m] for m in range(len(steps))]

    def _train_group(
        self, station: Station, place: Place, job: Job, group: list[int], width: int, programs: Programs
    ) -> list[Tensor]:
        """All steps of some clients, sorted by their number of steps; a group short of `width` has idle rows.

        A client that has finished is copied out, and its row goes on idly until the group shrinks past it: rows do not
        know of each other, and a step costs nearly the same with one row more.
        """
        net, steps = station.net, [job.steps[m] for m in group]
        carry, fixed = job.rows(padded(group, width), net.device)
        losses = carry.params.new_zeros(max(steps), width)
        for first, last, w in shrinking(steps, width):
            top = slice(0, w)
            program = programs.get((net.device, w, job.plans[group[0]].sizes[0])) or _plain_program(job, station)
            some = fixed._replace(start=trees.rows(fixed.start, top), own=trees.rows(fixed.own, top))
            live = [m for m, n in zip(group, steps, strict=True) if n > first]
            for a, b in stretches(job, place, first, last, w):
                batches = job.batches(dict.fromkeys(live, a), b - a, station.feed, idle=w - len(live))
                losses[a:b, top] = program(trees.rows(carry, top), some, batches)
            for i, m in enumerate(group):
                if steps[i] == last:
                    job.write(m, carry, i)
        return [losses[:n, i].to(place.net.device) for i, n in enumerate(steps)]

    def _train_uneven_group(
        self, station: Station, place: Place, job: Job, group: list[int], width: int, programs: Programs
    ) -> list[Tensor]:
        """Batches of several sizes (`last_batch = "keep"`): clients wait for each other to have batches of one size.

        A size that is recorded for one client is taken by one client after another.
        """
        device, full = station.net.device, job.training.batch
        losses: dict[int, list[Tensor]] = {m: [] for m in group}
        at = dict.fromkeys(group, 0)
        while waiting := [m for m in group if at[m] < job.steps[m]]:
            size, rows = _most_alike(job, waiting, at)
            if size != full and (device, 1, size) in programs:
                rows = rows[:1]
            w = next(w for w in halves(width) if w >= len(rows))
            program = programs.get((device, w, size)) or _plain_program(job, station)
            stepped = self._step_together(station, place, job, {m: at[m] for m in rows}, w, program)
            for i, m in enumerate(rows):
                losses[m].append(stepped[:, i])
                at[m] += len(stepped)
        none = job.carry.params.new_zeros(0)
        return [torch.cat(losses[m]) if losses[m] else none for m in group]

    def _step_together(
        self, station: Station, place: Place, job: Job, at: dict[int, int], width: int, program: Program
    ) -> Tensor:
        """Steps of some clients for as long as their batches have one size; the losses, [steps, clients]."""
        rows = list(at)
        together = min(_num_alike(job.plans[m].sizes[first:]) for m, first in at.items())
        carry, fixed = job.rows(padded(rows, width), station.net.device)
        losses = []
        for a, b in stretches(job, place, 0, together, width):
            now = {m: first + a for m, first in at.items()}
            batches = job.batches(now, b - a, station.feed, idle=width - len(rows))
            losses.append(program(carry, fixed, batches).to(place.net.device))
        for i, m in enumerate(rows):
            job.write(m, carry, i)
        return torch.cat(losses)

    # -- programs -----------------------------------------------------------------------------------------------------
    def _programs(self, job: Job, place: Place, groups: list[list[int]], width: int, sizes: set[int]) -> Programs:
        """Programs for every number of rows that the groups will have, on every device."""
        if self.recorder is None:
            return {}
        if len(sizes) == 1:
            (size,) = sizes
            steps = [[job.steps[m] for m in group] for group in groups]
            rows = {(w, size) for each in steps for _, _, w in shrinking(each, width)}
        else:
            most = self.recorder.backend.max_programs // 2
            rows = {(w, job.training.batch) for w in halves(width)} | {
                (1, n) for n in self.expected.frequent_sizes(job, sizes, most)
            }
        expected = self.expected.compiled_together(job, width)
        # The widest first: it takes longest to compile.
        asked = [(station, *row) for row in sorted(rows, reverse=True) for station in place.devices()]
        wanted = [self._wanted(job, station, groups[0], w, n, expected.get(w, 0)) for station, w, n in asked]
        found = zip(asked, self.recorder.programs_of(wanted), strict=True)
        return {(station.net.device, w, n): program for (station, w, n), program in found if program is not None}

    def _wanted(
        self, job: Job, station: Station, group: list[int], width: int, size: int, expected_steps: int = 0
    ) -> Wanted:
        """A step of `width` clients with batches of a size, to be recorded."""
        net = station.net

        def example() -> tuple[Step, Carry, Fixed, Batch]:
            rows = padded(group, width)[:width]
            batch = job.example_batch(rows, size, station.feed, net.dtype)
            return _vectorised_step(job, station), *job.rows(rows, net.device), batch

        return Wanted((width, size, job.key, net.device), example, expected_steps)


Programs = dict[tuple[torch.device, int, int], Program]  # (device, number of rows, batch size) -> recorded steps


def _most_alike(job: Job, waiting: list[int], at: dict[int, int]) -> tuple[int, list[int]]:
    """The batch size that most of some clients wait for, and these clients."""
    by_size: dict[int, list[int]] = {}
    for m in waiting:
        by_size.setdefault(job.plans[m].sizes[at[m]], []).append(m)
    return max(by_size.items(), key=lambda item: (len(item[1]), item[0]))


def _num_alike(sizes: list[int]) -> int:
    """How many batches in front are of one size."""
    return sum(1 for _ in takewhile(sizes[0].__eq__, sizes))


def _vectorised_step(job: Job, station: Station) -> Step:
    return vmap(job.step(station.net, by_transform), in_dims=CLIENT_AXES)


def _plain_program(job: Job, station: Station) -> Program:
    """The vectorised step as it is, once for every turn."""
    step = _vectorised_step(job, station)
    return lambda carry, fixed, batches: run_steps(step, carry, fixed, batches)
