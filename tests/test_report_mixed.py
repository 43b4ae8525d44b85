"""A page never mixes what does not belong together, and one damaged run does not hide the others."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fake_runs import Elements, change_log, fake_run, page_of, panels, payload, text_of
from fnrfl.cli import app
from fnrfl.core.errors import ConfigError
from fnrfl.data.datasets import load as load_data
from fnrfl.results.compare import compare, grid
from fnrfl.results.report import load, pairs, report, sentences, tables
from fnrfl.results.report.groups import panels_of
from fnrfl.rundir.origin import read_origin


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `fnrfl compare` really leaves behind."""
    out = tmp_path_factory.mktemp("real") / "grid"
    compare(grid("digits", ["rounds=2", "clients=4"], ["fnr=off,on"], [0, 1], control=False), out, baseline="fnr on")
    return out


@pytest.fixture
def copied(compared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compared, tmp_path / "grid"))


def refusal(*runs: Path) -> str:
    """Why there is no page."""
    out = runs[0].parent / "page.html"
    with pytest.raises(ConfigError) as caught:
        report(runs, out, plots=False)
    assert not out.exists()
    return str(caught.value)


# -- data and splits --------------------------------------------------------------------------------------------------


def test_runs_of_different_data_are_no_seeds_of_one_line(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a", seed=0), fake_run(tmp_path / "b", seed=1, data="f")
    assert [panel.title for panel in panels(a, b)] == ["data 000000000000", "data ffffffffffff"]
    assert [[run.seed for run in panel.runs] for panel in panels(a, b)] == [[0], [1]]
    text = text_of(a, b)
    assert f"in these runs: sha256 000000000000 in {a}, sha256 ffffffffffff in {b}." in text
    assert "With data ffffffffffff FedAvg gets" in text
    same = fake_run(tmp_path / "c", algorithm="moon")
    assert [panel.title for panel in panels(a, same)] == ["skewed classes"]
    assert "not compared" not in text_of(a, same)


@pytest.mark.parametrize(("what", "paired"), [("data", None), ("split", "2")])
def test_runs_of_different_data_or_splits_are_not_paired(tmp_path: Path, what: str, paired: str | None) -> None:
    """Two methods over the same seeds: other data for all of them, or another split for one."""
    made = [
        fake_run(tmp_path / f"{method}-{seed}", seed=seed, algorithm=method, accuracy=0.5 + gain, **{what: value})
        for method, other, gain in (("fedavg", "0", 0.0), ("fedprox", "f", 0.2))
        for seed in range(3)
        for value in [other if what == "data" or seed == 2 else ""]
    ]
    assert [row[6].text for panel in panels(*made) for row in tables.differences(panel).rows] == (
        [paired] * bool(paired)
    )
    if what == "data":
        assert not [said for said in sentences.summary(panels(*made))[0] if "is ahead" in said.text]
        assert len(payload(page_of(*made))["panels"]) == 2
    else:
        said = f"{made[2]} and {made[5]} have the same data, scenario, clients and seed, and different splits"
        assert said in text_of(*made)


def test_lines_without_a_split_in_common_are_called_so(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a"), fake_run(tmp_path / "b", algorithm="moon", split="other", accuracy=0.9)
    (row,) = tables.differences(panels(a, b)[0]).rows
    assert (row[6].text, row[7].text) == ("0", "no seed and split in common")
    assert "They share no seed with the same split" in text_of(a, b)


# -- folders of comparisons -------------------------------------------------------------------------------------------


def test_a_comparison_decides_its_baseline_and_says_what_its_test_set_has(compared: Path) -> None:
    found = load.load_runs([compared])
    (panel,) = panels_of(found.runs)
    assert [group.label for group in panel.groups] == ["FedAvg", "FNR"] and not found.failed
    assert pairs.baseline(panel.groups).label == "FNR"
    made = page_of(compared)
    assert payload(made)["inside"][1]["change"] is not None
    assert "clients, 115 public, 29 ranking" in made
    assert found.runs[0].test_counts == np.bincount(load_data("digits").test.y).tolist()
    assert found.runs[0].classes == [str(c) for c in range(10)]


def test_a_comparison_says_nothing_about_the_runs_of_another(tmp_path: Path) -> None:
    """Their folders are called alike."""
    for folder, base, rounds in (("a", "scaffold", 2), ("b", "fedprox", 3)):
        runs = [{"cell": name, "group": name} for name in ("fedavg", "scaffold", "fedprox")]
        rows = [{"group": run["group"], "baseline": base} for run in runs]
        for run in runs:
            fake_run(tmp_path / folder / run["cell"], algorithm=run["cell"], rounds=rounds)
        said = {"runs": runs, "rows": rows, "failed": []}
        (tmp_path / folder / "comparison.json").write_text(json.dumps(said))
    found = panels_of(load.load_runs([tmp_path / "a", tmp_path / "b"]).runs)
    named = pairs.baseline([group for panel in found for group in panel.groups]).first.path
    assert named in (tmp_path / "a" / "scaffold", tmp_path / "b" / "fedprox")


def test_what_failed_in_a_comparison_is_told(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    failure = {"cell": "moon-seed-0", "group": "moon", "seed": 0, "error": "client 3: loss is <nan>"}
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": [], "rows": [], "failed": [failure]}))
    assert "moon-seed-0: client 3: loss is <nan>" in text_of(run)
    (tmp_path / "page.html").unlink()
    for name in ("comparison.json", "grid.json"):
        (tmp_path / name).write_text("[]")
        assert f"{name} is damaged" in refusal(tmp_path)
        (tmp_path / name).unlink()


def test_a_comparison_with_exchanged_folders_is_refused(copied: Path) -> None:
    one, other, aside = copied / "fnr-off-seed-0", copied / "fnr-on-seed-0", copied.parent / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    told = refusal(copied)
    assert 'does not hold the run fnr-off-seed-0 of its comparison: fnr is "on" in its config.toml and "off"' in told
    assert "That is the config of fnr-on-seed-0: the two folders may have been exchanged." in told


def test_a_grid_of_a_version_that_called_the_data_set_by_another_key_is_read(copied: Path) -> None:
    path = copied / "grid.json"
    text = path.read_text()
    assert '"dataset.name": "digits"' in text
    path.write_text(text.replace('"dataset.name"', '"dataset"'))
    assert len(load.load_runs([copied]).runs) == 4
    path.write_text(text.replace('"dataset.name": "digits"', '"dataset": "cifar10"'))
    assert 'dataset.name is "digits" in its config.toml and "cifar10" in the grid' in refusal(copied)


def test_a_comparison_of_different_data_is_refused(copied: Path) -> None:
    run = copied / "fnr-on-seed-1"
    other = {"data": {"source": "made up", "sha256": "f" * 64}}
    change_log(run, lambda number, line: line if number else line | other)
    stamped = {"log": hashlib.sha256((run / "events.jsonl").read_bytes()).hexdigest()}
    index = run / "checkpoint.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | stamped))
    told = refusal(copied)
    assert "fnr-off-seed-0 and " in told and "fnr-on-seed-1 are of different data" in told


@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_run_that_does_not_belong_is_found_wherever_it_stands(tmp_path: Path, place: int) -> None:
    made = [fake_run(tmp_path / str(n), seed=n, data="f" if n == place else "0") for n in range(5)]
    (tmp_path / "grid.json").write_text(json.dumps({"format": 2, "cells": {path.name: "" for path in made}}))
    with pytest.raises(ConfigError, match="different data"):
        load.check_grid_folder(tmp_path, [read_origin(path) for path in made])


def test_a_run_that_the_grid_has_not_is_left_out_and_named(copied: Path, tmp_path: Path) -> None:
    for place in ("foreign", "deeper/foreign"):
        fake_run(copied / place, algorithm="moon", accuracy=0.99)
    found = load.load_runs([copied])
    assert len(found.runs) == 4 and not any("foreign" in run.path.parts for run in found.runs)
    text = text_of(copied)
    assert f"not as its grid: {copied / 'foreign'} is not a run of the comparison around it" in text
    assert "moon" not in text
    asked_for = load.load_runs([copied, copied / "foreign"])
    assert len(asked_for.runs) == 5 and len(asked_for.astray) == 1
    assert len(load.load_runs([tmp_path]).runs) == 4
    for run in copied.glob("fnr-*"):
        shutil.rmtree(run)
    (tmp_path / "page.html").unlink()
    told = refusal(copied)
    assert "There is no run to report on. " in told and "foreign is not a run" in told


def test_runs_of_a_grid_that_are_gone_are_named(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load.load_runs([copied]).astray == []
    shutil.rmtree(copied / "fnr-on-seed-1")
    told = f"{copied} lacks 1 run of its grid: fnr-on-seed-1."
    assert f"not as its grid: {told}" in text_of(copied) and told in caplog.text
    assert load.load_runs(sorted(copied.glob("fnr-*"))).astray == []  # nobody asked for all
    path = copied / "comparison.json"  # one that failed before it had a folder is told once
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failed": [{"cell": "fnr-on-seed-1", "error": "no"}]}))
    found = load.load_runs([copied])
    assert (found.failed, found.astray) == (["fnr-on-seed-1: no"], [])


# -- damage -----------------------------------------------------------------------------------------------------------


def change_line(at: int, **values: object) -> Callable[[Path], Any]:
    return lambda path: change_log(path, lambda number, line: line | (values if number == at else {}))


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_text(text)


def edit(name: str, old: str, new: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_text((path / name).read_text().replace(old, new, 1))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a line of the log": (write("events.jsonl", "{\n"), "damaged"),
    "a log without an object": (write("events.jsonl", "[]\n"), "damaged"),
    "a nested line": (write("events.jsonl", "[" * 100_000 + "\n"), "damaged"),
    "a number that is text": (change_line(2, accuracy="high"), "events.jsonl, line 3: accuracy: "),
    "a missing number": (change_line(1, seconds=None), "events.jsonl, line 2: seconds: "),
    "lists of other lengths": (change_line(1, per_class=[0.5]), "line 2: lists for the same classes or clients"),
    "a cohort of words": (change_line(1, cohort=["a"]), "events.jsonl, line 2: cohort.0: "),
    "no config": (lambda path: (path / "config.toml").unlink(), "config.toml cannot be read"),
    "a config of something else": (write("config.toml", "[tool]\nx = 1\n"), "damaged"),
    "an edited config": (
        edit("config.toml", "rounds = 3", "rounds = 4"),
        "is not the config that the run was begun with: rounds is 4 there and 3",
    ),
    "an edited split": (edit("partition.json", "7", "8"), "is not the split that the run was begun with"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_is_named_and_the_others_are_reported(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = fake_run(tmp_path / "runs" / "whole"), fake_run(tmp_path / "runs" / "broken", seed=1)
    change, said = DAMAGE[damage]
    change(broken)
    told = refusal(broken)
    assert said in told and "broken" in told
    report([tmp_path / "runs"], tmp_path / "page.html", plots=False)
    text = " ".join(Elements((tmp_path / "page.html").read_text()).text.split())
    assert str(broken) in text and said in text and "It is left out." in text
    assert "1 run on digits" in text and str(whole) in text
    assert str(broken) in caplog.text


def test_the_command_says_what_it_left_out_on_stderr(tmp_path: Path) -> None:
    fake_run(tmp_path / "whole")
    (fake_run(tmp_path / "broken") / "partition.json").unlink()
    found = CliRunner().invoke(app, ["report", str(tmp_path), "--no-plots"])
    assert found.exit_code == 0 and "report.html" in found.stdout
    assert f"note: {tmp_path}/broken/partition.json cannot be read" in found.stderr


def test_a_client_without_a_score_is_left_out_of_the_worst(tmp_path: Path) -> None:
    path = fake_run(tmp_path / "run")
    for shares, worst in (([0.5, None, 0.25], 0.25), ([None, None], None)):
        change_line(3, per_client=shares)(path)
        assert load.read_run(path).last("worst_client") == worst
    page_of(path)
