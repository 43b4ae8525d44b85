"""Other processes: whole runs side by side, on this machine or a Ray cluster, and Ray actors for clients of one run.

A whole run writes its directory as always.
"""

from __future__ import annotations

import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from fnrfl.config import RunConfig
from fnrfl.config.resolving import from_flat
from fnrfl.core.errors import CompatibilityError, FnrflError, sentence
from fnrfl.data.scaling import Scaling
from fnrfl.engines.gpus import found_devices
from fnrfl.engines.ray.actors import RayActors
from fnrfl.engines.ray.session import LOOK, Need, check_room, connected, why_not_answered
from fnrfl.engines.trainer import Trainer
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.rundir.interrupt import Interrupted
from fnrfl.runs.passed import INIT, PassedObject, PassedObjects
from fnrfl.runs.run import resume, run
from fnrfl.runs.setup.build import RunParts, gather_parts
from fnrfl.runs.setup.engine import VmapError, build_trainer

On = Literal["here", "processes", "ray"]
DIED = "A process ended before its run was done; perhaps there was not enough memory. Set fewer --workers."
ON_THE_CPU = "Set network.gpus = 0, with which actors train one client after another on the CPU"


@dataclass(frozen=True)
class Workers:
    """Processes that carry runs out."""

    slots: Callable[[], int]  # how many runs can go on at once
    submit: Callable[[RunConfig, Path], Any]  # begins a run; what is returned stands for it
    finished: Callable[[list[Any]], dict[Any, str]]  # waits until some run has ended: why it failed, or nothing


def refuse_elsewhere(config: RunConfig, passed: PassedObjects, on: On) -> None:
    """Refuse a run that cannot be carried out in another process."""
    if on == "ray":
        _check_installed()
    _refuse_objects(config, passed)
    if on == "ray" and config.engine.name == "ray":
        raise CompatibilityError(
            'engine = "ray" spreads the clients of one run over a cluster, and --on ray spreads the runs. Choose one: '
            "leave engine out, or leave --on out."
        )


def _check_installed() -> None:
    if find_spec("ray") is None:
        raise CompatibilityError("Ray is not installed. Install it: pip install 'fnrfl[ray]'.")


def _refuse_objects(config: RunConfig, passed: PassedObjects, but: str = "") -> None:
    """Refuse objects that would have to travel to another process."""
    for one in passed.used_by(config).objects:
        if one.argument != but:
            raise CompatibilityError(
                f"Another process builds the run from its config, and {one.argument} was given as an object "
                f"({one.label}). Name it instead, as a file or as module:function, or run it here."
            )


def finish_run(values: dict[str, Any], folder: str, checkpoint_every: float) -> str:
    """Run a config, or go on with its run; return why that failed, or nothing."""
    try:
        config, out = from_flat(values), Path(folder)
        if out.exists():
            resume(out, checkpoint_every=checkpoint_every)
        else:
            run(config, out=out, checkpoint_every=checkpoint_every)
    except (Exception, SystemExit) as error:
        return sentence(error)
    return ""


def _values(config: RunConfig, cores: float) -> dict[str, Any]:
    """Return the config as plain values; runs side by side share a machine, so that `auto` is the cores of a run."""
    if config.engine.threads == "auto" and config.engine.name != "gpu":
        config = replace(config, engine=replace(config.engine, threads=max(1, int(cores))))
    return config.flat()


# -- processes of this machine -----------------------------------------------------------------------------------------


@contextmanager
def process_workers(count: int, checkpoint_every: float) -> Iterator[Workers]:
    """Start `count` processes for one run after another; on leaving early they stop at once and can be resumed."""
    context = get_context("spawn")
    pids = context.SimpleQueue()
    pool = ProcessPoolExecutor(count, context, _begin_worker, (pids,))
    cores = (os.cpu_count() or 1) / count

    def submit(config: RunConfig, folder: Path) -> Future[str]:
        return pool.submit(finish_run, _values(config, cores), str(folder.absolute()), checkpoint_every)

    def finished(futures: list[Future[str]]) -> dict[Any, str]:
        done, _ = wait(futures, return_when=FIRST_COMPLETED)
        try:
            return {one: one.result() for one in done}
        except BrokenProcessPool as error:
            raise FnrflError(DIED) from error

    try:
        yield Workers(lambda: count, submit, finished)
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        while not pids.empty():
            with suppress(ProcessLookupError):
                os.kill(pids.get(), signal.SIGTERM)
        pool.shutdown()
        raise


def _begin_worker(pids: Any) -> None:
    """Leave Ctrl-C to the process that started this one, and end when it ends."""

    def end_with_parent() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop_at_once)
    pids.put(os.getpid())
    threading.Thread(target=end_with_parent, daemon=True).start()


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: a run alone would go on to the end of its round. A process without a run just ends."""
    signal.signal(number, signal.SIG_DFL)
    while frame is not None and frame.f_code is not finish_run.__code__:
        frame = frame.f_back
    if frame is None:
        os._exit(128 + number)
    raise Interrupted(number)


# -- runs on a Ray cluster ---------------------------------------------------------------------------------------------


@contextmanager
def ray_workers(config: RunConfig, checkpoint_every: float) -> Iterator[Workers]:
    """Use the Ray cluster at `network.address`.

    A run takes `network.cpus` cores and `network.gpus` GPUs. A run whose process died goes on in another one,
    `network.retries` times.
    """
    with connected(config.network.address, config.network.cpus) as ray:

        def slots() -> int:
            there = ray.cluster_resources()
            return max(1, *(int(there.get(need.what, 0) / need.count) for need in _needs(config) if need.count))

        def submit(config: RunConfig, folder: Path) -> Any:
            cpus, gpus = _needs(config)
            check_room(ray, "A run of --on ray needs", (cpus, gpus))
            options = {"num_cpus": cpus.count, "num_gpus": gpus.count, "max_retries": config.network.retries}
            values = _values(config, config.network.cpus)
            return ray.remote(finish_run).options(**options).remote(values, str(folder.absolute()), checkpoint_every)

        def finished(tasks: list[Any]) -> dict[Any, str]:
            done: list[Any] = []
            while not done:
                done, _ = ray.wait(tasks, num_returns=1, timeout=LOOK)
            return {one: answer(one) for one in done}

        def answer(task: Any) -> str:
            try:
                return str(ray.get(task))
            except ray.exceptions.RayError as error:
                return why_not_answered(error)

        yield Workers(slots, submit, finished)


def _needs(config: RunConfig) -> tuple[Need, Need]:
    """Return the cores and GPUs that a run takes: one GPU if the engine needs it and no key says how much of one."""
    network = config.network
    cpus = Need("CPU", network.cpus, "network.cpus", "Set a smaller network.cpus")
    if network.gpus or config.engine.name != "gpu":
        return cpus, Need("GPU", network.gpus, "network.gpus", "Set a smaller network.gpus")
    return cpus, Need("GPU", 1.0, 'engine = "gpu"', 'Set engine = "auto"')


# -- clients of one run in Ray actors ----------------------------------------------------------------------------------


def ray_actors(parts: RunParts, scaling: Scaling | None, passed: PassedObjects) -> RayActors:
    """The actors of a run; nothing is started yet."""
    config = parts.config
    _check_installed()
    _refuse_objects(config, passed, but=INIT)
    described = lambda: to_bytes(told_to_actors(parts, scaling, passed))  # noqa: E731
    return RayActors(int(config.engine.threads), config.network, trainer_in_actor, described)


def told_to_actors(parts: RunParts, scaling: Scaling | None, passed: PassedObjects) -> dict[str, Any]:
    """What an actor is told of a run, as plain values."""
    return {
        "config": parts.config.flat(),
        "scale": None if scaling is None else scaling.as_json(),
        "init": [[one.what, one.sha256, one.value] for one in passed.used_by(parts.config).objects],
        "data": parts.dataset.checksum,
        "partition": parts.partition.sha256,
    }


def trainer_in_actor(described: bytes) -> Trainer:
    """The trainer of an actor: that of the loop engine, or with a share of a GPU that of the gpu engine."""
    told = from_bytes(described)
    config = from_flat(told["config"])
    engine: dict[str, Any] = {"name": "gpu" if config.network.gpus else "loop", "threads": 1}
    passed = PassedObjects(tuple(PassedObject(INIT, *one) for one in told["init"]))
    asked = f'engine = "ray" with network.gpus = {config.network.gpus:g}'
    if config.network.gpus:
        found_devices(asked, f"{ON_THE_CPU}, or install torch with CUDA on {platform.node()}.")
    try:
        parts = gather_parts(replace(config, engine=replace(config.engine, **engine)), passed)
    except VmapError as error:
        raise VmapError(asked, config.model.name, error.why, ON_THE_CPU) from error
    for what, found, wanted in (
        ("data", parts.dataset.checksum, told["data"]),
        ("split among the clients", parts.partition.sha256, told["partition"]),
    ):
        if found != wanted:
            raise FnrflError(
                f"The {what} that a Ray actor on {platform.node()} finds for dataset = "
                f'"{config.dataset.name}" is not that of this machine. Put the same files and the same version of '
                "fnrfl on every machine."
            )
    if (scaling := Scaling.from_json(told["scale"])) is not None:
        parts = parts.scaled_by(scaling)
    return build_trainer(parts.config, parts.net, parts.pool)
