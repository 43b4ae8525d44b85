"""Kernels of fnrfl's own operators are compiled before a step is taken, each once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fnrfl.engines.recorder import cuda_graphs as precompile
from fnrfl.engines.recorder import recorder
from fnrfl.engines.recorder.cuda_graphs import CudaGraphs
from fnrfl.engines.recorder.programs import Recording, StepArguments
from fnrfl.kernels import convolution
from fnrfl.kernels.layers import share_kernels

OPERATORS = ("convolve", "convolve_back", "weigh")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """On a CPU the operators are stood in for by torch's."""
    monkeypatch.setattr(convolution, "_has_kernels", lambda device: True)
    return recorded_step("cpu", channels=16)


def recorded_step(device: str, channels: int) -> Recording:
    """A step of three clients whose net has three layers of one shape and one of another."""
    layers = (nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False) for stride in (1, 1, 1, 2))
    net = nn.Sequential(*layers).to(device, torch.bfloat16)
    share_kernels(net)
    weights = {name: torch.randn(3, *w.shape, device=device).bfloat16() for name, w in net.named_parameters()}

    def step(*tensors: Tensor) -> Tensor:
        mine, x = dict(zip(weights, tensors[:-1], strict=True)), tensors[-1]
        loss = lambda w, x: functional_call(net, w, (x,)).float().square().mean()  # noqa: E731
        for name, found in vmap(grad(loss))(mine, x).items():
            mine[name].sub_(found)
        return x.sum()

    turn = torch.randn(3, 4, channels, 8, 8, device=device).bfloat16()
    return recorder.recorded(step, StepArguments([*weights.values()], [turn], len(weights), 0))


def test_each_operator_is_called_once_for_each_kind_of_arguments(recording: Recording, monkeypatch: Any) -> None:
    called: list[precompile.Call] = []
    threads = set[int]()
    real = precompile._try

    def noted(call: precompile.Call, device: torch.device) -> None:
        called.append(call)
        threads.add(threading.get_ident())
        real(call, device)

    monkeypatch.setattr(precompile, "_try", noted)
    precompile.compile_kernels(recording)
    nodes = [node for node in recording.graph.graph.nodes if precompile._is_own(node)]
    assert {call[0] for call in called} == {getattr(torch.ops.fnrfl, name).default for name in OPERATORS}
    assert len(called) == len({*called}) < len(nodes)  # layers of one shape share their kernels
    assert {*called} == {precompile._call(node) for node in nodes}
    assert threading.get_ident() not in threads


def test_arguments_are_like_those_of_the_step(recording: Recording, monkeypatch: Any) -> None:
    """Same shapes, strides and types, so that the same kernels are compiled."""
    given: list[tuple[Any, ...]] = []

    def shown(call: precompile.Call, device: torch.device) -> None:
        given.append(tuple(precompile._empty(one, device) if isinstance(one, tuple) else one for one in call[1]))

    monkeypatch.setattr(precompile, "_try", shown)
    precompile.compile_kernels(recording)
    told = lambda one: (one.shape, one.stride(), one.dtype) if isinstance(one, Tensor) else one  # noqa: E731
    seen = {tuple(map(told, arguments)) for arguments in given}
    want = set()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "fnrfl":
                want.add(tuple(map(told, args)))
            return func(*args, **kwargs or {})

    with Calls():
        recording.graph(*[t.clone() for t in (*recording.arguments.constants, *recording.arguments.turn)])
    assert seen == want


def test_an_operator_that_fails_ends_nothing(recording: Recording, monkeypatch: Any, caplog: Any) -> None:
    def refuse(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(precompile, "_empty", refuse)
    with caplog.at_level("DEBUG", "fnrfl"):
        precompile.compile_kernels(recording)
    assert "could not be called before its step" in caplog.text


def test_a_step_without_such_operators_starts_no_thread(monkeypatch: Any) -> None:
    step = lambda total, x: total.add_(x).sum()  # noqa: E731
    recording = recorder.recorded(step, StepArguments([torch.zeros(2)], [torch.ones(2)], 1, 0))
    monkeypatch.setattr(precompile, "ThreadPoolExecutor", None)
    precompile.compile_kernels(recording)


def test_a_gpu_compiles_them_before_it_captures(recording: Recording, monkeypatch: Any) -> None:
    asked: list[Recording] = []
    monkeypatch.setattr("fnrfl.engines.recorder.cuda_graphs.compile_kernels", asked.append)
    CudaGraphs(torch.bfloat16, compile=False).candidates(recording)
    assert asked == [recording]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("channels", [16, 64])
def test_on_a_gpu_every_operator_can_be_called(channels: int, caplog: Any) -> None:
    """The second time kernels are there already, and new threads only launch them."""
    made = recorded_step("cuda", channels)
    with caplog.at_level("DEBUG", "fnrfl"):
        for _ in range(2):
            precompile.compile_kernels(made)
    assert "compiling kernels took" in caplog.text and "could not be called" not in caplog.text
