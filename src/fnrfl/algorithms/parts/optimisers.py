"""The server as an optimiser: a round's displacement of the model is a gradient that points downhill already.

D is what a method's own round adds to the model; m and v are its moments, numbers per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from fnrfl.core.types import Decorator, Engine, Flat, LocalTask, Replies


def momentum(m: Flat, D: Flat, beta: float) -> Flat:
    """beta m + D, not damped: under a constant D it grows to D / (1 - beta)."""
    return beta * m + D


def average(m: Flat, D: Flat, beta: float) -> Flat:
    """beta m + (1 - beta) D: under a constant D it goes to D."""
    return beta * m + (1 - beta) * D


def yogi(v: Flat, square: Flat, beta: float) -> Flat:
    """v - (1 - beta) D^2 sign(v - D^2): towards D^2 by steps as long as D^2 allows; it never falls below zero."""
    return v - (1 - beta) * square * (v - square).sign()


def adaptive(m: Flat, v: Flat, tau: float) -> Flat:
    """m / (sqrt(v) + tau)."""
    return m / (v.sqrt() + tau)


def correction(t: int, beta1: float, beta2: float) -> float:
    """What makes up for moments that began at zero, t rounds ago; tau is not corrected, as in Keras."""
    return math.sqrt(1 - beta2**t) / (1 - beta1**t)


class Apart(Decorator):
    """An engine that hands over models as private training left them, and keeps the mean of the refinement apart."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._total: Tensor | float = 0.0
        self._examples = 0.0

    @property
    def refinement(self) -> Tensor | float:
        """sum_i p_i (z_i - y_i) of what has passed."""
        return self._total / self._examples if self._examples else 0.0

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        for replies in self.engine.stream(cohort, task):
            if task.is_private_training and task.send_model:
                shares = replies.examples.to(replies.params.dtype)
                self._total = self._total + shares @ (replies.params - replies.trained)
                self._examples += float(shares.sum())
                replies = replace(replies, refined=None)
            yield replies
