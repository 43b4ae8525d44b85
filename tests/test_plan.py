"""What a comparison would take (`compare --dry-run`), and the word about what takes longer than an hour."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fnrfl import cli
from fnrfl.results.compare import compare, grid, plan_grid
from fnrfl.runs import run as runs

GRID = ("compare", "digits", "rounds=4", "client.epochs=1", "--over", "fnr=off,on", "--seeds", "0,1", "-o", "here")


def command(*words: str, code: int = 0) -> Result:
    got = CliRunner().invoke(cli.app, list(words))
    assert got.exit_code == code, got.output
    return got


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_comparison_names_every_run_and_writes_nothing(folder: Path) -> None:
    got = json.loads(command(*GRID, "--dry-run", "--json").stdout)
    assert list(folder.iterdir()) == []
    cells = grid("digits", ["rounds=4", "client.epochs=1"], ["fnr=off,on"], [0, 1])
    assert [(run["run"], run["seed"], run["state"]) for run in got["runs"]] == [
        (cell.name, cell.seed, "new") for cell in cells
    ]
    assert all(run["seconds_estimate"] > 0 for run in got["runs"])
    assert got["seconds_estimate"] == pytest.approx(sum(run["seconds_estimate"] for run in got["runs"]))
    text = command(*GRID, "--dry-run").stdout
    assert [text.count(label) for label in ("fnr off", "fnr on", "fnr weight 0")] == [1, 1, 1]
    assert "6 runs in here" in text and "Nothing was written." in text and list(folder.iterdir()) == []


def test_what_is_there_already_is_told_and_takes_no_time(folder: Path) -> None:
    cells = grid("digits", ["rounds=4", "client.epochs=1"], ["algorithm=fedavg,fedprox"], [0, 1])
    compare(cells[:2], "here")

    def stop(event: dict[str, object]) -> None:
        if event["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(cells[2].config, out=folder / "here" / cells[2].name, progress=stop)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    planned = plan_grid(cells, "here")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert [(run.state, run.rounds_done) for run in planned] == [("finished", 4)] * 2 + [("begun", 3), ("new", 0)]
    assert planned[0].seconds == planned[1].seconds == 0.0
    assert planned[2].seconds is not None and planned[2].seconds > 0
    words = ("compare", "digits", "rounds=4", "client.epochs=1", "--over", "algorithm=fedavg,fedprox", "-o", "here")
    told = command(*words, "--seeds", "0,1", "--dry-run").stdout
    assert "1 finished, seed 1 goes on after round 3 of 4" in told and "1 finished, 1 new" in told
    assert "2 of them finished already" in told
    found = compare(cells, "here")
    assert not found.failed and command(*words, "--seeds", "0,1", "--dry-run").stdout.count("2 finished") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--over", "algorithm=fedavg,moon", "--baseline", "scafold"), 'There is no baseline "scafold"'),
        (("--over", "clients=10,100000"), "clients 100000: "),
        (("--over", "algorithm=fedavg", "--seeds", "0", "-o", "."), "holds something else than a comparison"),
    ],
)
def test_what_a_comparison_would_refuse_its_dry_run_refuses(folder: Path, words: tuple[str, ...], said: str) -> None:
    (folder / "mine.txt").write_text("mine")
    wet, dry = (command("compare", "digits", "rounds=1", *words, *more, code=2) for more in ((), ("--dry-run",)))
    assert said in dry.stderr and dry.stderr == wet.stderr and dry.stdout == ""
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_data_that_is_not_there_is_not_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FNRFL_DATA", str(folder / "empty"))
    monkeypatch.setenv("HOME", str(folder))
    got = json.loads(command("compare", "label-skew", "--over", "fnr=off,on", "--dry-run", "--json").stdout)
    if got["seconds_estimate"] is not None:
        pytest.skip("cifar10 is installed for the whole system")
    assert {run["seconds_estimate"] for run in got["runs"]} == {None} and list(folder.iterdir()) == []
    assert "fnrfl data get cifar10" in command("compare", "label-skew", "--over", "fnr=off,on", "--dry-run").stdout


# -- longer than an hour -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("run",), ("compare", "--over", "fnr=off")])
def test_a_forecast_of_more_than_an_hour_is_noted(words: tuple[str, ...]) -> None:
    told = command(*words, "rounds=100000000", "--dry-run").stdout
    assert "more than an hour; fewer rounds" in told
    assert "more than an hour" not in command(*words, "rounds=1", "--dry-run").stdout
