"""How the steps of a job are taken: one client after another, or many in one vectorised step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fnrfl.core.messages import MeasureRequest
from fnrfl.core.trees import Tree
from fnrfl.core.values import Out, RandomStream, State
from fnrfl.engines.job import Job
from fnrfl.engines.place import Place, Station
from fnrfl.engines.recorder import Recorder

Blame = Callable[[Sequence[int]], AbstractContextManager[None]]  # names these clients in every error inside


@dataclass(frozen=True)
class Probing:
    """A probe for some clients, with everything that it takes to answer it."""

    request: MeasureRequest
    held: Callable[[int], State]  # client -> the model that it holds
    stream: Callable[[int], RandomStream]
    initial: State

    def model(self, m: int) -> State:
        """The model that client m is asked about."""
        if not self.request.probe.asks_model:
            return self.initial
        held = self.held(self.request.clients[m]) if self.request.at is None else None
        return self.request.model(m, held)

    def answer(self, station: Station, m: int) -> Tree:
        """Client m's answer."""
        request, model, client = self.request, self.model(m).to(station.net.device), self.request.clients[m]
        total: Tree = {}
        for batch in station.feed.probe_batches(client, request.data, self.stream(client)):
            if request.probe.asks_model:
                out = station.net.eval_forward(model.params, model.buffers, station.net.laid_out(batch.x))
            else:
                out = Out.empty(batch)
            total = added(total, request.probe(out, batch))
        return request.probe.finish(total)


class Runner(Protocol):
    """How steps are taken."""

    recorder: Recorder | None
    group_size: int  # clients that step together, at most

    def run(self, job: Job, place: Place, blame: Blame) -> list[Tensor]:
        """Take all steps of a job, changing its carry; returns the losses of each client, [steps]."""
        ...

    def measure(self, probing: Probing, place: Place) -> list[Tree]:
        """The answer of each client."""
        ...

    def warm_up(self) -> None:
        """Pay now what the first step would pay otherwise, so that a round's seconds are the round's."""
        ...


def added(total: Tree, part: Tree) -> Tree:
    """Sums by name, with one part more."""
    return {k: total[k] + v if k in total else v for k, v in part.items()}


def stretches(job: Job, place: Place, first: int, last: int, clients: int) -> Iterator[tuple[int, int]]:
    """(first, last) cut so that the batches of some clients are not too large to be gathered at once."""
    net = place.net
    bytes_a_step = clients * job.training.batch * math.prod(net.input_shape) * net.dtype.itemsize
    most = max(1, place.max_gather_bytes // bytes_a_step)
    for a in range(first, last, most):
        yield a, min(a + most, last)
