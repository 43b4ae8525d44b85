"""FedAvg: average the models of clients that trained for several epochs (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.types import Engine, LocalTask, State


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """x <- x + sum_i p_i (y_i - x), p_i the client's share of the cohort's examples."""

    traffic: ClassVar[str] = "1 model down, 1 up"

    objective = Objective()

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        task = LocalTask(self.objective, "local", state)
        got = engine.fold(cohort, task, mean=lambda r: {"moved": r.params - state.params})
        return state.step(got, state.params + got.mean["moved"])
