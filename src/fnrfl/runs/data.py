"""The data of a run: what is set aside as public and validation data, and what each client holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fnrfl.config import RunConfig
from fnrfl.config.typed import PassedLabel
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.core.net import Net
from fnrfl.core.words import counted
from fnrfl.data import scenarios
from fnrfl.data.batches import Pool
from fnrfl.data.datasets import Dataset, load, object_source, refuse_keys_of_others
from fnrfl.data.noise import feature_noise
from fnrfl.data.partition import by_client as natural
from fnrfl.data.partition.draw import draw
from fnrfl.data.partition.holdout import Carved, carve
from fnrfl.data.partition.saved import read_saved_split
from fnrfl.data.partition.value import Partition, partition_of
from fnrfl.data.partition.views import Splits
from fnrfl.data.reading import Expected, Reading
from fnrfl.data.scenarios import Natural, SavedSplit
from fnrfl.data.sources import NAMED_DATASETS
from fnrfl.runs.passed import PassedObjects


def load_data(config: RunConfig, passed: PassedObjects) -> Dataset:
    """The data set of a run, which its config names or which was passed in.

    Where the scenario takes the clients of the data, a missing test part is drawn client by client.
    """
    split = scenarios.parse(config.scenario).split
    named = read_saved_split(split.path).partition.ids is not None if isinstance(split, SavedSplit) else False
    by_client, name, reading = named or isinstance(split, Natural), config.dataset.name, reading_of(config)
    if (values := passed.find("dataset", name)) is None:
        return load(name, reading=reading, by_client=by_client)
    refuse_keys_of_others(name, Path(name), reading)
    source = object_source(values, "dataset", reading)
    return replace(source.dataset(by_client=by_client), name=name, source=name)


def data_hash_now(config: RunConfig, passed: PassedObjects) -> str | None:
    """The sha256 of the data that a config's name stands for now.

    None for data that has a hash of its own in its name, and for data that cannot be read any more.
    """
    name = config.dataset.name
    if isinstance(name, PassedLabel) or name in NAMED_DATASETS:
        return None
    try:
        return load_data(config, passed).checksum
    except (FnrflError, OSError):
        return None


def reading_of(config: RunConfig) -> Reading:
    """How a run reads its data, and all other data that it is held against."""
    keys = ("label", "client", "ignore", "categories", "rename", "missing", "image_size")
    return Reading.from_text(**{key: getattr(config.dataset, key) for key in keys})


def load_public(config: RunConfig, dataset: Dataset, passed: PassedObjects) -> Dataset | Literal["test"] | None:
    """Public data that is not carved out of the training set; a table's columns are matched by name."""
    source = config.public.source
    if source in ("train", "test"):
        return "test" if source == "test" else None
    expected = Expected(dataset.columns, colour=dataset.facts().colour)
    if (public := passed.find("public", source)) is not None:
        return object_source(public, "public", reading_of(config), expected).dataset()
    return load(source, expected=expected, reading=reading_of(config))


def divide(
    config: RunConfig,
    dataset: Dataset,
    elsewhere: Dataset | Literal["test"] | None,
    algorithm: Algorithm,
    partition: Partition | None = None,
) -> tuple[Partition, Splits]:
    """Set public and validation data aside, then partition the rest among the clients.

    `elsewhere` is public data that is not set aside. A method that has public data handed out says so in `public_to`;
    the carving and the draw are the same for all. A `partition` that is given says who holds how many examples on
    other machines: of them nothing is set aside.
    """
    public = config.public
    distill = public.distill if public.distill != "auto" else 0.2 if "distill" in algorithm.needs else 0.0
    sizes: dict[str, float] = {
        "public": public.size if public.source == "train" else 0,
        "ranking": public.ranking,
        "distill": distill,
        "validation": config.validation.size,
    }
    if partition is None:
        carved, partition = _carve(config, dataset, sizes)
    else:
        none = np.arange(0)
        carved = Carved(none, none, none, sizes["ranking"], sizes["distill"], config.seed)
    held = dataset.train_clients and [dataset.train_clients[at] for at in carved.validation]
    splits = Splits.build(
        dataset,
        carved,
        partition.positions,
        public=elsewhere,
        leak_public_is_test=config.leaks.public_is_test,
        public_to=algorithm.public_to,
        site_tests=_brought_by(partition, dataset.test_clients),
        site_validation=_brought_by(partition, held),
    )
    if dataset.train.x.is_meta:  # a site's own examples, and the public ones that it is given
        held = [int(own) + len(given) for own, given in zip(partition.sizes, splits.clients, strict=True)]
        splits = replace(splits, clients=tuple(torch.empty(n, dtype=torch.int64, device="meta") for n in held))
    return partition, splits


def _brought_by(partition: Partition, holders: Sequence[str] | None) -> Sequence[np.ndarray]:
    """Return the positions of each client's examples, where the scenario takes the clients of the data; else none."""
    if partition.ids is None or not holders:
        return []
    return natural.positions_by_number(natural.client_numbers(holders, partition.ids), len(partition.ids))


def learns_from_public(algorithm: Algorithm) -> bool:
    """Whether anybody learns from public data under a method."""
    return bool(algorithm.needs & {"public-labels", "distill"}) or algorithm.public_to != "nobody"


def _carve(config: RunConfig, dataset: Dataset, sizes: dict[str, float]) -> tuple[Carved, Partition]:
    """(what is set aside, who holds the rest); both as a saved split says it, if the scenario is one."""
    labels, scenario = dataset.train.y.numpy(), scenarios.parse(config.scenario)
    saved = read_saved_split(scenario.split.path) if isinstance(scenario.split, SavedSplit) else None
    if saved is not None:
        saved.refuse_other_data(dataset)
        return saved.carve(labels, **sizes, seed=config.seed), saved.partition
    clients = dataset.train_clients if isinstance(scenario.split, Natural) else None
    names = tuple(natural.in_natural_order(clients or ()))
    holders = None if clients is None else natural.client_numbers(clients, names)
    carved = carve(labels, **sizes, seed=config.seed, num_classes=dataset.num_classes, holders=holders)
    rest, classes = labels[carved.rest], dataset.num_classes
    if holders is None:
        return carved, draw(scenario, rest, config.clients, config.seed, num_classes=classes)
    held = natural.positions_by_number(holders[carved.rest], len(names))  # each client has kept an example
    return carved, partition_of(held, rest, scenario, config.seed, classes, names)


def with_counted_clients(config: RunConfig, partition: Partition) -> RunConfig:
    """The config with as many clients as the split has; refused if another number was asked for."""
    count = len(partition.positions)
    if config.clients not in (0, count):
        who = f" ({natural.some_of(partition.ids)})" if partition.ids else ""
        raise ConfigError(
            f"clients is {config.clients}, and under scenario = {config.scenario!r} there are {count}{who}. Leave "
            "clients out: the scenario counts them."
        )
    return replace(config, clients=count)


def notices_on_clients(config: RunConfig, dataset: Dataset, partition: Partition) -> Iterator[str]:
    """What one should know about the clients that the data names."""
    held = dataset.train_clients
    if partition.ids is None:
        if held is not None:
            named = natural.in_natural_order(held)
            yield (
                f"{config.dataset.name} names {counted(len(named), 'client')} ({natural.some_of(named)}), and scenario "
                f'= "{config.scenario}" draws others. Set scenario = "natural" to take those of the data.'
            )
        return
    tested, trained = set(dataset.test_clients or ()), set(partition.ids)
    if strange := natural.in_natural_order(tested - trained):
        yield (
            f"{config.dataset.name} has test examples of {counted(len(strange), 'client')} without training examples "
            f"({natural.some_of(strange)}); they count for accuracy, and for no client's accuracy_site."
        )
    if tested and (untested := [name for name in partition.ids if name not in tested]):
        yield (
            f"{counted(len(untested), 'client')} of {config.dataset.name} ({natural.some_of(untested)}) "
            f"{'has' if len(untested) == 1 else 'have'} no test examples, and so no accuracy_site."
        )


def build_pool(
    config: RunConfig, dataset: Dataset, partition: Partition, splits: Splits, net: Net, client: int | None = None
) -> Pool:
    """What clients and server are fed with, where the net is.

    Of clients whose examples are elsewhere it knows how many they have. With `client`, the splits are this one's alone.
    """
    noise, names = partition.noise, ("private", "public", "ranking", "distill", "validation")
    parts = {name: part for name in names if not (part := getattr(splits, name)).x.is_meta}
    shards: Sequence[Tensor] = splits.clients
    sizes = splits.sizes.tolist()
    if client is not None:
        handed_out = len(splits.clients[0]) - len(splits.train)  # public examples that everybody gets
        sizes = [int(size) + handed_out for size in partition.sizes]
        shards = [splits.clients[0] if one == client else torch.arange(0) for one in range(len(sizes))]
    elif "private" not in parts:
        shards = [torch.arange(0)] * len(shards)
    return Pool(
        {name: (part.x, part.y) for name, part in parts.items()},
        shards,
        dataset.num_classes,
        sizes=sizes,
        dtype=net.input_dtype,
        noise=None if noise is None else lambda client, x, stream: feature_noise(partition, client, x, stream),
        redraw=noise is None or noise.redraw,
        seed=config.seed,
        device=net.device,
    )
