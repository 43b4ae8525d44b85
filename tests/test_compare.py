"""Grids: how they are read and named, that nothing finished is done twice, and what the table says."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import fnrfl
from fnrfl.config import load
from fnrfl.core.errors import ConfigError
from fnrfl.results.compare import (
    Cell,
    Comparison,
    Notice,
    compare,
    default_out,
    grid,
    notes,
    plan_grid,
    read_duration,
    read_seeds,
    running,
    seeds_in_list,
    split_commas,
    summarise,
    table,
)
from fnrfl.results.compare.cells import find_baseline, names
from fnrfl.runs import run as runs
from fnrfl.runs.quality import TEST_METRICS
from settings import with_keys

SMALL = ["rounds=2", "clients=4", "client.epochs=1", "client.batch=256"]
METHODS = ["algorithm=fedavg,scaffold"]


def labels(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.group.label for cell in cells))


def controls(cells: Sequence[Cell]) -> dict[str, str | None]:
    return {cell.group.label: cell.group.control for cell in cells}


# -- reading -----------------------------------------------------------------------------------------------------------

words = st.text(st.characters(exclude_characters=",()[]{}'\"", exclude_categories=("C", "Z")), min_size=1, max_size=8)
insides = st.text(st.characters(exclude_characters="()[]{}'\"", exclude_categories=("C",)), max_size=8)
values = st.recursive(
    words | insides.map(lambda text: f'"{text}"') | insides.map(lambda text: f"'({text}'"),
    lambda inner: st.tuples(words, st.lists(inner, min_size=1, max_size=3), st.sampled_from(("()", "[]", "{}"))).map(
        lambda made: f"{made[0]}{made[2][0]}{', '.join(made[1])}{made[2][1]}"
    ),
    max_leaves=6,
)


@given(st.lists(values, min_size=1, max_size=5), st.sampled_from((",", ", ", " , ")))
def test_lists_are_split_where_they_were_joined(pieces: list[str], comma: str) -> None:
    assert split_commas(comma.join(pieces)) == pieces


@given(st.text(st.sampled_from("ab,()[]'\" "), max_size=12))
def test_splitting_loses_nothing_or_says_what_is_missing(text: str) -> None:
    try:
        pieces = split_commas(text)
    except ConfigError as error:
        assert re.search(r"lacks a closing [)\]'\"]", str(error))
    else:
        assert ",".join(pieces).replace(" ", "") == text.replace(" ", "")


def test_scenarios_keep_their_commas() -> None:
    cells = grid("digits", [], ["scenario=label-dirichlet(0.5, min=5),iid", "clients=5,6"], [0])
    pairs = itertools.product(("label-dirichlet(0.5, min=5)", "iid"), (5, 6))
    assert [(cell.config.scenario, cell.config.clients) for cell in cells] == list(pairs)
    assert labels(cells)[0] == "label-dirichlet(0.5, min=5), clients 5"
    assert cells[0].name == "label-dirichlet-0.5-min-5-clients-5-seed-0"


def test_seeds_and_times_are_read_as_people_write_them() -> None:
    assert (read_seeds("3"), read_seeds("0, 1,7-9"), seeds_in_list(np.arange(2))) == ([3], [0, 1, 7, 8, 9], [0, 1])
    assert [read_duration(good) for good in ("90", "90s", "1.5m", "2h")] == [90.0, 90.0, 90.0, 7200.0]


@pytest.mark.parametrize(
    ("read", "wrong", "said"),
    [
        *((read_seeds, text, "whole numbers") for text in ("", "a", "1,", "-1", "1.5", "0-", "4-2", "0-999999999")),
        (read_seeds, "9" * 5000, "whole numbers"),
        *((seeds_in_list, seeds, "list of whole numbers") for seeds in ([0.5, 1.7], ["x"], "0-2", 3)),
        *((read_duration, text, "90s, 9m or 2h") for text in ("soon", "-1", "9 minutes", "1e3")),
    ],
)
def test_what_cannot_be_read_is_refused(read: Callable[[Any], Any], wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(wrong)


# -- the grid ----------------------------------------------------------------------------------------------------------


def test_a_grid_has_every_combination_with_every_seed() -> None:
    cells = grid("digits", SMALL, ["algorithm=fedavg,moon", "fnr=off,on"], [3, 5], control=False)
    expected = list(itertools.product((3, 5), ("fedavg", "moon"), ("off", "on")))
    assert [cell.name for cell in cells] == [f"{method}-fnr-{fnr}-seed-{seed}" for seed, method, fnr in expected]
    for cell, (seed, method, fnr) in zip(cells, expected, strict=True):
        assert cell.config == load("digits", [*SMALL, f"algorithm={method}", f"fnr={fnr}", f"seed={seed}"])
        assert cell.seed == seed


@pytest.mark.parametrize(
    ("overrides", "over", "expected"),
    [
        ([], [], ["fedavg"]),
        (["client.lr=0.5"], ["client.lr=0.1,0.2"], ["client.lr 0.1", "client.lr 0.2"]),  # values win
        (["fnr=on"], METHODS, ["fedavg, fnr on", "scaffold, fnr on"]),  # named wherever it is on
        ([], ["fnr=off,on", "fnr.weight=0.1,1"], ["fnr off", "fnr on, fnr.weight 0.1", "fnr on, fnr.weight 1"]),
        ([], ["fnr.weight=0.1,1", "fnr=off,on"], ["fnr off", "fnr.weight 0.1, fnr on", "fnr.weight 1, fnr on"]),
    ],
)
def test_groups_are_named_by_what_varies(overrides: list[str], over: list[str], expected: list[str]) -> None:
    cells = grid("digits", overrides, over, [0, 1], control=False)
    assert labels(cells) == expected
    for cell in cells:
        assert (cell.config.fnr is not None) == ("fnr" in cell.group.label and "fnr off" not in cell.group.label)
        if "client.lr" in cell.group.label:
            assert cell.group.label == f"client.lr {cell.config.client.lr}"


def test_a_grid_is_checked_without_torch() -> None:
    code = """
import sys
from fnrfl.results.compare import grid
assert len(grid("digits", [], ["algorithm=fedavg,scaffold", "fnr=off,on"], [0, 1])) == 12
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@given(st.lists(st.text(max_size=150), min_size=1, max_size=8))
def test_names_are_safe_and_all_different(texts: list[str]) -> None:
    found = names(texts)
    assert len({name.casefold() for name in found}) == len(texts)
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name) and len(name) < 120 for name in found)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        (["client.lr"], "write key=a,b"),
        (["client.lr="], "write key=a,b"),
        (["client.lr=0.1,,0.2"], "write key=a,b"),
        (["=0.1"], "write key=a,b"),
        (["scenario=label-dirichlet(0.1"], "lacks a closing )"),
        (["seed=0,1"], "with --seeds"),
        (["algorithm=fedavg", "algorithm.name=moon"], "algorithm.name is varied twice"),
        (["client.lr=0.1,0.10"], "client.lr=0.10 is the same as client.lr 0.1; give it once."),
        (["client.lr=0.1,0.1"], "value 0.1 twice"),
        (["algorithm=fedavg,scaffold, fedavg"], "value fedavg twice"),
        (["name=a,a"], "value a twice"),
        (["algorithm=fedavg,fedavgg"], "Did you mean fedavg?"),
        (["client.lr=0.1,-1", "rounds=1,x"], "client.lr=-1, rounds=1: client.lr = -1 is not allowed"),
        (["client.lr=0.1,-1", "rounds=1,x"], 'client.lr=0.1, rounds=x: rounds = "x" is not allowed'),
    ],
)
def test_bad_values_are_refused(over: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grid("digits", [], over, [0])
    assert said in str(caught.value) and "client.lr=0.1, rounds=1:" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "seeds", "said"),
    [
        ([], [], "The seeds are none"),
        ([], [1, 2, 1], "The seeds are 1, 2, 1; there must be at least one, and each only once"),
        ([], [-1], "seed = -1 is not allowed"),
        (["seed=3"], [0], "use --seeds"),
        (["roundz=3"], [0], "^Unknown key roundz: did you mean rounds.$"),  # wrong everywhere, and told once
    ],
)
def test_bad_seeds_and_overrides_are_refused(overrides: list[str], seeds: list[int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        grid("digits", overrides, ["client.lr=0.1,0.2"], seeds)


# -- controls ----------------------------------------------------------------------------------------------------------


def test_each_method_with_fnr_gets_its_control() -> None:
    cells = grid("digits", [], [*METHODS, "fnr=off,on"], [0, 1])
    fnr = {"fnr off": None, "fnr on": "fnr weight 0", "fnr weight 0": None}
    assert controls(cells) == {
        f"{method}, {label}": control and f"{method}, {control}"
        for method in ("fedavg", "scaffold")
        for label, control in fnr.items()
    }
    assert len(cells) == 12
    on, without = cells[1].config, cells[2].config
    assert on.fnr is not None and without.fnr == dataclasses.replace(on.fnr, weight=0.0)
    assert with_keys(without, {"fnr": {"weight": on.fnr.weight}}) == on


def test_weights_and_penalties_share_a_control() -> None:
    over = ["fnr.weight=0.1,1", "fnr.penalty=relative,squared", "fnr.target=others,all", "fnr.epochs=1"]
    cells = grid("digits", [], over, [0])
    assert labels(cells).count("fnr.epochs 1, fnr weight 0") == 1
    assert len(cells) == 9
    assert set(controls(cells).values()) == {None, "fnr.epochs 1, fnr weight 0"}
    there = grid("digits", ["fnr.penalty=squared"], ["fnr.weight=0,0.1"], [0])  # one that is there already is used
    assert controls(there) == {"fnr.weight 0": None, "fnr.weight 0.1": "fnr.weight 0"}


def test_the_released_code_needs_no_control() -> None:
    """Its penalty has no gradient: the control is the same model."""
    assert labels(grid("paper-label-skew", [], ["fnr=off,on"], [0])) == ["fnr off", "fnr on"]


# -- baselines ---------------------------------------------------------------------------------------------------------


def baselines(cells: Sequence[Cell], text: str | None) -> dict[str, str | None]:
    parts = find_baseline([cell.group for cell in cells], text)
    return {row.group: row.baseline for row in summarise(cells, {}, {}, parts).rows}


def test_by_default_every_task_has_its_own_baseline() -> None:
    cells = grid("digits", [], [*METHODS, "scenario=iid,label-classes(2)", "fnr=off,on"], [0])
    assert set(baselines(cells, None).items()) >= {
        ("fedavg, iid, fnr off", "fedavg, iid, fnr off"),
        ("scaffold, iid, fnr on", "fedavg, iid, fnr off"),
        ("scaffold, label-classes(2), fnr weight 0", "fedavg, label-classes(2), fnr off"),
    }
    assert len(set(baselines(cells, None).values())) == 2
    tasks = grid("digits", [], ["scenario=iid,label-classes(2)"], [0])  # where only the task varies, the first
    assert set(baselines(tasks, None).values()) == {"iid"}


@pytest.mark.parametrize("text", ["scaffold, fnr off", "scaffold-fnr-off", "fnr off, scaffold", "SCAFFOLD,fnr=off"])
def test_a_baseline_is_named_as_in_the_table_or_its_folder(text: str) -> None:
    cells = grid("digits", [], [*METHODS, "fnr=off,on"], [0])
    assert set(baselines(cells, text).values()) == {"scaffold, fnr off"}
    # some words leave the rest to each row
    assert baselines(cells, "fnr off")["scaffold, fnr on"] == "scaffold, fnr off"
    assert baselines(cells, "algorithm=fedavg")["scaffold, fnr weight 0"] == "fedavg, fnr weight 0"


# -- the table ---------------------------------------------------------------------------------------------------------


def summary(accuracy: float, **more: Any) -> dict[str, Any]:
    same = ("accuracy_last3", "accuracy_best", "balanced_accuracy", "worst_client", "kappa", "rho", "seconds_train")
    return {"accuracy": accuracy, "bytes_up": 2**20, "bytes_down": 3 * 2**20} | dict.fromkeys(same, accuracy) | more


def made(recipe: str = "digits", failures: dict[str, str] | None = None, target: bool = False) -> Comparison:
    """FedAvg at 0.5 and 0.7; FNR better by 0.1 and 0.3; its control better than FedAvg by 0.1 twice."""
    accuracy = {"fnr-off": (0.5, 0.7), "fnr-on": (0.6, 1.0), "fnr-weight-0": (0.6, 0.8)}
    cells = grid(recipe, [], ["fnr=off,on"], [0, 1])
    found = {
        cell.name: summary(accuracy[cell.name.rpartition("-seed-")[0]][cell.seed])
        for cell in cells
        if cell.name not in (failures or {})
    }
    if target:
        found["fnr-off-seed-1"] |= {"target": 0.6, "rounds_to_target": 3}
        found["fnr-on-seed-0"] |= {"target": 0.6, "rounds_to_target": 2}
        found["fnr-on-seed-1"] |= {"target": 0.6, "rounds_to_target": 1}
    return summarise(cells, found, failures or {}, find_baseline([cell.group for cell in cells], None))


def test_a_way_to_a_target_counts_only_if_every_seed_got_there() -> None:
    off, on, _ = made(target=True).rows
    assert off.metrics["rounds_to_target"] is None
    assert (on.metrics["rounds_to_target"] or off).mean == 1.5  # type: ignore[union-attr]
    assert "rounds to 0.6" in made(target=True).to_markdown()
    assert "rounds to" not in made().to_markdown()


def test_numbers_that_a_run_does_not_have_are_left_out() -> None:
    cells = grid("digits", [], [], [0, 1])
    found = {cells[0].name: summary(0.5, accuracy_best=None), cells[1].name: summary(0.6, worst_client=float("nan"))}
    (row,) = summarise(cells, found, {}, cells[0].group.parts).rows
    known = [row.metrics[name] for name in ("accuracy_best", "worst_client")]
    assert [(value.n, value.mean) for value in known if value] == [(1, 0.6), (1, 0.5)]


@pytest.mark.parametrize("own", ["accuracy_own", "accuracy_site_pooled"])
def test_clients_own_metric_is_shown_where_some_methods_are_personalised(own: str) -> None:
    cells = grid("digits", [], ["algorithm=fedavg,local-only"], [0, 1])
    for personalised, metric in itertools.product((True, False), ("accuracy", own)):
        scores = {own: 0.95, "accuracy_own": 0.95, "personalised": False}
        found = {cell.name: summary(0.8, **scores) for cell in cells}
        for name in found:
            found[name]["personalised"] = personalised and "local-only" in name
        baseline = find_baseline([cell.group for cell in cells], None)
        text = summarise(cells, found, {}, baseline, TEST_METRICS[metric]).to_markdown()
        said = personalised and metric == "accuracy"
        assert (f"--metric {own} compares it" in text) is said
        assert (f"| {own} |" in text) is (said or metric == own) and ("0.9500" in text) is (said or metric == own)


def test_files_say_everything() -> None:
    tree = json.loads(made().to_json())
    assert (tree["cells"], tree["done"], tree["leaks"], tree["failed"]) == (6, 6, [], [])
    off, on, without = tree["rows"]
    assert (on["group"], on["algorithm"], on["scenario"], on["n"]) == ("fnr on", "fedavg", "label-dirichlet(0.1)", 2)
    assert (on["fnr"]["weight"], on["baseline"], on["control"]) == (0.1, "fnr off", "fnr weight 0")
    assert on["difference"] == pytest.approx(
        {"n": 2, "mean": 0.2, "sd": 0.02**0.5, "low": -1.0706204736, "high": 1.4706204736, "p": 0.2951672353}
    )
    assert (on["accuracy"]["mean"], on["accuracy"]["sd"]) == (pytest.approx(0.8), pytest.approx(0.08**0.5))
    assert (on["seeds"], on["penalty"]["mean"]) == ([0, 1], pytest.approx(0.1))
    assert (without["difference"]["mean"], without["difference"]["p"]) == (pytest.approx(0.1), None)
    assert (off["difference"], off["penalty"], without["penalty"]) == (None, None, None)
    assert [run["cell"] for run in tree["runs"]][:2] == ["fnr-off-seed-0", "fnr-on-seed-0"]
    rows = list(csv.DictReader(io.StringIO(made().to_csv())))
    assert [row["group"] for row in rows] == ["fnr off", "fnr on", "fnr weight 0"]
    numbers = [float(rows[1][name]) for name in ("accuracy", "penalty", "difference_p")]
    assert numbers == pytest.approx([0.8, 0.1, 0.2951672353])
    assert (rows[1]["difference_to"], rows[0]["difference"], rows[1]["leaks"]) == ("fnr off", "", "")


def test_markdown_has_a_line_per_row() -> None:
    lines = made().to_markdown().splitlines()
    assert lines[2].startswith("| fnr off | 2 | 0.6000 ± 0.1414 | baseline |  |")
    assert lines[3].startswith("| fnr on | 2 | 0.8000 ± 0.2828 | +0.2000 ± 1.2706 | 0.295 | +0.1000 ± 1.2706 |")
    assert lines[4].startswith("| fnr weight 0 | 2 | 0.7000 ± 0.1414 | +0.1000 | - |  |  |")
    assert len({line.count("|") for line in lines[:5]}) == 1


def test_every_row_with_a_leak_says_so() -> None:
    """Under the released code's protocol refinement leaks; the word is on each row, in each form."""
    cells = grid("paper-label-skew", [], ["fnr=off,on"], [0])
    found = summarise(cells, {cell.name: summary(0.5) for cell in cells}, {}, cells[0].group.parts)
    assert all(row.leaks for row in found.rows)
    assert [line.count("(leak)") for line in found.to_markdown().splitlines()[2:4]] == [1, 1]
    assert "- leak: public_is_test" in found.to_markdown()
    assert found.to_csv().count('"leak: public_is_test') == 2
    assert [row["leaks"][0] for row in json.loads(found.to_json())["rows"]] == ["public_is_test"] * 2
    assert shown(found, 60).count("(leak)") == 2
    assert "leak" not in made().to_markdown() + shown(made(), 200)


def shown(found: Comparison, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(table(found, width))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("width", [20, 30, 45, 60, 66, 72, 100, 200])
@pytest.mark.parametrize("target", [False, True])
def test_no_terminal_is_so_narrow_that_a_leak_is_not_marked(width: int, target: bool) -> None:
    """A name is folded, and columns of numbers make room for it."""
    lines = shown(made("paper-label-skew", target=target), width).splitlines()
    names = [line.strip().partition("  ")[0] for line in lines]
    assert "".join(names).replace(" ", "").count("(leak)") == 2


@pytest.mark.parametrize("width", range(20, 160, 5))
def test_notes_explain_the_columns_that_are_shown(width: int) -> None:
    head = shown(made(), width).partition("─")[0].split()
    told = " ".join(notes(made(), width))
    words = {"difference": "Differences of", "p": "and p of", "penalty": "Penalty:", "kappa": "and kappa"}
    for column, word in (words | {"seconds": "Seconds are"}).items():
        assert (column in head) == (word in told)


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        *(({"target": target}, "accuracy is between 0 and 1") for target in (float("nan"), float("inf"), 90.0, -0.1)),
        ({"metric": "nonsense"}, 'no metric "nonsense"'),
        ({"metric": "confusion"}, "confusion is not one number"),
        ({"baseline": "scafold"}, 'no baseline "scafold" in this comparison. Did you mean "scaffold"?'),
    ],
)
@pytest.mark.parametrize("command", [plan_grid, compare])
def test_what_cannot_be_judged_is_refused_before_anything_runs(
    command: Any, judged: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        command(grid("digits", SMALL, METHODS, [0]), tmp_path / "out", **judged)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 150, 200])
def test_a_terminal_table_fits_and_cuts_no_number(width: int) -> None:
    text = shown(made(), width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    assert all(always in text for always in ("fnr weight 0", "0.800 ± 0.283", "+0.200 ± 1.271", "baseline"))
    assert ("rho" in text) == (width >= 150)


def test_names_with_brackets_and_bars_are_shown_as_they_are() -> None:
    cells = grid("digits", [], ["model=[red]x:y,a|b:c"], [0])
    found = summarise(cells, {cell.name: summary(0.5) for cell in cells}, {}, cells[0].group.parts)
    assert "[red]x:y" in shown(found, 100)
    assert "| a\\|b:c | 1 |" in found.to_markdown()


def test_what_failed_or_is_missing_is_said() -> None:
    found = made(failures={"fnr-on-seed-0": "client 3, round 2: the loss is nan", "fnr-on-seed-1": "no"})
    assert found.exit_code == 3
    assert (found.rows[1].seeds, found.rows[1].difference, found.rows[1].metrics["accuracy"]) == ((), None, None)
    assert "fnr-on-seed-0 failed: client 3, round 2: the loss is nan" in found.to_markdown()
    assert "4 of 6 runs are finished." in found.to_markdown()
    assert json.loads(found.to_json())["failed"][0]["seed"] == 0
    assert "fnr on" in shown(found, 100)
    assert list(csv.DictReader(io.StringIO(found.to_csv())))[1]["accuracy"] == ""
    assert made().exit_code == 0 and "(n =" not in made().to_markdown() and made().table()["difference_n"][1] == 2
    lone = made(failures={"fnr-off-seed-1": "no"})  # a difference of fewer seeds than its row says so
    assert lone.rows[1].seeds == (0, 1) and lone.table()["difference_n"][1] == 1
    assert "| +0.1000 (n = 1) |" in lone.to_markdown()


# -- carrying it out ---------------------------------------------------------------------------------------------------


def small(seeds: Sequence[int] = (0, 1), over: Sequence[str] = METHODS) -> list[Cell]:
    return grid("digits", SMALL, over, seeds)


def facts(found: Comparison) -> list[tuple[str, str, float]]:
    return [(run["cell"], run["model_sha256"], run["accuracy"]) for run in found.runs]


def marks(out: Path) -> dict[str, tuple[int, int]]:
    """Which files of finished runs there are, and whether they are the same ones."""
    finished = [path.parent for path in out.glob("*/model.safetensors")]
    files = [path for folder in finished for path in folder.rglob("*")]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


Whole = tuple[Path, Comparison, list[Notice]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A small comparison that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    seen: list[Notice] = []
    return out, compare(small(), out, progress=seen.append), seen


def test_every_run_is_the_one_that_it_would_be_alone(whole: Whole) -> None:
    out, found, _ = whole
    cell = small()[3]
    alone = runs.run(cell.config, out=None)
    assert (cell.name, alone.model_sha256, alone.accuracy) == facts(found)[3]
    assert runs.load(out / cell.name).model_sha256 == alone.model_sha256


def test_the_files_say_what_was_returned(whole: Whole) -> None:
    out, found, _ = whole
    assert (out / "comparison.json").read_text() == found.to_json()
    assert (out / "comparison.csv").read_text() == found.to_csv()
    assert (out / "comparison.md").read_text() == found.to_markdown()
    assert sorted(path.name for path in out.iterdir() if not path.is_dir()) == [
        "comparison.csv", "comparison.json", "comparison.md", "grid.json",
    ]  # fmt: skip
    assert len(found.runs) == found.cells == 4


def test_one_is_told_what_happens(whole: Whole) -> None:
    seen = [(notice.what, notice.number, notice.total) for notice in whole[2]]
    assert seen[:2] == [("check", 1, 4), ("check", 2, 4)]
    assert seen[2:6] == [("start", 1, 4), ("round", 1, 4), ("round", 1, 4), ("done", 1, 4)]
    assert seen[-1] == ("done", 4, 4)
    events = [notice.event for notice in whole[2] if notice.what == "round" and notice.number == 1]
    assert [event["round"] for event in events if event] == [1, 2]


def test_nothing_finished_is_done_again(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    out, found, _ = whole
    monkeypatch.setattr(runs, "run", None)
    monkeypatch.setattr(runs, "_train", None)
    before, seen = marks(out), list[Notice]()
    assert facts(compare(small(), out, progress=seen.append)) == facts(found)
    assert [notice.what for notice in seen] == ["kept"] * 4
    assert marks(out) == before


class Stop(Exception):
    """Somebody pulls the plug."""


def after(rounds: int) -> Callable[[Notice], None]:
    """Pull it after that many rounds."""
    seen: list[Notice] = []

    def progress(notice: Notice) -> None:
        seen.append(notice)
        if sum(notice.what == "round" for notice in seen) == rounds:
            raise Stop

    return progress


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_a_stopped_comparison_goes_on_where_it_was(rounds: int, whole: Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stop):
        compare(small(), out, progress=after(rounds), checkpoint_every=0)
    finished, seen = marks(out), list[Notice]()
    if rounds == 5:  # what is finished can be read while the rest runs
        tree = json.loads((out / "comparison.json").read_text())
        assert (tree["done"], tree["cells"], [row["n"] for row in tree["rows"]]) == (2, 4, [1, 1])
    found = compare(small(), out, progress=seen.append)
    assert facts(found) == facts(whole[1])
    assert finished.items() <= marks(out).items()
    done_before = (rounds - 1) // 2  # at the end of a last round the model is not written yet
    assert sum(notice.what == "round" for notice in seen) == 8 - rounds
    assert sum(notice.what == "kept" for notice in seen) == done_before


def test_the_same_grid_has_the_same_folder() -> None:
    assert default_out(small()) == default_out(small()) != default_out(small([0, 2]))
    assert re.fullmatch(r"runs/compare-digits-[0-9a-f]{6}", str(default_out(small())))


def test_seeds_and_methods_can_be_added(whole: Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compare(small([0]), out)
    before = marks(out)
    found = compare(small([0, 1]), out)
    assert facts(found) == facts(whole[1])
    assert before.items() <= marks(out).items()


def test_a_folder_of_another_grid_is_refused(whole: Whole) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole[0].rglob("*")}
    others = {
        "its run fedavg-seed-1 is one which this one has not": small([0]),
        "its run scaffold-seed-0 is one which this one has not": small(over=["algorithm=fedavg,moon"]),
        "its run fedavg-seed-0 is one with another config": grid("digits", [*SMALL, "rounds=3"], METHODS, [0, 1]),
    }
    for said, cells in others.items():
        with pytest.raises(ConfigError, match=f"belongs to another comparison: {said}.*--out"):
            compare(cells, whole[0])
    assert {path: path.stat().st_mtime_ns for path in whole[0].rglob("*")} == before


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("letter.txt", "Dear", "holds something else than a comparison"),
        *(("grid.json", text, "grid.json is damaged") for text in ("", "[]", "{}", '{"cells": 3}', "{")),
        ("grid.json", '{"format": 3, "cells": {}}', "has format 3"),
    ],
)
def test_a_folder_of_something_else_or_a_damaged_one_is_refused(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        compare(small(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_group_that_cannot_be_built_is_told_before_the_first_run(tmp_path: Path) -> None:
    cells = grid("digits", SMALL, [*METHODS, "client.optimizer=sgd,adam"], [0, 1])
    with pytest.raises(ConfigError, match="^scaffold, client.optimizer adam: scaffold needs local steps"):
        compare(cells, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    out, seen = tmp_path / "out", list[Notice]()
    cells = grid("digits", SMALL, ["client.lr=0.05,1e30"], [0, 1])
    found = compare(cells, out, progress=seen.append)
    assert found.exit_code == 3
    assert [failure.cell for failure in found.failed] == ["client.lr-1e30-seed-0", "client.lr-1e30-seed-1"]
    assert re.search(r"client \d+, round 1, stage local, step \d+", found.failed[0].error)
    assert [row.seeds for row in found.rows] == [(0, 1), ()]
    assert found.failed[0].error in (out / "comparison.md").read_text()
    assert [notice.error for notice in seen if notice.what == "failed"] == [failure.error for failure in found.failed]
    before = marks(out)
    assert compare(cells, out).failed == found.failed
    assert marks(out) == before


def test_a_target_is_measured_on_the_way(whole: Whole) -> None:
    out, plain, _ = whole
    low = min(event["accuracy"] for cell in small() for event in runs.load(out / cell.name).rounds)
    for run in compare(small(), out, target=low).runs:
        events = runs.load(out / run["cell"]).rounds
        assert run["rounds_to_target"] == next(event["round"] for event in events if event["accuracy"] >= low)
    assert "target" not in plain.runs[0]


def test_cells_in_processes_are_those_of_cells_here_and_one_that_fails_is_alone(whole: Whole, tmp_path: Path) -> None:
    seen = list[Notice]()
    cells = [*small([0]), *(replace(c, name=f"bad-{c.name}") for c in grid("digits", SMALL, ["client.lr=1e30"], [0]))]
    found = compare(cells, tmp_path / "out", on="processes", workers=2, progress=seen.append)
    assert [(notice.what, notice.cell.name) for notice in seen if notice.what == "failed"] == [
        ("failed", "bad-client.lr-1e30-seed-0")
    ]
    assert [notice.what for notice in seen].count("done") == 2 and "no longer finite" in found.failed[0].error
    expected = {run["cell"]: run["model_sha256"] for run in whole[1].runs}
    assert {run["cell"]: run["model_sha256"] for run in found.runs}.items() <= expected.items()
    kept = compare(cells, tmp_path / "out", on="processes", progress=seen.append)
    assert facts(kept) == facts(found) and [notice.what for notice in seen].count("kept") == 2
    with pytest.raises(ConfigError, match="Loggers and callbacks are in this process, and --on processes"):
        compare(cells, tmp_path / "other", on="processes", callbacks=[object()])


def test_no_cell_begins_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(running.time, "monotonic", lambda: now[0])
    clock, endless = running.StopAfter(10.0), running.StopAfter(None)
    assert clock.allows_one_more()  # nothing is known of how long a cell takes
    clock.took += [1.0, 8.0, 2.0]
    for now[0], allowed in ((8.0, True), (8.1, False), (10.0, False)):  # the median is 2
        assert clock.allows_one_more() == allowed and endless.allows_one_more()


@pytest.mark.parametrize("on", ["here", "processes"])
def test_what_did_not_fit_is_left_and_goes_on_later(on: Any, whole: Whole, tmp_path: Path) -> None:
    none = compare(small(), tmp_path, stop_after=0.0, on=on)
    assert (none.left, none.runs, none.failed, none.exit_code) == (4, (), (), 0)
    assert "0 of 4 runs are finished." in none.to_markdown()
    if on == "here":
        assert facts(compare(small(), tmp_path, stop_after=3600.0)) == facts(whole[1])


def test_cells_can_be_named_one_by_one(tmp_path: Path) -> None:
    cells = {"first one": [*SMALL, "algorithm=moon", "seed=3"], "second": [*SMALL, "seed=4"]}
    found = fnrfl.compare("digits", cells=cells, out=tmp_path)
    assert [(row.group, row.seeds, row.config.algorithm.name) for row in found.rows] == [
        ("first one", (3,), "moon"), ("second", (4,), "fedavg")
    ]  # fmt: skip
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"first-one", "second"}
    for wrong in ({}, {"cells": cells, "over": {"seed": [1]}}, {"cells": {}}):
        with pytest.raises(ConfigError, match="cells"):
            fnrfl.compare("digits", out=tmp_path / "wrong", **wrong)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("on", ["here", "processes"])
def test_a_killed_comparison_loses_nothing(on: str, tmp_path: Path) -> None:
    """Killed without warning in the second, third and fourth run; finished runs keep their very files."""
    code = f"""
import sys
from fnrfl.results.compare import compare, grid
cells = grid("digits", ["rounds=10"], ["algorithm=fedavg,scaffold", "fnr=off,on"], [0])
compare(cells, sys.argv[1], checkpoint_every=0.1, on="{on}")
"""

    def start(out: Path) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": str(Path(fnrfl.__file__).parents[1])}
        return subprocess.Popen([sys.executable, "-c", code, str(out)], env=environment)

    def finished(out: Path) -> int:
        return len(list(out.glob("*/model.safetensors")))

    out, before = tmp_path / "out", dict[str, tuple[int, int]]()
    for kill in (1, 2, 3):
        process = start(out)
        deadline = time.monotonic() + 300
        while finished(out) < kill or len(list(out.glob("*/checkpoint.json"))) == finished(out):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        time.sleep(2)  # processes of it end when they notice
        assert before.items() <= marks(out).items()
        before = marks(out)
    assert start(out).wait(timeout=300) == 0
    assert before.items() <= marks(out).items()
    assert start(tmp_path / "whole").wait(timeout=300) == 0
    got, wanted = (json.loads((tmp_path / name / "comparison.json").read_text())["runs"] for name in ("out", "whole"))
    assert [(run["cell"], run["model_sha256"]) for run in got] == [(r["cell"], r["model_sha256"]) for r in wanted]
    assert len(got) == 6


def test_a_notice_about_the_engine_is_told_once_in_a_comparison_and_once_by_a_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = runs.build
    noticed = lambda *args, **more: dataclasses.replace(built(*args, **more), notices=("It is a notice.",))  # noqa: E731
    monkeypatch.setattr(runs, "build", noticed)
    told = lambda: [record.message for record in caplog.records if record.message == "It is a notice."]  # noqa: E731
    for number in (1, 2):
        compare(grid("digits", SMALL, METHODS, [0, 1]), tmp_path / str(number))
        assert len(told()) == number
    for number in (3, 4):
        runs.run(load("digits", SMALL), out=None)
        assert len(told()) == number
