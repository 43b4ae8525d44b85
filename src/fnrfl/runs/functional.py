"""FNR for somebody else's training loop: class norms of a model, and its refinement towards others' norms.

A federation written by hand needs four lines after local training:

    norms = torch.stack([class_norms(model, public) for model in models])
    weak = weakest(accuracy, share=0.5)
    for i, target in zip(weak.tolist(), norm_targets(norms, weak, "others")):
        refine(models[i], public, target)

These functions are part of the caller's own loop, so they compute as the rest of it does: in the model's dtype and on
its device, with the caller's threads, autocast and precision. Gradient mode is the exception: it does not matter where
they are called, inside `torch.no_grad` and `torch.inference_mode` too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import get_args

import torch
from torch import Tensor, nn

from fnrfl.algorithms.parts.norms import Accuracy, ClassNorms, norm_targets, weakest
from fnrfl.algorithms.parts.penalties import PENALTIES, Penalised
from fnrfl.core.algorithm import Objective
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.core.modules import unwrapped
from fnrfl.core.net import Net
from fnrfl.core.rng import stream_kept
from fnrfl.core.step import Carry, by_autograd, local_step
from fnrfl.core.training import BatchNormMode, FnrOptions, Training
from fnrfl.core.types import Batch, Probe, State, Tree

__all__ = ["class_norms", "norm_targets", "refine", "weakest"]

Batches = Iterable[tuple[Tensor, Tensor]]
Loader = Batches | Callable[[], Batches]  # a function is called for each pass


def class_norms(
    model: nn.Module, loader: Loader, *, num_classes: int | None = None, features: str | None = None
) -> Tensor:
    """Return the mean length of the features of each class in the data, [C]; 0 for a class that it has not.

    The data is read once, in eval mode and without gradient; the model and torch's global random stream are left as
    they were. The features are the input of the Linear that is called last, or the output of the layer that `features`
    names. `num_classes` is the number of logits unless said.
    """
    return measured(model, loader, lambda logits: ClassNorms(num_classes or logits), num_classes, features)["norms"]


def accuracy_on(model: nn.Module, loader: Loader, *, features: str | None = None) -> float:
    """Return the share of right answers on some data, by which clients are ranked; leave the model as it was."""
    return float(measured(model, loader, lambda _: Accuracy(), None, features)["accuracy"])


@torch.inference_mode(False)
@torch.no_grad()
def measured(
    model: nn.Module, loader: Loader, probe_of: Callable[[int], Probe], num_classes: int | None, features: str | None
) -> Tree:
    """Return the sums of a probe, made for the model's number of logits, and its answer."""
    net: Net | None = None
    total: Tree = {}
    with _borrowed(model), stream_kept():  # a DataLoader draws a number even if it shuffles nothing
        for batch in _batches(model, loader):
            if net is None:
                net = _net(model, batch.x, features)
                probe = probe_of(net.num_logits)
                params, buffers = net.flatten()
            _check_labels(batch.y, num_classes or net.num_logits)
            total = probe.add(total, probe(net.eval_forward(params, buffers, batch.x), batch))
    if net is None:
        raise ConfigError("The loader gave no batch to measure the model on. Give at least one batch of (x, y).")
    return total | probe.finish(total)


@torch.inference_mode(False)
@torch.no_grad()
def refine(
    model: nn.Module,
    public_loader: Loader,
    targets: Tensor,
    *,
    penalty: str = FnrOptions.penalty,
    weight: float = FnrOptions.weight,
    epochs: int = FnrOptions.epochs,
    lr: float = Training.lr,
    momentum: float = Training.momentum,
    weight_decay: float = 0.0,
    batchnorm: BatchNormMode = FnrOptions.batchnorm,
    features: str | None = None,
    peers: int = 1,
) -> nn.Module:
    """Train a model on public data towards the class norms `targets` [C], in place; returns it too.

    Each step minimises cross-entropy + weight * penalty with a fresh SGD; a target of 0 is none. `batchnorm` is
    "updating" (plain train mode), "batch" (batch statistics, none stored) or "frozen" (eval mode, dropout included).
    Only parameters with `requires_grad` move; train and eval modes are as before. An error leaves the model untouched.

    The loader says the order of the examples. Dropout draws from torch's global stream, unless it is frozen. The
    penalty "literal" counts `peers`: the clients that the targets were averaged over.
    """
    _check_options(penalty, weight, epochs, lr, batchnorm, targets)
    if epochs > 1 and not callable(public_loader) and iter(public_loader) is public_loader:
        raise ConfigError(
            f"public_loader can be read only once, and epochs is {epochs}. Give a list of batches or a DataLoader."
        )
    objective = Penalised(Objective(), penalty, weight, peers)
    training = Training(lr=lr, momentum=momentum, weight_decay=weight_decay, batchnorm=batchnorm)
    net: Net | None = None
    losses: list[Tensor] = []
    with _borrowed(model):
        for batch in (batch for _ in range(epochs) for batch in _batches(model, public_loader)):
            if net is None:
                net = _net(model, batch.x, features)
                start = State(*net.flatten())
                carry = Carry.new(training, start.params, start.buffers)
                own = {"fnr.target": targets.to(start.params)}
            _check_labels(batch.y, len(targets))
            losses.append(local_step(net, objective, training, carry, start, batch, {}, own, lr, by_autograd))
    if net is None and epochs:
        raise ConfigError("public_loader gave no batch to refine on. Give at least one batch of (x, y).")
    if net is not None:
        bad = (~torch.stack(losses).isfinite()).nonzero()
        if len(bad) or not carry.params.sum().isfinite():
            step = int(bad[0]) if len(bad) else len(losses) - 1
            raise FnrflError(
                f"Refinement is no longer finite after step {step} of {len(losses)}; the model is as it was. Lower the "
                "lr."
            )
        named = dict(net.module.named_parameters()) | dict(net.module.named_buffers())
        for name, tensor in (net.unflatten(carry.params) | carry.buffers).items():
            named[name].copy_(tensor)
    return model


def _batches(model: nn.Module, loader: Loader) -> Iterator[Batch]:
    """Yield the loader's batches, where the model is."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for batch in loader() if callable(loader) else loader:
        if isinstance(batch, Mapping) or len(batch) != 2:
            raise ConfigError(
                f"The loader gave a {type(batch).__name__} of {len(batch)}, and a batch must be (x, y): inputs and "
                "labels. Give a list such as [(batch['image'], batch['label']) for batch in loader]."
            )
        x, y = batch
        x = x.clone() if x.is_inference() else x  # which no gradient can go through
        yield Batch(x.to(device), y.to(device, torch.int64), torch.arange(len(y), device=device))


def _net(model: nn.Module, x: Tensor, features: str | None) -> Net:
    net = Net(unwrapped(model), x[:2], features=features, own_random=True)
    if not net.has_features:
        raise CompatibilityError(
            f"{type(model).__name__} calls no Linear layer whose input could be its features. Name the layer whose "
            "output they are, for example features='pool'."
        )
    return net


@contextmanager
def _borrowed(model: nn.Module) -> Iterator[None]:
    """Inside, modes may change; afterwards every layer is in the mode in which it was."""
    modes = [(layer, layer.training) for layer in model.modules()]
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


def _check_options(penalty: str, weight: float, epochs: int, lr: float, batchnorm: str, targets: Tensor) -> None:
    for name, value, kept, rule in (
        ("penalty", penalty, penalty in PENALTIES, f"one of {', '.join(PENALTIES)}"),
        ("batchnorm", batchnorm, batchnorm in get_args(BatchNormMode), f"one of {', '.join(get_args(BatchNormMode))}"),
        ("weight", weight, weight >= 0, "0 or more"),
        ("epochs", epochs, epochs >= 0, "0 or more"),
        ("lr", lr, lr > 0, "more than 0"),
        ("targets", tuple(targets.shape), targets.ndim == 1, "the class norms of one model, [C]: this model's row"),
    ):
        if not kept:
            raise ConfigError(f"{name} = {value!r} is not possible. Give {rule}.")


def _check_labels(y: Tensor, num_classes: int) -> None:
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise CompatibilityError(
            f"A batch has labels from {int(y.min())} to {int(y.max())}, and there are {num_classes} classes. Number "
            "them from 0, or give more classes."
        )
