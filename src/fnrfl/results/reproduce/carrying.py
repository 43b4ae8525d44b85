"""Running cells: many in a process, so that they share compiled steps, or in several processes beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.results.reproduce.cell_lines import HowToRun, compute_line
from fnrfl.results.reproduce.cell_queue import CellNotice, CellQueue, Tell, work_through
from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines, check_lines_file
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.side_by_side import work_side_by_side
from fnrfl.runs.told_once import series_of_runs

ON_A_GPU = ("engine=gpu", "engine.precision=bf16", "engine.deterministic=false")


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
    """Run cells and append a line to `out` after each; what was done is returned.

    A cell that has a line in `out` is not run again, so that the same call goes on where it was stopped, and a long one
    goes on after the rounds that it has kept; with `again` one that failed there is tried once more. A cell that fails
    is written down as failed, and the others go on; but what would fail for every cell, such as a key that does not
    exist or data that is not there, ends the call. With `seconds`, no cell is begun that will not fit into what is left
    of them. `words` are keys of [engine], for all. With several `processes` cells run beside each other, and their
    lines say so. Several calls may share `out`: a cell that another one is at is left to it.
    """
    import torch

    refuse_other_keys(words)
    check_lines_file(out)
    engine = [] if words_name_engine(words) else engine_words()
    waiting = CellQueue(cells, out, lines, seconds, again, processes, on_a_cpu=not torch.cuda.is_available())
    how = HowToRun(tuple(engine), tuple(words), processes)
    with closing(waiting):
        if processes == 1:
            compute = lambda turn: compute_line(turn.cell, how, turn.alike, turn.showing(tell), turn.kept)  # noqa: E731
            work_through(waiting, compute, tell)
        else:
            work_side_by_side(waiting, how, tell)
    for cell in waiting.elsewhere:
        tell(CellNotice("elsewhere", cell, len(waiting.done), len(cells), 0.0))
    return waiting.done


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
