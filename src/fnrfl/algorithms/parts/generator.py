"""Generators that are told a label and some noise and make features or images, and what it takes to train them.

A generator is a pure function of flat weights and named statistics, so that it runs wherever it is sent: on the server,
and inside an objective, under `vmap` and in any thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, leaky_relu, linear

from fnrfl.core import optim
from fnrfl.core.algorithm import class_indicator
from fnrfl.core.step import Carry, Loss, by_transform
from fnrfl.core.types import Batch, Flat, Out, Probe, Shapes, Training, Tree

BATCHNORM_MOMENTUM, BATCHNORM_EPS = 0.1, 1e-5  # as in torch


# -- the nets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generator:
    """(noise, label) -> hidden, BatchNorm, ReLU -> what is generated.

    end: linear; relu (for features after a ReLU); unit: a sigmoid, for pixels in [0, 1]; standard: tanh and BatchNorm
    without weights, for data of mean 0 and variance 1.
    """

    num_classes: int
    noise: int
    hidden: int
    shape: tuple[int, ...]
    end: Literal["linear", "relu", "unit", "standard"] = "relu"

    @property
    def shapes(self) -> Shapes:
        """Of the weights, in the order of the flat vector."""
        H, out = self.hidden, math.prod(self.shape)
        return {"in": (H, self.noise + self.num_classes), **_norm(0, H), "out": (out, H), "bias": (out,)}

    @property
    def size(self) -> int:
        """How many weights there are."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def statistics(self) -> dict[str, int]:
        """Names of the running means and variances, and the channels of each."""
        norms = {k.removeprefix("scale"): shape[0] for k, shape in self.shapes.items() if k.startswith("scale")}
        norms |= {"end": self.shape[0]} if self.end == "standard" else {}
        return {f"{name}.{what}": channels for name, channels in norms.items() for what in ("mean", "var")}

    def new(self, stream: torch.Generator, like: Tensor) -> tuple[Flat, Tree]:
        """Weights drawn as torch's layers draw theirs, and statistics that change nothing; type and place of `like`."""
        weights = []
        for name, shape in self.shapes.items():
            if name.startswith(("scale", "shift", "bias")):
                weights.append(torch.full(shape, float(name.startswith("scale"))))
            else:
                weights.append((2 * torch.rand(shape, generator=stream) - 1) / math.sqrt(math.prod(shape[1:])))
        buffers = {k: like.new_full((n,), float(k.endswith("var"))) for k, n in self.statistics.items()}
        return torch.cat([w.flatten() for w in weights]).to(like), buffers

    def __call__(
        self, weights: Flat, buffers: Tree, noise: Tensor, y: Tensor, *, training: bool
    ) -> tuple[Tensor, Tree]:
        """(what is generated [B, ...], the statistics afterwards); in training, BatchNorm uses the batch's own."""
        layers = self._layers(weights)
        hot = class_indicator(y, self.num_classes).to(noise.dtype)
        made, seen = self._body(layers, linear(torch.cat([noise, hot], 1), layers["in"]), buffers, training)
        return self._ended(made, buffers, seen, training)

    def _layers(self, weights: Flat) -> Tree:
        parts = weights.split([math.prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def _body(self, layers: Tree, h: Tensor, buffers: Tree, training: bool) -> tuple[Tensor, Tree]:
        h, seen = _normed(0, h, layers, buffers, training)
        return linear(h.relu(), layers["out"], layers["bias"]).view(len(h), *self.shape), seen

    def _ended(self, made: Tensor, buffers: Tree, seen: Tree, training: bool) -> tuple[Tensor, Tree]:
        if self.end == "standard":
            made, last = standardised("end", made.tanh(), buffers, training)
            return made, seen | last
        if self.end == "linear":
            return made, seen
        return made.relu() if self.end == "relu" else made.sigmoid(), seen


@dataclass(frozen=True)
class ConvGenerator(Generator):
    """The same for larger images: a quarter of the size, then twice an upsampling and a 3x3 convolution."""

    @property
    def shapes(self) -> Shapes:
        W, (channels, *_), (rows, columns) = self.hidden, self.shape, self._sides(4)
        return {
            "in": (2 * W * rows * columns, self.noise + self.num_classes), **_norm(0, 2 * W),
            "conv1": (2 * W, 2 * W, 3, 3), **_norm(1, 2 * W),
            "conv2": (W, 2 * W, 3, 3), **_norm(2, W),
            "out": (channels, W, 3, 3), "bias": (channels,),
        }  # fmt: skip

    def _sides(self, part: int) -> tuple[int, int]:
        return -(-self.shape[1] // part), -(-self.shape[2] // part)

    def _body(self, layers: Tree, h: Tensor, buffers: Tree, training: bool) -> tuple[Tensor, Tree]:
        h, seen = _normed(0, h.view(len(h), 2 * self.hidden, *self._sides(4)), layers, buffers, training)
        for i, part in ((1, 2), (2, 1)):
            h = conv2d(interpolate(h, size=self._sides(part)), layers[f"conv{i}"], padding=1)
            h, new = _normed(i, h, layers, buffers, training)
            h, seen = leaky_relu(h, 0.2), seen | new
        return conv2d(h, layers["out"], layers["bias"], padding=1), seen


def _norm(i: int, channels: int) -> Shapes:
    return {f"scale{i}": (channels,), f"shift{i}": (channels,)}


def standardised(name: str, h: Tensor, buffers: Tree, training: bool) -> tuple[Tensor, Tree]:
    """BatchNorm without weights over all axes but the second, and its running statistics afterwards."""
    axes = [0, *range(2, h.ndim)]
    across = [1, -1, *[1] * (h.ndim - 2)]
    old_mean, old_var = buffers[f"{name}.mean"], buffers[f"{name}.var"]
    mean, var, new_mean, new_var = old_mean, old_var, old_mean, old_var
    if training:
        var, mean = torch.var_mean(h, axes, correction=0)
        count = h.numel() // h.shape[1]
        new_mean = torch.lerp(old_mean, mean.detach(), BATCHNORM_MOMENTUM)
        new_var = torch.lerp(old_var, var.detach() * count / (count - 1), BATCHNORM_MOMENTUM)
    made = (h - mean.view(across)) / (var.view(across) + BATCHNORM_EPS).sqrt()
    return made, {f"{name}.mean": new_mean, f"{name}.var": new_var}


def _normed(i: int, h: Tensor, layers: Tree, buffers: Tree, training: bool) -> tuple[Tensor, Tree]:
    h, new = standardised(str(i), h, buffers, training)
    across = [1, -1, *[1] * (h.ndim - 2)]
    return h * layers[f"scale{i}"].view(across) + layers[f"shift{i}"].view(across), new


# -- training them ----------------------------------------------------------------------------------------------------


def descend(training: Training, lr: float | Tensor, generator: Carry, loss: Loss) -> Tensor:
    """One optimiser step of a generator, whose buffers are its statistics; they change in place. Returns the loss."""
    grad, value, statistics = by_transform(loss, generator.params)
    grad = grad.add(generator.params, alpha=training.weight_decay)
    optim.update(training, lr, generator.params, grad, generator.memory)
    for name, old in generator.buffers.items():
        old.copy_(statistics[name])
    return value


def diversity(made: Tensor, noise: Tensor) -> Tensor:
    """exp(-mean over pairs of |made_a - made_b| * |noise_a - noise_b|^2): small if different noise makes a difference.

    >>> diversity(torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [1.0]]))  # exp(-2 * 2 / 4)
    tensor(0.3679)
    """
    flat = made.flatten(1)
    apart = torch.cdist(flat, flat, p=1.0) / flat.shape[1]
    return (-(apart * (noise[:, None] - noise).square().mean(-1)).mean()).exp()


def weighted(each: Tensor, weights: Tensor) -> Tensor:
    """Mean over the last axis with a weight for every example, which a mean taken before would lose.

    >>> weighted(torch.tensor([2.0, 10.0]), torch.tensor([1.0, 0.0]))
    tensor(1.)
    """
    if each.shape != weights.shape:  # [B] times [B, 1] would silently be [B, B]
        raise ValueError(f"{tuple(each.shape)} losses and {tuple(weights.shape)} weights: give one weight per loss")
    return (each * weights).mean(-1)


# -- labels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelCounts(Probe):
    """How many examples of each class a client has: numbers that the server learns about its data."""

    asks_model: ClassVar[bool] = False

    num_classes: int

    def __call__(self, out: Out, batch: Batch) -> Tree:
        return {"counts": class_indicator(batch.y, self.num_classes).sum(0, dtype=torch.float32)}

    def accepts(self, answer: Tree, one: Tree, examples: float) -> bool:
        return add_up(answer["counts"], examples)


def add_up(counts: Tensor, examples: float) -> bool:
    """Whether counts of classes, in single precision, are those of so many examples."""
    return bool((counts >= 0).all()) and math.isclose(float(counts.sum()), examples, rel_tol=1e-3)


def holders(counts: Tensor) -> Tensor:
    """Each client's part of every class, [M, C]: columns sum to one, or to zero where nobody has the class.

    >>> holders(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    tensor([[0.2500, 0.0000],
            [0.7500, 0.0000]])
    """
    return counts / counts.sum(0).clamp(min=1)


def proportional(counts: Tensor, total: int, stream: torch.Generator) -> Tensor:
    """`total` labels in the proportions of counts [C], exactly (floors of cumulative sums), in random order."""
    upto = counts.to(torch.int64).cumsum(0)
    edges = upto * total // upto[-1]
    return labelled(edges, torch.arange(total, device=counts.device))[torch.randperm(total, generator=stream)]


def labelled(edges: Tensor, at: Tensor) -> Tensor:
    """The class whose stretch, up to and without its edge, a number falls into; `edges` ascend, [C].

    >>> labelled(torch.tensor([0.5, 0.5, 1.0]), torch.tensor([0.2, 0.5, 0.9]))
    tensor([0, 2, 2])
    """
    return (at[:, None] >= edges).sum(-1)
