"""Recorded steps that are rewritten: fewer operators, the same numbers up to rounding, and nothing read too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import grad_and_value, vmap

from fnrfl.core.algorithm import cross_entropy
from fnrfl.core.net import Net
from fnrfl.engines.recorder import torchscript
from fnrfl.engines.recorder.programs import StepArguments
from fnrfl.engines.recorder.recorder import Recorder, recorded
from fnrfl.engines.recorder.rewriting import (
    _is_in_parts,
    _is_only_read,
    _is_plain_descent,
    _update_each,
    leave_out_copies,
    put_classes_first,
    rewrite,
    update_by_parts,
)
from fnrfl.engines.recorder.torchscript import TorchScript
from mutants import mutants

aten = torch.ops.aten
LR = torch.tensor(0.3, dtype=torch.float64)


def operators(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def twice(step: Callable[..., Tensor], *arguments: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The record of a step, two times."""
    given = StepArguments(list(arguments), [], 0, 0)
    return recorded(step, given).graph, recorded(step, given).graph


def assert_do_the_same(one: fx.GraphModule, other: fx.GraphModule, *arguments: Tensor) -> None:
    """Three steps in a row: what is changed in place is an argument of the next."""
    ends = []
    for graph in (one, other):
        mine = [t.clone() for t in arguments]
        graph.recompile()
        ends.append([*(graph(*mine) for _ in range(3)), *mine])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-12)


def net_of(*widths: int) -> Net:
    torch.manual_seed(0)
    layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    return Net(nn.Sequential(*layers[:-1]).double(), torch.zeros(2, widths[0], dtype=torch.float64))


def descent(net: Net) -> Callable[..., Tensor]:
    """A step of one client."""

    def step(params: Tensor, lr: Tensor, x: Tensor, y: Tensor) -> Tensor:
        def loss(p: Tensor) -> Tensor:
            return cross_entropy(net.apply(p, {}, x, mode="batch")[0].logits, y).mean()

        grad, value = grad_and_value(loss)(params)
        params.sub_(grad * lr)
        return value

    return step


def arguments(net: Net, *clients: int) -> list[Tensor]:
    """Parameters, a learning rate and a batch, of one client or of several."""
    x = torch.randn(*clients, 8, next(iter(net.shapes.values()))[1], dtype=torch.float64)
    return [net.flatten()[0].expand(*clients, -1).clone(), LR, x, torch.randint(4, (*clients, 8))]


def test_weights_of_large_layers_go_down_by_the_product_that_their_gradient_is() -> None:
    net = net_of(200, 200, 180, 4)
    given = arguments(net)
    whole, by_layer = twice(descent(net), *given)
    update_by_parts(by_layer.graph)
    assert operators(whole).count(aten.cat.default) == 1
    assert operators(by_layer).count(aten.addmm_.default) == 2  # the large layers
    assert operators(by_layer).count(aten.addcmul_.default) == 2  # and what is after each of them
    assert operators(by_layer).count(aten.mm.default) == operators(whole).count(aten.mm.default) - 2
    assert_do_the_same(whole, by_layer, *given)


@pytest.mark.parametrize("widths", [(6, 5, 4), (200, 200, 4)])
@pytest.mark.parametrize("clients", [(), (3,)])
def test_a_step_is_the_same_and_shorter(widths: tuple[int, ...], clients: tuple[int, ...]) -> None:
    net = net_of(*widths)
    given, step = arguments(net, *clients), descent(net)
    plain, rewritten = twice(vmap(step, in_dims=(0, None, 0, 0)) if clients else step, *given)
    rewrite(rewritten.graph)
    left = operators(rewritten)
    assert aten.mul.Scalar not in left and aten.select_backward.default not in left and aten.sub_.Tensor not in left
    assert_do_the_same(plain, rewritten, *given)


def test_logits_are_computed_in_the_order_in_which_the_softmax_reads_them() -> None:
    net = net_of(6, 5, 4)
    given = arguments(net, 3)
    plain, turned = twice(vmap(descent(net), in_dims=(0, None, 0, 0)), *given)
    put_classes_first(turned.graph)

    def reads_as_it_lies(graph: fx.GraphModule) -> bool:
        (softmax,) = graph.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
        return softmax.args[0].target is aten.add.Tensor

    assert reads_as_it_lies(turned) and not reads_as_it_lies(plain)
    assert_do_the_same(plain, turned, *given)


HALF = 1 << 16


def read_twice(params: Tensor, x: Tensor) -> Tensor:
    """Logits are read in two orders."""
    logits = net_of(6, 5, 4).apply(params, {}, x, mode="batch")[0].logits
    return logits.sum() + logits.mT.log_softmax(-2).sum()


def read_late(w: Tensor, x: Tensor) -> Tensor:
    """A copy is read after its source has changed."""
    seen = aten.mul.Scalar(w, 1).view(3, 1)
    w.add_(x)
    return (seen * x).sum()


@pytest.mark.parametrize(
    ("step", "given", "rule"),
    [
        (read_twice, (arguments(net_of(6, 5, 4))[0], torch.randn(8, 6).double()), put_classes_first),
        (read_late, (torch.arange(3.0), torch.ones(3)), leave_out_copies),
        (  # a row of several
            lambda w, x: w.add_(aten.select_backward(x, [2, 3], 0, 1) * 2).sum(),
            (torch.zeros(2, 3), torch.ones(3)),
            leave_out_copies,
        ),
        (  # a learning rate of every parameter
            lambda p, lr, x: p.sub_(torch.cat([x * 2, x * 3]) * lr).sum(),
            (torch.randn(2 * HALF), torch.rand(2 * HALF), torch.randn(HALF)),
            rewrite,
        ),
    ],
    ids=["read twice", "read late", "a row of several", "a vector of rates"],
)
def test_what_a_rule_does_not_fit_stays_as_it_was(step: Any, given: tuple[Tensor, ...], rule: Any) -> None:
    plain, rewritten = twice(step, *given)
    rule(rewritten.graph)
    assert operators(rewritten) == operators(plain)
    assert_do_the_same(plain, rewritten, *given)


@pytest.mark.parametrize(
    "gradient",
    [
        lambda p, x: torch.cat([p[HALF:], p[:HALF]]),  # each part goes by what the other was
        lambda p, x: torch.cat([p[HALF:] * 2, (x[:, None] @ p[None, :256]).flatten()]),
        lambda p, x: torch.cat([(x[:, None] @ x[None].cos()).t().flatten(), p[:HALF] * 2]),
        lambda p, x: p.flip(0),
    ],
    ids=["views", "a product with parameters", "a turned product", "no parts"],
)
def test_every_part_goes_by_the_parameters_of_before(gradient: Callable[[Tensor, Tensor], Tensor]) -> None:
    step = lambda p, lr, x: p.sub_(gradient(p, x) * lr).sum()  # noqa: E731
    given = [torch.randn(2 * HALF, dtype=torch.float64), LR, torch.randn(256, dtype=torch.float64)]
    plain, rewritten = twice(step, *given)
    rewrite(rewritten.graph)
    assert_do_the_same(plain, rewritten, *given)


def test_a_gradient_that_memory_is_added_to_goes_down_in_one_pass() -> None:
    def step(p: Tensor, velocity: Tensor, lr: Tensor, x: Tensor) -> Tensor:
        p.sub_(velocity.mul_(0.9).add_(torch.cat([x, x])) * lr)
        return p.sum()

    given = [torch.randn(2 * HALF), torch.randn(2 * HALF), LR.float(), torch.randn(HALF)]
    plain, rewritten = twice(step, *given)
    rewrite(rewritten.graph)
    assert aten.addcmul_.default in operators(rewritten)
    rewritten.recompile()
    torch.testing.assert_close(*(graph(*[t.clone() for t in given]) for graph in (plain, rewritten)), rtol=1e-4, atol=0)


def test_a_record_that_a_rule_spoils_is_used_as_it_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.mul.Tensor:
                node.target, node.args = torch.ops.aten.view.default, (node.args[0], [7])

    monkeypatch.setattr(torchscript, "rewrite", spoil)
    step = lambda w, fixed, x: w.add_(w * x).sum()  # noqa: E731
    program = Recorder(TorchScript()).program("spoiled", lambda: (step, torch.ones(3), None, torch.ones(3)))
    assert program is not None
    program(carry := torch.ones(3), None, torch.ones(2, 3))
    assert torch.equal(carry, torch.full((3,), 4.0))


MUTANTS = [
    *mutants(_is_only_read, views_are_not_followed=("_is_only_read(user, unwritten)", "True")),
    *mutants(leave_out_copies, any_row_is_the_only_one=("node.args[1][node.args[2]] == 1", "True")),
    *mutants(_update_each, products_with_parameters=("_is_view_of(params, *product.args)", "False")),
    *mutants(_is_in_parts, parts_of_the_parameters=("not _is_view_of(params, *parts)", "True")),
    *mutants(_is_plain_descent, every_learning_rate=("_shape(lr) == ()", "True")),
]
