"""Data frames, of pandas or polars: their columns have names, by which other data is matched. Neither is imported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fnrfl.core.words import same_spelling
from fnrfl.data.reading import Columns, RawData
from fnrfl.data.table_summary import refuse_other_columns

UNNAMED_LABEL = "label"  # what labels are called that have no name
NO_KEY = "columns of a data frame are matched by name"


def columns_of(x: object, y: object = None) -> Columns | None:
    """The columns of a data frame; None of anything else, and where a name is no text or stands twice."""
    names = getattr(x, "columns", None)
    if names is None or getattr(x, "ndim", 2) != 2 or not all(isinstance(name, str) for name in names):
        return None
    inputs, label = tuple(map(same_spelling, names)), getattr(y, "name", None)
    if len({*inputs}) < len(inputs):
        return None
    label = same_spelling(label) if isinstance(label, str) and label not in inputs else UNNAMED_LABEL
    return Columns(inputs, ("number",) * len(inputs), label)


def without_label(frame: Any, columns: Columns | None) -> tuple[Any, Any]:
    """(a data frame less the training data's column of labels, that column); anything else as it is, and None."""
    own = columns_of(frame)
    if own is None or columns is None or columns.label not in own.inputs or columns.label in columns.inputs:
        return frame, None
    names = {same_spelling(name): name for name in frame.columns}
    label = names.pop(columns.label)
    return frame[[*names.values()]], frame[label]


def in_order_of(raw: RawData, columns: Columns | None, title: str, whose: str = "the training data") -> RawData:
    """The same data with its columns in the order of others; refused if they are not the same columns.

    Data without names is taken by position, and so are numbers for a table that has categories.
    """
    if raw.columns is None or columns is None or columns.categories or raw.columns.inputs == columns.inputs:
        return raw
    own = raw.columns.inputs
    refuse_other_columns(title, own, columns.inputs, whose, NO_KEY)
    order = [own.index(name) for name in columns.inputs]
    parts = {name: replace(part, x=np.asarray(part.x)[:, order]) for name, part in raw.parts.items()}
    return replace(raw, parts=parts, columns=columns)


def instead_of(made: object) -> str:
    """What to give in place of some objects that people try."""
    if hasattr(made, "columns") and hasattr(made, "drop"):
        return " Of a data frame give the inputs and the column of classes: (frame.drop(columns=NAME), frame[NAME])."
    if hasattr(made, "batch_sampler") and hasattr(made, "dataset"):
        return " Of a DataLoader give its dataset: loader.dataset."
    return " Change what it gives."
