"""Which clients step together, and how a group shrinks while its clients finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

GROUP_SIZE = 16  # clients in a group, at most


class ShortSizes(NamedTuple):
    """Sizes of last batches whose steps are recorded."""

    recorded: set[int] = set()
    alone: set[int] = set()  # those recorded for one client: they have turns one after another
    exact: set[int] = set()  # those recorded for as many clients as there are, without idle rows


class Turn(NamedTuple):
    """Steps that some clients of a group take together."""

    group: list[int]  # all of its clients, in the order of their rows
    size: int  # of the batches
    steps: int
    at: dict[int, int]  # client -> its first step
    where: slice | list[int]  # rows in the group, idle ones last; neighbours are a slice, which is not copied
    width: int  # how many rows


class StepShape(NamedTuple):
    """What steps have in common that one program can take."""

    width: int  # how many rows
    size: int  # of the batches
    pads: bool = False  # whether shorter batches are padded to that size; else all are of it


def in_groups(steps: Sequence[int], size: int = GROUP_SIZE) -> list[list[int]]:
    """Clients in groups of at most `size`, those with the most steps first, as equal in number as can be.

    >>> in_groups([3, 9, 1, 8, 4]), in_groups([])
    ([[1, 3, 4, 0, 2]], [])
    """
    if not steps:
        return []
    order = sorted(range(len(steps)), key=lambda m: -steps[m])  # stable
    size = -(-len(order) // -(-len(order) // size))
    return [order[i : i + size] for i in range(0, len(order), size)]


def shrinking(steps: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first step, last step, rows): stretches between the ends of clients, with the fewest rows of `widths` that do.

    Not with as many rows as clients are left: every number of rows is another program.

    >>> shrinking([9, 4, 4, 2], halves(4))
    [(0, 2, 4), (2, 4, 4), (4, 9, 1)]
    """
    parts, first = [], 0
    for last in sorted({n for n in steps if n}):
        live = sum(n > first for n in steps)
        parts.append((first, last, next(w for w in widths if w >= live)))
        first = last
    return parts


def halves(width: int) -> list[int]:
    """1, ..., a half, the whole, rounded up.

    >>> halves(10)
    [1, 2, 3, 5, 10]
    """
    widths = [width]
    while widths[-1] > 1:
        widths.append(-(-widths[-1] // 2))
    return widths[::-1]


def padded(rows: list[int], width: int) -> list[int]:
    """At least `width` rows, the last one again and again."""
    return rows + rows[-1:] * (width - len(rows))


def turns_of(sizes: Mapping[int, list[int]], width: int, short: ShortSizes) -> list[Turn]:
    """The turns of clients with batches of several sizes: they wait for each other to have batches of one size.

    `sizes` are those of each client's batches. Short batches that are recorded come first, so that full ones are
    everybody's, and clients with the same sizes are neighbours.

    >>> [(turn.at, turn.size, turn.steps) for turn in turns_of({0: [8, 8, 3], 1: [8, 3]}, 2, ShortSizes({3}))]
    [({0: 0, 1: 0}, 8, 1), ({1: 1}, 3, 1), ({0: 1}, 8, 1), ({0: 2}, 3, 1)]
    """
    group = sorted(sizes, key=sizes.__getitem__, reverse=True) if short.recorded else list(sizes)
    turns, at = list[Turn](), dict.fromkeys(group, 0)
    while waiting := [m for m in group if at[m] < len(sizes[m])]:
        by_size: dict[int, list[int]] = {}
        for m in waiting:
            by_size.setdefault(sizes[m][at[m]], []).append(m)
        size, some = max(by_size.items(), key=lambda item: (item[0] in short.recorded, len(item[1]), item[0]))
        some = some[:1] if size in short.alone else some
        steps = min(sum(1 for _ in takewhile(size.__eq__, sizes[m][at[m] :])) for m in some)
        rows = _rows([group.index(m) for m in some], len(group), width, exact=size in short.exact)
        turns.append(Turn(group, size, steps, {m: at[m] for m in some}, *rows))
        at.update({m: at[m] + steps for m in some})
    return turns


def _rows(rows: list[int], live: int, width: int, *, exact: bool) -> tuple[slice | list[int], int]:
    """Where the rows of a turn are in a group of `live` clients, and how many they are with idle ones."""
    wide = len(rows) if exact else next(w for w in halves(width) if w >= len(rows))
    neighbours = rows[-1] - rows[0] == len(rows) - 1
    if neighbours and (wide == len(rows) or len(rows) == live):  # behind all the clients there are idle rows
        return slice(rows[0], rows[0] + wide), wide
    return padded(rows, wide), wide
