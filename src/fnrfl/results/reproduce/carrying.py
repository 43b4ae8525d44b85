"""Running cells: many in one process, so that they share compiled steps, with a line on the disk after each."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
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
    tell: Tell = lambda notice: None,
) -> list[CellLine]:
    """Run cells one after another and append a line to `out` after each; what was done is returned.

    A cell that has a line in `out` is not run again, so that the same call goes on where it was stopped; with `again`
    one that failed there is tried once more. A cell that fails is written down as failed, and the others go on; but
    what would fail for every cell, such as a key that does not exist or data that is not there, ends the call. With
    `seconds`, no cell is begun that will not fit into what is left of them. `words` are keys of
    [engine], for all.
    """
    refuse_other_keys(words)
    check_lines_file(out)
    began, done, expected = time.monotonic(), list[CellLine](), ExpectedSeconds(lines)
    engine = [] if words_name_engine(words) else engine_words()
    waiting, ready = list(cells), set[str]()
    while True:
        waiting = _still_to_do(waiting, out, again={line["id"] for line in done} if again else None)
        left = float("inf") if seconds is None else seconds - (time.monotonic() - began)
        cell = choose(waiting, left, ready, expected, preparing=PREPARING if engine else 0.0)
        if cell is None:
            return done
        ahead = min(left, sum(map(expected.seconds, waiting)))
        notice = CellNotice("start", cell, len(cells) - len(waiting) + 1, len(cells), ahead)
        make_room(out)
        tell(notice)
        alike = _how_many_alike(cell, waiting, left / max(1.0, expected.seconds(cell)))
        done.append(_finish(notice, out, engine if cell.scale != "tiny" else (), words, alike, tell))
        expected.learn(done[-1])
        ready |= programs(cell)


def choose(
    cells: Sequence[PaperCell], left: float, ready: set[str], expected: ExpectedSeconds, *, preparing: float
) -> PaperCell | None:
    """The next cell: the first that fits into the time left, but before it one that needs no program to be prepared."""
    fitting: list[tuple[bool, int, PaperCell]] = []
    for cell in cells:
        missing = programs(cell) - ready
        if left == float("inf") or expected.seconds(cell) + preparing * len(missing) <= left:
            fitting.append((bool(missing), len(fitting), cell))
        if len(fitting) == LOOK_AHEAD:
            break
    return min(fitting)[2] if fitting else None


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


def _finish(
    notice: CellNotice, out: Path, engine: Sequence[str], words: Sequence[str], alike: int, tell: Tell
) -> CellLine:
    """Run the cell of a notice and write its line."""
    from fnrfl.runs.run import run

    cell, began = notice.cell, time.perf_counter()

    def show(event: Event) -> None:
        tell(replace(notice, what="round", event=event))

    about: CellLine = {
        "id": cell.id,
        "recipe": cell.recipe,
        "overrides": list(cell.overrides),
        "leaks": list(cell.leaks),
    }
    about |= {"words": list(words), "date": datetime.date.today().isoformat()} | _machine()
    try:
        config = cell.config([*engine, *watch_words(cell)], words)
        result = run(
            config, out=None, progress=lambda e: tell(replace(notice, what="round", event=e)), runs_alike=alike
        )
    except ConfigError:  # a word that is wrong, or data that is not there: no cell would do
        raise
    except Exception as error:  # the others may still do
        if words and isinstance(error, CompatibilityError):  # the words may be at fault, and not the cell
            raise
        line = about | {"failed": sentence(error), "seconds_wall": round(time.perf_counter() - began, 2)}
    else:
        line = about | numbers_of(result) | {"seconds_wall": round(time.perf_counter() - began, 2)}
    append_line(out, line)
    _let_go()
    tell(replace(notice, what="failed" if "failed" in line else "done", line=line))
    return line


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
