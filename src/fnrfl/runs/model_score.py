"""How good a model is: its answer to every example, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fnrfl.core.algorithm import cross_entropy
from fnrfl.core.feed import forward_batch
from fnrfl.core.ndarrays import Floats
from fnrfl.core.net import Net
from fnrfl.core.types import State
from fnrfl.data.batches import scaled
from fnrfl.runs.quality import Answers

Noise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Score:
    """The answers to some examples, and the mean loss; right answers and examples of every class follow."""

    predicted: Tensor  # [n], the largest output; one from `num_classes` on is no class
    labels: Tensor  # [n]
    num_classes: int
    loss: float
    logits: Tensor | None = None  # [n, C], where they were kept

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.answers.right.sum() / len(self.labels))

    @property
    def balanced(self) -> float:
        """Mean recall of the classes that the data has."""
        known = self.answers.recall[self.answers.count > 0]
        return float(known.sum() / len(known))

    def reweighted(self, shares: Floats) -> Floats:
        """Accuracy on data with these class shares, [..., C]."""
        known = self.answers.count > 0
        weight = shares * known
        with np.errstate(invalid="ignore"):  # nan for classes that the data has not
            found: Floats = (weight * np.where(known, self.answers.recall, 0.0)).sum(-1) / weight.sum(-1)
        return found

    @cached_property
    def answers(self) -> Answers:
        """The answers for metrics; probabilities are of the classes alone, whatever outputs a model has beside them."""
        shares = None
        if self.logits is not None:  # classes in front: a metric reads one class after another
            shares = self.logits.mT.double().contiguous().softmax(0).numpy().T
        return Answers(self.predicted.numpy(), self.labels.numpy(), self.num_classes, shares)


@torch.no_grad()
def score_model(
    net: Net, state: State, x: Tensor, y: Tensor, num_classes: int, noise: Noise | None = None, *, keep: bool = False
) -> Score:
    """Score a model on data, in eval mode; `keep` keeps its outputs, for metrics of probabilities.

    Nothing waits for a GPU before the last batch is on its way.
    """
    state = state.to(net.device)
    predicted, losses, kept = [], [], []
    batch = forward_batch(net.device)
    for xs, ys in zip(x.split(batch), y.split(batch), strict=True):
        xs, ys = scaled(xs.to(net.device), net.input_dtype), ys.to(net.device)
        xs = net.laid_out(xs if noise is None else noise(xs))
        logits = net.eval_forward(state.params, state.buffers, xs).logits
        predicted.append(logits.argmax(1))
        losses.append(cross_entropy(logits, ys).sum())
        if keep:
            kept.append(logits[:, :num_classes].contiguous())  # a copy where there are more, so that they can go
    loss = sum(torch.stack(losses).tolist()) / len(y)
    return Score(torch.cat(predicted).cpu(), y.cpu(), num_classes, loss, torch.cat(kept).cpu() if keep else None)


def pooled(scores: list[Score]) -> Score:
    """Return the score on several data sets taken together."""
    if len(scores) == 1:
        return scores[0]
    total = sum(len(s.labels) for s in scores)
    logits = [s.logits for s in scores if s.logits is not None]
    return Score(
        torch.cat([s.predicted for s in scores]),
        torch.cat([s.labels for s in scores]),
        scores[0].num_classes,
        sum(s.loss * float(len(s.labels)) for s in scores) / float(total),
        torch.cat(logits) if len(logits) == len(scores) else None,
    )
