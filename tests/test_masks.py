"""Dropout inside attention and wherever examples lie: the masks are inputs, and all engines agree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fnrfl
from fnrfl.core import masks
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.masks import Dropout
from fnrfl.core.net import Net
from mutants import mutants

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "batch first": {"batch_first": True}, "bias": {"add_bias_kv": True}, "sizes": {"kdim": 6, "vdim": 10},
    "zero": {"add_zero_attn": True, "bias": False},
}  # fmt: skip


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_attention_is_torchs_until_a_weight_is_dropped(options: dict[str, Any], weights: bool) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, dropout=0.5, **options).double()
    module = nn.ModuleList([copy.deepcopy(plain)])
    masks.put_in(module)
    (mine,) = module
    assert isinstance(mine, masks.Attention)
    first = bool(options.get("batch_first"))
    batch, length, seen = (5, 4, 4) if first else (4, 5, 7)
    query = torch.randn(5, 4, 8, dtype=torch.float64)
    key = torch.randn(5 if first else 7, 4, options.get("kdim", 8), dtype=torch.float64)
    value = torch.randn(*key.shape[:2], options.get("vdim", 8), dtype=torch.float64)
    hidden = torch.zeros(length, seen, dtype=torch.float64)
    hidden[0, 1:] = -torch.inf
    asked: dict[str, Any] = {"need_weights": weights, "attn_mask": hidden}

    def same(found: tuple[Tensor, Tensor | None], wanted: tuple[Tensor, Tensor | None]) -> None:
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)

    same(mine.eval()(query, key, value, **asked), plain.eval()(query, key, value, **asked))
    extra = ("add_bias_kv" in options) + ("add_zero_attn" in options)
    mine.train().uniform = torch.ones(batch, 2, length, seen + extra, dtype=torch.float64)
    twice = mine(query, key, value, **asked)[0]  # everything is kept, and scaled by 1 / (1 - 0.5)
    plain.train().dropout = 0.0
    bias = 0.0 if plain.out_proj.bias is None else plain.out_proj.bias
    torch.testing.assert_close(twice - bias, 2 * (plain(query, key, value, **asked)[0] - bias), rtol=0, atol=1e-12)
    mine.uniform = mine.uniform * 0
    assert (mine(query, key, value, **asked)[0] - bias).abs().max() == 0


class Small(nn.Module):
    """A transformer on the rows of an image."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, batch_first: bool = True) -> None:
        super().__init__()
        self.first = batch_first
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embed = nn.Linear(input_shape[-1], 8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x.flatten(1, -2))
        return self.head(self.encoder(x if self.first else x.transpose(0, 1)).mean(1 if self.first else 0))


def weights(engine: str, first: bool, algorithm: str = "fedavg", **keys: Any) -> Tensor:
    options: dict[str, Any] = {"rounds": 2, "clients": 4, "client": {"epochs": 1, "batch": 64}}
    options |= {"fnr": {"epochs": 1, "batch": 128}, "engine": {"name": engine, "precision": "float64"}}
    model = f"test_masks:Small(batch_first={str(first).lower()})"
    result = fnrfl.run("digits", out=None, model=model, algorithm=algorithm, **options | keys)
    return torch.cat([result.weights[k].flatten() for k in sorted(result.weights)])


@pytest.mark.parametrize("first", [True, False], ids=["batch first", "length first"])
def test_a_transformer_with_dropout_is_the_same_on_both_engines(first: bool) -> None:
    loop = weights("loop", first)
    torch.testing.assert_close(weights("batched", first), loop, rtol=0, atol=1e-9)
    assert not torch.equal(weights("loop", first, seed=1), loop)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["moon", "fedgen", "feddf"])
def test_methods_train_a_transformer(algorithm: str) -> None:
    keys: dict[str, Any] = {"rounds": 1, "client": {"epochs": 1, "batch": 128}}
    loop = weights("loop", True, algorithm, **keys)
    torch.testing.assert_close(weights("batched", True, algorithm, **keys), loop, rtol=0, atol=1e-9)


def test_the_model_that_comes_out_is_torchs_own() -> None:
    result = fnrfl.run("digits", out=None, rounds=1, clients=2, model="test_masks:Small", client={"epochs": 1})
    kinds = {type(layer) for layer in result.model.modules()}
    assert {nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.Dropout} <= kinds
    assert not {masks.Attention, masks.EncoderLayer, masks.Dropout} & kinds
    assert not any("uniform" in name for name in result.model.state_dict())
    x = torch.rand(3, *result.input_shape)
    assert result.model(x).shape == (3, 10)
    assert not torch.equal(result.model.train()(x), result.model(x))  # it draws again


class Folded(nn.Module):
    """Dropout where every example has several rows, and on an axis that is not in front."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last, self.head = nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        rows = self.rows(x.reshape(-1, 4)).view(len(x), 3, 4)
        return self.head(self.last(rows.movedim(0, -1)).movedim(-1, 0).mean(1))


def test_masks_follow_the_examples() -> None:
    net, x = Net(Folded(), torch.rand(2, 12)), torch.rand(5, 12)
    assert net.drop_shapes == {"rows.uniform": (3, 4), "last.uniform": (1, 3, 4)}
    drawn = {k: torch.rand(5, *shape) for k, shape in net.drop_shapes.items()}

    def logits(some: slice) -> Tensor:
        masks = {k: v[some] for k, v in drawn.items()}
        return net.apply(*net.flatten(), x[some], mode="updating", masks=masks)[0].logits

    torch.testing.assert_close(logits(slice(5)), torch.cat([logits(slice(i, i + 1)) for i in range(5)]))


@pytest.mark.parametrize(("p", "kept"), [(0.2, [0, 0, 5, 5, 5]), (0.0, [4] * 5), (1.0, [0] * 5)])
def test_kept_numbers_are_scaled_so_that_the_mean_stays(p: float, kept: list[float]) -> None:
    layer, x = masks.Dropout(p).train(), torch.full((5,), 4.0)
    layer.uniform = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.99])
    torch.testing.assert_close(layer(x), torch.tensor(kept).float())
    assert torch.equal(layer.eval()(x), x)


class Twisted(nn.Module):
    """Dropout on something in which examples cannot be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.drop(x @ x.mT) @ x)


def test_what_mixes_examples_is_refused() -> None:
    with pytest.raises(CompatibilityError, match=r"drop sees \(2, 2\) for two examples and \(3, 3\) for three"):
        Net(Twisted(), torch.rand(2, 4))


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        Dropout.forward,
        dropout_not_scaled=("1 / (1 - self.p)", "1.0"),
    ),
]
