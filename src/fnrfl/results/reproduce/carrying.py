"""Running the cells of tables that have no result yet, one after another or several beside each other."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fnrfl.core.errors import ConfigError
from fnrfl.results.reproduce.cell_lines import HowToRun, compute_line, device_name
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
from fnrfl.results.reproduce.side_by_side import compute_beside
from fnrfl.rundir.lock import alone
from fnrfl.runs.notices import series_of_runs

ON_A_GPU = ("engine=gpu", "engine.precision=bf16", "engine.deterministic=false")


CellStage = Literal["start", "round", "done", "failed"]


@dataclass(frozen=True)
class CellNotice:
    """Progress of one cell, for a display."""

    what: CellStage
    cell: PaperCell
    number: int  # from 1
    total: int  # of cells without a result
    about: dict[str, Any]  # the log's event of a round, or the line of a cell that has ended


Tell = Callable[[CellNotice], None]


@series_of_runs()
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
    """Run the cells without a line in `out`, append a line after each, and return these lines.

    A cell that fails is written down as failed, and the others go on; `again` tries those that failed before. An error
    that concerns every cell, such as a key that does not exist or data that is not there, ends the call. After
    `seconds` no cell begins, and before that none whose slowest run in `lines` took longer than the time left. `words`
    are keys of [engine], for all cells. With several `processes` cells run beside each other, and their lines say so.
    Only one call at a time writes into a file.
    """
    refuse_other_keys(words)
    check_lines_file(out)
    if not (todo := without_line(cells, out, again=again)):
        return []
    how = HowToRun(() if words_name_engine(words) else tuple(engine_words()), tuple(words), processes)
    numbers, done = {cell: number for number, cell in enumerate(todo, 1)}, list[CellLine]()

    def hear(what: CellStage, cell: PaperCell, about: dict[str, Any] | None = None) -> None:
        tell(CellNotice(what, cell, numbers[cell], len(todo), about or {}))

    def compute(begun: Iterator[PaperCell]) -> Generator[tuple[PaperCell, CellLine]]:
        for cell in begun:
            yield cell, compute_line(cell, how, partial(hear, "round", cell))

    def begin() -> Iterator[PaperCell]:
        for cell in todo if seconds is None else those_in_time(todo, seconds, slowest_runs(lines, processes)):
            hear("start", cell)
            yield cell

    make_room(out)
    with _only_call(out), closing(compute(begin()) if processes == 1 else compute_beside(begin(), how)) as computed:
        for cell, line in computed:
            append_line(out, line)
            done.append(line)
            hear("failed" if "failed" in line else "done", cell, line)
    return done


@contextmanager
def _only_call(out: Path) -> Iterator[None]:
    """Refuse a second call that would write into the same file, by a locked folder beside it."""
    folder = out.with_name(f"{out.name}.lock")
    folder.mkdir(exist_ok=True)
    try:
        with alone(folder):
            yield
    finally:
        with suppress(OSError):  # another call has it
            folder.rmdir()


def without_line(cells: Sequence[PaperCell], out: Path, *, again: bool) -> list[PaperCell]:
    """Return the cells without a result in a file; one that failed there has one, unless it is tried `again`."""
    last = {line["id"]: line for line in read_lines(out)} if out.exists() else {}

    def has_line(cell: PaperCell) -> bool:
        line = last.get(cell.id)
        return line is not None and is_of_today(cell, line) and not (again and "failed" in line)

    return [cell for cell in dict.fromkeys(cells) if not has_line(cell)]


def those_in_time(cells: Sequence[PaperCell], seconds: float, slowest: Mapping[str, float]) -> Iterator[PaperCell]:
    """Yield cells until the time is over, without those whose slowest run took longer than the time left."""
    end = time.monotonic() + seconds
    for cell in cells:
        left = end - time.monotonic()
        if left > 0 and slowest.get(_without_seed(cell.id), 0.0) <= left:
            yield cell


def slowest_runs(lines: KeptLines, processes: int) -> dict[str, float]:
    """Return the longest seconds of each cell with any seed, on this device and beside as many others."""
    longest, device = dict[str, float](), device_name()
    for line in lines:
        if "failed" not in line and (line["device"], line.get("processes", 1)) == (device, processes):
            name = _without_seed(line["id"])
            longest[name] = max(longest.get(name, 0.0), line["seconds_wall"])
    return longest


def _without_seed(name: str) -> str:
    return re.sub(r"/seed\d+@", "@", name)


def engine_words() -> list[str]:
    """Return how cells are computed by default: fast on a GPU, as configured on a CPU."""
    import torch

    return list(ON_A_GPU) if torch.cuda.is_available() else []


def refuse_other_keys(words: Sequence[str]) -> None:
    """Refuse keys that would change what a cell computes: its id says that."""
    for word in words:
        if word.partition("=")[0].strip().partition(".")[0] != "engine":
            raise ConfigError(
                f'"{word}" would change what the cells are: their results would stand in tables under a wrong name. '
                "Only keys of [engine] can be set for all cells; for a run of your own, use `fnrfl run`."
            )


def words_name_engine(words: Sequence[str]) -> bool:
    """Whether one of the words chooses the engine."""
    return any(word.partition("=")[0].strip() in ("engine", "engine.name") for word in words)
