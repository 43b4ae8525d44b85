"""What does not belong together is not compared: other data, other splits, folders that hold another run."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fnrfl.core.errors import ConfigError
from fnrfl.results.compare import Cell, Notice, compare, grid
from fnrfl.runs import run as runs

SMALL = ["rounds=1", "clients=3", "client.epochs=1", "model=mlp(hidden=4)", "dataset=mine.csv", "scenario=iid"]


def write_table(path: Path, shift: float = 0.0) -> None:
    """A table of 120 rows, three classes."""
    draw = np.random.default_rng(0)
    rows = [(*(draw.normal(size=3) + label + shift), f"class {label}") for label in range(3) for _ in range(40)]
    lines = [",".join(map(str, row)) for row in [("a", "b", "c", "label"), *rows]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def cells(seeds: tuple[int, ...] = (0, 1), methods: str = "fedavg,feddf", *more: str) -> list[Cell]:
    return grid("digits", [*SMALL, *more], [f"algorithm={methods}"], seeds)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table and a finished comparison of it."""
    folder = tmp_path_factory.mktemp("made")
    write_table(folder / "mine.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = compare(cells(), "out")
    assert len(found.runs) == 4 and not found.failed
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the working folder."""
    copy = tmp_path / "here"
    shutil.copytree(made, copy)
    monkeypatch.chdir(copy)
    return copy


def refusal(wanted: list[Cell], monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence, once it is known that nothing was run and nothing was written."""
    monkeypatch.setattr(runs, "_train_rounds", None)
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
    with pytest.raises(ConfigError) as caught:
        compare(wanted, "out")
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == before
    return str(caught.value)


def edit(path: Path, change: Callable[[str], str]) -> None:
    """Change a file, and the log's hash with it, as somebody would who means it."""
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    if path.name == "events.jsonl":
        index = path.with_name("checkpoint.json")
        log = {"log": hashlib.sha256(path.read_bytes()).hexdigest()}
        index.write_text(json.dumps(json.loads(index.read_text()) | log))


def test_the_same_comparison_is_kept(here: Path) -> None:
    seen: list[Notice] = []
    compare(cells(), "out", progress=seen.append)
    assert [notice.what for notice in seen] == ["kept"] * 4
    assert len(compare(cells((0, 1, 2)), "out").runs) == 6


def test_folders_that_were_exchanged_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = here / "out/fedavg-seed-0", here / "out/feddf-seed-0"
    one.rename(here / "aside")
    other.rename(one)
    (here / "aside").rename(other)
    told = refusal(cells(), monkeypatch)
    assert 'out/fedavg-seed-0 does not hold the run fedavg-seed-0 of its comparison: algorithm.name is "feddf"' in told
    assert "That is the config of feddf-seed-0: the two folders may have been exchanged." in told


@pytest.mark.parametrize("log_too", [False, True])
def test_an_edited_config_is_refused(log_too: bool, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(here / "out/fedavg-seed-1/config.toml", lambda text: text.replace("lr = 0.05", "lr = 0.5"))
    if log_too:
        edit(here / "out/fedavg-seed-1/events.jsonl", lambda text: text.replace('"lr": 0.05', '"lr": 0.5', 1))
        assert "client.lr is 0.5 in its config.toml and 0.05 in the grid" in refusal(cells(), monkeypatch)
    else:
        assert "client.lr is 0.5 there and 0.05 in the first line of" in refusal(cells(), monkeypatch)


def test_a_run_under_the_config_of_another_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(here / "out/feddf-seed-0/events.jsonl", here / "out/fedavg-seed-0/events.jsonl")
    told = refusal(cells(), monkeypatch)
    assert "out/fedavg-seed-0/config.toml is not the config that the run was begun with" in told


@pytest.mark.parametrize("wanted", [cells((0, 1, 2)), cells((0, 1), "fedavg,feddf,fedprox")], ids=["seeds", "methods"])
def test_data_that_changed_between_two_calls_is_refused(
    wanted: list[Cell], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(here / "mine.csv", shift=0.5)
    told = refusal(wanted, monkeypatch)
    new = "fedavg-seed-2" if len(wanted) == 6 and wanted[-1].seed == 2 else "fedprox-seed-0"
    assert (
        f"out/fedavg-seed-0 and out/{new} are of different data" in told
        and 'dataset = "mine.csv" has the sha256' in told
    )


def test_finished_runs_of_different_data_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(here / "mine.csv", shift=0.5)
    shutil.rmtree(here / "out/feddf-seed-1")
    runs.run(cells()[3].config, out="out/feddf-seed-1")
    told = refusal(cells(), monkeypatch)
    assert "out/fedavg-seed-0 and out/feddf-seed-1 are of different data" in told


def test_data_that_changes_during_a_comparison_is_refused(here: Path) -> None:
    def change(notice: Notice) -> None:
        if notice.what == "start" and notice.cell.name == "feddf-seed-2":
            write_table(here / "mine.csv", shift=0.5)

    with pytest.raises(ConfigError, match="out/fedavg-seed-0 and out/feddf-seed-2 are of different data"):
        compare(cells((0, 1, 2)), "out", progress=change)
    assert json.loads((here / "out/comparison.json").read_text())["done"] == 5


def test_a_split_that_was_changed_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = here / "out/feddf-seed-0/partition.json"
    manifest = json.loads(path.read_text())
    manifest["positions"][0][0], manifest["positions"][1][0] = manifest["positions"][1][0], manifest["positions"][0][0]
    path.write_text(json.dumps(manifest))
    told = refusal(cells(), monkeypatch)
    assert "out/feddf-seed-0/partition.json is not the split that the run was begun with" in told


def test_runs_of_one_seed_with_different_splits_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two versions would leave them that draw in different ways: each folder agrees with itself."""
    other = here / "out/feddf-seed-0"
    manifest = json.loads((here / "out/feddf-seed-1/partition.json").read_text())
    before = json.loads((other / "partition.json").read_text())["sha256"]
    (other / "partition.json").write_text(json.dumps(manifest))
    edit(other / "events.jsonl", lambda text: text.replace(before, manifest["sha256"], 1))
    told = refusal(cells(), monkeypatch)
    assert "out/fedavg-seed-0 and out/feddf-seed-0 have different splits of the same data" in told


def test_public_data_that_changed_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(here / "public.csv", shift=0.25)
    wanted = cells((0,), "fedavg,fedprox", "public.source=public.csv", "public.size=0.5", "name=public")
    compare(wanted[:1], "out/public")
    write_table(here / "public.csv", shift=1.0)
    monkeypatch.setattr(runs, "_train_rounds", None)
    with pytest.raises(ConfigError, match="fedavg-seed-0 and out/public/fedprox-seed-0 have different public data"):
        compare(wanted, "out/public")


def test_a_run_that_cannot_be_read_fails_alone(here: Path) -> None:
    (here / "out/feddf-seed-0/events.jsonl").write_text("{\n")
    found = compare(cells(), "out")
    assert [failure.cell for failure in found.failed] == ["feddf-seed-0"] and len(found.runs) == 3


def test_keys_that_an_older_version_did_not_have_are_no_difference(here: Path) -> None:
    for name in ("config.toml", "events.jsonl"):
        edit(here / "out/fedavg-seed-0" / name, lambda text: text.replace('nonfinite = "fail"\n', ""))
        edit(here / "out/fedavg-seed-0" / name, lambda text: text.replace(', "nonfinite": "fail"', "", 1))
    assert len(compare(cells(), "out").runs) == 4
