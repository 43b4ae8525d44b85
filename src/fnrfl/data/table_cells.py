"""The cells of tables as numbers, of several tables alike: one input for a column of numbers, several for categories.

A column of text has one input for each category, 1 where a row has that category and 0 elsewhere. A cell that is
missing is NaN in all inputs of its column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted, same_spelling
from fnrfl.data.reading import Categories, Reading, refuse_amounts
from fnrfl.data.table_columns import Roles, is_number, listed_columns

Line = tuple[int, list[str]]  # the number of a line in a table, and its cells

MISSING_WORDS = frozenset({"", "na", "n/a", "nan", "null", "?"})  # in lower case
MAX_CATEGORIES = 1000  # of a column of text
FEW_CATEGORIES = 20  # that need not repeat


@dataclass(frozen=True, eq=False)
class CsvTable:
    """A table as text: its lines, and what its columns are."""

    path: Path
    header: list[str]
    lines: list[Line]
    roles: Roles
    left_out: str = ""  # which column has no name and numbers the rows, in words

    @property
    def inputs(self) -> list[str]:
        """The names of the input columns, in the model's order."""
        return [self.header[at] for at in self.roles.inputs]

    @property
    def label_at(self) -> int:
        """Where the classes stand."""
        assert self.roles.label is not None
        return self.roles.label

    def cells(self, at: int) -> list[str]:
        """The cells of a column."""
        return [same_spelling(cells[at].strip()) for _, cells in self.lines]

    def at(self, name: str) -> int:
        """Where a column stands."""
        return self.header.index(name)

    def place(self, row: int, at: int) -> str:
        """A cell, for a sentence."""
        number, cells = self.lines[row]
        return f"line {number} of {self.path} has {cells[at].strip()!r} in column {self.header[at]!r}"


def is_missing(cell: str) -> bool:
    """Whether nobody knows what belongs into a cell."""
    return cell.lower() in MISSING_WORDS


# -- numbers and categories --------------------------------------------------------------------------------------------


def input_numbers(tables: Sequence[CsvTable], names: Sequence[str], categories: Categories) -> list[np.ndarray]:
    """The inputs of each table, in one order, as float64 that fits into float32; NaN where a cell is missing."""
    if not categories:
        whole = [_all_numbers(table) for table in tables]
        if all(x is not None for x in whole):
            return [x for x in whole if x is not None]
    encoded = []
    for table in tables:
        of_columns = [
            _one_hot(table, table.at(name), categories[name]) if name in categories else _numbers(table, table.at(name))
            for name in names
        ]
        encoded.append(np.concatenate(of_columns, axis=1))
    return encoded


def _all_numbers(table: CsvTable) -> np.ndarray | None:
    """The inputs of a table that has numbers alone; None for others. Much faster than column by column."""
    inputs = table.roles.inputs
    pick = itemgetter(*inputs) if len(inputs) > 1 else lambda cells: (cells[inputs[0]],)
    rows = [pick(cells) for _, cells in table.lines]
    if any("_" in "".join(cells) for cells in rows):
        return None  # no number, whatever numpy says
    try:
        x = np.array(rows, dtype=np.float64)
    except ValueError:
        return None
    _check_range(table, x, inputs)
    return x


def _numbers(table: CsvTable, at: int) -> np.ndarray:
    """A column of numbers, [n, 1]."""
    cells = table.cells(at)
    if text := [row for row, cell in enumerate(cells) if not (is_missing(cell) or is_number(cell))]:
        raise ConfigError(
            f"{table.place(text[0], at)}, which is a column of numbers. Correct that cell. A column of categories "
            "holds text alone, or is named in dataset.categories before training."
        )
    x = np.array([["nan" if is_missing(cell) else cell] for cell in cells], dtype=np.float64)
    _check_range(table, x, [at])
    return x


def _check_range(table: CsvTable, x: np.ndarray, ats: Sequence[int]) -> None:
    with np.errstate(invalid="ignore"):
        large = np.argwhere(np.isfinite(x) & (np.abs(x) > np.finfo(np.float32).max))
    if len(large):
        row, column = large[0]
        raise ConfigError(
            f"{table.place(row, ats[column])}; numbers of a table must fit into float32, up to 3.4e38. Scale that "
            "column."
        )


def _one_hot(table: CsvTable, at: int, categories: Sequence[str]) -> np.ndarray:
    """A column of categories, [n, categories]; a category that is not among them has zeros alone."""
    place = {category: index for index, category in enumerate(categories)}
    x = np.zeros((len(table.lines), len(categories)))
    for row, cell in enumerate(table.cells(at)):
        if is_missing(cell):
            x[row] = np.nan
        elif cell in place:
            x[row, place[cell]] = 1.0
    return x


# -- which columns are categories --------------------------------------------------------------------------------------


def find_categories(tables: Sequence[CsvTable], reading: Reading) -> Categories:
    """The columns of text, and those that a key names, with their categories over all tables, sorted."""
    names = tables[0].inputs
    if unknown := [name for name in reading.categories if name not in names]:
        raise ConfigError(
            f"dataset.categories names the column {unknown[0]!r}, which is no input of {tables[0].path}; its inputs "
            f"are {listed_columns(names)}. Name some of them."
        )
    found = {}
    for name in names:
        cells = [cell for table in tables for cell in table.cells(table.at(name)) if not is_missing(cell)]
        if cells and name in reading.categories:
            found[name] = tuple(sorted(set(cells)))
        elif not all(is_number(cell) for cell in cells):
            _check_mixed(tables, name)
            found[name] = tuple(sorted(set(cells)))
            refuse_free_text(str(tables[0].path), name, len(found[name]), len(cells))
    return found


def _check_mixed(tables: Sequence[CsvTable], name: str) -> None:
    """Refuse a column that has both text and numbers: most often one cell is mistyped."""
    seen: dict[bool, str] = {}
    for table in tables:
        at = table.at(name)
        for row, cell in enumerate(table.cells(at)):
            if not is_missing(cell):
                seen.setdefault(is_number(cell), table.place(row, at))
            if len(seen) == 2:
                raise ConfigError(
                    f"{seen[False]}, and {seen[True]}: a column must hold numbers alone or text alone. Correct the "
                    f'cells, or set dataset.categories = "{name}" if its numbers are names of categories too.'
                )


def is_free_text(num_categories: int, num_cells: int) -> bool:
    """Say whether a column is free text: its cells repeat too rarely to be categories."""
    return num_categories > (FEW_CATEGORIES if 2 * num_categories > num_cells else MAX_CATEGORIES)


def refuse_free_text(whose: str, name: str, num_categories: int, num_cells: int) -> None:
    """Refuse text that is no category, such as names, dates and remarks."""
    if not is_free_text(num_categories, num_cells):
        return
    raise ConfigError(
        f"Column {name!r} of {whose} holds {counted(num_categories, 'different text')} in "
        f"{counted(num_cells, 'row')}; categories must repeat, twice on average, and be {MAX_CATEGORIES:,} at most. "
        f'Set dataset.ignore = "{name}" if it is an id, a date or a remark, or dataset.categories = "{name}" if it '
        "does hold categories."
    )


def unknown_categories(table: CsvTable, categories: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """A notice about cells whose category was not there in training."""
    unknown = [
        (name, cell)
        for name, known in categories.items()
        for cell in table.cells(table.at(name))
        if not is_missing(cell) and cell not in known
    ]
    if not unknown:
        return ()
    some = [f"{cell!r} in {name!r}" for name, cell in dict.fromkeys(unknown)]
    more = f" and {len(some) - 3} more" if len(some) > 3 else ""
    cells = counted(len(unknown), "cell with a category", "cells with categories")
    return (
        f"{table.path} has {cells} that the training data had not: {', '.join(some[:3])}{more}. The inputs of that "
        "column are 0 there.",
    )


# -- what is no input --------------------------------------------------------------------------------------------------


def refuse_missing(
    tables: Sequence[CsvTable], x: Sequence[np.ndarray], widths: Sequence[int], *, training: bool
) -> None:
    """Refuse tables with missing cells; the first is named. `widths` says how many inputs each column has."""
    column_of = np.repeat(np.arange(len(widths)), widths)
    for table, values in zip(tables, x, strict=True):
        gaps = np.argwhere(np.isnan(values))
        if not len(gaps):
            continue
        row, at = int(gaps[0][0]), table.roles.inputs[column_of[gaps[0][1]]]
        columns = sorted({int(column_of[place]) for _, place in gaps})
        count = len({(int(row), int(column_of[place])) for row, place in gaps})
        names = listed_columns([table.header[table.roles.inputs[column]] for column in columns])
        way_out = (
            'Set dataset.missing = "mean" or "drop", fill the cells in, or leave columns out with dataset.ignore.'
            if training
            else 'The run has dataset.missing = "refuse". Fill the cells in, or train with "mean" or "drop".'
        )
        raise ConfigError(
            f"{table.place(row, at)}, so the value is missing (as where a cell is empty or says NA, N/A, NaN, null or "
            f"?). The table has {counted(count, 'missing cell')}, in {names}. {way_out}"
        )


def client_ids(table: CsvTable) -> np.ndarray | None:
    """Who holds each row, as the table writes it; None if it does not say."""
    at = table.roles.client
    if at is None:
        return None
    ids = table.cells(at)
    if "" in ids:
        raise ConfigError(
            f"line {table.lines[ids.index('')][0]} of {table.path} has nothing in column {table.header[at]!r}, which "
            "says who holds a row (dataset.client). Write who does, or leave the line out."
        )
    return np.array(ids)


def class_numbers(
    tables: Sequence[CsvTable], agreed: Sequence[str] | None = None, *, used: bool = True
) -> tuple[Sequence[np.ndarray | None], list[str] | None]:
    """Class numbers and names; labels in tables are names even where they look like numbers, as 1, 2, 3 or -1, 1.

    Classes that were `agreed` on are numbered in their order. Labels with gaps are none at all if they are not `used`.
    """
    if any(table.roles.label is None for table in tables):
        return [None] * len(tables), None
    try:
        names = _class_names(tables, numeric=all(map(is_number, agreed or _labels(tables))))
    except ConfigError:
        if used:
            raise
        return [None] * len(tables), None
    known = list(agreed or sorted_classes(set(names)))
    index = {name: at for at, name in enumerate(known)}
    if unknown := [name for name in names if name not in index]:
        raise ConfigError(
            f"{tables[0].path} has the class {unknown[0]!r}, which nobody had when the classes were agreed on. Put the "
            "table back as it was, or begin again."
        )
    numbers = np.array([index[name] for name in names], dtype=np.int64)
    return np.split(numbers, np.cumsum([len(table.lines) for table in tables])[:-1]), known


def _labels(tables: Sequence[CsvTable]) -> list[str]:
    """The labels of all rows as they are written."""
    return [label for table in tables for label in table.cells(table.label_at)]


def _class_names(tables: Sequence[CsvTable], *, numeric: bool) -> list[str]:
    """The class of each row; refused where that is none, and where one class is written in two ways."""
    spelling: dict[str, str] = {}
    names = []
    labels = ((table, row, label) for table in tables for row, label in enumerate(table.cells(table.label_at)))
    for table, row, label in labels:
        if is_missing(label) or (numeric and not (is_number(label) and float(label).is_integer())):
            raise ConfigError(
                f"{table.place(row, table.label_at)}; a label must be a whole number or a name, and is never filled "
                "in, since fnrfl is for classification only. Correct that line or leave it out, or name the column of "
                "classes in dataset.label."
            )
        name = class_name(label, numeric=numeric)
        if spelling.setdefault(name, label) != label:
            raise ConfigError(
                f"{table.place(row, table.label_at)}, and another line has {spelling[name]!r}, which is the same "
                "number. Write a class in one way, or give the classes names."
            )
        names.append(name)
    if numeric and not all(label.lstrip("+-").isdigit() for label in spelling.values()):
        refuse_amounts(names, f"column {tables[0].header[tables[0].label_at]!r} of {tables[0].path}")
    return names


def class_name(label: str, *, numeric: bool) -> str:
    """What a class is called: its label, or where all labels are numbers, the whole number."""
    return str(_whole_number(label)) if numeric else label


def sorted_classes(names: Iterable[str]) -> list[str]:
    """The names of classes in their order: as numbers where all are, else as text."""
    known = list(names)
    return sorted(known, key=int if all(map(is_number, known)) else None)


def _whole_number(label: str) -> int:
    try:
        return int(label)  # exactly, since long codes do not survive as floats
    except ValueError:
        return int(float(label))
