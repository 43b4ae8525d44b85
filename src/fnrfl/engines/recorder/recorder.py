"""Steps recorded once and run without Python: an accelerator, never a requirement.

A step of a small dense net is some sixty tiny operators, and Python, autograd and `vmap` cost several times what they
do. A `Tracer` records the operators of one step for given shapes, and a backend makes of the record a program that
runs many steps: TorchScript (`torchscript.py`) or a CUDA graph (`cuda_graphs.py`). Nothing is assumed of a program: it
must repeat the very step that it was recorded from, or the step stays as it is.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fnrfl.core import trees
from fnrfl.core.engine import Step
from fnrfl.core.errors import out_of_memory
from fnrfl.core.step import ready_to_transform
from fnrfl.engines.recorder.programs import (
    STORE,
    Backend,
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
from fnrfl.engines.recorder.rewriting import leave_out_views
from fnrfl.process import filters_lock

log = logging.getLogger("fnrfl")
Example = Callable[[], tuple[Step, Any, Any, Any]]  # a step, its carry, what it reads, and one turn
_RECORDING = threading.RLock()
_ops = torch.ops.aten
_SAME_TENSOR = {_ops.detach.default, _ops.alias.default, _ops.lift_fresh.default}


class ProgramRequest(NamedTuple):
    """A program that a run needs: `key` names the step among all that its net can take."""

    key: Hashable
    example: Example  # the step, with arguments like those that the program will be called with
    expected_steps: int = 0


@dataclass
class NewStep:
    """A step without a program in this process: it is recorded, taken once, and compared with its programs."""

    key: Hashable
    step: FlatStep
    arguments: StepArguments
    candidates: Iterator[FlatProgram] | None = None  # None: it is not recorded yet, or cannot be
    stepped: Sequence[Tensor] = ()  # its arguments after one step, and the step's loss, once it was taken


class Recorder:
    """The programs of a run, found or recorded. Call it while no other thread of the run works.

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
        """Return a program for many steps, None if there is none."""
        return self.programs_of([ProgramRequest(key, example, expected_steps)])[0]

    def programs_of(self, requests: Sequence[ProgramRequest]) -> list[Program | None]:
        """Return several programs: while one is compiled, the next is recorded, and all steps are taken once."""
        if self.closed:
            return [None for _ in requests]
        began = time.perf_counter()
        found = [self.programs.get(request.key) or self._look_up(request) for request in requests]
        new = [one for one in found if isinstance(one, NewStep)]
        self._make_room(new, [one for one in found if isinstance(one, StoredProgram)])
        for one in new:
            self.begin(one)
        for one in new:
            self.take_step(one)
        stored = [self.finish(one) if isinstance(one, NewStep) else one for one in found]
        self.programs.update(zip((request.key for request in requests), stored, strict=True))
        self.seconds += time.perf_counter() - began
        return [self.store.use(one) for one in stored]

    def _make_room(self, new: Sequence[NewStep], known: Sequence[StoredProgram]) -> None:
        """Let half of the programs go that only earlier runs have used, where memory is short for new ones."""
        devices = {tensor.device for one in new for tensor in one.arguments.constants}
        if any(map(self.backend.memory_is_short, devices)):
            self.store.let_half_go([*self.programs.values(), *known])
            self.backend.free_memory()

    def _look_up(self, request: ProgramRequest) -> StoredProgram | NewStep:
        step, carry, fixed, turn = request.example()
        like = carry, fixed, turn
        flat = lambda *tensors: step(*trees.rebuilt(like, iter(tensors)))  # noqa: E731
        constants, turns = trees.leaves((carry, fixed)), trees.leaves(turn)
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (*constants, *turns))
        key = self._scope, request.key, shapes, self.backend.settings(request.expected_steps)
        arguments = StepArguments(constants, turns, len(trees.leaves(carry)), request.expected_steps)
        return self.store.get(key) or NewStep(key, flat, arguments)

    # -- one step -----------------------------------------------------------------------------------------------------
    def begin(self, new: NewStep) -> None:
        """Record a step without taking it, and have it compiled if that pays."""
        ready_to_transform()
        with self._quietly():
            with timed("recording"):
                on_gpu = new.arguments.constants[0].is_cuda  # its kernels are compiled later, or wait for each other
                recording = recorded(new.step, new.arguments, computes=not on_gpu)
            new.candidates = self.backend.candidates(recording)

    def take_step(self, new: NewStep) -> None:
        """Take the step itself once, while others compile it: what a program must repeat."""
        if new.candidates is not None:
            tensors = _copies([*new.arguments.constants, *new.arguments.turn])
            with self._quietly(), timed("taking the step"):
                loss = new.step(*tensors)
                new.stepped = [*tensors, loss.clone()]

    def finish(self, new: NewStep) -> StoredProgram:
        """Keep the first program that repeats the step; none if there is none."""
        self.num_recorded += 1
        flat = self._that_repeats(new)
        if flat is None:
            self.backend.cannot_record()
            return self.store.keep(new.key, None, self.backend.max_programs)
        program = lambda carry, fixed, turns: flat(trees.leaves((carry, fixed)), trees.leaves(turns))  # noqa: E731
        return self.store.keep(new.key, program, self.backend.max_programs)

    def _that_repeats(self, new: NewStep) -> FlatProgram | None:
        if new.candidates is not None and new.stepped:
            with self._quietly():
                for program in new.candidates:
                    with timed("comparing"):
                        repeats = self.matches(program, new.arguments, new.stepped)
                    if repeats:
                        return program
                    log.warning("a recorded step does not repeat the one it was recorded from and is not used.")
        return None

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Go on after errors: what cannot be recorded can still be run; but memory that is full is an error."""
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
        """Return whether a program changes tensors as the step itself has changed them, and returns its loss."""
        changed, compute = _copies(arguments.constants), self.backend.compute
        (loss,) = program(changed, [t.clone()[None] for t in arguments.turn])
        threes = zip(arguments.constants, changed, stepped, strict=False)
        same_loss = close_enough(torch.zeros_like(loss), loss, stepped[-1], compute, shortest=1.0)
        return same_loss and all(close_enough(*three, compute) for three in threes)


def recorded(step: FlatStep, arguments: StepArguments, *, computes: bool = True) -> Recording:
    """Record the operators of a step on copies; without `computes`, on tensors that have shapes and no numbers."""
    tensors = _copies([*arguments.constants, *arguments.turn])
    fake = None if computes else FakeTensorMode(allow_non_fake_inputs=True)
    tensors = tensors if fake is None else [fake.from_tensor(tensor) for tensor in tensors]
    with fake or nullcontext(), Tracer(tensors) as tracer:
        loss = step(*tensors)
    return Recording(arguments, tracer.module(loss))


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return distinct copies: a tensor given twice would be taken for one input."""
    return [t.clone() for t in tensors]


# -- the operators of a step ------------------------------------------------------------------------------------------


class ReadsNumbers(Exception):
    """A step does other things for other numbers, so its operators say nothing about the next step."""


class Tracer(TorchDispatchMode):
    """Write every operator that runs into a graph; `torch.func` and autograd have done their work before.

    The step runs as it is, and one operator takes microseconds more, where `make_fx` takes a millisecond.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self.held = fx.Graph(), dict[str, Tensor]()
        self._nodes: MutableMapping[Tensor, fx.Node] = WeakIdKeyDictionary()  # a step's memory is free as soon as ever
        for i, tensor in enumerate(inputs):
            self._name(tensor, self.graph.placeholder(f"arg{i}"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags or _has_shape_of_numbers(func, args):
            raise ReadsNumbers(str(func))
        result = func(*args, **kwargs)
        parts = result if isinstance(result, list | tuple) else [result]
        if func in _SAME_TENSOR:
            self._name(result, self._node(args[0]))
        elif func._schema.is_mutable or any(isinstance(part, Tensor) for part in parts):
            node = self.graph.call_function(func, self._nodes_of(args), self._nodes_of(kwargs))
            for i, part in enumerate(parts):
                if isinstance(part, Tensor) and part not in self._nodes:  # one that was changed in place has a node
                    self._name(part, node if part is result else self.graph.call_function(getitem, (node, i)))
        return result

    def module(self, loss: Tensor) -> fx.GraphModule:
        """The graph as a function of the inputs that returns `loss`."""
        self.graph.output(self._node(loss))
        leave_out_views(self.graph)
        return fx.GraphModule(self.held, self.graph)

    def _nodes_of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self._nodes_of, value))
        return {k: self._nodes_of(v) for k, v in value.items()} if isinstance(value, dict) else value

    def _node(self, tensor: Tensor) -> fx.Node:
        """The node that makes a tensor; one that was there before the step is held by the graph."""
        if tensor not in self._nodes:
            name = f"_held{len(self.held)}"
            self.held[name] = tensor
            self._name(tensor, self.graph.get_attr(name))
        return self._nodes[tensor]

    def _name(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[tensor] = node
        node.meta.setdefault("tensor_meta", _extract_tensor_metadata(tensor))


def _has_shape_of_numbers(func: Any, args: Any) -> bool:
    """Whether the numbers decide the shape of the result, as of the places that are not 0."""
    if func is _ops.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags
