"""Means, intervals and paired differences against closed forms, hand-made examples and scipy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fnrfl.results.statistics import (
    Difference,
    Estimate,
    Reached,
    _fraction,
    _incomplete_beta,
    deviation,
    estimate,
    holm,
    mean,
    paired,
    reached,
    share_interval,
    t_quantile,
    t_tail,
)
from fnrfl.runs.metrics import training_seconds
from mutants import mutants

accuracies = st.integers(0, 10_000).map(lambda right: right / 10_000)


# -- Student's t -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(p=st.floats(1e-6, 1 - 1e-6), df=st.integers(1, 2_000))
def test_quantiles_are_scipys(p: float, df: int) -> None:
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=2e-10, abs=1e-9)


def _closed_form(p: float, df: int) -> float:
    """Quantiles of one, two and four degrees of freedom; scipy's own are good to ten digits only."""
    if df == 1:
        return math.tan(math.pi * (p - 0.5))
    if df == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    root = math.sqrt(4 * p * (1 - p))
    return math.copysign(2 * math.sqrt(math.cos(math.acos(root) / 3) / root - 1), p - 0.5)


@pytest.mark.parametrize("df", [1, 2, 4])
@pytest.mark.parametrize("p", [0.005, 0.025, 0.4, 0.75, 0.9, 0.95, 0.975, 0.995])
def test_quantiles_have_their_closed_forms(p: float, df: int) -> None:
    assert t_quantile(p, df) == pytest.approx(_closed_form(p, df), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(t=st.floats(-50, 50), df=st.integers(1, 2_000))
def test_tails_are_scipys(t: float, df: int) -> None:
    assert t_tail(t, df) == pytest.approx(stats.t.sf(t, df), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("p", "df"), [(0.0, 3), (1.0, 3), (-0.1, 3), (0.5, 0)])
def test_the_median_is_zero_and_what_has_no_quantile_is_refused(p: float, df: int) -> None:
    assert (t_quantile(0.5, 3), t_tail(0.0, 3)) == (0, 0.5)
    with pytest.raises(ValueError, match="0 < p < 1"):
        t_quantile(p, df)


# -- Means -------------------------------------------------------------------------------------------------------------


def test_an_interval_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0])
    reach = 0.95 / math.sqrt(0.04875) / math.sqrt(3)  # the closed form of two degrees of freedom: 4.3027
    assert (found.n, found.mean, found.sd) == (3, 2.0, 1.0)
    assert (found.low, found.high) == (pytest.approx(2 - reach, rel=1e-12), pytest.approx(2 + reach, rel=1e-12))


@settings(max_examples=60, deadline=None)
@given(st.lists(accuracies, min_size=2, max_size=12).filter(lambda values: len(set(values)) > 1))
def test_intervals_are_scipys(values: list[float]) -> None:
    found = estimate(values)
    assert found.mean == pytest.approx(mean(values))
    assert found.sd == pytest.approx(stats.tstd(values))
    low, high = stats.t.interval(0.95, len(values) - 1, stats.tmean(values), stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))


def test_one_value_and_equal_ones_have_no_interval() -> None:
    assert estimate([0.9]) == Estimate(1, 0.9, None, None, None) and deviation([0.9]) is None
    assert estimate([0.9, 0.9, 0.9]) == Estimate(3, pytest.approx(0.9), 0.0, None, None)


# -- Pairs -------------------------------------------------------------------------------------------------------------


def test_a_paired_difference_by_hand() -> None:
    found = paired({0: 11.0, 1: 22.0, 2: 33.0}, {2: 30.0, 1: 20.0, 0: 10.0})  # differences 1, 2, 3
    assert found is not None
    t = 2 * math.sqrt(3)
    assert (found.n, found.mean, found.sd) == (3, 2.0, 1.0)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-10)  # 0.0742: closed form of two degrees
    assert found.low == pytest.approx(-0.4841377, abs=1e-6)
    assert found.high == pytest.approx(4.4841377, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=12))
def test_paired_tests_are_scipys(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = dict(enumerate(a for a, _ in pairs)), dict(enumerate(b for _, b in pairs))
    found = paired(ours, theirs)
    assert found is not None
    if found.sd:
        wanted = stats.ttest_rel(list(ours.values()), list(theirs.values()))
        assert found.p == pytest.approx(wanted.pvalue, rel=1e-6, abs=1e-12)
        assert found.low == pytest.approx(wanted.confidence_interval().low, abs=1e-9)
        assert found.high == pytest.approx(wanted.confidence_interval().high, abs=1e-9)
    else:
        assert max(a - b for a, b in pairs) == pytest.approx(min(a - b for a, b in pairs), abs=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ({3: 0.5, 1: 0.75, 9: 1.0}, {1: 0.5, 2: 0.0, 3: 0.5}, paired({1: 0.25, 3: 0.0}, {1: 0.0, 3: 0.0})),
        ({1: 0.5}, {2: 0.5}, None),
        ({}, {}, None),
        ({0: 0.75}, {0: 0.5}, Difference(1, 0.25, None, None, None, None)),  # one pair says nothing about chance
        ({0: 0.9, 1: 0.7}, {0: 0.9, 1: 0.7}, Difference(2, 0.0, 0.0, None, None, 1.0)),
    ],
)
def test_seeds_are_paired_by_number(ours: dict[int, float], theirs: dict[int, float], found: Difference | None) -> None:
    assert paired(ours, theirs) == found


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holms_correction_stops_at_the_first_p_that_is_too_large(ps: list[float]) -> None:
    """Step by step, as Holm wrote it: of m that are left, the smallest p must be at most level / m."""
    for level in (0.01, 0.05, 0.3):
        left, rejected = sorted(range(len(ps)), key=lambda i: ps[i]), set()
        while left and ps[left[0]] * len(left) <= level:
            rejected.add(left.pop(0))
        assert {i for i, p in enumerate(holm(ps)) if p <= level} == rejected
    assert all(p <= corrected <= 1 for p, corrected in zip(ps, holm(ps), strict=True))


def test_pairs_that_differ_by_one_amount_prove_nothing() -> None:
    """Two seeds that each win one example of 360: in floating point not even the differences are equal."""
    found = paired({0: 300 / 360, 1: 254 / 360}, {0: 299 / 360, 1: 253 / 360})
    assert 300 / 360 - 299 / 360 != 254 / 360 - 253 / 360
    assert found is not None
    assert (found.sd, found.low, found.high, found.p) == (0.0, None, None, None)
    assert found.mean == pytest.approx(1 / 360)


# -- The way to a target -----------------------------------------------------------------------------------------------

SECONDS = {"local": 1.0, "server": 0.5, "evaluate": 9.0}
ROUNDS = [
    {"round": t, "accuracy": accuracy, "bytes_up": 10, "bytes_down": 5, "seconds": SECONDS}
    for t, accuracy in enumerate((0.25, 0.75, 0.5, 0.875), 1)
]


@pytest.mark.parametrize(
    ("target", "wanted"),
    [(0.25, Reached(1, 15, 1.5)), (0.6, Reached(2, 30, 3.0)), (0.8, Reached(4, 60, 6.0)), (0.9, None)],
)
def test_what_it_takes_to_reach_a_target(target: float, wanted: Reached | None) -> None:
    assert reached(ROUNDS, target) == wanted


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(mean, not_averaged=("math.fsum(values) / len(values)", "math.fsum(values)")),
    *mutants(
        deviation,
        of_the_population=("len(values) - 1", "len(values)"),
        variance=("math.sqrt(...)", "..."),
        rounding_counts=("found > ROUNDING * max(map(abs, values))", "True"),
    ),
    *mutants(
        estimate,
        one_sided=("(1 + LEVEL) / 2", "LEVEL"),
        one_degree_more=("n - 1", "n"),
        deviation_for_error=("t_quantile(...,  n - 1) * sd / math.sqrt(n)", "t_quantile(..., n - 1) * sd"),
    ),
    *mutants(
        paired,
        sign=("values[seed] - baseline[seed]", "baseline[seed] - values[seed]"),
        one_sided=("2 * t_tail(..., found.n - 1)", "t_tail(..., found.n - 1)"),
        without_root=("math.sqrt(found.n)", "found.n"),
        certain_of_equal_differences=("found.sd == 0 and not any(differences)", "found.sd == 0"),
    ),
    *mutants(
        reached,
        above_alone=("metric.gain(value - target) >= 0", "metric.gain(value - target) > 0"),
        uploads_alone=("event['bytes_up'] + event['bytes_down']", "event['bytes_up']"),
    ),
    *mutants(training_seconds, evaluation_takes_time=("phase not in LOOKING", "True")),
    *mutants(
        t_tail,
        both_tails=("_incomplete_beta(df / 2, 0.5, df / t / t) / 2", "_incomplete_beta(df / 2, 0.5, df / t / t)"),
    ),
    *mutants(_incomplete_beta, never_mirrored=("x < (a + 1) / (a + b + 2)", "True")),
    *mutants(_fraction, odd_terms_positive=("-(a + m) * (a + b + m) / ...", "(a + m) * (a + b + m) / ...")),
]


@given(st.integers(1, 500).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_the_interval_of_a_share_is_wilsons(given: tuple[int, int]) -> None:
    right, count = given
    known = stats.binomtest(right, count).proportion_ci(method="wilson")
    assert share_interval(right / count, count) == pytest.approx((known.low, known.high), abs=1e-12)
