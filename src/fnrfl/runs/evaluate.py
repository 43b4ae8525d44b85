"""How good a model is: counts of right answers per class, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fnrfl.core.algorithm import cross_entropy
from fnrfl.core.feed import forward_batch
from fnrfl.core.net import Net
from fnrfl.core.types import State
from fnrfl.data.batches import scaled

Noise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Score:
    """Right answers and examples of every class, and the mean loss."""

    right: Tensor  # [C]
    count: Tensor  # [C]
    loss: float

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.right.sum() / self.count.sum())

    @property
    def per_class(self) -> Tensor:
        """Recall of every class, nan for one that the data has not."""
        return self.right / self.count

    @property
    def balanced(self) -> float:
        """Mean recall of the classes that the data has."""
        return float(self.per_class.nanmean())

    def reweighted(self, shares: Tensor) -> Tensor:
        """Accuracy on data with these class shares, [..., C]."""
        weight = torch.where(self.count > 0, shares, 0.0)
        return (weight * self.per_class.nan_to_num()).sum(-1) / weight.sum(-1)


@torch.no_grad()
def evaluate_model(net: Net, state: State, x: Tensor, y: Tensor, num_classes: int, noise: Noise | None = None) -> Score:
    """Score a model on data, in eval mode."""
    state = state.to(net.device)
    right = torch.zeros(num_classes, dtype=torch.float64, device=net.device)
    loss = 0.0
    batch = forward_batch(net.device)
    for xs, ys in zip(x.split(batch), y.split(batch), strict=True):
        xs, ys = scaled(xs.to(net.device), net.input_dtype), ys.to(net.device)
        xs = net.laid_out(xs if noise is None else noise(xs))
        logits = net.eval_forward(state.params, state.buffers, xs).logits
        right.index_add_(0, ys, (logits.argmax(1) == ys).double())
        loss += float(cross_entropy(logits, ys).sum())
    return Score(right.cpu(), torch.bincount(y, minlength=num_classes).double(), loss / len(y))


def pooled(scores: list[Score]) -> Score:
    """The score on several data sets taken together."""
    counts = torch.stack([s.count.sum() for s in scores])
    loss = sum(s.loss * float(n) for s, n in zip(scores, counts, strict=True)) / float(counts.sum())
    return Score(
        sum((s.right for s in scores[1:]), scores[0].right), sum((s.count for s in scores[1:]), scores[0].count), loss
    )
