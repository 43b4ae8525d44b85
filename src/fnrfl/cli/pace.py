"""Whether it will take longer than an hour: said once, as early as it is known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fnrfl.rundir.directory import is_finished
from fnrfl.rundir.interrupt import OutputClosed

if TYPE_CHECKING:
    from fnrfl.results.compare import Cell, Notice
    from fnrfl.rundir.events import Event

T = TypeVar("T")
LONG = 3600.0  # seconds; whoever has to wait longer is told
SHORTER = "fewer rounds or client.epochs, a smaller model or less data make it shorter"
UNSURE = 60.0  # seconds; a shorter first round says little, since preparations are part of it


def duration(seconds: float) -> str:
    """Seconds in the unit that people would use."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{max(1, round(seconds))} s"


class Pace:
    """Hears how long rounds take, and says once if all that are to come take longer than an hour."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say, self.heard, self.said = say, 0, False
        self._timer: threading.Timer | None = None

    def begin(self, rounds: int) -> None:
        """The first of `rounds` rounds begins: if it is not over after that part of an hour, all take longer."""
        wait = max(UNSURE, LONG / rounds)
        words = f"the first of {rounds} rounds has taken {duration(wait)} so far, so all take more than an hour"
        self._timer = threading.Timer(wait, self._tell, [words])
        self._timer.daemon = True
        self._timer.start()

    def hear_round(self, event: Event) -> None:
        """A round of a run has ended."""
        self.judge(event["seconds"], event["rounds"] - event["round"])

    def hear_grid(self, cells: Sequence[Cell], folder: Path) -> Callable[[Notice], None]:
        """Who hears how a comparison goes on; runs that are finished when it begins take no time."""
        waiting = [cell for cell in cells if not is_finished(folder / cell.name)]
        left = {cell.name: cell.config.rounds for cell in waiting}

        def hear(notice: Notice) -> None:
            if notice.what == "start" and not self.heard and self._timer is None:
                self.begin(sum(left.values()))
            if notice.what == "round" and notice.event is not None:
                left[notice.cell.name] = notice.event["rounds"] - notice.event["round"]
                self.judge(notice.event["seconds"], sum(left.values()))
            elif notice.what in ("done", "failed"):
                left[notice.cell.name] = 0

        return hear

    def judge(self, seconds: float, left: int) -> None:
        """A round has taken `seconds`, and `left` more are to come: say so if they take longer than an hour."""
        self.end()
        self.heard += 1
        if (self.heard > 1 or seconds > UNSURE) and seconds * left > LONG:
            self._tell(f"at this pace it takes about {duration(seconds * left)} more")

    def end(self) -> None:
        """There is nothing to wait for any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, words: str) -> None:
        if not self.said:
            self.said = True
            with suppress(OutputClosed):  # the next round hears of it too, and can be saved
                self.say(f"note: {words}; {SHORTER}. Ctrl-C keeps what is done.")


def both(first: Callable[[T], object], second: Callable[[T], object]) -> Callable[[T], None]:
    """Two listeners as one."""

    def hear(what: T) -> None:
        first(what)
        second(what)

    return hear


@contextmanager
def paced(say: Callable[[str], object]) -> Iterator[Pace]:
    """A pace for as long as something runs."""
    pace = Pace(say)
    try:
        yield pace
    finally:
        pace.end()
