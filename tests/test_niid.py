"""`fnrfl.data.partition.niid` against NIID-Bench's rules, written here again: plainly, one draw at a time, no limit."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnrfl.core.errors import ConfigError
from fnrfl.data.datasets import load
from fnrfl.data.partition import niid
from fnrfl.data.partition.draw import draw
from fnrfl.data.scenarios import parse

DIGITS = load("digits").train.y.numpy()
Split = list[list[int]]


def _accepted_shares(
    stream: np.random.RandomState, alpha: float, clients: int, examples: int
) -> tuple[np.ndarray, int]:
    """One Dirichlet vector after another until the smallest share is worth ten examples; and how many were drawn."""
    smallest, draws = 0.0, 0
    while smallest < 10:
        shares = stream.dirichlet(np.repeat(alpha, clients))
        shares = shares / shares.sum()
        smallest, draws = np.min(shares * examples), draws + 1
    return shares, draws


def _pieces(order: np.ndarray, shares: np.ndarray) -> list[list[int]]:
    ends = (np.cumsum(shares) * len(order)).astype(int)[:-1]
    return [piece.tolist() for piece in np.split(order, ends)]


def plain_quantity(examples: int, clients: int, alpha: float, seed: int) -> tuple[Split, int]:
    """`iid-diff-quantity`: a random order, cut by the accepted shares."""
    stream = np.random.RandomState(seed)
    order = stream.permutation(examples)
    shares, draws = _accepted_shares(stream, alpha, clients, examples)
    return _pieces(order, shares), draws


def plain_mixed(labels: np.ndarray, alpha: float, seed: int) -> tuple[Split, int]:
    """`mixed`: client i owns class i and a random class with one owner; the two owners share a class."""
    stream, other = np.random.RandomState(seed), random.Random(seed)
    owners = [1] * 10
    owned = []
    for client in range(10):
        second = client
        while second == client or owners[second] == 2:
            second = other.randint(0, 9)
        owners[second] += 1
        owned.append({client, second})
    _, draws = _accepted_shares(stream, alpha, 10, len(labels))
    held: Split = [[] for _ in range(10)]
    for c in range(10):
        order = np.flatnonzero(labels == c)
        stream.shuffle(order)
        pieces = _pieces(order, stream.dirichlet([alpha, alpha]))
        for client in range(10):
            if c in owned[client]:
                held[client] += pieces.pop(0)
    return held, draws


def plain_label(labels: np.ndarray, classes: int, clients: int, alpha: float, seed: int) -> tuple[Split, int]:
    """`noniid-labeldir`: class by class, a Dirichlet over the clients that are below their even share."""
    stream = np.random.RandomState(seed)
    smallest, draws = 0, 0
    while smallest < 10:
        held: Split = [[] for _ in range(clients)]
        for c in range(classes):
            order = np.flatnonzero(labels == c)
            stream.shuffle(order)
            shares = stream.dirichlet(np.repeat(alpha, clients))
            below = [len(mine) < len(labels) / clients for mine in held]
            shares = shares * below
            pieces = _pieces(order, shares / shares.sum())
            held = [mine + more for mine, more in zip(held, pieces, strict=True)]
        smallest, draws = min(map(len, held)), draws + 1
    for mine in held:
        stream.shuffle(mine)
    return held, draws


def _positions(scenario: str, labels: np.ndarray, clients: int, seed: int) -> Split:
    partition = draw(parse(scenario), labels, clients, seed, num_classes=10)
    return [positions.tolist() for positions in partition.positions]


# Seeds 2, 3 and 17, and mixed with 2 and 3, were once refused after 10,000 draws. A plain draw takes 20 microseconds.
slow = pytest.mark.slow


@pytest.mark.parametrize("seed", [3, 17, pytest.param(2, marks=slow)])
def test_quantity_skew_that_needs_many_draws_is_the_originals(seed: int) -> None:
    expected, draws = plain_quantity(len(DIGITS), 10, 0.1, seed)
    assert draws > 10_000
    assert _positions("niid(quantity-dirichlet(0.1))", DIGITS, 10, seed) == expected


@pytest.mark.parametrize("seed", [5, pytest.param(2, marks=slow), pytest.param(3, marks=slow)])
def test_mixed_skew_that_needs_many_draws_is_the_originals(seed: int) -> None:
    expected, draws = plain_mixed(DIGITS, 0.1, seed)
    assert draws > 10_000
    assert [mine.tolist() for mine in niid.mixed(DIGITS, 0.1, seed)] == expected


@settings(deadline=None, max_examples=60)
@given(st.integers(300, 2000), st.integers(1, 12), st.floats(0.8, 20), st.integers(0, 2**32 - 1))
def test_quantity_skew_equals_the_plain_rule(examples: int, clients: int, alpha: float, seed: int) -> None:
    expected, _ = plain_quantity(examples, clients, alpha, seed)
    assert [mine.tolist() for mine in niid.quantity_dirichlet(examples, clients, alpha, seed)] == expected


@settings(deadline=None, max_examples=30)
@given(clients=st.integers(1, 12), alpha=st.floats(0.1, 20), seed=st.integers(0, 2**32 - 1))
def test_label_skew_equals_the_plain_rule(clients: int, alpha: float, seed: int) -> None:
    expected, _ = plain_label(DIGITS, 10, clients, alpha, seed)
    assert [mine.tolist() for mine in niid.label_dirichlet(DIGITS, 10, clients, alpha, seed)] == expected


def test_the_number_of_draws_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[Split]:
        return [[mine.tolist() for mine in niid.quantity_dirichlet(1000, 10, 0.2, seed)] for seed in range(5)]

    before = drawn()
    monkeypatch.setattr(niid, "MAX_NUMBERS_AT_ONCE", 70)
    assert drawn() == before


def test_the_last_draw_that_the_limit_allows_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, draws = plain_quantity(1000, 10, 0.2, 4)
    assert draws > 100
    monkeypatch.setattr(niid, "MAX_NUMBERS", draws * 10)
    assert [mine.tolist() for mine in niid.quantity_dirichlet(1000, 10, 0.2, 4)] == expected
    monkeypatch.setattr(niid, "MAX_NUMBERS", draws * 10 - 1)
    with pytest.raises(ConfigError, match=f"none of {draws - 1:,} draws"):
        niid.quantity_dirichlet(1000, 10, 0.2, 4)


def test_a_split_of_the_original_that_leaves_a_client_empty_is_refused() -> None:
    """With a tiny alpha all shares underflow to NaN, which the original accepts: the last client gets everything."""
    assert [len(mine) for mine in niid.quantity_dirichlet(len(DIGITS), 3, 1e-6, 0)] == [0, 0, len(DIGITS)]
    with pytest.raises(ConfigError, match="leaves client 0 without examples. Use another seed or a larger alpha"):
        _positions("niid(quantity-dirichlet(0.000001))", DIGITS, 3, 0)
