"""The engine of a run, with everything that it is told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from fnrfl.config import RunConfig
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.feed import Feed
from fnrfl.core.messages import ClientSide
from fnrfl.core.net import Net
from fnrfl.core.network import NetworkOptions
from fnrfl.core.trees import Tree
from fnrfl.data.batches import Pool
from fnrfl.data.reading import Columns
from fnrfl.data.scaling import Scaling, ask_clients
from fnrfl.engines.assemble import Layout, assemble, assemble_trainer
from fnrfl.engines.federation import Federation
from fnrfl.engines.gpus import found_devices
from fnrfl.engines.ray.actors import RayActors
from fnrfl.engines.trainer import Trainer
from fnrfl.runs.choice import records_steps
from fnrfl.runs.cohorts import cohort_size


class ClientNetwork(Protocol):
    """Leads to clients on other machines."""

    def connect(
        self,
        run: str,
        net: Net,
        birth: Tree,
        feed: Feed,
        options: NetworkOptions,
        *,
        reads_memory: bool = False,
        scale: Tree | None = None,
    ) -> ClientSide:
        """Return the clients' side of a run; `birth` is what each remembers at first, `scale` how inputs are scaled.

        `reads_memory`: the method has personal models, which the server makes of clients' memories to score them.
        """
        ...


@dataclass(frozen=True)
class RunNetwork:
    """The network of one run."""

    network: ClientNetwork
    run: str  # its id, which names a folder at each node; the same when the run goes on


def build_engine(
    config: RunConfig,
    algorithm: Algorithm,
    net: Net,
    pool: Pool,
    scratch: Path | None,
    runs_alike: int | None = None,
    there: RunNetwork | RayActors | None = None,
    scaling: Scaling | None = None,
) -> Federation:
    """The engine that a resolved config names; `scratch` is a folder for what does not fit in memory.

    Of `runs_alike` runs each uses what is compiled for one. But a run that is to be the same to the last bit, alone or
    among others, decides alone. `there` is the way to clients on other machines, who are told `scaling`, or the actors
    that train clients.
    """
    if config.engine.name == "flower":
        return _remote_engine(config, algorithm, net, pool, there if isinstance(there, RunNetwork) else None, scaling)
    alone = config.engine.deterministic or config.engine.name != "gpu"
    return assemble(
        config.engine.name,  # type: ignore[arg-type]
        net,
        pool,
        config.client,
        seed=config.seed,
        client_memory=algorithm.client_state(net),
        layout=_layout(config, net, pool, scratch),
        rounds=config.rounds * (1 if alone else runs_alike or 1),
        participation=cohort_size(config) / config.clients,
        network=config.network,
        actors=there if isinstance(there, RayActors) else None,
    )


def build_trainer(config: RunConfig, net: Net, pool: Pool) -> Trainer:
    """What takes the steps of clients on a machine of their own, as the engine that the config names does."""
    return assemble_trainer(
        config.engine.name,  # type: ignore[arg-type]
        net,
        pool,
        seed=config.seed,
        layout=_layout(config, net, pool, None),
        rounds=config.rounds,
        participation=cohort_size(config) / config.clients,
    )


def _layout(config: RunConfig, net: Net, pool: Pool, scratch: Path | None) -> Layout:
    """How a resolved config uses the machine."""
    at_once, on_gpu = int(config.engine.clients_at_once), config.engine.name == "gpu"
    return Layout(
        threads=min(int(config.engine.threads), max(at_once, os.cpu_count() or 1)),  # each holds a net
        devices=_gpus(config) if on_gpu else (),
        tf32=config.engine.precision == "tf32",
        record=records_steps(config, net, int(pool.examples.max())),
        clients_at_once=at_once,
        folder=scratch if at_once < cohort_size(config) and not on_gpu else None,
        memory_on_host=on_gpu and at_once < config.clients,
    )


def refuse_without_network(config: RunConfig, connection: RunNetwork | None) -> None:
    """Refuse a run whose clients are on other machines, where nothing leads to them; before any data is looked for."""
    if config.engine.name == "flower" and connection is None:
        raise CompatibilityError(
            'engine = "flower" needs clients on a network, and there is none here. `fnrfl deploy init FOLDER RECIPE` '
            "makes a Flower app of a recipe, and `fnrfl deploy run FOLDER --resume RUN_DIR` goes on with a run. To "
            "simulate the clients on this machine, leave engine out."
        )


def _remote_engine(
    config: RunConfig,
    algorithm: Algorithm,
    net: Net,
    pool: Pool,
    connection: RunNetwork | None,
    scaling: Scaling | None,
) -> Federation:
    """An engine whose clients are on other machines; what the server does itself, it does as the loop engine."""
    assert connection is not None
    here = assemble("loop", net, pool, config.client, seed=config.seed, rounds=config.rounds)
    clients = connection.network.connect(
        connection.run,
        net,
        algorithm.client_state(net),
        pool,
        config.network,
        reads_memory=algorithm.personalised,
        scale=None if scaling is None else scaling.as_tree(),
    )
    return Federation(
        clients,
        here.server,
        config.client,
        seed=config.seed,
        rounds=config.rounds,
        network=config.network,
        simulated=False,
    )


def ask_for_scaling(
    config: RunConfig, net: Net, pool: Pool, columns: Columns | None, connection: RunNetwork | None = None
) -> Scaling:
    """What the clients answer about their inputs, before there is a model that could be trained."""
    layout = Layout(threads=1 if config.engine.name == "gpu" else int(config.engine.threads))
    with assemble("loop", net, pool.in_type(torch.float64), config.client, seed=config.seed, layout=layout) as engine:
        if connection is not None:
            engine.clients = connection.network.connect(connection.run, net, {}, pool, config.network)
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
