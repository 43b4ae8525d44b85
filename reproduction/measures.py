"""What the paper's claims are about, as numbers: each function takes the lines of runs of one seed.

Where a number cannot be had from these lines, it is None. claims.toml names these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fnrfl import statistics
from reproduction.store import Line, timed_together

TARGET_SHARE = 0.9  # of FedAvg's last accuracy: what counts as having got there


def relative_gain(fnr: Line, other: Line) -> float | None:
    """Return how much larger the accuracy is, as a share of the other's."""
    return fnr.accuracy / other.accuracy - 1 if other.accuracy else None


def margin(fnr: Line, *others: Line) -> float:
    """Return the accuracy minus the best accuracy of the others."""
    return fnr.accuracy - max(other.accuracy for other in others)


def mean_margin(*lines: Line) -> float:
    """Return the mean of accuracy differences; the lines are pairs, with FNR and without."""
    return statistics.mean([margin(fnr, bare) for fnr, bare in zip(lines[::2], lines[1::2], strict=True)])


def smaller_decline(*lines: Line) -> float:
    """Return how much less is lost by noise than by the one of the others that loses least.

    The first half of the lines is without noise and the second with it, FNR the first of each.
    """
    half = len(lines) // 2
    lost, *others = (calm.accuracy - noisy.accuracy for calm, noisy in zip(lines[:half], lines[half:], strict=True))
    return min(others) - lost


def time_saved(fnr: Line, other: Line) -> float | None:
    """Return the share of the other's training time that is not needed."""
    return 1 - fnr.seconds_train / other.seconds_train if timed_together(fnr, other) else None


def best_kappa(fnr: Line, *others: Line) -> float | None:
    """Return accuracy per second, as a share beyond the best of the others.

    Where the seconds of some others are no measure, the rest counts: what is behind one of them is not the best. To be
    ahead of the rest counts as no difference, since it proves nothing.
    """
    timed = [other for other in others if timed_together(fnr, other)]
    if not timed:
        return None
    beyond = _beyond_best([line.accuracy / line.seconds_train for line in (fnr, *timed)])
    return beyond if beyond is None or len(timed) == len(others) else min(beyond, 0.0)


def best_rho(fnr: Line, *others: Line) -> float | None:
    """Return accuracy per byte, as a share beyond the best of the others."""
    return _beyond_best([line.accuracy / line.bytes for line in (fnr, *others)])


def _beyond_best(rates: Sequence[float]) -> float | None:
    best = max(rates[1:])
    return rates[0] / best - 1 if best else None


def rounds_saved(fnr: Line, fedavg: Line) -> float | None:
    """Return the share of FedAvg's rounds to the target that is not needed."""
    return _saved(fnr, fedavg, lambda line: [1.0] * len(line.accuracies))


def seconds_saved(fnr: Line, fedavg: Line) -> float | None:
    """Return the share of FedAvg's seconds to the target that is not needed."""
    if not timed_together(fnr, fedavg):
        return None
    return _saved(fnr, fedavg, lambda line: line.seconds_of_rounds or [0.0] * len(line.accuracies))


def bytes_saved(fnr: Line, fedavg: Line) -> float | None:
    """Return the share of FedAvg's bytes to the target that is not needed."""
    return _saved(fnr, fedavg, lambda line: [round(line.bytes / len(line.accuracies))] * len(line.accuracies))


def _saved(fnr: Line, fedavg: Line, cost: Callable[[Line], Sequence[float]]) -> float | None:
    """Compare what it took; a run that never gets there is taken for one that would have in one more mean round."""
    spent = []
    for line, costs in ((fnr, cost(fnr)), (fedavg, cost(fedavg))):
        reached = [t for t, one in enumerate(line.accuracies, 1) if one >= TARGET_SHARE * fedavg.accuracies[-1]]
        spent.append(sum(costs[: reached[0]]) if reached else sum(costs) * (1 + 1 / len(costs)))
    return 1 - spent[0] / spent[1] if spent[1] else None


def rare_classes(line: Line) -> float | None:
    """Return how the gain of a class goes with the client's examples of it: rank correlation, over refined clients.

    It is taken over the classes of each refined client in each round, and averaged.
    """
    found = []
    for seen in watched(line):
        for counts, before, after in zip(seen["counts"], seen["accuracy_before"], seen["accuracy_after"], strict=True):
            known = [c for c, value in enumerate(before) if value is not None and after[c] is not None]
            gains = [after[c] - before[c] for c in known]
            found.append(statistics.rank_correlation([counts[c] for c in known], gains))
    return _mean_of_known(found)


def gap_and_angle(line: Line) -> float | None:
    """Return how the gap between class norms goes with the angle between updates: rank correlation over pairs.

    It is taken before refinement in each round, and averaged.
    """
    found = []
    for seen in watched(line):
        pairs = zip(seen["gaps_before"], seen["cosines_before"], strict=True)
        known = [(gap, -cosine) for gap, cosine in pairs if cosine is not None]
        found.append(statistics.rank_correlation([gap for gap, _ in known], [turned for _, turned in known]))
    return _mean_of_known(found)


def closer_updates(line: Line) -> float | None:
    """Return how much refinement adds to the mean cosine of the angle between two clients' updates."""
    return _mean_of_known([_mean_change(seen, "cosines") for seen in watched(line)])


def smaller_gaps(line: Line) -> float | None:
    """Return by which share refinement makes the mean gap between two clients' class norms smaller."""
    means = [(statistics.mean(seen["gaps_before"]), _mean_change(seen, "gaps") or 0.0) for seen in watched(line)]
    return _mean_of_known([-change / before if before else None for before, change in means])


def watched(line: Line) -> list[Mapping[str, Any]]:
    """Return what was logged in each round; nothing if the run was made without `fnr.watch`."""
    return [seen for of_round in line.notes.get("watched", []) for seen in of_round or []]


def _mean_change(seen: Mapping[str, Any], what: str) -> float | None:
    pairs = zip(seen[f"{what}_before"], seen[f"{what}_after"], strict=True)
    return _mean_of_known([after - before for before, after in pairs if None not in (before, after)])


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None
