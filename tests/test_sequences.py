"""Sequences: a small transformer on tokens and a 1-D convolutional net on time series, the same on every engine.

What the conformance suite asks of every method is asked of these models: float64, ragged clients, four of six active,
three rounds, bare and under FNR. The reference is the plain loop: nothing recorded, one thread. Whole numbers that are
no pixels keep their type where the model takes them, as tokens, and only there.
"""

from __future__ import annotations

import json
from functools import lru_cache
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

TOKENS, LENGTH, CHANNELS, CLASSES = 20, 12, 2, 3
PADDING = 0


class Transformer(nn.Module):
    """Tokens and their places -> two encoder layers -> the mean over what is no padding -> Linear."""

    def __init__(self, num_classes: int, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, 8, padding_idx=PADDING), nn.Embedding(LENGTH, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        x = self.encoder(x, src_key_padding_mask=tokens == PADDING)
        kept = (tokens != PADDING)[:, :, None]
        logits: Tensor = self.head((x * kept).sum(1) / kept.sum(1).clamp(min=1))
        return logits


class Causal(Transformer):
    """The same, where no place sees a later one; its output at padding is used as well."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
        logits: Tensor = self.head(self.encoder(x, mask=later).mean(1))
        return logits


class Convolutional(nn.Module):
    """Conv1d, BatchNorm1d and Dropout on [channels, length]."""

    def __init__(self, input_shape: tuple[int, int], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(input_shape[0], 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Dropout(0.1),
            nn.Conv1d(8, 8, 5, padding="same", dilation=2), nn.BatchNorm1d(8), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
        )  # fmt: skip
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).flatten(1))
        return logits


class Recurrent(nn.Module):
    """An LSTM, read at its last step."""

    def __init__(self, input_shape: tuple[int, int], num_classes: int, *, layers: int = 1, dropout: float = 0.0):
        super().__init__()
        self.lstm = nn.LSTM(input_shape[0], 8, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x.transpose(1, 2))[0][:, -1])
        return logits


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Texts of unequal length, padded behind; one has no token at all."""
    dice = np.random.default_rng(0)
    y = dice.integers(CLASSES, size=300)
    common = dice.integers(6, size=(300, LENGTH)) * CLASSES + y[:, None] + 1
    x = np.where(dice.random((300, LENGTH)) < 0.6, common, dice.integers(1, TOKENS, size=(300, LENGTH)))
    x[np.arange(LENGTH) >= dice.integers(4, LENGTH + 1, size=300)[:, None]] = PADDING
    return x, y


def series() -> tuple[np.ndarray, np.ndarray]:
    """Waves, [n, channels, length], whose frequency is the class."""
    dice = np.random.default_rng(1)
    y = dice.integers(CLASSES, size=300)
    time = np.linspace(0, 2 * np.pi, 32) * (1 + 2 * y)[:, None, None] + dice.uniform(0, 6, size=(300, 1, 1))
    waves = np.concatenate([np.sin(time), np.cos(time)], 1)
    return (waves + 0.3 * dice.normal(size=waves.shape)).astype(np.float32), y


KINDS = {"transformer": ("texts", "Transformer"), "convolutional": ("series", "Convolutional")}
MORE = {"causal": ("texts", "Causal"), "recurrent": ("series", "Recurrent")}
PLAIN = {"name": "loop", "threads": 1, "accelerate": False}
OTHERS = {
    "batched": {"name": "batched", "threads": 1, "accelerate": False},
    "batched, two threads": {"name": "batched", "threads": 2},
    "loop, two threads": {"name": "loop", "threads": 2},
}


def play(kind: str, engine: dict[str, Any], fnr: str, algorithm: str = "fedavg", **more: Any) -> Any:
    data, model = (KINDS | MORE)[kind]
    keys: dict[str, Any] = {
        "dataset": f"test_sequences:{data}", "model": f"test_sequences:{model}", "algorithm": algorithm,
        "clients": 6, "participation": 0.67, "scenario": "label-dirichlet(1) + quantity-dirichlet(5)", "rounds": 3,
        "client": {"epochs": 1, "lr": 0.1, "batch": 16}, "fnr": "off" if fnr == "off" else {"epochs": 2},
        "engine": engine | {"precision": "float64"},
    }  # fmt: skip
    return fnrfl.run("digits", out=None, **keys | more)


@lru_cache(maxsize=8)
def reference(kind: str, fnr: str, algorithm: str = "fedavg") -> Any:
    return play(kind, PLAIN, fnr, algorithm)


def assert_agree(one: Any, other: Any) -> None:
    assert one.weights.keys() == other.weights.keys()
    for name, value in one.weights.items():
        torch.testing.assert_close(other.weights[name], value, atol=1e-9, rtol=0)
    assert [round["accuracy"] for round in one.rounds] == [round["accuracy"] for round in other.rounds]


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("fnr", ["off", "on"])
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_engines_agree_on_sequences(kind: str, fnr: str, engine: str) -> None:
    plain = reference(kind, fnr)
    assert_agree(plain, play(kind, OTHERS[engine], fnr))
    assert bool(plain.rounds[-1].get("refined")) == (fnr == "on")


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_learned_under_fnr(kind: str) -> None:
    training = {"epochs": 3, "lr": 0.1, "batch": 32}
    assert play(kind, OTHERS["batched"], "on", rounds=4, client=training).accuracy > 0.6  # a third is chance


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [name for name in registry.algorithms() if name != "fedavg"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_method_trains_sequences_the_same_on_both_engines(kind: str, algorithm: str) -> None:
    if kind == "transformer" and algorithm in ("fedftg", "fedbn", "bn-recalibrate"):
        with pytest.raises(CompatibilityError, match="cannot generate the whole numbers|BatchNorm"):
            play(kind, PLAIN, "on", algorithm)
        return
    assert_agree(reference(kind, "on", algorithm), play(kind, OTHERS["batched"], "on", algorithm))


def test_the_model_that_comes_out_says_what_was_evaluated() -> None:
    """Padding included: torch's encoder would answer 0 there in eval mode, and something else in train mode."""
    result = reference("transformer", "on")
    tokens = torch.from_numpy(texts()[0])
    tokens[0] = PADDING  # nothing but padding, with which the encoder's own way fails
    encoder = result.model.encoder
    assert type(encoder) is nn.TransformerEncoder
    x = result.model.tokens(tokens)
    hidden = tokens == PADDING
    with torch.no_grad():
        slow = encoder(x, src_key_padding_mask=hidden)
        first = encoder(x[1:2, : (~hidden[1]).sum()])
    torch.testing.assert_close(slow[1:2, : first.shape[1]], first)
    assert slow[1:][hidden[1:]].abs().max() > 0


def test_dropout_inside_an_lstm_is_refused_with_a_way_out() -> None:
    with pytest.raises(
        CompatibilityError, match=r"lstm \(LSTM\) draws random numbers.*set its own dropout to 0 and put nn.Dropout"
    ):
        play("recurrent", PLAIN, "off", model="test_sequences:Recurrent(layers=2, dropout=0.2)")


# -- tokens -----------------------------------------------------------------------------------------------------------

WORDS, WIDTH = 12, 6


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
from test_sequences import Bag as bag
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
    common = dice.integers(WORDS // CLASSES, size=(count, WIDTH)) * CLASSES + y[:, None]
    return np.where(dice.random((count, WIDTH)) < 0.7, common, dice.integers(WORDS, size=(count, WIDTH))), y


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


def test_fractions_and_feature_noise_are_not_for_tokens() -> None:
    with pytest.raises(CompatibilityError, match="adds noise to features.*tokens"):
        build(load("digits", keys(scenario="iid + feature-noise(0.1)")))
    x, y = sentences(60)
    np.savez("words.npz", x=x.astype(np.float32), y=y)
    with pytest.raises(CompatibilityError, match="takes whole numbers .tokens.*has fractions. Store .* as int64"):
        build(load("digits", keys()))


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
    halved = {"model": "my_bags:Halved"}
    assert build(load("digits", keys(**halved, engine={"precision": "float32"}))).net.input_dtype == torch.int64
    # Dividing whole numbers gives float32, which is too short.
    assert build(load("digits", keys(**halved))).net.input_dtype == torch.float64


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
