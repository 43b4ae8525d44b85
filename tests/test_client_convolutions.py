"""Convolutions of many clients in one kernel equal each client's own."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fnrfl.kernels import convolution
from fnrfl.kernels.convolution import ClientConv2d
from fnrfl.kernels.layers import share_kernels

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LAYERS: dict[str, Callable[[], nn.Conv2d]] = {
    "3x3": lambda: nn.Conv2d(16, 32, 3, padding=1, bias=False),
    "3x3 of pictures": lambda: nn.Conv2d(3, 16, 3, padding=1),
    "3x3 with a stride": lambda: nn.Conv2d(16, 16, 3, stride=2, padding=1),
    "1x1 with a stride": lambda: nn.Conv2d(32, 64, 1, stride=2, bias=False),
    "5x5 without padding": lambda: nn.Conv2d(16, 16, 5),
    "48 channels": lambda: nn.Conv2d(48, 80, 3, padding=1),
    "64 channels": lambda: nn.Conv2d(64, 128, 3, padding=1),
    "few outputs": lambda: nn.Conv2d(3, 6, 5),
    "six channels": lambda: nn.Conv2d(6, 16, 5),
    "one channel": lambda: nn.Conv2d(1, 16, 3, padding=1),
    "one channel and few outputs": lambda: nn.Conv2d(1, 6, 3, padding=1, bias=False),
    "odd channels with a stride": lambda: nn.Conv2d(5, 7, 3, stride=2, padding=1, bias=False),
    "1x1 of odd channels": lambda: nn.Conv2d(24, 130, 1),
    # torch's own
    "groups": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=4),
    "dilation": lambda: nn.Conv2d(16, 16, 3, padding=2, dilation=2),
    "padding by name": lambda: nn.Conv2d(16, 16, 3, padding="same"),
    "reflected padding": lambda: nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"),
    "oblong": lambda: nn.Conv2d(16, 16, (3, 1), padding=(1, 0)),
}
OWN = list(LAYERS)[:13]
# in, out, size, side, stride of ResNet-18 and, from the twelfth on, of VGG-11
SHAPES = [
    (3, 64, 32, 3, 1), (64, 64, 32, 3, 1), (64, 128, 32, 3, 2), (64, 128, 32, 1, 2), (128, 128, 16, 3, 1),
    (128, 256, 16, 3, 2), (128, 256, 16, 1, 2), (256, 256, 8, 3, 1), (256, 512, 8, 3, 2), (256, 512, 8, 1, 2),
    (512, 512, 4, 3, 1), (64, 128, 16, 3, 1), (128, 256, 8, 3, 1), (256, 512, 4, 3, 1), (512, 512, 2, 3, 1),
]  # fmt: skip


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the three operators ran; on a CPU they are stood in for by torch's."""
    ran: list[str] = []
    monkeypatch.setattr(convolution, "_has_kernels", lambda device: True)
    apply = convolution._Convolved.apply
    monkeypatch.setattr(convolution._Convolved, "apply", lambda *given: (ran.append("convolve"), apply(*given))[1])
    return ran


def gradients(layer: nn.Conv2d, weights: dict[str, Tensor], x: Tensor, to_x: bool) -> dict[str, Tensor]:
    """Of a sum of squares, with respect to the weights and, if asked, to x; clients are the first axis of all."""

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, weights, (x,)).float().square().mean()

    found = vmap(grad(loss))(weights, x)
    return found | {"x": vmap(grad(loss, argnums=1))(weights, x)} if to_x else found


def case(name: str, device: str, clients: int = 3, batch: int = 4, size: int = 8) -> tuple[nn.Conv2d, dict, Tensor]:
    torch.manual_seed(0)
    layer = LAYERS[name]().to(device, torch.bfloat16)
    weights = {k: torch.randn(clients, *v.shape, device=device).bfloat16() * 0.1 for k, v in layer.named_parameters()}
    return layer, weights, torch.randn(clients, batch, layer.in_channels, size, size, device=device).bfloat16()


def shared(layer: nn.Conv2d) -> nn.Conv2d:
    other = nn.Sequential(copy.deepcopy(layer))
    share_kernels(other)
    assert type(other[0]) is ClientConv2d
    return other[0]


def close(found: Tensor, wanted: Tensor, rtol: float) -> bool:
    return bool((found.float() - wanted.float()).norm() <= rtol * wanted.float().norm())


@pytest.mark.parametrize("name", LAYERS)
def test_clients_in_one_operator_equal_each_of_them(name: str, used: list[str]) -> None:
    layer, weights, x = case(name, "cpu")
    found, wanted = (gradients(one, weights, x, to_x=True) for one in (shared(layer), layer))
    assert bool(used) == (name in OWN)
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert found[key].dtype == torch.bfloat16 and found[key].shape == wanted[key].shape
        assert close(found[key], wanted[key], 0.02), key


def test_a_model_that_all_clients_share_sees_their_batches_as_one(used: list[str]) -> None:
    layer, weights, x = case("3x3", "cpu")
    one = {key: value[0] for key, value in weights.items()}
    found, wanted = (vmap(lambda x, net=net: functional_call(net, one, (x,)))(x) for net in (shared(layer), layer))
    assert used and close(found, wanted, 0.02)
    same, each = (vmap(lambda w, net=net: functional_call(net, w, (x[0],)))(weights) for net in (shared(layer), layer))
    assert close(same, each, 0.02)


def test_a_size_that_the_stride_does_not_divide_is_left_to_torch(used: list[str]) -> None:
    layer, weights, x = case("3x3 with a stride", "cpu", size=7)
    found, wanted = (gradients(one, weights, x, to_x=True) for one in (shared(layer), layer))
    assert not used and all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_are_left_to_torch(dtype: torch.dtype, used: list[str]) -> None:
    for name in ("3x3", "1x1 with a stride"):
        layer, weights, x = case(name, "cpu")
        weights, x = {key: value.to(dtype) for key, value in weights.items()}, x.to(dtype)
        found, wanted = (gradients(one.to(dtype), weights, x, to_x=True) for one in (shared(layer), layer))
        assert not used and all(torch.allclose(found[key], wanted[key], atol=1e-5) for key in wanted)


def test_weights_that_are_not_trained_and_keep_their_type_are_left_to_torch(used: list[str]) -> None:
    """Autocast brings the types together, and the kernels would not."""
    layer, _, x = case("3x3", "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = shared(layer.float())(x[0]), layer.float()(x[0])
    assert not used and torch.equal(found, wanted)


@needs_gpu
@pytest.mark.parametrize(("clients", "batch"), [(10, 64), (1, 37), (3, 1)])
@pytest.mark.parametrize("name", OWN)
def test_kernels_on_a_gpu_equal_double_precision_and_repeat(name: str, clients: int, batch: int) -> None:
    layer, weights, x = case(name, "cuda", clients, batch)
    one = shared(layer)
    found, again = gradients(one, weights, x, to_x=True), gradients(one, weights, x, to_x=True)
    exact = {key: value.double() for key, value in weights.items()}
    wanted = gradients(layer.double(), exact, x.double(), to_x=True)
    for key in wanted:
        assert torch.equal(found[key], again[key]), key
        assert close(found[key], wanted[key], 0.02), key


Shape = tuple[int, int, int, int, int]


def drawn(shape: Shape, clients: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and dy of a layer, with channels last in memory."""
    into, out, size, side, stride = shape

    def new(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda").bfloat16().movedim(-1, -3)

    torch.manual_seed(0)
    dy = new(batch, size // stride, size // stride, clients * out)
    return new(batch, size, size, clients * into), new(clients, out, side, side, into), dy


def computed(shape: Shape, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """What our three operators give."""
    _, _, size, side, stride = shape
    return {
        "forward": torch.ops.fnrfl.convolve(x, w, stride, side // 2),
        "inputs": torch.ops.fnrfl.convolve_back(dy, w, stride, side // 2, size, size),
        "weights": torch.ops.fnrfl.weigh(x, dy, side, len(w), stride, side // 2),
    }


def exactly(shape: Shape, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The same by torch in float32, client by client; TF32 would do, since it holds every number of bf16."""
    side, stride = shape[3:]
    geometry = [stride] * 2, [side // 2] * 2, [1, 1], False, [0, 0], 1
    found: dict[str, list[Tensor]] = {"forward": [], "inputs": [], "weights": []}
    for a, b, c in zip(x.float().chunk(len(w), 1), w.float(), dy.float().chunk(len(w), 1), strict=True):
        found["forward"].append(torch.ops.aten.convolution(a, b, None, *geometry))
        back = torch.ops.aten.convolution_backward(c, a, b, None, *geometry, [True, True, False])
        found["inputs"].append(back[0])
        found["weights"].append(back[1])
    return {key: torch.stack(rows) if key == "weights" else torch.cat(rows, 1) for key, rows in found.items()}


@needs_gpu
@pytest.mark.parametrize(("clients", "batch"), [(1, 7), (1, 64), (3, 7), (3, 64), (10, 7), (10, 64)])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_number_of_a_net_s_layers_is_torch_s_and_repeats(shape: Shape, clients: int, batch: int) -> None:
    given = drawn(shape, clients, batch)
    found, wanted = computed(shape, *given), exactly(shape, *given)
    for key, value in wanted.items():
        allowed = 0.01 * value.abs() + 0.01 * value.square().mean().sqrt()
        assert found[key].shape == value.shape and bool(((found[key] - value).abs() <= allowed).all()), key
    for _ in range(3):
        again = computed(shape, *given)
        assert all(torch.equal(again[key], found[key]) for key in found)


@needs_gpu
@pytest.mark.parametrize("clients", [1, 10])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_captured_graph_computes_with_the_values_of_its_replay(shape: Shape, clients: int) -> None:
    given, others = drawn(shape, clients, 8), [-2 * t for t in drawn(shape, clients, 8)]
    computed(shape, *given)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = computed(shape, *given)
    for values in (others, [t + 1 for t in others]):
        for t, value in zip(given, values, strict=True):
            t.copy_(value)
        graph.replay()
        wanted = computed(shape, *values)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_slices_of_a_flat_vector_at_any_address_give_the_same_bits(shape: Shape) -> None:
    given = drawn(shape, 1, 7)

    def sliced(t: Tensor) -> Tensor:
        flat = torch.cat([t.new_full((1,), torch.nan), t.movedim(-3, -1).flatten(), t.new_full((1,), torch.nan)])
        return flat[1:-1].view(t.movedim(-3, -1).shape).movedim(-1, -3)

    moved = [sliced(t) for t in given]
    assert all(t.data_ptr() % 16 for t in moved)
    found, wanted = computed(shape, *moved), computed(shape, *given)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@needs_gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs capability 9"
)
def test_no_factor_of_a_product_goes_through_registers() -> None:
    """Where the compiler let one do so, the sums of a kernel with eight warps did not repeat."""
    from fnrfl.kernels import hopper as kernels

    for shape in SHAPES[1:]:
        for clients, batch in ((1, 64), (10, 64)):
            computed(shape, *drawn(shape, clients, batch))
    for kernel in (kernels._convolve, kernels._convolve_back, kernels._weigh):
        compiled = kernel.device_caches[torch.cuda.current_device()][0].values()
        loops = [one.asm["ttgir"].partition("scf.for")[2].partition("scf.yield")[0] for one in compiled]
        assert any("warp_group_dot" in loop for loop in loops)
        assert not any("local_load" in loop for loop in loops)


@needs_gpu
@pytest.mark.slow
def test_a_compiled_step_has_the_same_bits() -> None:
    shape = SHAPES[2]
    given = drawn(shape, 3, 8)
    compiled = torch.compile(lambda x, w, dy: computed(shape, 2 * x, 4 * w, -dy))
    for values in (given, tuple(t.roll(1, 0) for t in given)):
        found, wanted = compiled(*values), computed(shape, 2 * values[0], 4 * values[1], -values[2])
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_shapes_and_the_gpu_s_capability_alone_choose_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(channels: tuple[int, int], stride: int, size: int, output: int) -> str:
        name = convolution._kernels(torch.empty(0), channels, stride, (size, size), (output, output)).__name__
        return str(name).rpartition(".")[2]

    monkeypatch.setattr(convolution, "_has_descriptors", lambda device: True)
    assert {chosen((into, out), stride, size, size // stride) for into, out, size, _, stride in SHAPES[1:]} == {
        "hopper"
    }
    others = [((3, 64), 1, 32, 32), ((96, 64), 1, 32, 32), ((64, 64), 1, 28, 28), ((64, 64), 1, 32, 28)]
    assert {chosen(*other) for other in others} == {"triton"}
    monkeypatch.setattr(convolution, "_has_descriptors", lambda device: False)
    assert chosen((64, 64), 1, 32, 32) == "triton"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_kernels_in_the_interpreter_equal_double_precision_for_any_channels() -> None:
    script = [sys.executable, str(Path(__file__).with_name("interpreted.py"))]
    done = subprocess.run(script, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def _no_loop_over_clients() -> Iterator[None]:
    """Inside, what `vmap` would do client by client is an error."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


@pytest.mark.usefixtures("_no_loop_over_clients")
@pytest.mark.parametrize("size", [1, (1, 1), (2, 1)])
def test_pooling_needs_no_loop_over_clients(size: int | tuple[int, int]) -> None:
    x = torch.randn(3, 4, 6, 6, 8, generator=torch.Generator().manual_seed(0))
    layer = nn.Sequential(nn.AdaptiveAvgPool2d(size))
    wanted = torch.stack([layer(one.movedim(-1, 1)) for one in x])
    share_kernels(layer)
    assert torch.equal(vmap(lambda one: layer(one.movedim(-1, 1)))(x), wanted)
