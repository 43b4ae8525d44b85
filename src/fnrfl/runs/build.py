"""From a config to the things a run is made of; whatever cannot go together is refused here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnrfl.algorithms.parts.norms import num_refined
from fnrfl.config import RunConfig
from fnrfl.config.schema import PublicOptions
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.isolation import until_left
from fnrfl.core.net import Net
from fnrfl.data import augment
from fnrfl.data.batches import Pool
from fnrfl.data.datasets import Dataset, Facts
from fnrfl.data.holdings import Partition
from fnrfl.data.reading import Columns
from fnrfl.data.scaling import Scaling, looks_unscaled
from fnrfl.data.splits import Splits
from fnrfl.engines.federation import Federation
from fnrfl.engines.gpus import found_devices, kernel_settings
from fnrfl.runs.build_engine import ask_for_scaling, build_engine
from fnrfl.runs.build_net import build_net, check_values
from fnrfl.runs.choice import choose_engine, choose_scale
from fnrfl.runs.cohorts import cohort_size, num_answers
from fnrfl.runs.data import (
    build_pool,
    divide,
    feature_noise,
    load_data,
    load_public,
    notices_on_clients,
    with_counted_clients,
)
from fnrfl.runs.given import NOTHING, Given
from fnrfl.runs.method import build_algorithm
from fnrfl.runs.needs import check_needs
from fnrfl.runs.own_metrics import OwnMetric, load_own_metrics, try_out
from fnrfl.runs.ray_run import ray_actors


@dataclass(frozen=True)
class Built:
    """Everything a run needs, and the config with nothing left to choose."""

    config: RunConfig
    dataset: Dataset
    partition: Partition
    splits: Splits
    algorithm: Algorithm
    net: Net
    pool: Pool
    engine: Federation
    scaling: Scaling | None
    metrics: tuple[OwnMetric, ...]  # of the user
    notices: tuple[str, ...]
    given: Given = NOTHING

    @property
    def facts(self) -> Facts:
        """What a run remembers of its data."""
        facts = self.dataset.facts(tokens=not self.net.input_dtype.is_floating_point)
        return replace(facts, clients=self.partition.ids)

    def noise(self, client: int, x: Tensor, stream: torch.Generator) -> Tensor:
        """A client's feature noise over a batch."""
        return feature_noise(self.partition, client, x, stream)

    def manifest(self) -> dict[str, Any]:
        """Which example goes to whom, and what is set aside, with hashes: the content of partition.json."""
        return self.partition.manifest() | {"splits": self.splits.manifest()}


def build(
    config: RunConfig,
    scratch: Path | None = None,
    runs_alike: int = 1,
    scaling: Scaling | None = None,
    given: Given = NOTHING,
) -> Built:
    """Load, draw, split, wrap and check; `scratch` is a folder for what does not fit in memory.

    `runs_alike` is how many runs of this process are about like this one. `scaling` is what clients have answered
    before, if the run goes on; else they are asked. `given` are the objects that the config has words for.
    """
    metrics = load_own_metrics(config.metrics)
    dataset = load_data(config, given)
    algorithm = build_algorithm(config, given)
    public = load_public(config, dataset, given)
    partition, splits = divide(config, dataset, public, algorithm)
    config = with_counted_clients(config, partition)
    net = build_net(config, dataset.input_shape, dataset.num_classes, algorithm, integers=dataset.integers, given=given)
    config = choose_scale(config, dataset, net)
    augment.resolve(config.client.augment, dataset.input_shape)  # refuses to crop what is no image
    check_needs(config, algorithm, net, splits, partition)
    check_values(config, net, splits)
    try_out(metrics, splits.test.y, dataset.num_classes)
    asked, config = config.engine.name, choose_engine(config, net)
    net = _on_device(config, net)
    pool = build_pool(config, dataset, partition, splits, net)
    if config.dataset.asks_for_means:
        scaling = scaling or ask_for_scaling(config, net, pool, dataset.columns)
        scale, fill = config.dataset.scale == "standard", config.dataset.missing == "mean"
        net = net.with_input_scale(scaling.layer(net.input_shape, net.dtype, scale=scale, fill=fill))
    actors = ray_actors(config, dataset, partition, scaling, given) if config.engine.name == "ray" else None
    engine = build_engine(config, algorithm, net, pool, splits, scratch, runs_alike, actors)
    unused = (*dataset.notices, *(public.notices if isinstance(public, Dataset) else ()))
    clients = notices_on_clients(config, dataset, partition)
    notices = (*unused, *clients, *_notices(config, splits, asked, dataset.columns))
    return Built(config, dataset, partition, splits, algorithm, net, pool, engine, scaling, metrics, notices, given)


def _on_device(config: RunConfig, net: Net) -> Net:
    """The net where the engine computes; for a GPU, torch is set up until the run has ended."""
    if config.engine.name != "gpu":
        return net
    precision = config.engine.precision
    until_left(kernel_settings(deterministic=config.engine.deterministic, tf32=precision == "tf32"))
    compute = torch.bfloat16 if precision == "bf16" else net.dtype
    return net.copy(found_devices()[0], compute=compute).with_shared_kernels()


def _notices(config: RunConfig, splits: Splits, asked: str, columns: Columns | None) -> tuple[str, ...]:
    """What a user should know once, before the first round; `asked` is the engine that was asked for."""
    said = []
    if asked == "auto" and config.engine.name == "loop" and not torch.cuda.is_available():
        said.append("engine = auto found no GPU and runs on the CPU.")
    size = config.public.size
    if config.public.source != "train" and size != PublicOptions.size:
        said.append(
            f'public.size = {size} is not used: all of public.source = "{config.public.source}" is public. '
            'It says how much is set aside with public.source = "train".'
        )
    cohort = num_answers(config)
    if config.fnr is not None and not num_refined(cohort, config.fnr.share):
        whom = "a cohort of" if cohort == cohort_size(config) else "those that answer,"
        said.append(f"fnr.share = {config.fnr.share} of {whom} {cohort} is nobody: no client will be refined.")
    if config.fnr is not None and splits.public_to != "nobody":
        said.append(f"with {config.algorithm.name}, FNR ranks and refines on examples that clients have trained on.")
    return (*said, *_rows_that_sums_tell(config, splits), *_unscaled_inputs(config, splits, columns))


def _unscaled_inputs(config: RunConfig, splits: Splits, columns: Columns | None) -> tuple[str, ...]:
    """A notice if columns of numbers are not scaled and look as if they should be."""
    x = splits.train.x
    found = looks_unscaled(x, columns) if config.dataset.scale == "none" and x.ndim == 2 else None
    tokens = x.dtype == torch.int64  # perhaps
    return (f'{found} Training is easier with dataset.scale = "standard".',) if found and not tokens else ()


def _rows_that_sums_tell(config: RunConfig, splits: Splits) -> tuple[str, ...]:
    """A notice if clients hold one row of a table, and are asked for the sums of its columns."""
    single = [str(client) for client, mine in enumerate(splits.clients) if len(mine) == 1]
    if not config.dataset.asks_for_means or not single or splits.train.x.ndim > 2:
        return ()
    standard = config.dataset.scale == "standard"
    return (
        f"of each client that holds one example ({', '.join(single)}) the server learns that example: "
        f'{"dataset.scale = " if standard else "dataset.missing = "}"{"standard" if standard else "mean"}" asks for '
        "the mean of every column.",
    )
