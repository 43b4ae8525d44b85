"""Several calls that share a file of results: each cell is run by one of them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fnrfl.results.reproduce import carrying
from fnrfl.results.reproduce.begun_cells import BegunCells
from fnrfl.results.reproduce.carrying import carry_out
from fnrfl.results.reproduce.cell_lines import HowToRun, failed_line
from fnrfl.results.reproduce.cell_queue import CellNotice
from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines, append_line, read_lines
from fnrfl.results.reproduce.paper_cells import PaperCell

pytest.importorskip("fcntl")

CELLS = [PaperCell("resnet18", "label", "honest", method, 0, "tiny") for method in ("fedavg", "fedprox", "moon")]
HOW = HowToRun((), (), 1)


def made_line(cell: PaperCell, *_: Any) -> CellLine:
    """A line of a cell, without its run."""
    return failed_line(cell, HOW, "Not run, for a test.")


class Call(threading.Thread):
    """A call in which a cell waits until it is told to end."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out, self.begun, self.may_end = out, threading.Event(), threading.Event()

    def run(self) -> None:
        carry_out(CELLS[:1], self.out, lines=KeptLines([], []))

    def compute(self, cell: PaperCell, *_: Any) -> CellLine:
        if threading.current_thread() is self:
            self.begun.set()
            assert self.may_end.wait(60)
        return made_line(cell)


def test_a_cell_that_another_call_is_at_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, heard = Call(tmp_path / "lines.jsonl"), list[CellNotice]()
    monkeypatch.setattr(carrying, "compute_line", first.compute)
    first.start()
    try:
        assert first.begun.wait(60)
        done = carry_out(CELLS, first.out, lines=KeptLines([], []), tell=heard.append)
    finally:
        first.may_end.set()
        first.join()
    assert [line["id"] for line in done] == [cell.id for cell in CELLS[1:]]
    assert [notice.cell for notice in heard if notice.what == "elsewhere"] == CELLS[:1]
    lines = read_lines(first.out)
    assert sorted(line["id"] for line in lines) == sorted(cell.id for cell in CELLS)
    assert {line["processes"] for line in lines} == {2}  # each call had one process, and knew of the other
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


def test_a_call_alone_says_nothing_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "compute_line", made_line)
    done = carry_out(CELLS, tmp_path / "lines.jsonl", lines=KeptLines([], []))
    assert len(done) == 3 and not any("processes" in line for line in done)


def test_a_cell_that_another_call_has_just_ended_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no line when it was chosen, and nobody has it when it is begun."""
    out, begin = tmp_path / "lines.jsonl", BegunCells.begin

    def late(begun: BegunCells, cell: PaperCell) -> bool:
        if cell == CELLS[0]:
            append_line(out, made_line(cell))
        return begin(begun, cell)

    monkeypatch.setattr(BegunCells, "begin", late)
    monkeypatch.setattr(carrying, "compute_line", made_line)
    carry_out(CELLS, out, lines=KeptLines([], []))
    assert [line["id"] for line in read_lines(out)] == [cell.id for cell in CELLS]


def test_a_cell_of_a_killed_process_can_be_begun_again(tmp_path: Path) -> None:
    out, cell = tmp_path / "lines.jsonl", CELLS[0]
    program = (
        "import sys, time; from pathlib import Path; from fnrfl.results.reproduce.begun_cells import BegunCells; "
        "from fnrfl.results.reproduce.paper_cells import PaperCell; "
        "begun = BegunCells(Path(sys.argv[1])); "
        "print(begun.begin(PaperCell.read(sys.argv[2])), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(out), cell.id]
    begun = BegunCells(out)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "True\n"
            assert not begun.begin(cell) and begun.count() == 1
        finally:
            other.send_signal(signal.SIGKILL)
    assert begun.count() == 0 and begun.begin(cell) and begun.count() == 1
    begun.end(cell)
    assert not list(tmp_path.iterdir())


def test_what_a_failed_call_has_begun_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> CellLine:
        raise KeyboardInterrupt

    monkeypatch.setattr(carrying, "compute_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carry_out(CELLS, tmp_path / "lines.jsonl", lines=KeptLines([], []))
    assert not list(tmp_path.iterdir())
