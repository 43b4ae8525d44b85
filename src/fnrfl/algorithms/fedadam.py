"""FedAdam: Adam on the server, over the rounds' displacements (Reddi et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from fnrfl.algorithms._optimised import Adaptive
from fnrfl.algorithms.parts import optimisers
from fnrfl.core.algorithm import option
from fnrfl.core.types import Flat


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """v <- beta2 v + (1 - beta2) D^2; x <- x + server_lr m / (sqrt(v) + tau)."""

    beta2: float = option(0.99, "how much of the mean squared displacement is kept", ge=0.0, le=0.9999)
    correction: bool = option(
        False, "make up for moments that begin at zero, as the authors' code does and their paper does not"
    )

    def second(self, v: Flat, square: Flat) -> Flat:
        return optimisers.average(v, square, self.beta2)

    def rate(self, t: int) -> float:
        return self.server_lr * (optimisers.correction(t, self.beta1, self.beta2) if self.correction else 1.0)
