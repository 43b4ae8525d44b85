"""Metrics on a page: which one leads, a table of the others, confusion matrices, and each client's own accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from fnrfl.core.errors import ConfigError
from fnrfl.core.nearest import choices
from fnrfl.results.report.client_view import CLIENTS
from fnrfl.results.report.groups import LineGroup, Panel
from fnrfl.results.report.load import Run
from fnrfl.results.report.numbers import as_percent
from fnrfl.results.report.tables import Column, Table, TableCell, line_table, measure, over_seeds
from fnrfl.runs.quality import NUMBER_METRICS, TEST_METRICS, Metric, leading_metric

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


def site_table(panel: Panel) -> Table | None:
    """A row for each client and a column for each line; None where no client brought test examples.

    Lines of one data set have the same clients where the scenario takes those of the data.
    """
    scored = [group for group in panel.groups if group.runs[0].rounds[-1].get("per_site")]
    if not scored:
        return None
    first = scored[0].runs[0]
    scored = [group for group in scored if group.runs[0].client_names == first.client_names]
    tests = first.about.get("site_test_counts", [])
    columns = (
        Column("client", number=False),
        Column("examples", "with which it trains"),
        *([Column("test examples", "that it brought")] if tests else []),
        *(Column(group.label, "accuracy, % on the test examples that the client brought") for group in scored),
    )
    rows = []
    for client, name in enumerate(first.client_names[:CLIENTS]):
        row = [TableCell(name, client), TableCell(f"{sum(first.counts[client]):,}", sum(first.counts[client]))]
        row += [TableCell(f"{count:,}", count) for count in tests[client : client + 1]]
        for group in scored:
            row.append(over_seeds((run.rounds[-1]["per_site"][client] for run in group.runs), as_percent))
        rows.append(tuple(row))
    return Table(columns, tuple(rows))
