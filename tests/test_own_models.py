"""Models as users have them: wrapped, compiled, with branches, in torch's usual memory order."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

import fnrfl
from fnrfl.config import load
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.modules import unwrapped
from fnrfl.core.net import Net
from fnrfl.engines import gpus
from fnrfl.kernels import convolution
from fnrfl.kernels.layers import Norm, share_kernels
from fnrfl.runs.setup import engine as setup_engine
from fnrfl.runs.setup import model as setup_model
from settings import with_keys


def pictures() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 4
    return torch.randn(4, 2, 6, 6, generator=draw)[y] + torch.randn(240, 2, 6, 6, generator=draw), y


class Own(nn.Module):
    """Layers of a user's, and what is computed with them."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def branch() -> nn.Module:
    """Looks at the numbers to decide what to do."""
    return Own(lambda net, x: net.out(x.flatten(1) * (1 if x.mean() > 0 else 2)), out=nn.Linear(72, 4))


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    last = lambda net, x: net.out(net.layer(x.flatten(2).reshape(len(x), 6, 12))[0][:, -1])  # noqa: E731
    return Own(last, layer=kind(12, 6, batch_first=True), out=nn.Linear(6, 4))


class Keeps(nn.Module):
    """Remembers what it has seen last, as people do to look at features."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(72, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = F.relu(self.hidden(x.flatten(1)))
        return self.out(self.seen)


def viewed(how: str = "view") -> nn.Module:
    """As in many tutorials: `view` after a convolution, which needs torch's usual memory order."""
    compute = lambda net, x: net.out(getattr(F.relu(net.conv(x)), how)(-1, 64))  # noqa: E731
    return Own(compute, conv=nn.Conv2d(2, 4, 3), out=nn.Linear(64, 4))


def pointwise(how: str = "view") -> nn.Module:
    """A `view` after a 1x1 convolution, which is a matrix product where clients step together."""
    compute = lambda net, x: net.out(getattr(F.relu(net.conv(x)), how)(-1, 144))  # noqa: E731
    return Own(compute, conv=nn.Conv2d(2, 4, 1), out=nn.Linear(144, 4))


def assert_alike(one: fnrfl.Result, other: fnrfl.Result, rtol: float, atol: float) -> None:
    torch.testing.assert_close(dict(one.model.state_dict()), dict(other.model.state_dict()), rtol=rtol, atol=atol)


def dense(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4), *more)


def trained(model: Any, **keys: Any) -> fnrfl.Result:
    dotted = {"public.size": 0.1} | keys
    return fnrfl.run(dataset=pictures(), model=model, clients=3, rounds=2, fnr="on", out=None, **dotted)


def mlp() -> nn.Module:
    """Called as one of fnrfl's models."""
    return branch()


@pytest.mark.parametrize("make", [branch, lambda: recurrent(nn.LSTM), mlp], ids=["branch", "lstm", "mlp"])
def test_clients_that_cannot_step_together(make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    assert trained(make).config.engine.name == "loop"
    assert any("one after another" in notice for notice in caplog.messages)


@pytest.mark.parametrize("make", [lambda: recurrent(nn.GRU), dense, Keeps], ids=["gru", "dense", "keeps"])
def test_clients_that_can_step_together(make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    assert trained(make).config.engine.name == "batched" and not caplog.messages


def test_other_threads_and_a_full_memory_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def beside_another_thread(net: Net) -> None:  # which torch warns
        slow = threading.Thread(target=vmap(lambda x: torch.histc(x, 4)), args=(torch.rand(2, 9),))
        slow.start()
        slow.join()
        step_of_two(net)

    step_of_two = setup_engine._step_of_two
    for step in (beside_another_thread, lambda net: torch.empty(1 << 60)):
        monkeypatch.setattr(setup_engine, "_step_of_two", step)
        assert trained(dense).config.engine.name == "batched"


def test_an_engine_that_cannot_train_a_model_says_so() -> None:
    with pytest.raises(CompatibilityError, match=r'engine = "batched" trains several.*Set engine = "loop" or "auto"'):
        trained(branch, engine="batched")


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_view_after_a_convolution(engine: str) -> None:
    assert_alike(*(trained(lambda how=how: viewed(how), engine=engine) for how in ("view", "reshape")), 1e-4, 1e-6)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", [viewed, pointwise])
def test_layers_that_clients_share_give_what_can_be_viewed(
    kind: Callable[[str], nn.Module], compute: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: in bf16 convolutions are kernels of fnrfl's own, with channels last in memory."""
    monkeypatch.setattr(convolution, "_has_kernels", lambda device: True)
    own = mock.Mock(wraps=convolution._Convolved.apply)
    monkeypatch.setattr(convolution._Convolved, "apply", own)
    x = torch.randn(3, 5, 2, 6, 6)

    def gradients(how: str) -> Tensor:
        torch.manual_seed(0)
        net = Net(kind(how), x[0], channels_last=True).copy(compute=compute).with_shared_kernels()
        assert net.channels_last is (how == "reshape")  # a module that asks for a view has torch's usual order
        weights = torch.stack([net.flatten()[0] * scale for scale in (1.0, 0.5, 2.0)])
        answer = lambda flat, x: net.apply(flat, {}, x, mode="updating")[0].logits  # noqa: E731
        found = vmap(grad(lambda flat, x: answer(flat, x).square().sum()))(weights, x)
        named = [net.unflatten(client) for client in found]
        return torch.cat([client[k].reshape(-1) for client in named for k in sorted(client)])

    torch.testing.assert_close(gradients("view"), gradients("reshape"), rtol=1e-2, atol=1e-3)
    assert bool(own.call_count) is (compute is torch.bfloat16)


def test_the_trial_step_for_a_gpu_is_taken_as_a_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[bool, bool]] = []
    step_of_two, cudnn = setup_engine._step_of_two, torch.backends.cudnn

    def seen(net: Net) -> None:
        tried.append((net.plain is not None, cudnn.enabled))
        step_of_two(net)

    monkeypatch.setattr(setup_engine, "_step_of_two", seen)
    monkeypatch.setattr(gpus, "found_devices", lambda: [torch.device("cpu")])
    config = load("digits", ["model=my:net"])
    for make, engine in ((dense, "batched"), (dense, "gpu"), (lambda: recurrent(nn.GRU), "gpu")):
        assert setup_engine.vmap_failure(config, Net(make(), torch.zeros(2, 2, 6, 6)), engine, loops=True) is None
    assert tried == [(False, True), (True, True), (True, False)]  # with shared layers; recurrent ones without cuDNN
    assert cudnn.enabled


def test_a_gpu_that_is_not_there_is_what_a_trial_step_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CompatibilityError, match='^engine = "gpu" needs an NVIDIA GPU'):
        trained(dense, engine="gpu")


def frames() -> nn.Module:
    """Makes one axis of the batch and another, as for films."""
    compute = lambda net, x: net.out(net.conv(x.view(2 * len(x), 1, 6, 6)).reshape(len(x), -1))  # noqa: E731
    return Own(compute, conv=nn.Conv2d(1, 4, 3), out=nn.Linear(128, 4))


def test_a_model_may_join_the_batch_with_another_axis() -> None:
    assert trained(frames).config.engine.name == "loop"


def floats() -> nn.Module:
    """Makes tensors of its own in float32."""

    def compute(net: Any, x: Tensor) -> Tensor:
        place = torch.linspace(-1, 1, 6).expand(len(x), 1, 6, 6)
        x = net.conv(torch.cat([x.float(), place], 1))
        return net.out(net.layer(x.flatten(2), torch.zeros(1, len(x), 6))[0][:, -1])

    return Own(compute, conv=nn.Conv2d(3, 4, 3), layer=nn.GRU(16, 6, batch_first=True), out=nn.Linear(6, 4))


def numbered() -> nn.Module:
    """Inputs are numbers of rows in a table, as fractions."""
    compute = lambda net, x: net.out(net.conv(net.table(x.long()).permute(0, 3, 1, 2)).mean((2, 3)))  # noqa: E731
    return Own(compute, table=nn.Embedding(1000, 2), conv=nn.Conv2d(2, 4, 3), out=nn.Linear(4, 4))


def as_on_a_gpu(module: nn.Module, example: Tensor, *, autocast: bool = True) -> Net:
    return Net(module, example, autocast=autocast).copy(compute=torch.bfloat16).with_shared_kernels()


def test_in_bf16_a_model_may_make_tensors_of_its_own() -> None:
    setup_engine._step_of_two(as_on_a_gpu(floats(), torch.zeros(2, 2, 6, 6)))
    with pytest.raises(RuntimeError, match="type"):
        setup_engine._step_of_two(as_on_a_gpu(floats(), torch.zeros(2, 2, 6, 6), autocast=False))


def test_bf16_rounds_no_inputs_of_a_model_of_ones_own() -> None:
    """999 would be 1000."""
    module, x = numbered(), torch.full((2, 6, 6), 999.0)
    net = as_on_a_gpu(module, x)
    logits = net.eval_forward(*net.flatten(), x).logits
    torch.testing.assert_close(logits, module.eval()(x), rtol=0.05, atol=0.02)


class NamedNorm(nn.BatchNorm2d):
    """A subclass that computes as torch does."""


class OwnNorm(nn.BatchNorm2d):
    """A subclass with a forward pass of its own, which torch batches over clients in one type alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


def with_norm(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), kind(4), nn.Flatten(), nn.Linear(64, 4))


def with_own_norm() -> nn.Module:
    return with_norm(OwnNorm)


def test_a_norm_with_a_forward_of_its_own_stays() -> None:
    named, own = (Net(with_norm(kind), torch.zeros(2, 2, 6, 6)) for kind in (NamedNorm, OwnNorm))
    assert isinstance(named.with_shared_kernels().module[1], Norm)
    assert type(own.with_shared_kernels().module[1]) is OwnNorm
    for net in (named, own):
        assert gpus.can_use_cudnn(net) is gpus.can_use_cudnn(net.with_shared_kernels()) is (net is named)


def test_a_named_norm_computes_in_bf16_as_torchs_own_would() -> None:
    torch.manual_seed(0)
    module, x = with_norm(NamedNorm), torch.randn(8, 2, 6, 6)
    plain = with_norm(nn.BatchNorm2d)
    plain.load_state_dict(module.state_dict())
    setup_engine._step_of_two(as_on_a_gpu(module, x))
    answers = []
    for net in (as_on_a_gpu(module, x), as_on_a_gpu(plain, x)):
        out, buffers = net.apply(*net.flatten(), x, mode="updating")
        answers.append((out.logits, buffers["1.running_var"]))
    for one, other in zip(*answers, strict=True):
        assert torch.equal(one, other)


def test_a_model_that_does_not_compute_in_bf16_has_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "found_devices", lambda: [torch.device("cpu")])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    net, config = Net(with_own_norm(), torch.zeros(2, 2, 6, 6), autocast=True), load("digits", ["model=my:net"])
    precision, (notice,) = setup_engine._precision_that_can(config, net, "gpu")
    assert precision == "float32" and notice.startswith("engine.precision = auto is float32")
    with pytest.raises(CompatibilityError, match='engine.precision = "bf16" does not go with model = "my:net"'):
        setup_engine._precision_that_can(with_keys(config, {"engine.precision": "bf16"}), net, "gpu")
    fine = Net(viewed(), torch.zeros(2, 2, 6, 6), channels_last=True, autocast=True)
    assert setup_engine._precision_that_can(config, fine, "gpu") == ("bf16", ())


@pytest.mark.parametrize("size", [1, 3])
def test_a_convolution_of_one_example_without_its_batch(size: int) -> None:
    layer, x = nn.Conv2d(2, 4, size), torch.randn(2, 6, 6)
    shared = nn.Sequential(copy.deepcopy(layer))
    share_kernels(shared)
    torch.testing.assert_close(shared(x), layer(x))


def mobile() -> nn.Module:
    """A depthwise convolution and GroupNorm, as in nets for small devices."""
    compute = lambda net, x: net.out(F.hardswish(net.norm(net.deep(F.relu(net.first(x))))).mean((2, 3)))  # noqa: E731
    first, deep = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
    return Own(compute, first=first, deep=deep, norm=nn.GroupNorm(4, 8), out=nn.Linear(8, 4))


class Patches(nn.Module):
    """A small vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.token = nn.Conv2d(2, 8, 3, stride=3), nn.Parameter(torch.zeros(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encode, self.out = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2)
        return self.out(self.encode(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])


IMAGE_MODELS = {
    "viewed": viewed, "pointwise": pointwise, "mobile": mobile, "patches": Patches, "frames": frames,
    "own-norm": with_own_norm, "named-norm": lambda: with_norm(NamedNorm),
}  # fmt: skip
MODELS = {"lstm": lambda: recurrent(nn.LSTM), "gru": lambda: recurrent(nn.GRU), "dense": dense, **IMAGE_MODELS}


@pytest.mark.parametrize("name", ["mobile", "patches"])
def test_engines_train_image_models_alike(name: str) -> None:
    exact = {"engine.precision": "float64"}
    assert_alike(*(trained(MODELS[name], engine=engine, **exact) for engine in ("loop", "batched")), 1e-9, 1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_trains_them_as_the_loop_engine_does(name: str) -> None:
    exact = {"engine.precision": "float64"}
    assert_alike(*(trained(MODELS[name], engine=engine, **exact) for engine in ("loop", "gpu")), 1e-7, 1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_a_gpu_trains_image_models_in_its_own_precision(name: str) -> None:
    torch.manual_seed(0)
    keys = {"init": MODELS[name]().state_dict(), "engine": "gpu"}
    each = (trained(MODELS[name], **keys, **{"engine.precision": precision}) for precision in ("auto", "float32"))
    assert_alike(*each, 0.1, 0.02)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda m: nn.DataParallel(torch.compile(m))])
def test_a_wrapped_module_is_the_module_in_it(wrap: Callable[[nn.Module], nn.Module]) -> None:
    module = dense()
    assert unwrapped(wrap(module)) is module
    plain, wrapped = trained(dense()), trained(wrap(dense()))
    assert wrapped.model_sha256 == plain.model_sha256
    assert trained(dense, init=wrap(dense()).state_dict()).model_sha256 == plain.model_sha256
    further = [trained(dense, init=model.state_dict()).model_sha256 for model in (plain.model, wrap(plain.model))]
    assert further[0] == further[1] != plain.model_sha256


def test_runs_of_compiled_modules_of_older_versions_are_loaded_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files have the names that torch.compile makes."""

    def make() -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        return torch.compile(module, backend="eager")  # type: ignore[return-value]

    def stop(event: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    keys: dict[str, Any] = {"dataset": pictures(), "model": make, "clients": 2, "rounds": 2, "public.size": 0.1}
    with monkeypatch.context() as older:
        older.setattr(setup_model, "unwrapped", lambda module: module)
        whole = fnrfl.run(**keys, out=tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            fnrfl.run(**keys, out=tmp_path / "part", progress=stop)
    assert any(name.startswith("_orig_mod.") for name in whole.weights)
    loaded = fnrfl.load(tmp_path / "whole", model=make)
    assert_alike(fnrfl.resume(tmp_path / "part", model=make, dataset=pictures()), loaded, 0, 0)


def test_a_module_that_compiles_itself_is_called_as_it_is() -> None:
    def compiling() -> nn.Module:
        module = dense()
        module.compile(backend=lambda *_: pytest.fail("it was compiled"))
        return module

    assert trained(compiling).model_sha256 == trained(dense).model_sha256


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_loop_of_ones_own_may_have_wrapped_modules(wrap: Callable[[nn.Module], nn.Module]) -> None:
    batches, plain = [tuple(part[:64] for part in pictures())], dense().eval()
    wrapped = wrap(dense().eval())
    norms = fnrfl.class_norms(wrapped, batches)
    assert torch.equal(norms, fnrfl.class_norms(plain, batches))
    for one in (wrapped, plain):
        assert fnrfl.refine(one, batches, 2 * norms, batchnorm="frozen") is one
    for weight, wanted in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, wanted) and not torch.equal(weight, torch.zeros_like(weight))


def test_a_script_is_refused() -> None:
    with pytest.raises(CompatibilityError, match="is a ScriptModule. Give the nn.Module"):
        trained(lambda: torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(72, 4))))


def test_a_softmax_at_the_end_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    for last, said in ((nn.Softmax(1), 1), (nn.LogSoftmax(1), 0), (nn.Identity(), 0)):
        caplog.clear()
        trained(dense(last))
        assert sum("Softmax" in notice for notice in caplog.messages) == said


def test_biases_that_add_up_to_one_are_no_softmax(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(72, 4))
    nn.init.constant_(module[1].bias, 0.25)
    trained(module)
    assert not caplog.messages
