"""The data of a run: what is set aside as public and validation data, what each client holds, and feature noise."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fnrfl.config import RunConfig
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.net import Net
from fnrfl.data import augment, scenarios
from fnrfl.data.batches import Pool
from fnrfl.data.datasets import Dataset, load
from fnrfl.data.partitions import Partition, draw
from fnrfl.data.reading import Expected, Reading
from fnrfl.data.splits import Splits, carve


def reading_of(config: RunConfig) -> Reading:
    """How a run reads its data, and all other data that it is held against."""
    keys = ("label", "client", "ignore", "categories", "missing", "image_size")
    return Reading.from_text(**{key: getattr(config.dataset, key) for key in keys})


def load_public(config: RunConfig, dataset: Dataset) -> Dataset | Literal["test"] | None:
    """Public data that is not carved out of the training set; a table's columns are matched by name."""
    source = config.public.source
    if source == "train":
        return None
    if source == "test":
        return "test"
    expected = Expected(dataset.columns, colour=dataset.facts().colour)
    return load(source, expected=expected, reading=reading_of(config))


def divide(
    config: RunConfig, dataset: Dataset, elsewhere: Dataset | Literal["test"] | None, algorithm: Algorithm
) -> tuple[Partition, Splits]:
    """Set public and validation data aside, then partition the rest among the clients.

    `elsewhere` is public data that is not set aside. A method that has public data handed out says so in `public_to`;
    the carving and the draw are the same for all.
    """
    public, labels = config.public, dataset.train.y.numpy()
    distill = public.distill if public.distill != "auto" else 0.2 if "distill" in algorithm.needs else 0.0
    carved = carve(
        labels,
        public=public.size if public.source == "train" else 0,
        ranking=public.ranking,
        distill=distill,
        validation=config.validation.size,
        seed=config.seed,
        num_classes=dataset.num_classes,
    )
    scenario = scenarios.parse(config.scenario)
    partition = draw(scenario, labels[carved.rest], config.clients, config.seed, num_classes=dataset.num_classes)
    splits = Splits.build(
        dataset,
        carved,
        partition.positions,
        public=elsewhere,
        leak_public_is_test=config.leaks.public_is_test,
        public_to=algorithm.public_to,
    )
    return partition, splits


def count_split(config: RunConfig, examples: int, classes: int) -> list[list[int]]:
    """How many examples of each class every client gets, of a training set with as many examples in each class.

    The draw depends on these numbers alone, so that the data itself need not be there.
    """
    labels = np.repeat(np.arange(classes), examples // classes)
    partition = draw(scenarios.parse(config.scenario), labels, config.clients, config.seed, num_classes=classes)
    return [[int(count) for count in row] for row in partition.counts]


def feature_noise(partition: Partition, client: int, x: Tensor, stream: torch.Generator) -> Tensor:
    """x + (eps * M(x)) * sigma_i + mean."""
    noise = partition.noise
    assert noise is not None
    mask = None
    if noise.kind == "mask":
        mask = torch.from_numpy(scenarios.mask(client, len(partition.positions), tuple(x.shape[1:]))).to(x)
    return augment.add_noise(x, float(partition.levels[client]), noise.mean, mask, generator=stream)


def build_pool(config: RunConfig, dataset: Dataset, partition: Partition, splits: Splits, net: Net) -> Pool:
    """What clients and server are fed with, where the net is."""
    noise = partition.noise
    return Pool(
        {
            "private": (splits.private.x, splits.private.y),
            "public": (splits.public.x, splits.public.y),
            "ranking": (splits.ranking.x, splits.ranking.y),
            "distill": (splits.distill.x, splits.distill.y),
            "validation": (splits.validation.x, splits.validation.y),
        },
        splits.clients,
        dataset.num_classes,
        dtype=net.input_dtype,
        noise=None if noise is None else lambda client, x, stream: feature_noise(partition, client, x, stream),
        redraw=noise is None or noise.redraw,
        seed=config.seed,
        device=net.device,
    )
