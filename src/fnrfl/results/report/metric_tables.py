"""Metrics on a page: a table of those that are one number, and the confusion matrix of each line."""

from __future__ import annotations

from collections.abc import Sequence

from fnrfl.core.errors import ConfigError
from fnrfl.core.nearest import choices
from fnrfl.core.quality import NUMBER_METRICS, TEST_METRICS, Metric, leading_metric
from fnrfl.results.report.groups import LineGroup, Panel
from fnrfl.results.report.load import Run
from fnrfl.results.report.tables import Table, line_table, measure

CONFUSION_CLASSES = 40  # more cells than that nobody can read, and a page stays light


def page_metric(runs: Sequence[Run], name: str | None) -> Metric:
    """Choose the metric of a page: the one named, else that of the comparison, else the one that the methods lead with.

    One that no run has after its last round is refused.
    """
    known = metrics_of(runs)
    compared = {run.compared_by for run in runs if run.compared_by is not None}
    leading = leading_metric(run.about.get("personalised", False) for run in runs).name
    chosen = name or (compared.pop() if len(compared) == 1 else leading if leading in known else "accuracy")
    if (found := known.get(chosen.rpartition(":")[2])) is None:
        raise ConfigError(f'These runs have no value of the metric "{chosen}". {choices(chosen, known)} with --metric.')
    return found


def metrics_of(runs: Sequence[Run]) -> dict[str, Metric]:
    """Find every metric that is a number and that some run has, by name; a user's own is described by the log."""
    known = {name: TEST_METRICS[name] for name in NUMBER_METRICS}
    for run in runs:
        for name, said in run.about.get("own_metrics", {}).items():
            known.setdefault(name, Metric(name, said["function"], said["higher_is_better"]))
    return {name: metric for name, metric in known.items() if any(run.last(name) is not None for run in runs)}


def metrics_table(panel: Panel) -> Table | None:
    """The metrics that the table of results has not; None without any."""
    shown = tabled_metrics(panel)  # none where a version before 0.2.0 made the runs
    return line_table(panel, map(measure, shown)) if shown else None


def tabled_metrics(panel: Panel) -> list[Metric]:
    """The metrics of this table: those that are no share, which the table of results has."""
    return [metric for metric in metrics_of(panel.runs).values() if not metric.share and metric.name != "loss"]


def confusion_over_seeds(group: LineGroup) -> list[list[int]] | None:
    """Examples by true class and answer after the last round, over all seeds; None where no log has them."""
    found = [counts for run in group.runs if (counts := run.rounds[-1].get("confusion")) is not None]
    if not found or len(found[0]) > CONFUSION_CLASSES:
        return None
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]
