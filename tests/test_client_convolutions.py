"""Convolutions of many clients in one kernel equal each client's own."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fnrfl.core import client_convolutions
from fnrfl.core.client_convolutions import ClientConv2d
from fnrfl.core.client_kernels import share_kernels

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
    "odd channels with a stride": lambda: nn.Conv2d(5, 7, 3, stride=2, padding=1, bias=False),
    "1x1 of odd channels": lambda: nn.Conv2d(24, 130, 1),
    # torch's own
    "groups": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=4),
    "dilation": lambda: nn.Conv2d(16, 16, 3, padding=2, dilation=2),
    "padding by name": lambda: nn.Conv2d(16, 16, 3, padding="same"),
    "reflected padding": lambda: nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"),
    "oblong": lambda: nn.Conv2d(16, 16, (3, 1), padding=(1, 0)),
}
OWN = list(LAYERS)[:12]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the three operators ran; on a CPU they are stood in for by torch's."""
    ran: list[str] = []
    monkeypatch.setattr(client_convolutions, "_has_kernels", lambda device: True)
    apply = client_convolutions._Convolved.apply
    monkeypatch.setattr(
        client_convolutions._Convolved, "apply", lambda *given: (ran.append("convolve"), apply(*given))[1]
    )
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


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_kernels_in_the_interpreter_equal_double_precision_for_any_channels() -> None:
    script = [sys.executable, str(Path(__file__).with_name("interpreted.py"))]
    done = subprocess.run(script, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
