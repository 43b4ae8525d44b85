"""Cells in several processes: the same models as in one, whatever becomes of a process."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from multiprocessing import active_children
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fnrfl.cli.cell_runs import GO_ON, _show_cell
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.results.reproduce import side_by_side
from fnrfl.results.reproduce.carrying import carry_out
from fnrfl.results.reproduce.cell_lines import HowToRun, compute_line, failed_line
from fnrfl.results.reproduce.cell_queue import MANY_ALIKE, CellNotice, CellQueue, CellTurn
from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines, read_lines
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.side_by_side import DIED, NOT_STARTED, CellProcess
from fnrfl.runs import run as runs

NOTHING = KeptLines([], [])
CELLS = [
    PaperCell("resnet18", "label", setting, method, 0, "tiny")
    for setting, method in (("honest", "fedavg"), ("honest", "fedprox"), ("paper", "fedavg+fnr"))
]

TURN = CellTurn(CellNotice("start", CELLS[0], 1, 1, 0.0), 1, 1.0)


def carried(out: Path, processes: int, **more: Any) -> dict[str, CellLine]:
    """The lines of the cells, by id."""
    carry_out(CELLS, out, lines=NOTHING, processes=processes, **more)
    return {line["id"]: line for line in read_lines(out)}


def test_two_processes_make_the_models_of_one_and_say_that_they_were_two(tmp_path: Path) -> None:
    heard: list[CellNotice] = []
    before = set(active_children())  # of other tests
    alone, beside = carried(tmp_path / "a.jsonl", 1), carried(tmp_path / "b.jsonl", 2, tell=heard.append)
    assert alone.keys() == beside.keys() == {cell.id for cell in CELLS}
    for name, line in alone.items():
        for number in ("model_sha256", "accuracies", "bytes_up", "leaks", "notes"):
            assert beside[name][number] == line[number]
    assert {line.get("processes") for line in alone.values()} == {None}
    assert {line["processes"] for line in beside.values()} == {2}
    assert sorted(notice.number for notice in heard if notice.what == "start") == [1, 2, 3]
    assert {notice.cell for notice in heard if notice.what == "done"} == set(CELLS)
    assert set(active_children()) <= before


@pytest.mark.parametrize(("processes", "compared"), [(1, True), (3, False)])
def test_cells_beside_others_do_not_wait_for_the_compiler(
    processes: int, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []

    def run(config: Any, **given: Any) -> None:
        told.append(given)
        raise FnrflError("It is enough.")

    monkeypatch.setattr(runs, "run", run)
    compute_line(CELLS[0], HowToRun((), (), processes), 7, lambda event: None)
    assert [(given["runs_alike"], given["compared"]) for given in told] == [(7, compared)]


@pytest.mark.slow
def test_what_would_fail_for_every_cell_ends_the_call_in_the_same_words(tmp_path: Path) -> None:
    said, before = [], set(active_children())
    for processes in (1, 2):
        with pytest.raises(ConfigError) as error:
            carried(tmp_path / "lines.jsonl", processes, words=["engine.thread=1"])
        said.append(str(error.value))
    assert said[0] == said[1] and "engine.thread" in said[0]
    assert not (tmp_path / "lines.jsonl").exists() and set(active_children()) <= before


def test_no_two_workers_take_one_cell_and_none_a_cell_without_time(tmp_path: Path) -> None:
    waiting = CellQueue(CELLS, tmp_path / "lines.jsonl", NOTHING, None, False, processes=3, on_a_cpu=True)
    workers = [waiting.new_worker() for _ in range(3)]
    turns = [waiting.take(worker) for worker in (*workers, *workers)]
    assert {turn.cell for turn in turns if turn is not None} == set(CELLS)
    assert turns[len(CELLS) :] == [None] * 3
    late = CellQueue(CELLS, tmp_path / "lines.jsonl", NOTHING, 2.9, False, processes=3, on_a_cpu=True)
    assert late.take(late.new_worker()) is None  # a second alone is three beside two others
    waiting.close()
    assert late.take(late.new_worker()) is not None  # the first of the three has ended, so it takes two seconds
    late.close()
    assert CellQueue(CELLS, tmp_path / "lines.jsonl", NOTHING, 2.9, False, on_a_cpu=True).take(set()) is not None


def test_what_is_compiled_for_a_cell_that_runs_alone_does_not_depend_on_what_is_left(tmp_path: Path) -> None:
    """Else the last of a method would have fewer compiled steps, and its seconds would not compare."""
    for seconds, cells in ((None, CELLS), (50.0, CELLS), (None, CELLS[:1])):
        for call in range(len(cells)):  # each ends after one cell, and the next one goes on
            out = tmp_path / f"{seconds}-{len(cells)}.jsonl"
            waiting = CellQueue(cells, out, NOTHING, seconds, False, on_a_cpu=True)
            turn = waiting.take(waiting.new_worker())
            assert turn is not None and turn.alike == MANY_ALIKE, call
            waiting.finish(turn.cell, failed_line(turn.cell, HowToRun((), (), 1), "It did not."))
            waiting.close()


def test_beside_others_as_much_is_compiled_as_pays_for_the_cells_that_are_left(tmp_path: Path) -> None:
    for number, (seconds, alike) in enumerate([(None, {1, 2}), (7.0, {1, 2}), (3.0, {1})]):
        waiting = CellQueue(CELLS, tmp_path / f"{number}.jsonl", NOTHING, seconds, False, processes=2, on_a_cpu=True)
        ready = waiting.new_worker()
        turns = [waiting.take(ready) for _ in CELLS]
        assert {turn.alike for turn in turns if turn is not None} == alike
        waiting.close()


def test_what_is_expected_of_a_cell_is_what_was_when_it_was_taken(tmp_path: Path) -> None:
    waiting = CellQueue(CELLS[:1], tmp_path / "lines.jsonl", NOTHING, None, False, processes=3)
    turn = waiting.take(waiting.new_worker())
    assert turn is not None and turn.expected_seconds == waiting.seconds(turn.cell) > 0
    assert waiting.take(waiting.new_worker()) is None  # whoever finds nothing leaves more of the machine to the others
    assert turn.expected_seconds == 1.5 * waiting.seconds(turn.cell)


def test_a_system_without_another_process_fails_no_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(refused))
    with pytest.raises(FnrflError, match="Resource temporarily unavailable.*--processes"):
        carried(tmp_path / "lines.jsonl", 2)
    assert not (tmp_path / "lines.jsonl").exists()


def test_a_process_that_is_being_started_is_waited_for_and_no_other_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, begun, done = CellProcess(HowToRun((), (), 2)), threading.Event(), list[str]()

    def slowly(process: object) -> None:
        begun.set()
        time.sleep(0.3)
        done.append("tried")
        raise OSError(errno.EAGAIN, "no process")

    monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(slowly))

    def start() -> None:
        with suppress(FnrflError):
            worker._start()

    threading.Thread(target=start).start()
    begun.wait()
    worker.tell_to_end()
    assert done == ["tried"]
    with pytest.raises(EOFError):
        worker._start()
    assert done == ["tried"]


@pytest.mark.slow
def test_a_process_that_dies_fails_one_cell_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, victim, real = tmp_path / "lines.jsonl", CELLS[1], CellProcess.compute

    def compute(worker: CellProcess, turn: CellTurn, *about_late: Any) -> CellLine:
        if turn.cell == victim:
            if worker._running is None:
                worker._start()
            assert worker._running is not None and (number := worker._running[0].pid) is not None
            threading.Timer(0.3, os.kill, [number, signal.SIGKILL]).start()  # its first cell takes longer
        return real(worker, turn, *about_late)

    monkeypatch.setattr(CellProcess, "compute", compute)
    lines = carried(out, 2)
    assert {name: line.get("failed") for name, line in lines.items()} == {
        cell.id: DIED if cell == victim else None for cell in CELLS
    }
    assert lines[victim.id]["processes"] == 2 and len(read_lines(out)) == len(CELLS)
    monkeypatch.undo()
    assert carried(out, 1, again=True)[victim.id].get("failed") is None


@pytest.mark.parametrize(("expected", "late_after"), [(1.0, 600.0), (200.0, 600.0), (1000.0, 3000.0)])
def test_a_cell_is_late_after_some_times_what_is_expected_of_it_but_never_soon(
    expected: float, late_after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[float]()

    def compute(worker: CellProcess, turn: CellTurn, late_after: float, tell_late: Callable[[], None]) -> CellLine:
        given.append(late_after)
        return failed_line(turn.cell, HowToRun((), (), 2), "No.")

    monkeypatch.setattr(CellQueue, "seconds", lambda *_: expected)
    monkeypatch.setattr(CellProcess, "compute", compute)
    carried(tmp_path / "lines.jsonl", 2)
    assert given == [late_after] * len(CELLS)


def test_a_process_for_which_there_are_no_more_cells_ends_while_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, in_time = threading.Event(), list[bool]()

    def compute(worker: CellProcess, turn: CellTurn, *_: Any) -> CellLine:
        if turn.cell == CELLS[0]:
            in_time.append(told.wait(10))
        return failed_line(turn.cell, HowToRun((), (), 2), "No.")

    monkeypatch.setattr(CellProcess, "compute", compute)
    monkeypatch.setattr(CellProcess, "tell_to_end", lambda worker: told.set())
    carried(tmp_path / "lines.jsonl", 2)
    assert in_time == [True]


def sleepy(*_: Any) -> CellLine:
    time.sleep(1.0)
    return {"id": "x"}


def serve_sleepily(pipe: Any, how: HowToRun) -> None:
    """What a process does whose cells take a second."""
    side_by_side.compute_line = sleepy  # type: ignore[attr-defined]
    side_by_side._serve(pipe, how)


@pytest.mark.skipif(side_by_side.SHOW is None, reason="this system has no such signal")
@pytest.mark.parametrize("late_after", [0.2, 30.0])
def test_a_process_that_is_late_prints_where_it_is_and_goes_on(
    late_after: float, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    worker, told = CellProcess(HowToRun((), (), 2)), list[str]()
    monkeypatch.setattr(side_by_side, "_serve", serve_sleepily)
    try:
        for _ in range(2):
            assert worker.compute(TURN, late_after, lambda: told.append("late")) == {"id": "x"}
    finally:
        worker.end(time.monotonic() + 5)
    is_late = late_after < 1
    assert told == ["late", "late"] * is_late
    assert ("in sleepy" in capfd.readouterr().err) == is_late


class Ended:
    """A process that has ended, or not; another may have its number by now."""

    pid = 12345

    def __init__(self, alive: bool) -> None:
        self.is_alive = lambda: alive


@pytest.mark.parametrize("alive", [False, True])
def test_no_signal_is_sent_to_the_number_of_a_process_that_has_ended(
    alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, worker = list[tuple[int, int]](), CellProcess(HowToRun((), (), 2))
    monkeypatch.setattr(side_by_side, "SHOW", 10)
    monkeypatch.setattr(side_by_side.os, "kill", lambda *how: sent.append(how))
    worker._running = Ended(alive), None  # type: ignore[assignment]
    worker._show_where_it_is()
    assert sent == [(12345, 10)] * alive


@pytest.mark.parametrize("show", [None, 10])
def test_the_line_of_a_late_cell_promises_only_what_the_system_can_do(
    show: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "SHOW", show)
    screen = Console(file=StringIO(), width=200)
    _show_cell(screen, replace(TURN.notice, what="late"))
    assert isinstance(screen.file, StringIO)
    said = screen.file.getvalue()
    assert "takes much longer than expected" in said and ("prints where it is" in said) == (show is not None)


def test_whoever_closes_the_output_while_a_cell_is_late_fails_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "LATE_AFTER", 0.1)
    monkeypatch.setattr(side_by_side, "LATE_TIMES", 0.0)

    def tell(notice: CellNotice) -> None:
        if notice.what == "late":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        carried(tmp_path / "lines.jsonl", 2, tell=tell)
    assert not (tmp_path / "lines.jsonl").exists()


@pytest.mark.slow
def test_processes_that_cannot_begin_end_the_call_and_fail_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "_serve", _ends_at_once)
    with pytest.raises(FnrflError, match=NOT_STARTED):
        carried(tmp_path / "lines.jsonl", 2)
    assert not (tmp_path / "lines.jsonl").exists()


def _ends_at_once(*_: Any) -> None:
    pass


@pytest.mark.slow
def test_a_process_that_is_told_to_end_does_so_at_once_and_silently(capfd: pytest.CaptureFixture[str]) -> None:
    """It does not wait for its round, as a run alone does: at the full size that may be a minute."""
    worker = CellProcess(HowToRun((), (), 2))

    def work() -> None:
        with suppress(EOFError, OSError):
            while True:
                worker.compute(TURN, 600.0, lambda: None)
                done.set()

    done, thread = threading.Event(), threading.Thread(target=work, daemon=True)
    thread.start()
    assert done.wait(120) and worker._running is not None
    process = worker._running[0]
    worker.tell_to_end()
    worker.end(time.monotonic() + 60)  # however slow the machine is
    thread.join(10)
    assert not thread.is_alive() and process.exitcode == 0  # by itself: it can clean up
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_whoever_closes_the_output_stops_all(tmp_path: Path) -> None:
    """As `fnrfl reproduce run ... | head -1` does."""
    out = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "fnrfl", "reproduce", "run", "accuracy", "--scale", "tiny", "--processes", "2"]
    running = subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert running.stdout is not None and running.stderr is not None
    running.stdout.readline()
    running.stdout.close()
    said = running.stderr.read()
    assert running.wait(60) == 141
    assert said == f"fnrfl: the output was closed. {GO_ON}\n"
    assert not out.exists() or not [line for line in read_lines(out) if "failed" in line]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="a terminal of Windows has no such group")
def test_ctrl_c_ends_all_processes_and_leaves_whole_lines(tmp_path: Path) -> None:
    """As a terminal does it: to every process of the command, also to one that is still starting."""
    out = tmp_path / "lines.jsonl"
    for begun in (0, 2):  # lines that there are when it is stopped
        command = [sys.executable, "-m", "fnrfl", "reproduce", "run", "accuracy", "--scale", "tiny", "--processes", "3"]
        running = subprocess.Popen(
            [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, cwd=tmp_path,
        )  # fmt: skip
        if begun:
            _wait(lambda: out.exists() and len(read_lines(out)) >= 2, 120)
        else:
            assert running.stdout is not None and "left" in running.stdout.readline()  # the first cell has begun
            time.sleep(0.1)  # the processes are at their imports
        os.killpg(running.pid, signal.SIGINT)
        said, _ = running.communicate(timeout=60)
        assert running.returncode == 130, said
        assert "To go on, give the same command again" in said
        assert "Traceback" not in said and "leaked" not in said and "rror" not in said
        _wait(functools.partial(_has_gone, running.pid), 20)
    text = out.read_text(encoding="utf-8")
    assert text.endswith("\n") and len(read_lines(out)) == len(text.splitlines()) >= 2
    assert not [line for line in read_lines(out) if "failed" in line]


def _has_gone(group: int) -> bool:
    """Whether no process of it is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def _wait(until: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
