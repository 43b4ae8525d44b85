"""The method that a config names, and how many clients take part in its rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from fnrfl.algorithms.fnr import FNR
from fnrfl.config import RunConfig, registry
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.options import values_of
from fnrfl.core.rng import generator
from fnrfl.engines.federation import num_drawn
from fnrfl.runs.passed import NOTHING_PASSED, PassedObjects


def build_algorithm(config: RunConfig, passed: PassedObjects = NOTHING_PASSED) -> Algorithm:
    """Return the method that a config names or that was passed, with FNR around it if that is on."""
    inner = passed.find("algorithm", config.algorithm.name)
    inner = inner or registry.load_method(config.algorithm.name)(**config.algorithm.options)
    if config.fnr is None:
        return inner
    return FNR(
        inner=inner,
        **values_of(config.fnr),
        ranking="recall" if config.protocol == "paper" else "accuracy",
        shuffle=config.protocol != "paper",
        norm_pass_train_mode=config.leaks.norm_pass_train_mode,
    )


def method_title(config: RunConfig) -> str:
    """Return what sentences call the method."""
    return f"fnr around {config.algorithm.name}" if config.fnr is not None else config.algorithm.name


def cohort_size(config: RunConfig) -> int:
    """Return how many clients are active in a round."""
    return max(1, round(config.participation * config.clients))


def cohort(config: RunConfig, t: int) -> Tensor:
    """Return the clients of round t, ascending."""
    order = torch.randperm(config.clients, generator=generator(config.seed, t, "cohort"))
    return order[: cohort_size(config)].sort().values


def num_answers(config: RunConfig) -> int:
    """Return how many clients of a cohort answer in a round: the replies of the others are lost."""
    asked = cohort_size(config)
    return asked - num_drawn(asked, config.client.dropout)
