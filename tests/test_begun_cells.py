"""Several calls that share a file of results: each cell is run by one of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fnrfl.core.errors import ConfigError
from fnrfl.results.reproduce import carrying, cell_queue
from fnrfl.results.reproduce.begun_cells import BegunCells
from fnrfl.results.reproduce.carrying import carry_out
from fnrfl.results.reproduce.cell_lines import HowToRun, failed_line
from fnrfl.results.reproduce.cell_queue import CellNotice, CellQueue
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


def test_what_another_call_has_tried_again_is_not_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, tried = tmp_path / "lines.jsonl", list[PaperCell]()

    def compute(cell: PaperCell, *_: Any) -> CellLine:
        tried.append(cell)
        if len(tried) == 1:  # meanwhile another call tries the second one
            append_line(out, made_line(CELLS[1]))
        return made_line(cell)

    monkeypatch.setattr(carrying, "compute_line", compute)
    for cell in CELLS:
        append_line(out, made_line(cell))
    carry_out(CELLS, out, lines=KeptLines([], []), again=True)
    assert tried == [CELLS[0], CELLS[2]]


def test_the_time_that_a_cell_took_beside_those_of_other_calls_is_expected_of_the_next(tmp_path: Path) -> None:
    """It was not divided among them: they may be on other GPUs."""
    out = tmp_path / "lines.jsonl"
    other, waiting = BegunCells(out), CellQueue(CELLS[:2], out, KeptLines([], []), None, False)
    assert other.begin(CELLS[2])
    turn = waiting.take(waiting.new_worker())
    assert turn is not None
    line = made_line(turn.cell) | {"seconds_wall": 100.0, "seconds_preparing": 0.0}
    del line["failed"]
    waiting.finish(turn.cell, line)
    other.end_all()
    assert line["processes"] == 2 and waiting.seconds(turn.cell) == 100.0


def test_a_result_is_kept_if_somebody_has_removed_the_locked_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(cell: PaperCell, *_: Any) -> CellLine:
        shutil.rmtree(tmp_path / "lines.jsonl.begun")
        return made_line(cell)

    monkeypatch.setattr(carrying, "compute_line", compute)
    assert len(carry_out(CELLS, tmp_path / "lines.jsonl", lines=KeptLines([], []))) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


def test_a_queue_that_is_closed_waits_for_a_line_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, writing, may_write = tmp_path / "lines.jsonl", threading.Event(), threading.Event()
    waiting, done = CellQueue(CELLS, out, KeptLines([], []), None, False), list[CellLine]()
    turn = waiting.take(waiting.new_worker())
    assert turn is not None

    def slowly(path: Path, line: CellLine) -> None:
        writing.set()
        assert may_write.wait(60)
        append_line(path, line)

    def finish() -> None:
        waiting.finish(turn.cell, made_line(turn.cell))
        done.extend(waiting.done)

    monkeypatch.setattr(cell_queue, "append_line", slowly)
    finishing, closing = threading.Thread(target=finish), threading.Thread(target=waiting.close)
    finishing.start()
    assert writing.wait(60)
    closing.start()
    closing.join(0.2)
    may_write.set()
    finishing.join()
    closing.join()
    assert len(done) == 1


def test_a_folder_in_which_nothing_can_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the file in it can be written."""
    out = tmp_path / "lines.jsonl"
    append_line(out, made_line(CELLS[1]))
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    with pytest.raises(ConfigError, match=f"^{tmp_path} cannot be written. Choose another file with --out"):
        carry_out(CELLS[:1], out, lines=KeptLines([], []))


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
    heard: list[CellNotice] = []
    carry_out(CELLS[:1], out, lines=KeptLines([], []), tell=heard.append)
    assert not heard  # nobody is at it any more
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
