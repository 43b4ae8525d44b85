"""What must be known about an nn.Module before it can be a net: its layers, its dropout masks, whether it is random."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from fnrfl.core.errors import CompatibilityError
from fnrfl.core.masks import Masked
from fnrfl.core.trees import Tree, under
from fnrfl.core.values import Shapes
from fnrfl.core.words import INPUT_SCALE

Calls = list[tuple[str, tuple[Tensor, ...]]]  # layers in the order in which they were called, and with what


class ProjectionHead(nn.Module):
    """MOON's classifier: features -> hidden -> projection -> logits. The logits read the projection."""

    def __init__(self, num_features: int, width: int, num_logits: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(num_features, num_features), nn.ReLU(), nn.Linear(num_features, width))
        self.classify = nn.Linear(width, num_logits)

    def forward(self, features: Tensor) -> Tensor:
        """Logits of features."""
        logits: Tensor = self.classify(self.project(features))
        return logits


class InputScale(nn.Module):
    """The first layer of a model whose inputs are scaled: (x - mean) / std, for each column or channel.

    With `fill`, that number is put first in the place of every input that is missing: NaN.
    """

    mean: Tensor
    std: Tensor
    fill: Tensor | None

    def __init__(self, mean: Tensor, std: Tensor, fill: Tensor | None = None) -> None:
        """Of the shape of an example, with 1 for the axes that share a number: [C, 1, 1] for images."""
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.register_buffer("fill", fill)

    @classmethod
    def of(cls, named: Tree) -> InputScale:
        """The first layer among the tensors of a model."""
        found = under(INPUT_SCALE, named)
        if found.keys() - {"fill"} != {"mean", "std"}:
            raise CompatibilityError(
                f"The weights have no {INPUT_SCALE}.mean and {INPUT_SCALE}.std, and the model takes inputs that are "
                "scaled with them. Put the file back as it was."
            )
        return cls(**found)

    def forward(self, x: Tensor) -> Tensor:
        """Scaled inputs."""
        x = x if self.fill is None else torch.where(x.isnan(), self.fill, x)
        return (x - self.mean) / self.std


def calls(module: nn.Module, example: Tensor, kind: type[nn.Module]) -> Calls:
    """Layers of a kind in the order in which a forward pass calls them, and with what."""
    seen: Calls = []

    def watch(name: str, layer: nn.Module) -> RemovableHandle:
        return layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((name, (*args, *kwargs.values()))), with_kwargs=True
        )

    hooks = [watch(name, layer) for name, layer in module.named_modules() if isinstance(layer, kind)]
    try:
        checked_forward(module, example)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def last_linear(module: nn.Module, example: Tensor) -> str | None:
    """Name of the Linear that the forward pass calls last."""
    return next((name for name, _ in reversed(calls(module, example, nn.Linear))), None)


WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of torch.compile's or of one for several GPUs: fnrfl compiles and spreads steps by itself."""
    while isinstance(inner := getattr(module, WRAPPERS.get(type(module).__name__, ""), None), nn.Module):
        module = inner
    if isinstance(module, torch.jit.ScriptModule):
        raise CompatibilityError("The model is a ScriptModule. Give the nn.Module that it was made from.")
    return module


def whole(module: nn.Module, example: Tensor) -> nn.Module:
    """The module with all of its parameters: lazy layers learn their shapes from a first example."""
    if any(is_lazy(p) for p in [*module.parameters(), *module.buffers()]):
        checked_forward(module, example)
        missing = [name for name, p in [*module.named_parameters(), *module.named_buffers()] if is_lazy(p)]
        if missing:
            raise CompatibilityError(
                f"The forward pass does not reach the lazy layer of {missing[0]}, so its shape is not known. Give it "
                "its input's size, or remove it."
            )
    return module


def checked_forward(module: nn.Module, example: Tensor) -> Tensor:
    """The logits of an example, in eval mode; refused if they are not [batch, classes]."""
    module.eval()
    with torch.no_grad():
        logits = module(example)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(example):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise CompatibilityError(
            f"The model must return logits of shape [batch, classes] but gave {got} for a batch of {len(example)}. "
            "Return the logits alone from forward."
        )
    return logits


def refuse_random(module: nn.Module, example: Tensor, dropouts: Shapes) -> None:
    """A forward pass that draws random numbers of its own would differ between engines: refuse it by name."""
    trial = copy.deepcopy(module)
    for name, shape in dropouts.items():
        trial.get_submodule(name.removesuffix(".uniform")).uniform = example.new_ones(len(example), *shape)
    entered: list[Tensor] = []
    culprits: list[str] = []  # the innermost first

    def leave(m: nn.Module, *_: object, name: str) -> None:
        if not torch.equal(entered.pop(), torch.get_rng_state()):
            culprits.append(f"{name or 'the model'} ({type(m).__name__})")

    for name, m in trial.named_modules():
        m.register_forward_pre_hook(lambda *_: entered.append(torch.get_rng_state()))
        m.register_forward_hook(lambda m, *_, name=name: leave(m, name=name))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for mode in (True, False):
            trial.train(mode)(example)
    if culprits:
        raise CompatibilityError(
            f"{culprits[0]} draws random numbers of its own, so runs could not be repeated. Use nn.Dropout, whose "
            "masks fnrfl draws itself, or remove the layer; of an LSTM or GRU set its own dropout to 0 and put "
            "nn.Dropout after it."
        )


def mask_shapes(module: nn.Module, example: Tensor) -> Shapes:
    """Shapes of one example's masks, by the name of their buffer: layers are watched with two examples and three."""
    two, three = (torch.cat([example[:1]] * number) for number in (2, 3))  # as a batch lies in memory
    found: Shapes = {}
    if not (small := calls(module, two, Masked)):
        return found
    for (name, few), (_, more) in zip(small, calls(module, three, Masked), strict=True):
        if f"{name}.uniform" in found:
            raise CompatibilityError(
                f"The dropout layer {name} is called twice in one forward pass. Use one nn.Dropout per call."
            )
        layer = module.get_submodule(name)
        assert isinstance(layer, Masked)
        found[f"{name}.uniform"] = layer.receive(name, few, more)
    return found


def named_layer(module: nn.Module, name: str | None) -> str | None:
    """The layer whose output the features are, if one is named; refused if the module has no such layer."""
    if name is not None and name not in dict(module.named_modules()):
        layers = ", ".join(layer for layer, _ in module.named_modules() if layer)
        raise CompatibilityError(
            f"model.features is {name!r}, which is not a layer of the model. Choose one of {layers}."
        )
    return name


def has_tied_weights(module: nn.Module) -> bool:
    """Whether a parameter or buffer has two names."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return len({id(tensor) for _, tensor in named}) < len(named)


def batchnorm_names(module: nn.Module) -> frozenset[str]:
    """Parameters and buffers of BatchNorm layers, found by type: names of these layers vary."""
    layers = {n for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    named = [*module.named_parameters(), *module.named_buffers()]
    return frozenset(name for name, _ in named if name.rpartition(".")[0] in layers)
