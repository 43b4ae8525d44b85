"""Recorded steps with fewer operators and fewer passes over memory, before they become programs.

A step of a small net takes as long as it has operators; one of a large layer, as its gradient is read and written. Each
rule here puts operators in the place of others that compute the same up to rounding. What fits no rule stays as it was
recorded.
"""

from __future__ import annotations

from itertools import groupby, takewhile
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.passes.shape_prop import TensorMetadata

LARGE_PART = 1 << 15  # numbers of a gradient from which on another pass over it takes longer than another operator
_ops = torch.ops.aten


def rewrite(graph: fx.Graph) -> None:
    """Apply every rule to a recorded step."""
    leave_out_copies(graph)
    put_classes_first(graph)
    update_by_parts(graph)


# -- views ------------------------------------------------------------------------------------------------------------


def leave_out_views(graph: fx.Graph) -> None:
    """Leave out what differentiation and `vmap` left behind: views that change nothing, transposes undone at once."""
    views = {_ops.expand.default, _ops.view.default, _ops._unsafe_view.default, _ops.reshape.default}
    for node in list(graph.nodes):
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, fx.Node):
            continue
        before, after = source.meta.get("tensor_meta"), node.meta.get("tensor_meta")
        if node.target in views and before is not None and after is not None:
            if (before.shape, before.stride, before.dtype) == (after.shape, after.stride, after.dtype):
                node.replace_all_uses_with(source)
        elif node.target is source.target is _ops.transpose.int and {*node.args[1:]} == {*source.args[1:]}:
            node.replace_all_uses_with(source.args[0])
    graph.eliminate_dead_code()


# -- copies -----------------------------------------------------------------------------------------------------------


def leave_out_copies(graph: fx.Graph) -> None:
    """Leave out products with 1, which `vmap` makes of every bias, and zeros around a row that is the only one."""
    unwritten = _before_writes(graph)
    for node in unwritten:
        if not _is_only_read(node, unwritten):
            continue
        if node.target is _ops.mul.Scalar and node.args[1] == 1 and _kind(node) == _kind(node.args[0]):
            node.replace_all_uses_with(node.args[0])
        elif node.target is _ops.select_backward.default and node.args[1][node.args[2]] == 1:
            with graph.inserting_before(node):
                row = graph.call_function(_ops.unsqueeze.default, (node.args[0], node.args[2]))
            node.replace_all_uses_with(row)
    graph.eliminate_dead_code()


def _before_writes(graph: fx.Graph) -> dict[Any, None]:
    """The nodes before the first that changes a tensor in place, in their order."""
    writes = lambda node: isinstance(node.target, OpOverload) and node.target._schema.is_mutable  # noqa: E731
    return dict.fromkeys(takewhile(lambda node: not writes(node), graph.nodes))


def _is_only_read(node: Any, unwritten: dict[Any, None]) -> bool:
    """Whether everybody who reads a tensor, or a view of it, does so before any is written: it may be a view itself."""
    return all(user in unwritten and (not _is_view(user) or _is_only_read(user, unwritten)) for user in node.users)


# -- the order of classes ---------------------------------------------------------------------------------------------


def put_classes_first(graph: fx.Graph) -> None:
    """Let a product write logits with the classes in front, if a softmax reads them so and nobody else does.

    Otherwise they are copied into that order; and a product of ten columns takes twice as long as one of ten rows.
    """
    softmaxes: Any = graph.find_nodes(op="call_function", target=_ops._log_softmax.default)
    for softmax in softmaxes:
        turned, dim, *_ = softmax.args
        ndim = len(_shape(softmax))
        if ndim < 2 or dim % ndim != ndim - 2 or not (_is_turned(turned) and len(turned.users) == 1):
            continue
        with graph.inserting_before(softmax):
            logits = _turned_sum(graph, turned.args[0])
        if logits is not None:
            softmax.replace_input_with(turned, logits)
    graph.eliminate_dead_code()


def _turned_sum(graph: fx.Graph, node: Any) -> fx.Node | None:
    """A product of matrices plus a bias that nobody else reads, computed with rows as columns; None: it is no such."""
    turned = lambda m: m.args[0] if _is_turned(m) else graph.call_function(_ops.transpose.int, (m, -2, -1))  # noqa: E731
    if len(node.users) != 1 or node.kwargs:
        return None
    if node.target is _ops.addmm.default and len(_shape(node.args[0])) == 1:
        bias, left, right = node.args
        column = graph.call_function(_ops.unsqueeze.default, (bias, 1))
        return graph.call_function(_ops.addmm.default, (column, turned(right), turned(left)))
    if node.target is _ops.add.Tensor and _is_used_once(node.args[1], _ops.bmm.default):
        bias, (left, right) = node.args[0], node.args[1].args
        if isinstance(bias, fx.Node) and len(_shape(bias)) == 3:
            product = graph.call_function(_ops.bmm.default, (turned(right), turned(left)))
            return graph.call_function(_ops.add.Tensor, (turned(bias), product))
    return None


def _is_turned(node: Any) -> bool:
    """Whether a tensor is another one with its last two axes exchanged."""
    if node.target is _ops.t.default:
        return len(_shape(node)) == 2
    ndim = len(_shape(node)) if node.target is _ops.transpose.int else 0
    return ndim > 1 and {axis % ndim for axis in node.args[1:]} == {ndim - 2, ndim - 1}


# -- descent ----------------------------------------------------------------------------------------------------------


def update_by_parts(graph: fx.Graph) -> None:
    """Let weights go down in one pass, and those of large layers by their own gradients, not by a part of a vector.

    `params.sub_(cat(parts) * lr)` becomes an update of each large part, and of those between. A gradient that is a
    product of matrices is not written at all: the product is added to the weights.
    """
    unwritten = _before_writes(graph)
    updates: Any = graph.find_nodes(op="call_function", target=_ops.sub_.Tensor)
    for update in filter(_is_plain_descent, updates):
        params, (grad, lr) = update.args[0], update.args[1].args
        with graph.inserting_before(update):
            if update.args[1] in unwritten and _is_in_parts(grad, params):
                _update_each(graph, params, grad.args[0], lr)
            else:
                graph.call_function(_ops.addcmul_.default, (params, grad, lr), {"value": -1})
        update.replace_all_uses_with(params)
        graph.erase_node(update)
    graph.eliminate_dead_code()


def _update_each(graph: fx.Graph, params: Any, parts: list[Any], lr: Any) -> None:
    """Take the step of each large part of the parameters, and of the small ones between, by itself."""
    new, last = graph.call_function, len(_shape(params)) - 1
    grads, lengths = [], []
    for is_large, some in groupby(parts, key=_is_large):
        run = list(some)
        together = [[part] for part in run] if is_large else [run]
        grads += [each[0] if len(each) == 1 else new(_ops.cat.default, (each, last)) for each in together]
        lengths += [sum(_shape(part)[last] for part in each) for each in together]
    layers = new(_ops.split_with_sizes.default, (params, lengths, last))
    for i, grad in enumerate(grads):
        layer, product = new(getitem, (layers, i)), _product(grad)
        if product is None or _is_view_of(params, *product.args):
            new(_ops.addcmul_.default, (layer, grad, lr), {"value": -1})
        else:
            left, right = product.args
            weights = new(_ops.view.default, (layer, list(_shape(product))))
            new(_ops.addmm_.default, (weights, new(_ops.mul.Tensor, (left, lr)), right), {"alpha": -1})


def _is_plain_descent(update: Any) -> bool:
    """Whether a node is `params.sub_(grad * lr)`, with a number for a learning rate and a gradient of its own."""
    params, scaled, *_ = update.args
    if update.kwargs or scaled is not update.prev or not _is_used_once(scaled, _ops.mul.Tensor):
        return False
    grad, lr = scaled.args
    if not (isinstance(grad, fx.Node) and isinstance(lr, fx.Node)) or _is_view_of(params, grad, lr):
        return False
    return _kind(params) == _kind(grad) and _shape(lr) == () and _kind(lr)[1] == _kind(params)[1]


def _is_in_parts(grad: Any, params: Any) -> bool:
    """Whether a gradient is laid end to end of parts, one of them large, and none a view of what is to change."""
    ndim = len(_shape(params))
    if ndim > 2 or not _is_used_once(grad, _ops.cat.default):
        return False
    parts, dim = grad.args[0], (*grad.args, 0)[1]
    whole = dim % ndim == ndim - 1 and all(len(_shape(part)) == ndim for part in parts)
    return whole and any(map(_is_large, parts)) and not _is_view_of(params, *parts)


def _is_large(part: Any) -> bool:
    return prod(_shape(part)) >= LARGE_PART


def _product(part: Any) -> Any:
    """The product of matrices that a vector is a view of, and so row by row, if nobody else reads it; else None."""
    node = part
    while len(node.users) <= 1 and (node.target is _ops.view.default or _is_turned(node)):
        node = node.args[0]
    return node if _is_used_once(node, _ops.mm.default) and len(_shape(part)) == 1 else None


# -- nodes ------------------------------------------------------------------------------------------------------------


def _is_view(node: Any) -> bool:
    """Whether a node's memory may be that of its first argument."""
    if not isinstance(node.target, OpOverload):
        return bool(node.op == "call_function")
    return any(returned.alias_info is not None for returned in node.target._schema.returns)


def _is_view_of(other: Any, *nodes: Any) -> bool:
    """Whether some nodes may lie in the memory of another."""
    return any(_memory(node) is _memory(other) for node in nodes)


def _memory(node: Any) -> Any:
    """The node whose memory a node's tensor lies in."""
    while _is_view(node):
        node = node.args[0]
    return node


def _is_used_once(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target and len(node.users) == 1


def _shape(node: Any) -> tuple[int, ...]:
    return _kind(node)[0]


def _kind(node: Any) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Shape and type of a tensor; nothing for what was not recorded as one."""
    meta = node.meta.get("tensor_meta")
    return (tuple(meta.shape), meta.dtype) if isinstance(meta, TensorMetadata) else ((), None)
