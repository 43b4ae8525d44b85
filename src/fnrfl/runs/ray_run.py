"""A run whose clients train in Ray actors: what an actor is told, and the trainer that it builds from that."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from fnrfl.config import RunConfig
from fnrfl.config.resolving import from_flat
from fnrfl.core.errors import CompatibilityError, FnrflError
from fnrfl.data.scaling import Scaling
from fnrfl.engines.gpus import found_devices
from fnrfl.engines.ray.actors import RayActors
from fnrfl.engines.trainer import Trainer
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.runs.passed import INIT, PassedObject, PassedObjects
from fnrfl.runs.setup.build import RunParts, gather_parts
from fnrfl.runs.setup.engine import build_trainer
from fnrfl.runs.setup.vmap_support import VmapError

ON_THE_CPU = "Set network.gpus = 0, with which actors train one client after another on the CPU"


def ray_actors(parts: RunParts, scaling: Scaling | None, passed: PassedObjects) -> RayActors:
    """The actors of a run; nothing is started yet."""
    config = parts.config
    check_installed()
    refuse_objects(config, passed, but=INIT)
    described = lambda: to_bytes(told_to_actors(parts, scaling, passed))  # noqa: E731
    return RayActors(int(config.engine.threads), config.network, trainer_in_actor, described)


def check_installed() -> None:
    """Refuse to go on without Ray."""
    if find_spec("ray") is None:
        raise CompatibilityError("Ray is not installed. Install it: pip install 'fnrfl[ray]'.")


def refuse_objects(config: RunConfig, passed: PassedObjects, but: str = "") -> None:
    """Refuse objects that would have to travel to another process."""
    for one in passed.used_by(config).objects:
        if one.argument != but:
            raise CompatibilityError(
                f"Another process builds the run from its config, and {one.argument} was given as an object "
                f"({one.label}). Name it instead, as a file or as module:function, or run it here."
            )


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
