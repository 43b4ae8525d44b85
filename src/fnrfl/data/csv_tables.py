"""Tables, `.csv` files: columns of numbers or categories, and one of classes. Several are read alike, by name."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted, same_spelling
from fnrfl.data.reading import (
    ONLY_PART,
    PLAIN_READING,
    Categories,
    Columns,
    Examples,
    Expected,
    RawData,
    Reading,
    require_file,
    unreadable,
)
from fnrfl.data.table_cells import (
    CsvTable,
    Line,
    class_numbers,
    client_ids,
    find_categories,
    input_numbers,
    is_missing,
    refuse_missing,
    unknown_categories,
)
from fnrfl.data.table_columns import check_ignored_columns, find_roles, is_number, listed_columns, without_header

TableLines = tuple[list[str], list[Line], str]  # the header, the other lines, and which column was left out, in words


@dataclass(frozen=True, eq=False)
class TablesRead:
    """Some tables read alike: the rows of each, and the classes and columns that they share."""

    examples: list[Examples]  # of each table; NaN where a cell is missing
    classes: list[str] | None  # None without labels
    columns: Columns | None  # None without labels
    notices: tuple[str, ...]


def read_csv(path: Path, expected: Expected | None = None, reading: Reading = PLAIN_READING) -> RawData:
    """A table with a header: a column of classes, and columns of numbers or categories, which become float32."""
    read = read_tables([path], expected, reading)
    return RawData({ONLY_PART: read.examples[0]}, read.classes, read.columns, read.notices)


def read_tables(
    paths: Sequence[Path], expected: Expected | None = None, reading: Reading = PLAIN_READING
) -> TablesRead:
    """Tables that have the same columns, in any order: categories and classes are those of all of them together."""
    tables = _opened_alike(paths, expected, reading)
    names = tables[0].inputs
    known = None if expected is None else expected.columns
    categories = find_categories(tables, reading) if expected is None else known.categories if known else {}
    x = input_numbers(tables, names, categories)
    if reading.missing == "refuse":
        widths = [len(categories.get(name, "1")) for name in names]
        refuse_missing(tables, x, widths, training=expected is None)
    of_others = expected or Expected()
    y, classes = class_numbers(tables, of_others.classes, used=of_others.labels_used)
    examples = [
        Examples(
            values.astype(np.float32), labels, carried=_carried(table, of_others.carried), clients=client_ids(table)
        )
        for table, values, labels in zip(tables, x, y, strict=True)
    ]
    if known is not None:
        unknown = [notice for table in tables for notice in unknown_categories(table, categories)]
        return TablesRead(examples, classes, known, (*_unnamed_notices(tables), *unknown))
    columns = None if classes is None else _described(tables[0], categories, x)
    return TablesRead(examples, classes, columns, (*_unnamed_notices(tables), *_category_notices(categories)))


@dataclass(frozen=True, eq=False)
class TablesDescribed:
    """What some tables hold, in words and counts, so that others can agree on columns and classes with them."""

    columns: Columns
    known_cells: dict[str, int]  # of each input column
    labels: dict[str, int]  # each label as it is written, and how often


def describe_tables(paths: Sequence[Path], reading: Reading) -> TablesDescribed:
    """The columns and labels of tables that are read alike; refused as `read_tables` refuses them."""
    columns = read_tables(paths, None, reading).columns
    assert columns is not None
    tables = _opened_alike(paths, None, reading)
    known = {
        name: sum(not is_missing(cell) for table in tables for cell in table.cells(table.at(name)))
        for name in columns.inputs
    }
    labels = Counter(cell for table in tables for cell in table.cells(table.label_at))
    return TablesDescribed(columns, known, dict(labels))


def _opened_alike(paths: Sequence[Path], expected: Expected | None, reading: Reading) -> list[CsvTable]:
    """The tables, in whose headers the columns of the first are found by name."""
    read = {path: _read_lines(path) for path in paths}
    if expected is None:
        check_ignored_columns({path: header for path, (header, _, _) in read.items()}, reading)
    first = _with_roles(paths[0], read[paths[0]], expected, reading)
    of_others = expected or Expected()
    known = of_others.columns.label if of_others.columns else ""
    label = known if first.roles.label is None else first.header[first.roles.label]
    labelled = first.roles.label is not None and of_others.labels_used
    columns = Columns(tuple(first.inputs), ("number",) * len(first.inputs), label)
    like = replace(of_others, columns=columns, labelled=labelled, whose=str(paths[0]))
    return [first, *(_with_roles(path, read[path], like, reading) for path in paths[1:])]


def _with_roles(path: Path, read: TableLines, expected: Expected | None, reading: Reading) -> CsvTable:
    header, lines, left_out = read
    return CsvTable(path, header, lines, find_roles(header, path, expected, reading), left_out)


def _carried(table: CsvTable, name: str | None) -> list[str] | None:
    return None if name is None else [cells[table.at(name)] for _, cells in table.lines]


def _described(table: CsvTable, categories: Categories, x: Sequence[np.ndarray]) -> Columns:
    """What a model must know about the columns that it is trained on."""
    with np.errstate(invalid="ignore"):
        whole = np.all([((values == np.floor(values)) | np.isnan(values)).all(0) for values in x], axis=0)
    types, at = [], 0
    for name in table.inputs:
        types.append("category" if name in categories else "integer" if whole[at] else "number")
        at += len(categories.get(name, "1"))
    return Columns(tuple(table.inputs), tuple(types), table.header[table.label_at], categories)


def _category_notices(categories: Categories) -> tuple[str, ...]:
    each = ", ".join(f"{name!r} ({len(known)})" for name, known in categories.items())
    return (f"Columns of categories have one input for each category: {each}.",) if categories else ()


def _unnamed_notices(tables: Sequence[CsvTable]) -> tuple[str, ...]:
    """A sentence about columns without a name that number the rows."""
    having = [table for table in tables if table.left_out]
    if not having:
        return ()
    more = f" and of {counted(len(having) - 1, 'other table')}" if len(having) > 1 else ""
    return (f"A column without a name ({having[0].left_out}) of {having[0].path}{more} is left out: it numbers rows.",)


def _read_lines(path: Path) -> TableLines:
    """What a table has; the lines are not empty, and all of one length."""
    require_file(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, cells) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise unreadable(path, "a table in UTF-8", error) from error
    num_columns = len(lines[0][1]) if lines else 0
    if len(lines) < 2 or num_columns < 2:
        raise ConfigError(
            f"{path} has {counted(len(lines), 'line')} and {counted(num_columns, 'column')}; it must have a header, "
            "examples, and two columns at least, separated by commas. Write it again."
        )
    header = _read_header(path, lines.pop(0)[1])
    for number, cells in lines:
        if len(cells) != len(header):
            raise ConfigError(
                f"line {number} of {path} has {counted(len(cells), 'column')}; the header names {len(header)}. "
                "Correct that line."
            )
    return _without_unnamed(path, header, lines) if "" in header else (header, lines, "")


def _read_header(path: Path, cells: list[str]) -> list[str]:
    """The names of the columns, empty where one has none."""
    header = [same_spelling(cell.strip()) for cell in cells]
    if all(is_number(cell) for cell in header):
        raise without_header(path, header)
    if twice := [name for name, count in Counter(header).items() if name and count > 1]:
        raise ConfigError(
            f"{path} has more than one column called {listed_columns(twice)}; columns are told apart by name. Rename "
            "them."
        )
    return header


def _without_unnamed(path: Path, header: list[str], lines: list[Line]) -> tuple[list[str], list[Line], str]:
    """A table without its columns that have no name: empty ones, and one that numbers the rows, which is told."""
    numbering: list[str] = []
    for at in (at for at, name in enumerate(header) if not name):
        cells = [cells[at].strip() for _, cells in lines]
        if not any(cells):
            continue  # a comma at the end of every line
        where = {0: "the first", len(header) - 1: "the last"}.get(at, f"number {at + 1}")
        if numbering or not all(map(str.isdecimal, cells)) or len(set(cells)) < len(cells):
            raise ConfigError(
                f"{path} has a column without a name ({where}), such as {next(filter(None, cells))!r}; only a column "
                "that numbers the rows, as pandas writes it, may have none. Name it in the first line, or remove it."
            )
        numbering.append(where)
    named = [at for at, name in enumerate(header) if name]
    lines = [(number, [cells[at] for at in named]) for number, cells in lines]
    return [header[at] for at in named], lines, "".join(numbering)
