"""Data for the model of a finished run, in the form that the model takes: the same columns, shapes and classes.

The run's own data is known by its content, whatever it is called; other data is matched by columns' and classes' names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fnrfl.core.errors import CompatibilityError, FnrflError
from fnrfl.core.words import counted
from fnrfl.data.arrays import tensor
from fnrfl.data.batches import check_fits
from fnrfl.data.datasets import Dataset, DataSource, Facts, read_source
from fnrfl.data.partition.views import num_shared
from fnrfl.data.reading import Examples, Expected
from fnrfl.data.sites import has_tables
from fnrfl.data.sources import NAMED_DATASETS, available
from fnrfl.runs.data import reading_of
from fnrfl.runs.result import Result
from fnrfl.runs.setup.model import check_tokens

MAX_LISTED = 6  # classes and columns that a note names
MAX_BYTES = 1 << 26  # of files that are read once more: some seconds


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Examples in the form that a model takes them; y is None where nobody knows."""

    x: Tensor
    y: Tensor | None
    rows: Sequence[str]  # where each example is in its part or its client's file: from 0, or an image's path
    carried: Sequence[str] | None = None  # what the table has in the column of ids
    clients: Sequence[str] | None = None  # who holds each example, where the data says it


def prepare(result: Result, title: str, part: Examples, classes: Sequence[str] | None) -> PreparedData:
    """Bring examples into the form of those that the model was trained on; `classes` are the data's names for them."""
    facts, net, x = result.data, result.net, tensor(part.x)
    pixels = x.dtype == torch.uint8
    if not pixels and x.ndim == 2 and not facts.pixels and x.shape[1] == prod(facts.input_shape):
        x = x.reshape(-1, *facts.input_shape)
    if tuple(x.shape[1:]) != facts.input_shape or pixels != facts.pixels:
        kinds = ["pixels" if of_bytes else "numbers" for of_bytes in (pixels, facts.pixels)]
        raise CompatibilityError(
            f"{title} has examples of {kinds[0]} {list(x.shape[1:])}, and the model was trained on {kinds[1]} "
            f"{list(facts.input_shape)}; they must be alike. Prepare the data in the same way."
        )
    check_fits(x, net.input_dtype, title)
    check_tokens(net, x, title)
    y = None if part.y is None else _class_numbers(part.y, classes, facts.classes, title)
    clients = None if part.clients is None else [str(one) for one in part.clients]
    return PreparedData(x, y, part.names or [str(row) for row in range(len(x))], part.carried, clients)


def expected_of(facts: Facts) -> Expected:
    """Return what a model that was trained on some data expects of other data."""
    return Expected(facts.columns, num_inputs=prod(facts.input_shape), colour=facts.colour, labelled=False)


def is_table(title: str) -> bool:
    """Whether data has columns with names: a table, or a folder with the tables of clients."""
    return Path(title).suffix.lower() == ".csv" or has_tables(Path(os.path.expanduser(title)))


# -- by content --------------------------------------------------------------------------------------------------------


def own_data(facts: Facts, source: DataSource) -> Dataset | None:
    """Return data as a run has it if it is the run's own, by its hash; only data of the same size is hashed."""
    if facts.examples is not None and sum(facts.examples) != source.num_examples:
        return None
    try:
        dataset = source.dataset(by_client=facts.clients is not None)
    except FnrflError:  # no run could have been made of it
        return None
    return dataset if (dataset.checksum, dataset.classes) == (facts.sha256, facts.classes) else None


def notes_on_training(result: Result, title: str, x: Tensor) -> Iterator[str]:
    """Say how many examples have the inputs of one that the model was trained on.

    A run keeps nothing of its examples, not even hashes, by which others could look for somebody's. So its data, and
    its public data, is read again where it was, if that is on this machine, runs no code and takes seconds.
    """
    facts, config = result.data, result.config
    own = config.dataset.name if config.dataset.name in NAMED_DATASETS else facts.source
    for name, part in ((own, "training set"), (config.public.source, "public data")):
        source = _read_again(result, name)
        if source is None:
            continue
        same = own_data(facts, source) if name == own else None
        if name == own and same is None:
            yield f"The run's data, {name}, has changed since: the model may be trained on some of these examples."
            continue
        known = [tensor(part.x) for part in source.raw.parts.values()] if same is None else [same.train.x]
        count = sum(num_shared(x, others) for others in known if others.shape[1:] == x.shape[1:])
        unseen = same is not None and not config.leaks.public_is_test
        instead = f", or evaluate {name}: the model has not seen its test part" if unseen else ""
        if count:
            yield (
                f"{title}: of {counted(len(x), 'example')}, {count:,} {'has' if count == 1 else 'have'} the same "
                f"inputs as one in the {part}, so the model may know the answer. Leave them out{instead}."
            )


def _read_again(result: Result, name: str) -> DataSource | None:
    """Read data of a run once more; None if it cannot be read, or not in seconds."""
    if name in ("train", "test") or not _read_in_seconds(name):
        return None
    try:
        return read_source(name, expected_of(result.data), reading_of(result.config))
    except (FnrflError, OSError):
        return None


def _read_in_seconds(name: str) -> bool:
    """Whether data is here, no code, and not larger than what is read in some seconds."""
    if name in NAMED_DATASETS:
        return any(one.name == name and one.found for one in available())
    path = os.path.expanduser(name)
    files = [path] if os.path.isfile(path) else [os.path.join(at, one) for at, _, all_ in os.walk(path) for one in all_]
    return bool(files) and sum(os.path.getsize(file) for file in files if os.path.isfile(file)) <= MAX_BYTES


# -- by name -----------------------------------------------------------------------------------------------------------


def notes_on_columns(facts: Facts, title: str, source: DataSource) -> Iterator[str]:
    """Say how the columns were matched, beside what the source itself has to say."""
    yield from source.raw.notices
    if is_table(title) and facts.columns is None:
        yield f"The run has no names of columns, so the columns of {title} are taken by position."
    if source.raw.columns is None and facts.columns is not None:
        listed = _listed(facts.columns.inputs)
        yield f"{title} has no names of columns, so they are taken in the order of the run's: {listed}."


def notes_on_labels(known: Sequence[str], title: str, part: Examples, classes: Sequence[str] | None) -> Iterator[str]:
    """Say how labels that are numbers are taken by a model whose classes have the names `known`."""
    if part.y is not None and part.y.dtype.kind != "U" and classes is None and not _are_numbers(known):
        taken = _listed([f"{place} is taken as {name!r}" for place, name in enumerate(known)])
        yield f"{title} has numbers as labels, and the model's classes have names: {taken}."


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:MAX_LISTED]) + (", ..." if len(words) > MAX_LISTED else "")


def _class_numbers(y: np.ndarray, classes: Sequence[str] | None, known: Sequence[str], title: str) -> Tensor:
    """Return labels as numbers of the model's classes, matched by name where there are names."""
    values, places = np.unique(y, return_inverse=True)
    names = [str(value) for value in values] if y.dtype.kind == "U" else _class_names(values, classes, known, title)
    number = {name: index for index, name in enumerate(known)}
    if unknown := [name for name in names if name not in number]:
        raise CompatibilityError(
            f"{title} has the class {unknown[0]!r}, which the model does not know; its classes are "
            f"{', '.join(known)}. Rename the class or leave those examples out."
        )
    return tensor(np.array([number[name] for name in names], dtype=np.int64)[places])


def _class_names(values: np.ndarray, classes: Sequence[str] | None, known: Sequence[str], title: str) -> list[str]:
    """Name the classes that data numbers: `classes` are its own names for them, `known` those of the model."""
    if classes is None and _are_numbers(known):
        if sorted(known, key=int) != list(known):
            raise CompatibilityError(
                f"{title} numbers its classes, and those of the model are called {', '.join(known)}: the label "
                f"{int(values[0])} may mean the class {str(values[0])!r} or the class at that place. Add an array "
                "`classes`."
            )
        return [str(value) for value in values]
    names = known if classes is None else classes  # numbers without names stand for places
    if (largest := int(values[-1])) >= len(names):
        whose = "the model knows" if classes is None else "it names"
        raise CompatibilityError(
            f"{title} has the label {largest}, and {whose} {counted(len(names), 'class', 'classes')}; labels must be "
            "numbered from 0. Correct the label or name every class."
        )
    return [str(names[value]) for value in values]


def _are_numbers(names: Sequence[str]) -> bool:
    return all(re.fullmatch(r"-?\d+", name) for name in names)
