"""One client after another, or `threads` side by side: the oracle that other engines must equal."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from fnrfl.core.net import Net
from fnrfl.core.step import by_autograd, by_transform
from fnrfl.core.types import Batch, Part, Step
from fnrfl.engines.base import InProcess
from fnrfl.engines.job import Job, model_row, parts, row
from fnrfl.engines.trace import Steps, leaves, of_leaves, one_by_one


class Loop(InProcess):
    """Ordinary autograd, client by client; the steps of dense nets recorded, if asked for."""

    def _run(self, job: Job) -> list[Tensor]:
        program = self._program(job)
        longest = sorted(range(len(job.clients)), key=lambda m: -job.steps[m])  # nobody waits for a late start

        def train(net: Net, i: int) -> Tensor:
            m = longest[i]
            with self._blame(job, job.clients[m : m + 1]):
                return self._client(net, job, m, program)

        found = dict(zip(longest, self.each(len(longest), train), strict=True))
        return [found[m] for m in range(len(longest))]

    def _client(self, net: Net, job: Job, m: int, program: Steps | None) -> Tensor:
        fixed = job.fixed(job.carry.rows(m), model_row(job.start, m), row(job.own, m))
        losses: list[Tensor] = []
        first = 0
        for size, run in groupby(job.plans[m].sizes):
            last = first + len(list(run))
            for a, b in self._stretches(job, first, last, 1):
                batch = parts(self._alone(net, job.batches({m: a}, b - a, self.feed)))
                steps = program if size == job.training.batch else None
                steps = steps or one_by_one(of_leaves(job.step(net, by_autograd), [*fixed, *batch]))
                losses.append(steps(leaves(fixed), leaves(batch)))
            first = last
        return torch.cat(losses) if losses else job.carry.params.new_zeros(0)

    def _alone(self, net: Net, batch: Batch) -> Batch:
        """One client's batches without the axis of clients, in the net's memory order."""
        x = batch.x[:, 0]
        x = net.laid_out(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return replace(
            batch, x=x, y=batch.y[:, 0], index=batch.index[:, 0], noise={k: v[:, 0] for k, v in batch.noise.items()}
        )

    def _program(self, job: Job) -> Steps | None:
        """A recorded step for full batches."""
        full = [m for m, plan in enumerate(job.plans) if plan.sizes[:1] == [job.training.batch]]
        if self.tracer is None or not full:
            return None

        def example() -> tuple[Step, tuple[Part, ...], tuple[Part, ...]]:
            m = full[0]
            fixed = job.fixed(job.carry.rows(m), model_row(job.start, m), row(job.own, m))
            first = self._example(job, [m], job.training.batch, self.feed)
            one = Batch(first.x[0], first.y[0], first.index[0], row(first.noise, 0))
            return job.step(self.net, by_transform), fixed, parts(one)

        return self.tracer.program(job.key, example)
