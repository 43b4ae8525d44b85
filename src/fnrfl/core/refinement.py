"""What FNR takes: the `[fnr]` section of a config, and the fields of the class FNR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fnrfl.core.options import option
from fnrfl.core.training import BatchNormMode


@dataclass(frozen=True, kw_only=True)
class FnrOptions:
    """Whom FNR refines, towards what, and how a refined client takes its steps."""

    share: float = option(
        0.5, "p: floor(p * cohort) clients with the lowest ranking accuracy are refined", ge=0.0, le=1.0
    )
    weight: float = option(0.1, "lambda: weight of the penalty", ge=0.0)
    penalty: Literal["relative", "squared", "absolute", "huber", "per-sample", "log-ratio", "literal", "constant"] = (
        option("relative", "how class norms are compared with their targets; constant is the paper's, without gradient")
    )
    target: Literal["others", "all"] = option(
        "others", "targets averaged over the unrefined clients (the paper) or all other clients (its code)"
    )
    when: Literal["refine", "local", "both"] = option(
        "refine", "penalty in the refinement (the paper), in local training towards the last round's norms, or both"
    )
    epochs: int = option(5, "passes over the public data", ge=0)
    batch: int = option(32, "examples per refinement step", ge=1)
    lr: float | Literal["client"] = option("client", "learning rate of refinement; client: the local one", gt=0.0)
    optimizer: Literal["client", "sgd", "adam"] = option("client", "optimiser of refinement; always a fresh one")
    batchnorm: BatchNormMode = option(
        "updating", "updating: train mode, the paper's code; batch: batch statistics, none stored; frozen: eval mode"
    )
    upload: Literal["once", "twice"] = option(
        "once", "once: each client uploads one model, after ranking; twice: the paper's text"
    )
    augment: bool = option(False, "crop and flip public images while refining")
    watch: bool = option(
        False, "log how each pair of clients differs, and each refined client's accuracy by class; changes no model"
    )
