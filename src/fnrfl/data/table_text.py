"""Tables as text, read with pandas: cells, and which column is what, by keys, by rule, or as a model knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.words import counted, did_you_mean, same_spelling
from fnrfl.data.column_names import Profile, listed_columns, refuse_other_columns, same_as_first
from fnrfl.data.reading import Columns, Expected, Reading
from fnrfl.data.table_files import Cells, decimal_signs, plain_number, read_cells
from fnrfl.data.table_summary import is_number

LABEL_COLUMNS = ("label", "class", "target", "y")
MISSING_WORDS = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "?"})  # in lower case


@dataclass(frozen=True, eq=False)
class Column:
    """A column as text."""

    raw: list[str]  # cells as they stand in the file
    sign: str = ""  # the decimal sign of its numbers; "": as Python writes them, or there are none

    @cached_property
    def written(self) -> list[str]:
        """The cells without the space around them."""
        return [same_spelling(cell.strip()) for cell in self.raw]

    @cached_property
    def cells(self) -> list[str]:
        """The same with numbers as Python writes them."""
        return [plain_number(cell, self.sign) for cell in self.written] if self.sign else self.written

    @cached_property
    def missing(self) -> np.ndarray:
        """Where nobody knows what belongs into a cell, [n]."""
        return np.array([cell.lower() in MISSING_WORDS for cell in self.cells], dtype=bool)

    @cached_property
    def counts(self) -> Counter[str]:
        """How often each cell that is not missing occurs, in the order of the first."""
        return Counter(cell for cell, missing in zip(self.cells, self.missing, strict=True) if not missing)

    @cached_property
    def numbers(self) -> np.ndarray | None:
        """The cells as float64, correctly rounded, NaN where one is missing; None if some are text."""
        cells = ["nan" if missing else cell for cell, missing in zip(self.cells, self.missing, strict=True)]
        try:
            return None if any("_" in cell for cell in self.counts) else np.array(cells, dtype=np.float64)
        except ValueError:
            return None

    def profile(self) -> Profile:
        """What is known of the cells, for a column to be found under another name."""
        if (x := self.numbers) is None:
            return Profile(True, frozenset(self.counts))
        known = x[np.isfinite(x)]
        return Profile(False, spread=tuple(np.quantile(known, (0.05, 0.95)).tolist()) if len(known) else None)


@dataclass(frozen=True, eq=False)
class Table:
    """A table as text, and which column is what."""

    path: Path
    columns: dict[str, Column]
    numbering: str = ""  # which column has no name and numbers the rows, in words
    inputs: Sequence[str] = ()  # in the model's order
    label: str | None = None
    client: str | None = None
    line: Callable[[int], int] = int  # the line of the file in which a row ends
    found: tuple[str, ...] = ()  # what is not plain about the file, in words
    renamed: tuple[str, ...] = ()  # names that dataset.rename has changed

    def quoted(self, row: int, name: str) -> str:
        """A cell, for a sentence."""
        return f"line {self.line(row)} of {self.path} has {self.columns[name].written[row]!r} in column {name!r}"

    def client_ids(self) -> np.ndarray | None:
        """Who holds each row; None if the table does not say."""
        if self.client is None:
            return None
        ids = self.columns[self.client].written
        if "" in ids:
            raise ConfigError(
                f"{self.quoted(ids.index(''), self.client)}, which says who holds a row (dataset.client). Write who "
                "does, or leave the line out."
            )
        return np.array(ids)


def _opened(path: Path, reading: Reading) -> Table:
    """Read a table as text; columns without a name are left out: empty ones, and one that numbers the rows."""
    cells = read_cells(path)
    renamed = dict(reading.rename)
    found = [same_spelling(name.strip()) for name in cells.header]
    header = [renamed.get(name, name) for name in found]
    if all(map(is_number, header)):
        raise _without_header(path, header)
    if twice := [name for name, times in Counter(header).items() if name and times > 1]:
        raise ConfigError(
            f"{path} has more than one column called {listed_columns(twice)}; columns are told apart by name. Rename "
            "them, or correct dataset.rename."
        )
    columns = _with_signs(cells)
    unnamed = {at: column for at, column in enumerate(columns, 1) if not header[at - 1]}
    return Table(
        path,
        {name: column for name, column in zip(header, columns, strict=True) if name},
        _numbering(path, unnamed),
        line=cells.line,
        found=(*cells.found, *_decimals(columns)),
        renamed=tuple(name for name in found if name in renamed),
    )


def _with_signs(cells: Cells) -> list[Column]:
    """The columns of a file, each with its decimal sign."""
    columns = [Column(column) for column in cells.columns]
    plain = [column.numbers is not None for column in columns]
    signs = decimal_signs([[*column.counts] for column in columns], plain, cells.delimiter)
    return [replace(column, sign=sign) if sign else column for column, sign in zip(columns, signs, strict=True)]


def _decimals(columns: Sequence[Column]) -> list[str]:
    """Say how numbers are written, with a cell for each decimal sign that is read in another way than it stands."""
    found = {}
    for column in columns:
        if column.sign and column.sign not in found:
            told = next(cell for cell in column.written if plain_number(cell, column.sign) != cell)
            found[column.sign] = f"numbers such as {told!r} as {plain_number(told, column.sign)}"
    return [*found.values()]


def _numbering(path: Path, unnamed: dict[int, Column]) -> str:
    """Say which column without a name numbers the rows; refuse one without a name that has other cells."""
    found = {at: column.written for at, column in unnamed.items() if any(column.written)}  # a comma may end every line
    for at, cells in found.items():
        if len(found) > 1 or not all(map(str.isdecimal, cells)) or len(set(cells)) < len(cells):
            raise ConfigError(
                f"{path} has a column without a name (number {at}), such as {next(filter(None, cells))!r}; only a "
                "column that numbers the rows, as pandas writes it, may have none. Name it in the first line, or "
                "remove it."
            )
    return "".join(f"number {at}" for at in found)


def _without_header(path: Path, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{path} starts with the numbers {', '.join(names[:3])}, ...; its first line must name the columns. "
        "Add a header, and call the column of the classes label."
    )


# -- which column is what ----------------------------------------------------------------------------------------------


def open_alike(paths: Sequence[Path], expected: Expected | None, reading: Reading) -> list[Table]:
    """Open tables; the columns of the first are found by keys, by rule or as a model knows them, others' by name."""
    tables = [_opened(path, reading) for path in paths]
    if expected is None:  # a column to ignore may be one that only some tables have
        everywhere = list(dict.fromkeys(name for table in tables for name in table.columns))
        _refuse_unknown("ignore", reading.ignore, paths[0], everywhere)
    first = _with_roles(tables[0], expected, reading)
    others = expected or Expected()
    label = first.label or (others.columns.label if others.columns else "")
    labelled = first.label is not None and others.labels_used
    like = replace(others, columns=plain_columns(first, label), labelled=labelled, whose=str(paths[0]))
    pairs = partial(_same_as_first, [first, *tables[1:]], label, reading)
    return [first, *(_with_roles(table, like, reading, pairs) for table in tables[1:])]


def _same_as_first(tables: Sequence[Table], label: str, reading: Reading) -> dict[str, str]:
    """What dataset.rename would say for the inputs and labels of all tables to be those of the first."""
    no_inputs, ours = {reading.client, *reading.ignore}, {*tables[0].inputs, label}
    profiles = (
        {name: column.profile() for name, column in table.columns.items() if name in ours or name not in no_inputs}
        for table in tables
    )
    return same_as_first(profiles, reading.rename)


def refuse_unused_names(tables: Sequence[Table], reading: Reading) -> None:
    """Refuse old names under dataset.rename that no table has."""
    names = [*dict.fromkeys(name for table in tables for name in (*table.columns, *table.renamed))]
    _refuse_unknown("rename", [old for old, _ in reading.rename], tables[0].path, names)


def plain_columns(table: Table, label: str = "") -> Columns:
    """The columns of a table of which no more is known than their names."""
    return Columns(tuple(table.inputs), ("number",) * len(table.inputs), table.label or label)


def _with_roles(
    table: Table, expected: Expected | None, reading: Reading, pairs: Callable[[], Mapping[str, str]] = dict
) -> Table:
    """Find the inputs, the label and the client of a table; refuse it where that cannot be told."""
    carried = () if expected is None else expected.carried
    if unknown := [name for name in carried if name not in table.columns]:
        raise ConfigError(
            f"{table.path} has no column {unknown[0]!r} to carry along; it has {listed_columns([*table.columns])}. "
            "Give one of them."
        )
    no_inputs = {*carried, reading.client, *reading.ignore}
    usable = [name for name in table.columns if name not in no_inputs]
    if expected is not None and expected.columns is not None:
        inputs, label = _by_name(table, expected.columns, expected, reading, pairs)
    elif expected is not None and len(usable) == expected.num_inputs:
        inputs, label = _all_inputs(table.path, usable, expected)
    else:
        if expected is None:
            _refuse_other_keys(table, reading)
        inputs, label = _by_rule(table, usable, reading)
    client = reading.client if reading.client in table.columns else None
    return replace(table, inputs=inputs, label=label, client=client)


def _refuse_unknown(key: str, names: Sequence[str], path: Path, columns: Sequence[str]) -> None:
    """Refuse names under a key that no column has."""
    for name in names:
        if name and name not in columns:
            raise ConfigError(
                f"dataset.{key} names the column {name!r}, and {path} has {listed_columns(columns)}."
                + (did_you_mean(name, columns) or " Name one of them.")
            )


def _by_rule(table: Table, usable: list[str], reading: Reading) -> tuple[list[str], str]:
    """(inputs, label): the column that a key names, or one with a known name, else the last; the others are inputs."""
    if len(usable) < 2:
        raise ConfigError(
            f"{table.path} has {listed_columns([*table.columns])}, of which dataset.client and dataset.ignore leave "
            f"{counted(len(usable), 'column')}; there must be a column of classes and an input. Ignore fewer columns."
        )
    lowered = {name.lower(): name for name in reversed(usable)}
    wanted = [lowered[name] for name in LABEL_COLUMNS if name in lowered]
    if reading.label:
        wanted = [reading.label] if reading.label in table.columns else []
    label = wanted[0] if wanted else usable[-1]
    inputs = [name for name in usable if name != label]
    numbered = inputs in ([str(n + first) for n in range(len(inputs))] for first in (0, 1))  # as a data frame does
    if all(map(is_number, inputs)) and not (numbered and wanted):
        raise _without_header(table.path, [*table.columns])
    return inputs, label


def _refuse_other_keys(table: Table, reading: Reading) -> None:
    """Refuse columns that keys name and the table has not, and one column for two things."""
    for key, name in (("label", reading.label), ("client", reading.client)):
        _refuse_unknown(key, [name], table.path, [*table.columns])
    if reading.label and reading.label in (reading.client, *reading.ignore):
        other = "client" if reading.label == reading.client else "ignore"
        raise ConfigError(
            f"dataset.label and dataset.{other} both name the column {reading.label!r}; the column of the classes is "
            "for nothing else. Name another column in one of them."
        )


def _all_inputs(path: Path, usable: list[str], expected: Expected) -> tuple[list[str], None]:
    """(inputs, no label) for a model that knows no names, where a table has as many columns as it has inputs."""
    if named := [name for name in usable if name.lower() in LABEL_COLUMNS]:
        raise CompatibilityError(
            f"{path} has a column called {named[0]!r} among as many columns as the model has inputs "
            f"({expected.num_inputs}), so an input is missing or has the name of a label. Add or rename it."
        )
    if all(map(is_number, usable)):
        raise _without_header(path, usable)
    if expected.labelled:
        raise ConfigError(f"{path} has no labels, and they are needed here. Add the labels.")
    return usable, None


def _by_name(
    table: Table,
    columns: Columns,
    expected: Expected,
    reading: Reading,
    pairs: Callable[[], Mapping[str, str]],
) -> tuple[Sequence[str], str | None]:
    """(inputs, label) wherever they stand; names must be the same, and no others there."""
    if inputs := [name for name in expected.carried if name in columns.inputs]:
        raise ConfigError(
            f"{inputs[0]!r} is an input of the model, so it cannot be carried along. Name a column that is none."
        )
    no_inputs = {columns.label, *expected.carried, reading.client, *reading.ignore} - {*columns.inputs}
    ids = "a column of ids can be named with --id when predicting" if expected.whose == Expected.whose else ""
    found = [name for name in table.columns if name not in no_inputs]
    refuse_other_columns(str(table.path), found, columns.inputs, expected.whose, ids, columns.label, pairs)
    label = columns.label if columns.label in table.columns else None
    if label is None and expected.labelled:
        raise ConfigError(
            f"{table.path} has no labels in a column called {columns.label!r}, and they are needed here. Add them."
        )
    return columns.inputs, label
