"""Tables, `.csv` files: columns of numbers and one of classes. A model finds its columns in other tables by name."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import numpy as np

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.nearest import did_you_mean
from fnrfl.core.words import counted
from fnrfl.data.reading import (
    ONLY_PART,
    PLAIN_READING,
    Columns,
    Examples,
    Expected,
    RawData,
    Reading,
    require_file,
    unreadable,
)

Line = tuple[int, list[str]]  # the number of a line in a table, and its cells

LABEL_COLUMNS = ("label", "class", "target", "y")
MAX_LISTED = 12  # names that a sentence lists


@dataclass(frozen=True)
class _InputColumns:
    """The positions of the input columns, in the model's order, and of the columns of labels and clients, if any."""

    inputs: list[int]
    label: int | None
    client: int | None = None


def read_csv(path: Path, expected: Expected | None = None, reading: Reading = PLAIN_READING) -> RawData:
    """A table with a header: a label column, by name or the last, and columns of numbers, which become float32."""
    header, lines = _read_lines(path)
    chosen = _input_columns(header, path, expected, reading)
    x = _input_numbers(lines, header, chosen, path)
    y, classes = None, None
    if chosen.label is not None:
        y, classes = _classes_and_names(
            [(n, cells[chosen.label].strip()) for n, cells in lines], path, header[chosen.label]
        )
    carried = None
    if expected is not None and expected.carried is not None:
        at = header.index(expected.carried)
        carried = [cells[at] for _, cells in lines]
    columns = None
    if chosen.label is not None:
        types = tuple("integer" if whole else "number" for whole in (x == np.floor(x)).all(0))
        columns = Columns(tuple(header[at] for at in chosen.inputs), types, header[chosen.label])
    clients = None
    if chosen.client is not None:
        clients = _client_ids([(n, cells[chosen.client].strip()) for n, cells in lines], path, header[chosen.client])
    examples = Examples(x.astype(np.float32), y, carried=carried, clients=clients)
    return RawData({ONLY_PART: examples}, classes=classes, columns=columns)


# -- the file ----------------------------------------------------------------------------------------------------------


def _read_lines(path: Path) -> tuple[list[str], list[Line]]:
    """The header and the other lines that are not empty, all of one length."""
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
    header = [cell.strip() for cell in lines.pop(0)[1]]
    if all(_is_number(cell) for cell in header):
        raise _without_header(path, header)
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise ConfigError(
            f"{path} has more than one column called {_listed(twice)}; columns are told apart by name. Rename them."
        )
    for number, cells in lines:
        if len(cells) != len(header):
            raise ConfigError(
                f"line {number} of {path} has {counted(len(cells), 'column')}; the header names {len(header)}. "
                "Correct that line."
            )
    return header, lines


def _without_header(path: Path, header: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{path} starts with the numbers {', '.join(header[:3])}, ...; its first line must name the columns. "
        "Add a header, and call the column of the classes label."
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _input_numbers(lines: list[Line], header: list[str], chosen: _InputColumns, path: Path) -> np.ndarray:
    """The inputs, in their order, as float64 that fits into float32."""
    inputs = chosen.inputs
    pick = itemgetter(*inputs) if len(inputs) > 1 else lambda cells: (cells[inputs[0]],)  # much faster than a loop
    try:
        x = np.array([pick(cells) for _, cells in lines], dtype=np.float64)
    except ValueError as error:
        number, at = next((n, at) for n, cells in lines for at in inputs if not _is_number(cells[at]))
        others = "" if chosen.label is None else f" but the labels' ({header[chosen.label]!r})"
        raise ConfigError(
            f"line {number} of {path} has {dict(lines)[number][at]!r} in column {header[at]!r}; every column{others} "
            "must hold numbers. Encode categories as numbers and fill in what is missing."
        ) from error
    with np.errstate(invalid="ignore"):
        large = np.argwhere(np.isfinite(x) & (np.abs(x) > np.finfo(np.float32).max))
    if len(large):
        row, column = large[0]
        raise ConfigError(
            f"line {lines[row][0]} of {path} has {lines[row][1][inputs[column]]!r} in column "
            f"{header[inputs[column]]!r}; numbers of a table must fit into float32, up to 3.4e38. Scale that column."
        )
    return x


def _classes_and_names(labels: list[tuple[int, str]], path: Path, column: str) -> tuple[np.ndarray, list[str]]:
    """Class numbers and names; labels in a table are names even where they look like numbers, as 1, 2, 3 or -1, 1."""
    numeric = all(_is_number(label) for _, label in labels)
    spelling: dict[str, str] = {}
    names = []
    for number, label in labels:
        if not label or (numeric and not float(label).is_integer()):
            raise ConfigError(
                f"line {number} of {path} has {label!r} in column {column!r}; a label must be a whole number or a name."
                " Correct that line, or call the column of the classes label."
            )
        name = str(_whole_number(label)) if numeric else label
        if spelling.setdefault(name, label) != label:
            raise ConfigError(
                f"line {number} of {path} has the label {label!r} in column {column!r}, and another line has "
                f"{spelling[name]!r}, which is the same number. Write a class in one way, or give the classes names."
            )
        names.append(name)
    known = sorted(spelling, key=int if numeric else None)
    index = {name: at for at, name in enumerate(known)}
    return np.array([index[name] for name in names], dtype=np.int64), known


def _client_ids(ids: list[tuple[int, str]], path: Path, column: str) -> np.ndarray:
    """Who holds each row, as the table writes it."""
    if empty := [number for number, name in ids if not name]:
        raise ConfigError(
            f"line {empty[0]} of {path} has nothing in column {column!r}, which says who holds a row "
            f"(dataset.client). Write who does, or leave the line out."
        )
    return np.array([name for _, name in ids])


def _whole_number(label: str) -> int:
    try:
        return int(label)  # exactly, since long codes do not survive as floats
    except ValueError:
        return int(float(label))


# -- which column is what ----------------------------------------------------------------------------------------------


def _input_columns(header: list[str], path: Path, expected: Expected | None, reading: Reading) -> _InputColumns:
    carried = None if expected is None else expected.carried
    if carried is not None and carried not in header:
        raise ConfigError(
            f"{path} has no column {carried!r} to carry along; it has {_listed(header)}. Give one of them."
        )
    no_inputs = {carried, reading.client, *reading.ignore}
    usable = [at for at, name in enumerate(header) if name not in no_inputs]
    if expected is None:
        _check_named_columns(header, path, reading)
        chosen = _columns_by_rule(header, path, usable, reading)
    elif expected.columns is None:
        chosen = _columns_by_position(header, path, usable, expected, reading)
    else:
        chosen = _columns_by_name(header, path, expected.columns, expected, reading)
    return replace(chosen, client=header.index(reading.client) if reading.client in header else None)


def _check_named_columns(header: list[str], path: Path, reading: Reading) -> None:
    """Refuse columns that keys name and the table has not, and one column for two things."""
    named = [("label", reading.label), ("client", reading.client), *(("ignore", name) for name in reading.ignore)]
    for key, name in named:
        if name and name not in header:
            raise ConfigError(
                f"dataset.{key} names the column {name!r}, and {path} has {_listed(header)}."
                + (did_you_mean(name, header) or " Name one of them.")
            )
    if reading.label and reading.label in (reading.client, *reading.ignore):
        other = "client" if reading.label == reading.client else "ignore"
        raise ConfigError(
            f"dataset.label and dataset.{other} both name the column {reading.label!r}; the column of the classes is "
            "for nothing else. Name another column in one of them."
        )


def _columns_by_rule(header: list[str], path: Path, usable: list[int], reading: Reading) -> _InputColumns:
    """The label is the column that a key names, or one with a known name, else the last; the others are inputs."""
    if len(usable) < 2:
        raise ConfigError(
            f"{path} has {_listed(header)}, of which dataset.client and dataset.ignore leave "
            f"{counted(len(usable), 'column')}; there must be a column of classes and an input. Ignore fewer columns."
        )
    known = _known_label(header, usable, reading)
    label = usable[-1] if known is None else known
    inputs = [at for at in usable if at != label]
    names = [header[at] for at in inputs]
    numbered = names in ([str(n + first) for n in range(len(names))] for first in (0, 1))  # as a data frame does
    if all(_is_number(name) for name in names) and not (numbered and known is not None):
        raise _without_header(path, header)
    return _InputColumns(inputs, label)


def _known_label(header: list[str], usable: list[int], reading: Reading) -> int | None:
    """The column that has the name of a label."""
    if reading.label:
        return header.index(reading.label) if reading.label in header else None
    lowered = [header[at].lower() for at in usable]
    return next((usable[lowered.index(name)] for name in LABEL_COLUMNS if name in lowered), None)


def _columns_by_position(
    header: list[str], path: Path, usable: list[int], expected: Expected, reading: Reading
) -> _InputColumns:
    """For a model that knows no names: as many columns as it has inputs, with or without a label column."""
    if len(usable) != expected.num_inputs:
        return _columns_by_rule(header, path, usable, reading)
    named = [header[at] for at in usable if header[at].lower() in LABEL_COLUMNS]
    if named:
        raise CompatibilityError(
            f"{path} has a column called {named[0]!r} among as many columns as the model has inputs "
            f"({expected.num_inputs}), so an input is missing or has the name of a label. Add or rename it."
        )
    if all(_is_number(header[at]) for at in usable):
        raise _without_header(path, header)
    if expected.labelled:
        raise _unlabelled(path, "")
    return _InputColumns(usable, None)


def _columns_by_name(
    header: list[str], path: Path, columns: Columns, expected: Expected, reading: Reading
) -> _InputColumns:
    """The inputs wherever they stand; names must be the same, and no others there."""
    if expected.carried in columns.inputs:
        raise ConfigError(
            f"{expected.carried!r} is an input of the model, so it cannot be carried along. Name a column that is none."
        )
    missing = [name for name in columns.inputs if name not in header]
    known = {*columns.inputs, columns.label, expected.carried, reading.client, *reading.ignore}
    unexpected = [name for name in header if name not in known]
    if missing or unexpected:
        raise _other_columns(path, missing, unexpected, columns)
    position = {name: at for at, name in enumerate(header)}
    if columns.label not in position and expected.labelled:
        raise _unlabelled(path, f" in a column called {columns.label!r}")
    return _InputColumns([position[name] for name in columns.inputs], position.get(columns.label))


def _other_columns(path: Path, missing: list[str], unexpected: list[str], columns: Columns) -> CompatibilityError:
    differ = []
    if missing:
        differ.append(f"lacks {_listed(missing)}")
    if unexpected:
        differ.append(f"has {_listed(unexpected)}, which the training data had not")
    wanted = {name.lower(): name for name in (*missing, columns.label)}
    pairs = [(name, wanted[name.lower()]) for name in unexpected if name.lower() in wanted]
    case = f" {_listed([name for pair in pairs[:3] for name in pair])} differ only in case." if pairs else ""
    return CompatibilityError(
        f"The columns of {path} are not those of the training data: it {' and '.join(differ)}.{case} The inputs are "
        f"{_listed(columns.inputs)}, and {columns.label!r} is the label. Add, rename or leave out columns until they "
        "are the same; a column of ids can be named with --id when predicting."
    )


def _unlabelled(path: Path, where: str) -> ConfigError:
    return ConfigError(f"{path} has no labels{where}, and they are needed here. Add the labels.")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(repr(name) for name in names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
