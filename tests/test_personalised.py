"""Scores of methods whose clients use models of their own, against the same numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fnrfl
from fnrfl.core.rng import generator
from fnrfl.data.batches import scaled
from fnrfl.rundir import checkpoint, record
from fnrfl.runs.result import Result
from fnrfl.runs.setup.build import Built, build

CLIENTS = 5
METHODS = ("local-only", "cfedfn", "ktpfl")
NOISY = "label-dirichlet(0.5) + feature-noise(0.1)"


def played(path: Path, method: str, **keys: Any) -> tuple[Result, Built, list[nn.Module]]:
    """A run, what it was built of, and every client's model as an ordinary module."""
    keys = {"scenario": "label-dirichlet(0.5)", "client": {"epochs": 1}} | keys
    result = fnrfl.run("digits", out=path, algorithm=method, rounds=3, clients=CLIENTS, **keys)
    built = build(result.config)
    saved = record.read_index(path)
    assert saved is not None
    state = checkpoint.load_checkpoint(path, saved, built.engine.memory)
    models = []
    for client in range(CLIENTS):
        mine = built.algorithm.personal(built.net, state, client, built.engine.memory.get(client))
        models.append(built.net.export(mine.params, mine.buffers))
    return result, built, models


def right(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Which answers are right, as numbers."""
    with torch.no_grad():
        return (model(x).argmax(1) == y).double()


def own_share(built: Built, client: int, hits: Tensor, y: Tensor) -> float:
    """Accuracy on the classes as the client has them."""
    counts = torch.from_numpy(built.partition.counts[client]).double()
    return float(sum(counts[c] / counts.sum() * hits[y == c].mean() for c in range(10)))


@pytest.mark.parametrize("method", METHODS)
def test_accuracy_is_the_mean_over_clients_on_the_common_test_set(method: str, tmp_path: Path) -> None:
    result, built, models = played(tmp_path / "run", method)
    x, y = scaled(built.splits.test.x, torch.float32), built.splits.test.y
    hits = torch.stack([right(model, x, y) for model in models])
    last = result.rounds[-1]
    assert last["accuracy"] == pytest.approx(float(hits.mean()), abs=1e-12)
    assert last["per_class"] == pytest.approx([float(hits[:, y == c].mean()) for c in range(10)])
    assert "accuracy_clean" not in last
    mine = [own_share(built, client, hits[client], y) for client in range(CLIENTS)]
    assert last["per_client"] == pytest.approx(mine)
    assert last["accuracy_own"] == pytest.approx(sum(mine) / CLIENTS)
    assert len({round(value, 6) for value in mine}) > 1


def test_under_feature_noise_the_common_test_set_has_everybodys_noise(tmp_path: Path) -> None:
    """Example j under the noise of client j mod N; a client's own test set is all under its own noise."""
    result, built, models = played(tmp_path / "run", "local-only", scenario=NOISY)
    x, y = scaled(built.splits.test.x, torch.float32), built.splits.test.y
    common = x.clone()
    for client in range(CLIENTS):
        stream = generator(0, client, "test", "feature-noise")
        common[client::CLIENTS] = built.noise(client, x[client::CLIENTS], stream)
    assert float((common - x).abs().max()) > 0.01
    last = result.rounds[-1]
    noisy, clean = (float(torch.stack([right(m, seen, y) for m in models]).mean()) for seen in (common, x))
    assert last["accuracy"] == pytest.approx(noisy, abs=2e-3)
    assert last["accuracy_clean"] == pytest.approx(clean, abs=1e-12)
    mine = []
    for client, model in enumerate(models):
        stream = generator(0, client, "test", "feature-noise")
        mine.append(own_share(built, client, right(model, built.noise(client, x, stream), y), y))
    assert last["per_client"] == pytest.approx(mine, abs=1e-9)


def test_validation_is_judged_by_the_clients_models_too(tmp_path: Path) -> None:
    result, built, models = played(tmp_path / "run", "local-only", validation={"size": 0.1})
    x, y = scaled(built.splits.validation.x, torch.float32), built.splits.validation.y
    want = float(torch.stack([right(model, x, y) for model in models]).mean())
    assert result.rounds[-1]["validation_accuracy"] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("method", METHODS)
def test_clients_learn_their_own_distribution(method: str, engine: str) -> None:
    """Under label skew a client's model is better on its own classes than on everybody's."""
    keys: dict[str, Any] = {"algorithm": method, "engine": {"name": engine}, "clients": CLIENTS, "rounds": 6}
    last = fnrfl.run("digits", out=None, **keys).rounds[-1]
    assert last["accuracy"] > 0.25
    assert last["accuracy_own"] > max(0.7, last["accuracy"])
