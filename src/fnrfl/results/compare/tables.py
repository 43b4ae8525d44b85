"""What came out of a grid: rows over seeds with paired differences, for programs, for documents, for a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnrfl.config import RunConfig
from fnrfl.core.words import counted
from fnrfl.results.compare.cells import METHOD_SECTIONS, Cell, Parts, counterpart
from fnrfl.results.statistics import Difference, Estimate, estimate, paired
from fnrfl.rundir.outputs import csv_text
from fnrfl.runs.metrics import MIB, OWN
from fnrfl.runs.quality import NUMBER_METRICS, TEST_METRICS, Metric

if TYPE_CHECKING:
    from rich.table import Table

Summary = Mapping[str, Any]
COMPARISON_FORMAT = 1
DISPENSABLE = (
    "MiB up", "MiB down", "best", "last 3", "rho", "kappa", "p of penalty", "seconds", "worst client", "MiB", "p",
    "penalty", "accuracy_own", "accuracy_site_pooled",
)  # fmt: skip  # columns that a narrow terminal does without, in this order
# Which examples a metric asks clients' models about; the first that runs have is shown.
OWN_EXAMPLES = {
    "accuracy_site_pooled": "those that its client brought",
    "accuracy_own": "its client's mixture of classes",
}
LEAST_NAME = 12  # characters of a line of a run's name
METRICS = (
    "accuracy", "accuracy_last3", "accuracy_best", "balanced_accuracy", "worst_client", "bytes_up", "bytes_down",
    "seconds_train", "kappa", "rho", "rounds_to_target", "bytes_to_target", "seconds_to_target",
    *(name for name in NUMBER_METRICS if name not in ("accuracy", "balanced_accuracy", "worst_client")),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A group in numbers."""

    group: str
    config: RunConfig  # of the first seed
    seeds: tuple[int, ...]  # that are finished
    metrics: dict[str, Estimate | None]  # by the names of METRICS and of the user's own, as far as there are any
    baseline: str | None
    difference: Difference | None  # of the metric that is compared, to the baseline
    control: str | None
    penalty: Difference | None  # of the same, to the control: what the penalty adds to refinement
    metric: str = "accuracy"  # the metric that is compared
    place: tuple[str, str] = ("", "")  # how it trains and what the task is, in words

    @property
    def leaks(self) -> tuple[str, ...]:
        """The leaks that its runs have."""
        return self.config.leaks_on

    def tree(self) -> dict[str, Any]:
        """Everything that is known about it, in as many levels as it takes."""
        compared = {key: getattr(self, key) for key in ("baseline", "difference", "control", "penalty")}
        return self._facts() | {"seeds": self.seeds} | self.metrics | compared

    def line(self) -> dict[str, Any]:
        """Everything that is known about it, with one number per field."""
        flat = self._facts() | {
            "fnr": "off" if self.config.fnr is None else "on",
            "leaks": f"leak: {', '.join(self.leaks)}" if self.leaks else "",
        }
        for name, value in self.metrics.items():
            flat |= {name: value and value.mean, f"{name}_sd": value and value.sd}
        for name in dict.fromkeys(("accuracy", self.metric)):
            value = self.metrics[name]
            flat |= {f"{name}_low": value and value.low, f"{name}_high": value and value.high}
        flat["metric"] = self.metric
        for name, other, found in (
            ("difference", self.baseline, self.difference),
            ("penalty", self.control, self.penalty),
        ):
            flat |= {f"{name}_to": other, name: found and found.mean}
            flat |= {f"{name}_{field}": found and getattr(found, field) for field in ("low", "high", "p", "n")}
        return flat

    def _facts(self) -> dict[str, Any]:
        config = self.config
        return {
            "group": self.group,
            "algorithm": config.algorithm.name,
            "fnr": config.as_dict()["fnr"],
            "dataset": config.dataset.name,
            "scenario": config.scenario,
            "protocol": config.protocol,
            "leaks": self.leaks,
            "n": len(self.seeds),
        }


@dataclass(frozen=True)
class FailedCell:
    """A run that stopped with an error."""

    cell: str
    group: str
    seed: int
    error: str


@dataclass(frozen=True, repr=False)
class Comparison:
    """What came out of a grid."""

    rows: tuple[Row, ...]
    failed: tuple[FailedCell, ...]
    runs: tuple[Summary, ...]  # the finished ones: the summary of each with its cell and group
    cells: int
    metric: Metric = TEST_METRICS["accuracy"]  # what is compared
    folder: Path | None = None  # with the runs

    def table(self) -> dict[str, list[Any]]:
        """The rows as columns of equal length, such as pandas.DataFrame takes, every number in full."""
        lines = [row.line() for row in self.rows]
        return {name: [line[name] for line in lines] for name in lines[0]}

    def __repr__(self) -> str:
        done = f"{len(self.runs)} of {counted(self.cells, 'run')}"
        where = "" if self.folder is None else f", kept in {self.folder}"
        return f"Comparison({counted(len(self.rows), 'row')}, {done}{where})"

    def __str__(self) -> str:
        return self.to_markdown()

    @property
    def exit_code(self) -> int:
        """What a command returns: 3 if a run failed."""
        return 3 if self.failed else 0

    @property
    def left(self) -> int:
        """Runs that have not begun, or were stopped."""
        return self.cells - len(self.runs) - len(self.failed)

    @property
    def leaks(self) -> tuple[str, ...]:
        """Every leak that some row has."""
        return tuple(dict.fromkeys(leak for row in self.rows for leak in row.leaks))

    def to_json(self) -> str:
        """The whole comparison as one JSON object."""
        tree = {
            "format": COMPARISON_FORMAT,
            "cells": self.cells,
            "done": len(self.runs),
            "leaks": self.leaks,
            "metric": self.metric.name,
            "higher_is_better": self.metric.higher_is_better,
            "rows": [row.tree() for row in self.rows],
            "failed": self.failed,
            "runs": self.runs,
        }
        return json.dumps(tree, indent=1, default=asdict, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        """One line per row, every number in full."""
        columns = self.table()
        return csv_text([columns, *zip(*columns.values(), strict=True)])

    def to_markdown(self) -> str:
        """The table for a document, with what must be known to read it."""
        columns = _columns(self, digits=4)
        lines = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
        for cells in zip(*columns.values(), strict=True):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines) + "\n\n" + "\n".join(f"- {note}" for note in notes(self)) + "\n"


def table(comparison: Comparison, width: int = 120) -> Table:
    """The table for a terminal of some width: as many columns as fit, the most telling ones first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = _columns(comparison, digits=3)
    widths = _fitting(comparison, columns, width)
    made = Table(box=box.SIMPLE_HEAD)
    for name, cells in widths.items():
        if name == "run":  # with the leak mark at its end, which a narrow terminal must not lose
            made.add_column(name, min_width=min(cells, LEAST_NAME), overflow="fold")
        else:
            made.add_column(name, justify="right", width=cells)
    for row, texts in zip(comparison.rows, zip(*(columns[name] for name in widths), strict=True), strict=True):
        made.add_row(*(Text(cell, style="red" if row.leaks and not place else "") for place, cell in enumerate(texts)))
    return made


def tasks_table(comparison: Comparison, width: int) -> Table | None:
    """Methods and tasks, the mean of the metric in each, for a terminal; None of one of them, or if it is too wide."""
    from rich import box
    from rich.table import Table

    cells = {row.place: value.mean for row in comparison.rows if (value := row.metrics[row.metric])}
    methods, tasks = (list(dict.fromkeys(place[side] for place in cells)) for side in (0, 1))
    wide = max(map(len, methods), default=0) + sum(len(task) + 3 for task in tasks) + 3
    if min(len(methods), len(tasks)) < 2 or wide > width or comparison.leaks:
        return None
    made = Table("", box=box.SIMPLE_HEAD)
    for task in tasks:
        made.add_column(task, justify="right", no_wrap=True)
    for one in methods:
        made.add_row(one, *(f"{cells[one, task]:.3f}" if (one, task) in cells else "" for task in tasks))
    return made


def _fitting(comparison: Comparison, columns: dict[str, list[str]], width: int) -> dict[str, int]:
    """The columns that a terminal has room for, and how wide each is."""
    widths = {name: max(map(len, [*cells, *name.split()])) for name, cells in columns.items()}
    widths["run"] = min(widths["run"], 40)  # longer ones are folded
    targets = [name for name in reversed(columns) if " to " in name]
    for name in (*DISPENSABLE, *({"accuracy"} - {comparison.metric.name}), *targets, "difference", "n"):
        if sum(widths.values()) + 3 * len(widths) + 1 > width:
            widths.pop(name, None)
    return widths


def _explained(metric: str, shown: Collection[str]) -> dict[str, str]:
    """What some columns mean, by their names."""
    tested = ", and p of the paired t test, not corrected for the number of rows" if "p" in shown else ""
    both = " and kappa" if "kappa" in shown else ""
    return {
        "difference": f"Differences of {metric} are paired by seed, to the baseline of the same task: mean ± half of "
        f"the 95 % interval (Student t){tested}.",
        "penalty": "Penalty: FNR minus the same refinement with fnr.weight = 0, paired in the same way.",
        "seconds": f"Seconds are of training, without evaluation; they{both} compare only within one device.",
    }


def notes(comparison: Comparison, width: int | None = None) -> list[str]:
    """What must be known to read the table, one sentence or two each; with a width, of the columns that it shows."""
    metric, columns = comparison.metric, _columns(comparison, digits=3)
    shown = columns if width is None else _fitting(comparison, columns, width)
    done, total = len(comparison.runs), counted(comparison.cells, "run")
    known = sum(value.n for row in comparison.rows if (value := row.metrics[metric.name]))
    what = "Accuracy on the test set" if metric.name == "accuracy" else f"{metric.name}, {metric.meaning},"
    better = "" if metric.higher_is_better else " Lower is better: a negative difference is an improvement."
    told = []
    if done < comparison.cells:
        told.append(f"{done} of {total} {'is' if comparison.cells == 1 else 'are'} finished.")
    if comparison.leaks:
        told.append(f"leak: {', '.join(comparison.leaks)}. Rows marked so are no honest results.")
    told.append(f"{what} after the last round: mean ± standard deviation over n seeds.{better}")
    if done > known:
        told.append(f"{counted(done - known, 'finished run')} without a value of {metric.name}: left out here.")
    told += [text for name, text in _explained(metric.name, shown).items() if name in shown]
    if own := _of_own_models(comparison):
        told.append(
            "Where clients have models of their own, accuracy asks each model about the test examples of all clients. "
            f"{own} asks about {OWN_EXAMPLES[own]}; --metric {own} compares it."
        )
    return told + [f"{failure.cell} failed: {failure.error}" for failure in comparison.failed]


def _columns(comparison: Comparison, digits: int) -> dict[str, list[str]]:
    """The table as text, by column."""
    rows, metric, plain = comparison.rows, comparison.metric.name, f".{digits}f"
    columns = {
        "run": [row.group + (" (leak)" if row.leaks else "") for row in rows],
        "n": [str(len(row.seeds)) for row in rows],
        metric: _spreads(rows, metric, plain),
        "difference": ["baseline" if row.baseline == row.group else _reach(row, row.difference, plain) for row in rows],
        "p": [_p(row.difference) for row in rows],
    }
    if any(row.control for row in rows):
        columns["penalty"] = [_reach(row, row.penalty, plain) for row in rows]
        columns["p of penalty"] = [_p(row.penalty) for row in rows]
    if own := _of_own_models(comparison):
        columns[own] = _spreads(rows, own, plain)
    columns |= {
        "accuracy": _spreads(rows, "accuracy", plain),
        "last 3": _means(rows, plain, f"{metric}_last3"),
        "best": _means(rows, plain, f"{metric}_best"),
        "worst client": _means(rows, plain, "worst_client"),
        "MiB up": _means(rows, ".2f", "bytes_up", scale=1 / MIB),
        "MiB down": _means(rows, ".2f", "bytes_down", scale=1 / MIB),
        "MiB": _means(rows, ".1f", "bytes_up", "bytes_down", scale=1 / MIB),
        "seconds": _means(rows, ".1f", "seconds_train"),
        "kappa": _means(rows, ".0f", "kappa"),
        "rho": _means(rows, ".0f", "rho"),
    }
    for target in {run["target"] for run in comparison.runs if "target" in run}:
        columns[f"rounds to {target:g}"] = _means(rows, ".1f", "rounds_to_target")
        columns[f"MiB to {target:g}"] = _means(rows, ".2f", "bytes_to_target", scale=1 / MIB)
        columns[f"seconds to {target:g}"] = _means(rows, ".1f", "seconds_to_target")
    return columns


def _means(rows: Sequence[Row], form: str, *names: str, scale: float = 1.0) -> list[str]:
    """The mean of a number in every row, or of the sum of several."""
    known = [[value.mean for name in names if (value := row.metrics[name])] for row in rows]
    return [format(sum(some) * scale, form) if len(some) == len(names) else "-" for some in known]


def _spreads(rows: Sequence[Row], name: str, form: str) -> list[str]:
    """The mean of a number in every row, and its spread."""
    return [value.spread(form) if (value := row.metrics[name]) else "-" for row in rows]


def _of_own_models(comparison: Comparison) -> str | None:
    """The metric for which personalised methods are made, where only some of those compared are; else None."""
    if len({run.get("personalised", False) for run in comparison.runs}) < 2:
        return None
    own = next((name for name in OWN_EXAMPLES if any(row.metrics[name] for row in comparison.rows)), None)
    return own if own != comparison.metric.name else None


def _reach(row: Row, value: Difference | None, form: str) -> str:
    """A difference and the half of its interval; and of how many seeds, if the row has more."""
    if value is None:
        return ""
    half = "" if value.high is None else f" ± {value.high - value.mean:{form}}"
    return format(value.mean, f"+{form}") + half + (f" (n = {value.n})" if value.n != len(row.seeds) else "")


def _p(value: Difference | None) -> str:
    if value is None:
        return ""
    return "-" if value.p is None else "<0.001" if value.p < 0.001 else f"{value.p:.3f}"


# -- from finished runs to rows ----------------------------------------------------------------------------------------


def summarise(
    cells: Sequence[Cell],
    summaries: Mapping[str, Summary],
    failures: Mapping[str, str],
    baseline: Parts,
    metric: Metric = TEST_METRICS["accuracy"],
) -> Comparison:
    """The table of what is finished; groups without a finished run have a row without numbers.

    Differences are of one metric; a run without a value of it, such as one of an older version, is in no pair.
    """
    groups = {cell.group.label: cell.group for cell in cells}
    seeds: dict[str, dict[int, Summary]] = {label: {} for label in groups}
    for cell in cells:
        if cell.name in summaries:
            seeds[cell.group.label][cell.seed] = summaries[cell.name]
    names = _names(summaries.values(), metric)
    values = {label: _values(metric.name, found) for label, found in seeds.items()}
    rows = []
    for label, group in groups.items():
        base, found = counterpart(group, groups.values(), baseline), seeds[label]
        rows.append(
            Row(
                label,
                group.config,
                tuple(found),
                {name: _estimate(name, found) for name in names},
                base,
                paired(values[label], values[base]) if base != label else None,
                group.control,
                paired(values[label], values[group.control]) if group.control else None,
                metric.name,
                (group.words(METHOD_SECTIONS), group.words(METHOD_SECTIONS, others=True)),
            )
        )
    return Comparison(
        tuple(rows),
        tuple(FailedCell(c.name, c.group.label, c.seed, failures[c.name]) for c in cells if c.name in failures),
        tuple({"cell": c.name, "group": c.group.label, **summaries[c.name]} for c in cells if c.name in summaries),
        len(cells),
        metric,
    )


def _names(summaries: Iterable[Summary], metric: Metric) -> list[str]:
    """The numbers that a row has: first what is compared, those of every run, and metrics of the user's own."""
    own = (name for summary in summaries for name in summary.get(OWN, {}))
    return list(dict.fromkeys((metric.name, f"{metric.name}_last3", f"{metric.name}_best", *METRICS, *own)))


def _values(name: str, summaries: Mapping[int, Summary]) -> dict[int, float]:
    """A number of the runs that have it, or their value of a metric of the user's own, by seed."""
    found = {seed: summary.get(name, summary.get(OWN, {}).get(name)) for seed, summary in summaries.items()}
    return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}


def _estimate(name: str, summaries: Mapping[int, Summary]) -> Estimate | None:
    """Over the seeds that have this number; of a way to a target, only if every seed has got there."""
    known = _values(name, summaries)
    unreached = name.endswith("_to_target") and len(known) < len(summaries)
    return estimate(list(known.values())) if known and not unreached else None
