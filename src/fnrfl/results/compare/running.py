"""Carrying a grid out: finished runs are kept, unfinished ones go on, and what fails is recorded."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
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
    from fnrfl.runs.workers import On, Workers

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
    out, tell, clock = Path(out), progress or (lambda notice: None), StopAfter(stop_after)
    runner = _Runner(cells, out, tell, passed or _nothing_passed(), callbacks, checkpoint_every, on, workers)
    members = runner.prepare()
    summaries, failures = dict[str, Summary](), dict[str, str]()
    for notice, failed in runner.turns(clock):
        cell, kept = notice.cell, notice.what == "kept"
        try:
            summary = _summary(result := runner.finish(notice, failed), chosen[1], target)
        except (Exception, SystemExit) as error:  # a full memory or disk, or a user's own code: the others may still do
            failures[cell.name] = sentence(error)
            tell(replace(notice, what="failed", error=failures[cell.name]))
        else:
            if not kept:
                members.add(cell.name)  # data that changed while the comparison went on ends it
                tell(replace(notice, what="done", event=result.rounds[-1]))
            summaries[cell.name] = summary
        if not kept:
            with suppress(OSError):  # the last table counts, and says so if it cannot be written
                write_tables(out, summarise(cells, summaries, failures, *chosen))
    found = replace(summarise(cells, summaries, failures, *chosen), folder=out)
    write_tables(out, found)
    return found


# -- what is compared --------------------------------------------------------------------------------------------------


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
        objects = passed or _nothing_passed()
        return leading_metric(build_algorithm(config, objects).personalised for config in groups.values())
    if name in {"all", *TEST_METRICS} - set(NUMBER_METRICS):
        raise ConfigError(
            f"{name} is not one number, so it cannot be compared. Choose one of {', '.join(NUMBER_METRICS)}."
        )
    first, *others = [load_custom_metrics(words) for words in dict.fromkeys(cell.config.metrics for cell in cells)]
    own = {metric.name: metric for metric in first if all(metric in other for other in others)}
    (found,) = select_metrics([name], list(own.values()), NUMBER_METRICS)
    return Metric(found, own[found].words, own[found].higher_is_better) if found in own else TEST_METRICS[found]


def _nothing_passed() -> PassedObjects:
    from fnrfl.runs.passed import NOTHING_PASSED

    return NOTHING_PASSED


def _summary(result: Result, metric: Metric, target: float | None) -> Summary:
    """The numbers of a finished run, with those of the metric and the way to the target."""
    found = result.summary()
    found |= {f"{metric.name}_last3": result.last3(metric.name), f"{metric.name}_best": result.best(metric.name)}
    if target is not None:
        got = reached(result.rounds, target, metric)
        found |= {"target": target} | {f"{key}_to_target": value for key, value in (asdict(got) if got else {}).items()}
    return found


# -- one cell after another --------------------------------------------------------------------------------------------


class StopAfter:
    """The time after which no cell begins, nor one that would not end by then, judged by the median of those done."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self.took: list[float] = []  # seconds of each cell that has ended

    def allows_one_more(self) -> bool:
        """Whether a cell may begin."""
        left = self._end - time.monotonic()
        return left > 0 and left >= (statistics.median(self.took) if self.took else 0.0)


@dataclass(frozen=True)
class _Runner:
    """Carries cells out, in this process or in others."""

    cells: Sequence[Cell]
    out: Path
    tell: Callable[[Notice], None]
    passed: PassedObjects
    callbacks: Sequence[Any]
    checkpoint_every: float
    on: On
    workers: int

    def prepare(self) -> Members:
        """Check the folder, the runs in it and every group; then write the grid. What is returned knows the runs."""
        from fnrfl.process import isolated
        from fnrfl.runs.setup.build import build
        from fnrfl.runs.workers import refuse_elsewhere

        if self.on != "here" and self.callbacks:
            raise ConfigError(
                f"Loggers and callbacks are in this process, and --on {self.on} runs in others. Leave one out."
            )
        for cell in self.cells if self.on != "here" else ():
            refuse_elsewhere(cell.config, self.passed, self.on)
        check_comparison_folder(self.out, self.cells)
        members = Members.of_cells(self.out, self.cells)
        members.refuse_changed_code()

        def check(cell: Cell) -> None:
            with isolated():
                built = build(cell.config, passed=self.passed)
            members.check(cell.name, built)

        new = [cell for cell in self.cells if not (self.out / cell.name).exists()]
        check_groups(new[:1] if self.cells[0].named else new, self.cells, check, self.tell)
        members.refuse_changed_data(self.cells, self.passed)
        self.out.mkdir(parents=True, exist_ok=True)
        write_grid(self.out, self.cells)
        return members

    def turns(self, clock: StopAfter) -> Iterator[tuple[Notice, str]]:
        """Yield the cells that are finished already, and the others as they can be; and why one failed elsewhere."""
        left = []
        for number, cell in enumerate(self._failed_last(), 1):
            notice = Notice("start", cell, number, len(self.cells))
            if is_finished(self.out / cell.name):
                self.tell(kept := replace(notice, what="kept"))
                yield kept, ""
            else:
                left.append(notice)
        if not left:
            return
        with self._begin_workers(left[0].cell.config) as workers:
            busy: dict[Any, tuple[Notice, float]] = {}
            while left or busy:
                while left and len(busy) < workers.slots() and clock.allows_one_more():
                    notice = left.pop(0)
                    self.tell(notice)
                    run = workers.submit(notice.cell.config, self.out / notice.cell.name)
                    busy[run] = notice, time.monotonic()
                if not busy:
                    return
                for run, failed in workers.finished([*busy]).items():
                    notice, began = busy.pop(run)
                    yield notice, failed
                    clock.took.append(time.monotonic() - began)

    def finish(self, notice: Notice, failed: str) -> Result:
        """Run a cell, go on with it if its folder is there, or load it if that is all that is left to do."""
        from fnrfl.runs import run as runs

        config, folder = notice.cell.config, self.out / notice.cell.name
        if failed:
            raise FnrflError(failed)
        if self.on != "here" and not is_finished(folder):
            raise FnrflError(
                f"The run has ended on another machine, and {folder} is not on this one. With "
                "--on ray, --out must be a folder that all machines share."
            )
        options: dict[str, Any] = {
            "progress": lambda event: self.tell(replace(notice, what="round", event=event)),
            "callbacks": self.callbacks,
            "checkpoint_every": self.checkpoint_every,
            "runs_alike": MANY_ALIKE if self.cells[0].named else len(self.cells),
            "passed": self.passed.used_by(config),
        }
        return runs.resume(folder, **options) if folder.exists() else runs.run(config, out=folder, **options)

    def _failed_last(self) -> list[Cell]:
        """The cells in their order, but last those that failed the time before: none of them holds up the others."""
        try:
            tree = json.loads((self.out / "comparison.json").read_text())
            failed = {failure["cell"] for failure in tree["failed"]}
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or not a whole one
            failed = set()
        return sorted(self.cells, key=lambda cell: cell.name in failed)

    def _begin_workers(self, config: RunConfig) -> AbstractContextManager[Workers]:
        """Return what begins runs; here it leaves them to `finish`."""
        from fnrfl.runs.workers import Workers, process_workers, ray_workers

        if self.on == "ray":
            return ray_workers(config, self.checkpoint_every)
        if self.on == "processes":
            return process_workers(self.workers, self.checkpoint_every)
        return nullcontext(Workers(lambda: 1, lambda config, folder: folder, lambda runs: dict.fromkeys(runs, "")))


def check_groups(
    new: Sequence[Cell], cells: Sequence[Cell], check: Callable[[Cell], None], tell: Callable[[Notice], None]
) -> None:
    """Check a new cell of every group before the first starts; the other seeds differ in their draws alone.

    Each problem is told once, with the groups that have it.
    """
    firsts = {cell.group.label: cell for cell in reversed(new)}
    problems: dict[str, list[str]] = {}
    for number, cell in enumerate(cells, 1):
        if firsts.get(cell.group.label) is not cell:
            continue
        tell(Notice("check", cell, number, len(cells)))
        try:
            check(cell)
        except Exception as error:
            problems.setdefault(sentence(error), []).append(cell.group.label)
    if problems:
        raise ConfigError(" ".join(f"{'; '.join(labels)}: {what}" for what, labels in problems.items()))


# -- what it would take ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedRun:
    """One run of a grid: how much of it is there, and how long the rest takes."""

    cell: Cell
    state: Literal["new", "begun", "finished"]
    rounds_done: int  # that need not be repeated
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
    from fnrfl.runs.forecast import forecast

    check_judged(cells, baseline, metric, target)
    check_comparison_folder(Path(out), cells)
    Members.of_cells(Path(out), cells)
    planned = [_as_planned(cell, Path(out) / cell.name) for cell in cells]
    whole: dict[str, float] = {}  # seconds of a run, by group

    def time_one(cell: Cell) -> None:
        if not missing(cell.config):
            whole[cell.group.label] = forecast(cell.config).seconds

    new = [run.cell for run in planned if run.state != "finished"]
    check_groups(new, cells, time_one, progress or (lambda notice: None))
    return [
        replace(run, seconds=whole[label] * (run.cell.config.rounds - run.rounds_done) / run.cell.config.rounds)
        if run.state != "finished" and (label := run.cell.group.label) in whole
        else run
        for run in planned
    ]


def _as_planned(cell: Cell, folder: Path) -> PlannedRun:
    """How far a run is; its time is known if nothing is left of it."""
    if not folder.exists():
        return PlannedRun(cell, "new", 0, None)
    state: Literal["begun", "finished"] = "finished" if is_finished(folder) else "begun"
    done = 0
    with suppress(FnrflError, OSError):  # whoever goes on with it will say what is wrong
        if saved := read_index(folder):
            done = saved.round  # a rule may have ended it early
    return PlannedRun(cell, state, done, 0.0 if state == "finished" else None)
