"""The controls: what public data, BatchNorm statistics or pooled data do without the method under test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fnrfl
from fnrfl.algorithms.bn_recalibrate import BnRecalibrate, recalibrated
from fnrfl.algorithms.centralised import Centralised
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.public_finetune import PublicFinetune
from fnrfl.algorithms.public_only import PublicOnly
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.net import Net
from fnrfl.core.types import State, Training
from fnrfl.data.batches import Pool
from mutants import mutants
from toys import (
    NUM_CLASSES,
    NUM_FEATURES,
    Plain,
    Run,
    World,
    assert_near,
    assert_same,
    bowls,
    classification,
    distance,
    optimum,
    quadratic,
)

ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])
SERVER_ONLY = pytest.mark.parametrize("method", [PublicOnly(), Centralised()], ids=lambda m: type(m).__name__)
SIZES = (10, 25, 70, 200)
WHOLE = Training(lr=0.1, momentum=0.9, weight_decay=1e-2, batch=1000, epochs=3, last_batch="keep")


def with_parts(world: World, **parts: tuple[Tensor, Tensor]) -> World:
    """The same world with other examples in some of its sets."""
    old = {name: world.pool.all(name) for name in ("private", "public", "ranking")}  # type: ignore[arg-type]
    return replace(world, pool=Pool(old | parts, world.pool.shards, NUM_CLASSES, dtype=torch.float64))


def torch_training(net: Net, state: State, x: Tensor, y: Tensor, training: Training) -> Tensor:
    """Where full-batch steps of torch's own SGD lead."""
    module = net.export(state.params, state.buffers)
    sgd = torch.optim.SGD(
        module.parameters(), training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    for _ in range(training.epochs):
        sgd.zero_grad()
        F.cross_entropy(module(x), y).backward()
        sgd.step()
    return net.pack({k: v.detach() for k, v in [*module.named_parameters(), *module.named_buffers()]})[0]


# -- public-finetune --------------------------------------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize("under_fnr", [False, True])
def test_finetuning_for_no_epoch_is_fedavg(engine: str, under_fnr: bool) -> None:
    inner: list[Algorithm] = [PublicFinetune(epochs=0), FedAvg()]
    mine, bare = (Run(FNR(a) if under_fnr else a, engine).rounds(3) for a in inner)
    assert_same(mine, bare)


@ENGINES
@pytest.mark.parametrize("lr", ["client", 0.03])
def test_finetuning_is_torchs_own_loop_from_the_average(engine: str, lr: Any) -> None:
    world = classification(module=Plain)
    mine = Run(PublicFinetune(epochs=4, batch=1000, lr=lr), engine, world=world, training=WHOLE)
    bare = Run(FedAvg(), engine, world=world, training=WHOLE)
    for _ in range(2):
        bare.state, bare.t = mine.state, mine.t
        average = bare.round()
        rate = WHOLE.lr if lr == "client" else lr
        want = torch_training(mine.net, average, *world.pool.all("public"), replace(WHOLE, epochs=4, lr=rate))
        assert distance(mine.round().params, want) < 1e-10
        assert distance(want, average.params) > 1e-3


@pytest.mark.parametrize("batchnorm", ["frozen", "batch", "updating"])
def test_finetuning_leaves_statistics_alone_unless_told(batchnorm: Any) -> None:
    mine, bare = Run(PublicFinetune(batchnorm=batchnorm)), Run(FedAvg())
    mine.round()
    bare.round()
    same = all(torch.equal(mine.state.buffers[k], v) for k, v in bare.state.buffers.items())
    assert same == (batchnorm != "updating")
    assert distance(mine.state.params, bare.state.params) > 1e-3


def test_finetuning_costs_no_traffic() -> None:
    mine, bare = Run(PublicFinetune()), Run(FedAvg())
    mine.round()
    bare.round()
    assert mine.metered.bytes == bare.metered.bytes


def test_finetuning_follows_its_options() -> None:
    """An optimiser, a rate and a batch of its own, and a rate that decays where the clients' does."""
    ends = [
        Run(PublicFinetune(**options), lr_decay=decay).rounds(2).params  # type: ignore[arg-type]
        for options, decay in (
            ({}, 1.0), ({"optimizer": "adam", "lr": 0.01}, 1.0), ({"lr": 0.01}, 1.0), ({"batch": 8}, 1.0), ({}, 0.5),
        )
    ]  # fmt: skip
    assert all(distance(a, b) > 1e-5 for i, a in enumerate(ends) for b in ends[:i])


# -- bn-recalibrate ---------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Two BatchNorm layers with dropout between: the second one's statistics depend on what comes through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.second, self.two = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.one(self.first(x)).relu())
        answer: Tensor = self.head(self.two(self.second(hidden)).relu())
        return answer


def statistics(net: Net, params: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Mean and unbiased variance of what enters each BatchNorm layer, by hand; dropout is off."""
    w = net.unflatten(params)
    enters = x @ w["first.weight"].T + w["first.bias"]
    found = {"one.running_mean": enters.mean(0), "one.running_var": enters.var(0)}
    normed = (enters - enters.mean(0)) / (enters.var(0, unbiased=False) + 1e-5).sqrt()
    hidden = (normed * w["one.weight"] + w["one.bias"]).relu()
    enters = hidden @ w["second.weight"].T + w["second.bias"]
    return found | {"two.running_mean": enters.mean(0), "two.running_var": enters.var(0)}


@ENGINES
def test_recalibrated_statistics_are_those_of_the_public_data(engine: str) -> None:
    """Whatever the clients' were: nothing is left of them. Counters are the average's."""
    played = Run(BnRecalibrate(batch=1000), engine, world=classification(module=Deep))
    bare = Run(FedAvg(), engine, world=classification(module=Deep))
    x, _ = played.world.pool.all("public")
    for _ in range(2):
        played.round()
        bare.round()
        for name, want in statistics(played.net, played.state.params, x).items():
            assert distance(played.state.buffers[name], want) < 1e-12, name
            assert distance(bare.state.buffers[name], want) > 1e-2, name
    assert torch.equal(played.state.buffers["one.num_batches_tracked"], bare.state.buffers["one.num_batches_tracked"])


def test_recalibration_averages_over_batches() -> None:
    """55 examples in batches of at least 20: 28 and 27, which count alike."""
    played = Run(BnRecalibrate(batch=20), world=classification(module=Deep))
    played.round()
    x, _ = played.world.pool.all("public")
    parts = [statistics(played.net, played.state.params, part) for part in (x[:28], x[28:])]
    for name in parts[0]:
        assert distance(played.state.buffers[name], (parts[0][name] + parts[1][name]) / 2) < 1e-12


def test_moving_statistics_go_on_from_the_clients() -> None:
    """Two batches at momentum 0.1: 0.81 of the average's, 0.09 and 0.1 of the public ones."""
    world = classification(module=Deep)
    played, bare = Run(BnRecalibrate("moving", 20), world=world), Run(FedAvg(), world=world)
    played.round()
    bare.round()
    x, _ = world.pool.all("public")
    first, second = (statistics(played.net, played.state.params, part) for part in (x[:28], x[28:]))
    for name in first:
        want = 0.81 * bare.state.buffers[name] + 0.09 * first[name] + 0.1 * second[name]
        assert distance(played.state.buffers[name], want) < 1e-12


@ENGINES
def test_recalibration_touches_no_parameter(engine: str) -> None:
    """Clients train on their batches' statistics, so even later rounds have FedAvg's parameters, bit for bit."""
    mine, bare = Run(BnRecalibrate(), engine), Run(FedAvg(), engine)
    for _ in range(4):
        assert torch.equal(mine.round().params, bare.round().params)
        assert distance(mine.state.buffers["norm.running_var"], bare.state.buffers["norm.running_var"]) > 1e-3
        assert mine.metered.bytes == bare.metered.bytes


def test_recalibration_sees_no_label() -> None:
    world = classification()
    x, y = world.pool.all("public")
    other = with_parts(world, public=(x, (y + 1) % NUM_CLASSES))
    assert_same(Run(BnRecalibrate(), world=world).rounds(2), Run(BnRecalibrate(), world=other).rounds(2))


def test_recalibration_leaves_the_net_and_the_model_as_they_were() -> None:
    played = Run(FedAvg(), world=classification(module=Deep))
    played.round()
    before = {k: v.clone() for k, v in played.state.buffers.items()}
    x, _ = played.world.pool.all("public")
    recalibrated(played.net, played.state, (x,), fresh=True)
    assert all(torch.equal(played.state.buffers[k], v) for k, v in before.items())
    assert played.net.module.one.momentum == 0.1  # type: ignore[union-attr]


# -- public-only ------------------------------------------------------------------------------------------------------


@ENGINES
def test_public_only_is_torchs_own_loop(engine: str) -> None:
    """With a fresh optimiser each round."""
    world = classification(module=Plain)
    played = Run(PublicOnly(epochs=4, batch=1000), engine, world=world, training=WHOLE)
    for _ in range(2):
        want = torch_training(played.net, played.state, *world.pool.all("public"), replace(WHOLE, epochs=4))
        assert distance(played.round().params, want) < 1e-10


def test_public_only_sees_no_private_data() -> None:
    world = classification()
    x, y = world.pool.all("private")
    other = with_parts(world, private=(x.flip(0), (y + 1) % NUM_CLASSES))
    assert_same(Run(PublicOnly(), world=world).rounds(3), Run(PublicOnly(), world=other).rounds(3))


def test_public_only_learns_batchnorm_statistics() -> None:
    played = Run(PublicOnly())
    before = played.state.buffers["norm.running_mean"]
    assert distance(played.rounds(2).buffers["norm.running_mean"], before) > 1e-3


# -- centralised ------------------------------------------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_centralised_is_gradient_descent_on_the_pooled_loss(engine: str, momentum: float) -> None:
    A, b = bowls()
    played = Run(Centralised(), engine, world=quadratic(A, b, SIZES, steps=3, lr=0.1, momentum=momentum))
    p = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    pooled, pull = torch.einsum("n,nij->ij", p, A), p @ b
    for _ in range(2):
        x, v = played.state.params, torch.zeros(3).double()
        for _ in range(3):
            v = momentum * v + pooled @ x - pull
            x = x - 0.1 * v
        assert distance(played.round().params, x) < 1e-12


def test_centralised_finds_the_optimum_where_fedavg_does_not() -> None:
    A, b = bowls()
    world = quadratic(A, b, SIZES, steps=10, lr=0.2)
    best = optimum(A, b, SIZES)
    assert distance(Run(Centralised(), world=world).rounds(20).params, best) < 1e-9
    assert distance(Run(FedAvg(), world=world).rounds(20).params, best) > 0.05


def test_centralised_sees_everybody_once_an_epoch() -> None:
    """All 305 examples, shuffled across clients, in steps of 16: not only the cohort's."""
    world = classification()
    everybody, one = (Run(Centralised(), world=world) for _ in range(2))
    assert_same(everybody.round(torch.arange(6)), one.round(torch.tensor([2])))
    x, y = world.pool.all("private")
    gone = x.clone()
    gone[world.pool.shards[0]] = 0.0
    assert distance(one.state.params, Run(Centralised(), world=with_parts(world, private=(gone, y))).round().params) > 0


# -- both without clients ---------------------------------------------------------------------------------------------


@SERVER_ONLY
@ENGINES
def test_nothing_crosses_and_fnr_has_nothing_to_refine(method: Algorithm, engine: str) -> None:
    bare, refined = Run(method, engine), Run(FNR(method), engine)
    assert_same(bare.rounds(3), refined.rounds(3))
    for run in (bare, refined):
        assert run.metered.bytes == {}
        assert not run.recorder.passed
        assert "refined" not in run.engine.notes
    assert not getattr(method, "trains_clients", True)


@SERVER_ONLY
def test_engines_and_cohorts_agree(method: Algorithm) -> None:
    loop, batched = Run(method, "loop"), Run(method, "batched", active=1)
    assert_near(loop.rounds(4), batched.rounds(4), atol=1e-10)


# -- under FNR, and refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [PublicFinetune(batchnorm="batch"), BnRecalibrate()], ids=lambda m: type(m).__name__)
def test_refined_models_are_averaged_before_the_server_goes_on(method: Algorithm) -> None:
    """The server's work starts where FNR around FedAvg ends; what crosses is the same."""
    mine, bare = Run(FNR(method), training=WHOLE), Run(FNR(FedAvg()), training=WHOLE)
    mine.round()
    average = bare.round()
    assert mine.metered.bytes == bare.metered.bytes
    x, y = mine.world.pool.all("public")
    if isinstance(method, BnRecalibrate):
        assert torch.equal(mine.state.params, average.params)
        assert_near(State(average.params, recalibrated(bare.net, average, (x,), True)), mine.state)
    else:
        assert distance(mine.state.params, average.params) > 1e-3
        assert all(torch.equal(mine.state.buffers[k], v) for k, v in average.buffers.items())


def test_without_batchnorm_there_is_nothing_to_recalibrate() -> None:
    with pytest.raises(CompatibilityError, match="bn-recalibrate .* BatchNorm"):
        fnrfl.run("digits", out=None, rounds=1, algorithm="bn-recalibrate", model="mlp")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("public-finetune", "epochs", -1), ("public-finetune", "lr", 0.0), ("public-finetune", "batchnorm", "off"),
     ("public-only", "batch", 0), ("public-only", "optimizer", "lion"),
     ("bn-recalibrate", "batch", 1), ("bn-recalibrate", "statistics", "old")],
)  # fmt: skip
def test_options_out_of_range_are_refused(name: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}"):
        fnrfl.run("digits", out=None, rounds=1, algorithm={"name": name, key: value})


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        PublicFinetune.round,
        tunes_the_old_model=(
            "LocalTask(Objective(), 'finetune', average, data='public', training=training)",
            "LocalTask(Objective(), 'finetune', state, data='public', training=training)",
        ),
        tunes_on_ranking_data=("data='public'", "data='ranking'"),
        own_rate_ignored=("lr=self.lr", ""),
        own_optimiser_ignored=("optimizer=self.optimizer", ""),
        clients_epochs=("epochs=self.epochs", ""),
        clients_batch=("batch=self.batch", ""),
        statistics_updated=("self.batchnorm", "'updating'"),
    ),
    *mutants(
        PublicOnly.round,
        trains_on_private_data=("data='public'", "data='private'"),
        statistics_lost=("buffers=end.buffers", ""),
        clients_epochs=("epochs=self.epochs", ""),
    ),
    *mutants(
        Centralised.round,
        trains_on_public_data=("data='private'", "data='public'"),
        forgets_what_it_learned=("params=end.params", "params=state.params"),
    ),
    *mutants(
        recalibrated,
        clients_statistics_linger=("layer.momentum = None", "layer.momentum = 0.1"),
        counters_not_reset=("... if fresh else {}", "... if False else {}"),
        counters_lost=("buffers | counters", "buffers"),
        dropout_on=("layer.eval()", "None"),
        eval_mode=("mode='updating'", "mode='frozen'"),
        statistics_of_the_last_batch=(
            "net.apply(params, buffers, x, mode='updating')",
            "net.apply(params, model.buffers | {k: 0 * v for k, v in counters.items()}, x, mode='updating')",
        ),
        the_nets_own_layers_changed=("net = net.with_shared_kernels()", "pass"),
    ),
    *mutants(
        BnRecalibrate.round,
        always_fresh=("self.statistics == 'fresh'", "True"),
        old_model_recalibrated=(
            "recalibrated(engine.net, average, parts, fresh, ...)",
            "recalibrated(engine.net, state, parts, fresh, ...)",
        ),
    ),
]
