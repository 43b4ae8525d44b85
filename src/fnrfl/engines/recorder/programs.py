"""Programs: recorded steps that run without Python, and where the runs of a process keep them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

log = logging.getLogger("fnrfl")
Program = Callable[[Any, Any, Any], Tensor]  # (carry, fixed, turns [S, ...]) -> losses [S, ...]; changes `carry`
FlatStep = Callable[..., Tensor]  # the same step as a function of tensors
FlatProgram = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]  # (carry and fixed, turns [S, ...]) -> losses
# How far a program may be from the step that it was recorded from, relative to how far the step goes.
MAX_RELATIVE_ERROR = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class StepArguments:
    """What a step is recorded with, and what a program is tried with."""

    constants: list[Tensor]  # tensors that stay the same objects from step to step: those of the carry in front
    turn: list[Tensor]  # tensors that differ from step to step
    num_written: int  # tensors of the carry
    expected_steps: int  # about how many steps of clients will be taken


@dataclass(frozen=True)
class Recording:
    """A recorded step, with the arguments that it was recorded with."""

    arguments: StepArguments
    graph: fx.GraphModule


class Backend:
    """What makes programs of recorded steps: `torchscript.py` on a CPU, `cuda_graphs.py` on a GPU."""

    max_programs: int  # that are kept at once
    compute: torch.dtype | None = None  # the least precise type that a step computes in; None: that of its tensors

    def settings(self, expected_steps: int) -> Hashable:
        """Return what a program depends on beside the step and its arguments."""
        raise NotImplementedError

    def candidates(self, recording: Recording) -> Iterator[FlatProgram]:
        """Return programs that may do what the step does, the fastest first; what takes long begins with this call."""
        raise NotImplementedError

    def recording(self) -> AbstractContextManager[object]:
        """Return a context for all of recording."""
        return nullcontext()

    def forget(self) -> None:
        """Let go what all programs share: they are gone."""

    def memory_is_short(self, device: torch.device) -> bool:
        """Return whether there is little room for another program, even after `free_memory`."""
        return False

    def free_memory(self) -> None:
        """Give memory back that nobody uses: other processes may need it."""

    def cannot_record(self) -> None:
        """Warn that a step runs as it is, where that is slow."""


@dataclass(eq=False)
class StoredProgram:
    """A program, or None for a step that cannot be recorded, and everything that it depends on."""

    key: Hashable
    program: Program | None


class ProgramStore:
    """Programs in the order in which they were last used; the first of them goes first."""

    def __init__(self) -> None:
        self._stored: dict[Hashable, StoredProgram] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> StoredProgram | None:
        """The program of a key, if there is one."""
        with self._lock:
            return self._stored.get(key)

    def keep(self, key: Hashable, program: Program | None, most: int) -> StoredProgram:
        """Keep a program, beside at most `most` - 1 others."""
        with self._lock:
            self._stored.pop(key, None)
            stored = self._stored[key] = StoredProgram(key, program)
            for old in list(self._stored)[:-most]:
                del self._stored[old]
        return stored

    def use(self, stored: StoredProgram) -> Program | None:
        """Return a program, which is to stay now that it is used."""
        with self._lock:
            if self._stored.get(stored.key) is stored:
                self._stored[stored.key] = self._stored.pop(stored.key)
        return stored.program

    def let_half_go(self, kept: Collection[StoredProgram]) -> None:
        """Of all programs but `kept`, let the half go that was not used for the longest time."""
        with self._lock:
            others = [key for key, stored in self._stored.items() if stored not in kept]
            for key in others[: (len(others) + 1) // 2]:
                del self._stored[key]

    def clear(self) -> None:
        """Let all programs go."""
        with self._lock:
            self._stored.clear()


STORE = ProgramStore()  # of all runs of this process


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Log how long a stage of preparing has taken; a GPU may still be at work on it."""
    began = time.perf_counter()
    try:
        yield
    finally:
        log.debug("preparing: %s took %.3f s", stage, time.perf_counter() - began)


def repeated(step: FlatStep) -> FlatProgram:
    """The program that calls a step once for every turn."""
    return lambda constants, turns: torch.stack(
        [step(*constants, *turn) for turn in zip(*(t.unbind() for t in turns), strict=True)]
    )


def close_enough(
    before: Tensor, program: Tensor, step: Tensor, compute: torch.dtype | None, *, shortest: float = 0.0
) -> bool:
    """Whether a program changed a tensor as the step did, up to rounding; a change below `shortest` counts as that."""
    if program.shape != step.shape or not torch.equal(program.isfinite(), step.isfinite()):
        return False
    if not before.is_floating_point():
        return torch.equal(program, step)
    tolerance = MAX_RELATIVE_ERROR[compute or step.dtype]
    before, program, step = (t.double().nan_to_num(posinf=0.0, neginf=0.0) for t in (before, program, step))
    moved, error = (step - before).norm().clamp(min=shortest), (program - step).norm()
    rounding = 1e-6 * before.norm() + 1e-8 * before.numel() ** 0.5  # what rounding alone can do
    return bool(error <= tolerance * moved + rounding)
