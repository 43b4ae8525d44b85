"""What several seeds say together: means with their uncertainty, paired differences, and when a run got where.

Pure functions over numbers and over the rounds of an event log; nothing here reads a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from fnrfl.rundir.events import Event
from fnrfl.runs.metrics import of_round, training_seconds
from fnrfl.runs.quality import TEST_METRICS, Metric

LEVEL = 0.95
ROUNDING = 1e-9  # a spread below this share of the values is rounding: accuracies are fractions of a few hundred


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its interval; without spread, from one value or equal ones, there is no interval."""

    n: int
    mean: float
    sd: float | None  # of the sample; None for one value
    low: float | None
    high: float | None

    def spread(self, form: str) -> str:
        """The mean and the standard deviation, as far as there is one, such as 0.6631 ± 0.0042."""
        return format(self.mean, form) + ("" if self.sd is None else f" ± {self.sd:{form.lstrip('+')}}")


@dataclass(frozen=True)
class Difference(Estimate):
    """A mean of paired differences, its interval, and the two-sided p value of the paired t test.

    p is 1 if no pair differs. It is None for one pair, and for pairs that all differ by the same amount: a t test
    would be certain of them, when all they show is that accuracy comes in steps of one example.
    """

    p: float | None


@dataclass(frozen=True)
class Reached:
    """What it took to get to a target for the first time."""

    rounds: int
    bytes: int  # both directions
    seconds: float  # without evaluation


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean.

    >>> mean([1, 2, 6])
    3.0
    """
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample; None for one value, exactly 0 for values that differ by rounding only."""
    if len(values) < 2:
        return None
    centre = mean(values)
    found = math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))
    return found if found > ROUNDING * max(map(abs, values)) else 0.0


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of some seeds' values with its Student-t interval."""
    centre, sd, n = mean(values), deviation(values), len(values)
    if not sd:
        return Estimate(n, centre, sd, None, None)
    reach = t_quantile((1 + LEVEL) / 2, n - 1) * sd / math.sqrt(n)
    return Estimate(n, centre, sd, centre - reach, centre + reach)


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of so many examples (Wilson 1927).

    >>> share_interval(0.5, 4)
    (0.15003898915214947, 0.8499610108478506)
    """
    z = 1.959963984540054
    centre, scale = share + z * z / (2 * count), 1 + z * z / count
    reach = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Values minus baseline over the seeds that both have; None where they share none."""
    shared = sorted(values.keys() & baseline.keys())
    if not shared:
        return None
    differences = [values[seed] - baseline[seed] for seed in shared]
    found = estimate(differences)
    p = None
    if found.sd:
        p = 2 * t_tail(abs(found.mean) * math.sqrt(found.n) / found.sd, found.n - 1)
    elif found.sd == 0 and not any(differences):
        p = 1.0
    return Difference(found.n, found.mean, found.sd, found.low, found.high, p)


def holm(ps: Sequence[float]) -> list[float]:
    """p values corrected for their number, in the same order (Holm 1979).

    To call every corrected p below 0.05 a difference is wrong about any of them in one case of twenty at most.

    >>> holm([0.25, 0.01, 0.125])
    [0.25, 0.03, 0.25]
    """
    corrected, least = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        least = max(least, min(1.0, (len(ps) - rank) * ps[place]))
        corrected[place] = least
    return corrected


def reached(rounds: Sequence[Event], target: float, metric: Metric = TEST_METRICS["accuracy"]) -> Reached | None:
    """The first round that is no worse than a target, and all traffic and time until then; None if there is none."""
    traffic, seconds = 0, 0.0
    for event in rounds:
        traffic += event["bytes_up"] + event["bytes_down"]
        seconds += training_seconds(event)
        value = of_round(event, metric.name)
        if value is not None and metric.gain(value - target) >= 0:
            return Reached(event["round"], traffic, seconds)
    return None


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation; equal values share their mean rank. None where all values of a side are equal.

    >>> rank_correlation([1, 2, 3, 4], [10, 40, 20, 90])
    0.8
    """
    x, y = _centred(ranks(a)), _centred(ranks(b))
    lengths = math.fsum(u * u for u in x) * math.fsum(v * v for v in y)
    return math.fsum(u * v for u, v in zip(x, y, strict=True)) / math.sqrt(lengths) if lengths else None


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1; equal values share the mean of theirs.

    >>> ranks([5.0, 1.0, 5.0])
    [2.5, 1.0, 2.5]
    """
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def _centred(values: Sequence[float]) -> list[float]:
    centre = mean(values) if values else 0.0
    return [value - centre for value in values]


# -- Student's t -------------------------------------------------------------------------------------------------------


def t_tail(t: float, df: float) -> float:
    """P(T > t) of Student's t with `df` degrees of freedom."""
    if t <= 0:
        return 0.5 if t == 0 else 1 - t_tail(-t, df)
    return _incomplete_beta(df / 2, 0.5, df / t / t) / 2


@cache
def t_quantile(p: float, df: float) -> float:
    """The t with P(T <= t) = p, by bisection of the tail."""
    if not 0 < p < 1 or df <= 0:
        raise ValueError(f"t_quantile({p}, {df}) needs 0 < p < 1 and df > 0")
    if p == 0.5:
        return 0.0
    return -_upper(p, df) if p < 0.5 else _upper(1 - p, df)


def _upper(tail: float, df: float) -> float:
    """The t > 0 with P(T > t) = tail, for a tail below one half."""
    low, high = 0.0, 1.0
    while t_tail(high, df) > tail:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_tail(middle, df) > tail else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, odds: float) -> float:
    """The regularised I_x(a, b) at x = odds / (1 + odds); the odds keep 1 - x exact where x is close to 1."""
    x, y = odds / (1 + odds), 1 / (1 + odds)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = math.exp(-a * math.log1p(1 / odds) - b * math.log1p(odds) - log_beta)
    # The fraction converges fast below the mean of the beta distribution; above it the mirrored one does.
    if x < (a + 1) / (a + b + 2):
        return front / (a * _fraction(a, b, x))
    return 1 - front / (b * _fraction(b, a, y))


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction 1 + d1/(1 + d2/(1 + ...)) of the incomplete beta function, from its far end."""
    value = 1.0
    for n in range(60 + int(10 * math.sqrt(a + b)), 0, -1):
        m = n // 2
        if n % 2:
            d = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + d * x / value
    return value
