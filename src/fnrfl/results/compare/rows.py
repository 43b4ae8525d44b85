"""What came out of a group of runs, in numbers: one row of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fnrfl.config import RunConfig
from fnrfl.results.statistics import Difference, Estimate
from fnrfl.runs.quality import NUMBER_METRICS

Summary = Mapping[str, Any]

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
