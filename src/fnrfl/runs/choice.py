"""What `auto` stands for: how inputs are scaled, the engine, its precision, how many clients it trains at once."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from fnrfl.config import RunConfig, registry
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.net import Net
from fnrfl.core.words import INPUT_SCALE
from fnrfl.data.datasets import Dataset
from fnrfl.engines.gpus import clients_that_fit, found_devices
from fnrfl.engines.groups import GROUP_SIZE
from fnrfl.runs.cohorts import cohort_size
from fnrfl.runs.vmap_support import VmapError, vmap_failure

SMALL = 1_000_000  # parameters times batch of a dense net up to which clients step together
WORTH_RECORDING = 50  # steps of groups of clients in a run, on a CPU
WORTH_RECORDING_LARGE = 300  # the same where a step has convolutions, which take most of its time
WORTH_CAPTURING = 100  # steps of groups of clients in a run, on a GPU
CHUNK_BYTES = 4 << 30  # what the models of clients trained together may take, eight copies each


def choose_scale(config: RunConfig, dataset: Dataset, net: Net) -> RunConfig:
    """What `dataset.scale = "auto"` stands for: a user's own numbers and pixels are scaled, tokens cannot be.

    The named data sets are not, so that results can be compared with those that others have printed.
    """
    if config.dataset.scale != "auto":
        return config
    own = dataset.name not in registry.DATASETS and net.input_dtype.is_floating_point
    own = own and INPUT_SCALE not in dict(net.module.named_children())  # a trained model that scales by itself
    return replace(config, dataset=replace(config.dataset, scale="standard" if own else "none"))


def choose_engine(config: RunConfig, net: Net) -> tuple[RunConfig, tuple[str, ...]]:
    """What `auto` stands for: a fixed rule of model, machine and cohort, never a stopwatch, so that runs repeat.

    With it come notices: if there is no GPU, if the clients of a user's own model cannot step together, or not in bf16.
    """
    engine, cohort = config.engine, cohort_size(config)
    name, on_engine = _name_that_can(config, net)
    precision, on_precision = _precision_that_can(config, net, name)
    workers = _num_workers(config, name)
    threads = max(1, min(cohort, workers)) if engine.threads == "auto" else int(engine.threads)
    at_once = engine.clients_at_once
    if at_once == "auto" and name == "gpu":
        at_once = clients_that_fit(net.size, net.dtype.itemsize, cohort)
    elif at_once == "auto":
        at_once = max(threads, CHUNK_BYTES // (8 * 4 * net.size))
    chosen: dict[str, Any] = {
        "name": name,
        "precision": precision,
        "threads": threads,
        "clients_at_once": min(cohort, int(at_once)),
    }
    return replace(config, engine=replace(config.engine, **chosen)), (*on_engine, *on_precision)


def _name_that_can(config: RunConfig, net: Net) -> tuple[str, tuple[str, ...]]:
    """The engine, and a notice if it is not the one that somebody may expect."""
    auto = config.engine.name == "auto"
    name = _chosen_name(config, net) if auto else config.engine.name
    if auto and name == "loop" and not torch.cuda.is_available():
        return name, ("engine = auto found no GPU and runs on the CPU.",)
    tried = name in ("batched", "gpu")
    why = vmap_failure(config, net, name, loops=name == "gpu" or not auto) if tried else None
    if why is None:
        return name, ()
    if not auto:
        raise VmapError(f'engine = "{name}"', config.model.name, why, 'Set engine = "loop" or "auto"')
    return "loop", (f"engine = auto trains the clients one after another, on the CPU: {why}.",)


def _precision_that_can(config: RunConfig, net: Net, engine: str) -> tuple[str, tuple[str, ...]]:
    """The precision, and a notice if a user's own model does not compute in bf16."""
    precision = _chosen_precision(config, net, engine)
    tried = engine == "gpu" and precision == "bf16"
    why = vmap_failure(config, net, engine, loops=True, compute=torch.bfloat16) if tried else None
    if why is None:
        return precision, ()
    if config.engine.precision != "auto":
        raise CompatibilityError(
            f'engine.precision = "bf16" does not go with model = "{config.model.name}" ({why}). Set engine.precision = '
            '"float32" or "auto", or change the model.'
        )
    return "float32", (f"engine.precision = auto is float32, for the model does not compute in bf16: {why}.",)


def _num_workers(config: RunConfig, engine: str) -> int:
    """Who can work side by side: GPUs, cores, or as many Ray actors as this machine has room for."""
    if engine == "gpu":
        return len(found_devices())
    cores, network = os.cpu_count() or 1, config.network
    if engine != "ray" or config.engine.threads != "auto":
        return cores
    if network.address:
        raise CompatibilityError(
            f'network.address = "{network.address}" is a cluster, and engine.threads = "auto" counts the cores of this '
            "machine. Set engine.threads to the number of Ray actors."
        )
    if not network.gpus:
        return int(max(1, cores / network.cpus))
    way_out = (
        "Set network.gpus = 0: actors then train on the CPU. For a cluster, set network.address and engine.threads."
    )
    return int(len(found_devices(f'engine = "ray" with network.gpus = {network.gpus:g}', way_out)) / network.gpus)


def _chosen_name(config: RunConfig, net: Net) -> str:
    """Stepping together on a CPU pays where a step is so small that its overhead dominates."""
    if not net.convolutional and net.size * config.client.batch <= SMALL:
        return "batched" if cohort_size(config) > 1 else "loop"
    return "gpu" if torch.cuda.is_available() else "loop"


def _chosen_precision(config: RunConfig, net: Net, engine: str) -> str:
    """bf16 where it was compared with float32 on paired seeds and loses nothing: convolutions on a GPU."""
    precision = config.engine.precision
    if precision == "auto":
        return "bf16" if engine == "gpu" and net.convolutional and torch.cuda.is_bf16_supported(False) else "float32"
    on_gpu = engine == "gpu" or (engine == "ray" and config.network.gpus > 0)
    if precision in ("tf32", "bf16") and not on_gpu:
        raise CompatibilityError(
            f'engine.precision = "{precision}" needs a GPU, and engine.name = "{engine}" runs on the CPU. Set '
            'engine.precision = "auto", "float32" or "float64".'
        )
    return precision


def records_steps(config: RunConfig, net: Net, most_examples: int) -> bool:
    """Whether steps are recorded: recording one takes as long as some twenty steps, and large steps gain little.

    `most_examples` is what the client with the most holds.
    """
    steps = config.rounds * -(-config.client.epochs * most_examples // config.client.batch)
    steps *= -(-cohort_size(config) // (GROUP_SIZE if config.engine.name in ("batched", "gpu") else 1))
    least = WORTH_RECORDING_LARGE if net.convolutional else WORTH_RECORDING
    return config.engine.accelerate and steps >= (WORTH_CAPTURING if config.engine.name == "gpu" else least)
