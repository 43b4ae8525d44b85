"""What `auto` stands for: which engine trains, how many clients it trains at once, and whether it records steps."""

from __future__ import annotations

import os

import torch

from fnrfl.config import RunConfig
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.net import Net
from fnrfl.data.splits import Splits
from fnrfl.engines.gpus import clients_that_fit, found_devices
from fnrfl.engines.groups import GROUP_SIZE
from fnrfl.runs.cohorts import cohort_size

SMALL = 1_000_000  # parameters times batch of a dense net up to which clients step together
WORTH_RECORDING = 300  # steps of groups of clients in a run, on a CPU
WORTH_CAPTURING = 100  # steps of groups of clients in a run, on a GPU
CHUNK_BYTES = 4 << 30  # what the models of clients trained together may take, eight copies each


def choose_engine(config: RunConfig, net: Net) -> RunConfig:
    """What `auto` stands for: a fixed rule of model, machine and cohort, never a stopwatch, so that runs repeat."""
    engine, cohort = config.engine, cohort_size(config)
    name = engine.name
    if name == "auto":  # stepping together pays where a step is so small that its overhead dominates
        small = not net.convolutional and net.size * config.client.batch <= SMALL
        name = "batched" if small and cohort > 1 else "gpu" if torch.cuda.is_available() and not small else "loop"
    if name == "gpu":
        found = len(found_devices())
    elif engine.precision in ("tf32", "bf16"):
        raise CompatibilityError(
            f'engine.precision = "{engine.precision}" needs a GPU, and engine.name = "{name}" runs on the CPU. Set '
            'engine.precision = "float32" or "float64".'
        )
    threads = engine.threads
    if threads == "auto":
        threads = max(1, min(cohort, found if name == "gpu" else os.cpu_count() or 1))
    at_once = engine.clients_at_once
    if at_once == "auto" and name == "gpu":
        at_once = clients_that_fit(net.size, net.dtype.itemsize, cohort)
    elif at_once == "auto":
        at_once = max(int(threads), min(cohort, CHUNK_BYTES // (8 * 4 * net.size)))
    return config.replace(
        {"engine": {"name": name, "threads": int(threads), "clients_at_once": min(cohort, int(at_once))}}
    )


def records_steps(config: RunConfig, net: Net, splits: Splits) -> bool:
    """Whether steps are recorded: recording one takes as long as some hundred steps, and large steps gain nothing."""
    steps = config.rounds * -(-config.client.epochs * max(map(len, splits.clients)) // config.client.batch)
    steps *= -(-cohort_size(config) // GROUP_SIZE)
    on_gpu = config.engine.name == "gpu"
    pays = steps >= WORTH_CAPTURING if on_gpu else steps >= WORTH_RECORDING and not net.convolutional
    return config.engine.accelerate and pays
