"""Recorded steps in TorchScript: a whole loop over steps in one call, without holding Python's lock."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fnrfl.core.errors import out_of_memory
from fnrfl.engines.recorder.programs import Backend, FlatProgram, Recording, repeated
from fnrfl.engines.recorder.rewriting import rewrite


class TorchScript(Backend):
    """The backend for CPUs: threads work side by side while a program runs."""

    max_programs = 64  # each holds about a megabyte for good

    def settings(self, expected_steps: int) -> Hashable:
        return "TorchScript", torch.are_deterministic_algorithms_enabled()

    def candidates(self, recording: Recording) -> Iterator[FlatProgram]:
        try:
            yield _scripted(recording)
        except RuntimeError as error:  # of an operator that TorchScript does not take
            if out_of_memory(error):
                raise
        yield repeated(recording.graph)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run new programs as they are: joining operators takes as long as a short run, and gains nothing."""
        before = torch.jit.set_fusion_strategy([])
        try:
            yield
        finally:
            torch.jit.set_fusion_strategy(before)


class _Script(torch.jit.ScriptModule):
    """A module to define a loop over a step in."""

    def __init__(self, step: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.step = step


def _scripted(recording: Recording) -> FlatProgram:
    """The loop over the steps inside TorchScript."""
    arguments, graph = recording.arguments, fx.Graph()
    graph.output(graph.graph_copy(recording.graph.graph, {}))
    rewrite(graph)
    _script_masked_operators(graph)
    tensors = tuple(t.clone() for t in [*arguments.constants, *arguments.turn])
    step = torch.jit.trace(fx.GraphModule(recording.graph, graph), tensors, check_trace=False, _store_inputs=False)
    constants, turns = [f"a{i}" for i in range(len(arguments.constants))], [f"b{i}" for i in range(len(arguments.turn))]
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


def _script_masked_operators(graph: fx.Graph) -> None:
    """Put a function in TorchScript in the place of each operator with an output mask, such as convolution_backward.

    Neither the mask, a list of booleans, can be traced nor an output that it leaves out.
    """
    for node in graph.nodes:
        mask = node.args[-1] if isinstance(node.target, OpOverload) and node.args else None
        if not isinstance(mask, list | tuple) or not any(isinstance(one, bool) for one in mask):
            continue
        tensors = {arg: f"x{i}" for i, arg in enumerate(node.all_input_nodes)}
        arguments = ", ".join(tensors[arg] if isinstance(arg, fx.Node) else repr(arg) for arg in node.args)
        there = [i for i, exists in enumerate(mask) if exists]
        node.target = _function(
            f"def operator({', '.join(tensors.values())}):\n"
            f"    found = torch.ops.aten.{node.target._opname}({arguments})\n"
            f"    return ({''.join(f'found[{i}], ' for i in there)})\n"
        )
        node.args = tuple(tensors)
        for user in list(node.users):  # each takes one of the outputs
            user.args = (node, there.index(user.args[1]))


def _function(source: str) -> Callable[..., Any]:
    unit = torch.jit.CompilationUnit(source)
    return lambda *tensors: unit.operator(*tensors)
