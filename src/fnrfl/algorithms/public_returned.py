"""Public-returned: FedAvg without a public set, its examples back with the clients; what setting it aside costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.core.algorithm import PublicTo


@dataclass(frozen=True)
class PublicReturned(FedAvg):
    """FedAvg on what was left to client i and its part of the public data, class by class as it holds them."""

    needs: ClassVar[frozenset[str]] = frozenset({"public-labels"})
    public_to: ClassVar[PublicTo] = "owners"  # the rounds are FedAvg's
