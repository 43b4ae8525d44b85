"""Data sets as tensors, from a name, a file, a folder of images or a function of the user's.

Values are kept as they come: pixels stay uint8 (they are divided by 255 where batches are gathered), whole numbers stay
whole, and features keep their scale: `dataset.scale` is the net's business. `read_source` is the one way to data, for
training and for use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted, same_spelling
from fnrfl.data import arrays, readers, sites
from fnrfl.data.frames import instead_of
from fnrfl.data.gaps import with_gaps_treated
from fnrfl.data.partition import by_client as natural
from fnrfl.data.partition import stratify as strata
from fnrfl.data.reading import ONLY_PART, PLAIN_READING, Columns, Examples, Expected, RawData, Reading
from fnrfl.data.sources import NAMED_DATASETS, cifar10, load_named, read_verified
from fnrfl.data.sources.entry import Arrays, checksum

Values = np.ndarray | Tensor


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
            return cls(
                source=values["source"],
                sha256=values["sha256"],
                classes=tuple(values["classes"]),
                input_shape=tuple(values["input_shape"]),
                pixels=values["pixels"],
                tokens=values.get("tokens", False),
                columns=Columns.from_json(values["columns"]) if values.get("columns") else None,
                examples=tuple(values["examples"]) if values.get("examples") else None,
                clients=tuple(values["clients"]) if values.get("clients") else None,
            )
        except (KeyError, TypeError, AttributeError) as error:
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
            raise natural.names_nobody(self.name)
        if by_client and self.raw.emptied:
            raise natural.left_with_nothing(self.name, self.raw.emptied)
        if len(parts) == 1:
            parts = _draw_test_part(self.name, parts[0], seed, by_client)
        made = _assemble(self.name, parts, self.raw.classes, self.source, self.checksum)
        return replace(made, columns=self.raw.columns, notices=self.raw.notices)


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
    used = expected is None or expected.labels_used
    if expected is None:
        refuse_keys_of_others(name, path, reading)
    if name in NAMED_DATASETS:
        return _named_source(name, *load_named(name))
    if os.path.isfile(path / cifar10.BATCH_FILES[0]):
        return _named_source("cifar10", read_verified("cifar10", path, cifar10.read_cifar), str(path.resolve()))
    if path.suffix.lower() in sites.FILE_READERS:
        raw = sites.FILE_READERS[path.suffix.lower()](path, expected, reading)
    elif path.is_dir():
        raw = sites.read_folder(path, expected, reading)
    elif ":" in name:
        told = f"dataset = {name!r} returned"
        return source_of_values(name, readers.call_function(name), told, reading, labels_used=used)
    else:
        raise readers.not_read(name, path, NAMED_DATASETS)
    return DataSource(name, str(path.resolve()), checked_raw(name, raw, reading, labels_used=used))


def refuse_keys_of_others(name: str, path: Path, reading: Reading) -> None:
    """Refuse keys that name columns where the data has none, and a size of pictures where it has no files of them."""
    if reading.image_size is not None and not path.is_dir():
        raise ConfigError(
            f"dataset.image_size resizes the images of a folder, and dataset = {name!r} is none. Leave the key out, or "
            "resize the arrays yourself."
        )
    given = [key for key in ("label", "client", "ignore", "categories") if getattr(reading, key)]
    if given and path.suffix.lower() != ".csv" and not sites.has_tables(path):
        sites.refuse_other_tables(path)
        raise ConfigError(
            f"dataset.{given[0]} names a column of a table, and dataset = {name!r} is no table (.csv). Leave the key "
            "out, or give a table."
        )


def source_of_values(name: str, made: object, told: str, reading: Reading, *, labels_used: bool = True) -> DataSource:
    """What a function of the user's returned, or what was passed in; `told` begins the sentence that refuses it."""
    if isinstance(made, RawData):
        return DataSource(name, name, checked_raw(name, made, reading, labels_used=labels_used))
    if isinstance(made, Dataset):
        parts = {
            "train": Examples(made.train.x, made.train.y, clients=made.train_clients),
            "test": Examples(made.test.x, made.test.y, clients=made.test_clients),
        }
        return DataSource(made.name, made.source, checked_raw(made.name, RawData(parts, made.classes), reading))
    if not isinstance(made, tuple) or len(made) not in (2, 3, 4, 6):
        length = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise ConfigError(
            f"{told} {type(made).__name__}{length}; it must be a fnrfl Dataset, a tuple x_train, y_train, x_test, "
            "y_test, or a tuple x, y; with the client of each example, x_train, y_train, clients_train, x_test, "
            "y_test, clients_test, or x, y, clients. In Python a torch Dataset will do too." + instead_of(made)
        )
    if len(made) < 4:
        parts = {ONLY_PART: as_returned(made)}
    else:
        half = len(made) // 2
        parts = {"train": as_returned(made[:half]), "test": as_returned(made[half:])}
    return DataSource(name, name, checked_raw(name, RawData(parts), reading, labels_used=labels_used))


def as_returned(values: tuple[object, ...]) -> Examples:
    """x, y and perhaps the client of each example."""
    return Examples(values[0], values[1], clients=values[2] if len(values) > 2 else None)


def from_arrays(
    name: str,
    x_train: Values,
    y_train: Values,
    x_test: Values,
    y_test: Values,
    *,
    classes: Sequence[str] | None = None,
    source: str = "arrays",
) -> Dataset:
    """A data set from four arrays or tensors, checked.

    Images of uint8 may be [n, H, W], [n, C, H, W] or [n, H, W, C]; floating features keep their shape and precision,
    whole numbers become int64. Labels are class numbers from 0, or names, which are numbered in sorted order.
    """
    parts = {"train": Examples(x_train, y_train), "test": Examples(x_test, y_test)}
    return DataSource(name, source, checked_raw(name, RawData(parts, classes), PLAIN_READING)).dataset()


def checked_raw(name: str, raw: RawData, reading: Reading, *, labels_used: bool = True) -> RawData:
    """The same data, its arrays checked: they hold numbers, and one label for each example if there are labels.

    Labels that nobody uses are none at all if some are missing.
    """
    parts = {}
    for part, examples in raw.parts.items():
        ending = f"_{part}" if part else ""
        x = arrays.features(examples.x, f"x{ending} of {name}", gaps=reading.missing != "refuse")
        y = arrays.labels_if_used(examples.y, f"y{ending} of {name}", used=labels_used)
        if y is not None and len(x) != len(y):
            where = (f" in x{ending}", f" in y{ending}") if part else ("", "")
            raise ConfigError(
                f"{name} has {counted(len(x), 'example')}{where[0]} and {counted(len(y), 'label')}{where[1]}; "
                "there must be one label for each example. Write both from the same list."
            )
        if not len(x):
            raise ConfigError(f"{name} has no examples in x{ending}; at least one is needed. Add some.")
        clients = None
        if examples.clients is not None:
            clients = arrays.client_names(examples.clients, len(x), f"clients{ending} of {name}")
        parts[part] = replace(examples, x=x, y=y, clients=clients)
    xs = arrays.as_one_type([part.x for part in parts.values()])
    if len({(x.shape[1:], x.dtype) for x in xs}) > 1:
        raise ConfigError(
            f"{name} has training examples of {xs[0].dtype}{list(xs[0].shape[1:])} and test examples of "
            f"{xs[1].dtype}{list(xs[1].shape[1:])}; they must be alike. Prepare both in the same way."
        )
    alike = {part: replace(parts[part], x=x) for part, x in zip(parts, xs, strict=True)}
    classes = None if raw.classes is None else [same_spelling(str(one)) for one in raw.classes]
    return with_gaps_treated(name, replace(raw, parts=alike, classes=classes), reading)


def _assemble(
    name: str, parts: Sequence[Examples], classes: Sequence[str] | None, source: str, known: str | None
) -> Dataset:
    """A data set of two checked parts; `known` is its checksum if somebody has made sure of it."""
    if any(part.y is None for part in parts):
        raise ConfigError(f"{name} has no labels, and they are needed here. Add the labels.")
    y, named_classes = arrays.numbered([part.y for part in parts], classes, name)
    x = [part.x for part in parts]
    train, test = (Part(arrays.tensor(values), arrays.tensor(labels)) for values, labels in zip(x, y, strict=True))
    clients = [None if part.clients is None else tuple(str(one) for one in part.clients) for part in parts]
    return Dataset(
        name,
        train,
        test,
        named_classes,
        source,
        known or checksum(x[0], y[0], x[1], y[1]),
        train_clients=clients[0],
        test_clients=clients[1],
    )


def _named_source(name: str, verified: Arrays, source: str) -> DataSource:
    """A named data set; its arrays have been verified to the last bit."""
    parts = {"train": Examples(verified.x_train, verified.y_train), "test": Examples(verified.x_test, verified.y_test)}
    return DataSource(name, source, RawData(parts, NAMED_DATASETS[name].classes), NAMED_DATASETS[name].checksum)


def _draw_test_part(name: str, examples: Examples, seed: int, by_client: bool) -> list[Examples]:
    """Checked examples that come without a test part, in two: a stratified fifth of them becomes one."""
    if examples.y is None:
        return [examples, examples]  # refused by whoever needs labels
    if by_client:
        held = natural.positions_by_client(examples.clients.tolist())
        test = strata.draw_test_part_by_client(examples.y, held, seed)
    else:
        test = strata.draw_test_part(examples.y, seed)
    if len(examples.y) < 2 or not len(test):
        raise ConfigError(
            f"{name} has {counted(len(examples.x), 'example')}{', one for each client' if by_client else ''}; two "
            f"examples{' of one client' if by_client else ''} at least are needed, because a fifth of them becomes the "
            "test set. Add some."
        )
    return [examples.take(np.setdiff1d(np.arange(len(examples.y)), test)), examples.take(test)]
