"""How the steps of a job are taken: one client after another, or many in one vectorised step."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from torch import Tensor
from torch.func import vmap

from fnrfl.core import trees
from fnrfl.core.messages import MeasureRequest
from fnrfl.core.net import Net
from fnrfl.core.trees import Tree
from fnrfl.core.values import Batch, Flat, Out, RandomStream, State
from fnrfl.engines.devices import DevicePool, Worker
from fnrfl.engines.groups import StepEstimate
from fnrfl.engines.job import Job
from fnrfl.engines.recorder.recorder import Recorder

Blame = Callable[[Sequence[int]], AbstractContextManager[None]]  # names these clients in every error inside


@dataclass(frozen=True)
class Probing:
    """A probe for some clients, with everything that it takes to answer it."""

    request: MeasureRequest
    held: Callable[[int], State]  # client -> the model that it holds
    streams: dict[int, RandomStream]  # of each client
    initial: State
    draws: Callable[[RandomStream], Callable[[int, int], Tree]]  # dropout masks, for probes in train mode

    def model(self, m: int) -> State:
        """The model that client m is asked about."""
        if not self.request.probe.asks_model:
            return self.initial
        held = self.held(self.request.clients[m]) if self.request.at is None else None
        return self.request.model(m, held)

    def answer(self, worker: Worker, m: int) -> Tree:
        """Client m's answer."""
        net, probe, model = worker.net, self.request.probe, self.model(m).to(worker.net.device)
        total: Tree = {}
        for batch in self.shared_batches(worker, [self.request.clients[m]]):
            out, batch = Out.empty(batch), replace(batch, noise=trees.rows(batch.noise, 0))
            if probe.asks_model:
                batch = replace(batch, x=net.laid_out(batch.x))
                out = self.forward(net, model.params, model.buffers, batch)
            total = probe.add(total, probe(out, batch))
        return probe.finish(total)

    def joint_answers(self, worker: Worker, rows: Sequence[int]) -> list[Tree]:
        """Return the answers of clients m who look at the same batches, in one pass for all of their models."""
        net, probe = worker.net, self.request.probe
        models = trees.moved(trees.stacked([self.model(m) for m in rows]), net.device)
        total: Tree = {}
        for batch in self.shared_batches(worker, [self.request.clients[m] for m in rows]):
            batch = replace(batch, x=net.laid_out(batch.x))

            def sums(params: Tensor, buffers: Tree, masks: Tree, batch: Batch = batch) -> Tree:
                mine = replace(batch, noise=masks)
                return probe(self.forward(net, params, buffers, mine), mine)

            total = probe.add(total, vmap(sums)(models.params, models.buffers, batch.noise))
        return [probe.finish({k: v[i] for k, v in total.items()}) for i in range(len(rows))]

    def shared_batches(self, worker: Worker, clients: Sequence[int]) -> Iterator[Batch]:
        """The batches that clients are asked about who look at the same examples; dropout masks are [M, ...]."""
        feed, training, first = worker.feed, self.request.probe.training, clients[0]
        if training is None:
            yield from feed.probe_batches(first, self.request.data, self.streams[first])
            return
        draws = [self.draws(self.streams[client]) for client in clients]
        for positions in feed.plan(first, self.request.data, training, self.streams[first]).batches:
            x, y = feed.take(self.request.data, positions)
            masks = trees.joined([draw(1, len(positions)) for draw in draws])
            yield Batch(x, y, positions.to(x.device), trees.moved(masks, x.device))

    def forward(self, net: Net, params: Flat, buffers: Tree, batch: Batch) -> Out:
        """The forward pass that a probe looks at."""
        if self.request.probe.training is None:
            return net.eval_forward(params, buffers, batch.x)
        return net.apply(params, buffers, batch.x, mode="batch", masks=batch.noise)[0]


class Runner:
    """How steps are taken: the base of `OneByOne` and `Vectorised`."""

    def __init__(
        self, recorder: Recorder | None = None, estimate: StepEstimate | None = None, *, group_size: int = 1
    ) -> None:
        """At most `group_size` clients step together."""
        self.recorder, self.estimate, self.group_size = recorder, estimate or StepEstimate(), group_size

    def run(self, job: Job, pool: DevicePool, blame: Blame) -> list[Tensor]:
        """Take all steps of a job, changing its carry; return the losses of each client, [steps]."""
        raise NotImplementedError

    def measure(self, probing: Probing, pool: DevicePool) -> list[Tree]:
        """Return the answer of each client."""
        return pool.each(len(probing.request.clients), probing.answer)

    def warm_up(self) -> None:
        """Pay now what the first step would pay otherwise, so that a round's seconds are the round's."""

    # -- memory that is full ------------------------------------------------------------------------------------------
    def free_programs(self, pool: DevicePool) -> None:
        """Let all recorded programs go, and the memory that torch keeps for later."""
        if self.recorder is not None:
            self.recorder.clear()
        gc.collect()  # programs may hold each other
        pool.free_memory()

    def halve_groups(self, clients: int) -> bool:
        """Have half as many of some clients step together from now on; return False if they step one by one already."""
        group = min(self.group_size, clients)
        self.group_size = -(-group // 2)
        return group > 1

    def stop_recording(self) -> bool:
        """Take steps without programs from now on; return False if there are none already."""
        if self.recorder is None or self.recorder.closed:
            return False
        self.recorder.close()
        return True


def stretches(job: Job, pool: DevicePool, steps: int, clients: int) -> Iterator[tuple[int, int]]:
    """(first, last) of some steps, cut so that the batches of clients are not too large to be gathered at once."""
    net = pool.net
    bytes_a_step = clients * job.training.batch * math.prod(net.input_shape) * net.dtype.itemsize
    most = max(1, pool.max_gather_bytes // bytes_a_step)
    return ((first, min(first + most, steps)) for first in range(0, steps, most))
