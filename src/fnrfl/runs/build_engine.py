"""The engine of a run, with everything that it is told."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fnrfl.config import RunConfig
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.net import Net
from fnrfl.data.batches import Pool
from fnrfl.data.reading import Columns
from fnrfl.data.scaling import Scaling, ask_clients
from fnrfl.data.splits import Splits
from fnrfl.engines.assemble import Layout, assemble
from fnrfl.engines.federation import Federation
from fnrfl.engines.gpus import found_devices
from fnrfl.engines.ray_actors import RayActors
from fnrfl.runs.choice import records_steps
from fnrfl.runs.cohorts import cohort_size


def build_engine(
    config: RunConfig,
    algorithm: Algorithm,
    net: Net,
    pool: Pool,
    splits: Splits,
    scratch: Path | None,
    runs_alike: int = 1,
    actors: RayActors | None = None,
) -> Federation:
    """The engine that a resolved config names; `scratch` is a folder for what does not fit in memory.

    Of `runs_alike` runs each uses what is compiled for one. But a run that is to be the same to the last bit, alone or
    among others, decides alone. `actors` train the clients of the engine "ray".
    """
    alone = config.engine.deterministic or config.engine.name != "gpu"
    at_once = config.engine.clients_at_once
    on_gpu = config.engine.name == "gpu"
    threads = min(int(config.engine.threads), max(int(at_once), os.cpu_count() or 1))  # each holds a net
    return assemble(
        config.engine.name,  # type: ignore[arg-type]
        net,
        pool,
        config.client,
        seed=config.seed,
        client_memory=algorithm.client_state(net),
        layout=Layout(
            threads=threads,
            devices=_gpus(config) if on_gpu else (),
            tf32=config.engine.precision == "tf32",
            record=records_steps(config, net, splits),
            clients_at_once=int(at_once),
            folder=scratch if int(at_once) < cohort_size(config) and not on_gpu else None,
            memory_on_host=on_gpu and int(at_once) < config.clients,
        ),
        rounds=config.rounds * (1 if alone else runs_alike),
        participation=cohort_size(config) / config.clients,
        network=config.network,
        actors=actors,
    )


def ask_for_scaling(config: RunConfig, net: Net, pool: Pool, columns: Columns | None) -> Scaling:
    """What the clients answer about their inputs, before there is a model that could be trained."""
    layout = Layout(threads=1 if config.engine.name == "gpu" else int(config.engine.threads))
    with assemble("loop", net, pool.in_type(torch.float64), config.client, seed=config.seed, layout=layout) as engine:
        gaps = config.dataset.missing == "mean"
        return ask_clients(engine, f'dataset = "{config.dataset.name}"', gaps=gaps, columns=columns)


def _gpus(config: RunConfig) -> list[torch.device]:
    """The GPUs that a run uses."""
    devices, asked = found_devices(), int(config.engine.threads)
    if len(devices) < asked:
        raise CompatibilityError(
            f"engine.threads = {asked} asks for as many GPUs, and there are {len(devices)}. Set it to {len(devices)}."
        )
    return devices[:asked]
