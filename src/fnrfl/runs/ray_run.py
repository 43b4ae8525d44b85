"""A run whose clients train in Ray actors: what an actor is told, and the trainer that it builds from that."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.util import find_spec

from fnrfl.config import RunConfig
from fnrfl.config.resolving import from_flat
from fnrfl.core.errors import CompatibilityError, FnrflError
from fnrfl.data.datasets import Dataset
from fnrfl.data.holdings import Partition
from fnrfl.data.scaling import Scaling
from fnrfl.engines.ray_actors import RayActors
from fnrfl.engines.trainer import Trainer
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.runs.given import INIT, Given, GivenObject


def ray_actors(
    config: RunConfig, dataset: Dataset, partition: Partition, scaling: Scaling | None, given: Given
) -> RayActors:
    """The actors of a run; nothing is started yet."""
    if find_spec("ray") is None:
        raise CompatibilityError(
            "engine = \"ray\" needs Ray, which is not installed. Install it: pip install 'fnrfl[ray]'."
        )
    for one in given.used_by(config).objects:
        if one.argument != INIT:
            raise CompatibilityError(
                f'engine = "ray" builds the run in every actor from its config, and {one.argument} was given as an '
                f"object ({one.words}). Name it instead, as a file or as module:function, or choose another engine."
            )
    described = _described(config, dataset, partition, scaling, given)
    return RayActors(int(config.engine.threads), config.network, trainer_in_actor, described)


def _described(
    config: RunConfig, dataset: Dataset, partition: Partition, scaling: Scaling | None, given: Given
) -> Callable[[], bytes]:
    """What an actor is told of a run, as bytes."""
    return lambda: to_bytes(
        {
            "config": config.flat(),
            "scale": None if scaling is None else scaling.as_json(),
            "init": [[one.what, one.sha256, one.value] for one in given.used_by(config).objects],
            "data": dataset.checksum,
            "partition": partition.sha256,
        }
    )


def trainer_in_actor(described: bytes) -> Trainer:
    """The trainer of an actor: that of the loop engine, or with a share of a GPU that of the gpu engine."""
    from fnrfl.runs.build import build  # which imports this module

    told = from_bytes(described)
    config = from_flat(told["config"])
    engine = {"name": "gpu" if config.network.gpus else "loop", "threads": 1}
    given = Given(tuple(GivenObject(INIT, *one) for one in told["init"]))
    config, scaling = config.replace({"engine": engine, "metrics": "none"}), Scaling.from_json(told["scale"])
    built = build(config, scaling=scaling, given=given)
    for what, found, wanted in (
        ("data", built.dataset.checksum, told["data"]),
        ("split among the clients", built.partition.sha256, told["partition"]),
    ):
        if found != wanted:
            raise FnrflError(
                f"The {what} that a Ray actor on {platform.node()} finds for "
                f'dataset = "{config.dataset.name}" is not that of this machine. Put the same '
                "files and the same version of fnrfl on every machine."
            )
    return built.engine.server
