"""Several clients in one batched step: the single-client step under `vmap`."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

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
    Schedule,
    ShortSizes,
    StepEstimate,
    StepShape,
    halves,
    in_groups,
    padded,
    stepping_together,
    waiting_for_each_other,
)
from fnrfl.engines.job import CLIENT_AXES, Fixed, Job, write_rows
from fnrfl.engines.recorder.programs import Program
from fnrfl.engines.recorder.recorder import ProgramRequest, Recorder
from fnrfl.engines.runner import Blame, Probing, Runner, stretches

Programs = dict[tuple[torch.device, StepShape], Program]  # recorded steps
MAX_PADDING = 0.25  # of the examples: padding that takes less time than short batches apart, where rows take time


class Vectorised(Runner):
    """Models have a client axis in front, [M, P]; groups of clients step together, the groups side by side.

    Groups are a rule of the clients' numbers of steps alone, so that results do not depend on the number of threads.
    """

    def __init__(
        self, recorder: Recorder | None = None, estimate: StepEstimate | None = None, *, group_size: int = GROUP_SIZE
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
        sizes = {size for plan in job.plans for size in plan.sizes}
        none = job.carry.params.new_zeros(0)
        if not sizes:
            return [none for _ in job.steps]
        groups = in_groups(job.steps, self.group_size)
        width = max(map(len, groups))
        schedules, widths, recorded = self._schedules(job, pool, groups, sizes, width)
        shapes = {turn.shape for each in schedules for turn in each.turns if turn.shape.size in recorded}
        programs = self._programs(job, pool, groups[0], shapes, widths)

        def train(worker: Worker, g: int) -> dict[int, Tensor]:
            with blame([job.clients[m] for m in groups[g]]):
                return _train_group(worker, pool, job, schedules[g], width, programs)

        losses = {m: found for group in pool.each(len(groups), train) for m, found in group.items()}
        return [losses[m] for m in range(len(job.steps))]

    def _schedules(
        self, job: Job, pool: DevicePool, groups: list[list[int]], sizes: set[int], width: int
    ) -> tuple[list[Schedule], list[int], set[int]]:
        """(the schedule of each group, the numbers of rows that groups shrink to, sizes of batches to record)."""
        widths, pads = halves(width), len(sizes) > 1 and self._pads(job, pool)
        if pads or len(sizes) == 1:
            size = self.estimate.largest_batch(job) if pads else min(sizes)
            widths = widths if pool.idle_rows_cost else self.estimate.widths(job, width)
            return [stepping_together(group, job.steps, widths, size, pads) for group in groups], widths, {size}
        most = 0 if self.recorder is None else self.recorder.backend.max_programs // 2
        short = self.estimate.short_sizes(job, width, most) if most else ShortSizes()
        schedules = [waiting_for_each_other({m: job.plans[m].sizes for m in group}, width, short) for group in groups]
        return schedules, widths, {job.training.batch, *short.recorded}

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

    def _programs(
        self, job: Job, pool: DevicePool, group: list[int], shapes: set[StepShape], widths: list[int]
    ) -> Programs:
        """Return programs for steps of these shapes, on every device; groups shrink to `widths`."""
        if self.recorder is None:
            return {}
        # Steps are compiled side by side, the widest first: what takes no longer than the rest need not pay for itself.
        expected = max(self.estimate.steps_by_rows(job, widths).values(), default=0)
        wanted = [(worker, shape) for shape in sorted(shapes, reverse=True) for worker in pool.devices()]
        requests = [
            ProgramRequest((*shape, job.key, worker.net.device), partial(_example, job, group, worker, shape), expected)
            for worker, shape in wanted
        ]
        found = zip(wanted, self.recorder.programs_of(requests), strict=True)
        return {(worker.net.device, shape): program for (worker, shape), program in found if program is not None}


def _train_group(
    worker: Worker, pool: DevicePool, job: Job, schedule: Schedule, width: int, programs: Programs
) -> dict[int, Tensor]:
    """All steps of some clients, and the losses of each: who has finished is copied out, and may go on idly."""
    group, device = schedule.group, worker.net.device
    carry, fixed = job.rows(padded(group, width), device)
    row = {m: i for i, m in enumerate(group)}
    losses = carry.params.new_zeros(max(job.steps[m] for m in group), width)
    for turn in schedule.turns:
        shape, live = turn.shape, len(turn.at)
        program = programs.get((device, shape)) or _plain_program(job, worker)
        some, start, own = trees.rows((carry, fixed.start, fixed.own), turn.where)
        read = fixed._replace(start=start, own=own)
        for a, b in stretches(job, pool, turn.steps, shape.width):
            at = {m: first + a for m, first in turn.at.items()}
            batches = job.batches(
                at, b - a, worker.feed, idle=shape.width - live, padded_to=shape.size if shape.pads else None
            )
            _keep(losses, program(some, read, batches), at, turn.where, row)
        if not isinstance(turn.where, slice):  # rows that were copied
            write_rows(carry, turn.where[:live], some, slice(0, live))
        if ended := [m for m, first in turn.at.items() if first + turn.steps == job.steps[m]]:
            write_rows(job.carry, ended, carry, [row[m] for m in ended])
    return {m: losses[: job.steps[m], i].to(pool.net.device) for m, i in row.items()}


def _keep(losses: Tensor, new: Tensor, at: dict[int, int], where: slice | list[int], row: dict[int, int]) -> None:
    """Write losses [steps, rows] where clients are `at`; as a rule all are at one step and lie side by side."""
    firsts = {*at.values()}
    if isinstance(where, slice) and len(firsts) == 1:
        losses[(first := firsts.pop()) : first + len(new), where] = new
        return
    for m, loss in zip(at, new.unbind(1), strict=False):
        losses[at[m] : at[m] + len(loss), row[m]] = loss


def _vectorised_step(job: Job, worker: Worker) -> Step:
    return vmap(job.step(worker.net, by_transform), in_dims=CLIENT_AXES)


def _plain_program(job: Job, worker: Worker) -> Program:
    """The vectorised step as it is, once for every turn."""
    step = _vectorised_step(job, worker)
    return lambda carry, fixed, batches: run_steps(step, carry, fixed, batches)


def _example(job: Job, group: list[int], worker: Worker, shape: StepShape) -> tuple[Step, Carry, Fixed, Batch]:
    """A step of a shape and its arguments, to be recorded."""
    rows, net = padded(group, shape.width)[: shape.width], worker.net
    batch = job.example_batch(rows, shape.size, worker.feed, net.dtype, padded=shape.pads)
    return _vectorised_step(job, worker), *job.rows(rows, net.device), batch


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
    other = net.copy()  # in a precision in which a difference means something
    other.module.double()
    other.dtype, other.compute = torch.float64, None
    try:
        return _is_as_without(other, x[:TRIED_ROWS].to(net.device))
    except Exception as error:
        if out_of_memory(error):
            raise
        return False


def _is_as_without(net: Net, x: Tensor) -> bool:
    """Whether a batch of three examples is the same with two rows of padding, but for rounding."""
    real = torch.arange(TRIED_ROWS, device=net.device) < REAL_ROWS
    params, buffers = net.flatten()
    params += PERTURBATION * torch.rand(net.size, generator=generator(0, "padding"), dtype=net.dtype).to(net.device)
    x = net.laid_out(x.to(net.dtype) if x.is_floating_point() else x)
    with torch.no_grad():
        short, after_short = net.apply(params, buffers, x[:REAL_ROWS], mode="updating")
        padded, after_padded = net.apply(params, buffers, x, mode="updating", real=real.to(net.dtype))
    pairs = [(getattr(short, f.name), getattr(padded, f.name)[:REAL_ROWS]) for f in fields(short)]
    pairs += [(after_short[k], after_padded[k]) for k in buffers]
    return all(float((a.double() - b).norm()) <= TOLERANCE * (1 + float(a.double().norm())) for a, b in pairs)
