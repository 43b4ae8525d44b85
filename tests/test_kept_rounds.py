"""A cell that takes long and is stopped goes on after the rounds that it has kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fnrfl.cli import cell_runs
from fnrfl.cli.common import console
from fnrfl.results.reproduce import cell_queue
from fnrfl.results.reproduce.carrying import carry_out
from fnrfl.results.reproduce.cell_queue import CellNotice
from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines, seconds_count
from fnrfl.results.reproduce.paper_cells import PaperCell

CELL = PaperCell("resnet18", "label", "honest", "scaffold+fnr", 0, "tiny")  # clients remember, and some are refined
MEASURED = ("seconds", "memory", "kept_rounds", "date")  # what two runs of a cell differ in


@pytest.fixture
def long_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_queue, "LONG_CELL", 0.0)


def carried(out: Path, **more: Any) -> CellLine:
    (line,) = carry_out([CELL], out, lines=KeptLines([], []), **more)
    return line


def stopping_after(rounds: int) -> Callable[[CellNotice], None]:
    """A listener that stops the call after so many rounds, as Ctrl-C does."""

    def tell(notice: CellNotice) -> None:
        if notice.event is not None and notice.event["round"] == rounds:
            raise KeyboardInterrupt

    return tell


def stopped(out: Path, rounds: int = 2, **more: Any) -> Path:
    """The run directory of the cell, which was stopped."""
    with pytest.raises(KeyboardInterrupt):
        carried(out, tell=stopping_after(rounds), **more)
    return out.with_name(f"{out.name}.begun") / CELL.id.replace("/", " ") / "run"


def numbers(line: CellLine) -> CellLine:
    """What must be the same in every run of a cell."""
    return {key: value for key, value in line.items() if not key.startswith(MEASURED)}


def test_a_long_cell_goes_on_after_its_kept_rounds_and_has_the_same_numbers(tmp_path: Path, long_cells: None) -> None:
    out, heard = tmp_path / "lines.jsonl", list[CellNotice]()
    assert (stopped(out) / "checkpoint.json").exists() and not out.exists()
    line = carried(out, tell=heard.append)
    assert [notice.event["round"] for notice in heard if notice.event] == [3]
    assert line["kept_rounds"] == 2 and not seconds_count(line)  # its first rounds may have run beside others
    assert line["seconds_wall"] > sum(line["seconds"].values())  # those of the kept rounds too
    assert list(tmp_path.iterdir()) == [out]
    alone = carried(tmp_path / "alone.jsonl")
    assert seconds_count(alone) and "kept_rounds" not in alone and numbers(line) == numbers(alone)


def test_a_long_cell_goes_on_in_a_process_of_its_own_too(tmp_path: Path, long_cells: None) -> None:
    out = tmp_path / "lines.jsonl"
    stopped(out)
    assert carried(out, processes=2)["kept_rounds"] == 2


def test_a_short_cell_keeps_no_rounds(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    assert not stopped(out).exists()
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_is_run_in_another_way_begins_anew(tmp_path: Path, long_cells: None) -> None:
    out = tmp_path / "lines.jsonl"
    stopped(out, words=["engine=loop"])
    line = carried(out, words=["engine=batched"])
    assert line["engine"]["name"] == "batched" and "kept_rounds" not in line
    assert list(tmp_path.iterdir()) == [out]


def test_rounds_of_another_version_are_not_used(
    tmp_path: Path, long_cells: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "lines.jsonl"
    stopped(out)
    monkeypatch.setattr("fnrfl.__version__", "99.0")
    assert "kept_rounds" not in carried(out)


@pytest.mark.parametrize("name", ["config.toml", "events.jsonl", "checkpoint.json", "partition.json"])
def test_a_cell_whose_kept_rounds_are_damaged_begins_anew(tmp_path: Path, long_cells: None, name: str) -> None:
    out = tmp_path / "lines.jsonl"
    (stopped(out) / name).write_bytes(b"half of")
    line = carried(out)
    assert "failed" not in line and "kept_rounds" not in line
    assert out in tmp_path.iterdir()


def test_a_killed_call_leaves_rounds_that_the_next_one_goes_on_from(
    tmp_path: Path, long_cells: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fcntl")
    out = tmp_path / "lines.jsonl"
    program = (
        "import time; from pathlib import Path; from fnrfl.results.reproduce import carrying, cell_lines, cell_queue\n"
        "from fnrfl.results.reproduce.kept_lines import KeptLines\n"
        "from fnrfl.results.reproduce.paper_cells import PaperCell\n"
        "cell_queue.LONG_CELL = cell_lines.CHECKPOINT_EVERY = 0.0\n"
        "tell = lambda notice: (print('heard', flush=True), time.sleep(99)) if notice.what == 'round' else None\n"
        f"cells = [PaperCell.read({CELL.id!r})]\n"
        f"carrying.carry_out(cells, Path({str(out)!r}), lines=KeptLines([], []), tell=tell)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None and killed.stdout.readline() == "heard\n"
    killed.kill()
    killed.wait()
    killed.stdout.close()
    assert carried(out)["kept_rounds"] == 1


def test_a_round_is_told_if_nothing_was_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(cell_runs, "SECONDS_OF_SILENCE", 0.0)
    cell_runs.carry([CELL], tmp_path / "a.jsonl", KeptLines([], []), console(), time=None, words=())
    told = capsys.readouterr().out
    assert [f"round {number} of 3" in told for number in (1, 2, 3)] == [True] * 3
    monkeypatch.setattr(cell_runs, "SECONDS_OF_SILENCE", 99.0)
    cell_runs.carry([CELL], tmp_path / "b.jsonl", KeptLines([], []), console(), time=None, words=())
    assert "round" not in capsys.readouterr().out
