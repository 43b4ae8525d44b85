"""The engine of a run: what `auto` stands for, and how the engine that it chose is put together."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from fnrfl.config import RunConfig, registry
from fnrfl.core.errors import CompatibilityError, FnrflError, out_of_memory
from fnrfl.core.feed import Feed
from fnrfl.core.messages import ClientSide
from fnrfl.core.ndarrays import sizes_of
from fnrfl.core.net import Net
from fnrfl.core.options import NetworkOptions
from fnrfl.core.step import by_transform
from fnrfl.core.types import Flat, Tree
from fnrfl.core.words import INPUT_SCALE
from fnrfl.data.batches import Pool
from fnrfl.data.datasets import Dataset
from fnrfl.data.scaling import Scaling, ask_clients
from fnrfl.engines.assemble import Layout, assemble, assemble_trainer
from fnrfl.engines.federation import Federation
from fnrfl.engines.gpus import can_use_cudnn, clients_that_fit, found_devices, kernel_settings, on_first_gpu
from fnrfl.engines.groups import GROUP_SIZE
from fnrfl.engines.ray.actors import RayActors
from fnrfl.engines.trainer import Trainer
from fnrfl.kernels.convolution import ClientConv2d
from fnrfl.process import filters_lock
from fnrfl.runs.setup.method import cohort_size

if TYPE_CHECKING:
    from fnrfl.runs.setup.build import RunParts

SMALL = 1_000_000  # parameters times batch of a dense net up to which clients step together
WORTH_RECORDING = 50  # steps of groups of clients in a run, on a CPU
WORTH_RECORDING_LARGE = 300  # the same where a step has convolutions, which take most of its time
WORTH_CAPTURING = 100  # steps of groups of clients in a run, on a GPU
CHUNK_BYTES = 4 << 30  # what the models of clients trained together may take, eight copies each


def choose_scale(config: RunConfig, dataset: Dataset, net: Net) -> RunConfig:
    """Resolve `dataset.scale = "auto"`: a user's own numbers and pixels are scaled, tokens cannot be.

    The named data sets are not, so that results can be compared with those that others have printed.
    """
    if config.dataset.scale != "auto":
        return config
    own = dataset.name not in registry.DATASETS and net.input_dtype.is_floating_point
    own = own and INPUT_SCALE not in dict(net.module.named_children())  # a trained model that scales by itself
    return replace(config, dataset=replace(config.dataset, scale="standard" if own else "none"))


def choose_engine(config: RunConfig, net: Net) -> tuple[RunConfig, tuple[str, ...]]:
    """Resolve `auto`: a fixed rule of model, machine and cohort, never a stopwatch, so that runs repeat.

    With it come notices: if there is no GPU, if the clients of a user's own model cannot step together, or not in bf16.
    """
    engine, cohort = config.engine, cohort_size(config)
    name, on_engine = _name_that_can(config, net)
    precision, on_precision = _precision_that_can(config, net, name)
    workers = _num_workers(config, name)
    threads = max(1, min(cohort, workers)) if engine.threads == "auto" else int(engine.threads)
    at_once = engine.clients_at_once
    if at_once == "auto":
        on_cpu = max(threads, CHUNK_BYTES // (8 * 4 * net.size))
        at_once = clients_that_fit(net.size, net.dtype.itemsize, cohort) if name == "gpu" else on_cpu
    at_once = min(cohort, int(at_once))
    chosen: dict[str, Any] = {"name": name, "precision": precision, "threads": threads, "clients_at_once": at_once}
    return replace(config, engine=replace(engine, **chosen)), (*on_engine, *on_precision)


def _name_that_can(config: RunConfig, net: Net) -> tuple[str, tuple[str, ...]]:
    """Return the engine, and a notice if it is not the one that somebody may expect."""
    name, auto = config.engine.name, config.engine.name == "auto"
    if auto and not net.convolutional and net.size * config.client.batch <= SMALL:  # the overhead of a step dominates
        name = "batched" if cohort_size(config) > 1 else "loop"
    elif auto:
        name = "gpu" if torch.cuda.is_available() else "loop"
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
    """Return the precision, and a notice if a user's own model does not compute in bf16.

    `auto` is bf16 where it was compared with float32 on paired seeds and loses nothing: convolutions on a GPU.
    """
    precision, auto, on_gpu = config.engine.precision, config.engine.precision == "auto", engine == "gpu"
    if auto:
        precision = "bf16" if on_gpu and net.convolutional and torch.cuda.is_bf16_supported(False) else "float32"
    elif precision in ("tf32", "bf16") and not (on_gpu or (engine == "ray" and config.network.gpus > 0)):
        raise CompatibilityError(
            f'engine.precision = "{precision}" needs a GPU, and engine.name = "{engine}" runs on the CPU. Set '
            'engine.precision = "auto", "float32" or "float64".'
        )
    tried = on_gpu and precision == "bf16"
    why = vmap_failure(config, net, engine, loops=True, compute=torch.bfloat16) if tried else None
    if why is None:
        return precision, ()
    if not auto:
        raise CompatibilityError(
            f'engine.precision = "bf16" does not go with model = "{config.model.name}" ({why}). Set engine.precision = '
            '"float32" or "auto", or change the model.'
        )
    return "float32", (f"engine.precision = auto is float32, for the model does not compute in bf16: {why}.",)


def _num_workers(config: RunConfig, engine: str) -> int:
    """Count who can work side by side: GPUs, cores, or as many Ray actors as this machine has room for."""
    cores, network = os.cpu_count() or 1, config.network
    if engine == "gpu":
        return len(found_devices())
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


def records_steps(config: RunConfig, net: Net, most_examples: int) -> bool:
    """Decide whether steps are recorded: recording one takes as long as some twenty steps, and large steps gain little.

    `most_examples` is what the client with the most holds.
    """
    steps = config.rounds * -(-config.client.epochs * most_examples // config.client.batch)
    steps *= -(-cohort_size(config) // (GROUP_SIZE if config.engine.name in ("batched", "gpu") else 1))
    least = WORTH_RECORDING_LARGE if net.convolutional else WORTH_RECORDING
    return config.engine.accelerate and steps >= (WORTH_CAPTURING if config.engine.name == "gpu" else least)


# -- whether several clients can step together -------------------------------------------------------------------------


class VmapError(CompatibilityError):
    """Torch cannot train several clients of a model in one step, and the config asks for that."""

    def __init__(self, asked: str, model: str, why: str, way_out: str) -> None:
        """`asked` is what in the config asks for it, `why` what torch says."""
        self.why = why
        super().__init__(
            f'{asked} trains several clients in one step, and torch cannot do that with model = "{model}" ({why}). '
            f"{way_out}, or change the model."
        )


def vmap_failure(
    config: RunConfig, net: Net, engine: str, *, loops: bool, compute: torch.dtype | None = None
) -> str | None:
    """Return what torch says to a step of two clients of a user's own model; None if it takes one, or is fnrfl's.

    The step is taken where the engine takes its steps: on a GPU a layer may be computed by other operators. For some
    operators torch goes through the clients one by one inside the step, which is slower than one client after another.
    With `loops` that is no reason. On a GPU layers compute in `compute`; None: in the net's own type.
    """
    if not registry.is_own_model(config.model.name):
        return None
    on_gpu = engine == "gpu"
    settings = kernel_settings(deterministic=False, tf32=False, use_cudnn=can_use_cudnn(net))
    with settings if on_gpu else nullcontext(), _warnings_here() as warned:  # in this order, as while a run records
        try:
            if on_gpu:
                net = on_first_gpu(net, compute or net.dtype)
                for layer in net.module.modules():
                    if isinstance(layer, ClientConv2d):
                        layer.own_kernels = False  # which would have to be compiled for one step
            _step_of_two(net)
        except FnrflError:  # there is no GPU
            raise
        except Exception as error:  # a user's model may raise anything
            if out_of_memory(error):  # which says nothing about the model, and may be otherwise next time
                return None
            said = str(error).strip().partition("\n")[0].partition(". ")[0][:200].rstrip(".")
            return f"{type(error).__name__}: {said}"
    slow = re.search(r"performance drop.*?aten::(\w+)", " ".join(warned))
    return None if slow is None or loops else f"torch goes through them one by one for its operator {slow[1]}"


@contextmanager
def _warnings_here() -> Iterator[list[str]]:
    """Collect what this thread is warned of: Python has one place for all threads, and others may use `vmap` too."""
    here, warned = threading.get_ident(), list[str]()

    def keep(message: object, *_: Any, **__: Any) -> None:
        if threading.get_ident() == here:
            warned.append(str(message))

    with filters_lock, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = keep
        yield warned


def _step_of_two(net: Net) -> None:
    """Gradients of two clients, with two examples each; by a copy, for a module may keep what it has seen."""
    net = net.copy()
    params, buffers = net.flatten()
    x = net.laid_out(torch.zeros(2, *net.input_shape, dtype=net.input_dtype, device=net.device))
    masks = {k: torch.ones(2, *v, dtype=net.dtype, device=net.device) for k, v in net.drop_shapes.items()}

    def step(params: Flat, buffers: Tree, x: Tensor, masks: Tree) -> Flat:
        def loss(params: Flat) -> tuple[Tensor, Tree]:
            out, new = net.apply(params, buffers, x, mode="updating", masks=masks)
            return out.logits.square().mean(), new

        return by_transform(loss, params)[0]

    twice = lambda tree: {name: torch.stack([one, one]) for name, one in tree.items()}  # noqa: E731
    vmap(step)(torch.stack([params, params]), twice(buffers), torch.stack([x, x]), twice(masks))


# -- put together ------------------------------------------------------------------------------------------------------


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
        tests: Sequence[int] = (),
        scale: Tree | None = None,
    ) -> ClientSide:
        """Return the clients' side of a run; `birth` is what each remembers at first, `scale` how inputs are scaled.

        `reads_memory`: the method has personal models, which the server makes of clients' memories to score them.
        `tests`: on how many examples of its own each client scores models.
        """
        ...


@dataclass(frozen=True)
class RunNetwork:
    """The network of one run."""

    network: ClientNetwork
    run: str  # its id, which names a folder at each node; the same when the run goes on

    def connect(self, parts: RunParts, birth: Tree, **told: Any) -> ClientSide:
        return self.network.connect(self.run, parts.net, birth, parts.pool, parts.config.network, **told)


def build_engine(
    parts: RunParts,
    scratch: Path | None,
    runs_alike: int | None = None,
    there: RunNetwork | RayActors | None = None,
    scaling: Scaling | None = None,
) -> Federation:
    """Put the engine together that a resolved config names; `scratch` is a folder for what does not fit in memory.

    Of `runs_alike` runs each uses what is compiled for one. But a run that is to be the same to the last bit, alone or
    among others, decides alone. `there` is the way to clients on other machines, who are told `scaling`, or the actors
    that train clients.
    """
    config, algorithm = parts.config, parts.algorithm
    memory = algorithm.client_state(parts.net)
    if config.engine.name == "flower":  # what the server does itself, it does as the loop engine
        assert isinstance(there, RunNetwork)
        options, seed, rounds = config.client, config.seed, config.rounds
        server = assemble("loop", parts.net, parts.pool, options, seed=seed, rounds=rounds).server
        scale = None if scaling is None else scaling.as_tree()
        tests = sizes_of(parts.splits.site_tests_elsewhere).tolist()
        clients = there.connect(parts, memory, reads_memory=algorithm.personalised, tests=tests, scale=scale)
        return Federation(clients, server, options, seed=seed, rounds=rounds, network=config.network, simulated=False)
    alone = config.engine.deterministic or config.engine.name != "gpu"
    return assemble(
        config.engine.name,  # type: ignore[arg-type]
        parts.net,
        parts.pool,
        config.client,
        seed=config.seed,
        client_memory=memory,
        layout=_layout(config, parts.net, parts.pool, scratch),
        rounds=config.rounds * (1 if alone else runs_alike or 1),
        participation=cohort_size(config) / config.clients,
        network=config.network,
        actors=there if isinstance(there, RayActors) else None,
    )


def build_trainer(config: RunConfig, net: Net, pool: Pool) -> Trainer:
    """Put together what takes the steps of clients on a machine of their own, as the engine of the config does."""
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


def ask_for_scaling(parts: RunParts, connection: RunNetwork | None = None) -> Scaling:
    """Return what the clients answer about their inputs, before there is a model that could be trained."""
    config, pool = parts.config, parts.pool.in_type(torch.float64)
    layout = Layout(threads=1 if config.engine.name == "gpu" else int(config.engine.threads))
    engine = assemble("loop", parts.net, pool, config.client, seed=config.seed, layout=layout)
    if connection is not None:
        engine = Federation(connection.connect(parts, {}), engine.server, config.client, seed=config.seed)
    with engine:
        gaps, columns = config.dataset.missing == "mean", parts.dataset.columns
        return ask_clients(engine, f'dataset = "{config.dataset.name}"', gaps=gaps, columns=columns)


def _gpus(config: RunConfig) -> list[torch.device]:
    devices, asked = found_devices(), int(config.engine.threads)
    if len(devices) < asked:
        raise CompatibilityError(
            f"engine.threads = {asked} asks for as many GPUs, and there are {len(devices)}. Set it to {len(devices)}."
        )
    return devices[:asked]
