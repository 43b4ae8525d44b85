"""Class weights: the weighted mean that torch takes, on every engine and under every method; none is as before."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import fnrfl
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.moon import Moon
from fnrfl.algorithms.scaffold import Scaffold
from fnrfl.config import loads
from fnrfl.core.algorithm import CLASS_WEIGHTS, Algorithm, Objective
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.rng import generator
from fnrfl.core.types import SERVER, Batch, Out
from toys import NUM_CLASSES, Plain, Run, classification, run

WORLD = classification(module=Plain)
METHODS: tuple[Algorithm, ...] = (FedAvg(), Scaffold(), Moon(), FNR(FedAvg(), when="both"), FNR(Scaffold()))
GIVEN = "1, 2, 0.5, 3"
SLOW = pytest.mark.slow


@lru_cache
def trained(method: Algorithm, engine: str, weights: str, rounds: int = 2) -> Tensor:
    training = replace(WORLD.training, class_weights=weights)
    return run(method, engine, rounds, training=training)[0].params


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.lists(st.floats(0.01, 100), min_size=4, max_size=4))
def test_the_loss_is_torchs_weighted_mean(labels: list[int], weights: list[float]) -> None:
    y, w = torch.tensor(labels), torch.tensor(weights, dtype=torch.float64)
    logits = torch.randn(len(y), 4, generator=generator(0, "logits"), dtype=torch.float64)
    batch = Batch(logits, y, torch.arange(len(y)))
    loss = Objective().loss(Out(logits, logits, logits), None, logits, batch, {}, {CLASS_WEIGHTS: w})  # type: ignore[arg-type]
    assert torch.allclose(loss, F.cross_entropy(logits, y, weight=w), rtol=1e-12)
    plain = Objective().loss(Out(logits, logits, logits), None, logits, batch, {}, {})  # type: ignore[arg-type]
    assert torch.allclose(plain, F.cross_entropy(logits, y), rtol=1e-12)


@pytest.mark.parametrize("weights", ["balanced", GIVEN])
def test_a_round_is_that_of_a_plain_loop(weights: str) -> None:
    played = Run(FedAvg(), world=WORLD, training=replace(WORLD.training, class_weights=weights))
    start, cohort = played.state, played.cohort(0)
    pool, ends = WORLD.pool, []
    for client in cohort.tolist():
        counts = pool.class_counts(client).double()
        told = counts.sum() / counts.clamp(min=1) if weights == "balanced" else torch.tensor([1, 2, 0.5, 3.0])
        plan = pool.plan(client, "private", WORLD.training, lambda name, c=client: generator(7, 0, c, "local", name))
        params, momentum = start.params.clone(), torch.zeros_like(start.params)
        for places in plan.batches:
            x, y = pool.take("private", places)
            leaf = params.clone().requires_grad_()
            logits = played.net.apply(leaf, start.buffers, x, mode="updating")[0].logits
            F.cross_entropy(logits, y, weight=told.double()).backward()  # type: ignore[no-untyped-call]
            grad = leaf.grad + 1e-3 * params  # type: ignore[operator]
            momentum = 0.9 * momentum + grad
            params = params - 0.05 * momentum
        ends.append(params)
    shares = pool.examples[cohort] / pool.examples[cohort].sum()
    assert torch.allclose(played.round().params, shares @ torch.stack(ends), atol=1e-10)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("weights", ["balanced", GIVEN])
@pytest.mark.parametrize("engine", ["batched", *(pytest.param(f"{e}-fast", marks=SLOW) for e in ("loop", "batched"))])
def test_engines_agree(method: Algorithm, weights: str, engine: str) -> None:
    loop = trained(method, "loop", weights)
    assert torch.allclose(loop, trained(method, engine, weights), atol=1e-9)
    assert not torch.allclose(loop, trained(method, "loop", "none"), atol=1e-4)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_equal_weights_are_none(method: Algorithm) -> None:
    assert torch.allclose(trained(method, "loop", "2, 2, 2, 2"), trained(method, "loop", "none"), atol=1e-10)


def test_only_steps_on_own_data_are_weighted_and_nothing_more_is_sent() -> None:
    weighted: dict[int, set[bool]] = {}
    true = Objective.loss

    def loss(self: Objective, *args: Any) -> Tensor:
        weighted.setdefault(len(args[3].y), set()).add(CLASS_WEIGHTS in args[5])
        return true(self, *args)

    sent = []
    for weights in ("none", "balanced"):
        played = Run(FNR(FedAvg()), training=replace(WORLD.training, class_weights=weights))
        with mock.patch.object(Objective, "loss", loss) if weights == "balanced" else mock.MagicMock():
            played.round()
        sent.append(played.metered.bytes)
    assert weighted == {16: {True}, 32: {False}}  # the batches of [client] and of [fnr]
    assert sent[0] == sent[1]


def test_the_server_counts_everybodys_examples() -> None:
    every = torch.stack([WORLD.pool.class_counts(client) for client in range(6)])  # [clients, classes]
    assert WORLD.pool.class_counts(SERVER).tolist() == every.sum(0).tolist()
    assert every.sum(1).tolist() == WORLD.pool.examples.tolist() and every.shape[1] == NUM_CLASSES


def test_weights_are_read_however_they_are_written() -> None:
    plain = loads("", ["client.class_weights=1,2,0.5"])
    assert plain.client.class_weights == "1.0, 2.0, 0.5"
    for other in ([1, 2, 0.5], (1, 2.0, 0.5), "[1, 2, .5]", np.array([1, 2, 0.5])):
        assert loads("", {"client": {"class_weights": other}}).sha256 == plain.sha256
    assert loads("client.class_weights = [1, 2, 0.5]").sha256 == plain.sha256
    assert loads(plain.to_toml()) == plain
    assert loads("", ["client.class_weights=Balanced"]).client.class_weights == "balanced"
    assert loads("", ["client.class_weights=none"]).sha256 == loads("").sha256


@pytest.mark.parametrize("wrong", ["1, 0", "1, -2", "1, nan", "1, inf", "equal", "1; 2", "[]", "true"])
def test_wrong_weights_are_refused_in_a_sentence(wrong: str) -> None:
    with pytest.raises(ConfigError, match="client.class_weights = .* is not allowed: it must be .*none.*balanced"):
        loads("", [f'client.class_weights="{wrong}"'])


def test_balanced_weights_lift_a_rare_class_and_there_is_one_for_each() -> None:
    draw = np.random.default_rng(0)
    y = (draw.random(1200) < 0.08).astype(int)
    x = draw.normal(size=(1200, 4)).astype(np.float32) + 0.9 * y[:, None]
    keys: dict[str, Any] = {"rounds": 4, "clients": 3, "scenario": "iid", "out": None, "dataset": (x.astype("f4"), y)}
    plain, balanced = (fnrfl.run(**keys, client={"class_weights": weights}) for weights in ("none", "balanced"))
    assert balanced.per_class[1] > plain.per_class[1] + 0.2
    with pytest.raises(CompatibilityError, match="has 3 numbers and dataset = .* has 2 classes"):
        fnrfl.run(**keys, client={"class_weights": [1, 2, 3]})
