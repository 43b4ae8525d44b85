"""Engines, put together from their parts: which, is a table of ARCHITECTURE.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fnrfl.core.feed import Feed
from fnrfl.core.fold import FOLD_ROWS
from fnrfl.core.net import Net
from fnrfl.core.options import NetworkOptions
from fnrfl.core.store import CPU, ClientStore
from fnrfl.core.training import ClientOptions
from fnrfl.core.trees import Tree
from fnrfl.engines.devices import Threads
from fnrfl.engines.federation import Federation
from fnrfl.engines.gpus import Gpus
from fnrfl.engines.groups import GROUP_SIZE, StepEstimate
from fnrfl.engines.kept_clients import KeptClients
from fnrfl.engines.one_by_one import OneByOne
from fnrfl.engines.ray.actors import RayActors
from fnrfl.engines.ray.trainer import RayTrainer
from fnrfl.engines.recorder.cuda_graphs import CudaGraphs
from fnrfl.engines.recorder.recorder import Recorder
from fnrfl.engines.recorder.torchscript import TorchScript
from fnrfl.engines.trainer import Trainer
from fnrfl.engines.vectorised import Vectorised

BLOCK_BYTES = 24 << 20  # models that stay in a processor's cache from their first step to their average
EngineName = Literal["loop", "batched", "gpu", "ray"]


@dataclass(frozen=True)
class Layout:
    """How an engine uses the machine."""

    threads: int = 1  # CPU threads
    devices: Sequence[torch.device] = ()  # GPUs; none: the net's device
    tf32: bool = False
    record: bool = False  # record steps and run them without Python
    clients_at_once: int | None = None  # None: the whole cohort
    folder: Path | None = None  # client memory and held models live on disk
    memory_on_host: bool = False  # client memory does not live on the GPU


def assemble(
    name: EngineName,
    net: Net,
    feed: Feed,
    options: ClientOptions,
    *,
    seed: int = 0,
    client_memory: Tree | None = None,
    layout: Layout | None = None,
    rounds: int = 1,
    participation: float = 1.0,
    network: NetworkOptions | None = None,
    actors: RayActors | None = None,
) -> Federation:
    """An engine, from its parts; `client_memory` is what a client remembers before its first round.

    The clients of the engine "ray" train in `actors`.
    """
    layout, network = layout or Layout(), network or NetworkOptions()
    trainer = assemble_trainer(name, net, feed, seed=seed, layout=layout, rounds=rounds, participation=participation)
    block = None
    if name in ("loop", "ray"):  # whole folds, for all threads
        fits = BLOCK_BYTES // (net.size * net.dtype.itemsize)
        block = max(FOLD_ROWS, fits // FOLD_ROWS * FOLD_ROWS, -(-4 * layout.threads // FOLD_ROWS) * FOLD_ROWS)
    memory = held = None
    if layout.folder is not None:
        memory, held = layout.folder / "memory", layout.folder / "held"
        for folder in (memory, held):
            folder.mkdir(parents=True, exist_ok=True)
    clients = KeptClients(
        trainer if actors is None else RayTrainer(trainer, actors, network, in_groups=network.gpus > 0),
        ClientStore(client_memory or {}, memory, net.device, CPU if layout.memory_on_host else None),
        ClientStore({}, held, net.device),
        clients_at_once=layout.clients_at_once,
        block=block,
        num_devices=max(1, len(layout.devices)),
    )
    return Federation(clients, trainer, options, seed=seed, rounds=rounds, network=network, workers=actors)


def assemble_trainer(
    name: EngineName,
    net: Net,
    feed: Feed,
    *,
    seed: int = 0,
    layout: Layout,
    rounds: int = 1,
    participation: float = 1.0,
) -> Trainer:
    """What takes the steps of clients, here or on a machine of their own."""
    on_gpu = name == "gpu"
    pool = Gpus(net, feed, layout.devices, tf32=layout.tf32) if on_gpu else Threads(net, feed, layout.threads)
    recorder = None
    if layout.record:
        backend = CudaGraphs(net.compute or net.dtype) if net.device.type == "cuda" else TorchScript()
        recorder = Recorder(backend, net.fingerprint())
    estimate = StepEstimate([int(n) for n in feed.examples.tolist()], rounds, participation)
    group_size = GROUP_SIZE
    if layout.devices:  # as many clients as there are for each GPU; on a CPU the same for any number of threads
        group_size = min(GROUP_SIZE, -(-(layout.clients_at_once or GROUP_SIZE) // len(layout.devices)))
    one_by_one = name in ("loop", "ray")
    runner = OneByOne(recorder, estimate) if one_by_one else Vectorised(recorder, estimate, group_size=group_size)
    return Trainer(pool, runner, seed=seed)
