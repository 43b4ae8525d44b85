"""FedAvgM: momentum on the server, over the rounds' displacements (Hsu, Qi, Brown, 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fnrfl.algorithms._optimised import Optimised
from fnrfl.algorithms.parts import optimisers
from fnrfl.core.algorithm import option
from fnrfl.core.types import Flat, Tree


@dataclass(frozen=True)
class FedAvgM(Optimised):
    """m <- beta m + D; x <- x + server_lr m. With beta = 0 and server_lr = 1 it is the inner method."""

    server_lr: float = option(1.0, "step size of the server", gt=0.0)
    beta: float = option(0.9, "momentum; displacements that agree end up 1 / (1 - beta) as long", ge=0.0, le=0.9999)

    def memory(self, params: Flat) -> Tree:
        return {"server.m": torch.zeros_like(params)}

    def step(self, D: Flat, memory: Tree, t: int) -> tuple[Flat, Tree]:
        m = optimisers.momentum(memory["server.m"], D, self.beta)
        return self.server_lr * m, {"server.m": m}
