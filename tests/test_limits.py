"""Sizes that nobody can mean, layers that need more than they get, and code of others that raises: a sentence each."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import fnrfl
from fnrfl import cli
from fnrfl.config import load
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError, FnrflError
from fnrfl.core.rng import generator
from fnrfl.core.types import Engine, State
from fnrfl.runs import forecast as plan
from fnrfl.runs import run as runs

SHORT = ("rounds=1", "clients=3", "client.epochs=1")


def command(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("client.batch=99999999999999999999999",), 'client.last_batch = "keep"'),
        (("fnr.batch=2000000000",), "fnr.batch = 2000000000 is more than 5 passes"),
        (("model=mlp(norm=batch)", "fnr.batch=1"), "a refined client has such a batch"),
        (("algorithm=fedadagrad", "algorithm.tau=1e30"), "(algorithm.tau = 1e+30"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_at_once(words: tuple[str, ...], said: str) -> None:
    began = time.process_time()  # what others do meanwhile does not count
    got = command("run", *SHORT, *words)
    assert got.exit_code in (2, 3), got.output
    assert said in got.stderr
    assert "please report" not in got.stderr
    assert time.process_time() - began < 5


class Tokens(nn.Module):
    """Takes whole numbers."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4 * input_shape[0], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(x).flatten(1))
        return logits


def test_a_single_token_sequence_is_a_batch_like_any_other() -> None:
    draw = generator(0, "tokens")
    x, y = torch.randint(9, (66, 5), generator=draw), torch.randint(2, (66,), generator=draw)
    client = {"batch": 1, "epochs": 1}
    keys: dict[str, Any] = {"clients": 2, "scenario": "iid", "rounds": 1, "client": client, "out": None}
    result = fnrfl.run(dataset=(x, y, x, y), model=Tokens, **keys)
    assert len(result.rounds) == 1


@pytest.mark.parametrize(
    "words",
    [("client.last_batch=keep", "client.batch=10000000000000000000000"), ("model=cnn(norm=batch)", "client.batch=1")],
)
def test_what_can_be_done_is(words: tuple[str, ...]) -> None:
    """A batch of all, and BatchNorm over the pixels of one image."""
    assert command("run", "rounds=1", "clients=30", "participation=0.1", "client.epochs=1", *words).exit_code == 0


def test_a_forecast_takes_no_longer_for_more_rounds() -> None:
    small = ["model=mlp(hidden=8)", "client.epochs=1"]
    few, many = (plan.forecast(load(None, [f"rounds={n}", *small])).summary() for n in (1000, 999999999999))
    assert many["steps"] * 1000 == few["steps"] * 999999999999
    assert many["bytes_up"] - many["bytes_up_per_round"] * 999999999999 == (
        few["bytes_up"] - few["bytes_up_per_round"] * 1000
    )


def test_a_forecast_of_many_cohorts_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, ["rounds=50", "participation=0.3"])
    exact = plan.forecast(config).steps["local"]
    monkeypatch.setattr(plan, "COUNTED", 20)
    assert plan.forecast(config).steps["local"] == pytest.approx(exact, rel=0.1)


# -- lazy layers -------------------------------------------------------------------------------------------------------


def lazy(num_classes: int, unused: bool = False) -> nn.Module:
    layers = [nn.Flatten(), nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(num_classes)]
    return Unused(*layers) if unused else nn.Sequential(*layers)


class Unused(nn.Sequential):
    """With a layer that nobody calls."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.spare = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            x = layer(x)
        return x


def given(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    width = int(torch.tensor(input_shape).prod())
    return nn.Sequential(
        nn.Flatten(), nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes)
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", ["fedavg", "moon"])
def test_lazy_layers_are_the_layers_that_they_become(algorithm: str) -> None:
    keys: dict[str, Any] = {"rounds": 1, "clients": 3, "client": {"epochs": 1}, "out": None, "algorithm": algorithm}
    found, wanted = (fnrfl.run("digits", model=f"test_limits:{name}", **keys) for name in ("lazy", "given"))
    assert found.model_sha256 == wanted.model_sha256


def test_a_lazy_layer_that_nobody_calls_is_named() -> None:
    got = command("run", *SHORT, "model=test_limits:lazy(unused=true)")
    assert got.exit_code == 2
    assert "does not reach the lazy layer of spare.weight" in got.stderr


# -- code of others ----------------------------------------------------------------------------------------------------


class Raising(nn.Module):
    """Raises when it is built, or only when it is trained."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, when: str = "always") -> None:
        super().__init__()
        self.head, self.when = nn.Linear(int(torch.tensor(input_shape).prod()), num_classes), when

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "always" or (len(x) > 3 and self.training == (self.when == "training")):
            raise KeyError("mine")
        logits: Tensor = self.head(x.flatten(1))
        return logits


@dataclass(frozen=True)
class Broken(Algorithm):
    """Raises in its first round."""

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        raise IndexError("out of my list")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=test_limits:Raising",), "model = \"test_limits:Raising\" cannot be called with examples of shape"),
        (("model=test_limits:Raising(when=training)",), "round 1, stage local: KeyError: 'mine'"),
        (("model=test_limits:Raising(when=scoring)",), "could not be scored after round 1: KeyError: 'mine' (test"),
        (("algorithm=test_limits:Broken",), 'algorithm = "test_limits:Broken" failed in round 1: IndexError: out of'),
    ],
)  # fmt: skip
def test_code_that_raises_is_named(words: tuple[str, ...], said: str) -> None:
    got = command("run", *SHORT, *words, "engine=loop")
    assert got.exit_code in (2, 3)
    assert said in got.stderr
    assert "please report" not in got.stderr


# -- files of another shape --------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop(event: object) -> None:
    raise Stop


@pytest.mark.parametrize(("file", "name"), [("server", "params"), ("client-0", "c")])
def test_a_checkpoint_of_another_shape_is_refused(
    folder: Path, file: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stop):
        runs.run(load(None, ["rounds=3", "clients=2", "algorithm=scaffold"]), out="run", progress=stop)
    monkeypatch.setattr(runs.checkpoint, "read_tensors", cut(runs.checkpoint.read_tensors, file, name))
    with pytest.raises(FnrflError, match=f"has {name} of .* with shape .* belongs to another run"):
        runs.resume("run")


def cut(read: Any, file: str, name: str) -> Any:
    def shorter(path: Path, sha256: str | None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = read(path, sha256)
        return found | {name: found[name][:-1]} if path.stem == file else found

    return shorter


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    """In a run of version 0.1.0, which has no hashes."""
    runs.run(load(None, SHORT), out="run")
    index = json.loads((folder / "run" / "checkpoint.json").read_text())
    old = {"format": 2, "round": index["round"], "config": index["config"], "server": index["server"]["file"]}
    (folder / "run" / "checkpoint.json").write_text(json.dumps(old | {"clients": {}}))
    path = folder / "run" / "model.safetensors"
    weights = load_file(path)
    first = next(iter(weights))
    save_file(weights | {first: weights[first][..., :-1].clone()}, path)
    with pytest.raises(CompatibilityError, match=f"{first} of shape .* belong to another model"):
        runs.load("run").model  # noqa: B018
