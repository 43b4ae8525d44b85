"""Computing a cell: a run, and the line of JSON that it leaves."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnrfl.core.errors import CompatibilityError, ConfigError, sentence
from fnrfl.results.reproduce.kept_lines import CellLine
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.settings import SINGLE_SKEWS
from fnrfl.rundir.events import Event
from fnrfl.runs.metrics import training_seconds

if TYPE_CHECKING:
    from fnrfl.runs.result import Result

NOTED = ("refined", "ranking", "refined_before", "refined_after", "watched")  # notes of every round
MANY_ALIKE = 100  # cells that may share programs: which are compiled does not depend on the cells that are left
WATCHED = ("fedavg+fnr", "fedavg+weight-0", "fedavg+both-leaks-weight-0", "fedavg+both-leaks-weight-1")


@dataclass(frozen=True)
class HowToRun:
    """What all cells of a call have in common."""

    engine: tuple[str, ...]  # for cells that are not tiny
    words: tuple[str, ...]
    processes: int


def compute_line(cell: PaperCell, how: HowToRun, show: Callable[[Event], None]) -> CellLine:
    """Run a cell and return its line, which says so if it has failed."""
    from fnrfl.runs.run import run

    began = time.perf_counter()
    try:
        engine = how.engine if cell.scale != "tiny" else ()
        config = cell.config([*engine, *watch_words(cell)], how.words)
        found = numbers_of(run(config, out=None, progress=show, runs_alike=MANY_ALIKE))
    except ConfigError:  # a word that is wrong, or data that is not there: no cell would do
        raise
    except Exception as error:  # the others may still do
        if how.words and isinstance(error, CompatibilityError):  # the words may be at fault, and not the cell
            raise
        found = {"failed": sentence(error)}
    seconds = round(time.perf_counter() - began, 2)
    _let_go()
    return _about(cell, how) | found | {"seconds_wall": seconds, "memory": memory_held()}


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

    return {"device": device_name(), "torch": torch.__version__, "fnrfl": __version__}


def device_name() -> str:
    """Return the name of the GPU, or how many cores the CPU has."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"


def memory_held() -> dict[str, int]:
    """What the process holds after a cell, for the cells that follow: megabytes on the host and on the GPU."""
    import torch

    held, statm = {"process": os.getpid()}, Path("/proc/self/statm")
    if statm.exists():  # Linux
        held["host_mb"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 10**6
    if torch.cuda.is_available():
        held["gpu_mb"] = torch.cuda.memory_reserved() // 10**6
    return held


def _let_go() -> None:
    """Free what the last run held on a GPU."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
