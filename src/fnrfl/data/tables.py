"""Tables, `.csv` files, read with pandas: columns of numbers or categories, and one of classes. Several are read alike.

A column of text has one input for each category, 1 where a row has that category and 0 elsewhere. A cell that is
missing is NaN in all inputs of its column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.words import counted
from fnrfl.data.reading import (
    ONLY_PART,
    PLAIN_READING,
    Columns,
    Examples,
    Expected,
    RawData,
    Reading,
    refuse_amounts,
)
from fnrfl.data.table_summary import (
    ColumnSummary,
    TableSummary,
    class_name,
    is_number,
    listed_columns,
    merge_classes,
    merge_columns,
)
from fnrfl.data.table_text import Column, Table, open_alike, plain_columns, unnamed_notices


def read_tables(
    paths: Sequence[Path], expected: Expected | None = None, reading: Reading = PLAIN_READING
) -> list[RawData]:
    """Read tables that have the same columns, in any order: categories and classes are those of all of them."""
    return _read_alike(open_alike(paths, expected, reading), expected, reading)


def summarise_tables(paths: Sequence[Path], reading: Reading) -> tuple[TableSummary, dict[str, int]]:
    """(the summary of tables that are read alike, how often each label occurs); refused as `read_tables` refuses."""
    tables = open_alike(paths, None, reading)
    columns = _read_alike(tables, None, reading)[0].columns
    assert columns is not None
    made = tuple(
        ColumnSummary(name, kind, sum(table.column(name).known for table in tables), columns.categories.get(name, ()))
        for name, kind in zip(columns.inputs, columns.types, strict=True)
    )
    labels = Counter(label for table in tables for label in table.labels.cells)
    return TableSummary(str(paths[0]), made, columns.label, tuple(labels)), dict(labels)


def _read_alike(tables: Sequence[Table], expected: Expected | None, reading: Reading) -> list[RawData]:
    """The rows of each table, NaN where a cell is missing, with what all of them share; the first has the notices."""
    others, notices = expected or Expected(), unnamed_notices(tables)
    columns = others.columns
    if columns is not None:
        notices += _unknown_categories(tables, columns)
    elif expected is None:
        columns = merge_columns([_summary(table, reading) for table in tables], reading.categories)
        each = ", ".join(f"{name!r} ({len(known)})" for name, known in columns.categories.items())
        notices += [f"Columns of categories have one input for each category: {each}."] if each else []
    else:
        columns = plain_columns(tables[0])
    x = [_inputs(table, columns, reading, training=expected is None).astype(np.float32) for table in tables]
    y, classes = _class_names(tables, others)
    named = None if classes is None and others.columns is None else columns
    read = [
        RawData({ONLY_PART: Examples(*both, None, table.carried(others.carried), table.client_ids())}, classes, named)
        for table, both in zip(tables, zip(x, y, strict=True), strict=True)
    ]
    return [read[0].with_notices(*notices), *read[1:]]


# -- cells as numbers --------------------------------------------------------------------------------------------------


def _summary(table: Table, reading: Reading) -> TableSummary:
    """Summarise a table to be trained on: text, and columns that a key names, are categories."""
    if unknown := [name for name in reading.categories if name not in table.inputs]:
        raise ConfigError(
            f"dataset.categories names the column {unknown[0]!r}, which is no input of {table.path}; its inputs are "
            f"{listed_columns(table.inputs)}. Name some of them."
        )
    columns = []
    for name in table.inputs:
        column = table.column(name)
        chosen, numbers = name in reading.categories, column.numbers
        if numbers is None and not chosen:
            _refuse_mixed(table, name)
        if column.known and (chosen or numbers is None):
            known = (cell for cell, missing in zip(column.cells, column.missing, strict=True) if not missing)
            columns.append(ColumnSummary(name, "category", column.known, tuple(sorted(set(known)))))
        else:
            with np.errstate(invalid="ignore"):
                whole = numbers is None or bool(((numbers == np.floor(numbers)) | np.isnan(numbers)).all())
            columns.append(ColumnSummary(name, "integer" if whole else "number", column.known))
    return TableSummary(str(table.path), tuple(columns), table.label or "", ())


def _refuse_mixed(table: Table, name: str) -> None:
    """Refuse a column that has both text and numbers: most often one cell is mistyped."""
    column, seen = table.column(name), dict[bool, int]()
    for row in np.flatnonzero(~column.missing):
        seen.setdefault(is_number(column.cells[row]), int(row))
    if len(seen) == 2:
        raise ConfigError(
            f"{table.quoted(seen[False], name)}, and {table.quoted(seen[True], name)}: a column must hold numbers "
            f'alone or text alone. Correct the cells, or set dataset.categories = "{name}" if its numbers are names '
            "of categories too."
        )


def _inputs(table: Table, columns: Columns, reading: Reading, *, training: bool) -> np.ndarray:
    """The inputs in the order of `columns`, [n, inputs], as float64 that fits into float32; NaN is missing."""
    if reading.missing == "refuse":
        _refuse_missing(table, columns.inputs, training=training)
    found = [
        _one_hot(table.column(name), columns.categories[name]) if name in columns.categories else _numbers(table, name)
        for name in columns.inputs
    ]
    return np.concatenate(found, axis=1)


def _numbers(table: Table, name: str) -> np.ndarray:
    """A column of numbers, [n, 1]."""
    column = table.column(name)
    if (x := column.numbers) is None:
        known = np.flatnonzero(~column.missing)
        row = next(int(row) for row in known if not is_number(column.cells[row]))
        raise ConfigError(
            f"{table.quoted(row, name)}, which is a column of numbers. Correct that cell. A column of categories holds "
            "text alone, or is named in dataset.categories before training."
        )
    with np.errstate(invalid="ignore"):
        large = np.flatnonzero(np.isfinite(x) & (np.abs(x) > np.finfo(np.float32).max))
    if len(large):
        raise ConfigError(
            f"{table.quoted(int(large[0]), name)}; numbers of a table must fit into float32, up to 3.4e38. Scale that "
            "column."
        )
    return x[:, None]


def _one_hot(column: Column, categories: Sequence[str]) -> np.ndarray:
    """A column of categories, [n, categories]; a category that is not among them has zeros alone."""
    place = {category: index for index, category in enumerate(categories)}
    x = np.zeros((len(column.cells), len(categories) + 1))
    x[np.arange(len(x)), [place.get(cell, -1) for cell in column.cells]] = 1.0
    x[column.missing] = np.nan
    return x[:, :-1]


def _unknown_categories(tables: Sequence[Table], columns: Columns) -> list[str]:
    """Notices about cells whose category was not there in training."""
    notices = []
    for table in tables:
        unknown = [
            (cell, name)
            for name, known in columns.categories.items()
            for cell, missing in zip(table.column(name).cells, table.column(name).missing, strict=True)
            if not missing and cell not in known
        ]
        if unknown:
            some = [f"{cell!r} in {name!r}" for cell, name in dict.fromkeys(unknown)]
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            cells = counted(len(unknown), "cell with a category", "cells with categories")
            notices.append(
                f"{table.path} has {cells} that the training data had not: {', '.join(some[:3])}{more}. The inputs of "
                "that column are 0 there."
            )
    return notices


def _refuse_missing(table: Table, inputs: Sequence[str], *, training: bool) -> None:
    """Refuse a table with missing cells; the first is named."""
    gaps = {name: table.column(name).missing for name in inputs if table.column(name).missing.any()}
    if not gaps:
        return
    row, name = min((int(missing.argmax()), name) for name, missing in gaps.items())
    way_out = (
        'Set dataset.missing = "mean" or "drop", fill the cells in, or leave columns out with dataset.ignore.'
        if training
        else 'The run has dataset.missing = "refuse". Fill the cells in, or train with "mean" or "drop".'
    )
    count = sum(int(missing.sum()) for missing in gaps.values())
    raise ConfigError(
        f"{table.quoted(row, name)}, so the value is missing (as where a cell is empty or says NA, N/A, NaN, null or "
        f"?). The table has {counted(count, 'missing cell')}, in {listed_columns([*gaps])}. {way_out}"
    )


# -- classes -----------------------------------------------------------------------------------------------------------


def _class_names(
    tables: Sequence[Table], expected: Expected
) -> tuple[Sequence[np.ndarray | None], Sequence[str] | None]:
    """(the class of each row, all classes); labels are names even where they look like numbers, as 1, 2, 3 or -1, 1.

    Labels with gaps are none at all if they are not used.
    """
    none: list[np.ndarray | None] = [None] * len(tables)
    if any(table.label is None for table in tables):
        return none, None
    try:
        known = expected.classes or merge_classes([_labels(table) for table in tables])
    except (ConfigError, CompatibilityError):
        if expected.labels_used:
            raise
        return none, None
    numeric, whole = all(map(is_number, known)), [label for table in tables for label in table.labels.cells]
    if numeric and not all(label.lstrip("+-").isdigit() for label in {*whole}):
        refuse_amounts(whole, f"column {tables[0].label!r} of {tables[0].path}")
    names = {label: class_name(label, numeric=numeric) for label in {*whole}}
    return [np.array([names[label] for label in table.labels.cells], dtype=np.str_) for table in tables], known


def _labels(table: Table) -> TableSummary:
    """Summarise the labels of a table; refuse a row without one."""
    if len(gaps := np.flatnonzero(table.labels.missing)):
        raise ConfigError(
            f"{table.quoted(int(gaps[0]), table.label or '')}; a label must be a whole number or a name, and is never "
            "filled in. Correct that line or leave it out, or name the column of classes in dataset.label."
        )
    return TableSummary(str(table.path), (), table.label or "", tuple(dict.fromkeys(table.labels.cells)))
