"""Tables, read with pandas: columns of numbers or categories, and one of classes. Several are read alike.

A column of text has one input for each category, 1 where a row has that category and 0 elsewhere. A cell that is
missing is NaN in all inputs of its column.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.words import counted
from fnrfl.data.column_names import listed_columns
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
    merge_classes,
    merge_columns,
)
from fnrfl.data.table_text import Column, Table, open_alike, plain_columns, refuse_unused_names

OTHER = "other table"
MOST = 0.9  # of a column's known cells
MONTH = r"(jan|feb|m[aä]r|apr|ma[iy]|jun|jul|aug|sep|o[ck]t|nov|de[cz])[a-zäé]*"
TIME = r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\s*([ap]m)?\s*(z|[+-]\d{2}:?\d{2})?"
DATE = re.compile(
    rf"({TIME}|(\d{{4}}(?P<a>[-/.])\d{{1,2}}(?P=a)\d{{1,2}}|\d{{1,2}}(?P<b>[-/.])\d{{1,2}}(?P=b)(\d{{4}}|\d{{2}})"
    rf"|\d{{1,2}}[-. ]+{MONTH}[-. ,]+\d{{2,4}}|{MONTH}[ .]+\d{{1,2}},? +\d{{4}})([t ,]+{TIME})?)",
    re.IGNORECASE,
)
NUMBER_IN_WORDS = re.compile(
    r"[<>≤≥=~≈±$€£]+\s*[\d.,]+|[<>≤≥=~≈±]*\s*\d+([.,]\d+)?\s*(%|[a-zµμ°]{1,5}(/[a-z0-9]{1,6})?)"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve",
    re.IGNORECASE,
)


def read_tables(
    paths: Sequence[Path], expected: Expected | None = None, reading: Reading = PLAIN_READING
) -> list[RawData]:
    """Read tables that have the same columns, in any order: categories and classes are those of all of them."""
    tables = open_alike(paths, expected, reading)
    if expected is None:  # another site may have the columns that a node has not
        refuse_unused_names(tables, reading)
    return _read_alike(tables, expected, reading)


def summarise_tables(paths: Sequence[Path], reading: Reading) -> tuple[TableSummary, dict[str, int]]:
    """(the summary of tables that are read alike, how often each label occurs); refused as `read_tables` refuses."""
    tables = open_alike(paths, None, reading)
    columns = _read_alike(tables, None, reading)[0].columns
    assert columns is not None
    made = []
    for name, kind in zip(columns.inputs, columns.types, strict=True):
        known = sum(table.columns[name].counts.total() for table in tables)
        made.append(ColumnSummary(name, kind, known, columns.categories.get(name, ())))
    labels = Counter(label for table in tables for label in table.columns[columns.label].cells)
    return TableSummary(str(paths[0]), tuple(made), columns.label, tuple(labels)), dict(labels)


def _read_alike(tables: Sequence[Table], expected: Expected | None, reading: Reading) -> list[RawData]:
    """The rows of each table, NaN where a cell is missing, with what all of them share; the first has the notices."""
    others = expected or Expected()
    columns, notices = others.columns, _notices(tables, others.columns)
    if expected is None:
        columns = merge_columns([_summary(table, reading) for table in tables], reading.categories, reading.rename)
        each = ", ".join(f"{name!r} ({len(known)})" for name, known in columns.categories.items())
        notices += [f"Columns of categories have one input for each category: {each}."] if each else []
        notices += [_numbers_in_words(name, tables) for name in columns.categories if name not in reading.categories]
    columns = columns or plain_columns(tables[0])
    x = [_inputs(table, columns, reading, training=expected is None) for table in tables]
    y, classes = _class_names(tables, others)
    named = None if classes is None and others.columns is None else columns
    read = []
    for table, rows, labels in zip(tables, x, y, strict=True):
        carried = [*zip(*(table.columns[name].raw for name in others.carried), strict=True)] or None
        read.append(RawData({ONLY_PART: Examples(rows, labels, None, carried, table.client_ids())}, classes, named))
    return [read[0].with_notices(*filter(None, notices)), *read[1:]]


def _notices(tables: Sequence[Table], columns: Columns | None) -> list[str]:
    """How files are read that are not plain; and what is not used: columns that number rows, and unknown categories."""
    notices = _ways_of_writing(tables)
    if renamed := [f"{', '.join(table.renamed)} of {table.path}" for table in tables if table.renamed]:
        notices.append(f"Columns are renamed (dataset.rename): {'; '.join(renamed)}.")
    if having := [table for table in tables if table.numbering]:
        more = f" and of {counted(len(having) - 1, OTHER)}" if len(having) > 1 else ""
        which = f"A column without a name ({having[0].numbering}) of {having[0].path}{more}"
        notices.append(f"{which} is left out: it numbers rows.")
    for table in tables:
        unknown = {
            f"{cell!r} in {name!r}": count
            for name, known in (columns.categories if columns else {}).items()
            for cell, count in table.columns[name].counts.items()
            if cell not in known
        }
        if unknown:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            cells = counted(sum(unknown.values()), "cell with a category", "cells with categories")
            notices.append(
                f"{table.path} has {cells} that the training data had not: {', '.join([*unknown][:3])}{more}. The "
                "inputs of that column are 0 there."
            )
    return notices


def _ways_of_writing(tables: Sequence[Table]) -> list[str]:
    """Say how files are read that are not plain, of several alike once."""
    ways = dict[tuple[str, ...], list[Path]]()
    for table in tables:
        ways.setdefault(table.found, []).append(table.path)
    return [
        f"{paths[0]}{f' and {counted(len(paths) - 1, OTHER)} are' if paths[1:] else ' is'} read {', '.join(found)}."
        for found, paths in ways.items()
        if found
    ]


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
        column, kind, categories = table.columns[name], "number", tuple[str, ...]()
        if column.counts and (name in reading.categories or column.numbers is None):
            kind, categories = "category", tuple(sorted(column.counts))
            if name not in reading.categories:
                _refuse_mixed(table, name)
                _refuse_dates(table, name)
        elif column.numbers is not None and all(map(float.is_integer, column.numbers[~column.missing].tolist())):
            kind = "integer"
        columns.append(ColumnSummary(name, kind, column.counts.total(), categories))
    return TableSummary(str(table.path), tuple(columns), table.label or "", ())


def _refuse_mixed(table: Table, name: str) -> None:
    """Refuse a column that has both text and numbers: most often one cell is mistyped."""
    column = table.columns[name]
    first = {is_number(cell): column.cells.index(cell) for cell in reversed(column.counts)}
    if len(first) == 2:
        text = sum(times for cell, times in column.counts.items() if not is_number(cell))
        raise ConfigError(
            f"{table.quoted(first[False], name)}, and {table.quoted(first[True], name)}: a column must hold numbers "
            f"alone or text alone, and {text:,} of its {column.counts.total():,} cells are text. Correct the cells, or "
            f'set dataset.categories = "{name}" if its numbers are names of categories too, or dataset.ignore = '
            f'"{name}" to leave it out.'
        )


def _refuse_dates(table: Table, name: str) -> None:
    """Refuse a column of dates: as categories, one that comes later is unknown."""
    column = table.columns[name]
    if _share(column, DATE) >= MOST:
        row = next(at for at, cell in enumerate(column.cells) if DATE.fullmatch(cell))
        raise ConfigError(
            f"{table.quoted(row, name)}, a column of dates or times, which are no input as they are. Set "
            f'dataset.ignore = "{name}" to leave it out, dataset.categories = "{name}" if they are few and come again, '
            "or write a number in its place, such as an age or the days since a first visit."
        )


def _share(column: Column, pattern: re.Pattern[str]) -> float:
    """The share of the known cells that have a form."""
    return sum(times for cell, times in column.counts.items() if pattern.fullmatch(cell)) / column.counts.total()


def _numbers_in_words(name: str, tables: Sequence[Table]) -> str:
    """A warning that a column of categories holds numbers with something beside them; "" if it does not."""
    columns = [table.columns[name] for table in tables if table.columns[name].counts]
    cells = {cell for column in columns for cell in column.counts}
    if len(cells) < 3 or min(_share(column, NUMBER_IN_WORDS) for column in columns) < MOST:
        return ""
    told = next(iter(columns[0].counts))
    return (
        f"Column {name!r} looks like numbers in words, such as {told!r}, and is taken as "
        f"{counted(len(cells), 'category', 'categories')}: write the numbers alone if they are amounts."
    )


def _inputs(table: Table, columns: Columns, reading: Reading, *, training: bool) -> np.ndarray:
    """The inputs in the order of `columns`, [n, inputs], as float32; NaN is missing."""
    if reading.missing == "refuse":
        _refuse_missing(table, columns.inputs, training=training)
    found = [
        _one_hot(table.columns[name], columns.categories[name])
        if name in columns.categories
        else _numbers(table, name)[:, None]
        for name in columns.inputs
    ]
    return np.concatenate(found, axis=1).astype(np.float32)


def _numbers(table: Table, name: str) -> np.ndarray:
    """A column of numbers, as float64 that fits into float32, [n]."""
    column = table.columns[name]
    if (x := column.numbers) is None:
        text = next(cell for cell in column.counts if not is_number(cell))
        raise ConfigError(
            f"{table.quoted(column.cells.index(text), name)}, which is a column of numbers. Correct that cell. A "
            "column of categories holds text alone, or is named in dataset.categories before training."
        )
    with np.errstate(invalid="ignore"):
        large = np.flatnonzero(np.isfinite(x) & (np.abs(x) > np.finfo(np.float32).max))
    if len(large):
        raise ConfigError(
            f"{table.quoted(int(large[0]), name)}; numbers of a table must fit into float32, up to 3.4e38. Scale that "
            "column."
        )
    return x


def _one_hot(column: Column, categories: Sequence[str]) -> np.ndarray:
    """A column of categories, [n, categories]; a category that is not among them has zeros alone."""
    place = {category: index for index, category in enumerate(categories)}
    x = np.zeros((len(column.cells), len(categories) + 1))
    x[np.arange(len(x)), [place.get(cell, -1) for cell in column.cells]] = 1.0
    x[column.missing] = np.nan
    return x[:, :-1]


def _refuse_missing(table: Table, inputs: Sequence[str], *, training: bool) -> None:
    """Refuse a table with missing cells; the first is named."""
    gaps = {name: table.columns[name].missing for name in inputs if table.columns[name].missing.any()}
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
        f"{table.quoted(row, name)}, so the value is missing (as where a cell is empty or says NA, N/A, #N/A, NaN, "
        f"null or ?). The table has {counted(count, 'missing cell')}, in {listed_columns([*gaps])}. {way_out}"
    )


# -- classes -----------------------------------------------------------------------------------------------------------


def _class_names(
    tables: Sequence[Table], expected: Expected
) -> tuple[Sequence[np.ndarray | None], Sequence[str] | None]:
    """(the class of each row, all classes); labels are names even where they look like numbers, as 1, 2, 3 or -1, 1.

    Labels with gaps are none at all if they are not used.
    """
    if not all(labels := [table.label for table in tables]):
        return [None] * len(tables), None
    try:
        known = expected.classes or merge_classes([_labels(table) for table in tables])
    except (ConfigError, CompatibilityError):
        if expected.labels_used:
            raise
        return [None] * len(tables), None
    columns = [table.columns[label or ""].cells for table, label in zip(tables, labels, strict=True)]
    numeric, every = all(map(is_number, known)), [*chain.from_iterable(columns)]
    names = {label: class_name(label, numeric=numeric) for label in {*every}}
    if numeric and not "".join(names).replace("-", "").replace("+", "").isdigit():
        refuse_amounts(every, f"column {labels[0]!r} of {tables[0].path}")
    return [np.array([names[label] for label in cells], dtype=np.str_) for cells in columns], known


def _labels(table: Table) -> TableSummary:
    """Summarise the labels of a table; refuse a row without one."""
    name = table.label or ""
    if len(gaps := np.flatnonzero(table.columns[name].missing)):
        raise ConfigError(
            f"{table.quoted(int(gaps[0]), name)}; a label must be a whole number or a name, and is never filled in. "
            "Correct that line or leave it out, or name the column of classes in dataset.label."
        )
    return TableSummary(str(table.path), (), name, tuple(table.columns[name].counts))
