"""Centralised: all private data in one place, the upper bound that federation gives up; a control."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.types import Engine, LocalTask, State


@dataclass(frozen=True)
class Centralised(Algorithm):
    """A round is `client.epochs` passes over everybody's examples, pooled and shuffled, whoever is in the cohort."""

    traffic: ClassVar[str] = "none"
    trains_clients: ClassVar[bool] = False

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        end = engine.fit(LocalTask(Objective(), "server", state, data="private"))
        return replace(state, params=end.params, buffers=end.buffers)
