"""The paper's tables: cells and their ids, printed numbers, results on the disk, and running them."""

from __future__ import annotations

import datetime
import errno
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from fnrfl import cli
from fnrfl.cli import cell_runs
from fnrfl.cli.cell_runs import read_duration
from fnrfl.cli.common import console
from fnrfl.config import RunConfig
from fnrfl.config.schema import FIRST_DEFAULTS
from fnrfl.core.errors import ClientError, ConfigError, FnrflError
from fnrfl.results.reproduce import carrying, figures, kept_lines, theory
from fnrfl.results.reproduce.carrying import CellNotice, carry_out
from fnrfl.results.reproduce.cell_lines import device_name, numbers_of
from fnrfl.results.reproduce.figures import LEAKS_KEY, draw_all
from fnrfl.results.reproduce.kept_lines import (
    CellLine,
    KeptLines,
    append_line,
    check_lines_file,
    read_lines,
    seconds_count,
    timed_together,
)
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.paper_tables import TABLES
from fnrfl.results.reproduce.pictured_data import split_of
from fnrfl.results.reproduce.printed import COST_METRICS, PRINTED
from fnrfl.results.reproduce.settings import METHODS, SCALES, TRIAL_SETTINGS
from fnrfl.results.reproduce.shown import ShownColumn, ShownValue, show_table
from fnrfl.results.reproduce.wording import as_json, as_markdown, as_text
from fnrfl.runs import run as run_module

TINY = PaperCell("resnet18", "label", "honest", "fedavg", 0, "tiny")
LEAKING = PaperCell("resnet18", "label", "paper", "fedavg+fnr", 0, "tiny")
EVERY = [cell for table in TABLES.values() for scale in SCALES for cell in table.cells(scale)]
NOTHING = KeptLines([], [])


def line_of(cell: PaperCell, **more: Any) -> CellLine:
    """What a finished cell leaves, as far as tables read it."""
    about = {"id": cell.id, "recipe": cell.recipe, "overrides": list(cell.overrides), "date": "2026-11-16"}
    sizes = {"accuracy": 0.5, "accuracies": [0.5], "bytes_up": 2**20, "bytes_down": 2**20, "notes": {}}
    seconds = {"seconds_train": 6.0, "seconds_wall": 9.0, "seconds_preparing": 2.0}
    return about | {"device": "a device"} | sizes | seconds | more


def typed(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["reproduce", *words])


def test_lines_of_deep_json_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text(f'{{"id": {"[" * 100_000}\n{"[" * 100_000}{"]" * 100_000}\n')
    assert read_lines(tmp_path / "lines.jsonl") == []


def test_a_failure_of_today_counts_before_a_success_of_an_older_recipe() -> None:
    cell = PaperCell("resnet18", "label", "honest", "fedavg", 0, "quick")
    old, new = line_of(cell, overrides=["older=1"]), line_of(cell, failed="no memory")
    assert KeptLines([], [old, new]).find(cell).state == "failed"
    assert KeptLines([], [line_of(cell), new]).find(cell).state == "here"
    assert KeptLines([], [new, line_of(cell)]).find(cell).state == "here"


def test_a_cell_that_failed_before_is_named_and_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cell = PaperCell("resnet18", "label", "honest", "fedavg", 77, "quick")
    append_line(tmp_path / "lines.jsonl", line_of(cell, failed="no memory"))
    got = typed("run", cell.id, "--out", "lines.jsonl")
    assert got.exit_code == 3 and "1 cell failed before; --again tries them once more." in got.output


def test_why_nothing_was_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for cell in TABLES["rate"].cells("tiny"):
        append_line(tmp_path / "lines.jsonl", line_of(cell))
    named = typed("run", cell.id, "--out", "lines.jsonl")
    assert named.exit_code == 0 and "0 cells done, 0 failed" in named.output
    assert (
        "1 cell has a result in lines.jsonl already. To run it again, choose another file with --out." in named.output
    )
    table = typed("run", "rate", "--scale", "tiny", "--out", "lines.jsonl")
    assert table.exit_code == 0 and "Nothing was left to run. Of a table, --rerun also takes cells" in table.output


def test_a_table_says_its_size_and_at_which_scale_it_has_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick, full = typed("niid-bench"), typed("niid-bench", "--scale", "full")
    assert "with --scale full:" in quick.output and "with --scale" not in full.output
    assert "Scale full: NIID-Bench's size, 50 rounds" in full.output
    assert "Scale full: the paper's size" in typed("accuracy", "--scale", "full").output
    assert "with --scale" not in typed("niid-bench", "--json").output


def test_options_that_would_do_nothing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("--set", "engine=loop"), ("--stop-after", "9m")):
        got = typed("accuracy", *words)
        assert got.exit_code == 2 and "Give --rerun too" in got.stderr
    for words in (("--scale", "full"), ("--seeds", "7")):
        got = typed("run", "resnet18/label/honest/fedavg/seed0@tiny", *words)
        assert got.exit_code == 2 and "has its seed and its scale in its name" in got.stderr


def test_seconds_of_several_devices_have_no_mean() -> None:
    cells = [PaperCell("resnet18", "label", "honest", "fedavg", seed, "quick") for seed in range(3)]
    about = {
        "leaks": [],
        "bytes_up": 1,
        "bytes_down": 1,
        "seconds_train": 10.0,
        "engine": {"name": "gpu", "precision": "bf16"},
    }
    alike = [line_of(cell, **about) for cell in cells]
    apart = [alike[0], *(line | {"device": "CPU", "seconds_train": 4000.0} for line in alike[1:])]
    for lines, seconds in ((alike, "10.0 ± 0.0"), (apart, "several devices")):
        columns = [
            column for part in show_table("cost", KeptLines([], lines), "quick").parts for column in part.columns
        ]
        assert seconds in [value.words for column in columns for value in column.values]


# -- cells ------------------------------------------------------------------------------------------------------------


def test_an_id_is_read_back_and_names_one_cell() -> None:
    cells = set(EVERY)
    assert len({cell.id for cell in cells}) == len(cells)
    assert {PaperCell.read(cell.id) for cell in cells} == cells


def test_every_cell_makes_a_config_and_says_leak_exactly_if_it_leaks() -> None:
    for cell in set(EVERY):
        config = cell.config()
        assert config.leaks_on == cell.leaks
        assert config.seed == cell.seed
        assert config.protocol == cell.protocol
        assert bool(cell.leaks) == (cell.protocol == "paper" and not cell.method.endswith("+no-leak")), cell.id


def test_what_is_said_before_gives_way_and_what_is_said_after_wins() -> None:
    strict = PaperCell("resnet18", "label", "paper", "fedavg+both-leaks-weight-0", 0, "quick")
    assert strict.config(["engine.deterministic=false"]).engine.deterministic
    assert not strict.config(after=["engine.deterministic=false"]).engine.deterministic


@pytest.mark.parametrize(
    "text", ["", "resnet18", "resnet81/label/honest/fedavg/seed0@tiny", "resnet18/label/honest/fedavg+fn/seed0@tiny"]
)
def test_an_id_that_is_none_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\.$"):
        PaperCell.read(text)


def test_only_the_scale_of_the_work_differs_between_quick_and_full() -> None:
    for cell in TABLES["accuracy"].cells("quick", [0]):
        quick, full = cell.config().flat(), PaperCell.read(cell.id.replace("quick", "full")).config().flat()
        differing = {key for key in quick if quick[key] != full[key]}
        assert differing <= {"client.epochs", "fnr.epochs", "algorithm.epochs"}


def test_niid_bench_tuned_fedprox_for_each_skew() -> None:
    mu = {
        (setting, skew): PaperCell("simple-cnn", skew, setting, "fedprox", 0, "full").config().algorithm.options["mu"]
        for setting in ("niid-bench", "niid-bench-standard")
        for skew in ("label", "classes-2", "feature-0.1", "quantity")
    }
    assert mu == {key: 0.001 if key[1] == "label" else 0.01 for key in mu}


def test_protocols_share_the_split() -> None:
    for table in TABLES.values():
        for block in table.parts:
            assert len({cell.config().scenario for cell in block.cells("quick", [0])}) == 1


# -- what was printed -------------------------------------------------------------------------------------------------


def test_every_printed_number_has_a_row() -> None:
    places = {
        (name, block.net, block.skew, method if metric == "accuracy" and name != "cost" else f"{method}:{metric}")
        for name, table in TABLES.items()
        for block in table.parts
        for method in block.methods
        for metric in block.metrics
    }
    assert set(PRINTED) <= places
    assert len([key for key in PRINTED if key[0] == "accuracy"]) == 66


def test_the_printed_kappa_and_rho_follow_from_the_other_printed_numbers() -> None:
    """But for three last digits, as far as rounding of the printed accuracy goes."""
    wrong = 0
    for skew in ("feature-0.5", "label", "quantity"):
        for method in ("fedavg+fnr", "fedavg", "fedprox", "scaffold", "moon", "fednova"):
            mib, seconds, accuracy, kappa, rho = (
                PRINTED["cost", "resnet18", skew, f"{method}:{metric}"].value for metric in COST_METRICS
            )
            assert accuracy == PRINTED["accuracy", "resnet18", skew, method].value
            for printed, computed in ((kappa, accuracy * 1e4 / seconds), (rho, accuracy * 1e4 / mib)):
                assert printed == pytest.approx(computed, abs=1.6e-4)
                wrong += round(computed, 4) != printed
    assert wrong == 3


def test_five_printed_rows_are_fedavg_and_a_constant() -> None:
    for method, offset in (("feddyn", 70), ("fedftg", 450), ("feddf", 100), ("feddc", 400), ("fedgen", 20)):
        for net in ("resnet18", "vgg11"):
            for skew in ("feature-0.5", "label", "quantity"):
                printed = PRINTED["accuracy", net, skew, method]
                fedavg = PRINTED["accuracy", net, skew, "fedavg"]
                assert round(1e4 * (printed.value - fedavg.value)) == offset
                assert f"{offset / 1e4:.4f}" in printed.note


# -- results on the disk ----------------------------------------------------------------------------------------------


def test_a_committed_line_counts_first_and_one_from_here_if_it_is_preferred() -> None:
    lines = KeptLines([line_of(TINY, accuracy=0.1)], [line_of(TINY, accuracy=0.2)])
    assert lines.find(TINY).line["accuracy"] == 0.1
    assert lines.find(TINY).words == "committed 2026-11-16 a device"
    assert lines.find(TINY, prefer_here=True).line["accuracy"] == 0.2
    assert lines.find(TINY, prefer_here=True).words == "computed here"
    assert NOTHING.find(TINY).words == "not run"


def test_a_line_of_an_older_recipe_is_never_used() -> None:
    older = line_of(TINY, overrides=["rounds=4"])
    found = KeptLines([older], []).find(TINY)
    assert (found.state, found.usable) == ("older recipe", False)
    assert KeptLines([older], [line_of(TINY)]).find(TINY).state == "here"


def test_a_cell_names_the_options_of_its_method_whose_default_has_changed() -> None:
    """A line that was made with an earlier default has other overrides then, and is an older recipe."""
    changed = {method: keys for method, keys in FIRST_DEFAULTS.items() if method in METHODS}
    assert changed
    for method, keys in changed.items():
        named = PaperCell("resnet18", "label", "honest", method, 0, "quick").overrides
        assert keys.keys() <= {word.partition("=")[0] for word in named}


@pytest.mark.parametrize("said", [{"leaks": []}, {}, {"leaks": ["public_is_test", "another"]}])
def test_a_file_can_add_leaks_to_a_cell_and_take_none_away(said: CellLine) -> None:
    without = {key: value for key, value in full_line(LEAKING, 0.5).items() if key != "leaks"}
    lines = KeptLines([], [without | said])
    assert lines.find(LEAKING).line["leaks"] == [*LEAKING.leaks, *said.get("leaks", [])[1:]]
    assert "0.5000 leak [" in as_text(show_table("accuracy", lines, "tiny"))
    assert KeptLines([], [line_of(TINY)]).find(TINY).line["leaks"] == []


def test_a_failure_counts_only_where_nothing_succeeded() -> None:
    failed = line_of(TINY, failed="It did not.")
    assert KeptLines([], [failed]).find(TINY).state == "failed"
    assert KeptLines([], [line_of(TINY), failed]).find(TINY).state == "here"
    assert KeptLines([failed], [line_of(TINY)]).find(TINY).state == "here"


def test_of_several_lines_the_first_counts_with_the_last_seconds_that_are_a_measure() -> None:
    first, again = full_line(TINY, 0.5), full_line(TINY, 0.6) | {"seconds_train": 7.0, "seconds_of_rounds": [7.0]}
    failed, beside = line_of(TINY, failed="It did not."), {"processes": 4}

    def counts(*lines: CellLine) -> tuple[float, float]:
        line = KeptLines(lines, []).find(TINY).line
        assert line["seconds_train"] != 7.0 or line["seconds_of_rounds"] == [7.0]
        return line["accuracy"], line["seconds_train"]

    assert counts(first, again) == counts(first | beside, again) == counts(failed, first, again, failed) == (0.5, 7.0)
    for mark in ({"processes": 2}, {"kept_rounds": 1}, {"no_measure": "a power cut"}):
        assert counts(first, again | mark) == (0.5, 10.0)
    assert counts(first | beside, again | {"device": "another"}) == (0.5, 10.0)
    assert counts(first | {"overrides": ["rounds=1"]}, again) == (0.6, 7.0)
    for mark in (beside, {"kept_rounds": 3}, {"no_measure": "a power cut"}):
        assert not seconds_count(KeptLines([first | mark], []).find(TINY).line)
        assert seconds_count(KeptLines([first | mark, again], []).find(TINY).line)
    days = first | {"date": "2026-11-01"}, again | {"date": "2026-11-02"}
    assert KeptLines(days, []).find(TINY).words == "committed 2026-11-01 a device, seconds of 2026-11-02"
    assert "seconds of" not in KeptLines([first, again], []).find(TINY).words
    timed = KeptLines(days, []).find(TINY).line
    assert timed_together(timed, days[1]) and not timed_together(timed, days[0])


def test_half_a_line_is_passed_over_and_the_next_begins_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    append_line(path, line_of(TINY))
    with path.open("ab") as file:
        file.write(b'{"id": "half')
    append_line(path, line_of(LEAKING))
    assert [line["id"] for line in read_lines(path)] == [TINY.id, LEAKING.id]


@pytest.mark.parametrize("name", [*kept_lines.ABOUT_CELLS, *kept_lines.CELL_NUMBERS])
def test_a_line_that_lacks_what_tables_need_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, line_of(LEAKING))
    append_line(path, line_of(TINY) | {name: None})
    with pytest.raises(ConfigError, match=f'line 2: the result of {TINY.id} has no "{name}".* Take this line out'):
        read_lines(path)
    append_line(tmp_path / "failed.jsonl", line_of(TINY, failed="no memory") | dict.fromkeys(kept_lines.CELL_NUMBERS))
    assert read_lines(tmp_path / "failed.jsonl")


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("accuracy", "0.5", 'has "accuracy", but it is not a number'),
        ("bytes_up", True, 'has "bytes_up", but it is not a number'),
        ("overrides", "seed=0", 'has "overrides", but it is not a list'),
        ("processes", "5", 'has "processes", but it is not a number'),
        ("no_measure", None, 'has "no_measure", but it is not text'),
        ("accuracy", 1.7, "has an accuracy that is not a number from 0 to 1"),
        ("accuracies", [0.1, None], "has an accuracy that is not a number from 0 to 1"),
    ],
)
def test_a_line_with_something_else_than_numbers_is_refused(
    name: str, value: object, wrong: str, tmp_path: Path
) -> None:
    append_line(tmp_path / "lines.jsonl", line_of(TINY) | {name: value})
    with pytest.raises(ConfigError, match=f"line 1: the result of {TINY.id} {wrong}"):
        read_lines(tmp_path / "lines.jsonl")


def test_a_table_that_is_wider_than_the_terminal_has_a_line_for_each_value() -> None:
    table = show_table("mixed", KeptLines([], []), "quick")
    wide, narrow = as_text(table), as_text(table, width=40)
    assert as_text(table, width=400) == wide and "\n  printed: 0.9755 [1]\n" in narrow
    assert wide.split("\n[1] ")[1] == narrow.split("\n[1] ")[1]  # the same footnotes
    for part in table.parts:
        for column in part.columns:
            for value in column.values:
                assert f"  {column.head}: {value.words}" in narrow


def test_the_command_asks_how_wide_the_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    in_a_file = typed("mixed", "--out", "none.jsonl").stdout
    monkeypatch.setattr("fnrfl.cli.reproduce.is_terminal", lambda: True)
    on_a_screen = typed("mixed", "--out", "none.jsonl").stdout
    assert "\n  printed: 0.9755 [1]\n" in on_a_screen and "\n  printed:" not in in_a_file


def test_a_number_that_is_printed_twice_and_differs_says_so() -> None:
    methods = [method for table, _, skew, method in PRINTED if (table, skew) == ("noise", "feature-0.5")]
    assert len(methods) == 6
    for method in methods:
        printed, other = (PRINTED[table, "resnet18", "feature-0.5", method] for table in ("accuracy", "noise"))
        assert (printed.value != other.value) == ("the noise table has another number" in printed.note)


def test_a_file_that_was_saved_on_windows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = "\r\n".join(json.dumps(line_of(cell)) for cell in (TINY, LEAKING))
    for text in (f"\ufeff{lines}\r\n", f"\ufeff{lines}"):
        path.write_bytes(text.encode())
        check_lines_file(path)
        assert [line["id"] for line in read_lines(path)] == [TINY.id, LEAKING.id]


def test_after_a_full_disk_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if no more than a part of the first line is there; and the file is named."""
    path = tmp_path / "lines.jsonl"

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        append_line(path, line_of(TINY))
    assert error.value.filename == str(path)
    for half in (b"", b'{"i', b'{"id": "resnet18/la'):
        path.write_bytes(half)
        check_lines_file(path)
    path.write_text("notes of somebody")
    with pytest.raises(ConfigError, match="something else"):
        check_lines_file(path)


def test_committed_results_are_whole_and_of_cells_that_exist() -> None:
    for path in kept_lines.OF_SOURCES.glob("*.jsonl"):
        texts = path.read_text(encoding="utf-8").splitlines()
        lines = read_lines(path)
        assert len(lines) == len(texts), path
        assert len({line["id"] for line in lines}) == len(lines), path
        for line in lines:
            assert PaperCell.read(line["id"]).id == line["id"]
            assert ("failed" in line) or (bool(line["leaks"]) == bool(PaperCell.read(line["id"]).leaks))


def test_committed_files_are_read_in_the_order_of_their_runs() -> None:
    """The first line of a cell counts: names of files are a device and a date, with a number if there are several."""
    by_day = dict[str, list[str]]()
    for path in sorted(kept_lines.OF_SOURCES.glob("*.jsonl")):
        named = re.fullmatch(r"([a-z0-9]+-(\d{4}-\d\d-\d\d))(?:-([1-9]))?", path.stem)
        assert named is not None, path
        by_day.setdefault(named[1], []).append(named[3])
        assert {line["date"] for line in read_lines(path)} <= {named[2], _day_after(named[2])}, path
    assert len(by_day) > 1
    for day, numbers in by_day.items():
        assert numbers in ([None], [str(n + 1) for n in range(len(numbers))]), day


def test_names_of_files_are_sorted_as_people_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_lines, "OF_SOURCES", tmp_path)
    names = [
        "cpu-2026-11-20",
        "h200-2026-11-9",
        "h200-2026-11-18",
        "h200-2026-11-18-2",
        "h200-2026-11-18-10",
        "h200-2026-11-18²",
    ]
    for name in reversed(names):
        append_line(tmp_path / f"{name}.jsonl", line_of(TINY, date=name))
    assert [line["date"] for line in kept_lines.committed_lines()] == names


def _day_after(day: str) -> str:
    return (datetime.date.fromisoformat(day) + datetime.timedelta(days=1)).isoformat()


def test_results_of_the_package_are_found_without_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "committed"
    append_line(packed / "a.jsonl", line_of(TINY))
    monkeypatch.setattr(kept_lines, "OF_SOURCES", tmp_path / "none")
    monkeypatch.setattr(kept_lines, "OF_PACKAGE", packed)
    assert KeptLines.read(tmp_path / "none.jsonl").find(TINY).state == "committed"
    wheel = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    assert wheel["force-include"] == {"results/reproduction": "fnrfl/results/reproduce/committed"}


def test_results_are_not_added_to_a_file_of_something_else(tmp_path: Path) -> None:
    notes, log = tmp_path / "notes.txt", tmp_path / "run" / "events.jsonl"
    notes.write_text("mine\n")
    log.parent.mkdir()
    for name in ("config.toml", "events.jsonl"):
        (log.parent / name).write_text("")
    for path in (notes, log, tmp_path / "notes.txt" / "lines.jsonl", tmp_path, Path(os.devnull)):
        with pytest.raises(ConfigError, match=r"(Choose|Remove|Give) "):
            carry_out([TINY], path, lines=NOTHING)
    assert notes.read_text() == "mine\n" and log.read_text() == ""


# -- running ----------------------------------------------------------------------------------------------------------


def told(cells: Sequence[PaperCell], out: Path, **more: Any) -> list[CellNotice]:
    heard: list[CellNotice] = []
    carry_out(cells, out, lines=NOTHING, tell=heard.append, **more)
    return [notice for notice in heard if notice.what != "round"]


def test_cells_are_run_once_each_and_leave_what_the_tables_need(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    noisy = PaperCell("resnet18", "feature-0.5", "paper", "fedavg", 0, "tiny")
    assert [notice.what for notice in told([TINY, LEAKING, noisy], out)] == ["start", "done"] * 3
    assert told([TINY, LEAKING, noisy], out) == []
    found = {line["id"]: line for line in read_lines(out)}
    assert found[TINY.id]["leaks"] == [] and found[LEAKING.id]["leaks"] == list(LEAKING.leaks) != []
    for cell in (TINY, LEAKING, noisy):
        line = found[cell.id]
        assert KeptLines([], [line]).find(cell).state == "here"
        assert len(line["accuracies"]) == 3 and line["accuracies"][-1] == line["accuracy"]
        assert line["bytes_up"] > 0 and sum(line["seconds_of_rounds"]) == pytest.approx(line["seconds_train"], abs=0.01)
    assert found[TINY.id]["clean"] == found[TINY.id]["accuracy"] and found[TINY.id]["noisy"] is None
    assert found[noisy.id]["noisy"] == found[noisy.id]["accuracy"] < found[noisy.id]["clean"]
    assert len(found[LEAKING.id]["notes"]["refined_after"]) == 3
    held = [line["memory"] for line in found.values()]
    assert {one["process"] for one in held} == {os.getpid()}
    assert sys.platform != "linux" or all(50 < one["host_mb"] < 50_000 for one in held)


def test_the_constant_penalty_changes_no_bit_whatever_its_weight(tmp_path: Path) -> None:
    cells = [
        PaperCell("resnet18", "feature-0.5", "paper", f"fedavg+both-leaks{rest}", 0, "tiny")
        for rest in ("", "-weight-0", "-weight-1")
    ]
    carry_out(cells, tmp_path / "lines.jsonl", lines=NOTHING)
    assert len({line["model_sha256"] for line in read_lines(tmp_path / "lines.jsonl")}) == 1


def test_fedavg_has_the_same_model_without_the_leaks_and_tables_say_so(tmp_path: Path) -> None:
    cells = [PaperCell("resnet18", "label", "paper", f"fedavg{more}", 0, "tiny") for more in ("", "+no-leak")]
    done = carry_out(cells, tmp_path / "lines.jsonl", lines=NOTHING)
    assert done[0]["model_sha256"] == done[1]["model_sha256"] and done[0]["leaks"] and not done[1]["leaks"]
    said = "train the same model without it."
    for line, expected in zip(done, (True, False), strict=True):
        tables = [show_table(name, KeptLines([], [line]), "tiny") for name in ("accuracy", "attribution")]
        assert any(said in as_text(table) for table in tables) == expected


def test_a_cell_that_fails_is_written_down_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "lines.jsonl", run_module.run

    def run(config: RunConfig, **given: Any) -> Any:
        if config.fnr is not None:
            raise ClientError("its loss is not finite.", client=1, round=1, stage="refine")
        return real(config, **given)

    monkeypatch.setattr(run_module, "run", run)
    assert [notice.what for notice in told([LEAKING, TINY], out)] == ["start", "failed", "start", "done"]
    assert read_lines(out)[0]["failed"] == "client 1, round 1, stage refine: its loss is not finite."
    assert read_lines(out)[0]["leaks"]
    assert told([LEAKING, TINY], out) == []
    assert [notice.what for notice in told([LEAKING, TINY], out, again=True)] == ["start", "failed"]


@pytest.mark.parametrize("word", ["rounds=1", "engine.thread=1", "engine=gpuu", "engine.precision=bf16"])
def test_what_would_fail_for_every_cell_ends_the_call_and_writes_nothing(word: str, tmp_path: Path) -> None:
    with pytest.raises(FnrflError):
        told([TINY], tmp_path / "lines.jsonl", words=[word])
    assert not (tmp_path / "lines.jsonl").exists()


def test_no_cell_begins_that_took_longer_than_the_time_left(tmp_path: Path) -> None:
    """Its slowest run with any seed counts, on this device and beside as many others; one that never ran begins."""
    moon = PaperCell("resnet18", "label", "honest", "moon", 0, "tiny")
    slow = line_of(replace(moon, seed=1), seconds_wall=700.0, device=device_name())
    fast = line_of(replace(moon, seed=2), device=device_name())
    for number, (lines, begins) in enumerate(
        [
            ([slow, fast], False),
            ([fast], True),
            ([slow | {"device": "another"}], True),
            ([slow | {"processes": 2}], True),
            ([slow | {"failed": "no memory"}], True),
            ([slow | {"id": slow["id"].replace("moon", "fedprox")}], True),
        ]
    ):
        done = carry_out([moon, TINY], tmp_path / f"{number}.jsonl", lines=KeptLines(lines[:1], lines[1:]), seconds=600)
        assert [line["id"] for line in done] == [moon.id, TINY.id][not begins :]


def test_cells_that_did_not_fit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("run", "rate"), ("rate",)):
        got = typed(*words, "--scale", "tiny", "--stop-after", "0s", "--out", "lines.jsonl")
        assert got.exit_code == 0 and "6 cells did not fit into 0s. Give more time" in got.output
    assert not Path("lines.jsonl").exists()
    got = typed("run", "rate", "--scale", "tiny", "--stop-after", "9m", "--out", "lines.jsonl")
    assert "6 cells done" in got.output and "did not fit" not in got.output


def test_one_call_at_a_time_writes_into_a_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")

    def another(notice: CellNotice) -> None:
        with pytest.raises(ConfigError, match=f"{out}.lock is in use by process {os.getpid()}"):
            carry_out([LEAKING], out, lines=NOTHING)

    out = tmp_path / "lines.jsonl"
    assert len(carry_out([TINY], out, lines=NOTHING, tell=another)) == 1
    assert list(tmp_path.iterdir()) == [out]


def test_a_folder_in_which_nothing_can_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the file in it can be written."""
    append_line(tmp_path / "lines.jsonl", line_of(LEAKING))
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    with pytest.raises(ConfigError, match=f"^{tmp_path} cannot be written. Choose another file with --out"):
        carry_out([TINY], tmp_path / "lines.jsonl", lines=NOTHING)


def test_a_round_is_told_if_nothing_was_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for silence, rounds in ((0.0, 3), (99.0, 0)):
        monkeypatch.setattr(cell_runs, "SECONDS_OF_SILENCE", silence)
        cell_runs.carry([TINY], tmp_path / f"{rounds}.jsonl", NOTHING, console(), stop_after=None, words=())
        assert capsys.readouterr().out.count("  round ") == rounds


def test_no_cell_begins_without_time(tmp_path: Path) -> None:
    assert told([TINY], tmp_path / "lines.jsonl", seconds=0.0) == []
    assert not (tmp_path / "lines.jsonl").exists()


def test_words_for_all_cells_are_kept_with_the_result(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    told([TINY], out, words=["engine=loop", "engine.precision=float64"])
    (line,) = read_lines(out)
    assert line["engine"] == {"name": "loop", "precision": "float64", "deterministic": True}
    assert line["words"] == ["engine=loop", "engine.precision=float64"]


def test_stopping_leaves_whole_lines_and_the_next_call_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"

    def stop(notice: CellNotice) -> None:
        if notice.what == "round" and notice.cell == LEAKING:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out([TINY, LEAKING], out, lines=NOTHING, tell=stop)
    assert [line["id"] for line in read_lines(out)] == [TINY.id]
    assert [notice.cell for notice in told([TINY, LEAKING], out)] == [LEAKING] * 2


def test_a_gpu_is_used_fast_unless_somebody_names_an_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(carrying, "engine_words", lambda: list(carrying.ON_A_GPU))
    seen: list[tuple[str, str, bool]] = []

    def run(config: RunConfig, **_: Any) -> Any:
        seen.append((config.engine.name, config.engine.precision, config.engine.deterministic))
        raise ClientError("enough.", client=0, round=1, stage="local")

    monkeypatch.setattr(run_module, "run", run)
    quick = PaperCell("resnet18", "label", "honest", "fedavg", 0, "quick")
    carry_out([TINY, quick], tmp_path / "a", lines=NOTHING)
    carry_out([quick], tmp_path / "b", lines=NOTHING, words=["engine=loop"])
    assert seen == [("auto", "auto", True), ("gpu", "bf16", False), ("loop", "auto", True)]


# -- tables as they are shown -----------------------------------------------------------------------------------------


def full_line(cell: PaperCell, accuracy: float) -> CellLine:
    """What a finished cell leaves, as far as a table reads it."""
    rounds = cell.config().rounds
    more = {"accuracies": [accuracy] * rounds, "clean": accuracy, "noisy": accuracy / 2, "seconds_train": 10.0}
    return line_of(cell, accuracy=accuracy, leaks=list(cell.leaks), **more)


@functools.cache
def filled(scale: str = "quick") -> KeptLines:
    """A result for every cell; that of seed s is s percent better."""
    cells = {cell for table in TABLES.values() for cell in table.cells(scale)}
    return KeptLines([full_line(cell, 0.5 + cell.seed / 100) for cell in cells], [])


@pytest.mark.parametrize("name", TABLES)
def test_no_column_mixes_protocols_and_every_leak_is_marked_in_every_form(name: str) -> None:
    table = show_table(name, filled(), "quick")
    for part in table.parts:
        for column in part.columns:
            assert {value.protocol for value in column.values} == {column.protocol}
            assert len(column.values) == len(part.rows)
            for row, value in zip(part.rows, column.values, strict=True):
                leaks = column.protocol == "paper" and not row.endswith("no leak") and value.mean is not None
                assert bool(value.leaks) == leaks
    marked = sum(bool(value.leaks) for value in table.values)
    for text in (as_text(table), as_markdown(table)):
        assert text.count(" leak [") == marked
        assert ("leak: public_is_test" in text) == bool(marked)
    tree = json.loads(as_json([table]))
    assert tree["leaks"] == tree["tables"][name]["leaks"] == list(table.leaks)
    values = [v for part in tree["tables"][name]["parts"] for column in part["columns"] for v in column["values"]]
    assert sum(bool(value["leaks"]) for value in values) == marked


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_which_images_fnr_is_scored_on_wherever_that_differs(name: str) -> None:
    table = show_table(name, filled(), "quick")
    differs = any(
        "clean_test_for_fnr" in value.leaks and "feature" in cell and "+fnr" in cell
        for value in table.values
        for cell in value.cells
    )
    notes = " ".join(table.notes)
    assert "FNR is scored on clean test images" in notes or not differs
    assert ("after each round" in notes) == (name == "convergence")


def test_every_row_of_a_control_is_explained() -> None:
    table = show_table("controls", filled(), "quick")
    rows = {row for part in table.parts for row in part.rows if row.startswith("public-")}
    assert rows and all(f"{row}: " in " ".join(table.notes) for row in rows)


def test_no_tiny_run_is_shown_under_the_name_of_the_papers_net() -> None:
    parts = [part for name in ("accuracy", "convergence") for part in show_table(name, NOTHING, "tiny").parts]
    for part in parts:
        computed = any(column.protocol != "printed" for column in part.columns)
        assert part.title.startswith("a small net in place of ") == computed


def test_the_theory_needs_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(theory, "check", lambda: None)
    monkeypatch.setattr(theory, "theory_text", lambda _: "as found")
    monkeypatch.delitem(sys.modules, "fnrfl.results.reproduce.theory_figure", raising=False)
    for name in [name for name in sys.modules if name.startswith("fnrfl.results.report.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = CliRunner().invoke(cli.app, ["reproduce", "theory"])
    assert shown.exit_code == 0 and "as found" in shown.stdout
    assert "no figure was drawn. Figures need the package matplotlib. Install it with" in shown.output


def test_a_column_refuses_a_value_of_another_protocol() -> None:
    with pytest.raises(ValueError, match="has values that are"):
        ShownColumn("honest protocol", "honest", (ShownValue("honest", "1"), ShownValue("paper", "1")))


def test_a_table_shows_spread_over_seeds_and_where_values_are_from() -> None:
    column = show_table("accuracy", filled(), "quick").parts[0].columns[-1]
    assert (column.head, column.values[0].words) == ("honest protocol", "0.5100 ± 0.0100")
    assert column.values[0].seeds == (0, 1, 2) and column.values[0].sources == ("committed 2026-11-16 a device",)
    seed = PaperCell("resnet18", "feature-0.5", "honest", "fedavg+fnr", 1, "quick")
    alone = show_table("accuracy", KeptLines([], [full_line(seed, 0.25)]), "quick").parts[0].columns[-1].values
    assert (alone[0].words, alone[0].missing) == ("0.2500 (seed 1 of 3)", (0, 2))
    assert alone[0].sources == ("computed here",)
    assert alone[1].words == "not run" and PaperCell.read(alone[1].cells[0]).method == "fedavg"


def test_a_table_says_failed_and_older_recipe_and_shows_no_number_of_either() -> None:
    cell = PaperCell("resnet18", "feature-0.5", "paper", "fedavg+fnr", 0, "quick")
    for more, words in (({"failed": "It fell."}, "failed"), ({"overrides": ["rounds=1"]}, "older recipe")):
        table = show_table("accuracy", KeptLines([full_line(cell, 0.25) | more], []), "quick")
        assert table.parts[0].columns[1].values[0].words == words
        assert "0.2500" not in as_text(table) and ("It fell." in as_text(table)) == (words == "failed")


def test_kappa_and_rho_of_a_table_are_those_of_a_run(tmp_path: Path) -> None:
    from fnrfl.runs.run import run

    cell = PaperCell("resnet18", "label", "paper", "scaffold", 0, "tiny")
    result = run(cell.config(), out=None)
    line = line_of(cell, seconds_wall=1.0) | numbers_of(result)
    parts = show_table("cost", KeptLines([], [line]), "tiny").parts[5:10]
    here = [part.columns[1].values[3].mean for part in parts]
    traffic = (result.bytes_up + result.bytes_down) / 2**20
    assert here == [traffic, result.seconds_train, result.accuracy, result.kappa, result.rho]


def test_seconds_beside_other_processes_are_in_no_table() -> None:
    """Whatever is not made of seconds is shown as before."""
    alone, beside = (
        show_table("cost", KeptLines([line | more for line in filled().committed.values()], []), "quick")
        for more in ({}, {"processes": 3})
    )
    changed = 0
    for before, after in zip(alone.parts, beside.parts, strict=True):
        timed = before.title.endswith((": seconds of training", "accuracy * 1e4 / seconds"))
        for old, new in zip(before.columns, after.columns, strict=True):
            if timed and old.protocol != "printed":
                assert {value.mean for value in new.values} == {None} and {value.words for value in new.values} == {"-"}
                changed += len(new.values)
            else:
                assert new == old
    assert changed == 2 * 2 * 6 * 3  # metrics, protocols, methods, skews


def test_seconds_that_are_no_measure_say_why() -> None:
    line = full_line(PaperCell("resnet18", "label", "honest", "fedavg", 0, "quick"), 0.5) | {"processes": 3}
    text = as_text(show_table("cost", KeptLines([], [line]), "quick"))
    assert text.count("- [") == 2 and "its seconds are no measure: other cells ran at the same time" in text


def test_what_was_printed_stands_beside_what_was_run() -> None:
    table = show_table("cost", KeptLines([], []), "full")
    printed = {part.title: part.columns[0].values[0].words for part in table.parts}
    assert printed["ResNet-18, label skew: kappa, accuracy * 1e4 / seconds"] == "1.3977"
    assert "the paper, tab:cost" in as_text(table)
    niid = as_text(show_table("niid-bench", KeptLines([], []), "full"))
    assert "published" in niid and "not verified" in niid


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_split_is_the_one_of_the_papers_figures() -> None:
    assert split_of("quick", "label")[4] == [504, 2917, 570, 721, 121, 356, 0, 0, 0, 0]
    assert [sum(row) for row in split_of("full", "quantity")] == [
        3901, 25, 174, 3079, 2770, 9374, 6256, 5140, 1741, 17540
    ]  # fmt: skip


def drawable() -> KeptLines:
    """A result for every cell that figures show."""
    told = {"refined": [3], "counts": [[7] * 10], "accuracy_before": [[None] * 10], "accuracy_after": [[0.5] * 10]}
    notes = {"refined_before": [[0.25] * 10], "refined_after": [[0.5] * 10], "watched": [[told]]}
    cells = [cell for name in ("convergence", "attribution") for cell in TABLES[name].cells("tiny")]
    return KeptLines([full_line(cell, 0.5) | {"notes": notes} for cell in cells], [])


def test_a_figure_with_a_leak_has_a_banner_and_metadata_and_one_without_has_none(tmp_path: Path) -> None:
    drawn = draw_all(drawable(), "tiny", tmp_path)
    assert len(drawn) == 15
    for path in drawn:
        picture = Image.open(path)
        leaks = picture.text[LEAKS_KEY]  # type: ignore[attr-defined]
        red = sum(count for count, colour in picture.convert("RGB").getcolors(2**24) or [] if colour == (179, 38, 30))
        expected = path.stem.endswith("paper") or path.stem.startswith("attribution")
        assert ("public_is_test" in leaks) == expected and (leaks == "none") != expected, path
        assert (red > 5000) == expected, path


def test_every_figure_of_results_says_its_scale() -> None:
    drawn = list(figures._figures(figures._Lookup(drawable(), "tiny")))[4:]  # the first ones are of the data
    assert len(drawn) == 11
    for one in drawn:
        assert "scale tiny" in one.figure.axes[0].get_title(loc="left"), one.name


def test_bars_say_of_which_seeds_they_are() -> None:
    part = TABLES["attribution"].parts[0]
    cells = [PaperCell(part.net, part.skew, "paper", part.methods[0], seed, "tiny") for seed in range(3)]
    for seeds, said in ((1, "(seed 0 of 3)"), (3, "")):
        few = KeptLines([], [line_of(cell, clean=0.5, noisy=0.4) for cell in cells[:seeds]])
        (drawn,) = figures._attribution(figures._Lookup(few, "tiny"))
        (name,) = (label.get_text() for label in drawn.figure.axes[0].get_xticklabels())
        assert name.partition("\n")[2] == said


def test_figures_of_the_data_need_no_results(tmp_path: Path) -> None:
    names = {path.stem for path in draw_all(NOTHING, "tiny", tmp_path)}
    assert names == {"split-label", "split-quantity", "split-label-quantity", "noisy-samples"}


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_list_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from fnrfl import cli\n"
        "got = CliRunner().invoke(cli.app, ['reproduce', 'list'])\n"
        "assert got.exit_code == 0, got.output\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_cell_by_its_id_and_a_mark_on_every_line_about_a_leak(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    got = typed("run", TINY.id, LEAKING.id, "--out", str(out))
    assert got.exit_code == 0, got.output
    assert len(read_lines(out)) == 2
    for text in got.output.splitlines():
        assert (LEAKING.id in text) == text.endswith("  leak")


def test_of_a_table_only_cells_without_a_result_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = tmp_path / "committed"
    for cell in TABLES["rate"].cells("tiny")[1:]:
        append_line(committed / "a.jsonl", line_of(cell))
    monkeypatch.setattr(kept_lines, "OF_SOURCES", committed)
    asked: list[Sequence[PaperCell]] = []
    monkeypatch.setattr(carrying, "carry_out", lambda cells, *_, **__: asked.append(cells) or [])
    for more in ([], ["--rerun"]):
        assert typed("run", "rate", "--scale", "tiny", "--out", str(tmp_path / "b.jsonl"), *more).exit_code == 0
    assert asked == [TABLES["rate"].cells("tiny")[:1], TABLES["rate"].cells("tiny")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "acuracy"], 'There is no table "acuracy"'),
        (["run", "rate", "--stop-after", "soon"], '"soon" is not a time'),
        (["run", TINY.id.removesuffix("@tiny")], f"Write {TINY.id}, or @quick or @full"),
        (["run", TINY.id.removesuffix("@tiny"), "--scale", "tiny"], f"Write {TINY.id}, or @quick or @full"),
        (["run", "x@tiny"], "is not a cell"),
        (["run", "resnet18/label/niid-bench/fedavg+fnr/seed0@tiny"], "FNR needs labelled public data"),
        (["run", "accuracy", "--seeds", "a"], "is not a list of seeds"),
    ],
)
def test_what_cannot_be_meant_is_answered_in_a_sentence(words: list[str], said: str) -> None:
    got = typed(*words)
    assert got.exit_code == 2 and said in got.output


def test_times_are_read_as_people_write_them() -> None:
    assert [read_duration(text) for text in ("90", "90s", "9m", "1.5h", " 2 m ")] == [90.0, 90.0, 540.0, 5400.0, 120.0]


def test_settings_name_their_protocol() -> None:
    for name, setting in TRIAL_SETTINGS.items():
        assert ("paper" in name) == (setting.protocol == "paper") == ("protocol=paper" in setting.keys)


def test_a_table_runs_tiny_cells_that_are_missing_and_nothing_else(tmp_path: Path) -> None:
    out = str(tmp_path / "lines.jsonl")
    got = CliRunner().invoke(cli.app, ["reproduce", "rate", "--scale", "quick", "--out", out])
    assert got.exit_code == 0 and "not run" in got.stdout and not Path(out).exists()
    got = CliRunner().invoke(cli.app, ["reproduce", "rate", "--scale", "tiny", "--out", out])
    assert got.exit_code == 0 and "computed here" in got.stdout and "leak [" in got.stdout
    assert len(read_lines(Path(out))) == 6
    again = CliRunner().invoke(cli.app, ["reproduce", "rate", "--scale", "tiny", "--out", out, "--json"])
    assert json.loads(again.stdout)["leaks"] and again.stderr == ""


@pytest.mark.slow
def test_every_table_at_the_tiny_scale(tmp_path: Path) -> None:
    """All cells of all tables, none of which fails."""
    out = tmp_path / "lines.jsonl"
    got = typed("all", "--scale", "tiny", "--out", str(out))
    assert got.exit_code == 0, got.output[-2000:]
    written = json.loads((tmp_path / "tables-tiny.json").read_text())
    assert set(written["tables"]) == {*TABLES, "claims"} and written["leaks"]
    for name, table in written["tables"].items():
        values = [v for part in table["parts"] for column in part["columns"] for v in column["values"]]
        assert not {"not run", "failed", "older recipe"} & {value["words"] for value in values}, name
    assert "leak: " in (tmp_path / "tables-tiny.md").read_text()
    assert len(list((tmp_path / "figures-tiny").glob("*.png"))) == 15


def test_two_forms_of_one_answer_are_refused() -> None:
    got = typed("accuracy", "--json", "--markdown")
    assert got.exit_code == 2 and "--json and --markdown are two forms of one answer" in got.output
