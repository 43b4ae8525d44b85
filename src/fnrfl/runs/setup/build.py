"""From a config to the things a run is made of: its data, method, model and engine.

`RunParts` are what a server, a node and an actor make alike; `Built` is a run that is ready to start.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnrfl.config import RunConfig
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.net import Net
from fnrfl.core.words import counted
from fnrfl.data import augment, scenarios
from fnrfl.data.batches import Pool
from fnrfl.data.datasets import Dataset, Facts
from fnrfl.data.noise import feature_noise
from fnrfl.data.partition.value import Partition
from fnrfl.data.scaling import Scaling
from fnrfl.data.scenarios import SavedSplit
from fnrfl.engines.federation import Federation
from fnrfl.engines.gpus import can_use_cudnn, kernel_settings, on_first_gpu
from fnrfl.process import until_left
from fnrfl.runs.data import (
    build_pool,
    divide,
    learns_from_public,
    load_data,
    load_public,
    notices_on_clients,
    with_counted_clients,
)
from fnrfl.runs.passed import NOTHING_PASSED, PassedObjects
from fnrfl.runs.quality import CustomMetric, load_custom_metrics, try_metrics
from fnrfl.runs.setup.checks import Candidate, check_rules, notes
from fnrfl.runs.setup.engine import (
    RunNetwork,
    ask_for_scaling,
    build_engine,
    choose_engine,
    choose_scale,
    refuse_without_network,
)
from fnrfl.runs.setup.method import build_algorithm, method_title
from fnrfl.runs.setup.model import build_net, check_values


@dataclass(frozen=True)
class RunParts(Candidate):
    """All that a trainer of a run's clients is made from, and the config with nothing left to choose."""

    pool: Pool
    notices: tuple[str, ...]  # about the data, and about the engine

    def scaled_by(self, scaling: Scaling) -> RunParts:
        """Return the parts with a net that scales its inputs, and fills in missing ones, as the config says."""
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
    """Divide this data, build the model, and refuse what cannot go together: the parts of a run.

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
    """Return the model for a data set, and the config that says whether its inputs are scaled."""
    net = build_net(
        config, dataset.input_shape, dataset.num_classes, algorithm, integers=dataset.integers, passed=passed
    )
    config = choose_scale(config, dataset, net)
    augment.resolve(config.client.augment, dataset.input_shape)  # refuses to crop what is no image
    return config, net


def on_device(config: RunConfig, net: Net) -> Net:
    """Move the net to where the engine computes; for a GPU, torch is set up until the run has ended."""
    if config.engine.name != "gpu":
        return net
    precision, repeats = config.engine.precision, config.engine.deterministic
    until_left(kernel_settings(deterministic=repeats, tf32=precision == "tf32", use_cudnn=can_use_cudnn(net)))
    return on_first_gpu(net, torch.bfloat16 if precision == "bf16" else net.dtype)


@dataclass(frozen=True)
class Built(RunParts):
    """Everything a run needs, and the config with nothing left to choose."""

    engine: Federation
    scaling: Scaling | None
    metrics: tuple[CustomMetric, ...]  # of the user
    passed: PassedObjects = NOTHING_PASSED
    connection: RunNetwork | None = None

    @property
    def facts(self) -> Facts:
        """What a run remembers of its data."""
        facts = self.dataset.facts(tokens=not self.net.input_dtype.is_floating_point)
        return replace(facts, clients=self.partition.ids)

    @property
    def on_split(self) -> tuple[str, ...]:
        """Which column is the label and how much is set aside, for whom; empty if there is nothing to say."""
        columns, config, total = self.dataset.columns, self.config, len(self.splits.train)
        label = f" with classes from the column {columns.label!r}" if columns else ""
        aside = {name: len(held) for name, held in self.splits.set_aside.items() if len(held)}
        examples = f"{counted(total, 'training example')}{label}"
        if not aside:
            return (f"The clients share all {examples}.",) if label else ()
        listed = " and ".join(f"{count:,} as {name} data" for name, count in aside.items())
        learnt = {"public": learns_from_public(self.algorithm)}
        learnt["validation"] = "distill" in self.algorithm.needs or config.stop != "never"
        spare = [name for name in aside if not learnt[name]]
        words = " ".join(f"{name}.size=0" for name in spare)
        why = (
            f" {method_title(config)} learns from no {' or '.join(spare)} data; it is set aside so that all methods "
            f"train on the same examples. To train on it, unless another method needs it: {words}."
        )
        fixed = isinstance(scenarios.parse(config.scenario).split, SavedSplit)  # by a file
        rest = f"{total - sum(aside.values()):,}.{'' if fixed or not spare else why}"
        return (f"Of {examples}, {listed} are set aside; the clients share the other {rest}",)

    def noise(self, client: int, x: Tensor, stream: torch.Generator) -> Tensor:
        """Lay a client's feature noise over a batch."""
        return feature_noise(self.partition, client, x, stream)

    def manifest(self) -> dict[str, Any]:
        """Return the content of partition.json: which example goes to whom, what is set aside, and hashes."""
        return self.partition.manifest() | {"splits": self.splits.manifest()}


def build(
    config: RunConfig,
    scratch: Path | None = None,
    runs_alike: int | None = None,
    scaling: Scaling | None = None,
    passed: PassedObjects = NOTHING_PASSED,
    connection: RunNetwork | None = None,
    parts: RunParts | None = None,
) -> Built:
    """Load, draw, split, wrap and check; `scratch` is a folder for what does not fit in memory.

    `runs_alike` is how many runs of this process are about like this one. `scaling` is what clients have answered
    before, if the run goes on; else they are asked. `passed` are the objects that the config has labels of.
    `connection` leads to clients on other machines, and `parts` is what they and the server have agreed on.
    """
    refuse_without_network(config, connection)
    metrics = load_custom_metrics(config.metrics)
    if parts is None:
        dataset = load_data(config, passed)
        parts = parts_with(config, dataset, dataset.notices, passed)
    if metrics:
        try_metrics(metrics, parts.splits.test.y.cpu().numpy(), parts.dataset.num_classes)
    if parts.config.dataset.asks_for_means:
        scaling = scaling or ask_for_scaling(parts, connection)
        parts = parts.scaled_by(scaling)
    there: Any = connection
    if parts.config.engine.name == "ray":
        from fnrfl.runs.workers import ray_actors  # which builds parts, too

        there = ray_actors(parts, scaling, passed)
    engine = build_engine(parts, scratch, runs_alike, there, scaling)
    parts = replace(parts, notices=(*parts.notices, *notes(parts)))
    values = {field.name: getattr(parts, field.name) for field in fields(parts)}
    return Built(**values, engine=engine, scaling=scaling, metrics=metrics, passed=passed, connection=connection)
