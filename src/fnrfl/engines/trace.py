"""Steps recorded once and run without Python: an accelerator, never a requirement.

A step of a small dense net is some sixty tiny operators, and Python, autograd and `vmap` cost several times what they
do. `make_fx` records the operators of one step for given shapes; TorchScript, where it takes them, runs the record
without holding Python's lock, so that threads work side by side. Nothing is assumed of the record: it must repeat the
very step that it was recorded from, or the step stays as it is.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fnrfl.core.errors import out_of_memory
from fnrfl.core.forks import process_lock
from fnrfl.core.step import ready_to_transform
from fnrfl.core.types import CARRY, Part, Step

log = logging.getLogger("fnrfl")
Steps = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]  # leaves that stay, leaves [S, ...] in turn -> [S, ...]
_RECORDING = process_lock()
LIMIT = 64  # programs kept: each holds about a megabyte for good


def leaves(parts: Sequence[Part]) -> list[Tensor]:
    """All tensors of some tensors and trees, in order; those of a tree by name, whoever was put in first."""
    return [leaf for part in parts for leaf in ([part[k] for k in sorted(part)] if isinstance(part, dict) else [part])]


def of_leaves(step: Step, like: Sequence[Part]) -> Step:
    """The same step as a function of leaves, for parts of this structure."""
    names = [sorted(part) if isinstance(part, dict) else None for part in like]

    def flat(*given: Tensor) -> Tensor:
        rest = iter(given)
        return step(*(next(rest) if keys is None else {k: next(rest) for k in keys} for keys in names))

    return flat


def one_by_one(step: Step) -> Steps:
    """Steps of leaves, one after another."""
    return lambda same, turns: torch.stack(
        [step(*same, *now) for now in zip(*(t.unbind() for t in turns), strict=True)]
    )


class Tracer:
    """Programs by what they do and the shapes they do it for. To be asked while no other thread of the run works."""

    limit = LIMIT

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, Steps | None] = OrderedDict()
        self.traced, self.seconds, self.closed = 0, 0.0, False

    def clear(self) -> None:
        """Let all programs go."""
        self._programs.clear()

    def close(self) -> None:
        """Let all programs go, and record no more."""
        self.clear()
        self.closed = True

    def get(self, key: Hashable) -> Steps | None:
        """A program that was recorded."""
        return self._programs.get(key)

    def program(
        self, key: Hashable, example: Callable[[], tuple[Step, Sequence[Part], Sequence[Part]]], steps: int = 0
    ) -> Steps | None:
        """Recorded steps, None if that cannot be done.

        `key` names the step and the shapes of all it reads; `example` gives it, with its arguments that stay and those
        that change from step to step. About `steps` of them are to be taken.
        """
        if self.closed:
            return None
        if key not in self._programs:
            self.traced, began = self.traced + 1, time.perf_counter()
            step, same, now = example()
            written = len(leaves(same[:CARRY]))
            self._programs[key] = self.record(of_leaves(step, [*same, *now]), leaves(same), leaves(now), written, steps)
            if len(self._programs) > self.limit:
                self._programs.popitem(last=False)
            self.seconds += time.perf_counter() - began
        self._programs.move_to_end(key)
        return self._programs[key]

    def record(
        self, step: Step, same: Sequence[Tensor], now: Sequence[Tensor], written: int = 1, steps: int = 0
    ) -> Steps | None:
        """A program that does what `step` does, for tensors like these; None if there is no such program.

        The step changes the first `written` of `same`.
        """
        ready_to_transform()
        stepped = _copies([*same, *now])
        try:
            # Recording puts hooks on all modules of the process, which do nothing to others but must not be mixed up.
            with _RECORDING, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of constants in the record, and of TorchScript's age
                warnings.filterwarnings("default", message=".*deterministic.*")
                from torch.fx.experimental.proxy_tensor import make_fx

                graph = make_fx(step, decomposition_table=self.composed())(*stepped)
                _tidy(graph)
                for program in self.ways(graph, same, now, written, steps):
                    if self.repeats(program, same, now, stepped):
                        return program
                    log.warning("a recorded step does not repeat the one it was recorded from and is not used.")
        except Exception as error:  # whatever a model does that cannot be recorded, it can still be run
            if out_of_memory(error):
                raise
            log.debug("a step could not be recorded", exc_info=True)
        self.give_up()
        return None

    def give_up(self) -> None:
        """A step stays as it is."""

    def composed(self) -> Any:
        """Operators that are recorded as others: TorchScript cannot trace those that take a list of booleans."""
        from torch._decomp import get_decompositions

        aten = torch.ops.aten
        return get_decompositions([aten.native_batch_norm_backward, aten.native_layer_norm_backward])

    def ways(
        self, graph: fx.GraphModule, same: Sequence[Tensor], now: Sequence[Tensor], written: int, steps: int
    ) -> Iterator[Steps]:
        """Ways to run a graph for many steps, the fastest first."""
        try:
            yield _scripted(graph, same, now)
        except RuntimeError as error:  # of an operator that TorchScript does not take
            if out_of_memory(error):
                raise
        yield one_by_one(graph)

    def repeats(self, program: Steps, same: Sequence[Tensor], now: Sequence[Tensor], stepped: Sequence[Tensor]) -> bool:
        """Whether a program changes tensors as the step itself has changed them."""
        changed = _copies(same)
        program(changed, [t.clone()[None] for t in now])
        return all(self.alike(*three) for three in zip(same, changed, stepped, strict=False))

    def alike(self, before: Tensor, changed: Tensor, stepped: Tensor) -> bool:
        """Whether a tensor was changed as it should be."""
        return torch.allclose(changed, stepped, rtol=1e-3, atol=1e-5, equal_nan=True)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Distinct ones: a tensor given twice would be taken for one input."""
    return [t.clone() for t in tensors]


class _Script(torch.jit.ScriptModule):
    """Something to define a loop over a step in."""

    def __init__(self, step: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.step = step


def _scripted(graph: fx.GraphModule, same: Sequence[Tensor], now: Sequence[Tensor]) -> Steps:
    """The loop over the steps inside TorchScript too: one call, in which Python's lock is free."""
    step = torch.jit.trace(graph, tuple(_copies([*same, *now])), check_trace=False, _store_inputs=False)
    held, turns = [f"a{i}" for i in range(len(same))], [f"b{i}" for i in range(len(now))]
    script = _Script(step)
    script.define(
        f"def forward(self, {', '.join(f'{name}: Tensor' for name in held + turns)}) -> Tensor:\n"
        "    losses: List[Tensor] = []\n"
        "    for s in range(b0.size(0)):\n"
        f"        losses.append(self.step({', '.join(held + [f'{name}[s]' for name in turns])}))\n"
        "    return torch.stack(losses)\n"
    )
    return lambda same, turns: script(*same, *turns)


def _tidy(graph: fx.GraphModule) -> None:
    """Leave out what differentiation and `vmap` left behind: views that change nothing, transposes undone at once."""
    aten = torch.ops.aten
    views = {aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default}
    for node in list(graph.graph.nodes):
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, fx.Node):
            continue
        before, after = source.meta.get("tensor_meta"), node.meta.get("tensor_meta")
        if node.target in views and before is not None and after is not None:
            if (before.shape, before.stride, before.dtype) == (after.shape, after.stride, after.dtype):
                node.replace_all_uses_with(source)
        elif node.target is source.target is aten.transpose.int and {*node.args[1:]} == {*source.args[1:]}:
            node.replace_all_uses_with(source.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
