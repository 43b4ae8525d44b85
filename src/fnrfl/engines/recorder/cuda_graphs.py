"""Recorded steps as CUDA graphs: a replay launches a whole step, and Python has nothing to do in it.

The graph reads its batch at a counter that lives on the device and moves it on, so that a replay needs no input. Before
that, torch's compiler may join the operators of a step into fewer kernels (`compiled.py`).
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from fnrfl.core.errors import out_of_memory
from fnrfl.engines.recorder import compiled
from fnrfl.engines.recorder.programs import Backend, FlatProgram, FlatStep, Recording, StepArguments, repeated, timed

log = logging.getLogger("fnrfl")
STAGED_BYTES = 64 << 20  # bytes of batches that lie ready on the device, for each program
STAGED_BATCHES = 1024  # batches that lie ready, at most
WARM_UP_STEPS = 3  # steps before a capture: libraries choose kernels and allocate in the first ones
SHORT_SHARE = 0.1  # of a GPU's memory: if less is free, it is short
WORTH_COMPILING = 10_000  # steps of clients: compiling a large step takes a minute and saves half a millisecond of each


class CudaGraphs(Backend):
    """The backend for GPUs: recorded steps are compiled where that pays, and captured."""

    def __init__(self, compute: torch.dtype, *, compile: bool | None = None) -> None:
        """`compile` says whether to compile; None: where many steps are to be taken."""
        self.compute, self.compile = compute, compile
        self.max_programs = 32 * torch.cuda.device_count()  # each program holds tensors of its own

    def settings(self, expected_steps: int) -> Hashable:
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        precision = self.compute, cudnn.allow_tf32, matmul.allow_tf32
        return "CUDA graph", precision, cudnn.deterministic, self._pays_to_compile(expected_steps)

    def _pays_to_compile(self, expected_steps: int) -> bool:
        return expected_steps >= WORTH_COMPILING if self.compile is None else self.compile

    def recording(self) -> AbstractContextManager[object]:
        return cudnn_autotune()

    def forget(self) -> None:
        """A pool whose graphs are gone cannot be used again."""
        _pool.cache_clear()

    def memory_is_short(self, device: torch.device) -> bool:
        """Other processes count: what they hold is not free."""
        if not _is_nearly_full(device):
            return False
        self.free_memory()  # what torch keeps for later may be enough
        return _is_nearly_full(device)

    def free_memory(self) -> None:
        gc.collect()  # programs may hold each other
        torch.cuda.empty_cache()

    def cannot_record(self) -> None:
        log.warning("a step could not be recorded and is slower for that.")

    def candidates(self, recording: Recording) -> Iterator[FlatProgram]:
        compiling = self._compiling(recording)
        compile_kernels(recording)  # while a worker compiles the rest
        return self._candidates(recording, compiling)

    def _compiling(self, recording: Recording) -> compiled.Compiling | None:
        if self._pays_to_compile(recording.arguments.expected_steps):
            try:
                return compiled.start(recording)
            except OSError as error:  # no folder to keep it in, or no room
                log.warning("a step cannot be compiled (%s) and is captured as it is.", error)
        return None

    def _candidates(self, recording: Recording, compiling: compiled.Compiling | None) -> Iterator[FlatProgram]:
        if compiling is not None:
            try:
                yield self._captured(compiling.result(), recording.arguments)
            except Exception as error:
                if out_of_memory(error):
                    raise
                log.warning("a step could not be compiled (%s) and is captured as it is.", error)
        try:
            yield self._captured(recording.graph, recording.arguments)
        except Exception as error:
            if out_of_memory(error):
                raise
            log.warning("a step could not be captured (%s: %s) and is slower for that.", type(error).__name__, error)
        yield repeated(recording.graph)

    def _captured(self, step: FlatStep, arguments: StepArguments) -> FlatProgram:
        try:
            with timed("capturing"):
                return CapturedStep(step, arguments, _stream(arguments.constants[0].device), _pool())
        except Exception as error:
            self.forget()  # the pool of a capture that failed is not usable
            if error.__context__ is not None and out_of_memory(error.__context__):
                raise error.__context__ from None  # torch says of such a capture only that it could not be ended
            raise


def _is_nearly_full(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free < SHORT_SHARE * total


# One pool for all, and one stream for each device, so that programs use the same memory: no two graphs of a device run
# at the same time, and nothing in the pool outlives a replay.
@cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def cudnn_autotune() -> Iterator[None]:
    """Convolutions that run inside for the first time are done by the fastest of all kernels, unless they must repeat.

    cuDNN's own guess, and the best of ten tries, miss the best for grouped convolutions. To try all takes seconds, and
    the kernel that is once chosen for a shape stays.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = not cudnn.deterministic, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


class CapturedStep:
    """A step as a graph, and the tensors that the graph reads and writes."""

    def __init__(self, step: FlatStep, arguments: StepArguments, stream: torch.cuda.Stream, pool: Any) -> None:
        self._step, self._num_written = step, arguments.num_written  # the step keeps its kernels alive
        self._constants = [t.clone() for t in arguments.constants]
        turn_bytes = sum(t.numel() * t.element_size() for t in arguments.turn)
        self._staged = max(1, min(STAGED_BATCHES, STAGED_BYTES // turn_bytes))
        self._turns = [t.expand(self._staged, *t.shape).clone() for t in arguments.turn]
        self._at = torch.zeros(1, dtype=torch.int64, device=self._constants[0].device)
        self._losses: Tensor | None = None
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self._at.device))
        with torch.cuda.stream(stream):  # which is left even if a capture fails
            for _ in range(WARM_UP_STEPS):
                self._at.zero_()
                self._step_once()
            stream.synchronize()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._step_once()

    def _step_once(self) -> None:
        loss = self._step(*self._constants, *(turns.index_select(0, self._at)[0] for turns in self._turns))
        if self._losses is None:
            self._losses = loss.new_zeros(self._staged, *loss.shape)
        self._losses.index_copy_(0, self._at, loss[None])
        self._at.add_(1)

    def __call__(self, constants: Sequence[Tensor], turns: Sequence[Tensor]) -> Tensor:
        """A step with each of `turns`, one after another; the tensors of the carry change in `constants`."""
        assert self._losses is not None
        _copy(self._constants, constants)
        losses = []
        for first in range(0, len(turns[0]), self._staged):
            part = [t[first : first + self._staged] for t in turns]
            steps = len(part[0])
            _copy([t[:steps] for t in self._turns], part)
            self._at.zero_()
            for _ in range(steps):
                self._graph.replay()
            losses.append(self._losses[:steps].clone())
        _copy(constants[: self._num_written], self._constants[: self._num_written])
        return torch.cat(losses)


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for old, new in zip(into, values, strict=True):
        old.copy_(new)


# -- kernels of fnrfl's own operators, compiled side by side -----------------------------------------------------------


THREADS = min(8, os.cpu_count() or 1)
Call = tuple[Any, tuple[Any, ...]]  # an operator, and its arguments: (shape, stride, type) for a tensor


def compile_kernels(recording: Recording) -> None:
    """Call every operator of fnrfl's in a step once for each kind of arguments."""
    device = recording.arguments.constants[0].device
    calls = list(dict.fromkeys(_call(node) for node in recording.graph.graph.nodes if _is_own(node)))
    if calls:
        with timed("compiling kernels"), ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda call: _try(call, device), calls))


def _is_own(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "fnrfl"


def _call(node: fx.Node) -> Call:
    return node.target, tuple(_kind(given) if isinstance(given, fx.Node) else given for given in node.args)


def _kind(node: fx.Node) -> tuple[Any, ...]:
    meta = node.meta["tensor_meta"]
    return tuple(meta.shape), tuple(meta.stride), meta.dtype


def _try(call: Call, device: torch.device) -> None:
    """Call an operator; one that cannot be called is called again, and fails, when the step is taken."""
    operator, given = call
    try:
        if device.type == "cuda":  # Triton makes descriptors only in a thread that has called the GPU before
            torch.cuda.set_device(device)
            torch.cuda.synchronize()
        arguments = [_empty(one, device) if isinstance(one, tuple) else one for one in given]
        with torch.no_grad():
            operator(*arguments)
    except Exception:
        log.debug("an operator could not be called before its step", exc_info=True)


def _empty(kind: Any, device: torch.device) -> Tensor:
    shape, stride, dtype = kind
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
