"""Tables as plain values: what stands in a cell, and what sorting compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fnrfl.results.report.labels import varying
from fnrfl.results.report.lines import LineGroup, Panel
from fnrfl.results.report.read import Run
from fnrfl.results.report.references import references
from fnrfl.results.report.relatives import LinePair, is_control_line, line_pairs, ranked
from fnrfl.results.report.sentences import signed
from fnrfl.results.statistics import deviation, mean
from fnrfl.runs.metrics import MIB

TableValue = float | str | None
# A number of a run in a table: its column, its value, and the value as text.
RunMeasure = tuple["Column", Callable[[Run], float | None], Callable[[float], str]]


@dataclass(frozen=True)
class Column:
    """A column's name, what it means, and whether it holds numbers."""

    name: str
    help: str = ""
    number: bool = True


@dataclass(frozen=True)
class TableCell:
    """What is shown, what sorting compares, what stands beside it smaller, and the line that it names.

    A cell without a line may have a leak of its own, numbers of footnotes, and a command below it.
    """

    text: str
    value: TableValue = None
    beside: str = ""
    group: LineGroup | None = None
    leak: bool = False
    footnotes: tuple[int, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Table:
    """Columns and rows; `sorts` unless the order is the meaning."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    sorts: bool = True


METHOD_COLUMN = Column("method", number=False)


def as_percent(value: float) -> str:
    """A share as it stands in a table."""
    return f"{100 * value:.2f}"


def _size(value: float) -> str:
    """Three digits that count, in columns that line up."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _share(name: str, help: str, metric: str) -> RunMeasure:
    """A share after the last round."""
    return Column(f"{name}, %", help), lambda run: run.last(metric), as_percent


MEASURES: tuple[RunMeasure, ...] = (
    (Column("accuracy, %", "on the test set after the last round"), lambda run: run.accuracy, as_percent),
    _share("clean", "on the test set without noise", "accuracy_clean"),
    _share("own", "mean over clients, each on its own test distribution", "accuracy_own"),
    _share("sites", "mean over clients, each on the test examples that it brought", "accuracy_site"),
    _share("worst site", "the lowest accuracy of a client on the test examples that it brought", "worst_site"),
    _share("balanced", "mean over the classes of the accuracy in each", "balanced_accuracy"),
    _share("worst client", "the lowest accuracy on a client's own mixture of classes", "worst_client"),
    (Column("MiB", "traffic in both directions, all rounds"), lambda run: run.mib[-1], _size),
    (Column("seconds", "training, norm pass, refinement and server"), lambda run: run.seconds[-1], _size),
    (Column("kappa", "accuracy * 1e4 per second"), lambda run: run.kappa, _size),
    (Column("rho", "accuracy * 1e4 per MiB"), lambda run: run.rho, _size),
)
RUN_MEASURES: tuple[RunMeasure, ...] = (
    (Column("seed"), lambda run: run.seed, str),
    (Column("accuracy, %"), lambda run: run.accuracy, as_percent),
    (Column("last 3, %", "mean of the last three rounds"), lambda run: run.accuracy_last3, as_percent),
    (
        Column("best, %", "test accuracy of the round that was best on validation data"),
        lambda run: run.accuracy_best,
        as_percent,
    ),
    _share("worst client", "", "worst_client"),
    (Column("loss", "mean cross-entropy on the test set"), lambda run: run.last("loss"), "{:.3f}".format),
    (Column("MiB up"), lambda run: run.bytes_up / MIB, _size),
    (Column("MiB down"), lambda run: run.bytes_down / MIB, _size),
    (Column("seconds"), lambda run: run.seconds[-1], _size),
    (Column("kappa"), lambda run: run.kappa, _size),
    (Column("rho"), lambda run: run.rho, _size),
)


def results(panel: Panel) -> Table:
    """One row for each line: means over seeds, with standard deviations for accuracies."""
    kept = [m for m in MEASURES if any(m[1](run) is not None for run in panel.runs)]
    columns = (METHOD_COLUMN, Column("seeds", "how many"), *(column for column, _, _ in kept))
    rows = []
    for group in panel.groups:
        role = "control" if is_control_line(group) else ""
        cells = (over_seeds(map(measure, group.runs), text, spread=text is as_percent) for _, measure, text in kept)
        rows.append((name_cell(group, role), TableCell(str(len(group.runs)), len(group.runs)), *cells))
    return Table(columns, (*rows, *_references(panel, columns)))


def name_cell(group: LineGroup, beside: str = "") -> TableCell:
    """The name of a line, and what stands beside it."""
    return TableCell(group.label, group.label, beside, group)


def over_seeds(values: Iterable[float | None], text: Callable[[float], str], *, spread: bool = True) -> TableCell:
    """The mean of what is known, and its standard deviation; empty where nothing is."""
    known = [value for value in values if value is not None]
    sd = deviation(known) if known and spread else None
    return _cell(mean(known) if known else None, text, "" if sd is None else f"\N{PLUS-MINUS SIGN} {text(sd)}")


def _references(panel: Panel, columns: Sequence[Column]) -> Iterable[tuple[TableCell, ...]]:
    """Rows of answers that nobody learned, which every accuracy is measured against."""
    for one in references(panel):
        known = {"accuracy, %": one.accuracy, "clean, %": one.accuracy, "balanced, %": one.balanced}
        yield (
            TableCell(one.name, one.name, one.meaning),
            *(_cell(known.get(column.name), as_percent) for column in columns[1:]),
        )


def differences(panel: Panel) -> Table:
    """Accuracy of one line minus another's, paired by seed: to the baseline, to the plain method, to the control."""
    columns = (
        METHOD_COLUMN,
        Column("compared with", number=False),
        Column("points", "mean difference of accuracy, in percentage points"),
        Column("95 % interval", "of the mean difference, by Student's t"),
        Column("p", "of the paired t test, two-sided"),
        Column("p corrected", "for the number of pairs of this setting, by Holm's method"),
        Column("seeds", "that both have, with the same split"),
        Column("more than luck?", number=False),
    )
    return Table(columns, tuple(_difference_row(pair) for lines in ranked(panel.groups) for pair in line_pairs(lines)))


def _difference_row(pair: LinePair) -> tuple[TableCell, ...]:
    found = pair.found
    names = (name_cell(pair.one), text_cell(pair.other.label))
    if found is None:
        return (*names, *[TableCell("")] * 4, TableCell("0", 0.0), text_cell(pair.verdict))
    interval = "" if found.low is None or found.high is None else f"{signed(found.low)} to {signed(found.high)}"
    return (
        *names,
        TableCell(signed(found.mean), found.mean),
        TableCell(interval, found.low),
        _cell(found.p, _probability),
        _cell(pair.corrected, _probability),
        TableCell(str(found.n), found.n),
        text_cell(pair.verdict),
    )


def _probability(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def every_run(panel: Panel) -> Table:
    """One row for each run directory."""
    rows = (
        (name_cell(group, str(run.path)), *(_cell(measure(run), text) for _, measure, text in RUN_MEASURES))
        for group in panel.groups
        for run in group.runs
    )
    return Table((METHOD_COLUMN, *(column for column, _, _ in RUN_MEASURES)), tuple(rows))


def _cell(value: float | None, text: Callable[[float], str], beside: str = "") -> TableCell:
    return TableCell("") if value is None else TableCell(text(value), value, beside)


def settings(panel: Panel) -> Table | None:
    """The keys that differ between the lines, one row for each line; None if there is nothing to tell."""
    configs = [group.config for group in panel.groups]
    keys = varying(configs)
    if not keys:
        return None
    columns = (METHOD_COLUMN, *(Column(key, number=False) for key in keys))
    rows = ((name_cell(group), *(text_cell(str(group.config.get(key, ""))) for key in keys)) for group in panel.groups)
    return Table(columns, tuple(rows))


def text_cell(text: str) -> TableCell:
    """A cell of words, which are what sorting compares."""
    return TableCell(text, text)
