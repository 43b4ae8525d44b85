"""A table as it is shown: what was printed, then a column per setting, with spread over seeds and where each is from.

Every value knows its protocol, and a column refuses values of two. Every value of a run with a leak says leak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from fnrfl.results.reproduce.kept_lines import (
    CellLine,
    CellResult,
    KeptLines,
    bytes_both_ways,
    on_one_machine,
    seconds_count,
)
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.paper_tables import PaperTable, TablePart, find_table
from fnrfl.results.reproduce.printed import CURVES, CURVES_SOURCE, PRINTED
from fnrfl.results.reproduce.settings import TRIAL_SETTINGS
from fnrfl.results.reproduce.titles import scale_note, table_notes
from fnrfl.results.statistics import estimate
from fnrfl.runs.metrics import MIB

METRIC_NAMES = {
    "accuracy": "accuracy",
    "accuracies": "accuracy by round",
    "clean": "clean test images",
    "noisy": "noisy test images",
    "mib": "traffic in MiB",
    "seconds": "seconds of training",
    "kappa": "kappa, accuracy * 1e4 / seconds",
    "rho": "rho, accuracy * 1e4 / MiB",
}
_FORMS = {"mib": ".1f", "seconds": ".1f", "kappa": ".4g", "rho": ".4f"}
COLUMN_NAMES = {
    "honest": "honest protocol",
    "paper": "paper's protocol (leak)",
    "paper-2-clients": "paper's protocol, two clients (leak)",
    "paper-rate-0.1": "paper's protocol, rate 0.1 (leak)",
    "niid-bench": "here, pixels 0 to 1",
    "niid-bench-standard": "here, standardised pixels",
}
SKEW_NAMES = {
    "iid": "no skew", "feature-0.1": "feature skew, noise 0.1", "feature-0.5": "feature skew, noise 0.5",
    "label": "label skew", "quantity": "quantity skew", "label+feature-0.1": "label and feature skew, noise 0.1",
    "label+feature-0.5": "label and feature skew, noise 0.5", "label+quantity": "label and quantity skew",
    "classes-1": "one class per client", "classes-2": "two classes per client", "classes-3": "three classes per client",
}  # fmt: skip
_NO_MEASURE = (
    "has run, but its seconds are no measure: other cells ran at the same time, it was stopped and went on, or fewer "
    "of its steps were compiled"
)
NET_NAMES = {"resnet18": "ResNet-18", "resnet50": "ResNet-50", "vgg11": "VGG-11", "simple-cnn": "simple-cnn"}
METHOD_NAMES = {
    "fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD", "moon": "MOON", "fednova": "FedNova",
    "scaffold-niid-bench": "SCAFFOLD as NIID-Bench has it",
    "feddyn": "FedDyn", "fedftg": "FedFTG", "feddf": "FedDF", "feddc": "FedDC", "fedgen": "FedGen", "fnr": "FNR",
    "weight-0": "FNR with weight 0", "no-leak": "no leak", "batchnorm-leak": "BatchNorm leak",
    "label-leak": "label leak", "both-leaks": "both leaks", "both-leaks-weight-0": "both leaks, weight 0",
    "both-leaks-weight-1": "both leaks, weight 1",
}  # fmt: skip


@dataclass(frozen=True)
class ShownValue:
    """A number of a table, or why there is none."""

    protocol: str  # "printed", "paper" or "honest"
    words: str  # the number as text, or "not run", "failed", "older recipe"
    mean: float | None = None
    sd: float | None = None
    seeds: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()  # seeds without a result
    leaks: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # where it is from, and what must be known about it
    cells: tuple[str, ...] = ()  # ids of the runs that it is, or would be, made from
    low: float | None = None  # of the interval over seeds, where it is shown
    high: float | None = None


@dataclass(frozen=True)
class ShownColumn:
    """Values of one protocol, a row each."""

    head: str
    protocol: str
    values: tuple[ShownValue, ...]

    def __post_init__(self) -> None:
        strange = {value.protocol for value in self.values} - {self.protocol}
        if strange:
            raise ValueError(f"the column {self.head!r} is {self.protocol} and has values that are {strange}")


@dataclass(frozen=True)
class ShownPart:
    """Rows and columns under one title."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[ShownColumn, ...]
    caption: str = ""

    @property
    def values(self) -> Iterator[ShownValue]:
        """All values of the part, column by column."""
        return (value for column in self.columns for value in column.values)


@dataclass(frozen=True)
class ShownTable:
    """A table of the paper with everything that is known about it."""

    name: str
    title: str
    scale: str
    parts: tuple[ShownPart, ...]
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> Iterator[ShownValue]:
        """All values of the table."""
        return (value for part in self.parts for value in part.values)

    @property
    def leaks(self) -> tuple[str, ...]:
        """Every leak that some value has."""
        return once_each(value.leaks for value in self.values)


def part_title(part: TablePart, scale: str) -> str:
    """What stands above a part of a table; at the smallest scale no net of the paper was trained."""
    net = f"a small net in place of {NET_NAMES[part.net]}" if scale == "tiny" else NET_NAMES[part.net]
    return f"{net}, {SKEW_NAMES[part.skew]}"


def once_each(leaks: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """The leaks of several values or tables, each once."""
    return tuple(dict.fromkeys(chain.from_iterable(leaks)))


def leaks_of(lines: Iterable[CellLine]) -> tuple[str, ...]:
    """Every leak that some run has, once."""
    return once_each(line["leaks"] for line in lines)


def method_name(method: str) -> str:
    """A method for people: "SCAFFOLD + FNR"."""
    base, *around = (METHOD_NAMES.get(word, word) for word in method.split("+"))
    return (", " if method.endswith("+no-leak") else " + ").join([base, *around])


def show_table(name: str, lines: KeptLines, scale: str, seeds: Sequence[int] | None = None) -> ShownTable:
    """A table from whatever results there are."""
    shown = _Shown(name, find_table(name), lines, scale, seeds)
    parts = [part for one in shown.table.parts for part in shown.parts(one)]
    return ShownTable(name, shown.table.title, scale, tuple(parts), tuple(_notes(name, parts, scale)))


@dataclass(frozen=True)
class _Shown:
    """What values are looked up in."""

    name: str
    table: PaperTable
    lines: KeptLines
    scale: str
    seeds: Sequence[int] | None

    def parts(self, part: TablePart) -> Iterator[ShownPart]:
        """A part for each metric; those of one setting stand side by side, and curves have a column for each round."""
        rows, title = tuple(map(method_name, part.methods)), part_title(part, self.scale)
        if part.metrics == ("accuracies",):
            yield from self._curves(part, rows)
        elif len(part.settings) == 1:
            columns = [self._column(part, part.settings[0], metric) for metric in part.metrics]
            yield ShownPart(title, rows, (*self._printed(part, part.metrics[0]), *columns))
        else:
            for metric in part.metrics:
                of_metric = title if len(part.metrics) == 1 else f"{title}: {METRIC_NAMES[metric]}"
                columns = [self._column(part, setting, metric) for setting in part.settings]
                yield ShownPart(of_metric, rows, (*self._printed(part, metric), *columns))

    def _printed(self, part: TablePart, metric: str) -> list[ShownColumn]:
        """The column of what was printed, if anything was."""
        values = []
        for method in part.methods:
            key = (self.name, part.net, part.skew, f"{method}:{metric}" if self.name == "cost" else method)
            printed = PRINTED.get(key)
            if printed is None:
                values.append(ShownValue("printed", ""))
            else:
                about = (printed.place, printed.note) if printed.note else (printed.place,)
                values.append(ShownValue("printed", printed.text, printed.value, sources=about))
        if not any(value.words for value in values):
            return []
        head = "published" if self.name == "niid-bench" else "printed"
        return [ShownColumn(head, "printed", tuple(values))]

    def _column(self, part: TablePart, setting: str, metric: str) -> ShownColumn:
        form = _FORMS.get(metric, ".4f")
        is_time = metric in ("seconds", "kappa")
        cells = [self._cells(part, setting, method) for method in part.methods]
        values = [self._value(each, _get(metric), form, is_time=is_time) for each in cells]
        head = COLUMN_NAMES[setting] if len(part.settings) > 1 or len(part.metrics) == 1 else METRIC_NAMES[metric]
        return ShownColumn(head, TRIAL_SETTINGS[setting].protocol, tuple(values))

    def _cells(self, part: TablePart, setting: str, method: str) -> list[PaperCell]:
        seeds = part.seeds_of(setting) if self.seeds is None else self.seeds
        return [PaperCell(part.net, part.skew, setting, method, seed, self.scale) for seed in seeds]

    def _value(
        self,
        cells: Sequence[PaperCell],
        get: Callable[[CellLine], float | None],
        form: str = ".4f",
        *,
        is_time: bool = False,
    ) -> ShownValue:
        """The mean of some seeds; of a time, only if all of them are of one device and one engine."""
        protocol, ids = cells[0].protocol, tuple(cell.id for cell in cells)
        found = {cell: self.lines.find(cell) for cell in cells}
        numbers = {cell: get(one.line) for cell, one in found.items() if one.usable}
        known = {cell: number for cell, number in numbers.items() if number is not None}
        if not known:
            why, about = _why_none(found, has_run=bool(numbers), is_time=is_time)
            return ShownValue(protocol, why, sources=about, cells=ids)
        lines = [found[cell].line for cell in known]
        sources = tuple(dict.fromkeys(found[cell].words for cell in known))
        if is_time and not on_one_machine(*lines):
            return ShownValue(protocol, "several devices", sources=sources, cells=ids)
        result, missing = estimate(list(known.values())), _seeds(cell for cell in cells if cell not in known)
        words = result.spread(form) + some_seeds(_seeds(known), len(cells))
        return ShownValue(
            protocol, words, result.mean, result.sd, _seeds(known), missing, leaks_of(lines), sources, ids
        )  # fmt: skip

    def _curves(self, part: TablePart, rows: tuple[str, ...]) -> Iterator[ShownPart]:
        """Accuracy after each round: a part for what was printed, and one for each setting."""
        if part.skew == "label":
            curves = [CURVES.get(method) for method in part.methods]
            columns = [
                ShownColumn(str(t + 1), "printed", tuple(_printed_point(curve, t) for curve in curves))
                for t in range(10)
            ]
            title = f"{NET_NAMES[part.net]}, {SKEW_NAMES[part.skew]}: printed, by round"
            yield ShownPart(title, rows, tuple(columns))
        for setting in part.settings:
            rounds = PaperCell(part.net, part.skew, setting, "fedavg", 0, self.scale).config().rounds
            columns = [
                ShownColumn(
                    str(t + 1),
                    TRIAL_SETTINGS[setting].protocol,
                    tuple(self._value(self._cells(part, setting, m), _of_round(t)) for m in part.methods),
                )
                for t in range(rounds)
            ]
            title = f"{part_title(part, self.scale)}: {COLUMN_NAMES[setting]}, by round"
            yield ShownPart(title, rows, tuple(columns))


def _why_none(found: dict[PaperCell, CellResult], *, has_run: bool, is_time: bool) -> tuple[str, tuple[str, ...]]:
    """Why a value has no number, and what must be known about it."""
    about = (_NO_MEASURE,) if is_time and has_run else failures_among(found)
    return why_not(list(found.values()), has_run), about


def some_seeds(known: Sequence[int], asked: int) -> str:
    """Which seeds a number is of, to follow it; nothing if it is of all that were asked for.

    >>> some_seeds([0, 2], 3)
    ' (seeds 0, 2 of 3)'
    """
    which = f"{'seed' if len(known) == 1 else 'seeds'} {', '.join(map(str, known))}"
    return f" ({which} of {asked})" if len(known) < asked else ""


def _seeds(cells: Iterable[PaperCell]) -> tuple[int, ...]:
    return tuple(cell.seed for cell in cells)


def _printed_point(curve: Sequence[float] | None, t: int) -> ShownValue:
    if curve is None:
        return ShownValue("printed", "")
    return ShownValue("printed", f"{curve[t]:.4f}", curve[t], sources=(CURVES_SOURCE,))


def _get(metric: str) -> Callable[[CellLine], float | None]:
    """How a metric is read from a line."""
    metrics: dict[str, Callable[[CellLine], float | None]] = {
        "mib": lambda line: bytes_both_ways(line) / MIB,
        "seconds": lambda line: float(line["seconds_train"]) if seconds_count(line) else None,
        "kappa": lambda line: float(line["accuracy"]) * 1e4 / line["seconds_train"] if seconds_count(line) else None,
        "rho": lambda line: (
            float(line["accuracy"]) * 1e4 / (bytes_both_ways(line) / MIB) if bytes_both_ways(line) else None
        ),
    }
    return metrics.get(metric, lambda line: line.get(metric))


def _of_round(t: int) -> Callable[[CellLine], float | None]:
    return lambda line: line["accuracies"][t]


def why_not(found: Sequence[CellResult], ran: bool) -> str:
    """Why there is no number."""
    if ran:
        return "-"  # the run has no such number, such as accuracy on noisy images without noise
    states = [one.state for one in found]
    return next((state for state in ("failed", "older recipe") if state in states), "not run")


def failures_among(found: dict[PaperCell, CellResult]) -> tuple[str, ...]:
    """Which runs have failed, and why."""
    return tuple(f"{cell.id} failed: {one.line['failed']}" for cell, one in found.items() if one.state == "failed")


def leak_note(parts: Sequence[ShownPart]) -> str | None:
    """Which leaks values of a table have; None without any."""
    leaks = once_each(value.leaks for part in parts for value in part.values)
    return f"leak: {', '.join(leaks)}. A value that says leak is no honest result." if leaks else None


def _notes(name: str, parts: Sequence[ShownPart], scale: str) -> Iterator[str]:
    """What must be known to read the table."""
    if (leaks := leak_note(parts)) is not None:
        yield leaks
        yield (
            "Every run with a leak switched on says leak. FedAvg and other methods without public data train the same "
            "model without it."
        )
    yield scale_note(scale, name)
    yield from table_notes(name)
    if name == "cost":
        yield "Seconds and kappa compare only within one device, one engine and one scale: never with what was printed."
        devices = {source for part in parts for c in part.columns for v in c.values for source in v.sources}
        if len([source for source in devices if source.startswith(("committed", "computed here"))]) > 1:
            yield "The rows of this table are of several days or devices."
