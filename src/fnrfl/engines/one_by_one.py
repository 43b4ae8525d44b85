"""One client after another, or several side by side in threads: the oracle that other runners must equal."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.engine import Step, run_steps
from fnrfl.core.net import Net
from fnrfl.core.step import Carry, by_autograd, by_transform
from fnrfl.core.trees import Tree
from fnrfl.core.values import Batch
from fnrfl.engines.job import Fixed, Job
from fnrfl.engines.place import Place, Station
from fnrfl.engines.recorder import Program, Recorder
from fnrfl.engines.runner import Blame, Probing, stretches


class OneByOne:
    """Ordinary autograd, client by client; the steps of full batches are recorded if there is a recorder."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder, self.group_size = recorder, 1

    def run(self, job: Job, place: Place, blame: Blame) -> list[Tensor]:
        program = self._program(job, place)
        longest = sorted(range(len(job.clients)), key=lambda m: -job.steps[m])  # nobody waits for a late start

        def train(station: Station, i: int) -> Tensor:
            m = longest[i]
            with blame(job.clients[m : m + 1]):
                return self._train_client(station, place, job, m, program)

        losses = dict(zip(longest, place.each(len(longest), train), strict=True))
        return [losses[m] for m in range(len(longest))]

    def measure(self, probing: Probing, place: Place) -> list[Tree]:
        return place.each(len(probing.request.clients), probing.answer)

    def warm_up(self) -> None:
        """Nothing: autograd is ready."""

    def _train_client(self, station: Station, place: Place, job: Job, m: int, program: Program | None) -> Tensor:
        net, carry, fixed = station.net, trees.rows(job.carry, m), _fixed(job, m)
        by_hand = fixed._replace(lr=job.training.lr)  # a number, which needs no vector in between
        step = job.step(net, by_autograd)
        losses: list[Tensor] = []
        first = 0
        for size, run in groupby(job.plans[m].sizes):
            last = first + len(list(run))
            for a, b in stretches(job, place, first, last, 1):
                batches = _of_one_client(net, job.batches({m: a}, b - a, station.feed))
                if program is not None and size == job.training.batch:
                    losses.append(program(carry, fixed, batches))
                else:
                    losses.append(run_steps(step, carry, by_hand, batches))
            first = last
        return torch.cat(losses) if losses else job.carry.params.new_zeros(0)

    def _program(self, job: Job, place: Place) -> Program | None:
        """A recorded step for full batches."""
        full = [m for m, plan in enumerate(job.plans) if plan.sizes[:1] == [job.training.batch]]
        if self.recorder is None or not full:
            return None
        m, net = full[0], place.net

        def example() -> tuple[Step, Carry, Fixed, Batch]:
            batch = trees.rows(job.example_batch([m], job.training.batch, place.feed, net.dtype), 0)
            return job.step(net, by_transform), trees.rows(job.carry, m), _fixed(job, m), batch

        return self.recorder.program(job.key, example)


def _fixed(job: Job, m: int) -> Fixed:
    return job.fixed(trees.rows(job.start, m), trees.rows(job.own, m), job.start.params.device)


def _of_one_client(net: Net, batches: Batch) -> Batch:
    """One client's batches without the axis of clients, in the net's memory order."""
    alone: Batch = trees.mapped(lambda t: t[:, 0], batches)
    x = net.laid_out(alone.x.flatten(0, 1)).unflatten(0, alone.x.shape[:2])
    return Batch(x, alone.y, alone.index, alone.noise)
