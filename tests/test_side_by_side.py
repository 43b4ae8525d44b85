"""Cells in several processes: the same models as in one, whatever becomes of a process."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import active_children
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from fnrfl.cli.cell_runs import GO_ON
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.results.reproduce import side_by_side
from fnrfl.results.reproduce.carrying import CellNotice, carry_out
from fnrfl.results.reproduce.cell_lines import MANY_ALIKE, HowToRun, compute_line
from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines, read_lines
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.runs import run as runs

NOTHING = KeptLines([], [])
CELLS = [
    PaperCell("resnet18", "label", setting, method, 0, "tiny")
    for setting, method in (("honest", "fedavg"), ("honest", "fedprox"), ("paper", "fedavg+fnr"))
]


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
    compute_line(CELLS[0], HowToRun((), (), processes), lambda event: None)
    assert [(given["runs_alike"], given["compared"]) for given in told] == [(MANY_ALIKE, compared)]


@pytest.mark.slow
def test_what_would_fail_for_every_cell_ends_the_call_in_the_same_words(tmp_path: Path) -> None:
    said, before = [], set(active_children())
    for processes in (1, 2):
        with pytest.raises(ConfigError) as error:
            carried(tmp_path / "lines.jsonl", processes, words=["engine.thread=1"])
        said.append(str(error.value))
    assert said[0] == said[1] and "engine.thread" in said[0]
    assert not (tmp_path / "lines.jsonl").exists() and set(active_children()) <= before


def test_a_system_without_another_process_fails_no_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(refused))
    with pytest.raises(FnrflError, match="Resource temporarily unavailable.*--processes"):
        carried(tmp_path / "lines.jsonl", 2)
    assert not (tmp_path / "lines.jsonl").exists()


def test_a_process_that_dies_ends_the_call_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """As one does that the system ends for its memory; what is done has been written."""
    before = set(active_children())

    def tell(notice: CellNotice) -> None:
        if notice.what == "done":
            for process in set(active_children()) - before:
                process.kill()

    with pytest.raises(FnrflError, match="ended before resnet18/.* was done.*--processes"):
        carried(tmp_path / "lines.jsonl", 2, tell=tell)
    assert len(read_lines(tmp_path / "lines.jsonl")) == 1 and set(active_children()) <= before
    assert not [line for line in carried(tmp_path / "lines.jsonl", 1).values() if "failed" in line]


def test_a_listener_that_fails_ends_all_processes(tmp_path: Path) -> None:
    """As one does whose output nobody reads any more."""
    before = set(active_children())

    def tell(notice: CellNotice) -> None:
        if notice.number == 2:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        carried(tmp_path / "lines.jsonl", 2, tell=tell)
    assert not (tmp_path / "lines.jsonl").exists() and set(active_children()) <= before


@pytest.mark.slow
def test_a_process_that_is_stopped_ends_at_once_and_silently(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for its round, as a run alone does: at the full size that may be a minute."""
    ended, before = list[int | None](), set(active_children())

    def tell(notice: CellNotice) -> None:
        if notice.what == "done":  # the other process is at its second cell
            raise KeyboardInterrupt

    def end(processes: list[Any]) -> None:
        real(processes)
        ended.extend(process.exitcode for process in processes)

    real = side_by_side._end
    monkeypatch.setattr(side_by_side, "_end", end)
    with pytest.raises(KeyboardInterrupt):
        carried(tmp_path / "lines.jsonl", 2, tell=tell)
    assert ended == [0, 0] and set(active_children()) <= before  # by themselves: they could clean up
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
            assert running.stdout is not None and "begins" in running.stdout.readline()  # the first cell has begun
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
