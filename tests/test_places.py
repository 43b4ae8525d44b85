"""Where runs are kept: names that say what is in them, a free one by default, and advice that fits what is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fnrfl
from fnrfl.cli import app
from fnrfl.config import load
from fnrfl.rundir.lock import alone, lock_file
from fnrfl.rundir.places import choose_run_dir, is_of
from fnrfl.runs import run as runs

QUICK = ["rounds=1", "client.epochs=1", "clients=4"]
STEADY = """
from dataclasses import dataclass
from fnrfl.algorithms.fedavg import FedAvg

@dataclass(frozen=True)
class Steady(FedAvg):
    pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> Result:
    return CliRunner().invoke(app, ["run", *QUICK, *words])


def folders() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir())


def test_a_folder_is_named_by_method_fnr_and_seed(folder: Path) -> None:
    assert load().run_dir == Path("runs/digits-fedavg-0")
    assert load(None, ["fnr=on", "seed=3", "name=Mine", "algorithm=moon"]).run_dir == Path("runs/Mine-moon-fnr-3")
    (folder / "steady_method.py").write_text(STEADY)
    assert load(None, ["algorithm=steady_method:Steady"]).run_dir == Path("runs/digits-steady-method-steady-0")


def test_python_picks_a_free_name(folder: Path) -> None:
    keys: dict[str, Any] = {"rounds": 1, "clients": 4, "client": {"epochs": 1}}
    first, second = (fnrfl.run("digits", **keys) for _ in range(2))
    assert (first.run_dir, second.run_dir) == (Path("runs/digits-fedavg-0"), Path("runs/digits-fedavg-0-2"))
    assert fnrfl.run("digits", seed=1, fnr="on", **keys).run_dir == Path("runs/digits-fedavg-fnr-1")
    replaced = fnrfl.run("digits", overwrite=True, **keys)
    assert replaced.run_dir == Path("runs/digits-fedavg-0")
    assert folders() == ["digits-fedavg-0", "digits-fedavg-0-2", "digits-fedavg-fnr-1"]


def test_a_name_is_taken_by_whatever_is_there(folder: Path) -> None:
    config = load()
    (folder / "runs").mkdir()
    (folder / "runs/digits-fedavg-0").touch()
    os.symlink("nowhere", "runs/digits-fedavg-0-2")
    assert choose_run_dir(config, None, overwrite=False) == Path("runs/digits-fedavg-0-3")


def test_the_command_picks_a_free_name_unless_the_same_run_is_unfinished(folder: Path) -> None:
    assert command().exit_code == 0
    again = command()  # finished: another one
    assert again.exit_code == 0 and "runs/digits-fedavg-0-2" in again.stdout
    (folder / "runs/digits-fedavg-0-2/model.safetensors").unlink()
    refused = command()
    assert refused.exit_code == 2
    assert all(word in refused.stderr for word in ("not finished", "`fnrfl resume runs/digits-fedavg-0-2`", "--out"))
    other = command("client.lr=0.2")  # another config: nothing to resume
    assert other.exit_code == 0 and "runs/digits-fedavg-0-3" in other.stdout
    assert command("--overwrite").exit_code == 0
    assert folders() == ["digits-fedavg-0", "digits-fedavg-0-2", "digits-fedavg-0-3"]


def test_a_given_folder_that_is_taken_is_refused_with_advice_that_fits(folder: Path) -> None:
    (folder / "thesis").mkdir()
    assert "thesis exists already and is not a run" in command("-o", "thesis").stderr
    assert command("-o", "run").exit_code == 0
    finished, other = command("-o", "run"), command("-o", "run", "seed=1")
    assert finished.exit_code == other.exit_code == 2
    assert "run exists already: this run is finished there" in finished.stderr
    assert "with a run of another config" in other.stderr and "resume" not in finished.stderr + other.stderr
    (folder / "run/model.safetensors").unlink()
    assert "Go on with `fnrfl resume run`" in command("-o", "run").stderr


def test_a_run_of_an_older_version_without_some_keys_is_the_same_run(folder: Path) -> None:
    config = load(None, QUICK)
    runs.run(config, out="run")
    written = folder / "run/config.toml"
    assert is_of(config, folder / "run")
    written.write_text(written.read_text().replace('nonfinite = "fail"\n', ""))
    assert is_of(config, folder / "run") and not is_of(load(), folder / "run")
    written.write_text("[")
    assert not is_of(config, folder / "run")


@pytest.mark.parametrize("words", [(), ("-o", "runs/digits-fedavg-0")], ids=["by default", "--out"])
def test_a_run_that_another_process_is_at_work_on_is_called_so(words: tuple[str, ...], folder: Path) -> None:
    assert command().exit_code == 0
    begun = folder / "runs/digits-fedavg-0"
    (begun / "model.safetensors").unlink()
    with alone(begun):
        told = command(*words).output
        assert f"digits-fedavg-0 is in use by process {os.getpid()}." in told and "fnrfl resume" not in told
    lock_file(begun).write_text("1\n")  # as a run leaves it that was killed
    assert "Go on with `fnrfl resume runs/digits-fedavg-0`" in command(*words).output.replace("\n", " ")
