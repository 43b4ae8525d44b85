"""From finished runs to rows: means over the seeds, and differences that are paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fnrfl.results.compare.baselines import counterpart
from fnrfl.results.compare.cells import Cell, Parts
from fnrfl.results.compare.rows import METRICS, FailedCell, Row, Summary
from fnrfl.results.compare.tables import Comparison
from fnrfl.results.statistics import Estimate, estimate, paired
from fnrfl.runs.metrics import OWN
from fnrfl.runs.quality import TEST_METRICS, Metric


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
