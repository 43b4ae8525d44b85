"""Running cells: many in a process, so that they share compiled steps, with a line on the disk after each."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fnrfl.core.errors import CompatibilityError, ConfigError, sentence
from fnrfl.results.reproduce.kept_lines import (
    CellLine,
    KeptLines,
    append_line,
    check_lines_file,
    is_of_today,
    make_room,
    read_lines,
)
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.paper_tables import SINGLE_SKEWS
from fnrfl.results.reproduce.waiting import PREPARING, ExpectedSeconds, programs
from fnrfl.rundir.events import Event
from fnrfl.runs.metrics import training_seconds

if TYPE_CHECKING:
    from fnrfl.runs.result import Result

ON_A_GPU = ("engine=gpu", "engine.precision=bf16", "engine.deterministic=false")
LOOK_AHEAD = 40  # cells of the queue among which one that needs no new program is taken first
NOTED = ("refined", "ranking", "refined_before", "refined_after", "watched")  # notes of every round
WATCHED = ("fedavg+fnr", "fedavg+weight-0", "fedavg+both-leaks-weight-0", "fedavg+both-leaks-weight-1")


@dataclass(frozen=True)
class CellNotice:
    """What is being done, for whoever shows it."""

    what: Literal["start", "round", "done", "failed"]
    cell: PaperCell
    number: int  # from 1
    total: int  # how many there were to do
    seconds_left: float  # about, for all
    line: CellLine | None = None
    event: Event | None = None


Tell = Callable[[CellNotice], None]


def carry_out(
    cells: Sequence[PaperCell],
    out: Path,
    *,
    lines: KeptLines,
    seconds: float | None = None,
    words: Sequence[str] = (),
    again: bool = False,
    processes: int = 1,
    tell: Tell = lambda notice: None,
) -> list[CellLine]:
    """Run cells and append a line to `out` after each; what was done is returned.

    A cell that has a line in `out` is not run again, so that the same call goes on where it was stopped; with `again`
    one that failed there is tried once more. A cell that fails is written down as failed, and the others go on; but
    what would fail for every cell, such as a key that does not exist or data that is not there, ends the call. With
    `seconds`, no cell is begun that will not fit into what is left of them. `words` are keys of
    [engine], for all. With several `processes` cells run beside each other, and their lines say so.
    """
    refuse_other_keys(words)
    check_lines_file(out)
    engine = [] if words_name_engine(words) else engine_words()
    waiting = CellQueue(cells, out, lines, seconds, again, processes, PREPARING if engine else 0.0)
    how = HowToRun(tuple(engine), tuple(words), processes)
    if processes == 1:
        work_through(waiting, lambda turn: compute_line(turn.cell, how, turn.alike, turn.showing(tell)), tell)
    else:
        from fnrfl.results.reproduce.side_by_side import work_side_by_side

        work_side_by_side(waiting, how, tell)
    return waiting.done


@dataclass(frozen=True)
class HowToRun:
    """What all cells of a call have in common."""

    engine: tuple[str, ...]  # for cells that are not tiny
    words: tuple[str, ...]
    processes: int


@dataclass(frozen=True)
class Turn:
    """A cell that is to be run now."""

    notice: CellNotice
    alike: int  # cells that will use what is prepared for this one

    @property
    def cell(self) -> PaperCell:
        """The cell."""
        return self.notice.cell

    def showing(self, tell: Tell) -> Callable[[Event], None]:
        """What a run calls after each of its rounds."""
        return lambda event: tell(replace(self.notice, what="round", event=event))


def work_through(waiting: CellQueue, compute: Callable[[Turn], CellLine], tell: Tell) -> None:
    """Take cells from a queue until none is left for which there is time, and write the line of each."""
    ready = waiting.new_worker()
    while (turn := waiting.take(ready)) is not None:
        make_room(waiting.out)
        tell(turn.notice)
        line = compute(turn)
        waiting.finish(turn.cell, line)
        tell(replace(turn.notice, what="failed" if "failed" in line else "done", line=line))


class CellQueue:
    """Cells that are still to be run, for one worker or for several threads."""

    def __init__(
        self, cells: Sequence[PaperCell], out: Path, lines: KeptLines, seconds: float | None, again: bool,
        processes: int = 1, preparing: float = 0.0,
    ) -> None:  # fmt: skip
        self.out, self.done = out, list[CellLine]()
        self._cells, self._seconds, self._again = cells, seconds, again
        self._processes, self._preparing = processes, preparing
        self._began, self._expected = time.monotonic(), ExpectedSeconds(lines)
        self._lock, self._taken = threading.Lock(), set[PaperCell]()
        self._ready: list[set[str]] = []  # programs of each worker
        self.stopped = False

    def new_worker(self) -> set[str]:
        """The programs that a worker has; the queue adds to them."""
        self._ready.append(set())
        return self._ready[-1]

    def take(self, ready: set[str]) -> Turn | None:
        """The next cell for a worker with these programs; None if there is none, or no time for it."""
        with self._lock:
            tried = {line["id"] for line in self.done} if self._again else None
            waiting = _still_to_do(self._cells, self.out, again=tried)
            free = [cell for cell in waiting if cell not in self._taken]
            left = float("inf") if self._seconds is None else self._seconds - (time.monotonic() - self._began)
            others = set[str]().union(*(programs for programs in self._ready if programs is not ready))
            cell = choose(free, left, ready, self.seconds, preparing=self._preparing, others=others)
            if cell is None or self.stopped:
                return None
            ahead = min(left, sum(map(self.seconds, waiting)) / self._processes)
            alike = _how_many_alike(cell, free, left / max(1.0, self.seconds(cell)))
            self._taken.add(cell)
            ready |= programs(cell)
            number = len(self._cells) - len(free) + 1
            return Turn(CellNotice("start", cell, number, len(self._cells), ahead), alike)

    def finish(self, cell: PaperCell, line: CellLine) -> None:
        """Write a cell's line."""
        with self._lock:
            append_line(self.out, line)
            self.done.append(line)
            self._expected.learn(line)
            self._taken.discard(cell)

    def seconds(self, cell: PaperCell) -> float:
        """About how long a cell will take beside the others."""
        return self._expected.seconds(cell) * self._processes


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


def engine_words() -> list[str]:
    """How cells are computed unless somebody says otherwise: fast on a GPU, as it is configured on a CPU."""
    import torch

    return list(ON_A_GPU) if torch.cuda.is_available() else []


def refuse_other_keys(words: Sequence[str]) -> None:
    """What a cell computes is said by its id; how it is computed may be chosen."""
    for word in words:
        if word.partition("=")[0].strip().partition(".")[0] != "engine":
            raise ConfigError(
                f'"{word}" would change what the cells are: their results would stand in tables under a wrong name. '
                "Only keys of [engine] can be set for all cells; for a run of your own, use `fnrfl run`."
            )


def words_name_engine(words: Sequence[str]) -> bool:
    """Whether somebody has chosen the engine."""
    return any(word.partition("=")[0].strip() in ("engine", "engine.name") for word in words)


def _still_to_do(cells: Sequence[PaperCell], out: Path, again: set[str] | None) -> list[PaperCell]:
    """Those without a result in a file, which is read each time, since another process may write to it.

    A cell that has failed is done, unless `again` says which ones have been tried again since: then all others are not.
    """
    written = {line["id"]: line for line in read_lines(out)} if out.exists() else {}

    def is_done(cell: PaperCell) -> bool:
        line = written.get(cell.id)
        if line is None or not is_of_today(cell, line):
            return False
        return "failed" not in line or again is None or cell.id in again

    return [cell for cell in cells if not is_done(cell)]


def _how_many_alike(cell: PaperCell, others: Sequence[PaperCell], most: float) -> int:
    """How many cells will use what is prepared for this one, as far as time allows."""
    return max(1, int(min(most, sum(bool(programs(cell) & programs(other)) for other in others))))


def compute_line(cell: PaperCell, how: HowToRun, alike: int, show: Callable[[Event], None]) -> CellLine:
    """Run a cell: its line, which says so if it has failed."""
    from fnrfl.runs.run import run

    began = time.perf_counter()
    try:
        engine = how.engine if cell.scale != "tiny" else ()
        config = cell.config([*engine, *watch_words(cell)], how.words)
        result = run(config, out=None, progress=show, runs_alike=alike)
    except ConfigError:  # a word that is wrong, or data that is not there: no cell would do
        raise
    except Exception as error:  # the others may still do
        if how.words and isinstance(error, CompatibilityError):  # the words may be at fault, and not the cell
            raise
        line = failed_line(cell, how, sentence(error))
    else:
        line = _about(cell, how) | numbers_of(result)
    line["seconds_wall"] = round(time.perf_counter() - began, 2)
    _let_go()
    return line


def failed_line(cell: PaperCell, how: HowToRun, why: str) -> CellLine:
    """The line of a cell that has no numbers."""
    return _about(cell, how) | {"failed": why}


def _about(cell: PaperCell, how: HowToRun) -> CellLine:
    """What a line says whatever became of the cell."""
    about = {"id": cell.id, "recipe": cell.recipe, "overrides": list(cell.overrides), "leaks": list(cell.leaks)}
    about |= {"words": list(how.words), "date": datetime.date.today().isoformat()} | _machine()
    return about | ({"processes": how.processes} if how.processes > 1 else {})


def watch_words(cell: PaperCell) -> list[str]:
    """What a run is told so that it logs what claims are about; it changes no model and no other number."""
    of_claims = cell.net == "resnet18" and cell.skew in SINGLE_SKEWS and cell.method in WATCHED
    return ["fnr.watch=true"] if of_claims else []


def numbers_of(result: Result) -> CellLine:
    """The numbers of a run that tables, claims and figures are made of."""
    rounds, engine = result.rounds, result.config.engine
    clean, noisy = zip(*map(_both_scores(result), rounds), strict=True)
    return {
        "leaks": list(result.config.leaks_on),
        "accuracy": result.accuracy,
        "accuracy_last3": result.accuracy_last3,
        "accuracies": [event["accuracy"] for event in rounds],
        "clean": clean[-1],
        "noisy": noisy[-1],
        "cleans": clean if noisy[-1] is not None else None,  # else the accuracies
        "per_class": result.per_class,
        "validation": [event["validation_accuracy"] for event in rounds],
        "seconds": _by_phase(rounds),
        "seconds_train": result.seconds_train,
        "seconds_preparing": round(sum(event["seconds_preparing"] for event in rounds), 2),
        "seconds_of_rounds": [round(training_seconds(event), 3) for event in rounds],
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "bytes": rounds[-1]["bytes"],  # of the last round
        "notes": {name: _rounded([event.get(name) for event in rounds]) for name in NOTED if name in rounds[-1]}
        | ({"norms": _rounded(rounds[-1]["norms"])} if "norms" in rounds[-1] else {}),  # after the last round
        "model_sha256": result.model_sha256,
        "engine": {"name": engine.name, "precision": engine.precision, "deterministic": engine.deterministic},
    }


def _both_scores(result: Result) -> Callable[[Event], tuple[float | None, float | None]]:
    """Accuracy on clean and on noisy test images; None where a run was not scored on them."""
    config = result.config
    noise = "feature-noise" in config.scenario
    only_clean = config.fnr is not None and config.leaks.clean_test_for_fnr

    def scores(event: Event) -> tuple[float | None, float | None]:
        if noise and not only_clean:
            return event["accuracy_clean"], event["accuracy"]
        return event["accuracy"], None

    return scores


def _by_phase(rounds: Sequence[Event]) -> dict[str, float]:
    spent: dict[str, float] = {}
    for event in rounds:
        for phase, seconds in event["seconds"].items():
            spent[phase] = spent.get(phase, 0.0) + seconds
    return {phase: round(seconds, 3) for phase, seconds in spent.items()}


def _rounded(value: Any) -> Any:
    """Numbers with as many digits as are of use."""
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def _machine() -> dict[str, str]:
    import torch

    from fnrfl import __version__

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {"device": gpu or f"CPU, {os.cpu_count()} cores", "torch": torch.__version__, "fnrfl": __version__}


def _let_go() -> None:
    """Free what the last run held on a GPU."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
