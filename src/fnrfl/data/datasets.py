"""Data sets as tensors, from a name, a file, a folder of images or a function of the user's.

Values are kept as they come: pixels stay uint8 (they are divided by 255 where batches are gathered), whole numbers stay
whole, and features keep their scale: `dataset.scale` is the net's business. `read_source` is the one way to data, for
training and for use.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from fnrfl import usercode
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted, did_you_mean
from fnrfl.data import arrays, sites
from fnrfl.data.files import IMAGE_ENDINGS
from fnrfl.data.normalise import normalise
from fnrfl.data.objects import read_object
from fnrfl.data.partition import by_client as natural
from fnrfl.data.partition import holdout
from fnrfl.data.reading import DATA_ENDINGS, PLAIN_READING, TABLE_ENDINGS, Columns, Examples, Expected, RawData, Reading
from fnrfl.data.sources import NAMED_DATASETS, cifar10, load_named, read_verified
from fnrfl.data.sources.entry import Arrays, checksum

AT_SITES = "each site's own machine"  # the source of data that sites on a network keep


@dataclass(frozen=True, eq=False)
class Part:
    """Some examples: x is uint8 pixels [n, C, H, W], floating [n, ...] or int64 [n, ...], y int64 [n]."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> Part:
        """The examples at these positions, copied."""
        if self.x.is_meta and not len(index):  # nothing of examples that are elsewhere is here
            return Part(torch.empty_like(self.x[:0], device="cpu"), torch.empty_like(self.y[:0], device="cpu"))
        return Part(self.x[index], self.y[index])


@dataclass(frozen=True)
class Facts:
    """What a run remembers of its data: enough to know it again by content, and to match other data with it."""

    source: str
    sha256: str
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    pixels: bool  # bytes from 0 to 255, not numbers of any size
    tokens: bool = False  # whole numbers that the model takes as they are
    columns: Columns | None = None  # of a table
    examples: tuple[int, int] | None = None  # of the training and the test part
    clients: tuple[str, ...] | None = None  # what the data calls them, where the scenario takes its clients

    @property
    def colour(self) -> bool:
        """Whether the examples are pictures in colour."""
        return self.pixels and len(self.input_shape) == 3 and self.input_shape[0] == 3

    def as_json(self) -> dict[str, Any]:
        """The facts as plain values."""
        return vars(self) | {"columns": None if self.columns is None else self.columns.as_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Facts:
        """The inverse of `as_json`; runs of version 0.1.0 know less."""
        try:
            columns = Columns.from_json(values["columns"]) if values.get("columns") else None
            return TypeAdapter(cls).validate_python(values | {"columns": columns})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"The run's first event does not describe its data as it must ({type(error).__name__}: {error}). Put "
                "events.jsonl back as it was, or run again."
            ) from error


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test part, the names of the classes, and where it all came from."""

    name: str
    train: Part
    test: Part
    classes: tuple[str, ...]
    source: str
    checksum: str
    columns: Columns | None = None  # of a table
    notices: tuple[str, ...] = ()  # what the source holds and nobody uses
    train_clients: tuple[str, ...] | None = None  # who holds each training example; None where nobody says
    test_clients: tuple[str, ...] | None = None

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])

    @property
    def integers(self) -> bool:
        """Whether the examples are whole numbers that are no pixels."""
        return self.train.x.dtype == torch.int64

    def as_raw(self) -> RawData:
        """Its arrays, for the one way in."""
        held = {"train": (self.train, self.train_clients), "test": (self.test, self.test_clients)}
        parts = {name: Examples(part.x.numpy(), part.y.numpy(), clients=who) for name, (part, who) in held.items()}
        return RawData(parts, self.classes)

    def facts(self, *, tokens: bool = False) -> Facts:
        """What a run remembers of it; `tokens` says that the model takes whole numbers as they are."""
        return Facts(
            source=self.source,
            sha256=self.checksum,
            classes=self.classes,
            input_shape=self.input_shape,
            pixels=self.train.x.dtype == torch.uint8,
            tokens=tokens,
            columns=self.columns,
            examples=(len(self.train), len(self.test)),
        )


@dataclass(frozen=True, eq=False)
class DataSource:
    """Everything that a name stands for, read and checked, before a test part is drawn or classes are numbered."""

    name: str
    source: str
    raw: RawData  # its arrays are checked
    checksum: str | None = None  # of a named data set, which is verified to the last bit

    @property
    def num_examples(self) -> int:
        """How many there are."""
        return sum(len(part.x) for part in self.raw.parts.values())

    def dataset(self, *, seed: int = 0, by_client: bool = False) -> Dataset:
        """Its examples as a data set; the seed only draws a test part for data that comes without one.

        With `by_client` the data must name its clients, and the test part is drawn from each client's examples.
        """
        parts = list(self.raw.parts.values())
        if by_client and parts[0].clients is None:
            raise ConfigError(
                f'scenario = "natural" takes the clients that the data names, and {self.name} names none. Name them '
                "with an array `client` in the .npz, the column that dataset.client names in a .csv, a file or folder "
                "for each client, or a third value that the function returns; or choose a scenario that draws clients, "
                "such as iid."
            )
        if by_client and self.raw.emptied:
            raise ConfigError(
                f"{self.name}: every example of {natural.some_of(self.raw.emptied)} has a missing value, and "
                'dataset.missing = "drop" leaves those out. Set dataset.missing = "mean", leave columns out with '
                "dataset.ignore, or leave out who has nothing else."
            )
        if any(part.y is None for part in parts):
            raise ConfigError(f"{self.name} has no labels, and they are needed here. Add the labels.")
        if len(parts) == 1:
            parts = _draw_test_part(self.name, parts[0], seed, by_client)
        x = [part.x for part in parts]
        y, classes = arrays.numbered([part.y for part in parts], self.raw.classes, self.name)
        train, test = (Part(arrays.tensor(values), arrays.tensor(labels)) for values, labels in zip(x, y, strict=True))
        clients = [None if part.clients is None else tuple(str(one) for one in part.clients) for part in parts]
        known, raw = self.checksum or checksum(x[0], y[0], x[1], y[1]), self.raw
        return Dataset(self.name, train, test, classes, self.source, known, raw.columns, raw.notices, *clients)


def load(
    name: str,
    *,
    seed: int = 0,
    expected: Expected | None = None,
    reading: Reading = PLAIN_READING,
    by_client: bool = False,
) -> Dataset:
    """The data set called `name`; the seed only draws a test part for data that comes without one.

    With `expected`, a table's columns are matched by name with those of another. With `by_client` the data must name
    its clients, and the test part is drawn from each client's examples.
    """
    return read_source(name, expected, reading).dataset(seed=seed, by_client=by_client)


def read_source(name: str, expected: Expected | None = None, reading: Reading = PLAIN_READING) -> DataSource:
    """What `name` stands for: a data set, a file, a folder of images or what a function returns.

    Without `expected` it is to be trained on; with it, it is compared with what a model expects. `reading` says how.
    """
    path = Path(os.path.expanduser(name))  # of an unknown user: as it is, where Path would raise
    if expected is None and (path.exists() or name in NAMED_DATASETS or ":" in name):
        refuse_keys_of_others(name, path, reading)
    if name in NAMED_DATASETS:
        return _named_source(name, *load_named(name))
    if os.path.isfile(path / cifar10.BATCH_FILES[0]):
        return _named_source("cifar10", read_verified("cifar10", path, cifar10.read_cifar), str(path.resolve()))
    if path.is_dir() or path.suffix.lower() in DATA_ENDINGS:
        held, source = sites.read_path(path, expected, reading), str(path.resolve())
    elif ":" in name:
        function = usercode.fetch(f"dataset = {name!r}", usercode.target("dataset.name", name))
        if not callable(function):
            raise ConfigError(
                f"dataset = {name!r} is a {type(function).__name__}, which cannot be called. Name a function."
            )
        held, source = [("", read_object(function, name, begins=f"dataset = {name!r} returned"))], name
    else:
        raise _not_read(name, path)
    return DataSource(name, source, normalise(name, held, reading, expected))


def object_source(
    value: object, title: str, reading: Reading = PLAIN_READING, expected: Expected | None = None
) -> DataSource:
    """The same of an object that was passed in; `title` is what sentences call it."""
    held = [("", read_object(value, title, expected))]
    return DataSource(title, title, normalise(title, held, reading, expected))


def refuse_keys_of_others(name: str, path: Path, reading: Reading) -> None:
    """Refuse keys that name columns where the data has none, and a size of pictures where it has no files of them."""
    columns = [key for key in ("label", "client", "ignore", "categories", "rename") if getattr(reading, key)]
    if reading.image_size is not None and not path.is_dir():
        raise ConfigError(
            f"dataset.image_size resizes the images of a folder, and dataset = {name!r} is none. Leave the key out, or "
            "resize the arrays yourself."
        )
    if columns and not sites.has_tables(path):
        sites.refuse_other_tables(path)
        raise ConfigError(
            f"dataset.{columns[0]} names a column of a table, and dataset = {name!r} is no table "
            f"({', '.join(TABLE_ENDINGS)}). Leave the key out, or give a table."
        )


def _not_read(name: str, path: Path) -> ConfigError:
    """What to say of a name that stands for no data."""
    if path.suffix.lower() in IMAGE_ENDINGS and path.is_file():
        return ConfigError(
            f"dataset = {name!r} is one picture, and pictures are read by the folder. Give its folder, "
            f"{str(path.parent)!r}, or one that holds this picture alone."
        )
    what = "a file that is not read" if path.is_file() else "neither a known data set nor a file or folder that exists"
    way_out = " Convert it to .csv or .npz." if path.is_file() else did_you_mean(name, NAMED_DATASETS)
    return ConfigError(
        f"dataset = {name!r} is {what}; it must be {', '.join(NAMED_DATASETS)}, a file ({', '.join(DATA_ENDINGS)}), a "
        f"folder of images or of clients, or module:function.{way_out or ' Check the name.'}"
    )


def _named_source(name: str, verified: Arrays, source: str) -> DataSource:
    """A named data set; its arrays have been verified to the last bit."""
    parts = {"train": Examples(verified.x_train, verified.y_train), "test": Examples(verified.x_test, verified.y_test)}
    return DataSource(name, source, RawData(parts, NAMED_DATASETS[name].classes), NAMED_DATASETS[name].checksum)


def _draw_test_part(name: str, examples: Examples, seed: int, by_client: bool) -> list[Examples]:
    """Checked examples that come without a test part, in two: a stratified fifth of them becomes one."""
    if by_client:
        held = natural.positions_by_client(examples.clients.tolist())
        test = holdout.draw_test_part_by_client(examples.y, held, seed)
    else:
        test = holdout.draw_test_part(examples.y, seed)
    if len(examples.y) < 2 or not len(test):
        raise ConfigError(
            f"{name} has {counted(len(examples.x), 'example')}{', one for each client' if by_client else ''}; two "
            f"examples{' of one client' if by_client else ''} at least are needed, because a fifth of them becomes the "
            "test set. Add some."
        )
    return [examples.take(np.setdiff1d(np.arange(len(examples.y)), test)), examples.take(test)]
