"""One client after another, or `threads` side by side: the oracle that other engines must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from fnrfl.core.net import Net
from fnrfl.core.step import by_autograd, local_step
from fnrfl.engines.base import InProcess, Job, model_row, row


class Loop(InProcess):
    """Ordinary autograd, client by client."""

    def _run(self, job: Job) -> list[Tensor]:
        def train(net: Net, m: int) -> Tensor:
            with self._blame(job, job.clients[m : m + 1]):
                return self._client(net, job, m)

        return self._each(len(job.clients), train)

    def _client(self, net: Net, job: Job, m: int) -> Tensor:
        task, start, own, carry = job.task, model_row(job.start, m), row(job.own, m), job.carry.rows(m)
        losses = [
            local_step(
                net,
                task.objective,
                job.training,
                carry,
                start,
                job.batch(m, step, self.feed),
                task.shared,
                own,
                by_autograd,
            )
            for step in range(len(job.plans[m].positions))
        ]
        return torch.stack(losses) if losses else carry.params.new_zeros(0)
