"""Carrying a grid out: finished runs are kept, unfinished ones go on, and what fails is recorded."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fnrfl.config import RunConfig
from fnrfl.core.errors import ConfigError, FnrflError, sentence
from fnrfl.results.compare.cells import Cell, Parts, find_baseline
from fnrfl.results.compare.folder import Members, check_comparison_folder, write_grid, write_tables
from fnrfl.results.compare.tables import Comparison, Summary, summarise
from fnrfl.results.statistics import reached
from fnrfl.rundir.directory import is_finished
from fnrfl.rundir.events import Event
from fnrfl.rundir.record import read_index
from fnrfl.runs.callbacks import series_of_runs
from fnrfl.runs.quality import NUMBER_METRICS, TEST_METRICS, Metric, leading_metric

if TYPE_CHECKING:
    from fnrfl.runs.passed import PassedObjects
    from fnrfl.runs.result import Result
    from fnrfl.runs.workers import On

MANY_ALIKE = 100  # cells named one by one may share programs: what is compiled does not depend on their number


@dataclass(frozen=True)
class Notice:
    """What a comparison is doing: for whoever shows it."""

    what: Literal["check", "start", "round", "done", "kept", "failed"]
    cell: Cell
    number: int  # of the cell, from 1
    total: int
    event: Event | None = None  # of a round; of the last one when it is done
    error: str = ""  # why it failed


@series_of_runs()
def compare(
    cells: Sequence[Cell],
    out: str | Path,
    *,
    baseline: str | None = None,
    metric: str | None = None,
    target: float | None = None,
    progress: Callable[[Notice], None] | None = None,
    callbacks: Sequence[Any] = (),
    checkpoint_every: float = 30.0,
    passed: PassedObjects | None = None,
    on: On = "here",
    workers: int = 2,
    stop_after: float | None = None,
) -> Comparison:
    """Run every cell into a folder of its own below `out`, one after another, and write the table beside them.

    One after another, because seconds are among the results; side by side `on` Ray, or in `workers` processes of this
    machine. No cell begins that would not end before `stop_after` seconds. Called again, finished runs are
    kept and unfinished ones go on, those that failed before last. A run that fails is recorded and the others go on.
    `baseline` names a group, or some of the words of one: "fedavg" compares each group with the one that has fedavg and
    is otherwise the same, by `metric`, or that of the methods. Nothing is written unless all groups can be built.
    """
    chosen = check_judged(cells, baseline, metric, target, passed)
    out, tell = Path(out), progress or (lambda notice: None)
    alike = MANY_ALIKE if cells[0].named else len(cells)
    clock = StopAfter(stop_after)
    how = _RunSettings(out, _objects(passed), callbacks, checkpoint_every, tell, clock, workers, alike)
    if on != "here":
        _check_elsewhere(cells, on, how)
    members = _prepare(cells, how)
    summaries, failures = dict[str, Summary](), dict[str, str]()
    for notice, finish in _turns(cells, on, how):
        cell, kept = notice.cell, notice.what == "kept"
        try:
            summary = _summary(result := finish(), chosen[1], target)
        except (Exception, SystemExit) as error:  # a full memory or disk, or a user's own code: the others may still do
            failures[cell.name] = sentence(error)
            tell(replace(notice, what="failed", error=failures[cell.name]))
        else:
            if not kept:
                members.add(cell)  # data that changed while the comparison went on ends it
                tell(replace(notice, what="done", event=result.rounds[-1]))
            summaries[cell.name] = summary
        if not kept:
            with suppress(OSError):  # the last table counts, and says so if it cannot be written
                write_tables(out, summarise(cells, summaries, failures, *chosen))
    found = replace(summarise(cells, summaries, failures, *chosen), folder=out)
    write_tables(out, found)
    return found


def check_judged(
    cells: Sequence[Cell],
    baseline: str | None,
    metric: str | None,
    target: float | None,
    passed: PassedObjects | None = None,
) -> tuple[Parts, Metric]:
    """The parts that a baseline has, and the metric, as they were named; what there is not is refused."""
    chosen = compared_metric(cells, metric, passed)
    if target is not None and not (0 <= target <= 1 if chosen.share else math.isfinite(target)):
        raise ConfigError(f"target is {target:g}; {chosen.name} is {'between 0 and 1' if chosen.share else 'finite'}.")
    return find_baseline([cell.group for cell in cells], baseline), chosen


def compared_metric(cells: Sequence[Cell], name: str | None, passed: PassedObjects | None = None) -> Metric:
    """Choose the metric that is compared: the one named, which every run must have, or what the methods lead with."""
    from fnrfl.runs.quality import load_custom_metrics, select_metrics
    from fnrfl.runs.setup.method import build_algorithm

    if name is None:
        groups = {cell.group.label: cell.config for cell in cells}
        return leading_metric(build_algorithm(one, _objects(passed)).personalised for one in groups.values())
    shared = [load_custom_metrics(words) for words in dict.fromkeys(cell.config.metrics for cell in cells)]
    own = [metric for metric in shared[0] if all(metric in others for others in shared)]
    if name in {"all", *TEST_METRICS} - set(NUMBER_METRICS):
        raise ConfigError(
            f"{name} is not one number, so it cannot be compared. Choose one of {', '.join(NUMBER_METRICS)}."
        )
    (found,) = select_metrics([name], own, NUMBER_METRICS)
    mine = next((metric for metric in own if metric.name == found), None)
    return TEST_METRICS[found] if mine is None else Metric(found, mine.words, mine.higher_is_better)


def _objects(passed: PassedObjects | None) -> PassedObjects:
    """The objects that were passed in, perhaps none."""
    from fnrfl.runs.passed import NOTHING_PASSED

    return passed or NOTHING_PASSED


def _prepare(cells: Sequence[Cell], how: _RunSettings) -> Members:
    """Check the folder, the runs in it and every group; then write the grid. What is returned knows the runs."""
    check_comparison_folder(how.out, cells)
    members = Members(how.out, cells)
    members.refuse_changed_code()
    _check_groups(cells, members, how)
    members.refuse_changed_data(how.passed)
    how.out.mkdir(parents=True, exist_ok=True)
    write_grid(how.out, cells)
    return members


def _failed_last(cells: Sequence[Cell], out: Path) -> list[Cell]:
    """The cells in their order, but last those that failed the time before: none of them holds up the others."""
    try:
        failed = {failure["cell"] for failure in json.loads((out / "comparison.json").read_text())["failed"]}
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or not a whole one
        failed = set()
    return sorted(cells, key=lambda cell: cell.name in failed)


@dataclass(frozen=True)
class _RunSettings:
    """How cells are run."""

    out: Path
    passed: PassedObjects
    callbacks: Sequence[Any]
    checkpoint_every: float
    tell: Callable[[Notice], None]
    stop_after: StopAfter
    workers: int
    runs_alike: int


class StopAfter:
    """The time after which no cell begins, nor one that would not end by then, judged by the median of those done."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._took: list[float] = []

    def allows_one_more(self) -> bool:
        """Whether a cell may begin."""
        if self._end is None:
            return True
        left = self._end - time.monotonic()
        return left > 0 and left >= (statistics.median(self._took) if self._took else 0.0)

    def add(self, seconds: float) -> None:
        """Count a cell that has ended."""
        self._took.append(seconds)


Turns = Iterator[tuple[Notice, Callable[[], "Result"]]]  # of each cell, and what gives its result or raises


def _turns(cells: Sequence[Cell], on: On, how: _RunSettings) -> Turns:
    """Yield finished cells, and the others as they come: one after another here, or as they end elsewhere."""
    notices = [
        Notice("kept" if is_finished(how.out / cell.name) else "start", cell, number, len(cells))
        for number, cell in enumerate(_failed_last(cells, how.out), 1)
    ]
    if on == "here":
        for notice in notices:
            if notice.what == "kept" or how.stop_after.allows_one_more():
                how.tell(notice)
                began = time.monotonic()
                yield notice, partial(_carry_out, notice, how)
                if notice.what == "start":
                    how.stop_after.add(time.monotonic() - began)
        return
    for notice in (notice for notice in notices if notice.what == "kept"):
        how.tell(notice)
        yield notice, partial(_carry_out, notice, how)
    if new := [notice for notice in notices if notice.what == "start"]:
        yield from _side_by_side(new, on, how)


def _side_by_side(notices: Sequence[Notice], on: On, how: _RunSettings) -> Turns:
    """Yield cells as they end in other processes."""
    from fnrfl.runs.workers import process_workers, ray_workers

    first, every, left = notices[0].cell.config, how.checkpoint_every, list(notices)
    with process_workers(how.workers, every) if on == "processes" else ray_workers(first, every) as workers:
        busy: dict[Any, tuple[Notice, float]] = {}
        while left or busy:
            while left and len(busy) < workers.slots() and how.stop_after.allows_one_more():
                notice = left.pop(0)
                how.tell(notice)
                config, folder = notice.cell.config, how.out / notice.cell.name
                busy[workers.submit(config, folder)] = notice, time.monotonic()
            if not busy:
                return
            for run, failed in workers.finished([*busy]).items():
                notice, began = busy.pop(run)
                how.stop_after.add(time.monotonic() - began)
                yield notice, partial(_from_elsewhere, notice, how, failed)


def _check_elsewhere(cells: Sequence[Cell], on: On, how: _RunSettings) -> None:
    """Refuse what cannot be carried out in another process."""
    from fnrfl.runs.workers import refuse_elsewhere

    if how.callbacks:
        raise ConfigError(f"Loggers and callbacks are in this process, and --on {on} runs in others. Leave one out.")
    for cell in cells:
        refuse_elsewhere(cell.config, how.passed, on)


def _from_elsewhere(notice: Notice, how: _RunSettings, failed: str) -> Result:
    """Return the result of a cell that has ended in another process."""
    if failed:
        raise FnrflError(failed)
    folder = how.out / notice.cell.name
    if not is_finished(folder):
        raise FnrflError(
            f"The run has ended on another machine, and {folder} is not on this one. With "
            "--on ray, --out must be a folder that all machines share."
        )
    return _carry_out(notice, how)


def _carry_out(notice: Notice, how: _RunSettings) -> Result:
    """Run the cell that a notice is about, or go on with it if its folder is there."""
    from fnrfl.runs import run as runs

    def show(event: Event) -> None:
        how.tell(replace(notice, what="round", event=event))

    config, folder = notice.cell.config, how.out / notice.cell.name
    options: dict[str, Any] = {
        "progress": show,
        "callbacks": how.callbacks,
        "checkpoint_every": how.checkpoint_every,
        "runs_alike": how.runs_alike,
        "passed": how.passed.used_by(config),
    }
    return runs.resume(folder, **options) if folder.exists() else runs.run(config, out=folder, **options)


def _summary(result: Result, metric: Metric, target: float | None) -> Summary:
    ways = {f"{metric.name}_last3": result.last3(metric.name), f"{metric.name}_best": result.best(metric.name)}
    if target is None:
        return result.summary() | ways
    got = reached(result.rounds, target, metric)
    took = {f"{key}_to_target": value for key, value in asdict(got).items()} if got else {}
    return result.summary() | ways | {"target": target} | took


def _check_groups(cells: Sequence[Cell], members: Members, how: _RunSettings) -> None:
    """Build the first run of every group that has not begun: what cannot go together is known before the first starts.

    The other seeds differ in their draws alone.
    """
    from fnrfl.process import isolated
    from fnrfl.runs.setup.build import build

    problems: dict[str, list[str]] = {}
    checked: set[str] = set()
    for number, cell in enumerate(cells, 1):
        label = cell.group.label
        if label in checked or (how.out / cell.name).exists() or (cell.named and checked):
            continue
        checked.add(label)
        how.tell(Notice("check", cell, number, len(cells)))
        try:
            with isolated():
                built = build(cell.config, passed=how.passed)
        except Exception as error:
            problems.setdefault(sentence(error), []).append(label)
        else:
            members.check(cell, built)
    refuse_groups(problems)


def refuse_groups(problems: Mapping[str, Sequence[str]]) -> None:
    """Refuse a comparison with groups that cannot be run: each problem is told once, with the groups that have it."""
    if problems:
        raise ConfigError(" ".join(f"{'; '.join(labels)}: {what}" for what, labels in problems.items()))


# -- what it would take ------------------------------------------------------------------------------------------------

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
