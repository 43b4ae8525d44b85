"""One client after another, or several side by side in threads: the oracle that other runners must equal."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.engine import Step, run_steps
from fnrfl.core.step import Carry, by_autograd, by_transform
from fnrfl.core.values import Batch
from fnrfl.engines.devices import DevicePool, Worker
from fnrfl.engines.job import Fixed, Job
from fnrfl.engines.recorder.programs import Program
from fnrfl.engines.recorder.recorder import ProgramRequest
from fnrfl.engines.runner import Blame, Runner, stretches


class OneByOne(Runner):
    """Ordinary autograd, client by client; steps of frequent batch sizes are recorded if there is a recorder."""

    def run(self, job: Job, pool: DevicePool, blame: Blame) -> list[Tensor]:
        programs = self._programs(job, pool)
        longest = sorted(range(len(job.clients)), key=lambda m: -job.steps[m])  # nobody waits for a late start

        def train(worker: Worker, i: int) -> Tensor:
            m = longest[i]
            with blame(job.clients[m : m + 1]):
                return self._train_client(worker, pool, job, m, programs)

        losses = dict(zip(longest, pool.each(len(longest), train), strict=True))
        return [losses[m] for m in range(len(longest))]

    def _train_client(self, worker: Worker, pool: DevicePool, job: Job, m: int, programs: ProgramsBySize) -> Tensor:
        carry, fixed = trees.rows(job.carry, m), _fixed(job, m)
        by_hand = fixed._replace(lr=job.training.lr)  # a number, which needs no vector in between
        step, tensors = job.step(worker.net, by_autograd), trees.leaves((carry, fixed))
        losses: list[Tensor] = []
        for a, b in stretches(job, pool, job.steps[m], 1):
            for size, batches in job.batches_of(m, a, b, worker):
                if (program := programs.get(size)) is not None:
                    losses.append(program(tensors, (), batches))
                else:
                    losses.append(run_steps(step, carry, by_hand, batches))
        return torch.cat(losses) if losses else job.carry.params.new_zeros(0)

    def _programs(self, job: Job, pool: DevicePool) -> ProgramsBySize:
        """Recorded steps, for full batches and for last ones of a frequent size."""
        if self.recorder is None:
            return {}
        who = {size: m for m, plan in enumerate(job.plans) for size in plan.sizes}  # somebody who has it
        short = self.estimate.short_sizes(job, 1, self.recorder.backend.max_programs // 2)
        sizes = sorted({job.training.batch, *short.recorded} & who.keys())
        requests = [ProgramRequest((size, job.key), partial(_example, job, pool, who[size], size)) for size in sizes]
        found = self.recorder.programs_of(requests)
        return {size: program for size, program in zip(sizes, found, strict=True) if program is not None}


ProgramsBySize = dict[int, Program]  # by the size of batches


def _example(job: Job, pool: DevicePool, m: int, size: int) -> tuple[Step, Carry, Fixed, Batch]:
    """A step of client m and its arguments, to be recorded."""
    batch = trees.rows(job.example_batch([m], size, pool.feed, pool.net.dtype), 0)
    return job.step(pool.net, by_transform), trees.rows(job.carry, m), _fixed(job, m), batch


def _fixed(job: Job, m: int) -> Fixed:
    return job.fixed(trees.rows(job.start, m), trees.rows(job.own, m), job.start.params.device)
