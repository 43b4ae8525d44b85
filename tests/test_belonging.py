"""What does not belong together is not compared: other data, other splits, folders that hold another run."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fnrfl
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
    monkeypatch.setattr(runs, "_train", None)
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


def swap(out: Path) -> None:
    one, other, aside = out / "fedavg-seed-0", out / "feddf-seed-0", out.parent / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def edit_config_and_log(out: Path) -> None:
    edit(out / "fedavg-seed-1/config.toml", lambda text: text.replace("lr = 0.05", "lr = 0.5"))
    edit(out / "fedavg-seed-1/events.jsonl", lambda text: text.replace('"lr": 0.05', '"lr": 0.5', 1))


def edit_split(out: Path) -> None:
    path = out / "feddf-seed-0/partition.json"
    manifest = json.loads(path.read_text())
    one, other = manifest["positions"][:2]
    one[0], other[0] = other[0], one[0]
    path.write_text(json.dumps(manifest))


def split_as_another_version(out: Path) -> None:
    """Each folder agrees with itself."""
    manifest = json.loads((out / "feddf-seed-1/partition.json").read_text())
    before = json.loads((out / "feddf-seed-0/partition.json").read_text())["sha256"]
    (out / "feddf-seed-0/partition.json").write_text(json.dumps(manifest))
    edit(out / "feddf-seed-0/events.jsonl", lambda text: text.replace(before, manifest["sha256"], 1))


def run_with_other_data(out: Path) -> None:
    write_table(out.parent / "mine.csv", shift=0.5)
    shutil.rmtree(out / "feddf-seed-1")
    runs.run(cells()[3].config, out=out / "feddf-seed-1")


CHANGES: dict[Callable[[Path], object], tuple[str, ...]] = {
    swap: (
        'out/fedavg-seed-0 does not hold the run fedavg-seed-0 of its comparison: algorithm.name is "feddf"',
        "That is the config of feddf-seed-0: the two folders may have been exchanged.",
    ),
    edit_config_and_log: ("client.lr is 0.5 in its config.toml and 0.05 in the grid",),
    lambda out: shutil.copy(out / "feddf-seed-0/events.jsonl", out / "fedavg-seed-0/events.jsonl"): (
        "out/fedavg-seed-0/config.toml is damaged",
        "not the config that the run was begun with",
    ),
    edit_split: ("out/feddf-seed-0/partition.json is damaged", "not the split that the run was begun with"),
    split_as_another_version: ("out/fedavg-seed-0 and out/feddf-seed-0 have different splits of the same data",),
    run_with_other_data: ("out/fedavg-seed-0 and out/feddf-seed-1 are of different data",),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_that_does_not_belong_is_refused(
    change: Callable[[Path], object], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(here / "out")
    told = refusal(cells(), monkeypatch)
    assert all(said in told for said in CHANGES[change]), told


@pytest.mark.parametrize(
    ("wanted", "finished", "said"),
    [
        (cells((0, 1, 2)), True, "out/fedavg-seed-0 and out/fedavg-seed-2 are of different data"),
        (cells((0, 1), "fedavg,feddf,fedprox"), True, "out/fedavg-seed-0 and out/fedprox-seed-0 are of different data"),
        (cells(), True, 'dataset = "mine.csv" is not the data that out/fedavg-seed-0 was begun with: its sha256 was'),
        (cells(), False, 'dataset = "mine.csv" is not the data that out/fedavg-seed-0 was begun with: its sha256 was'),
    ],
    ids=["seeds", "methods", "the same", "unfinished"],
)
def test_data_that_changed_between_two_calls_is_refused(
    wanted: list[Cell], finished: bool, said: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(here / "mine.csv", shift=0.5)
    if not finished:
        (here / "out/feddf-seed-1/model.safetensors").unlink()
    assert said in refusal(wanted, monkeypatch)


def test_data_that_changes_during_a_comparison_is_refused(here: Path) -> None:
    def change(notice: Notice) -> None:
        if notice.what == "start" and notice.cell.name == "feddf-seed-2":
            write_table(here / "mine.csv", shift=0.5)

    with pytest.raises(ConfigError, match="out/fedavg-seed-0 and out/feddf-seed-2 are of different data"):
        compare(cells((0, 1, 2)), "out", progress=change)
    assert json.loads((here / "out/comparison.json").read_text())["done"] == 5


def test_public_data_that_changed_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(here / "public.csv", shift=0.25)
    wanted = cells((0,), "fedavg,fedprox", "public.source=public.csv", "public.size=0.5", "name=public")
    compare(wanted[:1], "out/public")
    write_table(here / "public.csv", shift=1.0)
    monkeypatch.setattr(runs, "_train", None)
    with pytest.raises(ConfigError, match="fedavg-seed-0 and out/public/fedprox-seed-0 have different public data"):
        compare(wanted, "out/public")


def test_a_run_that_cannot_be_read_fails_alone(here: Path) -> None:
    (here / "out/feddf-seed-0/events.jsonl").write_text("{\n")
    found = compare(cells(), "out")
    assert [failure.cell for failure in found.failed] == ["feddf-seed-0"] and len(found.runs) == 3


def test_runs_of_an_older_version_are_kept_and_those_whose_data_is_gone(here: Path) -> None:
    for name in ("config.toml", "events.jsonl"):  # a key that it did not have is no difference
        edit(here / "out/fedavg-seed-0" / name, lambda text: text.replace('nonfinite = "fail"\n', ""))
        edit(here / "out/fedavg-seed-0" / name, lambda text: text.replace(', "nonfinite": "fail"', "", 1))
    assert len(compare(cells(), "out").runs) == 4
    (here / "mine.csv").unlink()
    assert len(compare(cells(), "out").runs) == 4


# -- code of one's own -------------------------------------------------------------------------------------------------

OWN_NET = """
from torch import nn
from sizes import HIDDEN

def small(input_shape, num_classes):
    return nn.Sequential(nn.Linear(3, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, num_classes))
"""
OWN_METHOD = """
from dataclasses import dataclass
from fnrfl.algorithms.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    '''As FedAvg.'''
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a table, a model and a method, and a finished comparison of them."""
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "mine.csv")
    Path("sizes.py").write_text("HIDDEN = 4\n")
    Path("own_nets.py").write_text(OWN_NET)
    Path("own_method.py").write_text(OWN_METHOD)
    compare(own_cells(), "out")
    return tmp_path


def own_cells(seeds: tuple[int, ...] = (0, 1)) -> list[Cell]:
    return cells(seeds, "fedavg,own_method:Mine", "model=own_nets:small")


@pytest.mark.parametrize("seeds", [(0, 1), (0, 1, 2)], ids=["the same seeds", "another seed"])
@pytest.mark.parametrize("file", ["own_method.py", "own_nets.py"])
def test_code_that_changed_between_two_calls_is_refused(
    seeds: tuple[int, ...], file: str, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / file).write_text((own / file).read_text() + "\nCHANGED = True\n")
    told = refusal(own_cells(seeds), monkeypatch)
    assert f"{own / file} has changed since out/" in told
    assert ("out/fedavg-seed-0" in told) == (file == "own_nets.py")
    assert "run all of them again into another folder with --out" in told


def test_code_that_is_the_same_again_is_kept_and_runs_that_say_nothing_of_theirs(own: Path) -> None:
    (own / "own_nets.py").write_text("HIDDEN = 5\n")
    (own / "own_nets.py").write_text(OWN_NET)
    seen: list[Notice] = []
    compare(own_cells(), "out", progress=seen.append)
    assert [notice.what for notice in seen] == ["kept"] * 4
    for log in own.glob("out/*/events.jsonl"):  # as an older version leaves them
        edit(log, _without_code)
    (own / "own_nets.py").write_text(OWN_NET + "\nCHANGED = True\n")
    assert len(compare(own_cells(), "out").runs) == 4


def test_a_report_refuses_a_folder_with_runs_of_different_code(own: Path) -> None:
    edit(own / "out/fedavg-seed-1/events.jsonl", lambda text: re.sub('"own_nets": "....', '"own_nets": "0000', text))
    with pytest.raises(ConfigError, match="are of different code, so they cannot be compared: the module own_nets"):
        fnrfl.report("out")


def _without_code(log: str) -> str:
    header, _, rounds = log.partition("\n")
    first = json.loads(header)
    assert set(first.pop("code_sha256")) >= {"own_nets"}
    return json.dumps(first) + "\n" + rounds


def test_a_model_function_that_was_edited_is_another_one(own: Path) -> None:
    """Objects that are passed in have their hash in the config."""

    def make(input_shape: tuple[int, ...], num_classes: int, hidden: int = 4) -> nn.Module:
        return nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, num_classes))

    def edited(input_shape: tuple[int, ...], num_classes: int, hidden: int = 5) -> nn.Module:
        return nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, num_classes))

    edited.__name__ = edited.__qualname__ = "make"
    keys: dict[str, Any] = {"dataset": "mine.csv", "scenario": "iid", "rounds": 1, "clients": 3}
    asked: dict[str, Any] = keys | {"over": {"algorithm": ["fedavg", "feddf"]}, "seeds": [0], "out": "objects"}
    fnrfl.compare("digits", model=make, **asked)
    with pytest.raises(ConfigError, match="with another config"):
        fnrfl.compare("digits", model=edited, **asked)
