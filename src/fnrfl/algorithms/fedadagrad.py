"""FedAdagrad: the server's steps shrink where displacements have added up (Reddi et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from fnrfl.algorithms._optimised import Adaptive
from fnrfl.core.algorithm import option
from fnrfl.core.types import Flat


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """v <- v + D^2; x <- x + server_lr m / (sqrt(v) + tau), m being D itself unless beta1 is set."""

    server_lr: float = option(0.03, "step size of the server: how far a parameter moves in the first round", gt=0.0)
    beta1: float = option(0.0, "how much of the mean displacement is kept; Adagrad has no momentum", ge=0.0, le=0.9999)

    def second(self, v: Flat, square: Flat) -> Flat:
        return v + square
