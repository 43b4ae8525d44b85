"""Lines of results, what counts of several, and the cells that make them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fnrfl
from fnrfl.config import load
from fnrfl.config.schema import FIRST_DEFAULTS
from paper_lines import NOTHING, line_of
from reproduction import running, store
from reproduction.catalogue import PRINTED, SETTINGS, TABLES, Cell, UsageError, protocol_of, table_parts
from reproduction.claims import named_cells
from reproduction.running import missing_cells, run_cells
from reproduction.store import Line, Results, append_line, committed_lines, read_lines, timed_together
from reproduction.tables import make_table

TINY = Cell("resnet18", "label", "honest", "fedavg", 0, "tiny")
LEAKING = Cell("resnet18", "label", "paper", "fedavg+fnr", 0, "tiny")
PARTS = [part for name in TABLES[:-1] for part in table_parts(name)]
EVERY = {cell for name in TABLES for scale in SETTINGS["scales"] for cell in named_cells(name, scale)}


def test_an_id_is_read_back_and_names_one_cell() -> None:
    assert len({cell.id for cell in EVERY}) == len(EVERY)
    assert {Cell.read(cell.id) for cell in EVERY} == EVERY


def test_every_cell_makes_a_config_and_says_leak_exactly_if_it_leaks() -> None:
    for cell in EVERY:
        config = load(cell.recipe, [*cell.logged, *cell.overrides])
        assert (config.seed, config.protocol) == (cell.seed, protocol_of(cell.setting))
        assert bool(config.leaks_on) == cell.leaks, cell.id


@pytest.mark.parametrize(
    "text", ["", "resnet18", "resnet81/label/honest/fedavg/seed0@tiny", "resnet18/label/honest/fedavg+fn/seed0@tiny"]
)
def test_an_id_that_is_none_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match=r"\.$"):
        Cell.read(text)


def test_only_the_scale_of_the_work_differs_between_quick_and_full() -> None:
    for cell in named_cells("accuracy", "quick", [0]):
        quick, full = (load(one.recipe, one.overrides).flat() for one in (cell, replace(cell, scale="full")))
        differing = {key for key in quick if quick[key] != full[key]}
        assert differing <= {"client.epochs", "fnr.epochs", "algorithm.epochs"}


def test_settings_of_a_part_share_the_split() -> None:
    for part in PARTS:
        cells = [cell for setting in part.settings for cell in part.cells(setting, part.methods[0], "quick", [0])]
        assert len({load(cell.recipe, cell.overrides).scenario for cell in cells}) == 1


def test_a_cell_names_the_options_of_its_method_whose_default_has_changed() -> None:
    """A line that was made with an earlier default has other overrides then, and is an older recipe."""
    changed = {method: keys for method, keys in FIRST_DEFAULTS.items() if method in SETTINGS["methods"]}
    assert changed
    for method, keys in changed.items():
        named = Cell("resnet18", "label", "honest", method, 0, "quick").overrides
        assert keys.keys() <= {word.partition("=")[0] for word in named}


def test_every_printed_number_has_a_row() -> None:
    places = {
        (name, part.net, part.skew, method if metric == "accuracy" and name != "cost" else f"{method}:{metric}")
        for name in TABLES[:-1]
        for part in table_parts(name)
        for method in part.methods
        for metric in part.metrics
    }
    assert set(PRINTED) <= places and len([key for key in PRINTED if key[0] == "accuracy"]) == 66


def test_the_printed_kappa_and_rho_follow_from_the_other_printed_numbers() -> None:
    """But for three last digits, as far as rounding of the printed accuracy goes."""
    wrong = 0
    for skew in ("feature-0.5", "label", "quantity"):
        for method in SETTINGS["groups"]["six"]:
            mib, seconds, accuracy, kappa, rho = (
                PRINTED["cost", "resnet18", skew, f"{method}:{metric}"].value
                for metric in ("mib", "seconds", "accuracy", "kappa", "rho")
            )
            assert accuracy == PRINTED["accuracy", "resnet18", skew, method].value
            for printed, computed in ((kappa, accuracy * 1e4 / seconds), (rho, accuracy * 1e4 / mib)):
                assert printed == pytest.approx(computed, abs=1.6e-4)
                wrong += round(computed, 4) != printed
    assert wrong == 3


def test_five_printed_rows_are_fedavg_and_a_constant() -> None:
    for method, offset in (("feddyn", 70), ("fedftg", 450), ("feddf", 100), ("feddc", 400), ("fedgen", 20)):
        for net in ("resnet18", "vgg11"):
            for skew in SETTINGS["groups"]["single"]:
                printed, fedavg = (PRINTED["accuracy", net, skew, name] for name in (method, "fedavg"))
                assert round(1e4 * (printed.value - fedavg.value)) == offset
                assert f"{offset / 1e4:.4f}" in printed.note


def test_a_committed_line_counts_first_and_a_failure_only_where_nothing_succeeded() -> None:
    failed, older = line_of(TINY, failed="It did not."), line_of(TINY, overrides=["a=1"])
    for committed, here, state in (
        ([], [], "not-run"), ([line_of(TINY)], [line_of(TINY)], "committed"), ([], [line_of(TINY)], "here"),
        ([], [failed], "failed"), ([], [line_of(TINY), failed], "here"), ([failed], [line_of(TINY)], "here"),
        ([older], [], "older"), ([older], [line_of(TINY)], "here"), ([], [older, failed], "failed"),
    ):  # fmt: skip
        assert Results(committed, here).find(TINY).state == state


def test_a_file_can_add_leaks_to_a_cell_and_take_none_away() -> None:
    both = ["public_is_test", "another"]
    for cell, said, marked in ((LEAKING, [], both[:1]), (LEAKING, both, both), (TINY, [], [])):
        assert Results([], [line_of(cell, leaks=said)]).find(cell).leaks == marked


def test_of_several_lines_the_first_counts_with_the_last_seconds_that_are_a_measure() -> None:
    first = line_of(TINY, accuracy=0.5, seconds_train=10.0)
    again = line_of(TINY, accuracy=0.6, seconds_train=7.0, seconds_of_rounds=[7.0])
    failed, another = replace(first, failed="It did not."), {"device": "another"}

    def counts(*lines: Line) -> tuple[float, float]:
        line = Results(lines).find(TINY)
        assert line.usable and (line.seconds_train != 7.0 or line.seconds_of_rounds == [7.0])
        return line.accuracy, line.seconds_train

    marks: list[dict[str, Any]] = [{"processes": 2}, {"kept_rounds": 0}, {"no_measure": "a power cut"}]
    assert counts(first, again) == counts(failed, first, again, failed) == (0.5, 7.0)
    assert counts(first, replace(again, **another)) == (0.5, 10.0)
    assert counts(replace(first, overrides=["rounds=1"]), again) == (0.6, 7.0)
    for mark in marks:
        assert counts(first, replace(again, **mark)) == (0.5, 10.0)
        assert Results([replace(first, **mark)]).find(TINY).untimed
        assert not Results([replace(first, **mark), again]).find(TINY).untimed
    days = replace(first, date="2026-11-01"), replace(again, date="2026-11-02")
    found = Results(days).find(TINY)
    assert found.origin == "committed 2026-11-01 a device, seconds of 2026-11-02"
    assert "seconds of" not in Results([first, again]).find(TINY).origin
    assert timed_together(found, days[1]) and not timed_together(found, days[0])


def fields(line: Line) -> dict[str, Any]:
    """A line as it stands in a file."""
    return {name: value for name, value in vars(line).items() if value not in ("", None) and name != "state"}


def test_half_a_line_is_passed_over_and_the_next_begins_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    append_line(path, fields(line_of(TINY)))
    with path.open("ab") as file:
        file.write(b'{"id": "half')
    append_line(path, fields(line_of(LEAKING)))
    with path.open("a") as file:
        file.write(f'{{"id": {"[" * 100_000}\n[1]\n')
    assert [line.id for line in read_lines(path)] == [TINY.id, LEAKING.id]


@pytest.mark.parametrize("name", [*store.NEEDED, *store.NUMBERS, "0 to 1"])
def test_a_line_that_lacks_what_tables_need_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, fields(line_of(LEAKING)))
    append_line(path, fields(line_of(TINY)) | ({"accuracy": 2} if name == "0 to 1" else {name: None}))
    with pytest.raises(UsageError, match=f"line 2: the result of {TINY.id} has .*{name}.* Take this line out"):
        read_lines(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_lines(tmp_path)


def test_committed_results_are_whole_and_of_cells_that_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = committed_lines()
    assert len(lines) > 480 and {replace(Cell.read(line.id), seed=0) for line in lines} <= EVERY
    results = Results(lines)
    assert all(results.find(Cell.read(line.id)).state != "older" for line in lines)
    monkeypatch.setattr(store, "COMMITTED", tmp_path)
    for name in ("gpu-10", "gpu-2", "gpu"):
        append_line(tmp_path / f"{name}.jsonl", fields(line_of(TINY, device=name)))
    assert [line.device for line in committed_lines()] == ["gpu", "gpu-2", "gpu-10"]


def test_cells_are_run_once_each_and_leave_what_the_tables_need(tmp_path: Path) -> None:
    path, said = tmp_path / "lines.jsonl", list[str]()
    cells = [LEAKING, replace(LEAKING, method="fedavg")]
    assert run_cells(cells, path, say=said.append) == 0
    results = Results.read(path)
    assert missing_cells(cells, results) == [] and [*tmp_path.iterdir()] == [path]
    assert all("  leak" in line for line in said) and len(said) == 2
    raw = [json.loads(text) for text in path.read_text().splitlines()]
    for cell, line in zip(cells, raw, strict=True):
        result = fnrfl.compare(cell.recipe, cells={"it": [*cell.overrides]}, out=tmp_path / cell.method).runs[0]
        assert line["model_sha256"] == result["model_sha256"] and line["seconds_wall"] > line["seconds_train"] > 0
        found = results.find(cell)
        assert (found.accuracy, found.bytes) == (result["accuracy"], result["bytes_up"] + result["bytes_down"])
    part = next(part for part in make_table("accuracy", results, "tiny").parts if part.key[:2] == ("resnet18", "label"))
    value = part.value("fedavg+fnr", "paper")
    assert value and value.number and value.number.mean == raw[0]["accuracy"] and value.leaks


def test_a_cell_that_fails_is_written_down_the_others_go_on_and_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.jsonl"
    monkeypatch.setattr(running, "_engine", lambda cell: ["client.lr=1e30"] if cell.seed else [])
    cells = [replace(TINY, seed=1), TINY]
    assert run_cells(cells, path, say=lambda line: None) == 1
    states = [Results.read(path).find(cell).state for cell in cells]
    assert states == ["failed", "here"] and "finite" in Results.read(path).find(cells[0]).failed
    assert missing_cells(cells, Results.read(path)) == cells[:1]
    assert missing_cells(cells, Results(read_lines(path))) == []  # a committed failure is a result


def test_no_cell_begins_without_time(tmp_path: Path) -> None:
    said = list[str]()
    assert run_cells([TINY], tmp_path / "lines.jsonl", stop_after=0.0, say=said.append) == 0
    assert said == ["1 cells would not have ended in time. To go on, give the same command again."]
    assert not (tmp_path / "lines.jsonl").exists() and missing_cells([TINY], NOTHING) == [TINY]


@pytest.mark.slow
def test_cells_in_processes_have_the_models_of_cells_here_and_say_so(tmp_path: Path) -> None:
    cells = named_cells("rate", "tiny", [0])
    for on in ("here", "processes"):
        assert run_cells(cells, tmp_path / on, on=on, workers=2, say=lambda line: None) == 0
    here, beside = ([json.loads(text) for text in (tmp_path / on).open()] for on in ("here", "processes"))
    models = [{one["id"]: one["model_sha256"] for one in lines} for lines in (here, beside)]
    assert models[0] == models[1]
    assert {one["processes"] for one in beside} == {2} and not any("processes" in one for one in here)
