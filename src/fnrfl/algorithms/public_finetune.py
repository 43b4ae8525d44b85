"""Public-finetune: FedAvg whose average the server trains on the labelled public data; a control for FNR."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.core.algorithm import Objective, option
from fnrfl.core.types import Engine, LocalTask, State


@dataclass(frozen=True)
class PublicFinetune(FedAvg):
    """What labelled public data is worth without choosing clients and without a penalty."""

    needs: ClassVar[frozenset[str]] = frozenset({"public-labels"})

    epochs: int = option(5, "passes of the server over the public data in a round", ge=0)
    batch: int = option(32, "examples per step", ge=1)
    lr: float | Literal["client"] = option("client", "learning rate; client: the local one", gt=0.0)
    optimizer: Literal["client", "sgd", "adam", "adamw"] = option("client", "optimiser, a fresh one each round")
    batchnorm: Literal["frozen", "batch", "updating"] = option(
        "updating", "updating: train mode; batch: batch statistics, none stored; frozen: eval mode"
    )
    augment: bool = option(False, "crop and flip public images")

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        average = super().round(state, cohort, engine)
        training = engine.training.but(
            epochs=self.epochs, batch=self.batch, lr=self.lr, optimizer=self.optimizer, batchnorm=self.batchnorm,
            augment=self.augment,
        )  # fmt: skip
        tuned = engine.fit(LocalTask(Objective(), "finetune", average, data="public", training=training))
        return replace(average, params=tuned.params, buffers=tuned.buffers)
