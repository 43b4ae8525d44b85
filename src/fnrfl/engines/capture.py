"""Steps captured as a CUDA graph: a replay launches a whole step, and Python has nothing to do in it.

The graph reads its batch at a counter that lives on the device and moves it on, so that a replay needs no input. Before
that, `torch.compile` may join the operators of a step into fewer kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from fnrfl.core.types import Step
from fnrfl.engines.trace import Steps, Tracer, one_by_one

log = logging.getLogger("fnrfl")
ROOM = 64 << 20  # bytes of batches that lie ready on the device, for each program
MOST = 1024  # batches that do
WARM = 3  # steps before a capture: libraries choose kernels and allocate in the first ones
WORTH_COMPILING = 10_000  # steps of clients: compiling a large step takes a minute and saves half a millisecond of each
# How far a program may be from the step that it was recorded from, relative to how far the step goes.
APART = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.5}


class Capturer(Tracer):
    """A tracer for a GPU: recorded steps are compiled where that pays, and captured."""

    def __init__(self, compute: torch.dtype, *, compile: bool | None = None) -> None:
        """`compile` says whether to compile; None: where many steps are to be taken."""
        super().__init__()
        self.compute, self.compile = compute, compile
        self.limit = 32 * torch.cuda.device_count()  # each program holds tensors of its own
        # One pool for all, and one stream for each device, so that programs use the same memory: no two graphs of a
        # device run at the same time, and nothing in the pool outlives a replay.
        self._pool = torch.cuda.graph_pool_handle()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def clear(self) -> None:
        super().clear()
        self._pool = torch.cuda.graph_pool_handle()

    def composed(self) -> Any:
        return {}

    def give_up(self) -> None:
        log.warning("a step could not be recorded and is slower for that.")

    def record(
        self, step: Step, same: Sequence[Tensor], now: Sequence[Tensor], written: int = 1, steps: int = 0
    ) -> Steps | None:
        with searched():
            return super().record(step, same, now, written, steps)

    def ways(
        self, graph: fx.GraphModule, same: Sequence[Tensor], now: Sequence[Tensor], written: int, steps: int
    ) -> Iterator[Steps]:
        if self.compile or (self.compile is None and steps >= WORTH_COMPILING):
            try:
                yield self._captured(self._compiled(graph, [*same, *now]), same, now, written)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                log.warning("torch.compile failed (%s); steps are captured as they are.", type(error).__name__)
        try:
            yield self._captured(graph, same, now, written)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            log.warning("a step could not be captured (%s) and is slower for that.", type(error).__name__)
        yield one_by_one(graph)

    def _captured(self, step: Step, same: Sequence[Tensor], now: Sequence[Tensor], written: int) -> Steps:
        device = same[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return Captured(step, same, now, written, self._streams[device], self._pool)

    def _compiled(self, graph: fx.GraphModule, example: Sequence[Tensor]) -> Step:
        step: Step = torch.compile(graph, fullgraph=True, dynamic=False)
        step(*(t.clone() for t in example))
        return step

    def alike(self, before: Tensor, changed: Tensor, stepped: Tensor) -> bool:
        if not before.is_floating_point():
            return torch.equal(changed, stepped)
        if not torch.equal(changed.isfinite(), stepped.isfinite()):
            return False
        before, changed, stepped = (t.double().nan_to_num(posinf=0.0, neginf=0.0) for t in (before, changed, stepped))
        way, off = (stepped - before).norm(), (changed - stepped).norm()
        small = 1e-6 * before.norm() + 1e-8 * before.numel() ** 0.5  # what rounding alone can do
        return bool(off <= APART[self.compute] * way + small)


@contextmanager
def searched() -> Iterator[None]:
    """Convolutions that run inside for the first time are done by the fastest of all kernels, unless they must repeat.

    cuDNN's own guess, and the best of ten tries, miss the best for grouped convolutions. To try all takes seconds, and
    what is once chosen for a shape stays.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = not cudnn.deterministic, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


class Captured:
    """A step as a graph, and the tensors that the graph reads and writes."""

    def __init__(
        self,
        step: Step,
        same: Sequence[Tensor],
        now: Sequence[Tensor],
        written: int,
        stream: torch.cuda.Stream,
        pool: Any,
    ) -> None:
        self._step, self._written = step, written  # the step keeps its kernels alive
        self._same = [t.clone() for t in same]
        size = sum(t.numel() * t.element_size() for t in now)
        self._room = max(1, min(MOST, ROOM // size))
        self._turns = [t.expand(self._room, *t.shape).clone() for t in now]
        self._at = torch.zeros(1, dtype=torch.int64, device=same[0].device)
        self._losses: Tensor | None = None
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self._at.device))
        with torch.cuda.stream(stream):  # which is left even if a capture fails
            for _ in range(WARM):
                self._at.zero_()
                self._once()
            stream.synchronize()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._once()

    def _once(self) -> None:
        loss = self._step(*self._same, *(turns.index_select(0, self._at)[0] for turns in self._turns))
        if self._losses is None:
            self._losses = loss.new_zeros(self._room, *loss.shape)
        self._losses.index_copy_(0, self._at, loss[None])
        self._at.add_(1)

    def __call__(self, same: Sequence[Tensor], turns: Sequence[Tensor]) -> Tensor:
        """Steps with each of `turns` in turn; what they change in `same` is changed there."""
        assert self._losses is not None
        _copy(self._same, same)
        losses = []
        for first in range(0, len(turns[0]), self._room):
            part = [t[first : first + self._room] for t in turns]
            steps = len(part[0])
            _copy([t[:steps] for t in self._turns], part)
            self._at.zero_()
            for _ in range(steps):
                self._graph.replay()
            losses.append(self._losses[:steps].clone())
        _copy(same[: self._written], self._same[: self._written])
        return torch.cat(losses)


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for old, new in zip(into, values, strict=True):
        old.copy_(new)
