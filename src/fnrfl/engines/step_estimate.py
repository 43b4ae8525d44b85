"""How many steps of each kind a run will take: what decides whether recording and compiling them pays.

Estimates are by the examples of all clients, whoever is in the cohort: a resumed run must make the same choices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from fnrfl.core.values import SERVER
from fnrfl.engines.groups import ShortSizes, halves, in_groups, shrinking
from fnrfl.engines.job import Job

# Steps in all rounds of a run: with fewer, the time that a program takes to make is not won back.
MIN_STEPS_FOR_OWN_WIDTH = 500  # of a group, for a program of its number of rows; else it has idle rows
MIN_STEPS_FOR_SHORT_BATCH = 300  # with last batches of one size, for a program of that size

T = TypeVar("T")


@dataclass(frozen=True)
class StepEstimate:
    """The numbers that estimates are made of."""

    examples: Sequence[int] = ()  # of every client
    rounds: int = 1
    participation: float = 1.0  # about this part of the clients is active in a round
    _counts: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def widths(self, job: Job, width: int) -> list[int]:
        """Return the numbers of rows that groups shrink to, where idle rows cost little: each is worth a program."""
        halved = halves(width)
        taken = self.steps_by_rows(job, halved)
        return [rows for rows in halved if rows == width or taken.get(rows, 0) >= MIN_STEPS_FOR_OWN_WIDTH * rows]

    def most_frequent(self, job: Job, widths: Sequence[int]) -> int:
        """Return the steps of clients in groups of the most frequent number of rows.

        Steps are compiled side by side: what takes no longer than the rest need not pay for itself.
        """
        return max(self.steps_by_rows(job, widths).values(), default=0)

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

    @property
    def _cohort_size(self) -> int:
        return round(self.participation * len(self.examples))

    @cached_property
    def _largest(self) -> int:
        return max(self.examples, default=0)

    def largest_batch(self, job: Job) -> int:
        """Return the size that short batches are padded to: as a rule the same in every round, for any cohort."""
        mine = max(size for plan in job.plans for size in plan.sizes)
        return min(job.training.batch, max(mine, self._largest))

    def frequent_sizes(self, job: Job, most: int) -> set[int]:
        """Return the sizes of last batches that are worth a program each; none if there are more than `most` sizes."""
        uses, often = self._last_sizes(job)
        if len(uses) > most:
            return set()
        return {n for n in uses if uses[n] * job.training.epochs * often >= MIN_STEPS_FOR_SHORT_BATCH}

    def short_sizes(self, job: Job, width: int, most: int) -> ShortSizes:
        """Return the sizes of last batches whose steps are recorded.

        Those that two of `width` clients share, as a rule, are recorded for groups, unless that takes more than `most`
        programs; others for one client.
        """
        uses, _ = self._last_sizes(job)
        frequent = self.frequent_sizes(job, most)
        shared = {n for n in frequent if uses[n] * width >= 2 * uses.total()}
        shared = shared if len(shared) * len(halves(width)) + len(frequent - shared) <= most else set()
        same_in_every_round = self.participation == 1.0
        return ShortSizes(frequent, frequent - shared, shared if same_in_every_round else set())

    def _last_sizes(self, job: Job) -> tuple[Counter[int], float]:
        """(how many clients have a last batch of each size, how often each of them trains)."""
        batch = job.training.batch
        return self._counted(job, batch, lambda examples: Counter(n % batch for n in examples))

    def _counted(self, job: Job, key: object, count: Callable[[Sequence[int]], T]) -> tuple[T, float]:
        """(what is counted of the examples of those who take a task like this one, how often each of them does).

        Private examples are counted once for all jobs: with many clients it takes longer than to train the cohort.
        """
        if job.task.data != "private":  # as if the whole cohort had it: these clients may be a part of many
            cohort = 1 if job.clients == [SERVER] else max(len(job.clients), self._cohort_size)
            return count([len(job.plans[0].order) // max(1, job.training.epochs)] * cohort), float(self.rounds)
        if key not in self._counts:
            self._counts[key] = count(self.examples)
        return self._counts[key], self.rounds * (1.0 if job.clients == [SERVER] else self.participation)


NO_ESTIMATE = StepEstimate()
