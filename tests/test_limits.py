"""Sizes that nobody can mean, numbers that are not finite, code that raises: the right one is named in a sentence."""

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
from fnrfl.algorithms.parts.norms import norm_targets
from fnrfl.config import load
from fnrfl.config.registry import load_method
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import ClientError, CompatibilityError, FnrflError
from fnrfl.core.rng import generator
from fnrfl.core.types import Engine, State
from fnrfl.rundir import events
from fnrfl.runs import forecast as plan
from fnrfl.runs import run as runs
from fnrfl.runs.error_context import check_scores, check_state, for_json

SHORT = ("rounds=1", "clients=3", "client.epochs=1")
KEYS: dict[str, Any] = {"rounds": 2, "clients": 3, "out": None, "client": {"epochs": 1}, "model": "mlp(hidden=8)"}
pytestmark = pytest.mark.usefixtures("tmp_cwd")


def command(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


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


class Unused(nn.Sequential):
    """With a layer that nobody calls."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.spare = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            x = layer(x)
        return x


def lazy(num_classes: int, unused: bool = False) -> nn.Module:
    layers = [nn.Flatten(), nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(num_classes)]
    return Unused(*layers) if unused else nn.Sequential(*layers)


def given(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    width = int(torch.tensor(input_shape).prod())
    layers = [nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes)]
    return nn.Sequential(nn.Flatten(), *layers)


REFUSED = {
    "client.batch=99999999999999999999999": 'client.last_batch = "keep"',
    "fnr.batch=2000000000": "fnr.batch = 2000000000 is more than 5 passes",
    "model=mlp(norm=batch) fnr.batch=1": "a refined client has such a batch",
    "algorithm=fedadagrad algorithm.tau=1e30": "(algorithm.tau = 1e+30)",
    "model=test_limits:lazy(unused=true)": "does not reach the lazy layer of spare.weight",
    "model=test_limits:Raising engine=loop": 'model = "test_limits:Raising" cannot be called with examples of shape',
    "model=test_limits:Raising(when=training) engine=loop": "round 1, stage local: KeyError: 'mine'",
    "model=test_limits:Raising(when=scoring) engine=loop": "scored after round 1: KeyError: 'mine' (test",
    "algorithm=test_limits:Broken": 'algorithm = "test_limits:Broken" failed in round 1: IndexError: out of',
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_at_once(words: str) -> None:
    began = time.process_time()  # what others do meanwhile does not count
    got = command("run", *SHORT, *words.split())
    assert got.exit_code in (2, 3), got.output
    assert REFUSED[words] in got.stderr and "please report" not in got.stderr
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "words", ["client.last_batch=keep client.batch=1" + 22 * "0", "model=cnn(norm=batch) client.batch=1"]
)
def test_what_can_be_done_is(words: str) -> None:
    """A batch of all, and BatchNorm over the pixels of one image."""
    got = command("run", "rounds=1", "clients=30", "participation=0.1", "client.epochs=1", *words.split())
    assert got.exit_code == 0


class Tokens(nn.Module):
    """Takes whole numbers."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4 * input_shape[0], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(x).flatten(1))
        return logits


def test_a_single_token_sequence_is_a_batch() -> None:
    draw = generator(0, "tokens")
    x, y = torch.randint(9, (66, 5), generator=draw), torch.randint(2, (66,), generator=draw)
    keys: dict[str, Any] = {"clients": 2, "scenario": "iid", "rounds": 1, "client": {"batch": 1, "epochs": 1}}
    assert fnrfl.run(dataset=(x, y, x, y), model=Tokens, out=None, **keys).rounds


@pytest.mark.parametrize("algorithm", ["fedavg", "moon"])
def test_lazy_layers_are_the_layers_that_they_become(algorithm: str) -> None:
    models = [{"model": f"test_limits:{name}", "algorithm": algorithm, "rounds": 1} for name in ("lazy", "given")]
    found, wanted = (fnrfl.run("digits", **KEYS | model) for model in models)
    assert found.model_sha256 == wanted.model_sha256


# -- forecasts ---------------------------------------------------------------------------------------------------------


def test_a_forecast_takes_no_longer_for_more_rounds() -> None:
    small = ["model=mlp(hidden=8)", "client.epochs=1"]
    few, many = (plan.forecast(load(None, [f"rounds={n}", *small])).summary() for n in (1000, 999999999999))
    assert many["steps"] * 1000 == few["steps"] * 999999999999
    assert many["bytes_up"] - few["bytes_up"] == many["bytes_up_per_round"] * (999999999999 - 1000)


def test_a_forecast_of_many_cohorts_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, ["rounds=50", "participation=0.3"])
    exact = plan.forecast(config).steps["local"]
    monkeypatch.setattr(plan, "COUNTED", 20)
    assert plan.forecast(config).steps["local"] == pytest.approx(exact, rel=0.1)


# -- files of another shape --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "name"), [("server", "params"), ("client-0", "c")])
def test_a_checkpoint_of_another_shape_is_refused(file: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(event: object) -> None:
        raise KeyboardInterrupt

    def shorter(path: Path, sha256: str | None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = read(path, sha256)
        return found | {name: found[name][:-1]} if path.stem == file else found

    with pytest.raises(KeyboardInterrupt):
        runs.run(load(None, ["rounds=3", "clients=2", "algorithm=scaffold"]), out="run", progress=stop)
    read: Any = runs.checkpoint.read_tensors
    monkeypatch.setattr(runs.checkpoint, "read_tensors", shorter)
    with pytest.raises(FnrflError, match=f"has {name} of .* with shape .* belongs to another run"):
        runs.resume("run")


def test_weights_of_another_shape_are_refused() -> None:
    """In a run of version 0.1.0, which has no hashes."""
    runs.run(load(None, SHORT), out="run")
    index = json.loads(Path("run/checkpoint.json").read_text())
    old = {"format": 2, "round": index["round"], "config": index["config"], "server": index["server"]["file"]}
    Path("run/checkpoint.json").write_text(json.dumps(old | {"clients": {}}))
    weights = load_file("run/model.safetensors")
    first = next(iter(weights))
    save_file(weights | {first: weights[first][..., :-1].clone()}, "run/model.safetensors")
    with pytest.raises(CompatibilityError, match=f"{first} of shape .* belong to another model"):
        runs.load("run").model  # noqa: B018


# -- numbers that are not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fnr", ["off", {"epochs": 1}])
@pytest.mark.parametrize("algorithm", ["fedavgm", "scaffold"])
def test_a_server_that_goes_too_far_is_named(algorithm: str, fnr: Any) -> None:
    with pytest.raises(
        FnrflError, match="server's model .* round 1.* Lower algorithm.server_lr or client.lr"
    ) as caught:
        fnrfl.run("digits", algorithm={"name": algorithm, "server_lr": 1e39}, fnr=fnr, **KEYS)
    assert not isinstance(caught.value, ClientError)


def test_memory_of_the_server_counts_and_a_mask_does_not() -> None:
    fine, bad = torch.zeros(2), torch.tensor([0.0, torch.inf])
    method, masked = load_method("fedavg")(), State(fine, {"mask": bad, "count": torch.tensor([1])})
    check_state(masked, masked, method, 0)
    with pytest.raises(FnrflError, match="memory is no longer finite after round 5.*Lower client.lr"):
        check_state(State(fine, {}, {"c": bad}), State(fine, {}), method, 4)
    with pytest.raises(FnrflError, match="model is no longer finite"):
        check_state(State(fine, {"var": bad}), State(fine, {"var": fine}), method, 4)


def test_scores_that_are_not_finite_end_a_run() -> None:
    words = ["algorithm=fedavgm", "algorithm.server_lr=1e30", "-o", "run", "--json"]
    got = command("run", *SHORT, *words)
    assert got.exit_code == 3 and "client 0" not in got.stderr
    assert "loss after round 1 is not finite" in got.stderr and "Lower algorithm.server_lr" in got.stderr
    assert "NaN" not in got.stdout + Path("run/events.jsonl").read_text()
    with pytest.raises(FnrflError, match="The loss after round 3 is not finite"):
        check_scores({"accuracy": 0.5, "loss": float("inf"), "validation_accuracy": None}, load_method("fedavg")(), 2)


def test_the_log_takes_no_bare_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        events.append_event(Path("events.jsonl"), {"loss": float("nan")})
    found = for_json({"a": [float("nan"), 1.0, {"b": (float("inf"),)}], "c": "nan"})
    assert found == {"a": [None, 1.0, {"b": [None]}], "c": "nan"}


# -- a client that is left alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{"clients": 1}, {"clients": 3, "client": {"dropout": 0.95}}])
def test_nobody_to_take_targets_from_is_refused(keys: dict[str, Any]) -> None:
    fnr = {"share": 1.0, "target": "all"}
    with pytest.raises(CompatibilityError, match=r"refines 1 of the 1 that answer.*there are none\. Set a smaller"):
        fnrfl.run("digits", **KEYS | keys, fnr=fnr)
    control = fnr | {"weight": 0.0, "epochs": 1}  # needs no targets
    assert fnrfl.run("digits", **KEYS | {"rounds": 1} | keys, fnr=control).rounds[0]["refined"]


def test_who_is_left_alone_in_a_round_is_refined_without_the_penalty() -> None:
    """cFedFN refines cluster by cluster, and one of these has a single client."""
    for target in ("all", "others"):
        assert norm_targets(torch.tensor([[2.0, 3.0]]), torch.tensor([0]), target).tolist() == [[0.0, 0.0]]
    fnr = {"share": 1.0, "target": "all", "epochs": 1, "weight": 100.0}
    result = fnrfl.run("digits", algorithm={"name": "cfedfn", "clusters": 3}, fnr=fnr, **KEYS)
    first, second = result.rounds
    assert "refined_without_target" not in first
    assert second["refined_without_target"] == second["refined"] == [0, 1, 2]
    assert json.loads(json.dumps(result.rounds, allow_nan=False))
