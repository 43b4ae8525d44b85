"""Cells that are still to be run, for one worker or several: who takes which, and a line on the disk after each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fnrfl.results.reproduce.begun_cells import BegunCells
from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines, append_line, is_of_today, make_room, read_lines
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.waiting import PREPARING, ExpectedSeconds, programs
from fnrfl.rundir import directory
from fnrfl.rundir.events import Event

LOOK_AHEAD = 150  # cells of the queue among which one that needs no new program is taken first
MANY_ALIKE = 100  # of a cell that runs alone: its programs do not depend on what is left, so that seconds compare
LONG_CELL = 300.0  # expected seconds of a cell from which on its rounds are kept, so that it can go on after a stop


@dataclass(frozen=True)
class CellNotice:
    """What is being done, for whoever shows it."""

    what: Literal["start", "round", "late", "done", "failed", "elsewhere"]
    cell: PaperCell
    number: int  # from 1
    total: int  # how many there were to do
    seconds_left: float  # about, for all
    line: CellLine | None = None
    event: Event | None = None


Tell = Callable[[CellNotice], None]


@dataclass(frozen=True)
class CellTurn:
    """A cell that is to be run now."""

    notice: CellNotice
    alike: int  # cells that will use what is prepared for this one; all that pays for so many is compiled
    expected_seconds: float  # beside the cells of the others that were at work when it was taken
    kept: Path | None = None  # the run directory of a long cell, which keeps its rounds or has kept some

    @property
    def cell(self) -> PaperCell:
        """The cell."""
        return self.notice.cell

    def showing(self, tell: Tell) -> Callable[[Event], None]:
        """What a run calls after each of its rounds."""
        return lambda event: tell(replace(self.notice, what="round", event=event))


def work_through(waiting: CellQueue, compute: Callable[[CellTurn], CellLine], tell: Tell) -> None:
    """Take cells from a queue until none is left for which there is time, and write the line of each."""
    ready = waiting.new_worker()
    while (turn := waiting.take(ready)) is not None:
        tell(turn.notice)
        line = compute(turn)
        waiting.finish(turn.cell, line)
        tell(replace(turn.notice, what="failed" if "failed" in line else "done", line=line))


class CellQueue:
    """Cells that are still to be run, for one worker or for several threads."""

    def __init__(
        self, cells: Sequence[PaperCell], out: Path, lines: KeptLines, seconds: float | None, again: bool,
        processes: int = 1, on_a_cpu: bool = False,
    ) -> None:  # fmt: skip
        self.out, self.done = out, list[CellLine]()
        self._cells, self._seconds = cells, seconds
        self._old_lines = len(read_lines(out)) if again and out.exists() else 0  # of these, failed ones are tried again
        self._alone, self._at_work, self._preparing = processes == 1, processes, 0.0 if on_a_cpu else PREPARING
        self._began, self._expected = time.monotonic(), ExpectedSeconds(lines, on_a_cpu)
        self._lock, self._taken = threading.Lock(), set[PaperCell]()
        self._ready: list[set[str]] = []  # programs of each worker
        self._begun = BegunCells(out)
        self.elsewhere: list[PaperCell] = []  # those that another call was at when there was nothing else to do
        self.stopped = False

    def new_worker(self) -> set[str]:
        """The programs that a worker has; the queue adds to them."""
        self._ready.append(set())
        return self._ready[-1]

    def take(self, ready: set[str]) -> CellTurn | None:
        """The next cell for a worker with these programs; None if there is none, or no time for it."""
        with self._lock:
            waiting = self._waiting()
            free = [cell for cell in waiting if cell not in self._taken]
            left = float("inf") if self._seconds is None else self._seconds - (time.monotonic() - self._began)
            cell = None if self.stopped else self._begin_one(free, left, ready)
            if cell is None:
                self._at_work = max(1, self._at_work - 1)  # whoever asked asks no more, and the others are faster
                return None
            ahead = min(left, sum(map(self.seconds, waiting)) / self._at_work)
            expected = self.seconds(cell)
            alike = MANY_ALIKE if self._alone else _how_many_alike(cell, free, left / max(1.0, expected))
            self._taken.add(cell)
            ready |= programs(cell)
            number = len(self._cells) - len(free) + 1
            notice, run_dir = CellNotice("start", cell, number, len(self._cells), ahead), self._begun.run_dir(cell)
            is_kept = run_dir.exists() or self._expected.seconds(cell) >= LONG_CELL
            return CellTurn(notice, alike, expected, run_dir if is_kept else None)

    def _waiting(self) -> list[PaperCell]:
        return _still_to_do(self._cells, self.out, self._old_lines)

    def _begin_one(self, free: Sequence[PaperCell], left: float, ready: set[str]) -> PaperCell | None:
        """The next of some cells that no other call is at."""
        others = set[str]().union(*(programs for programs in self._ready if programs is not ready))
        rest, elsewhere = list(free), list[PaperCell]()
        while (cell := choose(rest, left, ready, self.seconds, preparing=self._preparing, others=others)) is not None:
            make_room(self.out)
            if not self._begun.begin(cell):
                elsewhere.append(cell)
            elif cell in self._waiting():
                return cell
            else:  # another call has ended it in the meantime
                self._begun.end(cell)
            rest.remove(cell)
        self.elsewhere = elsewhere
        return None

    def finish(self, cell: PaperCell, line: CellLine) -> None:
        """Write a cell's line; it says how many cells were at work with it, those of other calls included."""
        with self._lock:
            self._expected.learn(line)  # as it is: those of other calls, on another GPU perhaps, are not in `seconds`
            if (at_once := self._begun.most_at_once(cell)) > line.get("processes", 1):
                line["processes"] = at_once
            append_line(self.out, line)
            self.done.append(line)
            directory.discard(self._begun.run_dir(cell))
            self._begun.end(cell)
            self._taken.discard(cell)

    def close(self) -> None:
        """Let go of cells that were begun and not finished."""
        with self._lock:
            self._begun.end_all()

    def seconds(self, cell: PaperCell) -> float:
        """About how long a cell will take beside those of the workers that have not ended."""
        return self._expected.seconds(cell) * self._at_work


def choose(
    cells: Sequence[PaperCell],
    left: float,
    ready: set[str],
    seconds: Callable[[PaperCell], float],
    *,
    preparing: float,
    others: Set[str] = frozenset(),
) -> PaperCell | None:
    """The next cell: the first that fits into the time left, but before it one that needs no program to be prepared.

    Where programs must be prepared, rather those that no other process has: each then keeps to its own.
    """
    fitting: list[tuple[bool, bool, int, PaperCell]] = []
    for cell in cells:
        missing = programs(cell) - ready
        if left == float("inf") or seconds(cell) + preparing * len(missing) <= left:
            fitting.append((bool(missing), bool(missing & others), len(fitting), cell))
        if len(fitting) == LOOK_AHEAD:
            break
    return min(fitting)[3] if fitting else None


def _still_to_do(cells: Sequence[PaperCell], out: Path, old_lines: int) -> list[PaperCell]:
    """The cells without a result in a file, which is read each time, since another process may write to it.

    A cell that has failed is done, unless it failed in the first `old_lines` lines of the file, and not since.
    """
    lines = read_lines(out) if out.exists() else []
    last, new = {line["id"]: line for line in lines}, {line["id"] for line in lines[old_lines:]}

    def is_done(cell: PaperCell) -> bool:
        line = last.get(cell.id)
        if line is None or not is_of_today(cell, line):
            return False
        return "failed" not in line or cell.id in new

    return [cell for cell in cells if not is_done(cell)]


def _how_many_alike(cell: PaperCell, others: Sequence[PaperCell], most: float) -> int:
    """How many cells will use what is prepared for this one, as far as time allows."""
    return max(1, int(min(most, sum(bool(programs(cell) & programs(other)) for other in others))))
