"""Whole numbers that are no pixels keep their type where the model takes them, as tokens, and only there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fnrfl
from fnrfl.config import load, registry
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.data.datasets import object_source
from fnrfl.runs.predict import evaluate, predict
from fnrfl.runs.setup.build import build

WORDS, LENGTH, CLASSES = 12, 6, 3


class Bag(nn.Module):
    """Embedding -> mean -> dropout -> Linear."""

    def __init__(self, num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, num_classes)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.drop(self.embed(tokens).mean(1)))
        return logits


MODULE = """
from test_tokens import Bag as bag
from torch import nn

class Halved(nn.Module):  # takes whole numbers and fractions alike
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(6, num_classes)
    def forward(self, x):
        return self.head(x / 2)
"""


def sentences(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sentences of a class prefer the words that leave its number when divided by the number of classes."""
    dice = np.random.default_rng(seed)
    y = dice.integers(CLASSES, size=count)
    common = dice.integers(WORDS // CLASSES, size=(count, LENGTH)) * CLASSES + y[:, None]
    return np.where(dice.random((count, LENGTH)) < 0.7, common, dice.integers(WORDS, size=(count, LENGTH))), y


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    Path("my_bags.py").write_text(MODULE)
    x, y = sentences(240)
    np.savez("words.npz", x=x.astype(np.int32), y=y)


def keys(**more: Any) -> dict[str, Any]:
    base = {"dataset": "words.npz", "model": "my_bags:bag", "clients": 3, "rounds": 3, "scenario": "label-dirichlet(1)"}
    return base | {"client": {"epochs": 2, "lr": 0.5, "batch": 16}, "engine": {"precision": "float64"}} | more


@pytest.mark.parametrize("model", ["my_bags:bag", "my_bags:bag(dropout=0.5)"])
@pytest.mark.parametrize("fnr", ["off", "on"])
def test_engines_agree_on_tokens(fnr: str, model: str) -> None:
    got = [
        fnrfl.run("digits", out=None, fnr=fnr, **keys(model=model, engine={"name": name, "precision": "float64"}))
        for name in ("loop", "batched")
    ]
    assert got[0].accuracy > 0.6
    for name, value in got[0].weights.items():
        torch.testing.assert_close(got[1].weights[name], value, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "algorithm", [name for name in registry.algorithms() if name not in ("fedbn", "bn-recalibrate")]
)
def test_every_method_takes_tokens_or_says_that_it_does_not(algorithm: str) -> None:
    if algorithm == "fedftg":
        with pytest.raises(CompatibilityError, match="cannot generate the whole numbers"):
            fnrfl.run("digits", out=None, algorithm=algorithm, **keys(rounds=1))
        return
    result = fnrfl.run("digits", out=None, algorithm=algorithm, **keys(rounds=1))
    assert 0 <= result.accuracy <= 1


def test_a_run_on_tokens_can_be_used() -> None:
    result = fnrfl.run("digits", out="run", **keys(engine={"precision": "float32"}))
    header = json.loads(Path("run/events.jsonl").read_text().splitlines()[0])
    assert header["data"]["tokens"] is True
    assert evaluate("run", "words.npz").score.accuracy == result.accuracy
    x, y = sentences(30, 1)
    np.savez("new.npz", x=x)
    with torch.no_grad():
        said = result.model(torch.from_numpy(x)).argmax(1)
    assert predict("run", "new.npz").labels == [str(label) for label in said.tolist()]
    assert fnrfl.load("run").model_sha256 == result.model_sha256
    np.savez("new.npz", x=x + 0.5)
    with pytest.raises(CompatibilityError, match=r"new.npz holds float64.*tokens"):
        predict("run", "new.npz")
    np.savez("new.npz", x=x + WORDS)
    with pytest.raises(CompatibilityError, match=f"whole numbers from {WORDS} to .*Embedding"):
        predict("run", "new.npz")


@pytest.mark.parametrize("place", ["train", "test"])
def test_a_token_out_of_range_is_said_before_training(place: str) -> None:
    x, y = sentences(60)
    parts = {"x_train": x.copy(), "y_train": y, "x_test": x.copy(), "y_test": y}
    parts[f"x_{place}"][7, 2] = WORDS
    np.savez("words.npz", **parts)
    with pytest.raises(CompatibilityError, match=f"words.npz.*from 0 to {WORDS}.*as many rows as there are tokens"):
        build(load("digits", keys()))


def test_fractions_for_a_model_of_tokens_are_refused_in_a_sentence() -> None:
    x, y = sentences(60)
    np.savez("words.npz", x=x.astype(np.float32), y=y)
    with pytest.raises(
        CompatibilityError, match="takes whole numbers .tokens.*has fractions. Store the examples as int64"
    ):
        build(load("digits", keys()))


def test_feature_noise_is_not_for_tokens() -> None:
    with pytest.raises(CompatibilityError, match="adds noise to features.*tokens"):
        build(load("digits", keys(scenario="iid + feature-noise(0.1)")))


def test_integers_are_numbers_to_a_model_that_cannot_take_them() -> None:
    """The same as the same numbers stored as fractions."""
    x, y = sentences(240)
    np.savez("floats.npz", x=x.astype(np.float32), y=y)
    got = [
        fnrfl.run("digits", out=None, **keys(model="mlp", engine="loop", dataset=name))
        for name in ("words.npz", "floats.npz")
    ]
    assert got[0].model_sha256 == got[1].model_sha256
    assert got[0].data.tokens is False and got[0].rounds[-1]["accuracy"] == got[1].rounds[-1]["accuracy"]
    noisy = keys(model="mlp", scenario="iid + feature-noise(0.1)", rounds=1)
    assert fnrfl.run("digits", out=None, **noisy).accuracy >= 0


def test_a_model_may_take_both() -> None:
    built = build(load("digits", keys(model="my_bags:Halved", engine={"precision": "float32"})))
    assert built.net.input_dtype == torch.int64
    wide = build(
        load("digits", keys(model="my_bags:Halved"))
    )  # dividing whole numbers gives float32, which is too short
    assert wide.net.input_dtype == torch.float64


def test_public_data_of_tokens() -> None:
    x, y = sentences(60, 5)
    np.savez("public.npz", x=x, y=y)
    source = {"source": "public.npz"}
    assert fnrfl.run("digits", out=None, fnr="on", **keys(public=source, rounds=1)).accuracy > 0
    np.savez("public.npz", x=x + 0.5, y=y)
    with pytest.raises(CompatibilityError, match=r'public.source = "public.npz" holds float64.*tokens'):
        build(load("digits", keys(public=source)))
    assert build(load("digits", keys(public=source, model="mlp"))).splits.public.x.dtype == torch.float64
    known = np.load("words.npz")["x"][:60]
    np.savez("public.npz", x=known.astype(np.float32), y=y)
    with pytest.raises(CompatibilityError, match="must be disjoint"):
        build(load("digits", keys(public=source, model="mlp")))


def test_whole_numbers_beside_fractions_become_fractions() -> None:
    x, y = sentences(60)
    assert object_source((x, y, x.astype(np.float32), y), "a").dataset().train.x.dtype == torch.float32
    with pytest.raises(ConfigError, match="must be alike"):
        object_source((x, y, x.astype(np.uint8)[:, :, None], y), "a").dataset()


def test_a_loop_of_ones_own_takes_tokens() -> None:
    x, y = (torch.from_numpy(values) for values in sentences(60))
    model = Bag(CLASSES)
    loader = [(x[:30], y[:30]), (x[30:], y[30:])]
    norms = fnrfl.class_norms(model, loader)
    before = nn.functional.cross_entropy(model(x), y)
    fnrfl.refine(model, loader, norms, epochs=3, lr=0.5)
    assert nn.functional.cross_entropy(model(x), y) < before
