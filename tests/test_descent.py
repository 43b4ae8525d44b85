"""Steps with momentum in which large layers go down by their own gradients: the same numbers, and nothing copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fnrfl.algorithms.fedprox import Proximal
from fnrfl.core import client_convolutions, descent, trees
from fnrfl.core.algorithm import Objective
from fnrfl.core.net import Net
from fnrfl.core.step import Carry, by_transform, local_step
from fnrfl.core.training import Training
from fnrfl.core.values import Batch, State
from fnrfl.engines import compiled, recorder, rewriting
from fnrfl.engines.cuda_graphs import CapturedStep, CudaGraphs
from fnrfl.engines.cuda_graphs import _by_layers as by_layers
from fnrfl.engines.programs import Recording, StepArguments
from fnrfl.engines.recorder import Recorder
from fnrfl.engines.rewriting import _as_computed, _is_speed, _layers, _written, descend_by_layers
from mutants import mutants

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = pytest.param("cuda", marks=needs_gpu)
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
aten, descend = torch.ops.aten, torch.ops.fnrfl.descend.default


# -- the operator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("clients", [(), (1,), (3,)])
@pytest.mark.parametrize(
    "sizes", [(7, 1100, 33, 2048, 5), (4096, 3), (3, 4096), (1030, 1041), (5000,)], ids=lambda sizes: str(sizes)
)
def test_layer_by_layer_is_all_at_once(
    sizes: tuple[int, ...], clients: tuple[int, ...], computed: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    draw = torch.Generator().manual_seed(0)
    new = lambda size, kind: torch.randn(*clients, size, generator=draw).to(device, kind)  # noqa: E731
    params, velocity, lr = new(sum(sizes), dtype), new(sum(sizes), dtype), torch.tensor(0.3, dtype=dtype, device=device)
    parts = [new(size, computed) for size in sizes]
    large, small = ([p for p in parts if (p.shape[-1] > 1000) == is_large] for is_large in (True, False))
    firsts = [first for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False) if size > 1000]
    faster = 0.9 * velocity + torch.cat(parts, -1).to(dtype) + 0.01 * params
    wanted = params - lr * faster
    descend(params, velocity, lr, large, firsts, torch.cat(small, -1) if small else None, 0.9, 0.01)
    torch.testing.assert_close((params, velocity), (wanted, faster), rtol=1e-6, atol=1e-6)
    if dtype is torch.float64:
        torch.testing.assert_close((params, velocity), (wanted, faster), rtol=1e-14, atol=1e-14)


# -- the rule ----------------------------------------------------------------------------------------------------------


class Pictures(nn.Module):
    """Convolutions of both sizes, BatchNorm, and a sum of two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.short = nn.Conv2d(8, 16, 1, stride=2, bias=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.view(-1, 3, 4, 4))).relu()
        logits: Tensor = self.head((self.second(x) + self.short(x)).relu().mean((2, 3)))
        return logits


class Dropped(nn.Sequential):
    """A dense net with BatchNorm and Dropout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(48, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 4)
        )


def recorded_step(
    module: Callable[[], nn.Module] = Pictures,
    *clients: int,
    objective: Objective | None = None,
    compute: torch.dtype | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Recording:
    """The record of a step of one client, or of several."""
    torch.manual_seed(0)
    training = Training(lr=0.1, **options)
    plain = Net(module().to(dtype), torch.zeros(2, 3, 4, 4, dtype=dtype), channels_last=True)
    net = plain.with_shared_kernels().copy(compute=compute)
    net.mask(training.frozen)
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(*clients, *shape).to(dtype)  # noqa: E731
    params, buffers = trees.mapped(lambda t: t.expand((*clients, *t.shape)).clone(), net.flatten())
    carry = Carry.new(training, params + 0.01 * draw(net.size), buffers)
    noise = {name: torch.rand(*clients, 6, *shape).to(dtype) for name, shape in net.drop_shapes.items()}
    index = torch.arange(6).expand(*clients, 6).clone()
    batch = Batch(draw(6, 3, 4, 4), torch.randint(4, (*clients, 6)), index, noise)
    start = State(params, buffers, {})

    def step(carry: Carry, start: State, lr: Tensor, batch: Batch) -> Tensor:
        chosen = objective or Objective()
        return local_step(net, chosen, training, carry, start, batch, {}, {}, lr, by_transform)

    like = carry, start, torch.tensor(0.1, dtype=dtype), batch
    whole = vmap(step, in_dims=(0, 0, None, 0)) if clients else step
    flat = lambda *tensors: whole(*trees.rebuilt(like, iter(tensors)))  # noqa: E731
    arguments = StepArguments(trees.leaves(like[:3]), trees.leaves(batch), len(trees.leaves(carry)), 0)
    return recorder.recorded(flat, arguments, {})


def of_functions(step: Callable[..., Tensor], *arguments: Tensor) -> Recording:
    return recorder.recorded(step, StepArguments(list(arguments), [], 0, 0), {})


def descents(recording: Recording) -> list[Any]:
    found: Any = recording.graph.graph.find_nodes(op="call_function", target=descend)
    return list(found)


def after(step: Callable[..., Tensor], arguments: StepArguments) -> list[Tensor]:
    """The losses of three steps, and all tensors then."""
    mine = [t.clone() for t in (*arguments.constants, *arguments.turn)]
    return [*(step(*mine).clone() for _ in range(3)), *mine]


def assert_do_the_same(one: Recording, other: Recording, tolerance: float = 1e-12) -> None:
    ends = (after(each.graph, each.arguments) for each in (one, other))
    torch.testing.assert_close(*ends, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "LARGE_PART", 200)


@pytest.mark.parametrize("clients", [(), (3,)])
@pytest.mark.parametrize("module", [Pictures, Dropped])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_a_step_by_layers_is_the_step(module: Callable[[], nn.Module], clients: tuple[int, ...], decay: float) -> None:
    plain = recorded_step(module, *clients, weight_decay=decay)
    rewritten = by_layers(plain)
    (node,) = descents(rewritten)
    assert not descents(plain) and node.args[-2:] == (0.9, decay)
    assert {aten.sub_.Tensor, aten.mul_.Tensor}.isdisjoint(n.target for n in rewritten.graph.graph.nodes)
    assert_do_the_same(plain, rewritten)


def test_in_float32_too() -> None:
    plain = recorded_step(Dropped, 3, dtype=torch.float32)
    assert_do_the_same(plain, by_layers(plain), 1e-6)


def test_gradients_of_large_layers_are_read_as_they_were_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, and in the order of the flat vector: nothing is copied between a convolution's gradient and the step."""
    monkeypatch.setattr(client_convolutions, "has_kernels", lambda device: True)
    plain = recorded_step(Pictures, 3, compute=torch.bfloat16, dtype=torch.float32)
    rewritten = by_layers(plain)
    (node,) = descents(rewritten)
    sources = {rewriting._memory(grad).target for grad in node.args[3]}
    assert sources == {torch.ops.fnrfl.weigh.default}
    assert_do_the_same(plain, rewritten, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0},
        {"optimizer": "adam"},
        {"objective": Proximal(0.1)},
        {"objective": Proximal(0.1), "weight_decay": 0.0},
        {"frozen": frozenset({"head.weight"})},
    ],
    ids=["no momentum", "adam", "a correction", "a correction alone", "frozen layers"],
)
def test_other_steps_stay_as_they_are(options: dict[str, Any]) -> None:
    plain = recorded_step(Pictures, 3, **options)
    assert by_layers(plain).graph.code == plain.graph.code


def test_a_net_of_small_layers_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "LARGE_PART", 1 << 30)
    plain = recorded_step(Pictures, 3)
    assert by_layers(plain).graph.code == plain.graph.code


X = torch.linspace(-1, 1, 300, dtype=torch.float64)
GIVEN = X.sin().repeat(2), X.cos().repeat(2), torch.tensor(0.3, dtype=torch.float64), X


def taken(p: Tensor, v: Tensor, lr: Tensor, grad: Tensor) -> Tensor:
    p.sub_(v.mul_(0.9).add_(grad) * lr)
    return p.sum()


def slowed_is_read(p: Tensor, v: Tensor, lr: Tensor, x: Tensor) -> Tensor:
    grad, also = torch.cat([x.sin(), x.cos()]), v.view(2, 300)
    slowed = v.mul_(0.9)
    seen = also.sum()
    p.sub_(slowed.add_(grad) * lr)
    return seen


def speed_is_read(p: Tensor, v: Tensor, lr: Tensor, x: Tensor) -> Tensor:
    grad, also = torch.cat([x.sin(), x.cos()]), v.view(2, 300)
    speed = v.mul_(0.9).add_(grad)
    also.mul_(2.0)
    seen = also.sum()
    p.sub_(speed * lr)
    return seen


def weights_change_after_their_decay(p: Tensor, v: Tensor, lr: Tensor, x: Tensor) -> Tensor:
    also = p.view(2, 300)
    grad = torch.cat([x.sin(), x.cos()]).add(p, alpha=0.1)
    also.mul_(0.5)
    return taken(p, v, lr, grad)


def a_part_changes(p: Tensor, v: Tensor, lr: Tensor, x: Tensor) -> Tensor:
    part = x.sin()
    grad = torch.cat([part, x.cos()])
    part.mul_(2.0)
    return taken(p, v, lr, grad)


def a_part_is_a_view(p: Tensor, v: Tensor, lr: Tensor, x: Tensor) -> Tensor:
    return taken(p, v, lr, torch.cat([v[300:], p[:300]]))


def the_rate_changes(p: Tensor, v: Tensor, lr: Tensor, x: Tensor) -> Tensor:
    slower = lr * 0.5
    slower.mul_(0.5)
    return taken(p, v, slower, torch.cat([x.sin(), x.cos()]))


def a_scaled_gradient(p: Tensor, v: Tensor, lr: Tensor, x: Tensor) -> Tensor:
    grad = torch.cat([x.sin(), x.cos()])
    p.sub_(v.mul_(0.9).add_(grad, alpha=0.5) * lr)
    return p.sum()


def a_momentum_of_each(p: Tensor, v: Tensor, lr: Tensor, x: Tensor) -> Tensor:
    grad, momenta = torch.cat([x.sin(), x.cos()]), x.repeat(2)
    p.sub_(v.mul_(momenta).add_(grad) * lr)
    return p.sum()


@pytest.mark.parametrize(
    "step",
    [
        slowed_is_read, speed_is_read, weights_change_after_their_decay, a_part_changes, a_part_is_a_view,
        the_rate_changes, a_scaled_gradient, a_momentum_of_each,
    ],
    ids=lambda step: step.__name__.replace("_", " "),
)  # fmt: skip
def test_what_would_be_read_too_late_stays_as_it_is(step: Callable[..., Tensor]) -> None:
    plain = of_functions(step, *GIVEN)
    rewritten = by_layers(plain)
    assert not descents(rewritten)
    assert_do_the_same(plain, rewritten)


def narrow_first(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin().float(), x.cos().float()


def one_that_changes(p: Tensor, v: Tensor, lr: Tensor, x: Tensor) -> Tensor:
    a, b = narrow_first(x)
    wide = a.double()
    a.mul_(2.0)
    return taken(p, v, lr, torch.cat([wide, b.double()]))


def one_in_another_order(p: Tensor, v: Tensor, lr: Tensor, x: Tensor) -> Tensor:
    a, b = narrow_first(x)
    turned = a.view(20, 15).t().to(torch.float64, memory_format=torch.contiguous_format)
    return taken(p, v, lr, torch.cat([turned.view(300), b.double()]))


def one_that_is_read(p: Tensor, v: Tensor, lr: Tensor, x: Tensor) -> Tensor:
    a, b = narrow_first(x)
    wide = a.double()
    return taken(p, v, lr, torch.cat([wide, b.double()])) + wide.sum()


@pytest.mark.parametrize("step", [one_that_changes, one_in_another_order, one_that_is_read])
def test_a_gradient_that_must_be_widened_where_it_is_stays_so(step: Callable[..., Tensor]) -> None:
    plain = of_functions(step, *GIVEN)
    rewritten = by_layers(plain)
    (node,) = descents(rewritten)
    assert [rewriting._kind(rewriting._memory(grad))[1] for grad in node.args[3]] == [torch.float64, torch.float32]
    assert_do_the_same(plain, rewritten)


def test_every_layer_may_be_large() -> None:
    plain = of_functions(lambda p, v, lr, x: taken(p, v, lr, torch.cat([x.sin(), x.cos()])), *GIVEN)
    rewritten = by_layers(plain)
    (node,) = descents(rewritten)
    assert node.args[4:6] == ([0, 300], None)
    assert_do_the_same(plain, rewritten)


# -- compiled ----------------------------------------------------------------------------------------------------------


@compiles
@pytest.mark.slow
def test_the_worker_compiles_a_step_by_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FNRFL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    plain = recorded_step(Dropped, 3)
    rewritten = by_layers(plain)
    assert descents(rewritten)
    ends = after(plain.graph, plain.arguments), after(compiled.start(rewritten).result(), plain.arguments)
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@compiles
@pytest.mark.slow
def test_a_compiled_step_copies_neither_parameters_nor_velocities() -> None:
    import torch._dynamo
    from torch._inductor.utils import fresh_inductor_cache, run_and_get_code
    from torch.fx.experimental.proxy_tensor import make_fx

    rewritten = by_layers(recorded_step(Dropped, 3))
    given = [t.clone() for t in (*rewritten.arguments.constants, *rewritten.arguments.turn)]
    (node,) = descents(rewritten)
    params, velocity = (str(argument) for argument in node.args[:2])
    with torch.no_grad(), fresh_inductor_cache():
        again = make_fx(compiled._with_constants_as_arguments(rewritten.graph.code, []), tracing_mode="fake")(*given)
        compile = lambda: torch._inductor.standalone_compile(again, given, dynamic_shapes="from_example_inputs")  # noqa: E731
        _, (code,) = run_and_get_code(compile)
    assert f"torch.ops.fnrfl.descend.default({params}, {velocity}, " in code


@needs_gpu
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_captured_step_by_layers_is_the_step(
    compile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FNRFL_CACHE", str(tmp_path))
    step = lambda p, v, lr, x: taken(p, v, lr, torch.cat([x.sin().float().double(), x[:7], x[7:] * 2]))  # noqa: E731
    *constants, x = (t.cuda() for t in GIVEN)
    program = Recorder(CudaGraphs(torch.float64, compile=compile)).record(step, constants, [x], 2)
    assert isinstance(program, CapturedStep) and not caplog.text
    turns, mine, wanted = torch.stack([x, -x, 2 * x]), [t.clone() for t in constants], [t.clone() for t in constants]
    losses = program(mine, [turns])
    torch.testing.assert_close(losses, torch.stack([step(*wanted, x) for x in turns]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


MUTANTS = [
    *mutants(
        descend_by_layers,
        weights_change_meanwhile=("grad.next is slowed", "True"),
        any_sum_is_a_decay=("grad.args[1] is params", "True"),
        no_decay=('grad.kwargs.get("alpha", 1.0)', "0.0"),
        parts_change=("(lr, *grad.args[0])", "(lr,)"),
        rates_change=("(lr, *grad.args[0])", "grad.args[0]"),
    ),
    *mutants(
        _is_speed,
        speeds_are_read=("node.next not in node.users", "False"),
        slowed_ones_are_read=("slowed.next is node", "True"),
        scaled_gradients=("node.kwargs", "False"),
        momenta_of_each=("isinstance(slowed.args[1], float)", "True"),
    ),
    *mutants(_layers, begins=("initial=0", "initial=1"), rest=("not _is_large(part)", "_is_large(part)")),
    *mutants(
        _as_computed,
        sources_change=("_memory(source) in written", "False"),
        other_orders=('source.meta["tensor_meta"].stride != node.meta["tensor_meta"].stride', "False"),
        readers=("_is_used_once(node, _ops._to_copy.default)", "node.target is _ops._to_copy.default"),
        never=("node.replace_all_uses_with(source)", "None"),
    ),
    *mutants(_written, nothing_is=("n.target._schema.is_mutable", "False")),
    *mutants(
        descent._descend,
        rest_elsewhere=("first - large", "first"),
        no_decay=("alpha=decay", "alpha=0.0"),
        no_momentum=("velocity.mul_(momentum)", "velocity.mul_(1.0)"),
    ),
]
