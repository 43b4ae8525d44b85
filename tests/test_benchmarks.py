"""What the benchmarks say about the package is still true of it; their figures are not looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fnrfl.config import load
from fnrfl.engines import one_by_one, vectorised
from fnrfl.engines.job import Job
from fnrfl.engines.trainer import Trainer
from fnrfl.runs import run as runs
from fnrfl.runs.setup.build import build
from fnrfl.runs.setup.method import cohort

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _importable(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("name", ["W1", "W1-keep", "W1-fnr"])
def test_where_the_time_goes_names_every_part(name: str) -> None:
    import cpu

    before = one_by_one.run_steps, vectorised.run_steps, Trainer._job, Job.batches, runs.score_round
    found = cpu.where(next(bench for bench in cpu.BENCHES if bench.name == name), 1)["ms"]
    assert {"orders, start", "gathering batches", "steps", "evaluation", "averaging, the rest"} == found.keys()
    assert all(found[part] > 0 for part in ("orders, start", "gathering batches", "steps", "evaluation"))
    assert (one_by_one.run_steps, vectorised.run_steps, Trainer._job, Job.batches, runs.score_round) == before


def test_images_are_those_of_the_cohort() -> None:
    import gpu

    built = build(load("digits", ["clients=20", "participation=0.25", "client.epochs=3", "client.batch=8"]))
    for t in range(2):
        steps = [-(-3 * len(built.splits.clients[m]) // 8) for m in cohort(built.config, t)]
        assert len(steps) == 5 and gpu.images(built, t) == 8 * sum(steps)


@pytest.mark.parametrize("moon", [False, True], ids=["fedavg", "moon"])
def test_a_round_as_the_gpu_benchmark_plays_it(moon: bool, monkeypatch: Any) -> None:
    import gpu

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    keys = ["fnr=on", "rounds=2", "client.epochs=1"] + ["algorithm=moon"] * moon
    built = build(load("digits", keys))
    played = list(gpu.rounds(built, 2))
    assert all(row["phases"].keys() >= {"local", "measure", "refine"} for row in played)
    passes, images, refined = gpu.predicted(built, played[-1]["notes"]), gpu.images(built), 5
    public, ranking = len(built.splits.public), len(built.splits.ranking)
    epochs = built.config.fnr.epochs  # type: ignore[union-attr]
    assert len(played[-1]["notes"]["refined"]) == refined
    local = (5 if moon else 3) * images  # MOON has two more models look at every image
    assert passes == local + 10 * (public + ranking) + refined * (2 * ranking + 3 * epochs * public)


def test_memory_is_said_after_each_of_different_cells(monkeypatch: Any) -> None:
    import gpu

    cpu = ["engine=loop", "dataset=digits", "model=mlp", "public.size=50"]
    monkeypatch.setattr(gpu, "config", lambda keys, recipe: load("digits", [k for k in keys if "=" in k] + cpu))
    monkeypatch.setattr(gpu, "FAST", [])
    monkeypatch.setattr(gpu, "fresh", lambda: None)
    found = list(gpu.held(("fedavg", "fedprox"), ("iid", "label-dirichlet(0.5)")))
    assert [row["place"] for row in found] == [1, 2, 3, 4]
    assert len({tuple(row["keys"]) for row in found}) == 4 and all(row["memory"]["process"] for row in found)
