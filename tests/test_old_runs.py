"""Run directories of every release are read, reported and resumed by this version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fnrfl.results.compare import compare, grid
from fnrfl.results.report.load import load_runs as read_report
from fnrfl.runs import run as runs
from fnrfl.runs.predict import evaluate, predict

FIXTURES = Path(__file__).parent / "fixtures"
RELEASES = sorted(folder.name for folder in FIXTURES.iterdir() if folder.is_dir())
FINISHED = ("finished", "personalised", "normalised", "table")


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs of a release, copied, in the working folder."""
    folder = Path(shutil.copytree(FIXTURES / request.param, tmp_path / "runs"))
    monkeypatch.chdir(folder)
    return folder


def last_accuracy(run_dir: Path) -> float:
    return float(json.loads((run_dir / "events.jsonl").read_text().splitlines()[-1])["accuracy"])


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_run_loads(release: Path, name: str) -> None:
    got = runs.load(release / name)
    assert got.accuracy == last_accuracy(release / name)
    assert sum(p.numel() for p in got.model.parameters()) > 0
    assert runs.resume(release / name).model_sha256 == got.model_sha256


def test_an_unfinished_run_goes_on_as_it_would_have(release: Path) -> None:
    """The first rounds were computed elsewhere, so that the last bits may differ."""
    config = runs.resume(release / "unfinished").config
    got, wanted = runs.load(release / "unfinished"), runs.run(config, out=None)
    assert len(got.rounds) == len(wanted.rounds) == 4
    for name, weights in wanted.weights.items():
        torch.testing.assert_close(got.weights[name], weights, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", FINISHED[:3])
def test_a_model_scores_what_its_run_logged(release: Path, name: str) -> None:
    assert evaluate(release / name, "digits").summary()["accuracy"] == pytest.approx(last_accuracy(release / name))


def test_a_table_is_recognised_and_predicted(release: Path) -> None:
    scored = evaluate(release / "table", "patients.csv").summary()
    assert (scored["accuracy"], scored["examples"]) == (pytest.approx(last_accuracy(release / "table")), 12)
    assert len(predict(release / "table", "patients.csv").labels) == 60


def test_all_are_reported(release: Path) -> None:
    found = read_report([release])
    assert len(found.runs) == 7 and not found.failed and not found.damaged


def test_a_comparison_goes_on(release: Path) -> None:
    settings = ["model=mlp(hidden=8)", "clients=3", "rounds=1", "engine=loop", "engine.threads=1"]
    before = runs.load(release / "comparison" / "fedavg-seed-0").model_sha256
    found = compare(grid("digits", settings, ["algorithm=fedavg,fedprox"], [0, 1]), release / "comparison")
    assert len(found.runs) == 4 and not found.failed
    assert runs.load(release / "comparison" / "fedavg-seed-0").model_sha256 == before
