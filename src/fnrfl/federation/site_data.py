"""A site's own data, read by the node that keeps it: described for the others first, then read as all have agreed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fnrfl import usercode
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.words import counted
from fnrfl.data import arrays, sites
from fnrfl.data.datasets import Dataset, Part, read_source, refuse_keys_of_others
from fnrfl.data.normalise import normalise
from fnrfl.data.partition import holdout
from fnrfl.data.reading import Expected, RawData, Reading
from fnrfl.data.sites import Site
from fnrfl.data.sources import NAMED_DATASETS
from fnrfl.data.sources.entry import checksum
from fnrfl.data.table_summary import FEW_CATEGORIES, is_free_text
from fnrfl.data.tables import summarise_tables
from fnrfl.federation.agreement import MOST_INPUTS, Schema, SiteSchema
from fnrfl.federation.node_config import NodeConfig

KINDS = {"images": "pictures", ".npz": "arrays"}


def describe_site(node: NodeConfig, reading: Reading) -> SiteSchema:
    """Return what a site's data is like, before anything is agreed on."""
    reading = _own_reading(node, reading)
    site = _find(node, reading)
    if site is not None and site.kind == sites.TABLE:
        return _describe_table(node, site, reading)
    raw = _read(node, site, None, reading)
    held = [arrays.class_labels(part.y, f"y of {node.data}") for part in raw.parts.values() if part.y is not None]
    if len(held) < len(raw.parts):
        raise ConfigError(f"{node.data} has no labels, and they are needed here. Add the labels.")
    labels = Counter(str(label) for y in held for label in y.tolist())
    if site is None or site.kind != "images":
        _refuse_other_than_classes(node, labels, "y")
    x = next(iter(raw.parts.values())).x
    return SiteSchema(
        kind=KINDS.get(".npz" if site is None else site.kind, "arrays"),
        labels=tuple(labels),
        named=held[0].dtype.kind == "U",
        tested="test" in raw.parts,
        classes=None if raw.classes is None else tuple(map(str, raw.classes)),
        input_shape=x.shape[1:],
        dtype=str(x.dtype),
    )


def _describe_table(node: NodeConfig, site: Site, reading: Reading) -> SiteSchema:
    found, labels = summarise_tables(list(site.parts.values()), reading)
    _refuse_other_than_classes(node, labels, f"Column {found.label!r}")
    for column in found.columns:  # a recipe may name any column as one of categories
        if is_free_text(len(column.categories), column.known):
            raise ConfigError(
                f"Column {column.name!r} of {node.data} has {counted(len(column.categories), 'different cell')} in "
                f"{counted(column.known, 'row')}, and the server would be told each. Name it as ignore in the node's "
                "configuration, or make fewer categories of it."
            )
    return SiteSchema("table", found.labels, True, "test" in site.parts, columns=found.columns, label=found.label)


def _refuse_other_than_classes(node: NodeConfig, labels: Mapping[str, int], where: str) -> None:
    """Refuse labels of which most occur once, such as numbers of patients: the server would be told each of them."""
    rows = sum(labels.values())
    if len(labels) > FEW_CATEGORIES and 4 * len(labels) > 3 * rows:
        raise ConfigError(
            f"{where} of {node.data} has {counted(len(labels), 'different label')} in {counted(rows, 'example')}; "
            "these are no classes, of which each has several examples. Set dataset.label to the column of the classes."
        )


def read_agreed(node: NodeConfig, reading: Reading, schema: Schema) -> Dataset:
    """Read all examples of a site in the shape, with the columns and the class numbers that were agreed on.

    Where nobody brings a test part, the site draws its own as the simulator does: by its own examples and name alone.
    """
    _refuse_other_columns(node, reading, schema)
    expected = Expected(schema.columns, colour=schema.colour, classes=schema.classes)
    reading, name = _own_reading(node, reading), node.name.strip()
    raw = _read(node, _find(node, reading), expected, reading)
    parts = list(raw.parts.values())
    if len(parts) == 1:  # where others bring a test part, this site trains with all that it has
        rows, labels = np.arange(len(parts[0].x)), np.asarray(parts[0].y)
        drawn = rows[:0] if schema.tested else holdout.draw_test_part_by_client(labels, {name: rows}, seed=0)
        parts = [parts[0].take(np.setdiff1d(rows, drawn)), parts[0].take(drawn)]
    x = [_in_agreed_form(part.x, schema, node) for part in parts]
    y = [_class_numbers(part.y, raw.classes, schema.classes, node) for part in parts]
    train, test = (Part(arrays.tensor(xs), arrays.tensor(ys)) for xs, ys in zip(x, y, strict=True))
    whole = Dataset(node.data, train, test, schema.classes, node.data, checksum(x[0], y[0], x[1], y[1]))
    clients, test_clients = (name,) * len(train), (name,) * len(test) or None
    named = replace(whole, train_clients=clients, test_clients=test_clients)
    return replace(named, columns=schema.columns, notices=raw.notices)


def _refuse_other_columns(node: NodeConfig, reading: Reading, schema: Schema) -> None:
    """Refuse columns that are not as this node has described them, whatever the server says was agreed on.

    Otherwise a server could have the rows of each value counted, of any column.
    """
    if schema.columns is None:
        return
    told = describe_site(node, reading)
    text = {column.name: column.type == "category" for column in told.columns if column.known}
    agreed = {name: name in schema.columns.categories for name in schema.columns.inputs} | {schema.columns.label: None}
    wrong = [name for name, one in agreed.items() if one != text.get(name, one) or name in node.ignored_columns]
    if wrong or told.label != schema.columns.label or len(schema.columns.encoded) > MOST_INPUTS:
        raise ConfigError(
            f"What was agreed on has the column {(wrong or [schema.columns.label])[0]!r} in another way than "
            f"{node.label} has described it, or one which this node keeps to itself (ignore). Correct the recipe."
        )


def _own_reading(node: NodeConfig, reading: Reading) -> Reading:
    """How the recipe reads data, without the columns that this node keeps to itself."""
    return replace(reading, ignore=(*reading.ignore, *node.ignored_columns))


def _find(node: NodeConfig, reading: Reading) -> Site | None:
    """Return the file or folder of a site; None for a data set's name or a function."""
    path = Path(os.path.expanduser(node.data))
    refuse_keys_of_others(node.data, path, reading)
    if node.data in NAMED_DATASETS or (usercode.target("dataset.name", node.data) and not path.exists()):
        return None
    site = sites.site_at(path) if path.is_dir() or path.suffix.lower() in sites.FILE_ENDINGS else None
    if site is None:
        what = "is a folder without the data of one client" if path.is_dir() else "is no such file or folder"
        raise ConfigError(
            f"data = {node.data!r} of {node.label} {what}; it must be a file ({', '.join(sites.FILE_ENDINGS)}), a "
            "folder with train.csv and test.csv, a folder of images by class, or module:function. Correct data in the "
            "node's configuration."
        )
    return replace(site, name=node.name.strip())


def _read(node: NodeConfig, site: Site | None, expected: Expected | None, reading: Reading) -> RawData:
    """Read a site's examples, and check them; missing values are treated as the recipe says."""
    if site is not None:
        return normalise(node.data, sites.read_sites([site], expected, reading), reading)
    usercode.allow("dataset.name", node.data)  # it stands in the node's own configuration
    return read_source(node.data, expected, reading).raw


# -- in the form that was agreed on ------------------------------------------------------------------------------------


def _in_agreed_form(x: np.ndarray, schema: Schema, node: NodeConfig) -> np.ndarray:
    if x.dtype == np.int64 and schema.dtype == "float32":
        x = x.astype(np.float32)
    if schema.colour and x.dtype == np.uint8 and x.shape[1] == 1:
        x = x.repeat(3, axis=1)
    if (tuple(x.shape[1:]), str(x.dtype)) != (schema.input_shape, schema.dtype):
        raise changed_since(node, f"examples of {x.dtype}{list(x.shape[1:])}")
    return x


def _class_numbers(
    labels: object, listed: Sequence[str] | None, classes: Sequence[str], node: NodeConfig
) -> np.ndarray:
    """Return labels as places among the classes: numbers of a list of classes are that already."""
    y = arrays.class_labels(labels, f"y of {node.data}")
    if y.dtype.kind != "U" and listed is not None:
        return y
    place = {name: at for at, name in enumerate(classes)}
    if unknown := sorted({str(label) for label in y.tolist()} - set(place)):
        raise changed_since(node, f"the class {unknown[0]!r}")
    return np.array([place[str(label)] for label in y.tolist()], dtype=np.int64)


def changed_since(node: NodeConfig, has: str) -> CompatibilityError:
    """Return the refusal of a site whose data is not what it told the others at first."""
    return CompatibilityError(
        f"{node.opened} has {has}, and told the server something else at first. Put the data back as it was, or run "
        "again."
    )
