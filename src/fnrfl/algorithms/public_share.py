"""Public-share: FedAvg whose clients all train on the public data too, as a control for methods that use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.core.algorithm import PublicTo


@dataclass(frozen=True)
class PublicShare(FedAvg):
    """FedAvg on D_i and all public data together, p_i counting both: here public examples are training data."""

    needs: ClassVar[frozenset[str]] = frozenset({"public-labels"})
    traffic: ClassVar[str] = "1 model down, 1 up; all public data to every client once, not counted"
    public_to: ClassVar[PublicTo] = "everybody"  # the rounds are FedAvg's
