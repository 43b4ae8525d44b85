"""Several clients in one batched step: the single-client step under `vmap`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor
from torch.func import vmap

from fnrfl.core import trees
from fnrfl.core.engine import Step, run_steps
from fnrfl.core.errors import gpu_out_of_memory, out_of_memory
from fnrfl.core.net import Net
from fnrfl.core.rng import generator
from fnrfl.core.step import Carry, by_transform, ready_to_transform
from fnrfl.core.trees import Tree
from fnrfl.core.values import Batch
from fnrfl.engines.devices import DevicePool, Worker
from fnrfl.engines.groups import (
    GROUP_SIZE,
    ShortSizes,
    StepShape,
    Turn,
    halves,
    in_groups,
    padded,
    shrinking,
    turns_of,
)
from fnrfl.engines.job import CLIENT_AXES, Fixed, Job, write_rows
from fnrfl.engines.recorder.programs import Program
from fnrfl.engines.recorder.recorder import ProgramRequest, Recorder
from fnrfl.engines.runner import Blame, Probing, Runner, stretches
from fnrfl.engines.step_estimate import NO_ESTIMATE, StepEstimate

MAX_PADDING = 0.25  # of the examples: padding that takes less time than short batches apart, where rows take time


class Vectorised(Runner):
    """Models have a client axis in front, [M, P]; groups of clients step together, the groups side by side.

    Groups are a rule of the clients' numbers of steps alone, so that results do not depend on the number of threads.
    """

    def __init__(
        self, recorder: Recorder | None = None, estimate: StepEstimate = NO_ESTIMATE, *, group_size: int = GROUP_SIZE
    ) -> None:
        super().__init__(recorder, estimate, group_size=group_size)
        self._takes_padding: bool | None = None  # of the net; None: not tried yet

    def warm_up(self) -> None:
        ready_to_transform()

    # -- probes -------------------------------------------------------------------------------------------------------
    def measure(self, probing: Probing, pool: DevicePool) -> list[Tree]:
        request = probing.request
        training = request.probe.training  # if there is one, batches do not fill a device
        differ = request.data == "private" or (training is not None and training.shuffle)
        if differ or not (request.probe.asks_model and (pool.probes_together or training is not None)):
            return super().measure(probing, pool)
        count, size = len(request.clients), self.group_size
        groups = [range(first, min(first + size, count)) for first in range(0, count, size)]
        try:
            answers = pool.each(len(groups), lambda worker, g: probing.joint_answers(worker, groups[g]))
            return [answer for group in answers for answer in group]
        except RuntimeError as error:
            # Memory is full, or an operator cannot be batched; one that is wrong says so again.
            full = gpu_out_of_memory(error)
        if full:
            self.free_programs(pool)
        return super().measure(probing, pool)

    # -- training -----------------------------------------------------------------------------------------------------
    def run(self, job: Job, pool: DevicePool, blame: Blame) -> list[Tensor]:
        steps, sizes = job.steps, {size for plan in job.plans for size in plan.sizes}
        if not sizes:
            return [job.carry.params.new_zeros(0) for _ in steps]
        groups = in_groups(steps, self.group_size)
        pads = len(sizes) > 1 and self._pads(job, pool)
        even = pads or len(sizes) == 1
        train_group = self._trains_even(job, pool, groups, pads) if even else self._trains_uneven(job, pool, groups)

        def train(worker: Worker, g: int) -> list[Tensor]:
            with blame([job.clients[m] for m in groups[g]]):
                return train_group(worker, g)

        losses = zip(groups, pool.each(len(groups), train), strict=True)
        by_row = {m: loss for group, rows in losses for m, loss in zip(group, rows, strict=True)}
        return [by_row[m] for m in range(len(steps))]

    def _pads(self, job: Job, pool: DevicePool) -> bool:
        """Whether short batches are padded: it must change nothing, and take less time than going apart."""
        if not job.task.objective.takes_padding:
            return False
        if pool.idle_rows_cost:
            together_anyway = all(plan.sizes == job.plans[0].sizes for plan in job.plans)
            rows, taken = sum(job.steps) * self.estimate.largest_batch(job), sum(sum(plan.sizes) for plan in job.plans)
            if together_anyway or rows > (1 + MAX_PADDING) * taken:
                return False
        longest = max((plan.order for plan in job.plans), key=len)
        x, _ = pool.feed.take(job.task.data, longest[:TRIED_ROWS])
        if not can_be_tried_with(x):  # looked at anew for each task: a resumed run must make the same choice
            return False
        if self._takes_padding is None:
            self._takes_padding = takes_padding(pool.net, x)
        return self._takes_padding

    def _trains_even(self, job: Job, pool: DevicePool, groups: list[list[int]], pads: bool) -> TrainGroup:
        """How groups are trained whose batches are all of one size, or are padded to it."""
        width, size = max(map(len, groups)), job.plans[groups[0][0]].sizes[0]
        size = self.estimate.largest_batch(job) if pads else size
        widths = halves(width) if pool.idle_rows_cost else self.estimate.widths(job, width)
        parts = [shrinking([job.steps[m] for m in group], widths) for group in groups]
        shapes = {StepShape(rows, size, pads) for each in parts for _, _, rows in each}
        programs = self._programs(job, pool, groups[0], shapes, widths)
        return lambda worker, g: self._train_group(
            worker, pool, job, groups[g], [(a, b, StepShape(rows, size, pads)) for a, b, rows in parts[g]], programs
        )

    def _trains_uneven(self, job: Job, pool: DevicePool, groups: list[list[int]]) -> TrainGroup:
        """How groups are trained whose batches are of several sizes."""
        width = max(map(len, groups))
        most = 0 if self.recorder is None else self.recorder.backend.max_programs // 2
        short = self.estimate.short_sizes(job, width, most) if most else ShortSizes()
        turns = [turns_of({m: job.plans[m].sizes for m in group}, width, short) for group in groups]
        recorded = {job.training.batch, *short.recorded}
        shapes = {StepShape(turn.width, turn.size) for each in turns for turn in each if turn.size in recorded}
        programs = self._programs(job, pool, groups[0], shapes, halves(width))

        def train(worker: Worker, g: int) -> list[Tensor]:
            losses = self._take_turns(worker, pool, job, turns[g], width, programs) if turns[g] else {}
            none = job.carry.params.new_zeros(0)
            return [torch.cat(losses[m]) if m in losses else none for m in groups[g]]

        return train

    def _train_group(
        self, worker: Worker, pool: DevicePool, job: Job, group: list[int], parts: list[Part], programs: Programs
    ) -> list[Tensor]:
        """All steps of some clients, sorted by their number of steps; a group short of all rows has idle ones.

        A client that has finished is copied out, and its row goes on idly until the group shrinks past it: rows do not
        know of each other, and a step costs nearly the same with one row more.
        """
        net, steps, rows = (
            worker.net,
            [job.steps[m] for m in group],
            max([len(group), *(shape.width for *_, shape in parts)]),
        )
        carry, fixed = job.rows(padded(group, rows), net.device)
        losses = carry.params.new_zeros(max(steps), rows)
        for first, last, shape in parts:
            top = slice(0, shape.width)
            program = programs.get((net.device, shape)) or _plain_program(job, worker)
            some = fixed._replace(start=trees.rows(fixed.start, top), own=trees.rows(fixed.own, top))
            live = [m for m, n in zip(group, steps, strict=True) if n > first]
            for a, b in stretches(job, pool, first, last, shape.width):
                padded_to = shape.size if shape.pads else None
                batches = job.batches(
                    dict.fromkeys(live, a), b - a, worker.feed, idle=shape.width - len(live), padded_to=padded_to
                )
                losses[a:b, top] = program(trees.rows(carry, top), some, batches)
            if ended := [i for i, n in enumerate(steps) if n == last]:
                write_rows(job.carry, [group[i] for i in ended], carry, ended)
        return [losses[:n, i].to(pool.net.device) for i, n in enumerate(steps)]

    def _take_turns(
        self, worker: Worker, pool: DevicePool, job: Job, turns: list[Turn], width: int, programs: Programs
    ) -> dict[int, list[Tensor]]:
        """All steps of some clients whose batches are of several sizes (`last_batch = "keep"`); their losses."""
        device, group = worker.net.device, turns[0].group
        carry, fixed = job.rows(padded(group, width), device)
        losses: dict[int, list[Tensor]] = {}
        for turn in turns:
            program = programs.get((device, StepShape(turn.width, turn.size))) or _plain_program(job, worker)
            some, start, own = trees.rows((carry, fixed.start, fixed.own), turn.where)
            for a, b in stretches(job, pool, 0, turn.steps, turn.width):
                at = {m: first + a for m, first in turn.at.items()}
                batches = job.batches(at, b - a, worker.feed, idle=turn.width - len(at))
                stepped = program(some, fixed._replace(start=start, own=own), batches).to(pool.net.device)
                for m, loss in zip(at, stepped.unbind(1), strict=False):
                    losses.setdefault(m, []).append(loss)
            if not isinstance(turn.where, slice):  # rows that were copied
                live = slice(0, len(turn.at))
                write_rows(carry, turn.where[live], some, live)
        write_rows(job.carry, group, carry, slice(0, len(group)))
        return losses

    # -- programs -----------------------------------------------------------------------------------------------------
    def _programs(
        self, job: Job, pool: DevicePool, group: list[int], shapes: set[StepShape], widths: list[int]
    ) -> Programs:
        """Return programs for steps of these shapes, on every device; groups shrink to `widths`."""
        if self.recorder is None:
            return {}
        expected = self.estimate.most_frequent(job, widths)
        # The widest first: it takes longest to compile.
        wanted = [(worker, shape) for shape in sorted(shapes, reverse=True) for worker in pool.devices()]
        requests = [self._request(job, worker, group, shape, expected) for worker, shape in wanted]
        found = zip(wanted, self.recorder.programs_of(requests), strict=True)
        return {(worker.net.device, shape): program for (worker, shape), program in found if program is not None}

    def _request(
        self, job: Job, worker: Worker, group: list[int], shape: StepShape, expected_steps: int
    ) -> ProgramRequest:
        """Return a step of a shape, to be recorded."""
        net = worker.net

        def example() -> tuple[Step, Carry, Fixed, Batch]:
            rows = padded(group, shape.width)[: shape.width]
            batch = job.example_batch(rows, shape.size, worker.feed, net.dtype, padded=shape.pads)
            return _vectorised_step(job, worker), *job.rows(rows, net.device), batch

        return ProgramRequest((*shape, job.key, net.device), example, expected_steps)


TrainGroup = Callable[[Worker, int], list[Tensor]]  # at a worker, group -> the losses of its clients
Part = tuple[int, int, StepShape]  # steps of a group, from the first up to the last, that are all of one shape
Programs = dict[tuple[torch.device, StepShape], Program]  # recorded steps


def _vectorised_step(job: Job, worker: Worker) -> Step:
    return vmap(job.step(worker.net, by_transform), in_dims=CLIENT_AXES)


def _plain_program(job: Job, worker: Worker) -> Program:
    """The vectorised step as it is, once for every turn."""
    step = _vectorised_step(job, worker)
    return lambda carry, fixed, batches: run_steps(step, carry, fixed, batches)


# -- padding -----------------------------------------------------------------------------------------------------------


REAL_ROWS, TRIED_ROWS = 3, 5  # of the batch that is tried
TOLERANCE = 1e-9  # a row that looks at the others changes by more, and rounding of float64 by less
PERTURBATION = 0.1  # a random offset, so that layers that are initialised to 0 take part in the test


def can_be_tried_with(x: Tensor) -> bool:
    """Whether some examples can show if rows look at each other: there are enough, and they are not all alike."""
    return len(x) >= TRIED_ROWS and not bool((x == x[:1]).all())


def takes_padding(net: Net, x: Tensor) -> bool:
    """Whether rows of padding change nothing else in a training pass of a net, and nothing that it remembers.

    It is tried, with some examples: nobody can tell from a module whether its rows look at each other. A net that
    cannot be tried takes none: its BatchNorm layers see other rows than those of the batch.
    """
    try:
        return _is_as_without(_in_double_precision(net), x[:TRIED_ROWS].to(net.device))
    except Exception as error:
        if out_of_memory(error):
            raise
        return False


def _in_double_precision(net: Net) -> Net:
    """The same net, in a precision in which a difference means something."""
    other = net.copy()
    other.module.double()
    other.dtype, other.compute = torch.float64, None
    return other


def _is_as_without(net: Net, x: Tensor) -> bool:
    """Whether a batch of three examples is the same with two rows of padding."""
    real = torch.arange(TRIED_ROWS, device=net.device) < REAL_ROWS
    params, buffers = net.flatten()
    params += PERTURBATION * torch.rand(net.size, generator=generator(0, "padding"), dtype=net.dtype).to(net.device)
    x = net.laid_out(x.to(net.dtype) if x.is_floating_point() else x)
    with torch.no_grad():
        short, after_short = net.apply(params, buffers, x[:REAL_ROWS], mode="updating")
        padded, after_padded = net.apply(params, buffers, x, mode="updating", real=real.to(net.dtype))
    outputs = [(getattr(short, f.name), getattr(padded, f.name)[:REAL_ROWS]) for f in fields(short)]
    return all(map(_close, *zip(*outputs, *((after_short[k], after_padded[k]) for k in buffers), strict=True)))


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by rounding alone."""
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= TOLERANCE * (1 + a.norm()))
