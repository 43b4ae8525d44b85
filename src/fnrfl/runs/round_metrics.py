"""The metrics of a round: which of them the log gets in every round, and which in the last one alone."""

from __future__ import annotations

from collections.abc import Sequence

from fnrfl.core.quality import TEST_METRICS
from fnrfl.rundir.events import Event
from fnrfl.runs.build import Built
from fnrfl.runs.custom_metrics import CustomMetric, computed_metrics
from fnrfl.runs.evaluate import Score
from fnrfl.runs.metrics import OWN

# Probabilities of all answers, one number for each class: they cost time, so with more of them they are looked at after
# the last round alone; and they cost memory, so with still more of them not at all.
NUMBERS_EVERY_ROUND = 1_000_000
NUMBERS_LAST_ROUND = 2**25
# Numbers by class and the confusion matrix make a log long, so it has them in the last round alone if there are more.
CLASSES_EVERY_ROUND = 20
CLASSES_OF_CONFUSION = 200


def keeps_outputs(built: Built, *, last: bool) -> bool:
    """Whether a round's outputs on the test set are kept, for metrics of probabilities."""
    copies = built.config.clients if built.partition.noise is not None or built.algorithm.personalised else 1
    numbers = copies * len(built.splits.test) * built.dataset.num_classes
    return numbers <= (NUMBERS_LAST_ROUND if last else NUMBERS_EVERY_ROUND)


def logged_metrics(score: Score, own: Sequence[CustomMetric], *, last: bool) -> Event:
    """The metrics of a round as the log has them; null where the answers cannot decide one."""
    event: Event = {}
    for name, metric in TEST_METRICS.items():
        if metric.compute is None:
            continue
        most = CLASSES_OF_CONFUSION if metric.shape == "matrix" and last else CLASSES_EVERY_ROUND
        if metric.shape == "number" or score.num_classes <= most or (last and metric.shape == "by class"):
            event[name] = metric.compute(score.answers)
    return event | ({OWN: computed_metrics(own, score.answers)} if own else {})
