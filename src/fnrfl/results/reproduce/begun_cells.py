"""Cells that are at work: several calls, one for each GPU perhaps, may share a file of results, and then no cell."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.rundir.lock import InUse, alone, holder_of

LOOKS = 3  # at a cell that seems to be at work elsewhere: whoever counts cells has its lock for a moment


@dataclass(frozen=True)
class _LockedCell:
    """A cell of this process: its lock, how many cells were at work at its beginning, and the folder's time then."""

    locked: ExitStack
    at_once: int
    changed: int


class BegunCells:
    """The cells of a file of results that some process has begun: a locked folder beside the file for each.

    The system lets go of a lock when its process ends, however it ends: a cell of a killed process can be begun again.
    """

    def __init__(self, out: Path) -> None:
        self._folder = out.with_name(f"{out.name}.begun")
        self._mine: dict[PaperCell, _LockedCell] = {}

    def begin(self, cell: PaperCell) -> bool:
        """Take a cell for this process; False if another is at it."""
        for _ in range(LOOKS):
            with suppress(InUse, FileNotFoundError), ExitStack() as locked:  # or one that has ended it has removed it
                self._place(cell).mkdir(parents=True, exist_ok=True)
                locked.enter_context(alone(self._place(cell)))
                at_once, changed = self.count(), self._last_change()
                self._mine[cell] = _LockedCell(locked.pop_all(), at_once, changed)
                return True
            time.sleep(0.01)
        return False

    def run_dir(self, cell: PaperCell) -> Path:
        """Where the run of a long cell keeps its rounds: whoever begins the cell again goes on from there."""
        return self._place(cell) / "run"

    def end(self, cell: PaperCell) -> None:
        """Let a cell go; the rounds that its run has kept stay."""
        self._mine.pop(cell).locked.close()
        with suppress(OSError):  # another process has just begun it, or others are at work
            self._place(cell).rmdir()
            self._folder.rmdir()

    def end_all(self) -> None:
        """Let all cells of this process go."""
        for cell in list(self._mine):
            self.end(cell)

    def most_at_once(self, cell: PaperCell) -> int:
        """How many cells were at work while one was, as far as can be told: more than one if another was begun."""
        begun = self._mine[cell]
        return max(begun.at_once, self.count(), 1 if self._last_change() == begun.changed else 2)

    def count(self) -> int:
        """How many cells are at work, in all processes."""
        try:
            return sum(holder_of(place) is not None for place in self._folder.iterdir())
        except FileNotFoundError:
            return 0

    def _last_change(self) -> int:
        """When a cell was begun or ended last, by the folder's time; 0 if somebody has removed the folder."""
        try:
            return self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _place(self, cell: PaperCell) -> Path:
        return self._folder / cell.id.replace("/", " ")
