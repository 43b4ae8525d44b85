"""Steps recorded once and run without Python: an accelerator, never a requirement.

A step of a small dense net is some sixty tiny operators, and Python, autograd and `vmap` cost several times what they
do. `tracer.py` records the operators of one step for given shapes, and a backend makes of the record a program that
runs many steps: TorchScript (`torchscript.py`) or a CUDA graph (`cuda_graphs.py`). Nothing is assumed of a program: it
must repeat the very step that it was recorded from, or the step stays as it is.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fnrfl.core import trees
from fnrfl.core.engine import Step
from fnrfl.core.errors import out_of_memory
from fnrfl.core.forks import filters_lock, process_lock
from fnrfl.core.step import ready_to_transform
from fnrfl.engines.recorder.backend import Backend
from fnrfl.engines.recorder.programs import (
    STORE,
    Coming,
    FlatProgram,
    FlatStep,
    Program,
    ProgramStore,
    Recording,
    StepArguments,
    StoredProgram,
    close_enough,
    timed,
)
from fnrfl.engines.recorder.tracer import Tracer

log = logging.getLogger("fnrfl")
Example = Callable[[], tuple[Step, Any, Any, Any]]  # a step, its carry, what it reads, and one turn
_RECORDING = process_lock()


class Wanted(NamedTuple):
    """A program that a run asks for."""

    key: Hashable
    example: Example
    expected_steps: int = 0


@dataclass
class RecordedStep:
    """A step that is recorded, and is not a program yet."""

    key: Hashable
    step: FlatStep
    arguments: StepArguments | None  # None: it cannot be recorded
    candidates: Iterator[FlatProgram]
    stepped: Sequence[Tensor] = ()  # its arguments after one step, and the step's loss, once it was taken
    coming: Coming | None = None


class MissingProgram(NamedTuple):
    """A step that has no program in this process yet."""

    step: FlatStep
    arguments: StepArguments
    key: Hashable


class Recorder:
    """The programs of a run, found or recorded. Ask it while no other thread of the run works.

    Runs of a process share programs through `store`. `scope` is what all steps of this run depend on beside their keys
    and the shapes of what they read: the net.
    """

    def __init__(self, backend: Backend, scope: Hashable = (), store: ProgramStore | None = None) -> None:
        self.backend, self.store, self._scope = backend, store or STORE, scope
        self.num_recorded, self.seconds, self.closed = 0, 0.0, False
        # Of this run, by the caller's key; the store alone keeps them alive.
        self.programs: WeakValueDictionary[Hashable, StoredProgram] = WeakValueDictionary()

    def clear(self) -> None:
        """Let all programs go, those of other runs too."""
        self.store.clear()
        self.backend.forget()

    def close(self) -> None:
        """Let all programs go, and record no more."""
        self.clear()
        self.closed = True

    def program(self, key: Hashable, example: Example, expected_steps: int = 0) -> Program | None:
        """A program for many steps, None if there is none.

        `key` names the step among all that this run's net can take; `example` gives it with arguments like those that
        it will be called with.
        """
        return self.programs_of([Wanted(key, example, expected_steps)])[0]

    def programs_of(self, wanted: Sequence[Wanted]) -> list[Program | None]:
        """Several programs: while one is compiled, the next is recorded, and all steps are taken once."""
        if self.closed:
            return [None for _ in wanted]
        began = time.perf_counter()
        looked_up = [self.programs.get(one.key) or self._stored_or_missing(one) for one in wanted]
        self._make_room(looked_up)
        stored = self._all_stored([one if isinstance(one, StoredProgram) else self.begin(*one) for one in looked_up])
        for known, asked in zip(stored, wanted, strict=True):
            coming = known.coming  # another run may take it meanwhile
            if coming is not None and (self.backend.waits or coming.ready()):
                self._improve(known, coming, asked)
        self.programs.update(zip((one.key for one in wanted), stored, strict=True))
        self.seconds += time.perf_counter() - began
        return [self._used(known, asked) for known, asked in zip(stored, wanted, strict=True)]

    def _used(self, stored: StoredProgram, wanted: Wanted) -> Program | None:
        """A program that gives way to what is coming as soon as it is there: a round may be long.

        It looks only where the thread that asks now also trains, for then no other thread of the run works.
        """
        first, asker = self.store.use(stored), threading.get_ident()
        if first is None or stored.coming is None:
            return first

        def program(carry: Any, fixed: Any, turns: Any) -> Tensor:
            coming = stored.coming
            if coming is not None and threading.get_ident() == asker and coming.ready():
                began = time.perf_counter()
                self._improve(stored, coming, wanted)
                self.seconds += time.perf_counter() - began
            return (stored.program or first)(carry, fixed, turns)

        return program

    def _all_stored(self, begun: Sequence[StoredProgram | RecordedStep]) -> list[StoredProgram]:
        """Programs of what is begun."""
        for one in begun:
            if isinstance(one, RecordedStep):
                self.take_step(one)
        return [self._stored(one) if isinstance(one, RecordedStep) else one for one in begun]

    def _make_room(self, looked_up: Sequence[StoredProgram | MissingProgram]) -> None:
        """Where memory is short for a program that is missing, half of those go that only earlier runs have used."""
        missing = [one.arguments.constants for one in looked_up if isinstance(one, MissingProgram)]
        devices = {tensor.device for constants in missing for tensor in constants}
        if any(map(self.backend.memory_is_short, devices)):
            known = [one for one in looked_up if isinstance(one, StoredProgram)]
            self.store.let_half_go([*self.programs.values(), *known])
            self.backend.free_memory()

    def _stored_or_missing(self, wanted: Wanted) -> StoredProgram | MissingProgram:
        step, arguments = _flat_example(wanted)
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (*arguments.constants, *arguments.turn))
        key = self._scope, wanted.key, shapes, self.backend.settings(wanted.expected_steps)
        if (stored := self.store.get(key)) is not None:
            return stored
        return MissingProgram(step, arguments, key)

    def _stored(self, begun: RecordedStep) -> StoredProgram:
        self.num_recorded += 1
        flat = self.finish(begun)
        program = None if flat is None else _of_trees(flat)
        stored = self.store.keep(begun.key, program, self.backend.max_programs)
        stored.coming = None if flat is None else begun.coming
        return stored

    def _improve(self, stored: StoredProgram, coming: Coming, wanted: Wanted) -> None:
        """Use the program that has been made in the meantime, if it repeats the step as well and both fit in memory."""
        stored.coming = None
        try:
            step, arguments = _flat_example(wanted)
            begun = RecordedStep((), step, arguments, coming.programs(arguments))
            self.take_step(begun)
            flat = self._first_that_repeats(begun)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            log.debug("there is no room for a faster program", exc_info=True)
            return
        if flat is not None:
            stored.program = _of_trees(flat)

    def record(
        self, step: FlatStep, constants: list[Tensor], turn: list[Tensor], num_written: int, expected_steps: int = 0
    ) -> FlatProgram | None:
        """A program that does what `step` does, for tensors like these; None if there is none.

        The step changes the first `num_written` of `constants`.
        """
        begun = self.begin(step, StepArguments(constants, turn, num_written, expected_steps))
        self.take_step(begun)
        return self.finish(begun)

    def begin(self, step: FlatStep, arguments: StepArguments, key: Hashable = ()) -> RecordedStep:
        """Record a step without taking it, and have it compiled if that pays."""
        ready_to_transform()
        with self._quietly():
            with timed("recording"):
                on_gpu = arguments.constants[0].is_cuda  # its kernels are compiled later, or wait for each other
                recording = recorded(step, arguments, computes=not on_gpu)
            candidates, coming = self.backend.candidates(recording)
            return RecordedStep(key, step, arguments, candidates, coming=coming)
        return RecordedStep(key, step, None, iter(()))

    def take_step(self, begun: RecordedStep) -> None:
        """Take the step itself once, while others compile it: what a program must repeat."""
        if begun.arguments is None:
            return
        arguments = _copies([*begun.arguments.constants, *begun.arguments.turn])
        with self._quietly(), timed("taking the step"):
            loss = begun.step(*arguments)
            begun.stepped = [*arguments, loss.clone()]

    def finish(self, begun: RecordedStep) -> FlatProgram | None:
        """The first program that repeats the step; None if there is none."""
        program = self._first_that_repeats(begun)
        if program is None:
            self.backend.cannot_record()
        return program

    def _first_that_repeats(self, begun: RecordedStep) -> FlatProgram | None:
        if begun.arguments is not None and begun.stepped:
            with self._quietly():
                for program in begun.candidates:
                    with timed("comparing"):
                        repeats = self.matches(program, begun.arguments, begun.stepped)
                    if repeats:
                        return program
                    log.warning("a recorded step does not repeat the one it was recorded from and is not used.")
        return None

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Whatever a model does that cannot be recorded, it can still be run; but memory that is full is an error."""
        try:
            # Recording puts hooks on all modules of the process, which do nothing to others but must not be mixed up.
            with _RECORDING, filters_lock, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of constants in the record, and of TorchScript's age
                warnings.filterwarnings("default", message=".*deterministic.*")
                with self.backend.recording():
                    yield
        except Exception as error:
            if out_of_memory(error):
                raise
            log.debug("a step could not be recorded", exc_info=True)

    def matches(self, program: FlatProgram, arguments: StepArguments, stepped: Sequence[Tensor]) -> bool:
        """Whether a program changes tensors as the step itself has changed them, and returns its loss."""
        changed, compute = _copies(arguments.constants), self.backend.compute
        (loss,) = program(changed, [t.clone()[None] for t in arguments.turn])
        threes = zip(arguments.constants, changed, stepped, strict=False)
        same_loss = close_enough(torch.zeros_like(loss), loss, stepped[-1], compute, shortest=1.0)
        return same_loss and all(close_enough(*three, compute) for three in threes)


def _flat_example(wanted: Wanted) -> tuple[FlatStep, StepArguments]:
    """The step as a function of tensors, and such tensors."""
    step, carry, fixed, turn = wanted.example()
    like = carry, fixed, turn
    flat = lambda *tensors: step(*trees.rebuilt(like, iter(tensors)))  # noqa: E731
    constants, num_written = trees.leaves((carry, fixed)), len(trees.leaves(carry))
    return flat, StepArguments(constants, trees.leaves(turn), num_written, wanted.expected_steps)


def _of_trees(program: FlatProgram) -> Program:
    return lambda carry, fixed, turns: program(trees.leaves((carry, fixed)), trees.leaves(turns))


def recorded(step: FlatStep, arguments: StepArguments, *, computes: bool = True) -> Recording:
    """Record the operators of a step on copies; without `computes`, on tensors that have shapes and no numbers."""
    tensors = _copies([*arguments.constants, *arguments.turn])
    fake = None if computes else FakeTensorMode(allow_non_fake_inputs=True)
    tensors = tensors if fake is None else [fake.from_tensor(tensor) for tensor in tensors]
    with fake or nullcontext(), Tracer(tensors) as tracer:
        loss = step(*tensors)
    return Recording(arguments, tracer.module(loss))


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Distinct ones: a tensor given twice would be taken for one input."""
    return [t.clone() for t in tensors]
