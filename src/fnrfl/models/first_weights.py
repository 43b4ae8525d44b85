"""First weights that were passed in as a state_dict, put into a module."""

from __future__ import annotations

from torch import nn

from fnrfl.core.errors import CompatibilityError
from fnrfl.core.trees import Tree, under
from fnrfl.core.words import INPUT_SCALE


def put_first_weights(module: nn.Module, weights: Tree, model: str) -> None:
    """Load weights into a module that has exactly these names and shapes.

    The input scale of a trained model is left out: the clients of this run compute another.
    """
    weights = _without_wrappers(weights, module)
    if not hasattr(module, INPUT_SCALE):
        weights = _without_wrappers(_without_scale(weights), module)
    wanted = {name: tuple(one.shape) for name, one in module.state_dict().items()}
    found = {name: tuple(one.shape) for name, one in weights.items()}
    way = f"Give the state_dict of a module like model = {model}."
    if missing := [name for name in wanted if name not in found]:
        raise CompatibilityError(
            f"init has no {missing[0]}, which the model has with shape {list(wanted[missing[0]])}. {way}"
        )
    if unknown := [name for name in found if name not in wanted]:
        raise CompatibilityError(f"init has {unknown[0]}, which the model has not. {way}")
    if other := [name for name in wanted if wanted[name] != found[name]]:
        name = other[0]
        raise CompatibilityError(
            f"init has {name} with shape {list(found[name])}, and the model has it with {list(wanted[name])}. {way}"
        )
    module.load_state_dict(weights)


def _without_wrappers(weights: Tree, module: nn.Module) -> Tree:
    """Strip the prefixes that `torch.compile` and `DataParallel` put before every name."""
    for word in ("_orig_mod", "module"):
        inside = under(word, weights)
        if inside and len(inside) == len(weights) and not hasattr(module, word):
            return _without_wrappers(inside, module)
    return weights


def _without_scale(weights: Tree) -> Tree:
    """Strip the scaling layer of a trained model."""
    if not under(INPUT_SCALE, weights):
        return weights
    rest = {name: one for name, one in weights.items() if not name.startswith(f"{INPUT_SCALE}.")}
    inside = under("model", rest)  # an exported model has the module under this name
    return inside if len(inside) == len(rest) else rest
