"""Class average feature norms, who is refined, and towards which norms: the paper's Algorithms 1 and 2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fnrfl.core.algorithm import class_indicator
from fnrfl.core.errors import ConfigError
from fnrfl.core.types import Batch, Out, Probe, Training, Tree

# -- Algorithm 1: class average feature norms -------------------------------------------------------------------------


def feature_norms(features: Tensor) -> Tensor:
    """U_i, the length of each example's features, [B]; with a gradient at zero too."""
    return (features.square().sum(-1) + 1e-12).sqrt()


@dataclass(frozen=True)
class ClassNorms(Probe):
    """F_i^k: the mean feature norm of each class that the data has; 0 for a class that it has not."""

    num_classes: int
    training: Training | None = None

    def __call__(self, out: Out, batch: Batch) -> Tree:
        hot = class_indicator(batch.y, self.num_classes).to(out.features.dtype)
        return {"sum": feature_norms(out.features) @ hot, "count": hot.sum(0)}

    def finish(self, total: Tree) -> Tree:
        return {"norms": total["sum"] / total["count"].clamp(min=1)}

    def accepts(self, answer: Tree, one: Tree, examples: float) -> bool:
        return bool((answer["norms"] >= 0).all())


class Accuracy(Probe):
    """A_i: the share of right answers."""

    def __call__(self, out: Out, batch: Batch) -> Tree:
        right = (out.logits.argmax(-1) == batch.y).to(out.logits.dtype)
        return {"right": right.sum(), "count": torch.ones_like(right).sum()}

    def finish(self, total: Tree) -> Tree:
        return {"accuracy": total["right"] / total["count"].clamp(min=1)}

    def accepts(self, answer: Tree, one: Tree, examples: float) -> bool:
        return 0 <= float(answer["accuracy"]) <= 1


@dataclass(frozen=True)
class ClassAccuracy(Probe):
    """The share of right answers of every class, nan for one that the data has not; for the event log."""

    num_classes: int

    def __call__(self, out: Out, batch: Batch) -> Tree:
        hot = class_indicator(batch.y, self.num_classes).to(out.logits.dtype)
        return {"right": (out.logits.argmax(-1) == batch.y).to(hot.dtype) @ hot, "count": hot.sum(0)}

    def finish(self, total: Tree) -> Tree:
        return {"accuracy": total["right"] / total["count"]}


class Recall(ClassAccuracy):
    """A_i as the released code has it: the mean of the accuracies of all classes that the data has."""

    def finish(self, total: Tree) -> Tree:
        right, count = total["right"].double(), total["count"].double()
        return {"accuracy": (right / count.clamp(min=1)).sum() / (count > 0).sum().clamp(min=1)}

    accepts = Accuracy.accepts


# -- Selection, and Algorithm 2: differences of feature norms ---------------------------------------------------------


def num_refined(cohort: int, share: float) -> int:
    """floor(m * p), with 0.7 * 10 taken for 7 although a float says 6.999..."""
    return math.floor(cohort * share + 1e-9)


def weakest(accuracy: Tensor, share: float) -> Tensor:
    """Rows of the floor(m * p) lowest accuracies, ties to the lower row, in ascending order.

    >>> weakest(torch.tensor([0.9, 0.2, 0.5, 0.2]), share=0.5)
    tensor([1, 3])
    """
    return accuracy.argsort(stable=True)[: num_refined(len(accuracy), share)].sort().values


def num_peers(cohort: int, refined: int, target: str) -> int:
    """How many clients' norms the target of a refined one is averaged over."""
    return cohort - refined if target == "others" else cohort - 1


def norm_targets(norms: Tensor, refined: Tensor, target: Literal["others", "all"]) -> Tensor:
    """What the class norms of each refined row should become, [R, C].

    others: the mean over the rows that are not refined, as in the paper; all: over all other rows, as in its code. A
    norm of 0 is that of a class without examples, and does not count. A row without others has no target: 0 for that
    class, which no penalty counts.

    >>> norm_targets(torch.tensor([[2.0, 1.0], [4.0, 3.0], [6.0, 0.0]]), torch.tensor([0]), "others")
    tensor([[5., 3.]])
    """
    if target not in ("others", "all"):
        raise ConfigError(f'target is {target!r}; it must be "others" or "all".')
    if not num_peers(len(norms), len(refined), target):
        return torch.zeros_like(norms[refined])
    weak = torch.zeros(len(norms), dtype=torch.bool, device=refined.device).index_fill(0, refined, True)
    if target == "others":
        peers = norms[~weak]
        counts = (peers > 0).sum(0).clamp(min=1).double()
        return (peers.mean(0) * (len(peers) / counts).to(norms)).expand(len(refined), -1)
    has = (norms > 0).int()
    return (norms.sum(0) - norms[refined]) / (has.sum(0) - has[refined]).clamp(min=1)


def norm_differences(norms: Tensor, refined: Tensor, target: Literal["others", "all"]) -> Tensor:
    """Delta_j of Algorithm 2: the sum over the others m of F_m - F_j, for every class, [R, C]."""
    peers = num_peers(len(norms), len(refined), target)
    return peers * (norm_targets(norms, refined, target) - norms[refined])
