"""Clients that the data names: in which order they stand, and who holds which examples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fnrfl.core.ndarrays import Ints, Ragged
from fnrfl.core.words import printable

MAX_NAMED = 5  # clients that a sentence names
_DIGITS = re.compile("([0-9]+)")


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Names, each once, as people sort them: H2 comes before H10.

    >>> in_natural_order(["H10", "H2", "a", "H2"])
    ['H2', 'H10', 'a']
    """
    return sorted(set(names), key=sort_key)


def sort_key(name: str) -> tuple[list[Any], str]:
    """Text and digits in turn; digits compare as the number that they are, however long."""
    parts: list[Any] = _DIGITS.split(name)
    parts[1::2] = [(len(digits), digits or part) for part in parts[1::2] for digits in [part.lstrip("0")]]
    return parts, name


def positions_by_client(clients: Sequence[str]) -> dict[str, Ints]:
    """The positions of each client's examples, ascending; `clients` says who holds each example."""
    names = in_natural_order(clients)
    return dict(zip(names, positions_by_number(client_numbers(clients, names), len(names)), strict=True))


def positions_by_number(numbers: Ints, count: int) -> Ragged[Ints]:
    """The positions of each of `count` clients' examples, ascending; `numbers` has each example's client, -1: none."""
    known = np.flatnonzero(numbers >= 0)
    order = known[np.argsort(numbers[known], kind="stable")]
    return Ragged(order, np.bincount(numbers[known], minlength=count))


def client_numbers(clients: Sequence[str], names: Sequence[str]) -> Ints:
    """The number of each example's client, its place in `names`; -1 for a client that is not among them."""
    number = {name: at for at, name in enumerate(names)}
    return np.array([number.get(name, -1) for name in clients], dtype=np.int64)


def some_of(names: Sequence[str]) -> str:
    """The first few names in a sentence."""
    more = len(names) - MAX_NAMED
    return ", ".join(map(printable, names[:MAX_NAMED])) + (f" and {more:,} more" if more > 0 else "")
