"""The data, the method and the model of a run: what a server, a node and an actor make alike from a config."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fnrfl.config import RunConfig
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.net import Net
from fnrfl.data import augment
from fnrfl.data.batches import Pool
from fnrfl.data.datasets import Dataset
from fnrfl.data.partition.value import Partition
from fnrfl.data.scaling import Scaling
from fnrfl.engines.gpus import can_use_cudnn, kernel_settings, on_first_gpu
from fnrfl.process import until_left
from fnrfl.runs.data import (
    build_pool,
    divide,
    load_data,
    load_public,
    notices_on_clients,
    with_counted_clients,
)
from fnrfl.runs.passed import NOTHING_PASSED, PassedObjects
from fnrfl.runs.setup.checks import Candidate, check_rules
from fnrfl.runs.setup.engine import choose_engine, choose_scale
from fnrfl.runs.setup.method import build_algorithm
from fnrfl.runs.setup.model import build_net, check_values


@dataclass(frozen=True)
class RunParts(Candidate):
    """All that a trainer of a run's clients is made from, and the config with nothing left to choose."""

    pool: Pool
    notices: tuple[str, ...]  # about the data, and about the engine

    def scaled_by(self, scaling: Scaling) -> RunParts:
        """The same parts with a net that scales its inputs, and fills in missing ones, as the config says."""
        options, net = self.config.dataset, self.net
        scale, fill = options.scale == "standard", options.missing == "mean"
        layer = scaling.layer(net.input_shape, net.dtype, scale=scale, fill=fill)
        return replace(self, net=net.with_input_scale(layer))


def gather_parts(config: RunConfig, passed: PassedObjects = NOTHING_PASSED) -> RunParts:
    """Load, draw, split, build and check; `passed` are the objects that the config has words for."""
    dataset = load_data(config, passed)
    return parts_with(config, dataset, dataset.notices, passed)


def parts_with(
    config: RunConfig,
    dataset: Dataset,
    notices: tuple[str, ...],
    passed: PassedObjects = NOTHING_PASSED,
    partition: Partition | None = None,
) -> RunParts:
    """The parts of a run with this data: it is divided, the model is built, and what cannot go together is refused.

    A `partition` says who holds how many examples on other machines.
    """
    algorithm = build_algorithm(config, passed)
    public = load_public(config, dataset, passed)
    partition, splits = divide(config, dataset, public, algorithm, partition)
    notices = (*notices, *(public.notices if isinstance(public, Dataset) else ()))
    config = with_counted_clients(config, partition)
    config, net = fitting_net(config, dataset, algorithm, passed)
    check_rules(Candidate(config, dataset, partition, splits, algorithm, net))
    check_values(config, net, splits)
    config, on_engine = choose_engine(config, net)
    notices = (*notices, *notices_on_clients(config, dataset, partition), *on_engine)
    net = on_device(config, net)
    pool = build_pool(config, dataset, partition, splits, net)
    return RunParts(config, dataset, partition, splits, algorithm, net, pool, notices)


def fitting_net(
    config: RunConfig, dataset: Dataset, algorithm: Algorithm, passed: PassedObjects = NOTHING_PASSED
) -> tuple[RunConfig, Net]:
    """The model for a data set, and the config that says whether its inputs are scaled."""
    net = build_net(
        config, dataset.input_shape, dataset.num_classes, algorithm, integers=dataset.integers, passed=passed
    )
    config = choose_scale(config, dataset, net)
    augment.resolve(config.client.augment, dataset.input_shape)  # refuses to crop what is no image
    return config, net


def on_device(config: RunConfig, net: Net) -> Net:
    """The net where the engine computes; for a GPU, torch is set up until the run has ended."""
    if config.engine.name != "gpu":
        return net
    precision, repeats = config.engine.precision, config.engine.deterministic
    until_left(kernel_settings(deterministic=repeats, tf32=precision == "tf32", use_cudnn=can_use_cudnn(net)))
    return on_first_gpu(net, torch.bfloat16 if precision == "bf16" else net.dtype)
