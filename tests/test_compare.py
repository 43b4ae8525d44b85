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
from fnrfl.results import compare as comparing
from fnrfl.results.compare import (
    Cell,
    Comparison,
    Notice,
    compare,
    default_out,
    grid,
    notes,
    plan_grid,
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


def refusal(*over: str, overrides: Sequence[str] = (), seeds: Sequence[int] = (0,)) -> str:
    with pytest.raises(ConfigError) as caught:
        grid("digits", overrides, over, seeds)
    return str(caught.value)


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
    assert [(cell.config.scenario, cell.config.clients) for cell in cells] == [
        ("label-dirichlet(0.5, min=5)", 5),
        ("label-dirichlet(0.5, min=5)", 6),
        ("iid", 5),
        ("iid", 6),
    ]
    assert labels(cells)[0] == "label-dirichlet(0.5, min=5), clients 5"
    assert cells[0].name == "label-dirichlet-0.5-min-5-clients-5-seed-0"


def test_seeds_are_numbers_and_ranges() -> None:
    assert read_seeds("3") == [3]
    assert read_seeds("0, 1,7-9") == [0, 1, 7, 8, 9]
    for wrong in ("", "a", "1,", "-1", "1.5", "0-", "4-2", "0-999999999", "9" * 5000):
        with pytest.raises(ConfigError, match="write whole numbers"):
            read_seeds(wrong)


# -- the grid ----------------------------------------------------------------------------------------------------------


def test_a_grid_has_every_combination_with_every_seed() -> None:
    cells = grid("digits", SMALL, ["algorithm=fedavg,moon", "fnr=off,on"], [3, 5], control=False)
    assert [cell.name for cell in cells] == [
        f"{algorithm}-fnr-{fnr}-seed-{seed}"
        for seed in (3, 5)
        for algorithm in ("fedavg", "moon")
        for fnr in ("off", "on")
    ]
    for cell in cells:
        algorithm, fnr, seed = re.fullmatch(r"(\w+)-fnr-(\w+)-seed-(\d)", cell.name).groups()  # type: ignore[union-attr]
        assert cell.config == load("digits", [*SMALL, f"algorithm={algorithm}", f"fnr={fnr}", f"seed={seed}"])
        assert str(cell.seed) == seed


def test_values_win_over_overrides() -> None:
    cells = grid("digits", ["client.lr=0.5"], ["client.lr=0.1,0.2"], [0])
    assert [cell.config.client.lr for cell in cells] == [0.1, 0.2]
    assert labels(cells) == ["client.lr 0.1", "client.lr 0.2"]


def test_a_grid_without_values_is_one_group() -> None:
    assert labels(grid("digits", [], [], [0, 1])) == ["fedavg"]
    assert labels(grid("digits", ["algorithm=moon", "fnr=on"], [], [0])) == ["moon, fnr on", "moon, fnr weight 0"]


def test_fnr_is_named_wherever_it_is_on() -> None:
    assert labels(grid("digits", ["fnr=on"], METHODS, [0], control=False)) == ["fedavg, fnr on", "scaffold, fnr on"]


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


def test_every_bad_combination_is_told_with_what_is_wrong() -> None:
    told = refusal("client.lr=0.1,-1", "rounds=1,x")
    assert "client.lr=-1, rounds=1: client.lr = -1 is not allowed" in told
    assert 'client.lr=0.1, rounds=x: rounds = "x" is not allowed' in told
    assert "client.lr=0.1, rounds=1:" not in told


def test_what_is_wrong_everywhere_is_told_once() -> None:
    assert refusal("client.lr=0.1,0.2", overrides=["roundz=3"]) == "Unknown key roundz: did you mean rounds?"


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        (["client.lr"], "write key=a,b"),
        (["client.lr="], "write key=a,b"),
        (["client.lr=0.1,,0.2"], "write key=a,b"),
        (["=0.1"], "write key=a,b"),
        (["scenario=label-dirichlet(0.1"], "lacks a closing )"),
        (["seed=0,1"], "with --seeds"),
        (["algorithm=fedavg", "algorithm.name=moon"], "algorithm.name is varied twice"),
        (["client.lr=0.1,0.10"], "client.lr=0.10 is the same as client.lr 0.1; give it once."),
        (["algorithm=fedavg,fedavgg"], "Did you mean fedavg?"),
    ],
)
def test_bad_values_are_refused(over: list[str], sentence: str) -> None:
    assert sentence in refusal(*over)


def test_bad_seeds_are_refused() -> None:
    assert "The seeds are none" in refusal(seeds=[])
    assert "The seeds are 1, 2, 1; there must be at least one, and each only once" in refusal(seeds=[1, 2, 1])
    assert "seed = -1 is not allowed" in refusal(seeds=[-1])
    assert "use --seeds" in refusal(overrides=["seed=3"])


def test_the_switch_of_fnr_wins_over_its_keys_and_off_is_one_group() -> None:
    for over in (["fnr=off,on", "fnr.weight=0.1,1"], ["fnr.weight=0.1,1", "fnr=off,on"]):
        cells = grid("digits", [], over, [0], control=False)
        assert [None if c.config.fnr is None else c.config.fnr.weight for c in cells] == [None, 0.1, 1.0]
        assert labels(cells)[0] == "fnr off"


# -- controls ----------------------------------------------------------------------------------------------------------


def test_each_method_with_fnr_gets_its_control() -> None:
    cells = grid("digits", [], [*METHODS, "fnr=off,on"], [0, 1])
    assert controls(cells) == {
        "fedavg, fnr off": None,
        "fedavg, fnr on": "fedavg, fnr weight 0",
        "fedavg, fnr weight 0": None,
        "scaffold, fnr off": None,
        "scaffold, fnr on": "scaffold, fnr weight 0",
        "scaffold, fnr weight 0": None,
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


def test_a_control_that_is_there_already_is_used() -> None:
    cells = grid("digits", ["fnr.penalty=squared"], ["fnr.weight=0,0.1"], [0])
    assert controls(cells) == {"fnr.weight 0": None, "fnr.weight 0.1": "fnr.weight 0"}


def test_the_released_code_needs_no_control() -> None:
    """Its penalty has no gradient: the control is the same model."""
    cells = grid("paper-label-skew", [], ["fnr=off,on"], [0])
    assert labels(cells) == ["fnr off", "fnr on"]


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


def test_where_only_the_task_varies_the_first_is_the_baseline() -> None:
    assert set(baselines(grid("digits", [], ["scenario=iid,label-classes(2)"], [0]), None).values()) == {"iid"}


@pytest.mark.parametrize("text", ["scaffold, fnr off", "scaffold-fnr-off", "fnr off, scaffold", "SCAFFOLD,fnr=off"])
def test_a_baseline_is_named_as_in_the_table_or_its_folder(text: str) -> None:
    cells = grid("digits", [], [*METHODS, "fnr=off,on"], [0])
    assert set(baselines(cells, text).values()) == {"scaffold, fnr off"}


def test_some_words_of_a_baseline_leave_the_rest_to_each_row() -> None:
    cells = grid("digits", [], [*METHODS, "fnr=off,on"], [0])
    assert baselines(cells, "fnr off")["scaffold, fnr on"] == "scaffold, fnr off"
    assert baselines(cells, "algorithm=fedavg")["scaffold, fnr weight 0"] == "fedavg, fnr weight 0"


def test_an_unknown_baseline_is_refused_before_anything_runs(tmp_path: Path) -> None:
    cells = grid("digits", SMALL, METHODS, [0])
    with pytest.raises(ConfigError, match='no baseline "scafold" in this comparison. Did you mean "scaffold"?'):
        compare(cells, tmp_path / "out", baseline="scafold")
    assert not (tmp_path / "out").exists()


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


def test_rows_have_means_and_paired_differences() -> None:
    off, on, without = made().rows
    accuracy = on.metrics["accuracy"]
    assert accuracy is not None
    assert (on.seeds, accuracy.mean, accuracy.sd) == ((0, 1), pytest.approx(0.8), pytest.approx(0.08**0.5))
    assert on.difference is not None
    assert on.penalty is not None
    assert (on.baseline, on.difference.n, on.difference.mean) == ("fnr off", 2, pytest.approx(0.2))
    assert on.difference.low == pytest.approx(0.2 - 12.706204736174698 * 0.1)
    assert (on.control, on.penalty.mean) == ("fnr weight 0", pytest.approx(0.1))
    assert without.difference is not None
    assert (without.difference.mean, without.difference.p) == (pytest.approx(0.1), None)
    assert (off.difference, off.penalty, without.penalty) == (None, None, None)


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
    best, worst = row.metrics["accuracy_best"], row.metrics["worst_client"]
    assert best is not None
    assert worst is not None
    assert (best.n, best.mean, worst.n, worst.mean) == (1, 0.6, 1, 0.5)


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


def test_json_says_everything() -> None:
    tree = json.loads(made().to_json())
    assert (tree["cells"], tree["done"], tree["leaks"], tree["failed"]) == (6, 6, [], [])
    on = tree["rows"][1]
    assert (on["group"], on["algorithm"], on["scenario"], on["n"]) == ("fnr on", "fedavg", "label-dirichlet(0.1)", 2)
    assert on["fnr"]["weight"] == 0.1
    assert on["accuracy"]["mean"] == pytest.approx(0.8)
    assert (on["baseline"], on["control"]) == ("fnr off", "fnr weight 0")
    assert on["difference"] == pytest.approx(
        {"n": 2, "mean": 0.2, "sd": 0.02**0.5, "low": -1.0706204736, "high": 1.4706204736, "p": 0.2951672353}
    )
    assert on["penalty"]["mean"] == pytest.approx(0.1)
    assert tree["rows"][0]["difference"] is None
    assert [run["cell"] for run in tree["runs"]][:2] == ["fnr-off-seed-0", "fnr-on-seed-0"]


def test_csv_has_one_number_per_field() -> None:
    rows = list(csv.DictReader(io.StringIO(made().to_csv())))
    assert [row["group"] for row in rows] == ["fnr off", "fnr on", "fnr weight 0"]
    assert float(rows[1]["accuracy"]) == pytest.approx(0.8)
    assert float(rows[1]["penalty"]) == pytest.approx(0.1)
    assert (rows[1]["difference_to"], rows[0]["difference"], rows[1]["leaks"]) == ("fnr off", "", "")
    assert float(rows[1]["difference_p"]) == pytest.approx(0.2951672353)


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


def test_a_difference_of_fewer_seeds_than_its_row_says_so() -> None:
    found = made(failures={"fnr-off-seed-1": "no"})
    line = found.rows[1]
    assert line.seeds == (0, 1) and line.difference is not None and line.difference.n == 1
    assert "| +0.1000 (n = 1) |" in found.to_markdown() and found.table()["difference_n"][1] == 1
    assert "(n =" not in made().to_markdown() and made().table()["difference_n"][1] == 2


@pytest.mark.parametrize("target", [float("nan"), float("inf"), 90.0, -0.1])
def test_a_target_that_is_no_accuracy_is_refused_before_anything_runs(target: float, tmp_path: Path) -> None:
    cells = grid("digits", ["rounds=1"], ["fnr=off,on"], [0])
    for judged in (plan_grid, compare):
        with pytest.raises(ConfigError, match="accuracy is between 0 and 1"):
            judged(cells, tmp_path / "out", target=target)
    with pytest.raises(ConfigError, match='no metric "nonsense"'):
        plan_grid(cells, tmp_path / "out", metric="nonsense")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("seeds", [[0.5, 1.7], ["x"], "0-2", 3])
def test_seeds_that_are_no_whole_numbers_are_refused(seeds: Any) -> None:
    with pytest.raises(ConfigError, match="it must be a list of whole numbers"):
        seeds_in_list(seeds)
    assert seeds_in_list(np.arange(2)) == [0, 1]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 150, 200])
def test_a_terminal_table_fits_and_cuts_no_number(width: int) -> None:
    text = shown(made(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for always in ("fnr weight 0", "0.800 ± 0.283", "+0.200 ± 1.271", "baseline"):
        assert always in text
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
    assert made().exit_code == 0


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison, list[Notice]]:
    """A small comparison that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    seen: list[Notice] = []
    return out, compare(small(), out, progress=seen.append), seen


def test_every_run_is_the_one_that_it_would_be_alone(whole: tuple[Path, Comparison, list[Notice]]) -> None:
    out, found, _ = whole
    cell = small()[3]
    alone = runs.run(cell.config, out=None)
    assert (cell.name, alone.model_sha256, alone.accuracy) == facts(found)[3]
    assert runs.load(out / cell.name).model_sha256 == alone.model_sha256


def test_the_files_say_what_was_returned(whole: tuple[Path, Comparison, list[Notice]]) -> None:
    out, found, _ = whole
    assert (out / "comparison.json").read_text() == found.to_json()
    assert (out / "comparison.csv").read_text() == found.to_csv()
    assert (out / "comparison.md").read_text() == found.to_markdown()
    assert sorted(path.name for path in out.iterdir() if not path.is_dir()) == [
        "comparison.csv", "comparison.json", "comparison.md", "grid.json",
    ]  # fmt: skip
    assert len(found.runs) == found.cells == 4


def test_one_is_told_what_happens(whole: tuple[Path, Comparison, list[Notice]]) -> None:
    seen = [(notice.what, notice.number, notice.total) for notice in whole[2]]
    assert seen[:2] == [("check", 1, 4), ("check", 2, 4)]
    assert seen[2:6] == [("start", 1, 4), ("round", 1, 4), ("round", 1, 4), ("done", 1, 4)]
    assert seen[-1] == ("done", 4, 4)
    (event, _) = (notice.event for notice in whole[2] if notice.what == "round" and notice.number == 1)
    assert event is not None
    assert event["round"] == 1


def test_nothing_finished_is_done_again(
    whole: tuple[Path, Comparison, list[Notice]], monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_stopped_comparison_goes_on_where_it_was(
    rounds: int, whole: tuple[Path, Comparison, list[Notice]], tmp_path: Path
) -> None:
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


def test_seeds_and_methods_can_be_added(whole: tuple[Path, Comparison, list[Notice]], tmp_path: Path) -> None:
    out = tmp_path / "out"
    compare(small([0]), out)
    before = marks(out)
    found = compare(small([0, 1]), out)
    assert facts(found) == facts(whole[1])
    assert before.items() <= marks(out).items()


@pytest.mark.parametrize(
    ("cells", "sentence"),
    [
        (lambda: small([0]), "its run fedavg-seed-1 is one which this one has not"),
        (lambda: small(over=["algorithm=fedavg,moon"]), "its run scaffold-seed-0 is one which this one has not"),
        (
            lambda: grid("digits", [*SMALL, "rounds=3"], METHODS, [0, 1]),
            "its run fedavg-seed-0 is one with another config",
        ),
    ],
)
def test_a_folder_of_another_grid_is_refused(
    cells: Callable[[], list[Cell]], sentence: str, whole: tuple[Path, Comparison, list[Notice]]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole[0].rglob("*")}
    with pytest.raises(ConfigError, match=f"belongs to another comparison: {sentence}.*--out"):
        compare(cells(), whole[0])
    assert {path: path.stat().st_mtime_ns for path in whole[0].rglob("*")} == before


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(ConfigError, match="holds something else than a comparison"):
        compare(small(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cells": 3}', "{"])
def test_a_damaged_grid_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "grid.json").write_text(text)
    with pytest.raises(ConfigError, match="grid.json is damaged"):
        compare(small(), tmp_path)


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


def test_a_target_is_measured_on_the_way(whole: tuple[Path, Comparison, list[Notice]]) -> None:
    out, plain, _ = whole
    low = min(event["accuracy"] for cell in small() for event in runs.load(out / cell.name).rounds)
    for run in compare(small(), out, target=low).runs:
        events = runs.load(out / run["cell"]).rounds
        assert run["rounds_to_target"] == next(event["round"] for event in events if event["accuracy"] >= low)
    assert "target" not in plain.runs[0]


def test_the_same_grid_has_the_same_folder() -> None:
    assert default_out(small()) == default_out(small())
    assert default_out(small()) != default_out(small([0, 2]))
    assert re.fullmatch(r"runs/compare-digits-[0-9a-f]{6}", str(default_out(small())))


def test_cells_in_processes_are_those_of_cells_here_and_one_that_fails_is_alone(
    whole: tuple[Path, Comparison, list[Notice]], tmp_path: Path
) -> None:
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
    for took in (1.0, 8.0, 2.0):
        clock.add(took)
    for now[0], allowed in ((8.0, True), (8.1, False), (10.0, False)):  # the median is 2
        assert clock.allows_one_more() == allowed and endless.allows_one_more()


@pytest.mark.parametrize("on", ["here", "processes"])
def test_what_did_not_fit_is_left_and_goes_on_later(
    on: Any, whole: tuple[Path, Comparison, list[Notice]], tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("text", ["soon", "-1", "9 minutes", "1e3"])
def test_a_time_is_read_as_people_write_it(text: str) -> None:
    assert [comparing.read_duration(good) for good in ("90", "90s", "1.5m", "2h")] == [90.0, 90.0, 90.0, 7200.0]
    with pytest.raises(ConfigError, match="is not a time; write it as 90s, 9m or 2h"):
        comparing.read_duration(text)


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


@pytest.mark.parametrize("text", ["client.lr=0.1,0.1", "algorithm=fedavg,scaffold, fedavg", "name=a,a"])
def test_a_value_that_is_given_twice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f'"{text}" has the value (0.1|fedavg|a) twice; give it once.'):
        grid("digits", [], [text], [0])
