"""From finished runs to rows: means over the seeds, and differences that are paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fnrfl.results.compare.baselines import counterpart
from fnrfl.results.compare.cells import Cell, Parts
from fnrfl.results.compare.rows import METRICS, FailedCell, Row, Summary
from fnrfl.results.compare.tables import Comparison
from fnrfl.results.statistics import Estimate, estimate, paired


def summarise(
    cells: Sequence[Cell],
    summaries: Mapping[str, Summary],
    failures: Mapping[str, str],
    baseline: Parts,
) -> Comparison:
    """The table of what is finished; groups without a finished run have a row without numbers."""
    groups = {cell.group.label: cell.group for cell in cells}
    found: dict[str, dict[int, Summary]] = {label: {} for label in groups}
    for cell in cells:
        if cell.name in summaries:
            found[cell.group.label][cell.seed] = summaries[cell.name]

    def accuracy(label: str) -> dict[int, float]:
        return {seed: summary["accuracy"] for seed, summary in found[label].items()}

    rows = []
    for label, group in groups.items():
        base = counterpart(group, groups.values(), baseline)
        values = accuracy(label)
        rows.append(
            Row(
                label,
                group.config,
                tuple(values),
                {name: _estimate(name, found[label].values()) for name in METRICS},
                base,
                paired(values, accuracy(base)) if base != label else None,
                group.control,
                paired(values, accuracy(group.control)) if group.control else None,
            )
        )
    return Comparison(
        tuple(rows),
        tuple(FailedCell(c.name, c.group.label, c.seed, failures[c.name]) for c in cells if c.name in failures),
        tuple({"cell": c.name, "group": c.group.label, **summaries[c.name]} for c in cells if c.name in summaries),
        len(cells),
    )


def _estimate(name: str, summaries: Iterable[Summary]) -> Estimate | None:
    """Over the seeds that have this number; of a way to a target, only if every seed has got there."""
    values = [summary.get(name) for summary in summaries]
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or (name.endswith("_to_target") and len(known) < len(values)):
        return None
    return estimate(known)
