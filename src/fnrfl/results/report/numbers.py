"""Numbers as a page shows them: means of what is known, axes, and no more digits and points than a chart can show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from fnrfl.runs.quality import Metric

SPACE = "\N{NO-BREAK SPACE}"
T = TypeVar("T")
CLIENTS = 100  # of a run that are shown, so that a page stays light
POINTS = 200  # of a curve, so that a page stays light


def shown_mean(values: Iterable[float | None]) -> float | None:
    """The mean of the numbers that are there, with as many digits as a chart can show."""
    known = [value for value in values if value is not None]
    return chart_number(sum(known) / len(known)) if known else None


def chart_number(value: float | None) -> float | None:
    """A number with as many digits as a chart can show."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def thinned(values: Sequence[T], most: int) -> Sequence[T]:
    """Evenly spaced values, `most` of them or fewer; the last one is always there."""
    every = math.ceil(len(values) / max(1, most)) or 1
    return values[::-1][::every][::-1]


def percent(share: float) -> str:
    """A share for a sentence."""
    return f"{100 * share:.1f}{SPACE}%"


def as_percent(share: float) -> str:
    """A share in a table."""
    return f"{100 * share:.2f}"


def in_cell(value: float, metric: Metric) -> str:
    """A metric in a table."""
    return as_percent(value) if metric.share else f"{value:.4f}"


def in_words(value: float, metric: Metric) -> str:
    """A metric in a sentence, without its name."""
    return percent(value) if metric.share else f"{value:.4f}"


def signed(difference: float, metric: Metric) -> str:
    """A difference with its sign, a proper minus included: percentage points, if the metric is a share."""
    text = f"{round(100 * difference, 1) + 0.0:+.1f}" if metric.share else f"{round(difference, 4) + 0.0:+.4f}"
    return text.replace("-", "\N{MINUS SIGN}")


def points(difference: float, metric: Metric) -> str:
    """A difference in a sentence."""
    return signed(difference, metric) + (" points" if metric.share else "")


# -- axes --------------------------------------------------------------------------------------------------------------


def least_span(examples: float) -> float:
    """How much of an accuracy axis is shown at least: four standard errors of an accuracy of one half.

    Two models of the same accuracy may well be that far apart on so few examples, so no axis is closer than that.
    """
    return min(1.0, 2 / math.sqrt(max(1.0, examples)))


def share_range(values: Sequence[float], least: float) -> tuple[float, float]:
    """Return the ends of an axis of shares: a little wider than the values, no narrower than `least`, within 0 to 1.

    >>> share_range([0.5, 0.5], 0.2)
    (0.4, 0.6)
    >>> share_range([1.0], 0.2)
    (0.8, 1.0)
    """
    low, high = min(values), max(values)
    reach = min(1.0, max(1.12 * (high - low), least))
    low = min(max(0.0, (low + high - reach) / 2), 1 - reach)
    return round(low, 12), round(low + reach, 12)
