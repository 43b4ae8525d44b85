"""Computing the cells that have no result, with the package's own grid runner: a line of JSON for each."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import fnrfl
from reproduction.catalogue import Cell
from reproduction.store import Results, append_line

if TYPE_CHECKING:
    from fnrfl import Result

ON_A_GPU = ("engine=gpu", "engine.precision=bf16", "engine.deterministic=false")  # cells give way to none of these
NOTED = ("refined", "ranking", "refined_before", "refined_after", "watched")  # notes of every round
UNTRAINED = ("evaluate", "observe")  # phases that are no part of training
NEVER = 1e9  # seconds until a checkpoint: a cell that is stopped begins anew, so that its seconds are a measure


def missing_cells(cells: Iterable[Cell], results: Results) -> list[Cell]:
    """Return the cells to run: those without a result, and those that failed on this machine."""
    found = {cell: results.find(cell) for cell in cells}
    return [
        cell
        for cell, line in found.items()
        if not line.usable and not (line.state == "failed" and cell.id in results.committed)
    ]


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    stop_after: float | None = None,
    on: Literal["here", "processes"] = "here",
    workers: int = 1,
    say: Callable[[str], object] = print,
) -> int:
    """Run cells of one scale, add a line to `out` after each, and return how many failed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    named, began = {cell.id.replace("/", " ").replace("@", " "): cell for cell in cells}, dict[str, float]()
    beside = {"processes": workers} if on != "here" and workers > 1 else {}

    def hear(notice: Any) -> None:
        name = notice.cell.group.label
        if name in named and notice.what == "start":
            began[name] = time.monotonic()
        elif name in named and notice.what in ("done", "failed"):
            line = _about(named[name]) | beside | {"seconds_wall": round(time.monotonic() - began[name], 2)}
            failed = notice.what == "failed"
            line |= {"failed": notice.error} if failed else numbers_of(fnrfl.load(folder / notice.cell.name))
            append_line(out, line)
            told = f"failed: {notice.error}" if failed else f"accuracy {line['accuracy']:.4f}"
            say(f"{notice.number}/{notice.total}  {line['id']}  {told}{'  leak' if named[name].leaks else ''}")

    with tempfile.TemporaryDirectory(dir=out.parent, prefix="cells-") as scratch:
        folder = Path(scratch) / "cells"
        found = fnrfl.compare(
            cells[0].recipe,
            cells={name: [*_engine(cell), *cell.logged, *cell.overrides] for name, cell in named.items()},
            out=folder,
            progress=hear,
            checkpoint_every=NEVER,
            on=on,
            workers=workers,
            stop_after=stop_after,
        )
    if found.left:
        say(f"{found.left} cells would not have ended in time. To go on, give the same command again.")
    return len(found.failed)


def _engine(cell: Cell) -> Sequence[str]:
    """Return how a cell is computed: fast on a GPU, as configured on a CPU."""
    import torch

    return ON_A_GPU if torch.cuda.is_available() and cell.scale != "tiny" else ()


def _about(cell: Cell) -> dict[str, Any]:
    import torch

    return {
        "id": cell.id,
        "recipe": cell.recipe,
        "overrides": list(cell.overrides),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "fnrfl": fnrfl.__version__,
    }


def numbers_of(result: Result) -> dict[str, Any]:
    """Return the numbers of a run that tables, claims and figures are made of."""
    rounds, engine, config = result.rounds, result.config.engine, result.config
    only_clean = config.fnr is not None and config.leaks.clean_test_for_fnr
    both = "feature-noise" in config.scenario and not only_clean  # scored on clean and on noisy images
    clean = [event["accuracy_clean" if both else "accuracy"] for event in rounds]
    phases = {phase: sum(e["seconds"].get(phase, 0.0) for e in rounds) for e in rounds for phase in e["seconds"]}
    spent = [sum(s for phase, s in event["seconds"].items() if phase not in UNTRAINED) for event in rounds]
    last = rounds[-1]
    notes = {name: [event.get(name) for event in rounds] for name in NOTED if name in last}
    return {
        "leaks": list(config.leaks_on),
        "accuracy": result.accuracy,
        "accuracy_last3": result.accuracy_last3,
        "accuracies": [event["accuracy"] for event in rounds],
        "clean": clean[-1],
        "noisy": last["accuracy"] if both else None,
        "cleans": clean if both else None,  # else the accuracies
        "per_class": result.per_class,
        "validation": [event["validation_accuracy"] for event in rounds],
        "seconds": {phase: round(seconds, 3) for phase, seconds in phases.items()},
        "seconds_train": result.seconds_train,
        "seconds_preparing": round(sum(event["seconds_preparing"] for event in rounds), 2),
        "seconds_of_rounds": [round(seconds, 3) for seconds in spent],
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "bytes": last["bytes"],  # of the last round
        "notes": _rounded(notes | ({"norms": last["norms"]} if "norms" in last else {})),  # norms after the last round
        "model_sha256": result.model_sha256,
        "engine": {"name": engine.name, "precision": engine.precision, "deterministic": engine.deterministic},
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 5) if isinstance(value, float) else value
