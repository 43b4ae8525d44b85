"""Whole runs spread over a Ray cluster, each in a process of its own; every run writes its directory as always."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fnrfl.config import RunConfig
from fnrfl.config.resolving import from_flat
from fnrfl.core.errors import CompatibilityError, sentence
from fnrfl.engines.ray.session import LOOK, Need, check_room, connected, why_not_answered
from fnrfl.runs.passed import PassedObjects
from fnrfl.runs.ray_run import check_installed, refuse_objects
from fnrfl.runs.run import resume, run


def refuse_on_ray(config: RunConfig, passed: PassedObjects) -> None:
    """Refuse a run that cannot be carried out as a task of Ray."""
    check_installed()
    refuse_objects(config, passed)
    if config.engine.name == "ray":
        raise CompatibilityError(
            'engine = "ray" spreads the clients of one run over a cluster, and --on ray spreads the runs. Choose one: '
            "leave engine out, or leave --on out."
        )


def run_on_ray(runs: Sequence[tuple[RunConfig, Path]], checkpoint_every: float) -> Iterator[tuple[int, str]]:
    """(number of a run, why it failed or nothing) as runs end; those whose directory is there go on.

    A run takes `network.cpus` cores and `network.gpus` GPUs of the cluster at `network.address`. A run whose process
    died goes on in another one, `network.retries` times.
    """
    if not runs:
        return
    network = runs[0][0].network
    with connected(network.address, network.cpus) as ray:
        left = {}
        for number, (config, folder) in enumerate(runs):
            cpus, gpus = _needs(config)
            check_room(ray, "A run of --on ray needs", (cpus, gpus))
            options = {"num_cpus": cpus.count, "num_gpus": gpus.count, "max_retries": config.network.retries}
            task = ray.remote(finish_run).options(**options)
            left[task.remote(_values(config), str(folder.absolute()), checkpoint_every)] = number
        while left:
            done, _ = ray.wait([*left], num_returns=1, timeout=LOOK)
            for answer in done:
                try:
                    reason = ray.get(answer)
                except ray.exceptions.RayError as error:
                    reason = why_not_answered(error)
                yield left.pop(answer), reason


def _needs(config: RunConfig) -> tuple[Need, Need]:
    """The cores and GPUs that a run takes: one GPU if the engine needs it and no key says how much of one."""
    network = config.network
    cpus = Need("CPU", network.cpus, "network.cpus", "Set a smaller network.cpus")
    if network.gpus or config.engine.name != "gpu":
        return cpus, Need("GPU", network.gpus, "network.gpus", "Set a smaller network.gpus")
    return cpus, Need("GPU", 1.0, 'engine = "gpu"', 'Set engine = "auto"')


def _values(config: RunConfig) -> dict[str, Any]:
    """The config as plain values; runs side by side share a machine, so that `auto` is the cores of a run."""
    if config.engine.threads == "auto" and config.engine.name != "gpu":
        threads = max(1, int(config.network.cpus))
        config = replace(config, engine=replace(config.engine, threads=threads))
    return config.flat()


def finish_run(values: dict[str, Any], folder: str, checkpoint_every: float) -> str:
    """Run a config, or go on with its run; the answer says why that failed, or nothing."""
    try:
        config, out = from_flat(values), Path(folder)
        if out.exists():
            resume(out, checkpoint_every=checkpoint_every)
        else:
            run(config, out=out, checkpoint_every=checkpoint_every)
    except (Exception, SystemExit) as error:
        return sentence(error)
    return ""
