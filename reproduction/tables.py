"""A table as values: what was printed, then a column per setting, each number with its seeds and where it is from.

Every value knows its protocol, and a column refuses values of two. Every value of a run with a leak says leak. Rows,
columns and parts are found by their keys; their labels are for people alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fnrfl import statistics
from reproduction import catalogue
from reproduction.catalogue import SETTINGS, Cell, TablePart, method_name, part_title, protocol_of, table_parts, text
from reproduction.store import Line, Results, on_one_machine

MIB = 2**20


class Metric(NamedTuple):
    """A number made of the lines of one seed, a line for each of its runs, and how it is written."""

    get: Callable[..., float | None]
    form: str = ".4f"
    is_time: bool = False  # there is no mean over several devices or engines


METRICS = {
    "accuracy": Metric(lambda line: line.accuracy),
    "clean": Metric(lambda line: line.clean),
    "noisy": Metric(lambda line: line.noisy),
    "mib": Metric(lambda line: line.bytes / MIB, ".1f"),
    "seconds": Metric(lambda line: None if line.untimed else line.seconds_train, ".1f", True),
    "kappa": Metric(lambda line: None if line.untimed else line.accuracy * 1e4 / line.seconds_train, ".4g", True),
    "rho": Metric(lambda line: line.accuracy * 1e4 / (line.bytes / MIB) if line.bytes else None),
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
        return leaks_of(self.values)

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
        return text("titles", self.name)

    @property
    def leaks(self) -> tuple[str, ...]:
        return leaks_of(self.parts)


def leaks_of(found: Iterable[Line | Value | Part | Table]) -> tuple[str, ...]:
    """Return every leak that some of them has, once."""
    return tuple(dict.fromkeys(leak for one in found for leak in one.leaks))


def make_value(
    results: Results, protocol: str, cells: Mapping[int, Sequence[Cell]], metric: Metric, usual: Sequence[int] = ()
) -> Value:
    """Return the mean of a metric over seeds, or why there is none; with `usual`, no other seed can be missing."""
    found = {seed: [results.find(cell) for cell in each] for seed, each in cells.items()}
    whole = {seed: lines for seed, lines in found.items() if all(line.usable for line in lines)}
    numbers = {seed: number for seed, lines in whole.items() if (number := metric.get(*lines)) is not None}
    seeds = [seed for seed in cells if not usual or seed in usual or seed in numbers]
    known = {cell: line for seed in seeds for cell, line in zip(cells[seed], found[seed], strict=True)}
    ids = tuple(cell.id for cell in known)
    if not numbers:
        states = {line.state for line in known.values() if not line.usable}
        why = "none" if whole else next(state for state in ("failed", "older", "not-run") if state in states)
        failed = {cell.id: line.failed for cell, line in known.items() if line.state == "failed"}
        failures = tuple(text("values", "why-failed", cell=cell, why=reason) for cell, reason in failed.items())
        sources = (text("notes", "no-measure"),) if metric.is_time and whole else failures
        return Value(protocol, words=text("values", why), sources=sources, cells=ids)
    behind = [line for seed in numbers for line in whole[seed]]
    origins = tuple(dict.fromkeys(line.origin for line in behind))
    if metric.is_time and not on_one_machine(*behind):
        return Value(protocol, words=text("values", "devices"), sources=origins, cells=ids)
    mean, missing = statistics.estimate([*numbers.values()]), tuple(seed for seed in seeds if seed not in numbers)
    return Value(protocol, mean, metric.form, "", tuple(numbers), missing, leaks_of(behind), origins, ids)


def make_table(name: str, results: Results, scale: str, seeds: Sequence[int] | None = None) -> Table:
    """Make a table of whatever results there are."""
    maker = _Maker(name, results, scale, seeds)
    parts = tuple(part for one in table_parts(name) for part in maker.parts(one))
    return Table(name, scale, parts, tuple(_notes(name, parts, scale)))


@dataclass(frozen=True)
class _Maker:
    """Makes the parts of a table."""

    name: str
    results: Results
    scale: str
    seeds: Sequence[int] | None

    def parts(self, part: TablePart) -> Iterator[Part]:
        """Yield a part for each metric with a column for each setting, or one part with a column for each metric."""
        key, title = (part.net, part.skew), part_title(part.net, part.skew, self.scale)
        rows = tuple((method, method_name(method)) for method in part.methods)
        if part.metrics == ("accuracies",):
            for setting in (*(["printed"] if part.skew == "label" else []), *part.settings):
                above = part_title(part.net, part.skew, "full") if setting == "printed" else title
                named = text("parts", "rounds", title=above, setting=text("settings", setting))
                yield Part((*key, setting), named, rows, tuple(self._curves(part, setting)))
        elif len(part.settings) == 1 < len(part.metrics):
            columns = [self._column(part, part.settings[0], METRICS[one], one, "metrics") for one in part.metrics]
            yield Part((*key, *part.metrics), title, rows, (*self._printed(part, part.metrics[0]), *columns))
        else:
            for metric in part.metrics:
                of_metric = text("parts", "metric", title=title, metric=text("metrics", metric))
                shown = of_metric if len(part.metrics) > 1 else title
                columns = [self._column(part, one, METRICS[metric], one, "settings") for one in part.settings]
                yield Part((*key, metric), shown, rows, (*self._printed(part, metric), *columns))

    def _column(self, part: TablePart, setting: str, metric: Metric, key: str, words: str = "") -> Column:
        """Return a value for each method; `words` is the section of texts that has the label."""
        protocol, values = protocol_of(setting), list[Value]()
        for method in part.methods:
            cells = {cell.seed: [cell] for cell in part.cells(setting, method, self.scale, self.seeds)}
            values.append(make_value(self.results, protocol, cells, metric))
        return Column(key, text(words, key) if words else key, protocol, tuple(values))

    def _printed(self, part: TablePart, metric: str) -> list[Column]:
        """Return the column of what was printed, if anything was."""
        names = [f"{method}:{metric}" if self.name == "cost" else method for method in part.methods]
        found = [catalogue.PRINTED.get((self.name, part.net, part.skew, name)) for name in names]
        values = tuple(
            printed_value(one.value, one.text, *filter(None, (one.place, one.note))) if one else Value("printed")
            for one in found
        )
        label = text("settings", "published" if self.name == "niid-bench" else "printed")
        return [Column("printed", label, "printed", values)] if any(found) else []

    def _curves(self, part: TablePart, setting: str) -> Iterator[Column]:
        """Yield accuracy after each round: what was printed, or that of a setting."""
        if setting != "printed":
            for t in range(SETTINGS["scales"][self.scale]["rounds"]):
                yield self._column(part, setting, Metric(_after(t)), str(t + 1))
            return
        curves = [catalogue.CURVES.get(method) for method in part.methods]
        for t in range(10):
            values = [printed_value(one[t], "", catalogue.CURVES_SOURCE) if one else Value("printed") for one in curves]
            yield Column(str(t + 1), str(t + 1), "printed", tuple(values))


def _after(t: int) -> Callable[[Line], float]:
    return lambda line: line.accuracies[t]


def printed_value(number: float, words: str, *sources: str) -> Value:
    """Return a printed number, in the words in which it was printed."""
    return Value("printed", statistics.estimate([number]), words=words, sources=sources)


def printed_line(names: Sequence[str], net: str, skew: str, method: str) -> Line | None:
    """Return what the paper printed of a run, as a line: from the first of some tables that has it."""
    for name in names:
        if name == "convergence" and skew == "label" and method in catalogue.CURVES:
            return Line(accuracies=list(catalogue.CURVES[method]))
        known = {key[3]: printed.value for key, printed in catalogue.PRINTED.items() if key[:3] == (name, net, skew)}
        if f"{method}:seconds" in known:
            accuracy, seconds, mib = (known[f"{method}:{metric}"] for metric in ("accuracy", "seconds", "mib"))
            return Line(accuracy=accuracy, seconds_train=seconds, bytes_up=mib * MIB)
        if method in known:
            return Line(accuracy=known[method])
    return None


def leak_note(parts: Iterable[Part]) -> Iterator[str]:
    """Yield which leaks values of a table have, if any."""
    if leaks := leaks_of(parts):
        yield text("notes", "leaks", leaks=", ".join(leaks))


def scale_note(scale: str, table: str = "") -> str:
    """Return how large the runs are."""
    return text("scales", table if (table, scale) == ("niid-bench", "full") else scale)


def _notes(name: str, parts: Sequence[Part], scale: str) -> Iterator[str]:
    """Yield what must be known to read the table."""
    for note in leak_note(parts):
        yield from (note, text("notes", "leaky"))
    yield scale_note(scale, name)
    yield text("notes", "accuracy", when=text("notes", "each-round" if name == "convergence" else "last-round"))
    if name == "controls":
        yield text("notes", "controls")
    if name in ("accuracy", "convergence", "mixed", "noise", "orthogonality", "cost", "rate"):
        yield from (text("notes", "noise"), text("notes", "printed"))
    if name == "cost":
        yield text("notes", "cost")
        ran = {source for part in parts for value in part.values if value.cells for source in value.sources}
        if len(ran - {text("notes", "no-measure")}) > 1:
            yield text("notes", "several")
