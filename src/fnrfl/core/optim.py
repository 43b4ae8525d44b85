"""SGD with momentum and Adam on a flat vector, in place.

torch.optim would do the same, but its first object costs two seconds of imports and it does not know `travel`: the sum
of the coefficients with which raw gradients entered the displacement. With momentum rho, a gradient of step k enters
all later steps, so `count <- rho * count + 1; travel <- travel + lr * count` (FedNova's a_i and SCAFFOLD's divisor).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fnrfl.core.types import Flat, Training, Tree

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def new_memory(training: Training, params: Flat) -> Tree:
    """The optimiser's memory at the start of a task; `params` is [P] or [M, P]."""
    count = params.new_zeros(params.shape[:-1])
    if training.optimizer == "adam":
        return {"first": torch.zeros_like(params), "second": torch.zeros_like(params), "count": count}
    return {"velocity": torch.zeros_like(params), "count": count} if training.momentum else {"count": count}


def update(training: Training, lr: float, params: Flat, grad: Flat, memory: Tree, travel: Tensor) -> None:
    """Take one step of one client: `params`, `memory` and `travel` change in place."""
    count = memory["count"]
    if training.optimizer == "adam":
        count.add_(1.0)
        memory["first"].mul_(BETA1).add_(grad, alpha=1 - BETA1)
        memory["second"].mul_(BETA2).add_(grad.square(), alpha=1 - BETA2)
        size = (memory["second"] / (1 - BETA2**count)).sqrt_().add_(EPS)
        params.sub_(lr * (memory["first"] / (1 - BETA1**count)) / size)
        travel.fill_(torch.nan)  # not linear in the gradients
        return
    if training.momentum:
        grad = memory["velocity"].mul_(training.momentum).add_(grad)
    count.mul_(training.momentum).add_(1.0)
    params.add_(grad, alpha=-lr)
    travel.add_(count, alpha=lr)
