"""Record the operators of a step while it runs."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fnrfl.engines.recorder.rewriting import leave_out_views

_ops = torch.ops.aten
_SAME_TENSOR = {_ops.detach.default, _ops.alias.default, _ops.lift_fresh.default}


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
