"""Who takes part in a round, and how many of them answer."""

from __future__ import annotations

import torch
from torch import Tensor

from fnrfl.config import RunConfig
from fnrfl.core.rng import generator
from fnrfl.engines.federation import num_drawn


def cohort_size(config: RunConfig) -> int:
    """How many clients are active in a round."""
    return max(1, round(config.participation * config.clients))


def cohort(config: RunConfig, t: int) -> Tensor:
    """The clients of round t, ascending."""
    order = torch.randperm(config.clients, generator=generator(config.seed, t, "cohort"))
    return order[: cohort_size(config)].sort().values


def num_answers(config: RunConfig) -> int:
    """How many clients of a cohort answer in a round: the replies of the others are lost."""
    asked = cohort_size(config)
    return asked - num_drawn(asked, config.client.dropout)
