"""What a comparison would take, without running it: which runs are there already, and how long the others take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fnrfl.config import RunConfig
from fnrfl.core.errors import FnrflError, sentence
from fnrfl.results.compare.belonging import Members
from fnrfl.results.compare.cells import Cell
from fnrfl.results.compare.folder import check_comparison_folder
from fnrfl.results.compare.running import Notice, check_judged, refuse_groups
from fnrfl.rundir.directory import is_finished
from fnrfl.rundir.record import read_index

RunState = Literal["new", "begun", "finished"]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a grid: how much of it is there, and how long the rest takes."""

    cell: Cell
    state: RunState
    rounds_done: int
    seconds: float | None  # still to come, an estimate; None where nothing can be timed

    def summary(self) -> dict[str, Any]:
        """The run as a JSON object."""
        return {
            "run": self.cell.name,
            "group": self.cell.group.label,
            "seed": self.cell.seed,
            "state": self.state,
            "rounds": self.cell.config.rounds,
            "rounds_done": self.rounds_done,
            "seconds_estimate": self.seconds,
            "leaks": list(self.cell.config.leaks_on),
        }


def plan_grid(
    cells: Sequence[Cell],
    out: str | Path,
    *,
    baseline: str | None = None,
    metric: str | None = None,
    target: float | None = None,
    progress: Callable[[Notice], None] | None = None,
    missing: Callable[[RunConfig], str | None] = lambda config: None,
) -> list[PlannedRun]:
    """What `compare` would do with these cells in this folder. Everything is checked, and nothing is written.

    One run of each group is timed for a few steps, since the other seeds differ in their draws alone. `missing` names
    the data set that a config lacks on this machine; such a group is not timed, because that would fetch the data.
    """
    out, tell = Path(out), progress or (lambda notice: None)
    check_judged(cells, baseline, metric, target)
    check_comparison_folder(out, cells)
    Members(out, cells)
    there = {cell.name: _found(out / cell.name, cell) for cell in cells}
    seconds: dict[str, float | None] = {}  # of a whole run, by group
    problems: dict[str, list[str]] = {}
    for number, cell in enumerate(cells, 1):
        label = cell.group.label
        if label in seconds or there[cell.name][0] == "finished":
            continue
        tell(Notice("check", cell, number, len(cells)))
        try:
            seconds[label] = None if missing(cell.config) else _forecast_seconds(cell.config)
        except Exception as error:
            seconds[label] = None
            problems.setdefault(sentence(error), []).append(label)
    refuse_groups(problems)
    return [PlannedRun(cell, *there[cell.name], _left(cell, *there[cell.name], seconds)) for cell in cells]


def _found(folder: Path, cell: Cell) -> tuple[RunState, int]:
    """(how far a run is, the rounds that need not be repeated)."""
    if not folder.exists():
        return "new", 0
    if is_finished(folder):
        return "finished", cell.config.rounds
    try:
        saved = read_index(folder)
    except (FnrflError, OSError):  # whoever goes on with it will say what is wrong
        saved = None
    return "begun", 0 if saved is None else saved.round


def _left(cell: Cell, state: RunState, done: int, seconds: dict[str, float | None]) -> float | None:
    """Seconds that a run still takes."""
    if state == "finished":
        return 0.0
    whole = seconds[cell.group.label]
    return None if whole is None else whole * (cell.config.rounds - done) / cell.config.rounds


def _forecast_seconds(config: RunConfig) -> float:
    from fnrfl.runs.forecast import forecast

    return forecast(config).seconds
