"""What the paper's claims are about, as numbers: each function takes the lines of runs of one seed.

Where a number cannot be had from these lines, it is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fnrfl.results.reproduce.kept_lines import CellLine, bytes_both_ways, timed_together
from fnrfl.results.statistics import Reached, mean, rank_correlation, reached

Measure = Callable[..., float | None]  # of lines, in the order of a claim's runs
TARGET_SHARE = 0.9  # of FedAvg's last accuracy: what counts as having got there


# -- accuracy ----------------------------------------------------------------------------------------------------------


def relative_gain(fnr: CellLine, other: CellLine) -> float | None:
    """How much larger the accuracy is, as a share of the other's."""
    return float(fnr["accuracy"] / other["accuracy"] - 1) if other["accuracy"] else None


def margin(fnr: CellLine, *others: CellLine) -> float:
    """Accuracy minus the best accuracy of the others."""
    return float(fnr["accuracy"] - max(other["accuracy"] for other in others))


def mean_margin(*lines: CellLine) -> float:
    """The mean of accuracy differences; the lines are pairs, with FNR and without."""
    return mean([margin(fnr, bare) for fnr, bare in zip(lines[::2], lines[1::2], strict=True)])


def smaller_decline(*lines: CellLine) -> float:
    """How much less is lost by noise than by the one of the others that loses least.

    The first half of the lines is without noise and the second with it, FNR the first of each.
    """
    half = len(lines) // 2
    lost, *others = (
        calm["accuracy"] - noisy["accuracy"] for calm, noisy in zip(lines[:half], lines[half:], strict=True)
    )
    return float(min(others) - lost)


# -- cost --------------------------------------------------------------------------------------------------------------


def time_saved(fnr: CellLine, other: CellLine) -> float | None:
    """The share of the other's training time that is not needed."""
    if not timed_together(fnr, other):
        return None
    return float(1 - fnr["seconds_train"] / other["seconds_train"])


def best_kappa(fnr: CellLine, *others: CellLine) -> float | None:
    """Accuracy per second, as a share beyond the best of the others.

    Where the seconds of some others are no measure, the rest counts: what is behind one of them is not the best. To be
    ahead of the rest counts as no difference, since it proves nothing.
    """
    timed = [other for other in others if timed_together(fnr, other)]
    if not timed:
        return None
    beyond = _beyond_best([line["accuracy"] / line["seconds_train"] for line in (fnr, *timed)])
    return beyond if beyond is None or len(timed) == len(others) else min(beyond, 0.0)


def best_rho(fnr: CellLine, *others: CellLine) -> float | None:
    """Accuracy per byte, as a share beyond the best of the others."""
    return _beyond_best([line["accuracy"] / bytes_both_ways(line) for line in (fnr, *others)])


def _beyond_best(rates: Sequence[float]) -> float | None:
    best = max(rates[1:])
    return rates[0] / best - 1 if best else None


# -- convergence -------------------------------------------------------------------------------------------------------


def rounds_saved(fnr: CellLine, fedavg: CellLine) -> float | None:
    """The share of FedAvg's rounds to the target that is not needed."""
    return _saved(fnr, fedavg, lambda found: found.rounds)


def seconds_saved(fnr: CellLine, fedavg: CellLine) -> float | None:
    """The share of FedAvg's seconds to the target that is not needed."""
    if not timed_together(fnr, fedavg):
        return None
    return _saved(fnr, fedavg, lambda found: found.seconds)


def bytes_saved(fnr: CellLine, fedavg: CellLine) -> float | None:
    """The share of FedAvg's bytes to the target that is not needed."""
    return _saved(fnr, fedavg, lambda found: found.bytes)


def _saved(fnr: CellLine, fedavg: CellLine, cost: Callable[[Reached], float]) -> float | None:
    target = TARGET_SHARE * fedavg["accuracies"][-1]
    mine, others = cost(_reached(fnr, target)), cost(_reached(fedavg, target))
    return 1 - mine / others if others else None


def _reached(line: CellLine, target: float) -> Reached:
    """What it took; a run that never gets there is taken for one that would have in one more round."""
    rounds = len(line["accuracies"])
    each = round(bytes_both_ways(line) / rounds)
    seconds = line.get("seconds_of_rounds") or [0.0] * rounds
    events = [
        {"round": t + 1, "accuracy": accuracy, "bytes_up": each, "bytes_down": 0, "seconds": {"local": spent}}
        for t, (accuracy, spent) in enumerate(zip(line["accuracies"], seconds, strict=True))
    ]
    more = 1 + 1 / rounds
    return reached(events, target) or Reached(rounds + 1, round(each * rounds * more), sum(seconds) * more)


# -- inside a round: what `fnr.watch` has logged -----------------------------------------------------------------------


def rare_classes(line: CellLine) -> float | None:
    """How the gain of a class goes with the client's examples of it: rank correlation, over refined clients' classes.

    It is taken over the classes of each refined client in each round, and averaged.
    """
    found = []
    for told in watched(line):
        for counts, before, after in zip(told["counts"], told["accuracy_before"], told["accuracy_after"], strict=True):
            known = [c for c, value in enumerate(before) if value is not None and after[c] is not None]
            found.append(rank_correlation([counts[c] for c in known], [after[c] - before[c] for c in known]))
    return _mean_of_known(found)


def rare_classes_by_penalty(fnr: CellLine, control: CellLine) -> float | None:
    """How much further that correlation is from the one of refinement without the penalty."""
    return _difference(rare_classes(fnr), rare_classes(control))


def gap_and_angle(line: CellLine) -> float | None:
    """How the gap between class norms goes with the angle between updates: rank correlation over pairs of clients.

    It is taken before refinement in each round, and averaged.
    """
    found = []
    for told in watched(line):
        pairs = zip(told["gaps_before"], told["cosines_before"], strict=True)
        known = [(gap, -cosine) for gap, cosine in pairs if cosine is not None]
        found.append(rank_correlation([gap for gap, _ in known], [turned for _, turned in known]))
    return _mean_of_known(found)


def closer_updates(line: CellLine) -> float | None:
    """How much refinement adds to the mean cosine of the angle between two clients' updates."""
    return _mean_of_known([_mean_change(told, "cosines") for told in watched(line)])


def closer_updates_by_penalty(fnr: CellLine, control: CellLine) -> float | None:
    """How much more it adds than refinement without the penalty."""
    return _difference(closer_updates(fnr), closer_updates(control))


def smaller_gaps(line: CellLine) -> float | None:
    """By which share refinement makes the mean gap between two clients' class norms smaller."""
    shares = []
    for told in watched(line):
        before = mean(told["gaps_before"])
        shares.append(-(_mean_change(told, "gaps") or 0.0) / before if before else None)
    return _mean_of_known(shares)


def smaller_gaps_by_penalty(fnr: CellLine, control: CellLine) -> float | None:
    """How much larger that share is than in refinement without the penalty."""
    return _difference(smaller_gaps(fnr), smaller_gaps(control))


def watched(line: CellLine) -> list[CellLine]:
    """What was logged in each round; nothing if the run was made without `fnr.watch`."""
    return [told for round_told in line["notes"].get("watched", []) for told in round_told or []]


def _mean_change(told: CellLine, what: str) -> float | None:
    pairs = zip(told[f"{what}_before"], told[f"{what}_after"], strict=True)
    return _mean_of_known([after - before for before, after in pairs if None not in (before, after)])


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
