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
from fnrfl.core.values import SERVER, Batch
from fnrfl.engines.groups import GROUP_SIZE, halves, in_groups, padded, shrinking
from fnrfl.engines.job import CLIENT_AXES, Fixed, Job
from fnrfl.engines.place import Place, Station
from fnrfl.engines.recorder import Program, Recorder, Wanted
from fnrfl.engines.runner import Blame, Probing, added, stretches

MAX_LAST_SIZES = 4  # sizes of last batches that are worth a program each


class Vectorised:
    """Models have a client axis in front, [M, P]; groups of clients step together, the groups side by side.

    Groups are a rule of the clients' numbers of steps alone, so that results do not depend on the number of threads.
    `sizes` are the examples of all clients, of which about the part `participation` is active in each of `rounds`.
    """

    def __init__(
        self,
        recorder: Recorder | None = None,
        *,
        group_size: int = GROUP_SIZE,
        sizes: list[int] | None = None,
        rounds: int = 1,
        participation: float = 1.0,
    ) -> None:
        self.recorder, self.group_size, self.sizes = recorder, group_size, sizes or []
        self.rounds, self.participation = rounds, participation

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
                total = added(total, vmap(answer)(models.params, models.buffers))
            return [request.probe.finish(trees.rows(total, i)) for i in range(len(rows))]

        return [answer for group in place.each(len(groups), ask) for answer in group]

    # -- training -----------------------------------------------------------------------------------------------------
    def run(self, job: Job, place: Place, blame: Blame) -> list[Tensor]:
        steps, sizes = job.steps, {size for plan in job.plans for size in plan.sizes}
        if not sizes:
            return [job.carry.params.new_zeros(0) for _ in steps]
        if len(sizes) > 1:
            return self._run_uneven(job, place, blame)
        groups = in_groups(steps, self.group_size)
        width, size = max(len(group) for group in groups), sizes.pop()
        programs = self._programs_of_groups(job, place, groups, width, size)

        def train(station: Station, g: int) -> list[Tensor]:
            with blame([job.clients[m] for m in groups[g]]):
                return self._train_group(station, place, job, groups[g], width, programs)

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
            program = programs.get((net.device, w)) or _plain_program(job, station)
            some = fixed._replace(start=trees.rows(fixed.start, top), own=trees.rows(fixed.own, top))
            live = [m for m, n in zip(group, steps, strict=True) if n > first]
            for a, b in stretches(job, place, first, last, w):
                batches = job.batches(dict.fromkeys(live, a), b - a, station.feed, idle=w - len(live))
                losses[a:b, top] = program(trees.rows(carry, top), some, batches)
            for i, m in enumerate(group):
                if steps[i] == last:
                    job.write(m, carry, i)
        return [losses[:n, i].to(place.net.device) for i, n in enumerate(steps)]

    def _run_uneven(self, job: Job, place: Place, blame: Blame) -> list[Tensor]:
        """Batches of several sizes (`last_batch = "keep"`): clients wait for each other to have batches of one size."""
        station, net = Station(place.net, place.feed), place.net
        losses: list[list[Tensor]] = [[] for _ in job.plans]
        at = [0] * len(job.plans)
        while (waiting := self._next_rows(job, at)) is not None:
            size, rows = waiting
            width = next(w for w in halves(min(self.group_size, len(job.plans))) if w >= len(rows))
            together = min(_num_alike(job.plans[m].sizes[at[m] :]) for m in rows)
            program = self._program_of_size(job, station, rows, width, size)
            with blame([job.clients[m] for m in rows]):
                carry, fixed = job.rows(padded(rows, width), net.device)
                for a, b in stretches(job, place, 0, together, width):
                    batches = job.batches({m: at[m] + a for m in rows}, b - a, place.feed, idle=width - len(rows))
                    stepped = program(carry, fixed, batches)
                    for i, m in enumerate(rows):
                        losses[m].append(stepped[:, i])
            for i, m in enumerate(rows):
                job.write(m, carry, i)
                at[m] += together
        return [torch.cat(row) if row else job.carry.params.new_zeros(0) for row in losses]

    def _program_of_size(self, job: Job, station: Station, rows: list[int], width: int, size: int) -> Program:
        """Steps with batches of a size, recorded if there will be many of that size."""
        worth_recording = size == job.training.batch or self._few_last_sizes(job)
        if self.recorder is None or not worth_recording:
            return _plain_program(job, station)
        return self.recorder.program(*self._wanted(job, station, rows, width, size)) or _plain_program(job, station)

    def _next_rows(self, job: Job, at: list[int]) -> tuple[int, list[int]] | None:
        """The batch size that most clients wait for, and these clients; None if all have finished."""
        waiting: dict[int, list[int]] = {}
        for m, plan in enumerate(job.plans):
            if at[m] < plan.steps:
                waiting.setdefault(plan.sizes[at[m]], []).append(m)
        if not waiting:
            return None
        size, rows = max(waiting.items(), key=lambda item: (len(item[1]), item[0]))
        return size, rows[: self.group_size]

    # -- programs -----------------------------------------------------------------------------------------------------
    def _programs_of_groups(self, job: Job, place: Place, groups: list[list[int]], width: int, size: int) -> Programs:
        """Programs for every number of rows that the groups will have, on every device."""
        if self.recorder is None:
            return {}
        expected = self._expected_steps(job, width)
        widths = {w for group in groups for _, _, w in shrinking([job.steps[m] for m in group], width)}
        # The widest first: it takes longest to compile.
        rows = [(station, w) for w in sorted(widths, reverse=True) for station in place.devices()]
        wanted = [self._wanted(job, station, groups[0], w, size, expected.get(w, 0)) for station, w in rows]
        found = zip(rows, self.recorder.programs_of(wanted), strict=True)
        return {(station.net.device, w): program for (station, w), program in found}

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

    def _expected_steps(self, job: Job, width: int) -> dict[int, int]:
        """Steps of clients in groups of each number of rows, in all rounds.

        By the examples of all clients, whoever is in the cohort: a run that is gone on with must decide alike.
        """
        private, batch = job.task.data == "private", job.training.batch
        part = self.participation if private and job.clients != [SERVER] else 1.0
        examples = len(job.plans[0].order) // max(1, job.training.epochs)
        sizes = self.sizes if private else [examples] * len(job.clients)
        steps = [-(-job.training.epochs * n // batch) for n in sizes]
        expected: dict[int, int] = {}
        for group in in_groups(steps, width):
            for first, last, w in shrinking([steps[m] for m in group], width):
                expected[w] = expected.get(w, 0) + (last - first) * w
        return {w: int(taken * self.rounds * part) for w, taken in expected.items()}

    def _few_last_sizes(self, job: Job) -> bool:
        """Whether the last batches of all clients have so few sizes that a program for each is worth it."""
        if job.task.data != "private":
            return True
        return len({n % job.training.batch for n in self.sizes}) <= MAX_LAST_SIZES


Programs = dict[tuple[torch.device, int], Program | None]  # (device, number of rows) -> recorded steps


def _num_alike(sizes: list[int]) -> int:
    """How many batches in front are of one size."""
    return sum(1 for _ in takewhile(sizes[0].__eq__, sizes))


def _vectorised_step(job: Job, station: Station) -> Step:
    return vmap(job.step(station.net, by_transform), in_dims=CLIENT_AXES)


def _plain_program(job: Job, station: Station) -> Program:
    """The vectorised step as it is, once for every turn."""
    step = _vectorised_step(job, station)
    return lambda carry, fixed, batches: run_steps(step, carry, fixed, batches)
