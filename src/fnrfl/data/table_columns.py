"""Which column of a table is what: inputs, classes, who holds a row. By keys, by rule, or as a model knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.nearest import did_you_mean
from fnrfl.core.words import counted
from fnrfl.data.reading import Columns, Expected, Reading

LABEL_COLUMNS = ("label", "class", "target", "y")
MAX_LISTED = 12  # names that a sentence lists


@dataclass(frozen=True)
class Roles:
    """The positions of the input columns, in the model's order, and of the columns of labels and clients, if any."""

    inputs: list[int]
    label: int | None
    client: int | None = None


def find_roles(header: list[str], path: Path, expected: Expected | None, reading: Reading) -> Roles:
    """What every column of a table is; refused where that cannot be told."""
    carried = None if expected is None else expected.carried
    if carried is not None and carried not in header:
        raise ConfigError(
            f"{path} has no column {carried!r} to carry along; it has {listed_columns(header)}. Give one of them."
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
    for key, name in (("label", reading.label), ("client", reading.client)):
        if name and name not in header:
            raise _no_such_column(key, name, path, header)
    if reading.label and reading.label in (reading.client, *reading.ignore):
        other = "client" if reading.label == reading.client else "ignore"
        raise ConfigError(
            f"dataset.label and dataset.{other} both name the column {reading.label!r}; the column of the classes is "
            "for nothing else. Name another column in one of them."
        )


def check_ignored_columns(headers: Mapping[Path, Sequence[str]], reading: Reading) -> None:
    """Refuse columns to ignore that no table has; that some have and others lack may be the reason to ignore one."""
    everywhere = list(dict.fromkeys(name for header in headers.values() for name in header))
    for name in reading.ignore:
        if name not in everywhere:
            raise _no_such_column("ignore", name, next(iter(headers)), everywhere)


def _no_such_column(key: str, name: str, path: Path, columns: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"dataset.{key} names the column {name!r}, and {path} has {listed_columns(columns)}."
        + (did_you_mean(name, columns) or " Name one of them.")
    )


def _columns_by_rule(header: list[str], path: Path, usable: list[int], reading: Reading) -> Roles:
    """The label is the column that a key names, or one with a known name, else the last; the others are inputs."""
    if len(usable) < 2:
        raise ConfigError(
            f"{path} has {listed_columns(header)}, of which dataset.client and dataset.ignore leave "
            f"{counted(len(usable), 'column')}; there must be a column of classes and an input. Ignore fewer columns."
        )
    known = _known_label(header, usable, reading)
    label = usable[-1] if known is None else known
    inputs = [at for at in usable if at != label]
    names = [header[at] for at in inputs]
    numbered = names in ([str(n + first) for n in range(len(names))] for first in (0, 1))  # as a data frame does
    if all(is_number(name) for name in names) and not (numbered and known is not None):
        raise without_header(path, header)
    return Roles(inputs, label)


def _known_label(header: list[str], usable: list[int], reading: Reading) -> int | None:
    """The column that has the name of a label."""
    if reading.label:
        return header.index(reading.label) if reading.label in header else None
    lowered = [header[at].lower() for at in usable]
    return next((usable[lowered.index(name)] for name in LABEL_COLUMNS if name in lowered), None)


def _columns_by_position(
    header: list[str], path: Path, usable: list[int], expected: Expected, reading: Reading
) -> Roles:
    """The columns for a model that knows no names: as many as it has inputs, with or without a label column."""
    if len(usable) != expected.num_inputs:
        return _columns_by_rule(header, path, usable, reading)
    named = [header[at] for at in usable if header[at].lower() in LABEL_COLUMNS]
    if named:
        raise CompatibilityError(
            f"{path} has a column called {named[0]!r} among as many columns as the model has inputs "
            f"({expected.num_inputs}), so an input is missing or has the name of a label. Add or rename it."
        )
    if all(is_number(header[at]) for at in usable):
        raise without_header(path, header)
    if expected.labelled:
        raise _unlabelled(path, "")
    return Roles(usable, None)


def _columns_by_name(header: list[str], path: Path, columns: Columns, expected: Expected, reading: Reading) -> Roles:
    """The inputs wherever they stand; names must be the same, and no others there."""
    if expected.carried in columns.inputs:
        raise ConfigError(
            f"{expected.carried!r} is an input of the model, so it cannot be carried along. Name a column that is none."
        )
    missing = [name for name in columns.inputs if name not in header]
    known = {*columns.inputs, columns.label, expected.carried, reading.client, *reading.ignore}
    unexpected = [name for name in header if name not in known]
    if missing or unexpected:
        raise _other_columns(path, missing, unexpected, columns, expected.whose)
    position = {name: at for at, name in enumerate(header)}
    if columns.label not in position and expected.labelled:
        raise _unlabelled(path, f" in a column called {columns.label!r}")
    return Roles([position[name] for name in columns.inputs], position.get(columns.label))


def _other_columns(
    path: Path, missing: list[str], unexpected: list[str], columns: Columns, whose: str
) -> CompatibilityError:
    differ = []
    if missing:
        differ.append(f"lacks {listed_columns(missing)}")
    if unexpected:
        differ.append(f"has {listed_columns(unexpected)}, which {whose} had not")
    wanted = {name.lower(): name for name in (*missing, columns.label)}
    pairs = [(name, wanted[name.lower()]) for name in unexpected if name.lower() in wanted]
    case = f" {listed_columns([name for pair in pairs[:3] for name in pair])} differ only in case." if pairs else ""
    if whose == Expected.whose:
        way_out = "a column of ids can be named with --id when predicting"
    else:
        names = ",".join(f'"{name}"' if "," in name else name for name in (*missing, *unexpected))
        way_out = f"dataset.ignore = {names!r} leaves out what not all tables have"
    return CompatibilityError(
        f"The columns of {path} are not those of {whose}: it {' and '.join(differ)}.{case} The inputs are "
        f"{listed_columns(columns.inputs)}, and {columns.label!r} is the label. Add, rename or leave out columns until "
        f"they are the same; {way_out}."
    )


def _unlabelled(path: Path, where: str) -> ConfigError:
    return ConfigError(f"{path} has no labels{where}, and they are needed here. Add the labels.")


def listed_columns(names: Sequence[str]) -> str:
    """Names for a sentence; of very many, the first."""
    more = len(names) - MAX_LISTED
    return ", ".join(repr(name) for name in names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def without_header(path: Path, header: Sequence[str]) -> ConfigError:
    """What to say of a table whose first line has numbers."""
    return ConfigError(
        f"{path} starts with the numbers {', '.join(header[:3])}, ...; its first line must name the columns. "
        "Add a header, and call the column of the classes label."
    )


def is_number(cell: str) -> bool:
    """Whether a cell reads as a number; one with an underscore, which Python would pass over, is text."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell
