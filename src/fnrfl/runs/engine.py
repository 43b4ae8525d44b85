"""The engine of a run, with everything that it is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from fnrfl.config import RunConfig
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.net import Net
from fnrfl.core.types import Training
from fnrfl.data.batches import Pool
from fnrfl.data.splits import Splits
from fnrfl.engines import gpu
from fnrfl.engines.base import InProcess
from fnrfl.engines.batched import Batched
from fnrfl.engines.loop import Loop
from fnrfl.runs.choice import records_steps
from fnrfl.runs.cohorts import cohort_size

ENGINES: dict[str, Callable[..., InProcess]] = {"loop": Loop, "batched": Batched, "gpu": gpu.Gpu}


def build_engine(
    config: RunConfig,
    algorithm: Algorithm,
    net: Net,
    pool: Pool,
    training: Training,
    splits: Splits,
    scratch: Path | None,
) -> InProcess:
    """The engine that a resolved config names; `scratch` is a folder for what does not fit in memory."""
    at_once = config.engine.clients_at_once
    on_gpu = config.engine.name == "gpu"
    threads = min(int(config.engine.threads), max(int(at_once), os.cpu_count() or 1))  # each holds a net
    return ENGINES[config.engine.name](
        net,
        pool,
        training,
        seed=config.seed,
        lr_decay=config.client.lr_decay,
        client_state=algorithm.client_state(net),
        clients_at_once=int(at_once),
        **_on_gpus(config) if on_gpu else {"threads": threads},
        trace=records_steps(config, net, splits),
        stragglers=config.client.stragglers,
        dropout=config.client.dropout,
        nonfinite=config.client.nonfinite,
        rounds=config.rounds,
        participation=cohort_size(config) / config.clients,
        folder=scratch if int(at_once) < cohort_size(config) and not on_gpu else None,
        home=torch.device("cpu") if on_gpu and int(at_once) < config.clients else None,
    )


def _on_gpus(config: RunConfig) -> dict[str, object]:
    """What the GPU's engine is told beside what all are told."""
    found, asked = gpu.devices(), int(config.engine.threads)
    if len(found) < asked:
        raise CompatibilityError(
            f"engine.threads = {asked} asks for as many GPUs, and there are {len(found)}. Set it to {len(found)}."
        )
    return {"devices": found[:asked], "tf32": config.engine.precision == "tf32"}
