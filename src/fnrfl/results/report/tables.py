"""Tables as plain values: what stands in a cell, and what sorting compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fnrfl.results.report.labels import varying
from fnrfl.results.report.lines import LineGroup, Panel
from fnrfl.results.report.read import Run
from fnrfl.results.report.relatives import baseline, control, difference, plain, ranked
from fnrfl.results.report.sentences import difference_in_words, signed
from fnrfl.results.statistics import deviation, mean
from fnrfl.runs.metrics import MIB

TableValue = float | str | None


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


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _size(value: float) -> str:
    """Three digits that count, in columns that line up."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


MEASURES: tuple[tuple[Column, Callable[[Run], float | None], Callable[[float], str]], ...] = (
    (Column("accuracy, %", "on the test set after the last round"), lambda run: run.accuracy, _percent),
    (Column("clean, %", "on the test set without noise"), lambda run: run.last("accuracy_clean"), _percent),
    (
        Column("own, %", "mean over clients, each on its own test distribution"),
        lambda run: run.last("accuracy_own"),
        _percent,
    ),
    (
        Column("balanced, %", "mean over the classes of the accuracy in each"),
        lambda run: run.last("balanced_accuracy"),
        _percent,
    ),
    (
        Column("worst client, %", "the lowest accuracy on a client's own mixture of classes"),
        lambda run: run.last("worst_client"),
        _percent,
    ),
    (Column("MiB", "traffic in both directions, all rounds"), lambda run: run.mib[-1], _size),
    (Column("seconds", "training, norm pass, refinement and server"), lambda run: run.seconds[-1], _size),
    (Column("kappa", "accuracy * 1e4 per second"), lambda run: run.kappa, _size),
    (Column("rho", "accuracy * 1e4 per MiB"), lambda run: run.rho, _size),
)


def results(panel: Panel) -> Table:
    """One row for each line: means over seeds, with standard deviations for accuracies."""
    kept = [m for m in MEASURES if any(m[1](run) is not None for g in panel.groups for run in g.runs)]
    columns = (METHOD_COLUMN, Column("seeds", "how many"), *(column for column, _, _ in kept))
    rows = []
    for group in panel.groups:
        row = [TableCell(group.label, group.label, group=group), TableCell(str(len(group.runs)), len(group.runs))]
        for _, measure, text in kept:
            found = [value for value in map(measure, group.runs) if value is not None]
            sd = deviation(found) if found and text is _percent else None
            spread = "" if sd is None else f"\N{PLUS-MINUS SIGN} {text(sd)}"
            row.append(TableCell(text(mean(found)), mean(found), spread) if found else TableCell(""))
        rows.append(tuple(row))
    return Table(columns, tuple(rows))


def differences(panel: Panel) -> Table:
    """Accuracy of one line minus another's, paired by seed: to the baseline, to the plain method, to the control."""
    columns = (
        METHOD_COLUMN,
        Column("compared with", number=False),
        Column("points", "mean difference of accuracy, in percentage points"),
        Column("95 % interval", "of the mean difference, by Student's t"),
        Column("p", "of the paired t test, two-sided, not corrected for the number of rows"),
        Column("seeds", "that both have, with the same split"),
        Column("more than luck?", number=False),
    )
    rows = []
    for one, other in _pairs(panel.groups):
        found = difference(one, other)
        told = [TableCell(one.label, one.label, group=one), TableCell(other.label, other.label)]
        if found is None:
            told += [TableCell("")] * 3 + [TableCell("0", 0.0)]
        else:
            interval = "" if found.low is None or found.high is None else f"{signed(found.low)} to {signed(found.high)}"
            p = (
                TableCell("")
                if found.p is None
                else TableCell("<0.001" if found.p < 0.001 else f"{found.p:.3f}", found.p)
            )
            told += [
                TableCell(signed(found.mean), found.mean),
                TableCell(interval, found.low),
                p,
                TableCell(str(found.n), found.n),
            ]
        rows.append((*told, TableCell(difference_in_words(found), difference_in_words(found))))
    return Table(columns, tuple(rows))


def _pairs(groups: Sequence[LineGroup]) -> Iterable[tuple[LineGroup, LineGroup]]:
    """Each line with its relatives, each pair once."""
    for lines in ranked(groups):
        base = baseline(lines)
        for group in lines:
            others = [base, plain(group, lines) if group.runs[0].refines else None, control(group, lines)]
            for other in dict.fromkeys(id(o) for o in others if o is not None and o is not group):
                yield group, next(o for o in others if o is not None and id(o) == other)


def every_run(panel: Panel) -> Table:
    """One row for each run directory."""
    columns = (
        METHOD_COLUMN,
        Column("seed"),
        Column("accuracy, %"),
        Column("last 3, %", "mean of the last three rounds"),
        Column("best, %", "test accuracy of the round that was best on validation data"),
        Column("worst client, %"),
        Column("loss", "mean cross-entropy on the test set"),
        Column("MiB up"),
        Column("MiB down"),
        Column("seconds"),
        Column("kappa"),
        Column("rho"),
    )
    rows = []
    for group in panel.groups:
        for run in group.runs:
            rows.append(
                (
                    TableCell(group.label, group.label, str(run.path), group),
                    TableCell(str(run.seed), run.seed),
                    _cell(run.accuracy, _percent),
                    _cell(run.accuracy_last3, _percent),
                    _cell(run.accuracy_best, _percent),
                    _cell(run.last("worst_client"), _percent),
                    _cell(run.last("loss"), lambda v: f"{v:.3f}"),
                    _cell(run.bytes_up / MIB, _size),
                    _cell(run.bytes_down / MIB, _size),
                    _cell(run.seconds[-1], _size),
                    _cell(run.kappa, _size),
                    _cell(run.rho, _size),
                )
            )
    return Table(columns, tuple(rows))


def _cell(value: float | None, text: Callable[[float], str]) -> TableCell:
    return TableCell("") if value is None else TableCell(text(value), value)


def settings(panel: Panel) -> Table | None:
    """The keys that differ between the lines, one row for each line; None if there is nothing to tell."""
    configs = [group.config for group in panel.groups]
    keys = varying(configs)
    if not keys:
        return None
    columns = (METHOD_COLUMN, *(Column(key, number=False) for key in keys))
    rows = (
        (TableCell(group.label, group.label, group=group), *(_text(str(group.config.get(key, ""))) for key in keys))
        for group in panel.groups
    )
    return Table(columns, tuple(rows))


def _text(text: str) -> TableCell:
    return TableCell(text, text)
