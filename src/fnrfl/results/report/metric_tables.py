"""Metrics on a page: a table of those that are one number, and the confusion matrix of each line."""

from __future__ import annotations

from fnrfl.core.quality import TEST_METRICS
from fnrfl.results.report.lines import LineGroup, Panel
from fnrfl.results.report.read import Run
from fnrfl.results.report.tables import METHOD_COLUMN, Column, Table, name_cell, over_seeds

TABLED_METRICS = ("f1_macro", "f1_weighted", "auc", "log_loss", "calibration_error")
LOWER = "lower is better"
CONFUSION_CLASSES = 40  # more cells than that nobody can read, and a page stays light


def metrics_table(panel: Panel) -> Table | None:
    """One row for each line: means over seeds with standard deviations, after the last round; None without any."""
    runs = panel.runs
    own = dict.fromkeys(name for run in runs for name in run.own_metrics)
    names = [name for name in (*TABLED_METRICS, *own) if any(run.last(name) is not None for run in runs)]
    if not names:
        return None  # a version before 0.2.0 made the runs
    columns = (METHOD_COLUMN, *(Column(name, _help(name, runs)) for name in names))
    rows = tuple(
        (name_cell(group), *(over_seeds((run.last(name) for run in group.runs), "{:.4f}".format) for name in names))
        for group in panel.groups
    )
    return Table(columns, rows)


def lower_is_better(panel: Panel) -> list[str]:
    """The metrics of the table of which a lower value is better."""
    told = metrics_table(panel)
    return [column.name for column in told.columns if column.help.endswith(LOWER)] if told else []


def confusion_over_seeds(group: LineGroup) -> list[list[int]] | None:
    """Examples by true class and answer after the last round, over all seeds; None where no log has them."""
    found = [counts for run in group.runs if (counts := run.rounds[-1].get("confusion")) is not None]
    if not found or len(found[0]) > CONFUSION_CLASSES:
        return None
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]


def _help(name: str, runs: list[Run]) -> str:
    """What a metric means and which way is better; a user's own is described by the log."""
    if name in TEST_METRICS:
        meaning, higher = TEST_METRICS[name].meaning, TEST_METRICS[name].higher_is_better
    else:
        said = next(run.about.get("own_metrics", {}).get(name, {}) for run in runs if name in run.own_metrics)
        meaning, higher = str(said.get("function", name)), said.get("higher_is_better", True)
    return f"{meaning}; {'higher is better' if higher else LOWER}"
