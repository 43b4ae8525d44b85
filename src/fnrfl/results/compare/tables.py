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
from fnrfl.results.compare.cells import Cell, Parts, counterpart
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

    @property
    def leaks(self) -> tuple[str, ...]:
        """The leaks that its runs have."""
        return self.config.leaks_on


@dataclass(frozen=True)
class FailedCell:
    """A run that stopped with an error."""

    cell: str
    group: str
    seed: int
    error: str


def as_tree(row: Row) -> dict[str, Any]:
    """A row with everything that is known about it, in as many levels as it takes."""
    differences = {
        "baseline": row.baseline,
        "difference": row.difference,
        "control": row.control,
        "penalty": row.penalty,
    }
    return _facts(row) | {"seeds": row.seeds} | row.metrics | differences


def as_line(row: Row) -> dict[str, Any]:
    """A row with one number per field."""
    flat = _facts(row) | {
        "fnr": "off" if row.config.fnr is None else "on",
        "leaks": f"leak: {', '.join(row.leaks)}" if row.leaks else "",
    }
    for name, value in row.metrics.items():
        flat |= {name: value and value.mean, f"{name}_sd": value and value.sd}
    for name in dict.fromkeys(("accuracy", row.metric)):
        value = row.metrics[name]
        flat |= {f"{name}_low": value and value.low, f"{name}_high": value and value.high}
    flat["metric"] = row.metric
    paired = (("difference", row.baseline, row.difference), ("penalty", row.control, row.penalty))
    for name, other, value in paired:
        flat |= {f"{name}_to": other, name: value and value.mean}
        flat |= {f"{name}_{field}": value and getattr(value, field) for field in ("low", "high", "p", "n")}
    return flat


def _facts(row: Row) -> dict[str, Any]:
    config = row.config
    return {
        "group": row.group,
        "algorithm": config.algorithm.name,
        "fnr": config.as_dict()["fnr"],
        "dataset": config.dataset.name,
        "scenario": config.scenario,
        "protocol": config.protocol,
        "leaks": row.leaks,
        "n": len(row.seeds),
    }


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
        lines = [as_line(row) for row in self.rows]
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
            "rows": [as_tree(row) for row in self.rows],
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
    plain = metric.name == "accuracy"
    what = "Accuracy on the test set" if plain else f"{metric.name}, {metric.meaning},"
    better = "" if metric.higher_is_better else " Lower is better: a negative difference is an improvement."
    said = [f"{what} after the last round: mean ± standard deviation over n seeds.{better}"]
    said += [text for name, text in _explained(metric.name, shown).items() if name in shown]
    if own := _of_own_models(comparison):
        said.append(
            "Where clients have models of their own, accuracy asks each model about the test examples of all clients. "
            f"{own} asks about {OWN_EXAMPLES[own]}; --metric {own} compares it."
        )
    if comparison.leaks:
        said.insert(0, f"leak: {', '.join(comparison.leaks)}. Rows marked so are no honest results.")
    known = [row.metrics[metric.name] for row in comparison.rows]
    without = len(comparison.runs) - sum(value.n for value in known if value is not None)
    if without:
        said.insert(1, f"{counted(without, 'finished run')} without a value of {metric.name}: left out here.")
    if len(comparison.runs) < comparison.cells:
        are = "is" if comparison.cells == 1 else "are"
        said.insert(0, f"{len(comparison.runs)} of {counted(comparison.cells, 'run')} {are} finished.")
    return said + [f"{failure.cell} failed: {failure.error}" for failure in comparison.failed]


def _columns(comparison: Comparison, digits: int) -> dict[str, list[str]]:
    """The table as text, by column."""
    rows, plain = comparison.rows, f".{digits}f"
    columns = {
        "run": [row.group + (" (leak)" if row.leaks else "") for row in rows],
        "n": [str(len(row.seeds)) for row in rows],
        comparison.metric.name: _spreads(rows, comparison.metric.name, plain),
        "difference": [_difference(row, plain) for row in rows],
        "p": [_p(row.difference) for row in rows],
    }
    if any(row.control for row in rows):
        columns["penalty"] = [_reach(row, row.penalty, plain) for row in rows]
        columns["p of penalty"] = [_p(row.penalty) for row in rows]
    if own := _of_own_models(comparison):
        columns[own] = _spreads(rows, own, plain)
    columns |= {
        "accuracy": _spreads(rows, "accuracy", plain),
        "last 3": _means(rows, f"{comparison.metric.name}_last3", plain),
        "best": _means(rows, f"{comparison.metric.name}_best", plain),
        "worst client": _means(rows, "worst_client", plain),
        "MiB up": _means(rows, "bytes_up", ".2f", 1 / MIB),
        "MiB down": _means(rows, "bytes_down", ".2f", 1 / MIB),
        "MiB": [_traffic(row) for row in rows],
        "seconds": _means(rows, "seconds_train", ".1f"),
        "kappa": _means(rows, "kappa", ".0f"),
        "rho": _means(rows, "rho", ".0f"),
    }
    for target in {run["target"] for run in comparison.runs if "target" in run}:
        columns |= _target_columns(rows, target)
    return columns


def _of_own_models(comparison: Comparison) -> str | None:
    """The metric for which personalised methods are made, where only some of those compared are; else None."""
    if len({run.get("personalised", False) for run in comparison.runs}) < 2:
        return None
    own = next((name for name in OWN_EXAMPLES if any(row.metrics[name] for row in comparison.rows)), None)
    return own if own != comparison.metric.name else None


def _target_columns(rows: Sequence[Row], target: float) -> dict[str, list[str]]:
    """What it took to reach an accuracy."""
    return {
        f"rounds to {target:g}": _means(rows, "rounds_to_target", ".1f"),
        f"MiB to {target:g}": _means(rows, "bytes_to_target", ".2f", 1 / MIB),
        f"seconds to {target:g}": _means(rows, "seconds_to_target", ".1f"),
    }


def _means(rows: Sequence[Row], name: str, form: str, scale: float = 1.0) -> list[str]:
    """The mean of a number in every row."""
    found = [row.metrics[name] for row in rows]
    return ["-" if value is None else format(value.mean * scale, form) for value in found]


def _difference(row: Row, form: str) -> str:
    """A row minus its baseline."""
    return "baseline" if row.baseline == row.group else _reach(row, row.difference, form)


def _traffic(row: Row) -> str:
    """MiB in both directions."""
    up, down = row.metrics["bytes_up"], row.metrics["bytes_down"]
    return "-" if up is None or down is None else f"{(up.mean + down.mean) / MIB:.1f}"


def _spreads(rows: Sequence[Row], name: str, form: str) -> list[str]:
    """The mean of a number in every row, and its spread."""
    found = [row.metrics[name] for row in rows]
    return ["-" if value is None else value.spread(form) for value in found]


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
    found: dict[str, dict[int, Summary]] = {label: {} for label in groups}
    for cell in cells:
        if cell.name in summaries:
            found[cell.group.label][cell.seed] = summaries[cell.name]

    names = _names(summaries.values(), metric)
    values = {label: _by_seed(metric.name, seeds) for label, seeds in found.items()}
    rows = []
    for label, group in groups.items():
        base = counterpart(group, groups.values(), baseline)
        rows.append(
            Row(
                label,
                group.config,
                tuple(found[label]),
                {name: _estimate(name, found[label].values()) for name in names},
                base,
                paired(values[label], values[base]) if base != label else None,
                group.control,
                paired(values[label], values[group.control]) if group.control else None,
                metric.name,
            )
        )
    return Comparison(
        tuple(rows),
        tuple(FailedCell(c.name, c.group.label, c.seed, failures[c.name]) for c in cells if c.name in failures),
        tuple({"cell": c.name, "group": c.group.label, **summaries[c.name]} for c in cells if c.name in summaries),
        len(cells),
        metric,
    )


def _names(summaries: Iterable[Summary], metric: Metric) -> tuple[str, ...]:
    """The numbers that a row has: first what is compared, those of every run, and metrics of the user's own."""
    own = (name for summary in summaries for name in summary.get(OWN, {}))
    compared = (metric.name, f"{metric.name}_last3", f"{metric.name}_best")
    return tuple(dict.fromkeys((*compared, *METRICS, *own)))


def _by_seed(name: str, summaries: Mapping[int, Summary]) -> dict[int, float]:
    """A number of the runs that have it, by seed."""
    known = {seed: _number(name, summary) for seed, summary in summaries.items()}
    return {seed: value for seed, value in known.items() if value is not None}


def _estimate(name: str, summaries: Iterable[Summary]) -> Estimate | None:
    """Over the seeds that have this number; of a way to a target, only if every seed has got there."""
    values = [_number(name, summary) for summary in summaries]
    known = [value for value in values if value is not None]
    if not known or (name.endswith("_to_target") and len(known) < len(values)):
        return None
    return estimate(known)


def _number(name: str, summary: Summary) -> float | None:
    """A number of a run, or its value of a metric of the user's own; None where there is none."""
    value = summary.get(name, summary.get(OWN, {}).get(name))
    return value if value is not None and math.isfinite(value) else None
