"""Which clients step together, and how a group shrinks while its clients finish."""

from __future__ import annotations

from collections.abc import Sequence

GROUP_SIZE = 16  # clients in a group, at most


def in_groups(steps: Sequence[int], size: int = GROUP_SIZE) -> list[list[int]]:
    """Clients in groups of at most `size`, those with the most steps first, as equal in number as can be.

    >>> in_groups([3, 9, 1, 8, 4])
    [[1, 3, 4, 0, 2]]
    """
    order = sorted(range(len(steps)), key=lambda m: -steps[m])  # stable
    size = -(-len(order) // -(-len(order) // size))
    return [order[i : i + size] for i in range(0, len(order), size)]


def shrinking(steps: Sequence[int], width: int) -> list[tuple[int, int, int]]:
    """(first step, last step, rows): stretches between the ends of clients, rows halved as clients finish.

    Halves rather than as many as are left: every number of rows is another program.

    >>> shrinking([9, 4, 4, 2], 4)
    [(0, 2, 4), (2, 4, 4), (4, 9, 1)]
    """
    parts, first = [], 0
    for last in sorted({n for n in steps if n}):
        live = sum(n > first for n in steps)
        parts.append((first, last, next(w for w in halves(width) if w >= live)))
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
