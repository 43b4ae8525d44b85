"""The penalties J that refinement adds to the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fnrfl.algorithms.parts.norms import feature_norms
from fnrfl.core.algorithm import Objective, class_indicator
from fnrfl.core.net import Model
from fnrfl.core.types import Batch, Flat, Out, Shapes, State, Tree

# Each is a function of the examples' norms u [B], the class indicator hot [B, C], the targets [C] (0: none) and the
# number of peers. rho_l is the share of class l in the batch, as in Algorithm 3. `constant` is handed Delta
# instead of the targets. Padding has no class: its row of the indicator is 0, and hot.sum() counts the examples.

Penalty = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _live(u: Tensor, hot: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rho, class means of this batch, targets), with rho 0 and harmless values where there is nothing to compare."""
    count = hot.sum(0)
    known = (target > 0) & (count > 0)
    mean = torch.where(known, (u @ hot) / count.clamp(min=1), 1.0)
    return torch.where(known, count, 0.0) / hot.sum(), mean, torch.where(known, target, 1.0)


def relative(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l (F_l / T_l - 1)^2: free of scale, so one weight serves all nets."""
    rho, mean, goal = _live(u, hot, target)
    return rho @ (mean / goal - 1).square()


def squared(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l (F_l - T_l)^2."""
    rho, mean, goal = _live(u, hot, target)
    return rho @ (mean - goal).square()


def absolute(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l |F_l - T_l|."""
    rho, mean, goal = _live(u, hot, target)
    return rho @ (mean - goal).abs()


def huber(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l H(F_l - T_l): squared/2 within 1, absolute outside."""
    rho, mean, goal = _live(u, hot, target)
    gap = (mean - goal).abs()
    return rho @ torch.where(gap < 1, gap.square() / 2, gap - 0.5)


def per_sample(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """mean_i (u_i - T_{y_i})^2: also narrows the spread within a class."""
    goal = hot @ target
    return torch.where(goal > 0, (u - goal).square(), 0.0).sum() / hot.sum()


def log_ratio(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l (log F_l - log T_l)^2: the same for twice as long and half as long."""
    rho, mean, goal = _live(u, hot, target)
    return rho @ (mean.log() - goal.log()).square()


def literal(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """-sum_l rho_l Delta[l] F_l with Delta from this very batch, held constant: the gradient the text suggests."""
    rho, mean, goal = _live(u, hot, target)
    return -(rho * peers * (goal - mean).detach()) @ mean


def constant(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l Delta[l] with Delta from the norms before refinement, as printed: a number without gradient."""
    return hot.sum(0) / hot.sum() @ target


PENALTIES: dict[str, Penalty] = {
    "relative": relative,
    "squared": squared,
    "absolute": absolute,
    "huber": huber,
    "per-sample": per_sample,
    "log-ratio": log_ratio,
    "literal": literal,
    "constant": constant,
}


@dataclass(frozen=True)
class Penalised(Objective):
    """Phi = L + lambda * J around any objective; targets come in `own` (refinement) or `shared` (local training)."""

    takes_padding: ClassVar[bool] = True  # if the inner objective does
    inner: Objective
    penalty: str
    weight: float
    peers: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "takes_padding", type(self).takes_padding and self.inner.takes_padding)

    def noise(self, batch: int) -> Shapes:
        return self.inner.noise(batch)

    def begin(self, start: State, own: Tree) -> State:
        return self.inner.begin(start, own)

    def loss(self, out: Out, model: Model, params: Flat, batch: Batch, shared: Tree, own: Tree) -> Tensor:
        loss = self.inner.loss(out, model, params, batch, shared, own)
        if not self.weight:  # the control: exactly the inner objective
            return loss
        target = (own | shared)["fnr.target"]
        hot = class_indicator(batch.y, len(target)).to(out.features.dtype)
        hot = hot if batch.real is None else hot * batch.real[:, None]
        return loss + self.weight * PENALTIES[self.penalty](feature_norms(out.features), hot, target, self.peers)

    def correct(self, grad: Flat, params: Flat, start: Flat, shared: Tree, own: Tree) -> Flat:
        return self.inner.correct(grad, params, start, shared, own)

    def shift(self, lr: float | Tensor, shared: Tree, own: Tree) -> Flat | None:
        return self.inner.shift(lr, shared, own)

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        return self.inner.finish(start, end, travel, examples, shared, own)
