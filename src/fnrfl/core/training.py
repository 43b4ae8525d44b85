"""How steps are taken: the options of local training and of refinement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Training:
    """How a client takes its steps: the `[client]` section for local training, part of `[fnr]` for refinement."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    batch: int = 64
    epochs: int = 10
    last_batch: Literal["run-on", "keep", "drop", "even"] = "run-on"
    shuffle: bool = True
    augment: bool = False
    batchnorm: Literal["updating", "batch", "frozen"] = "updating"
    frozen: frozenset[str] = frozenset()  # parameters that stay as they are

    def but(self, **options: object) -> Training:
        """The same with other options; "client" leaves one as it is."""
        return replace(self, **{k: v for k, v in options.items() if v != "client"})  # type: ignore[arg-type]
