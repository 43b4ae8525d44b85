"""The model that a run trains, and whether it can take the data."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fnrfl.config import RunConfig, registry
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.modules import unwrapped, whole
from fnrfl.core.net import Net
from fnrfl.core.rng import seeded
from fnrfl.core.trees import Tree, under
from fnrfl.core.words import INPUT_SCALE
from fnrfl.data.batches import check_fits
from fnrfl.data.partition.views import Splits
from fnrfl.models.catalogue import build_model
from fnrfl.runs.error_context import model_errors
from fnrfl.runs.passed import NOTHING_PASSED, PassedObjects
from fnrfl.runs.setup.method import build_algorithm

SINGLE = ("auto", "float32", "tf32", "bf16")  # whatever layers compute in, parameters are float32


def build_net(
    config: RunConfig,
    input_shape: tuple[int, ...],
    num_classes: int,
    algorithm: Algorithm | None = None,
    *,
    integers: bool = False,
    passed: PassedObjects = NOTHING_PASSED,
    trained: bool = False,
) -> Net:
    """Build the freshly initialised model that a config's method trains, for data of this shape.

    Data of `integers` is handed to it as it is if it takes that, such as tokens to an Embedding; else as its own type.
    With `trained`, it will get the weights of a run, so that the first ones matter for untrained parameters alone.
    """
    algorithm = algorithm or build_algorithm(config, passed)
    dtype = torch.float32 if config.engine.precision in SINGLE else torch.float64
    named = None if config.model.features == "auto" else config.model.features
    with (
        seeded(config.seed, "init"),
        model_errors(config, f"cannot be called with examples of shape {list(input_shape)}"),
    ):
        # Two examples: a few models need more than one to compute their shapes.
        module = _build_module(config, input_shape, num_classes, passed)
        example = torch.zeros(2, *input_shape, dtype=torch.int64)
        tokens = integers and _takes(copy.deepcopy(module).to(dtype), example)
        first = example if tokens else example.float()
        module = whole(module, first)
        if config.model.init != "seed" and not (trained and all(p.requires_grad for p in module.parameters())):
            _put_first_weights(module, passed.find("init", config.model.init), config.model.name)
        module = algorithm.adapt(module, first).to(dtype)
        example = example if tokens else example.to(dtype)
        try:
            own = registry.is_own_model(config.model.name)
            net = Net(module, example, features=named, channels_last=config.engine.accelerate, autocast=own)
        except RuntimeError as error:
            if tokens or not _takes(module, example.to(torch.int64)):
                raise
            raise CompatibilityError(
                f'model = "{config.model.name}" takes whole numbers (tokens), and dataset = "{config.dataset.name}" '
                "has fractions. Store the examples as int64, in an .npz or from a function; a .csv has fractions alone."
            ) from error
    if net.num_logits < num_classes:
        raise CompatibilityError(
            f'model = "{config.model.name}" has {net.num_logits} outputs and dataset = "{config.dataset.name}" has '
            f"{num_classes} classes. Give the model at least as many outputs."
        )
    return net


def _build_module(config: RunConfig, shape: tuple[int, ...], num_classes: int, passed: PassedObjects) -> nn.Module:
    """Build the module that a config names, or copy the one that was passed, in float32 as all are at first.

    Its transformers compute in eval mode what they do in train mode: in eval mode alone torch's TransformerEncoder cuts
    padding out. It answers 0 there, fails where an example is nothing but padding, and cannot be batched over clients.
    The model that comes out of a run has this off as well.
    """
    model = passed.find("model", config.model.name)
    if isinstance(model, nn.Module):
        module = copy.deepcopy(model).float()
    else:
        module = unwrapped(build_model(config.model.name, shape, num_classes, model))
    for layer in module.modules():
        layer._compiled_call_impl = None  # of `module.compile()`
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False
    return module


@torch.no_grad()
def _takes(module: nn.Module, example: Tensor) -> bool:
    """Whether a model can be asked about examples like this one."""
    try:
        module.eval()(example)
    except Exception:  # a user's model may raise anything
        return False
    return True


def _put_first_weights(module: nn.Module, weights: Tree, model: str) -> None:
    """Load weights into a module that has exactly these names and shapes.

    The input scale of a trained model is left out: the clients of this run compute another.
    """
    weights = _without_wrappers(weights, module)
    if not hasattr(module, INPUT_SCALE) and under(INPUT_SCALE, weights):
        rest = {name: one for name, one in weights.items() if not name.startswith(f"{INPUT_SCALE}.")}
        inside = under("model", rest)  # an exported model has the module under this name
        weights = _without_wrappers(inside if len(inside) == len(rest) else rest, module)
    wanted = {name: list(one.shape) for name, one in module.state_dict().items()}
    found = {name: list(one.shape) for name, one in weights.items()}
    wrong = [f"no {name}, which the model has with shape {wanted[name]}" for name in wanted if name not in found]
    wrong += [f"{name}, which the model has not" for name in found if name not in wanted]
    wrong += [
        f"{name} with shape {found[name]}, and the model has it with {wanted[name]}"
        for name in wanted
        if found.get(name, wanted[name]) != wanted[name]
    ]
    if wrong:
        raise CompatibilityError(f"init has {wrong[0]}. Give the state_dict of a module like model = {model}.")
    module.load_state_dict(weights)


def _without_wrappers(weights: Tree, module: nn.Module) -> Tree:
    """Strip the prefixes that `torch.compile` and `DataParallel` put before every name."""
    for word in ("_orig_mod", "module"):
        inside = under(word, weights)
        if inside and len(inside) == len(weights) and not hasattr(module, word):
            return _without_wrappers(inside, module)
    return weights


def check_values(config: RunConfig, net: Net, splits: Splits) -> None:
    """Refuse numbers in the data that the model cannot take."""
    parts = {f'dataset = "{config.dataset.name}"': [splits.train, splits.test]}
    if config.public.source not in ("train", "test"):
        parts[f'public.source = "{config.public.source}"'] = [splits.public, splits.ranking, splits.distill]
    for what, held in parts.items():
        for part in (one for one in held if not one.x.is_meta):  # sites look at their own
            check_fits(part.x, net.input_dtype, what)
            check_tokens(net, part.x, what)


@torch.no_grad()
def check_tokens(net: Net, x: Tensor, what: str) -> None:
    """Refuse whole numbers that a model has no place for: it is asked about the least and the largest of each input."""
    if net.input_dtype.is_floating_point or not len(x):
        return
    try:
        net.eval_forward(*net.flatten(), torch.stack([x.amin(0), x.amax(0)]).to(net.device))
    except (IndexError, RuntimeError) as error:
        raise CompatibilityError(
            f"{what} holds whole numbers from {int(x.min())} to {int(x.max())}, and the model cannot take all of them "
            f"({type(error).__name__}: {error}). Correct the data, or give its Embedding as many rows as there are "
            "tokens."
        ) from error
