"""A table as values: what was printed, then a column per setting, each number with its seeds and where it is from.

Every value knows its protocol, and a column refuses values of two. Every value of a run with a leak says leak. Rows,
columns and parts are found by their keys; their labels are for people alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fnrfl import statistics
from reproduction.catalogue import (
    CURVES,
    CURVES_SOURCE,
    PRINTED,
    SETTINGS,
    Cell,
    TablePart,
    method_name,
    part_title,
    table_parts,
    text,
)
from reproduction.store import CellResult, Line, Results, on_one_machine

MIB = 2**20
FORMS = {"mib": ".1f", "seconds": ".1f", "kappa": ".4g", "rho": ".4f"}
TIMES = ("seconds", "kappa")
METRICS: dict[str, Callable[[Line], float | None]] = {
    "accuracy": lambda line: line.accuracy,
    "clean": lambda line: line.clean,
    "noisy": lambda line: line.noisy,
    "mib": lambda line: line.bytes / MIB,
    "seconds": lambda line: None if line.untimed else line.seconds_train,
    "kappa": lambda line: None if line.untimed else line.accuracy * 1e4 / line.seconds_train,
    "rho": lambda line: line.accuracy * 1e4 / (line.bytes / MIB) if line.bytes else None,
}


@dataclass(frozen=True)
class Value:
    """A number of a table, or why there is none."""

    protocol: str  # "printed", "paper" or "honest"
    number: statistics.Estimate | None = None
    form: str = ".4f"
    words: str = ""  # in place of the number, such as "not run"
    seeds: tuple[int, ...] = ()  # that the number is of
    missing: tuple[int, ...] = ()  # seeds without a result
    leaks: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # where it is from, and what must be known about it
    cells: tuple[str, ...] = ()  # ids of the runs that it is, or would be, made from


@dataclass(frozen=True)
class Column:
    """Values of one protocol, a row each; `numeric`: they are numbers, and not words."""

    key: str
    label: str
    protocol: str
    values: tuple[Value, ...]
    numeric: bool = True

    def __post_init__(self) -> None:
        strange = {value.protocol for value in self.values} - {self.protocol}
        if strange:
            raise ValueError(f"the column {self.key!r} is {self.protocol} and has values that are {strange}")


@dataclass(frozen=True)
class Part:
    """Rows and columns under one title; the key is a tuple of names, such as net, skew and metric."""

    key: tuple[str, ...]
    title: str
    rows: tuple[tuple[str, str], ...]  # (key, label)
    columns: tuple[Column, ...]
    caption: str = ""

    @property
    def values(self) -> list[Value]:
        """All values of the part, column by column."""
        return [value for column in self.columns for value in column.values]

    @property
    def leaks(self) -> tuple[str, ...]:
        """Every leak that some value has."""
        return once_each(value.leaks for value in self.values)

    def value(self, row: str, column: str) -> Value | None:
        """Return a value by the keys of its row and its column; None if there is none."""
        place = [key for key, _ in self.rows].index(row)
        return next((found.values[place] for found in self.columns if found.key == column), None)


@dataclass(frozen=True)
class Table:
    """A table of the paper with everything that is known about it."""

    name: str
    scale: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What stands above it."""
        return text("titles", self.name)

    @property
    def leaks(self) -> tuple[str, ...]:
        """Every leak that some value has."""
        return once_each(part.leaks for part in self.parts)


def once_each(found: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return all names of several groups, each once."""
    return tuple(dict.fromkeys(name for names in found for name in names))


def leaks_of(lines: Iterable[Line]) -> tuple[str, ...]:
    """Return every leak that some run has, once."""
    return once_each(line.leaks for line in lines)


def make_table(name: str, results: Results, scale: str, seeds: Sequence[int] | None = None) -> Table:
    """Make a table of whatever results there are."""
    maker = _Maker(name, results, scale, seeds)
    parts = tuple(part for one in table_parts(name) for part in maker.parts(one))
    return Table(name, scale, parts, tuple(_notes(name, parts, scale)))


@dataclass(frozen=True)
class _Maker:
    """Makes values of results."""

    name: str
    results: Results
    scale: str
    seeds: Sequence[int] | None

    def parts(self, part: TablePart) -> Iterator[Part]:
        """Yield a part for each metric; those of one setting stand side by side, curves have a column per round."""
        rows = tuple((method, method_name(method)) for method in part.methods)
        title, key = part_title(part.net, part.skew, self.scale), (part.net, part.skew)
        if part.metrics == ("accuracies",):
            yield from self._curves(part, rows)
        elif len(part.settings) == 1:
            columns = [self._column(part, part.settings[0], metric) for metric in part.metrics]
            yield Part((*key, *part.metrics), title, rows, (*self._printed(part, part.metrics[0]), *columns))
        else:
            for metric in part.metrics:
                of_metric = text("parts", "metric", title=title, metric=text("metrics", metric))
                columns = [self._column(part, setting, metric) for setting in part.settings]
                shown = title if len(part.metrics) == 1 else of_metric
                yield Part((*key, metric), shown, rows, (*self._printed(part, metric), *columns))

    def _printed(self, part: TablePart, metric: str) -> list[Column]:
        """Return the column of what was printed, if anything was."""
        values = []
        for method in part.methods:
            name = f"{method}:{metric}" if self.name == "cost" else method
            printed = PRINTED.get((self.name, part.net, part.skew, name))
            if printed is None:
                values.append(Value("printed"))
            else:
                number = statistics.estimate([printed.value])
                about = (printed.place, printed.note) if printed.note else (printed.place,)
                values.append(Value("printed", number, words=printed.text, sources=about))
        if not any(value.number for value in values):
            return []
        label = text("settings", "published" if self.name == "niid-bench" else "printed")
        return [Column("printed", label, "printed", tuple(values))]

    def _column(self, part: TablePart, setting: str, metric: str) -> Column:
        by_setting = len(part.settings) > 1 or len(part.metrics) == 1
        label = text("settings", setting) if by_setting else text("metrics", metric)
        get, form = METRICS[metric], FORMS.get(metric, ".4f")
        cells = [part.cells(setting, method, self.scale, self.seeds) for method in part.methods]
        values = tuple(self._value(each, get, form, is_time=metric in TIMES) for each in cells)
        return Column(setting if by_setting else metric, label, SETTINGS["settings"][setting]["protocol"], values)

    def _value(
        self, cells: Sequence[Cell], get: Callable[[Line], float | None], form: str = ".4f", *, is_time: bool = False
    ) -> Value:
        """Return the mean of some seeds; of a time, only if all of them are of one device and one engine."""
        protocol, ids = cells[0].protocol, tuple(cell.id for cell in cells)
        found = {cell: self.results.find(cell) for cell in cells}
        numbers = {cell: get(one.line) for cell, one in found.items() if one.usable}
        known = {cell: number for cell, number in numbers.items() if number is not None}
        if not known:
            about = (text("notes", "no-measure"),) if is_time and numbers else failures(found)
            return Value(protocol, words=why_none(found.values()), sources=about, cells=ids)
        if is_time and not on_one_machine(*(found[cell].line for cell in known)):
            sources = tuple(dict.fromkeys(found[cell].origin for cell in known))
            return Value(protocol, words=text("values", "devices"), sources=sources, cells=ids)
        by_seed = {cell.seed: number for cell, number in known.items()}
        return value_of(protocol, by_seed, form, [found[cell] for cell in known], cells)

    def _curves(self, part: TablePart, rows: tuple[tuple[str, str], ...]) -> Iterator[Part]:
        """Yield accuracy after each round: a part for what was printed, and one for each setting."""
        if part.skew == "label":
            curves = [CURVES.get(method) for method in part.methods]
            columns = (
                Column(str(t + 1), str(t + 1), "printed", tuple(_printed_point(curve, t) for curve in curves))
                for t in range(10)
            )
            title = part_title(part.net, part.skew, "full")
            yield self._rounds_part(part, "printed", title, rows, columns)
        for setting in part.settings:
            cells = [part.cells(setting, method, self.scale, self.seeds) for method in part.methods]
            columns = (
                Column(
                    str(t + 1), str(t + 1), SETTINGS["settings"][setting]["protocol"],
                    tuple(self._value(each, lambda line, t=t: line.accuracies[t]) for each in cells),  # type: ignore[misc]
                )
                for t in range(SETTINGS["scales"][self.scale]["rounds"])
            )  # fmt: skip
            yield self._rounds_part(part, setting, part_title(part.net, part.skew, self.scale), rows, columns)

    def _rounds_part(
        self, part: TablePart, setting: str, title: str, rows: tuple[tuple[str, str], ...], columns: Iterable[Column]
    ) -> Part:
        named = text("parts", "rounds", title=title, setting=text("settings", setting))
        return Part((part.net, part.skew, setting), named, rows, tuple(columns))


def value_of(
    protocol: str, numbers: Mapping[int, float], form: str, behind: Sequence[CellResult], cells: Sequence[Cell]
) -> Value:
    """Return the mean of numbers by seed, made from the results `behind` it, of the cells that it should have."""
    number, leaks = statistics.estimate(list(numbers.values())), leaks_of(one.line for one in behind)
    missing = tuple(dict.fromkeys(cell.seed for cell in cells if cell.seed not in numbers))
    sources = tuple(dict.fromkeys(one.origin for one in behind))
    return Value(protocol, number, form, "", tuple(numbers), missing, leaks, sources, tuple(cell.id for cell in cells))


def _printed_point(curve: Sequence[float] | None, t: int) -> Value:
    if curve is None:
        return Value("printed")
    return Value("printed", statistics.estimate([curve[t]]), sources=(CURVES_SOURCE,))


def why_none(found: Iterable[CellResult]) -> str:
    """Return why there is no number; a run may have no such number, as accuracy on noisy images without noise."""
    states = [one.state for one in found]
    if {"committed", "here"} & set(states):
        return text("values", "none")
    return text("values", next((state for state in ("failed", "older") if state in states), "not-run"))


def failures(found: dict[Cell, CellResult]) -> tuple[str, ...]:
    """Return which runs have failed, and why."""
    failed = {cell: one.line.failed for cell, one in found.items() if one.state == "failed"}
    return tuple(text("values", "why-failed", cell=cell.id, why=why) for cell, why in failed.items())


def leak_note(parts: Iterable[Part]) -> Iterator[str]:
    """Yield which leaks values of a table have, if any."""
    if leaks := once_each(part.leaks for part in parts):
        yield text("notes", "leaks", leaks=", ".join(leaks))


def scale_note(scale: str, table: str = "") -> str:
    """Return how large the runs are."""
    return text("scales", table if (table, scale) == ("niid-bench", "full") else scale)


def _notes(name: str, parts: Sequence[Part], scale: str) -> Iterator[str]:
    """Yield what must be known to read the table."""
    leaky = list(leak_note(parts))
    yield from [*leaky, text("notes", "leaky")] if leaky else []
    yield scale_note(scale, name)
    when = text("notes", "each-round" if name == "convergence" else "last-round")
    yield text("notes", "accuracy", when=when)
    if name == "controls":
        yield text("notes", "controls")
    if name in ("accuracy", "convergence", "mixed", "noise", "orthogonality", "cost", "rate"):
        yield from (text("notes", "noise"), text("notes", "printed"))
    if name == "cost":
        yield text("notes", "cost")
        ran = {source for part in parts for value in part.values if value.cells for source in value.sources}
        if len(ran - {text("notes", "no-measure")}) > 1:
            yield text("notes", "several")
