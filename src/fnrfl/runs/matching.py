"""Data that a model is asked about, held against what it was trained on: the same columns, shapes and classes.

The run's own data is known by its content, whatever it is called; other data is matched by columns' and classes' names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.core.words import counted
from fnrfl.data.arrays import tensor
from fnrfl.data.batches import check_fits
from fnrfl.data.datasets import Dataset, DataSource, read_source
from fnrfl.data.partition.views import num_shared
from fnrfl.data.reading import Examples, Expected
from fnrfl.data.sites import has_tables
from fnrfl.data.sources import NAMED_DATASETS, available
from fnrfl.runs.build_net import check_tokens
from fnrfl.runs.data import reading_of
from fnrfl.runs.predictions import EVERYTHING, OTHER_TEST, TrainedRun

MAX_PLACES = 6  # classes that a note names
MOST_NUMBERS = 1 << 23  # of a table or of pictures that are read once more: some seconds
MOST_BYTES = 1 << 28  # of arrays, which are stored as they are


@dataclass(frozen=True, eq=False)
class Asked:
    """Examples in the form that a model takes them; y is None where nobody knows."""

    x: Tensor
    y: Tensor | None
    rows: Sequence[str]  # where each example is in its part or its client's file: from 0, or an image's path
    carried: Sequence[str] | None = None  # what the table has in the column of ids
    clients: Sequence[str] | None = None  # who holds each example, where the data says it


def expected_of(trained: TrainedRun) -> Expected:
    """What a model expects of other data."""
    facts = trained.data
    return Expected(facts.columns, num_inputs=prod(facts.input_shape), colour=facts.colour, labelled=False)


def own_test_part(trained: TrainedRun, source: DataSource) -> Asked | None:
    """The test part of the run's own data, if that is what was given."""
    own = _own_data(trained, source)
    return None if own is None else Asked(own.test.x, own.test.y, rows=())


def _own_data(trained: TrainedRun, source: DataSource) -> Dataset | None:
    """The run's own data, if that is what was given; only data of the same size is hashed."""
    facts = trained.data
    if facts.examples is not None and sum(facts.examples) != source.num_examples:
        return None
    try:
        dataset = source.dataset(by_client=trained.data.clients is not None)
    except ConfigError:  # no run could have been made of it
        return None
    return dataset if (dataset.checksum, dataset.classes) == (facts.sha256, facts.classes) else None


def notes_on_training(trained: TrainedRun, data: str, asked: Asked) -> tuple[str, ...]:
    """What to say of examples that are in the training set, as far as that lies where it was and is read in seconds.

    A run keeps nothing of its examples, not even hashes, by which others could look for somebody's. Of a file in the
    folder that the run was made with, it is always said how many of its examples are for training.
    """
    path, place = Path(os.path.expanduser(data)), Path(trained.data.source)
    inside = place.is_absolute() and os.path.isdir(place) and path.exists() and place in path.resolve().parents
    where = str(place) if inside else _where_it_was(trained)
    if where is None or (path.exists() and str(path.resolve()) == where):  # which is not what it was
        return ()
    try:
        own = _own_data(trained, read_source(where, expected_of(trained), reading_of(trained.config)))
    except (FnrflError, OSError):  # it can no longer be read
        own = None
    if own is None:
        changed = f"{data} lies in {place}, which has changed since the run: the model may be trained on some of it."
        return (changed,) if inside else ()
    count, examples = num_shared(asked.x, own.train.x), counted(len(asked.x), "example")
    seen = trained.config.leaks.public_is_test
    way_out = (
        "Leave them out." if seen else f"Leave them out, or evaluate {where}: the model has not seen its test part."
    )
    if inside:
        return (f"{data} lies in the run's own data: of its {examples}, {count:,} are in the training set. {way_out}",)
    shared = (
        f"{data}: of {examples}, {count:,} {'has' if count == 1 else 'have'} the same inputs as one in the training set"
    )
    return (f"{shared}, so the model may know the answer. {way_out}",) if count else ()


def _where_it_was(trained: TrainedRun) -> str | None:
    """What the run's data is read from, if that is on this machine, runs no code and takes seconds."""
    facts, name = trained.data, trained.config.dataset.name
    named, place = name in NAMED_DATASETS, Path(facts.source)
    numbers = sum(facts.examples or ()) * prod(facts.input_shape)  # none: a run of version 0.1.0 does not say
    most = MOST_NUMBERS
    if named or place.suffix.lower() == ".npz":
        most = MOST_BYTES // (1 if facts.pixels else 4)
    if not 0 < numbers <= most:
        return None
    if named:
        return name if any(one.name == name and one.found for one in available()) else None
    return str(place) if place.is_absolute() and os.path.exists(place) else None  # not if nobody may look there


def notes_on_public(trained: TrainedRun, data: str) -> tuple[str, ...]:
    """What to say of the data that the run took as public, by its name or its file."""
    source = trained.config.public.source
    if source in ("train", "test"):  # parts of the run's own data
        return ()
    asked, public = (os.path.expanduser(one) for one in (data, source))
    there = os.path.exists(asked) and os.path.exists(public)
    if data != source and not (there and os.path.samefile(asked, public)):
        return ()
    return (
        f"{data} is the run's public data (public.source), on which the model may be trained. Evaluate other data.",
    )


def notes_on_changes(trained: TrainedRun, data: str, what: str) -> tuple[str, ...]:
    """What to say of data that has the name of the run's own and is not the same."""
    path, own = (Path(os.path.expanduser(name)) for name in (data, trained.config.dataset.name))
    named_alike = data == trained.config.dataset.name or (path.exists() and path.name == own.name)
    if not named_alike and not (path.exists() and str(path.resolve()) == trained.data.source):
        return ()
    return (
        f"{data} has changed since the run, or is another file of that name: it is not the data that the run was made "
        f"with. It is judged by {'its own test part' if what == OTHER_TEST else 'all of its examples'}, which may hold "
        "examples that the model was trained on.",
    )


def note_on_other_data(trained: TrainedRun, data: str, source: DataSource) -> tuple[str, ...]:
    """A note if data has the name of the run's own and is not the same."""
    said = notes_on_changes(trained, data, EVERYTHING)
    if not said or own_test_part(trained, source) is not None:
        return ()
    return (f"{data} has changed since the run, or is another file of that name.",)


def is_table(data: str) -> bool:
    """Whether data has columns with names: a table, or a folder with the tables of clients."""
    return Path(data).suffix.lower() == ".csv" or has_tables(Path(os.path.expanduser(data)))


def notes_on_columns(trained: TrainedRun, data: str, source: DataSource) -> tuple[str, ...]:
    """What one should know about how the data was taken."""
    said = list(source.raw.notices)
    columns = trained.data.columns
    if is_table(data) and columns is None:
        said.append(f"The run has no names of columns, so the columns of {data} are taken by position.")
    if source.raw.columns is None and columns is not None:
        listed = ", ".join(columns.inputs[:6]) + (", ..." if len(columns.inputs) > 6 else "")
        said.append(f"{data} has no names of columns, so they are taken in the order of the run's: {listed}.")
    return tuple(said)


def notes_on_labels(trained: TrainedRun, data: str, part: Examples, classes: Sequence[str] | None) -> tuple[str, ...]:
    """What to say of labels that are numbers, for a model whose classes have names."""
    if part.y is None or part.y.dtype.kind == "U" or classes is not None or _are_numbers(trained.classes):
        return ()
    taken = [f"{place} is taken as {name!r}" for place, name in enumerate(trained.classes[:MAX_PLACES])]
    more = ", ..." if len(trained.classes) > MAX_PLACES else ""
    return (f"{data} has numbers as labels, and the model's classes have names: {', '.join(taken)}{more}.",)


def matched(trained: TrainedRun, data: str, part: Examples, classes: Sequence[str] | None) -> Asked:
    """Examples held against what the model was trained on."""
    x = _in_shape(tensor(part.x), trained, data)
    check_fits(x, trained.net.input_dtype, data)
    check_tokens(trained.net, x, data)
    y = None if part.y is None else _as_numbers(part.y, classes, trained, data)
    clients = None if part.clients is None else [str(one) for one in part.clients]
    return Asked(x, y, part.names or [str(row) for row in range(len(x))], part.carried, clients)


def _in_shape(x: Tensor, trained: TrainedRun, data: str) -> Tensor:
    """Examples of the kind that the model was trained on; a table's columns are put into its shape."""
    shape = trained.data.input_shape
    pixels = x.dtype == torch.uint8
    if not pixels and x.ndim == 2 and not trained.data.pixels and x.shape[1] == prod(shape):
        x = x.reshape(-1, *shape)
    if tuple(x.shape[1:]) != shape or pixels != trained.data.pixels:
        kinds = ["pixels" if bytes_ else "numbers" for bytes_ in (pixels, trained.data.pixels)]
        raise CompatibilityError(
            f"{data} has examples of {kinds[0]} {list(x.shape[1:])}, and the model was trained on {kinds[1]} "
            f"{list(shape)}; they must be alike. Prepare the data in the same way."
        )
    return x


def _as_numbers(y: np.ndarray, classes: Sequence[str] | None, trained: TrainedRun, data: str) -> Tensor:
    """Labels as numbers of the model's classes, matched by name where there are names."""
    values, places = np.unique(y, return_inverse=True)
    names = [str(value) for value in values] if y.dtype.kind == "U" else _names(values, classes, trained.classes, data)
    number = {name: index for index, name in enumerate(trained.classes)}
    if unknown := [name for name in names if name not in number]:
        raise CompatibilityError(
            f"{data} has the class {unknown[0]!r}, which the model does not know; its classes are "
            f"{', '.join(trained.classes)}. Rename the class or leave those examples out."
        )
    return tensor(np.array([number[name] for name in names], dtype=np.int64)[places])


def _are_numbers(names: Sequence[str]) -> bool:
    return all(re.fullmatch(r"-?\d+", name) for name in names)


def _names(values: np.ndarray, classes: Sequence[str] | None, known: Sequence[str], data: str) -> list[str]:
    """The names of classes that data numbers: `classes` are its own names for them, `known` those of the model."""
    largest = int(values[-1])
    if classes is not None:
        if largest >= len(classes):
            raise ConfigError(
                f"{data} has the label {largest}, but names {len(classes)} classes; labels must be below that. Name "
                "every class or correct the label."
            )
        return [str(classes[value]) for value in values]
    if _are_numbers(known):
        if sorted(known, key=int) != list(known):
            raise CompatibilityError(
                f"{data} numbers its classes, and those of the model are called {', '.join(known)}: the label "
                f"{int(values[0])} may mean the class {str(values[0])!r} or the class at that place. Add an array "
                "`classes`."
            )
        return [str(value) for value in values]
    if largest >= len(known):
        raise CompatibilityError(
            f"{data} has the label {largest}, and the model knows {len(known)} classes, numbered from 0. Correct the "
            "labels."
        )
    return [known[value] for value in values]  # numbers without names stand for places
