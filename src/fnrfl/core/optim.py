"""SGD with momentum, Adam and AdamW on a flat vector, in place.

torch.optim would do the same, but its first object costs two seconds of imports and it does not know `travel`: the sum
of the coefficients with which raw gradients entered the displacement. With momentum rho, a gradient of step k enters
all later steps: `count <- rho * count + 1; travel <- travel + lr * count` (FedNova's a_i and SCAFFOLD's divisor).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fnrfl.core.training import Training
from fnrfl.core.trees import Tree
from fnrfl.core.values import Flat

ADAM_BETA1, ADAM_BETA2, ADAM_EPS = 0.9, 0.999, 1e-8


def new_memory(training: Training, params: Flat) -> Tree:
    """The optimiser's memory at the start of a task; `params` is [P] or [M, P]."""
    if training.optimizer != "sgd":
        count = params.new_zeros(params.shape[:-1])
        return {"first": torch.zeros_like(params), "second": torch.zeros_like(params), "count": count}
    return {"velocity": torch.zeros_like(params)} if training.momentum else {}


def update(
    training: Training, lr: float | Tensor, params: Flat, grad: Flat, memory: Tree, decayed: Flat | None = None
) -> None:
    """Take one step of one client: `params` and `memory` change in place; AdamW shrinks what is `decayed`."""
    if training.optimizer != "sgd":
        count = memory["count"].add_(1.0)
        memory["first"].mul_(ADAM_BETA1).add_(grad, alpha=1 - ADAM_BETA1)
        memory["second"].mul_(ADAM_BETA2).add_(grad.square(), alpha=1 - ADAM_BETA2)
        size = (memory["second"] / (1 - ADAM_BETA2**count)).sqrt_().add_(ADAM_EPS)
        grad = memory["first"] / (1 - ADAM_BETA1**count) / size
        if decayed is not None:
            grad = grad.add_(decayed, alpha=training.weight_decay)
    elif training.momentum:
        grad = memory["velocity"].mul_(training.momentum).add_(grad)
    if isinstance(lr, Tensor):
        params.sub_(grad * lr)
    else:  # without a vector in between
        params.add_(grad, alpha=-lr)


def travel(training: Training, steps: int) -> float:
    """The sum of the coefficients of the raw gradients after some steps; nan for Adam, which is not linear in them.

    >>> round(travel(Training(lr=1.0, momentum=0.9), 20), 4)
    120.9419
    """
    if training.optimizer != "sgd":
        return math.nan
    total = count = 0.0
    for _ in range(steps):
        count = training.momentum * count + 1
        total += training.lr * count
    return total
