"""How a source is read, what every reader of a user's data returns, and what a trained model expects of other data."""

from __future__ import annotations

import csv
import pickle
import re
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import same_spelling

# What readers of files raise when the bytes are not what the format promises.
UNREADABLE = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, NotImplementedError),
    *(zlib.error, zipfile.BadZipFile, tarfile.TarError, pickle.UnpicklingError),
)

Categories = dict[str, tuple[str, ...]]  # of the columns of a table that have some, by the column's name

LARGEST_SIDE = 10_000  # of a picture, in pixels

TABLE_ENDINGS = (".csv", ".tsv", ".xlsx", ".parquet")
DATA_ENDINGS = (*TABLE_ENDINGS, ".npz", ".json")  # of files that are read as data

ONLY_PART = ""  # the name of the part where data has just one
PARTS = ("train", "test")  # the names where it has two


@dataclass(frozen=True)
class Reading:
    """How a source is read, as the keys of `[dataset]` say it."""

    label: str = ""  # a table's column of classes; "": the one that is called label, class, target or y, else the last
    client: str = ""  # a table's column that says which client holds a row; "": there is none
    ignore: tuple[str, ...] = ()  # a table's columns that are no inputs
    categories: tuple[str, ...] = ()  # a table's columns whose numbers are names of categories
    rename: tuple[tuple[str, str], ...] = ()  # (name in some tables, name that the column has everywhere)
    missing: str = "refuse"  # what becomes of missing values: refuse, mean or drop
    image_size: tuple[int, int] | None = None  # the height and width that pictures get; None: as they are

    @classmethod
    def from_text(
        cls, *, label: str, client: str, ignore: str, categories: str, rename: str, missing: str, image_size: str
    ) -> Reading:
        """From the values of the keys; names of columns with a comma in them stand in quotes, as in a table."""
        size = parse_image_size(image_size)
        label, client = same_spelling(label.strip()), same_spelling(client.strip())
        lists = split_names(ignore), split_names(categories), split_pairs(rename)
        return cls(label, client, *lists, missing, size)


def parse_image_size(text: str) -> tuple[int, int] | None:
    """A height and a width: 32, or 48x64; None if the text is empty."""
    if not text.strip():
        return None
    found = re.fullmatch(r"([0-9]{1,5})(?:\s*[xX]\s*([0-9]{1,5}))?", text.strip())
    size = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not all(1 <= side <= LARGEST_SIDE for side in size):
        raise ConfigError(
            f'dataset.image_size = "{text[:40]}" is not allowed: it must be a number of pixels, as 64, or a height and '
            f"a width, as 48x64, each from 1 to {LARGEST_SIDE}."
        )
    return size


def split_names(text: str) -> tuple[str, ...]:
    """Names that commas or ends of lines separate; one with a comma in it stands in quotes."""
    try:
        lines = list(csv.reader(text.splitlines(keepends=True), skipinitialspace=True))
    except csv.Error as error:
        raise ConfigError(
            f"The list {text[:40]!r} cannot be read ({error}); it must be names that commas separate, and one with a "
            "comma in it stands in quotes. Correct it."
        ) from error
    return tuple(same_spelling(name.strip()) for line in lines for name in line if name.strip())


def split_pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Pairs of names, "lactat=lactate, alter=age": what some tables call a column, and what it is called everywhere."""
    pairs = dict[str, str]()
    for pair in split_names(text):
        old, _, new = (same_spelling(name.strip()) for name in pair.partition("="))
        if not old or not new or "=" in new or old in pairs:
            raise ConfigError(
                f"dataset.rename = {text[:80]!r} is not allowed because of {pair!r}: it must be pairs of names that "
                'commas separate, each old name once, as "lactat=lactate, alter=age". Correct that pair.'
            )
        pairs[old] = new
    return tuple(pairs.items())


PLAIN_READING = Reading()  # as it is where no key says otherwise


@dataclass(frozen=True)
class Columns:
    """The columns of a table that a model was trained on: its inputs in their order, and the classes."""

    inputs: tuple[str, ...]
    types: tuple[str, ...]  # of the inputs: "integer", "number" or "category"
    label: str
    categories: Categories = field(default_factory=dict)  # those that were there in training, in their order

    @property
    def encoded(self) -> tuple[str, ...]:
        """The names of what the model takes: a column of numbers, or `column=category` for each category."""
        of_columns = ([f"{name}={one}" for one in self.categories.get(name, ())] or [name] for name in self.inputs)
        return tuple(name for names in of_columns for name in names)

    def as_json(self) -> dict[str, Any]:
        """The columns as plain values."""
        inputs: list[dict[str, Any]] = [
            {"name": name, "type": kind}
            | ({"categories": list(self.categories[name])} if name in self.categories else {})
            for name, kind in zip(self.inputs, self.types, strict=True)
        ]
        return {"inputs": inputs, "label": self.label}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Columns:
        """The inverse of `as_json`."""
        inputs = values["inputs"]
        return cls(
            tuple(column["name"] for column in inputs),
            tuple(column["type"] for column in inputs),
            values["label"],
            {column["name"]: tuple(column["categories"]) for column in inputs if "categories" in column},
        )


@dataclass(frozen=True)
class Expected:
    """What a trained model expects of other data."""

    columns: Columns | None = None  # of the table that it was trained on; None: columns are matched by position
    num_inputs: int | None = None  # for that: how many columns of a table without labels are inputs
    carried: tuple[str, ...] = ()  # columns of ids that are copied into the answers and are no inputs
    colour: bool = False  # whether pictures must have three channels, so that grey ones are converted
    labelled: bool = True  # whether there must be labels
    labels_used: bool = True  # whether somebody needs those that are there; else they may have gaps
    classes: tuple[str, ...] | None = None  # of a table whose site has agreed on them with others; None: those it has
    whose: str = "the training data"  # who has those columns


@dataclass(frozen=True, eq=False)
class Examples:
    """Some examples: arrays as they come from a file or a function."""

    x: Any
    y: Any = None  # None where nobody knows the labels
    names: Sequence[str] | None = None  # of images: paths, relative to the folder; of rows: where each is in its file
    carried: Sequence[Any] | None = None  # cells of a table's columns that are no inputs
    clients: Any = None  # who holds each example: an array of ids, text or numbers; None where nobody says

    def take(self, index: np.ndarray) -> Examples:
        """The examples at these positions."""
        names, carried = (each and [each[at] for at in index] for each in (self.names, self.carried))
        y, clients = (None if each is None else np.asarray(each)[index] for each in (self.y, self.clients))
        return Examples(self.x[index], y, names, carried, clients)


@dataclass(frozen=True, eq=False)
class RawData:
    """All that a file, a client or an object holds: one part, or train and test. `normalise` checks it."""

    parts: dict[str, Examples]
    classes: Sequence[str] | None = None  # the names of the classes, if they are known
    columns: Columns | None = None  # of a table with labels
    notices: tuple[str, ...] = ()  # sentences about what is there and not used
    emptied: tuple[str, ...] = ()  # clients of which a part had examples, all with missing values and left out

    def with_notices(self, *notices: str) -> RawData:
        """The same data with more notices."""
        return replace(self, notices=(*self.notices, *notices))


Held = Sequence[tuple[str, RawData]]  # what each client brings, by its name; "" where nobody says who holds it


def refuse_amounts(labels: Sequence[Any] | np.ndarray, title: str) -> None:
    """Refuse floats that are no classes since they hardly repeat: somebody wants a regression."""
    known = len(set(labels))
    if known > 20 and 4 * known > len(labels):
        raise ConfigError(
            f"{title} holds {known} different amounts in {len(labels)} examples, and fnrfl is for classification only. "
            "Make classes of them, such as with numpy.digitize; if they are classes, write them as integers."
        )


def require_file(path: Path) -> None:
    """Refuse pipes, devices and folders where a file is meant: reading one might never end."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file; data is read from files. Copy it into one.")


def unreadable(path: Path, kind: str, error: Exception, way_out: str = "") -> ConfigError:
    """What to say of a file that is not what its name promises; `way_out` is what to do where the reason is known."""
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"dataset {path} does not exist (looked from {Path.cwd()}); name a file that does.")
    if isinstance(error, UnicodeDecodeError):
        way_out = "it is no text, or text in another encoding. Save it as UTF-8."
    return ConfigError(
        f"{path} cannot be read as {kind} ({type(error).__name__}: {error}); "
        + (way_out or "it is truncated or of another kind. Write it again.")
    )
