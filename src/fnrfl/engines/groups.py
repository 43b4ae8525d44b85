"""Which clients step together, and when: groups shrink, and short batches are padded or waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

from fnrfl.core.values import SERVER
from fnrfl.engines.job import Job

GROUP_SIZE = 16  # clients in a group, at most
# Steps in all rounds of a run: with fewer, the time that a program takes to make is not won back.
MIN_STEPS_FOR_OWN_WIDTH = 500  # of a group, for a program of its number of rows; else it has idle rows
MIN_STEPS_FOR_SHORT_BATCH = 300  # with last batches of one size, for a program of that size

T = TypeVar("T")


class ShortSizes(NamedTuple):
    """Sizes of last batches whose steps are recorded."""

    recorded: set[int] = set()
    alone: set[int] = set()  # those recorded for one client: they have turns one after another
    exact: set[int] = set()  # those recorded for as many clients as there are, without idle rows


class StepShape(NamedTuple):
    """What steps have in common that one program can take."""

    width: int  # how many rows
    size: int  # of the batches
    pads: bool = False  # whether shorter batches are padded to that size; else all are of it


class Turn(NamedTuple):
    """Steps that some clients of a group take together."""

    shape: StepShape
    steps: int
    at: dict[int, int]  # client -> its first step
    where: slice | list[int]  # rows in the group, idle ones last; neighbours are a slice, which is not copied


class Schedule(NamedTuple):
    """The turns of a group."""

    group: list[int]  # its clients, in the order of their rows
    turns: list[Turn]


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


def stepping_together(group: list[int], steps: Sequence[int], widths: Sequence[int], size: int, pads: bool) -> Schedule:
    """The turns of clients whose batches are all of one size, or are padded to it; those with the most steps first.

    The row of a client that has finished goes on idly until the group shrinks past it: a step costs nearly the same
    with one row more.
    """
    turns = []
    for first, last, rows in shrinking([steps[m] for m in group], widths):
        live = {m: first for m in group if steps[m] > first}
        turns.append(Turn(StepShape(rows, size, pads), last - first, live, slice(0, rows)))
    return Schedule(group, turns)


def waiting_for_each_other(sizes: Mapping[int, list[int]], width: int, short: ShortSizes) -> Schedule:
    """The turns of clients with batches of several sizes, each of which is of one size; `sizes` are those of clients.

    Short batches that are recorded come first, so that full ones are everybody's, and clients with the same sizes are
    neighbours.

    >>> [(turn.at, turn.shape.size, turn.steps) for turn in waiting_for_each_other(
    ...     {0: [8, 8, 3], 1: [8, 3]}, 2, ShortSizes({3})).turns]
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
        wide = len(some) if size in short.exact else next(w for w in halves(width) if w >= len(some))
        where = _where([group.index(m) for m in some], len(group), wide)
        turns.append(Turn(StepShape(wide, size), steps, {m: at[m] for m in some}, where))
        at.update({m: at[m] + steps for m in some})
    return Schedule(group, turns)


def _where(rows: list[int], live: int, wide: int) -> slice | list[int]:
    """Where the rows of a turn are in a group; idle ones are behind those of all the `live` clients there are."""
    are_neighbours = rows[-1] - rows[0] < len(rows)
    return slice(rows[0], rows[0] + wide) if are_neighbours and len(rows) in (wide, live) else padded(rows, wide)


# -- how many steps of each kind a run will take ----------------------------------------------------------------------


@dataclass(frozen=True)
class StepEstimate:
    """What decides whether recording and compiling steps pays: how many of each kind a run will take.

    Estimates are by the examples of all clients, whoever is in the cohort: a resumed run must make the same choices.
    """

    examples: Sequence[int] = ()  # of every client
    rounds: int = 1
    participation: float = 1.0  # about this part of the clients is active in a round
    _counts: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def widths(self, job: Job, width: int) -> list[int]:
        """Return the numbers of rows that groups shrink to, where idle rows cost little: each is worth a program."""
        halved = halves(width)
        taken = self.steps_by_rows(job, halved)
        return [rows for rows in halved if rows == width or taken.get(rows, 0) >= MIN_STEPS_FOR_OWN_WIDTH * rows]

    def steps_by_rows(self, job: Job, widths: Sequence[int]) -> dict[int, int]:
        """Return the steps of clients in groups of each number of rows; the last of `widths` is a whole group's."""

        def count(examples: Sequence[int]) -> dict[int, int]:
            steps, taken = [-(-job.training.epochs * n // job.training.batch) for n in examples], Counter[int]()
            for group in in_groups(steps, widths[-1]):
                for first, last, rows in shrinking([steps[m] for m in group], widths):
                    taken[rows] += (last - first) * rows
            return taken

        taken, often = self._counted(job, (job.training.epochs, job.training.batch, *widths), count)
        return {rows: int(steps * often) for rows, steps in taken.items()}

    @cached_property
    def _largest(self) -> int:
        return max(self.examples, default=0)

    def largest_batch(self, job: Job) -> int:
        """Return the size that short batches are padded to: as a rule the same in every round, for any cohort."""
        mine = max(size for plan in job.plans for size in plan.sizes)
        return min(job.training.batch, max(mine, self._largest))

    def short_sizes(self, job: Job, width: int, most: int) -> ShortSizes:
        """Return the sizes of last batches whose steps are recorded: none if there are more than `most` sizes.

        Those that two of `width` clients share, as a rule, are recorded for groups, unless that takes more than `most`
        programs; others for one client.
        """
        batch = job.training.batch
        uses, often = self._counted(job, batch, lambda examples: Counter(n % batch for n in examples))
        if len(uses) > most:
            return ShortSizes()
        recorded = {n for n in uses if uses[n] * job.training.epochs * often >= MIN_STEPS_FOR_SHORT_BATCH}
        shared = {n for n in recorded if uses[n] * width >= 2 * uses.total()}
        if len(shared) * len(halves(width)) + len(recorded - shared) > most:
            shared = set()
        same_in_every_round = self.participation == 1.0
        return ShortSizes(recorded, recorded - shared, shared if same_in_every_round else set())

    def _counted(self, job: Job, key: object, count: Callable[[Sequence[int]], T]) -> tuple[T, float]:
        """(what is counted of the examples of those who take a task like this one, how often each of them does).

        Private examples are counted once for all jobs: with many clients it takes longer than to train the cohort.
        """
        if job.task.data != "private":  # as if the whole cohort had it: these clients may be a part of many
            active = round(self.participation * len(self.examples))
            cohort = 1 if job.clients == [SERVER] else max(len(job.clients), active)
            return count([len(job.plans[0].order) // max(1, job.training.epochs)] * cohort), float(self.rounds)
        if key not in self._counts:
            self._counts[key] = count(self.examples)
        return self._counts[key], self.rounds * (1.0 if job.clients == [SERVER] else self.participation)
