"""The networks have the sizes, shapes and features the documents promise; a wrong spec is answered by a sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fnrfl import usercode
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.rng import seeded
from fnrfl.models.catalogue import MODELS, build_model

CIFAR, FASHION, DIGITS = (3, 32, 32), (1, 28, 28), (1, 8, 8)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def features(model: nn.Module, x: Tensor) -> Tensor:
    """The features as the package defines them: the layer a model names, or the input of its last Linear called."""
    seen: list[Tensor] = []
    named = getattr(model, "feature_layer", None)
    if named is not None:
        model.get_submodule(named).register_forward_hook(lambda _, args, out: seen.append(out.flatten(1)))
    else:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda _, args, out: seen.append(args[0]))
    with torch.no_grad():
        model.eval()(x)
    return seen[-1]


# The counts of resnet18, resnet50, vgg11 and simple-cnn are those of the paper's and NIID-Bench's code;
# the others are sums over layers, weights + biases, written out.
@pytest.mark.parametrize(
    ("spec", "shape", "parameters", "width"),
    [
        ("resnet18", CIFAR, 11_173_962, 512),
        ("resnet18(head=1000)", CIFAR, 11_681_832, 512),
        ("resnet18", FASHION, 11_173_962 - 2 * 9 * 64, 512),
        ("resnet18", DIGITS, 11_173_962 - 2 * 9 * 64, 512),
        ("resnet50", CIFAR, 25_549_352 - 990 * 2049, 2048),
        ("resnet50(head=1000)", CIFAR, 25_549_352, 2048),
        ("vgg11", CIFAR, 9_750_922, 512),
        ("vgg11", (3, 64, 96), 9_750_922 + 5 * 512 * 512, 6 * 512),
        ("simple-cnn", CIFAR, 62_006, 84),
        ("simple-cnn", FASHION, 156 + 2_416 + (256 * 120 + 120) + (120 * 84 + 84) + 850, 84),
        ("cnn", FASHION, 160 + 4_640 + 15_690, 1568),
        ("cnn", DIGITS, 160 + 4_640 + 1_290, 128),
        ("cnn(norm=batch)", DIGITS, 160 + 4_640 + 1_290 + 2 * (16 + 32), 128),
        ("mlp", DIGITS, 64 * 64 + 64 + 650, 64),
        ("mlp(hidden=128)", FASHION, 784 * 128 + 128 + 1_290, 128),
        ("mlp(hidden=128, depth=2)", (30,), 30 * 128 + 128 + 128 * 128 + 128 + 1_290, 128),
        ("mlp(depth=0)", (30,), 310, 30),
    ],
)
def test_parameters_logits_and_features(spec: str, shape: tuple[int, ...], parameters: int, width: int) -> None:
    model = build_model(spec, shape, 10)
    x = torch.rand(2, *shape)
    assert count(model) == parameters
    with torch.no_grad():
        assert model(x).shape == (2, 1000 if "1000" in spec else 10)
    found = features(model, x)
    assert found.shape == (2, width)
    assert found.min() >= 0  # every model's features come out of a ReLU, or are the inputs


def test_resnet_features_are_the_pooled_map() -> None:
    model = build_model("resnet18", CIFAR, 10)
    maps: list[Tensor] = []
    model.get_submodule("layer4").register_forward_hook(lambda _, args, out: maps.append(out))
    found = features(model, torch.rand(2, *CIFAR))
    assert maps[0].shape == (2, 512, 4, 4)
    torch.testing.assert_close(found, maps[0].flatten(2).mean(2))


def test_resnet_buffers_and_initialisation() -> None:
    with seeded(0, "init"):
        model = build_model("resnet18", CIFAR, 10)
    buffers = dict(model.named_buffers())
    assert sum(b.numel() for b in buffers.values() if b.is_floating_point()) == 9_600
    assert sum(b.numel() for b in buffers.values() if not b.is_floating_point()) == 20
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 20
    assert all((m.weight == 1).all() and (m.bias == 0).all() for m in norms)
    # Kaiming, fan out: a variance of 2 over what leaves the layer, here 512 channels of 3x3.
    weight = model.get_parameter("layer4.0.conv1.weight")
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


def test_vgg_has_five_pools_two_dropouts_and_no_batchnorm() -> None:
    modules = list(build_model("vgg11", CIFAR, 10).modules())
    assert [m.kernel_size for m in modules if isinstance(m, nn.MaxPool2d)] == [2] * 5
    assert [m.p for m in modules if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    assert not any(isinstance(m, nn.BatchNorm2d) for m in modules)


def test_pool_before_relu_changes_no_value_and_no_gradient() -> None:
    with seeded(0, "init"):
        model = build_model("cnn", DIGITS, 10)
    layers = list(model.children())
    layers[1], layers[2], layers[4], layers[5] = layers[2], layers[1], layers[5], layers[4]
    textbook = nn.Sequential(*layers)
    assert isinstance(textbook[1], nn.ReLU) and isinstance(layers[5], nn.MaxPool2d)
    x = torch.rand(4, *DIGITS)
    parameters = list(model.parameters())
    here, there = (torch.autograd.grad(m(x).square().sum(), parameters) for m in (model, textbook))
    assert torch.equal(model(x), textbook(x))
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("spec", MODELS)
def test_same_seed_builds_the_same_weights(spec: str) -> None:
    states = []
    for seed in (0, 0, 1):
        with seeded(seed, "init"):
            states.append(build_model(spec, CIFAR, 10).state_dict())
    first, again, other = states
    assert alike(first, again) and not alike(first, other)


def test_a_net_without_hidden_layers_is_logistic_regression() -> None:
    model, x = build_model("mlp(depth=0, hidden=8)", (2, 3), 4), torch.randn(5, 2, 3)
    (linear,) = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert torch.equal(model(x), x.flatten(1) @ linear.weight.T + linear.bias)


@pytest.mark.parametrize("end", ["(hidden=8,depth=3)", " ( hidden = 8 , depth = 3 ) ", "(depth=3, hidden=8,)"])
def test_spaces_and_order_of_options_do_not_matter(end: str) -> None:
    assert count(build_model(f" mlp{end}", (4,), 2)) == 5 * 8 + 2 * 9 * 8 + 9 * 2
    for word in ("batch", "'batch'", '"batch"'):
        assert any(isinstance(m, nn.BatchNorm2d) for m in build_model(f"cnn(norm={word})", DIGITS, 10).modules())


UNREADABLE = (
    "mlp(64)", "mlp(hidden=64", "mlp(hidden=)", "mlp(hidden=1, hidden=2)", "mlp(**x)", "mlp(hidden=exit(1))",
    "mlp(hidden=64) cnn()", "mlp() + f()", "mlp(hidden=1)(depth=2)", "mlp(hidden={[]: 1})", "", "(hidden=3)",
)  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "shape", "says"),
    [
        *((spec, DIGITS, "cannot be read") for spec in UNREADABLE),
        ("resnet81", DIGITS, "Did you mean 'resnet18'"),
        ("transformer", DIGITS, "The models are resnet18, resnet50, vgg11"),
        ("simple_cnn", DIGITS, "Did you mean 'simple-cnn'"),
        ("mlp(hiden=3)", DIGITS, "no option 'hiden'. Did you mean 'hidden'? It takes hidden, depth, norm"),
        ("vgg11(head=3)", DIGITS, "no option 'head'. It takes none"),
        ("mlp(num_classes=3)", DIGITS, "no option 'num_classes'"),
        ("mlp(hidden=0)", DIGITS, "hidden = 0; it should be greater than 0"),
        ("mlp(depth=-1)", DIGITS, "depth = -1; it should be greater than or equal to 0"),
        ("mlp(hidden=1.5)", DIGITS, "hidden = 1.5; it should be a valid integer"),
        ("mlp(hidden=many)", DIGITS, "hidden = 'many'; it should be a valid integer"),
        ("mlp(hidden=true)", DIGITS, "hidden = True; it should be a valid integer"),
        ("cnn(norm=layer)", DIGITS, "norm = 'layer'; it should be 'none' or 'batch'"),
        ("resnet18(head=9)", CIFAR, "head = 9 but the data has 10 classes"),
        ("resnet18", (30,), "needs images"),
        ("cnn", (28, 28), "needs images"),
        ("vgg11", FASHION, "at least 32x32 pixels but the data has 28x28"),
        ("vgg11", (3, 64, 31), "at least 32x32"),
        ("simple-cnn", (3, 15, 32), "at least 16x16"),
        ("cnn", (1, 3, 8), "at least 4x4"),
    ],
)
def test_what_cannot_be_built_is_refused(spec: str, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(CompatibilityError if shape != DIGITS else ConfigError) as caught:
        build_model(spec, shape, 10)
    assert says in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(("spec", "shape"), [("vgg11", CIFAR), ("simple-cnn", (3, 16, 16)), ("cnn", (1, 4, 4))])
def test_smallest_image_works(spec: str, shape: tuple[int, ...]) -> None:
    assert build_model(spec, shape, 10)(torch.rand(2, *shape)).shape == (2, 10)


NETS = """
from functools import partial
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, width=5):
        super().__init__()
        self.layer = nn.Linear(width, num_classes)
    def forward(self, x):
        return self.layer(x)

def both(input_shape, num_classes): return nn.Linear(input_shape[0], num_classes)
def named(*, input_shape): return nn.Linear(input_shape[0], 2)
def neither(): return nn.Linear(3, 3)
def anything(**data): return nn.Linear(data["input_shape"][0], data["num_classes"])
part = partial(both, num_classes=4)
def picky(input_shape, n_classes): return nn.Linear(1, 1)
def positional(num_classes, /): return nn.Linear(1, 1)
def broken(): raise RuntimeError("out of coffee")
def listed(): return [nn.Linear(1, 1)]
made = nn.Linear(2, 2)
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's folder with a package of nets, as the current directory and not on the import path."""
    package = tmp_path / "fnrfl_test_pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text(NETS)
    (package / "typo.py").write_text("def f(:\n")
    (package / "lacking.py").write_text("import fnrfl_no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    for name in [name for name in sys.modules if name.startswith("fnrfl_test_pkg")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("Net", (10, 5)), ("Net(width=7)", (10, 7)), ("both", (10, 6)), ("named", (2, 6)), ("neither", (3, 3)),
     ("anything", (10, 6)), ("part", (10, 6))],
)  # fmt: skip
def test_own_model_gets_what_it_accepts(own: None, name: str, shape: tuple[int, int]) -> None:
    spec = f"fnrfl_test_pkg.nets:{name}"
    usercode.allow("model.name", spec)
    assert next(build_model(spec, (6,), 10).parameters()).shape == shape


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("fnrfl_test_pkg.nets:picky", "n_classes"),
        ("fnrfl_test_pkg.nets:positional", "num_classes"),
        ("fnrfl_test_pkg.nets:broken", "RuntimeError: out of coffee"),
        ("fnrfl_test_pkg.nets:neither(depth=2)", "unexpected keyword argument 'depth'"),
        ("fnrfl_test_pkg.nets:listed", "type list; it must return a torch.nn.Module"),
        ("fnrfl_test_pkg.nets:made", "type Linear. Name a function"),
        ("fnrfl_test_pkg.nets:number", "type int. Name a function"),
        ("fnrfl_test_pkg.nets:bot", "has no 'bot'. Did you mean 'both'?"),
        ("fnrfl_test_pkg.nets:", "it must be module:name"),
        ("fnrfl_test_pkg.typo:f", "SyntaxError"),
        ("fnrfl_test_pkg.lacking:f", "No module named 'fnrfl_no_such_package'"),
        ("fnrfl_test_pkg.nest:both", "No module named 'fnrfl_test_pkg.nest'"),
        (":make_net", "cannot be imported"),
    ],
)
def test_own_model_that_fails_is_explained(own: None, spec: str, says: str) -> None:
    usercode.allow("model.name", spec)
    with pytest.raises(ConfigError) as caught:
        build_model(spec, (6,), 10)
    assert says in str(caught.value) and spec.partition("(")[0] in str(caught.value)
