"""FedProx: keep local models near the server model by mu/2 ||y - x||^2 (Li et al., MLSys 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.core.algorithm import Objective, option
from fnrfl.core.types import Flat, Tree


@dataclass(frozen=True)
class Proximal(Objective):
    """Cross-entropy with a pull to the model received."""

    mu: float

    def correct(self, grad: Flat, params: Flat, start: Flat, shared: Tree, own: Tree) -> Flat:
        return grad + self.mu * (params - start)  # the gradient of mu/2 ||y - x||^2, before momentum


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients minimise f_i(y) + mu/2 ||y - x||^2."""

    mu: float = option(0.01, "strength of the pull to the server model; the paper's grid is 0.001 to 1", ge=0.0)

    @property
    def objective(self) -> Objective:  # type: ignore[override]
        return Proximal(self.mu)
