"""Public-only: the server trains on the labelled public data alone, and no client takes part; a control."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fnrfl.core.algorithm import Algorithm, Objective, option
from fnrfl.core.types import Engine, LocalTask, State


@dataclass(frozen=True)
class PublicOnly(Algorithm):
    """What the public data is worth without a federation. Nothing crosses, so there is nothing to refine."""

    traffic: ClassVar[str] = "none"
    needs: ClassVar[frozenset[str]] = frozenset({"public-labels"})
    trains_clients: ClassVar[bool] = False

    epochs: int = option(5, "passes over the public data in a round", ge=0)
    batch: int = option(32, "examples per step", ge=1)
    lr: float | Literal["client"] = option("client", "learning rate; client: the local one", gt=0.0)
    optimizer: Literal["client", "sgd", "adam", "adamw"] = option("client", "optimiser, a fresh one each round")

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        training = engine.training.but(epochs=self.epochs, batch=self.batch, lr=self.lr, optimizer=self.optimizer)
        end = engine.fit(LocalTask(Objective(), "server", state, data="public", training=training))
        return replace(state, params=end.params, buffers=end.buffers)
