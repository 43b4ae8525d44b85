"""Whole runs side by side, in processes of this machine or on a Ray cluster; each writes its directory as always."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from fnrfl.config import RunConfig
from fnrfl.config.resolving import from_flat
from fnrfl.core.errors import CompatibilityError, FnrflError, sentence
from fnrfl.engines.ray.session import LOOK, Need, check_room, connected, why_not_answered
from fnrfl.rundir.interrupt import Interrupted
from fnrfl.runs.passed import PassedObjects
from fnrfl.runs.ray_run import check_installed, refuse_objects
from fnrfl.runs.run import resume, run

On = Literal["here", "processes", "ray"]
DIED = "A process ended before its run was done; perhaps there was not enough memory. Set fewer --workers."


@dataclass(frozen=True)
class Workers:
    """Processes that carry runs out."""

    slots: Callable[[], int]  # how many runs can go on at once
    submit: Callable[[RunConfig, Path], Any]  # begins a run; what is returned stands for it
    finished: Callable[[list[Any]], dict[Any, str]]  # waits until some run has ended: why it failed, or nothing


def refuse_elsewhere(config: RunConfig, passed: PassedObjects, on: On) -> None:
    """Refuse a run that cannot be carried out in another process."""
    if on == "ray":
        check_installed()
    refuse_objects(config, passed)
    if on == "ray" and config.engine.name == "ray":
        raise CompatibilityError(
            'engine = "ray" spreads the clients of one run over a cluster, and --on ray spreads the runs. Choose one: '
            "leave engine out, or leave --on out."
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop_at_once)
    pids.put(os.getpid())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: a run alone would go on to the end of its round. A process without a run just ends."""
    signal.signal(number, signal.SIG_DFL)
    while frame is not None and frame.f_code is not finish_run.__code__:
        frame = frame.f_back
    if frame is None:
        os._exit(128 + number)
    raise Interrupted(number)


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


# -- a Ray cluster -----------------------------------------------------------------------------------------------------


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
            return {one: _answer(ray, one) for one in done}

        yield Workers(slots, submit, finished)


def _answer(ray: Any, task: Any) -> str:
    try:
        return str(ray.get(task))
    except ray.exceptions.RayError as error:
        return why_not_answered(error)


def _needs(config: RunConfig) -> tuple[Need, Need]:
    """Return the cores and GPUs that a run takes: one GPU if the engine needs it and no key says how much of one."""
    network = config.network
    cpus = Need("CPU", network.cpus, "network.cpus", "Set a smaller network.cpus")
    if network.gpus or config.engine.name != "gpu":
        return cpus, Need("GPU", network.gpus, "network.gpus", "Set a smaller network.gpus")
    return cpus, Need("GPU", 1.0, 'engine = "gpu"', 'Set engine = "auto"')
