"""What accuracies are measured against: answers that nobody learned, and how fine a test set can measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fnrfl.results.report.groups import Panel
from fnrfl.results.report.load import Run
from fnrfl.results.statistics import mean


@dataclass(frozen=True)
class Reference:
    """An answer that needs no model, and what it scores."""

    name: str
    meaning: str
    shares: dict[str, float]  # of right answers, by metric


def _reference(name: str, meaning: str, accuracy: float, balanced: float) -> Reference:
    return Reference(name, meaning, {"accuracy": accuracy, "accuracy_clean": accuracy, "balanced_accuracy": balanced})


def references(panel: Panel) -> list[Reference]:
    """Guessing, and always answering the most frequent class; the second is not known of runs of older versions."""
    runs = panel.runs
    classes = len(runs[0].counts[0])
    found = [_reference("chance", "a class drawn at random", 1 / classes, 1 / classes)]
    known = [run.test_counts for run in runs if any(run.test_counts)]
    if not known:
        return found
    share = mean([max(counts) / sum(counts) for counts in known])
    balanced = mean([1 / sum(map(bool, counts)) for counts in known])
    if math.isclose(share, 1 / classes) and math.isclose(balanced, 1 / classes):
        return [_reference("chance, majority class", "a class drawn at random, or always the same", share, balanced)]
    return [*found, _reference("majority class", "always the most frequent class of the test set", share, balanced)]


def best_guess(run: Run) -> float:
    """The accuracy that a model must exceed to have learned anything: that of the best answer without a model."""
    counts = run.test_counts
    return max(counts) / sum(counts) if any(counts) else 1 / len(run.counts[0])


def least_span(examples: float) -> float:
    """How much of an accuracy axis is shown at least: four standard errors of an accuracy of one half.

    Two models of the same accuracy may well be that far apart on so few examples, so no axis is closer than that.
    """
    return min(1.0, 2 / math.sqrt(max(1.0, examples)))


def axis_span(panel: Panel) -> float:
    """How much of an axis of the panel's metric is shown at least: nothing is known of one that is no share."""
    return least_span(panel.groups[0].runs[0].examples["test"]) if panel.metric.share else 0.0


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
