"""Methods that give every client a model of its own: what is kept, hashed, scored and asked are those models.

Their scores are held against the same numbers worked out by hand.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fnrfl
from fnrfl import cli
from fnrfl.config import registry
from fnrfl.core.errors import ConfigError
from fnrfl.core.rng import generator
from fnrfl.data.batches import scaled
from fnrfl.data.datasets import load as load_data
from fnrfl.rundir import checkpoint, record
from fnrfl.rundir.events import Event
from fnrfl.runs.metrics import RunMetrics
from fnrfl.runs.predict import evaluate, predict
from fnrfl.runs.result import Result
from fnrfl.runs.setup.build import Built, build

OWN = ("ktpfl", "local-only", "cfedfn", "fedbn")
REFINED = tuple(f"{method} + FNR" for method in OWN)
CLIENTS = 4
COMMON = 5  # clients of the runs whose scores are worked out by hand
LEARNED = ("local-only", "cfedfn", "ktpfl")
NOISY = "label-dirichlet(0.5) + feature-noise(0.1)"


def command(*arguments: str, code: int = 0) -> str:
    got = CliRunner().invoke(cli.app, list(arguments))
    assert got.exit_code == code, got.output
    return got.output if code else got.stdout


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """A short run of a method; with half of the clients active, so that one never took part."""
    folder = tmp_path_factory.mktemp("played")

    @cache
    def play(method: str) -> Result:
        name, _, refined = method.partition(" + ")
        return fnrfl.run("digits", out=folder / method, algorithm=name, fnr="on" if refined else "off", **KEYS)

    return play


KEYS: dict[str, Any] = {
    "rounds": 2,
    "clients": CLIENTS,
    "participation": 0.5,
    "seed": 3,
    "model": "mlp(norm=batch)",
    "scenario": "label-dirichlet(0.5)",
    "client": {"epochs": 1},
}


def test_these_are_all_methods_of_the_kind() -> None:
    assert set(OWN) == {name for name in registry.algorithms() if registry.load_method(name)().personalised}


@pytest.mark.parametrize("method", [*OWN, *REFINED, "fedavg"])
def test_evaluate_has_the_runs_accuracy(method: str, played: Callable[[str], Result]) -> None:
    result = played(method)
    assert {client for event in result.rounds for client in event["cohort"]} != set(range(CLIENTS))
    got = evaluate(result.run_dir or "", "digits").summary()
    assert got["accuracy"] == result.accuracy
    assert got["per_class"] == result.per_class
    assert got["loss"] == pytest.approx(result.rounds[-1]["loss"], rel=1e-6)
    assert got["examples"] == 360 and sum(got["examples_per_class"]) == 360
    if method == "fedavg":
        assert got["per_client"] is None
    else:
        assert sorted(got["per_client"]) == list(range(CLIENTS))
        assert np.mean(list(got["per_client"].values())) == pytest.approx(got["accuracy"])


@pytest.mark.parametrize("method", [*OWN, *REFINED])
def test_a_loaded_run_has_the_same_models(method: str, played: Callable[[str], Result]) -> None:
    result = played(method)
    loaded = fnrfl.load(result.run_dir or "")
    assert loaded.model_sha256 == result.model_sha256
    test = load_data("digits").test
    with torch.no_grad():
        for client, share in (evaluate(result.run_dir or "", "digits").per_client or {}).items():
            right = (loaded.client_model(client)(test.x).argmax(1) == test.y).double().mean()
            assert float(right) == pytest.approx(share)


@pytest.mark.parametrize("at_once", [2, 1])
def test_a_run_that_writes_nothing_keeps_the_models(at_once: int, played: Callable[[str], Result]) -> None:
    """In memory, and where memories were on disk, in a folder that goes with the result."""
    result = fnrfl.run("digits", out=None, algorithm="local-only", engine={"clients_at_once": at_once}, **KEYS)
    assert result.model_sha256 == played("local-only").model_sha256
    first = next(result.model.parameters())
    mine = [next(result.client_model(client).parameters()) for client in range(CLIENTS)]
    assert [torch.equal(one, first) for one in mine] == [False, False, False, True]  # client 3 never took part


def test_the_hash_covers_the_clients_models(played: Callable[[str], Result]) -> None:
    """The server's model of local-only is never trained: by that alone, all runs were one."""
    one = played("local-only")
    other = fnrfl.run("digits", out=None, algorithm="local-only", **KEYS | {"client": {"epochs": 2}})
    assert all(torch.equal(other.weights[name], one.weights[name]) for name in one.weights)
    assert other.model_sha256 != one.model_sha256


def test_the_hash_of_one_model_is_what_it_was() -> None:
    """By the definition of version 0.1.0: runs that were written down by it are still found."""
    keys: dict[str, Any] = {"rounds": 1, "clients": 2, "client": {"epochs": 1}, "engine": "loop"}
    result = fnrfl.run("digits", out=None, **keys)
    digest = hashlib.sha256()
    for name, tensor in sorted(result.weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    assert result.model_sha256 == digest.hexdigest()


def test_one_client_may_be_asked_for(played: Callable[[str], Result]) -> None:
    result = played("ktpfl")
    run_dir = str(result.run_dir)
    each = json.loads(command("evaluate", run_dir, "digits", "--json"))["per_client"]
    for client in range(CLIENTS):
        got = json.loads(command("evaluate", run_dir, "digits", "--client", str(client), "--json"))
        assert got["accuracy"] == each[str(client)] and got["per_client"] == {str(client): got["accuracy"]}
    assert "model of client 3)" in command("evaluate", run_dir, "digits", "--client", "3")
    text = command("evaluate", run_dir, "digits")
    assert "on 360 examples (the test part of digits; mean over 4 clients' models)" in text
    assert f"accuracy {result.accuracy:.4f}" in text and text.splitlines()[-1].split() == ["3", f"{each['3']:.4f}"]
    assert "no client 4: the run has 4" in command("evaluate", run_dir, "digits", "--client", "4", code=2)
    assert "no client -1" in command("predict", run_dir, "digits", "--client", "-1", code=2)


def test_one_model_for_all_has_no_clients(played: Callable[[str], Result]) -> None:
    result = played("fedavg")
    for verb in ("evaluate", "predict"):
        said = command(verb, str(result.run_dir), "digits", "--client", "0", code=2)
        assert "one model for all clients" in said and "Leave --client out" in said
    with pytest.raises(ConfigError, match="Use `model`"):
        result.client_model(0)


@pytest.mark.parametrize("method", ["ktpfl", "fedbn", "cfedfn + FNR"])
def test_predictions_are_the_mean_of_the_clients(method: str, played: Callable[[str], Result]) -> None:
    result = played(method)
    x = load_data("digits").test.x[:20].numpy()
    path = Path(result.run_dir or "").parent / "x.npz"
    np.savez(path, x=x)
    got = predict(result.run_dir or "", str(path))
    with torch.no_grad():
        each = torch.stack([result.client_model(c)(torch.from_numpy(x)).softmax(1) for c in range(CLIENTS)])
    np.testing.assert_allclose(got.probabilities, each.mean(0), atol=1e-6)
    rows = list(csv.DictReader(io.StringIO(got.to_csv())))
    assert [row["label"] for row in rows] == [str(index) for index in each.mean(0).argmax(1).tolist()]
    for client in range(CLIENTS):
        said = [str(index) for index in each[client].argmax(1).tolist()]
        assert [row[f"client_{client}"] for row in rows] == said
        alone = predict(result.run_dir or "", str(path), client=client)
        assert alone.labels == said and "client_" not in alone.to_csv()
        np.testing.assert_allclose(alone.probabilities, each[client], atol=1e-6)


def test_models_that_are_gone_are_said(played: Callable[[str], Result], tmp_path: Path) -> None:
    shutil.copytree(played("ktpfl").run_dir or "", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "rounds")
    loaded = fnrfl.load(tmp_path / "run")
    assert loaded.accuracy == played("ktpfl").accuracy
    asked = [lambda: loaded.client_model(0), lambda: loaded.model_sha256, lambda: evaluate(tmp_path / "run", "digits")]
    for ask in asked:
        with pytest.raises(ConfigError, match="rounds/ is missing. Put it back"):
            ask()
    (tmp_path / "run" / "checkpoint.json").unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint\.json"):
        fnrfl.load(tmp_path / "run")


# -- scores by hand ----------------------------------------------------------------------------------------------------


def by_hand(path: Path, method: str, **keys: Any) -> tuple[Result, Built, list[nn.Module]]:
    """A run, what it was built of, and every client's model as an ordinary module."""
    keys = {"scenario": "label-dirichlet(0.5)", "client": {"epochs": 1}} | keys
    result = fnrfl.run("digits", out=path, algorithm=method, rounds=3, clients=COMMON, **keys)
    built = build(result.config)
    saved = record.read_index(path)
    assert saved is not None
    state = checkpoint.load_checkpoint(path, saved, built.engine.memory)
    memory, personal = built.engine.memory, built.algorithm.personal
    states = [personal(built.net, state, client, memory.get(client)) for client in range(COMMON)]
    return result, built, [built.net.export(mine.params, mine.buffers) for mine in states]


def right(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Which answers are right, as numbers."""
    with torch.no_grad():
        return (model(x).argmax(1) == y).double()


def own_share(built: Built, client: int, hits: Tensor, y: Tensor) -> float:
    """Accuracy on the classes as the client has them."""
    counts = torch.from_numpy(built.partition.counts[client]).double()
    return float(sum(counts[c] / counts.sum() * hits[y == c].mean() for c in range(10)))


@pytest.mark.parametrize("method", LEARNED)
def test_accuracy_is_the_mean_over_clients_on_the_common_test_set(method: str, tmp_path: Path) -> None:
    result, built, models = by_hand(tmp_path / "run", method)
    x, y = scaled(built.splits.test.x, torch.float32), built.splits.test.y
    hits = torch.stack([right(model, x, y) for model in models])
    last = result.rounds[-1]
    assert last["accuracy"] == pytest.approx(float(hits.mean()), abs=1e-12)
    assert last["per_class"] == pytest.approx([float(hits[:, y == c].mean()) for c in range(10)])
    assert "accuracy_clean" not in last
    mine = [own_share(built, client, hits[client], y) for client in range(COMMON)]
    assert last["per_client"] == pytest.approx(mine)
    assert last["accuracy_own"] == pytest.approx(sum(mine) / COMMON)
    assert len({round(value, 6) for value in mine}) > 1


def test_under_feature_noise_the_common_test_set_has_everybodys_noise(tmp_path: Path) -> None:
    """Example j under the noise of client j mod N; a client's own test set is all under its own noise."""
    result, built, models = by_hand(tmp_path / "run", "local-only", scenario=NOISY)
    x, y = scaled(built.splits.test.x, torch.float32), built.splits.test.y
    common = x.clone()
    for client in range(COMMON):
        stream = generator(0, client, "test", "feature-noise")
        common[client::COMMON] = built.noise(client, x[client::COMMON], stream)
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
    result, built, models = by_hand(tmp_path / "run", "local-only", validation={"size": 0.1})
    x, y = scaled(built.splits.validation.x, torch.float32), built.splits.validation.y
    want = float(torch.stack([right(model, x, y) for model in models]).mean())
    assert result.rounds[-1]["validation_accuracy"] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("method", LEARNED)
def test_clients_learn_their_own_distribution(method: str, engine: str) -> None:
    """Under label skew a client's model is better on its own classes than on everybody's."""
    keys: dict[str, Any] = {"algorithm": method, "engine": {"name": engine}, "clients": COMMON, "rounds": 6}
    last = fnrfl.run("digits", out=None, **keys).rounds[-1]
    assert last["accuracy"] > 0.25
    assert last["accuracy_own"] > max(0.7, last["accuracy"])


def test_each_client_is_judged_on_its_own_validation_data_too(tmp_path: Path) -> None:
    """By its own model, on its own mixture of classes and under its own noise."""
    result, built, models = by_hand(tmp_path / "run", "local-only", validation={"size": 0.2}, scenario=NOISY)
    x, y = scaled(built.splits.validation.x, torch.float32), built.splits.validation.y
    mine = []
    for client, model in enumerate(models):
        seen = built.noise(client, x, generator(0, client, "validation", "feature-noise"))
        mine.append(own_share(built, client, right(model, seen, y), y))
    found = result.rounds[-1]["validation_own"]
    assert found == pytest.approx(np.mean(mine), abs=1e-9)
    assert found > result.rounds[-1]["validation_accuracy"] + 0.1  # what a client does best is its own classes


class Rounds(RunMetrics):
    def __init__(self, rounds: list[Event]) -> None:
        self.rounds = rounds


def test_best_is_judged_by_the_validation_data_of_its_metric() -> None:
    numbers = {"accuracy": (0.1, 0.2, 0.3), "accuracy_own": (0.4, 0.5, 0.6), "auc": (0.7, 0.8, 0.9)}
    judges = {"validation_accuracy": (0.9, 0.9, 0.1), "validation_own": (0.1, 0.2, 0.1)}
    rounds = [{name: values[at] for name, values in (numbers | judges).items()} for at in range(3)]
    assert [Rounds(rounds).best(name) for name in numbers] == [0.1, 0.5, 0.7]
    first, *others = rounds
    del first["validation_own"]
    assert Rounds([first, *others]).best("accuracy_own") == 0.4  # begun with an older version
    assert Rounds([event | dict.fromkeys(judges) for event in rounds]).best("auc") is None
