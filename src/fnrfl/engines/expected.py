"""How many steps of each kind a run will take: what decides whether recording and compiling them pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, TypeVar

from fnrfl.core.values import SERVER
from fnrfl.engines.groups import halves, in_groups, shrinking
from fnrfl.engines.job import Job

# Steps in all rounds of a run: with fewer, the time that a program takes to make is not won back.
MIN_STEPS_FOR_OWN_WIDTH = 500  # of a group, for a program of its number of rows; else it has idle rows
MIN_STEPS_TO_COMPILE_BESIDE = 1_000  # of clients, to compile one while a more frequent step is compiled
MIN_STEPS_FOR_SHORT_BATCH = 300  # with last batches of one size, for a program of that size

T = TypeVar("T")


def cached_for_jobs(method: Callable[..., T]) -> Callable[..., T]:
    """Compute once for all jobs alike: with many clients it takes longer than to train the active ones."""

    @wraps(method)
    def cached(self: ExpectedWork, job: Job, *args: Any) -> T:
        sizes, often = self._sizes(job)
        of_all = sizes is self.examples or (len(sizes), sizes[0])  # else all have the same
        key = (method, job.training.epochs, job.training.batch, job.training.last_batch, of_all, often, str(args))
        if key not in self._cache:
            self._cache[key] = method(self, job, *args)
        return self._cache[key]  # type: ignore[no-any-return]

    return cached


@dataclass(frozen=True)
class ExpectedWork:
    """By the examples of all clients, whoever is in the cohort: a resumed run must make the same choices."""

    examples: Sequence[int] = ()  # of every client
    rounds: int = 1
    participation: float = 1.0  # about this part of the clients is active in a round
    together: int = 0  # clients that have a task at once, where others train some of them
    _cache: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def _largest(self) -> int:
        return max(self.examples, default=0)

    def widths(self, job: Job, width: int) -> list[int]:
        """Numbers of rows that groups shrink to, where idle rows cost little: those of few steps need no program."""
        halved = halves(width)
        taken = self.steps_by_rows(job, halved)
        return [rows for rows in halved if rows == width or taken.get(rows, 0) >= MIN_STEPS_FOR_OWN_WIDTH * rows]

    @cached_for_jobs
    def steps_by_rows(self, job: Job, widths: Sequence[int]) -> dict[int, int]:
        """Steps of clients in groups of each number of rows, in all rounds; the last of `widths` is a whole group's."""
        epochs, (sizes, often) = job.training.epochs, self._sizes(job)
        steps = [-(-epochs * n // job.training.batch) for n in sizes]
        expected: dict[int, int] = {}
        for group in in_groups(steps, widths[-1]):
            for first, last, rows in shrinking([steps[m] for m in group], widths):
                expected[rows] = expected.get(rows, 0) + (last - first) * rows
        return {rows: int(taken * often) for rows, taken in expected.items()}

    def compiled_together(self, job: Job, widths: Sequence[int]) -> dict[int, int]:
        """The same, where each number of rows counts as much as the most frequent one, unless it is rare.

        Steps are compiled side by side: what takes no longer than the rest need not pay for itself.
        """
        expected = self.steps_by_rows(job, widths)
        most = max(expected.values(), default=0)
        return {rows: most if taken >= MIN_STEPS_TO_COMPILE_BESIDE else taken for rows, taken in expected.items()}

    def largest_batch(self, job: Job) -> int:
        """The size that short batches are padded to: as a rule the same in every round, whoever is in the cohort."""
        mine = max(size for plan in job.plans for size in plan.sizes)
        return min(job.training.batch, max(mine, self._largest))

    @cached_for_jobs
    def short_share(self, job: Job, width: int) -> float:
        """The share of the steps of groups in which a client has a short batch."""
        epochs, batch, (examples, _) = job.training.epochs, job.training.batch, self._sizes(job)
        if job.training.last_batch != "keep":
            return 1.0
        steps = [epochs * -(-n // batch) for n in examples]
        short = total = 0
        for group in in_groups(steps, width):
            uneven = [m for m in group if examples[m] % batch]
            short += len({step for m in uneven for step in range(steps[m] // epochs - 1, steps[m], steps[m] // epochs)})
            total += steps[group[0]]
        return short / max(1, total)

    def frequent_sizes(self, job: Job, most: int) -> set[int]:
        """Sizes of last batches that are worth a program each; none if the last batches have more than `most`."""
        uses, often = self._last_sizes(job)
        if len(uses) > most:
            return set()
        return {n for n in uses if uses[n] * job.training.epochs * often >= MIN_STEPS_FOR_SHORT_BATCH}

    def shared_sizes(self, job: Job, width: int, most: int) -> set[int]:
        """Frequent sizes that two or more of `width` clients have, as a rule; none if that takes too many programs."""
        uses, _ = self._last_sizes(job)
        frequent = self.frequent_sizes(job, most)
        shared = {n for n in frequent if uses[n] * width >= 2 * uses.total()}
        return shared if len(shared) * len(halves(width)) + len(frequent - shared) <= most else set()

    @cached_for_jobs
    def _last_sizes(self, job: Job) -> tuple[Counter[int], float]:
        """(how many clients have a last batch of each size, how often each of them trains)."""
        examples, often = self._sizes(job)
        return Counter(n % job.training.batch for n in examples), often

    def _sizes(self, job: Job) -> tuple[Sequence[int], float]:
        """(examples of those who take a task like this one, how often each of them does)."""
        if job.task.data != "private":
            clients = max(len(job.clients), self.together)
            return [len(job.plans[0].order) // max(1, job.training.epochs)] * clients, float(self.rounds)
        return self.examples, self.rounds * (1.0 if job.clients == [SERVER] else self.participation)


NOTHING_KNOWN = ExpectedWork()
