"""Sequences: a small transformer on tokens and a 1-D convolutional net on time series, the same on every engine.

What the conformance suite asks of every method is asked of these models: float64, ragged clients, four of six active,
three rounds, bare and under FNR. The reference is the plain loop: nothing recorded, one thread.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fnrfl
from fnrfl.config import registry
from fnrfl.core.errors import CompatibilityError

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


@pytest.mark.parametrize(
    ("fnr", "engine"),
    [
        pytest.param(
            fnr, engine, id=f"{fnr}-{name}", marks=[pytest.mark.slow] if fnr == "off" and name != "batched" else []
        )
        for fnr in ("off", "on")
        for name, engine in OTHERS.items()
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree_on_sequences(kind: str, fnr: str, engine: dict[str, Any]) -> None:
    plain = reference(kind, fnr)
    assert_agree(plain, play(kind, engine, fnr))
    assert bool(plain.rounds[-1].get("refined")) == (fnr == "on")


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_learned_under_fnr(kind: str) -> None:
    training = {"epochs": 3, "lr": 0.1, "batch": 32}
    assert play(kind, OTHERS["batched"], "on", rounds=4, client=training).accuracy > 0.6  # a third is chance


@pytest.mark.slow
@pytest.mark.parametrize("fnr", ["off", "on"])
@pytest.mark.parametrize("kind", MORE)
def test_engines_agree_on_other_sequence_models(kind: str, fnr: str) -> None:
    assert_agree(reference(kind, fnr), play(kind, OTHERS["batched, two threads"], fnr))


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
