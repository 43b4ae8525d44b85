"""FedYogi: Adam on the server whose second moment falls slowly (Reddi et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from fnrfl.algorithms.fedadam import FedAdam
from fnrfl.algorithms.parts import optimisers
from fnrfl.core.types import Flat


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """v <- v - (1 - beta2) D^2 sign(v - D^2); x <- x + server_lr m / (sqrt(v) + tau)."""

    def second(self, v: Flat, square: Flat) -> Flat:
        return optimisers.yogi(v, square, self.beta2)
