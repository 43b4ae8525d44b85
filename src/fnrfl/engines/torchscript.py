"""Recorded steps in TorchScript: a whole loop over steps in one call, without holding Python's lock."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from fnrfl.core.errors import out_of_memory
from fnrfl.engines.programs import FlatProgram, Recording, StepArguments, repeated

LARGE_PART = 1 << 15  # numbers of a gradient from which on another pass over it takes longer than another operator


class TorchScript:
    """The backend for CPUs: threads work side by side while a program runs."""

    max_programs = 64  # each holds about a megabyte for good
    waits = True

    def settings(self, expected_steps: int) -> Hashable:
        return "TorchScript", torch.are_deterministic_algorithms_enabled()

    def decompositions(self) -> Any:
        """TorchScript cannot trace operators that take a list of booleans."""
        from torch._decomp import get_decompositions

        aten = torch.ops.aten
        return get_decompositions([aten.native_batch_norm_backward, aten.native_layer_norm_backward])

    def made_before(self, arguments: StepArguments) -> None:
        """Nothing: no program is kept on disk."""

    def candidates(self, recording: Recording) -> Iterator[FlatProgram]:
        try:
            yield _scripted(recording)
        except RuntimeError as error:  # of an operator that TorchScript does not take
            if out_of_memory(error):
                raise
        yield repeated(recording.graph)

    def coming(self, recording: Recording) -> None:
        """Nothing: what takes long is done at once."""

    def recording(self) -> AbstractContextManager[object]:
        return nullcontext()

    def close_enough(self, before: Tensor, program: Tensor, step: Tensor) -> bool:
        return torch.allclose(program, step, rtol=1e-3, atol=1e-5, equal_nan=True)

    def forget(self) -> None:
        """Nothing: programs hold only what is theirs."""

    def cannot_record(self) -> None:
        """Nothing: the step runs as it is."""


class _Script(torch.jit.ScriptModule):
    """A module to define a loop over a step in."""

    def __init__(self, step: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.step = step


def update_by_parts(graph: fx.GraphModule) -> None:
    """Let the weights of large layers go down by their own gradients, not by a part of one long vector.

    `params.sub_(cat(parts) * lr)` becomes `params[part].sub_(part * lr)` for each large part and for those between. The
    numbers stay the same to the bit, and a gradient is written once instead of three times.
    """
    aten, new = torch.ops.aten, graph.graph.call_function
    updates: Any = graph.graph.find_nodes(op="call_function", target=aten.sub_.Tensor)
    for update in filter(_is_plain_descent, updates):
        params, scaled = update.args
        (parts, *_), lr = scaled.args[0].args, scaled.args[1]
        lengths, steps = [], []  # of large parts, and of those between
        with graph.graph.inserting_before(update):
            for is_large, some in groupby(parts, key=lambda part: _shape(part)[0] >= LARGE_PART):
                small = [] if is_large else list(some)
                for part in some if is_large else [new(aten.cat.default, (small,))]:
                    times = aten.mul_.Tensor if _is_unshared_product(part) else aten.mul.Tensor
                    lengths.append(sum(_shape(each)[0] for each in small or [part]))
                    steps.append(new(times, (part, lr)))
            layers = new(aten.split_with_sizes.default, (params, lengths))
            for i, step in enumerate(steps):  # after all of them are known: a gradient may be a view of the parameters
                new(aten.sub_.Tensor, (new(getitem, (layers, i)), step))
        update.replace_all_uses_with(params)
        for node in (update, scaled, scaled.args[0]):
            graph.graph.erase_node(node)
    graph.recompile()


def _is_plain_descent(update: Any) -> bool:
    """Whether a node is `params.sub_(cat(parts) * lr)` of a vector with a large part and of a number."""
    aten, (params, scaled, *_) = torch.ops.aten, update.args
    if update.kwargs or not _is_used_once(scaled, aten.mul.Tensor):
        return False
    grad, lr = scaled.args
    one_vector = _is_used_once(grad, aten.cat.default) and len(_shape(params)) == 1 and isinstance(lr, fx.Node)
    return one_vector and _shape(lr) == () and any(_shape(part)[0] >= LARGE_PART for part in grad.args[0])


def _is_unshared_product(node: Any) -> bool:
    """Whether a tensor is a product of matrices, seen through views, that nobody else reads: it may be overwritten."""
    aten = torch.ops.aten
    while len(node.users) == 1 and node.target in (aten.view.default, aten.t.default, aten.transpose.int):
        node = node.args[0]
    return len(node.users) == 1 and node.target is aten.mm.default


def _is_used_once(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target and len(node.users) == 1


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["tensor_meta"].shape)


def _scripted(recording: Recording) -> FlatProgram:
    """The loop over the steps inside TorchScript."""
    update_by_parts(recording.graph)
    arguments = tuple(t.clone() for t in [*recording.constants, *recording.turn])
    step = torch.jit.trace(recording.graph, arguments, check_trace=False, _store_inputs=False)
    constants, turns = [f"a{i}" for i in range(len(recording.constants))], [f"b{i}" for i in range(len(recording.turn))]
    script = _Script(step)
    script.define(
        f"def forward(self, {', '.join(f'{name}: Tensor' for name in constants + turns)}) -> Tensor:\n"
        "    losses: List[Tensor] = []\n"
        "    for s in range(b0.size(0)):\n"
        f"        losses.append(self.step({', '.join(constants + [f'{name}[s]' for name in turns])}))\n"
        "    return torch.stack(losses)\n"
    )
    run = script.forward  # past the hooks of modules
    return lambda constants, turns: run(*constants, *turns)
