"""Card 12, KT-pFL: what must come out, known without running a federation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import kl_div

import fnrfl
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.ktpfl import Approach, Imitation, KTpFL, SoftPredictions
from fnrfl.algorithms.local_only import LocalOnly
from fnrfl.algorithms.parts.coefficients import curvature, gradient, projected, released, simplex, weighted_sums
from fnrfl.core.errors import ConfigError
from fnrfl.core.net import Model
from fnrfl.core.rng import generator
from fnrfl.core.types import Batch, State, Training
from fnrfl.data.batches import Pool
from mutants import mutants
from toys import NUM_CLASSES, NUM_FEATURES, Mlp, Plain, Run, World, assert_near, assert_same, classification, distance

ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])
EXCHANGE = pytest.mark.parametrize("exchange", ["logits", "weights"])
RULE = pytest.mark.parametrize("rule", ["kl", "mse"])
DISTILL = 30


def world(module: Any = Mlp, shards: list[Tensor] | None = None, **training: Any) -> World:
    """The classification world with 30 more examples, without labels, to distil on."""
    made = classification(module=module)
    x = torch.randn(DISTILL, NUM_FEATURES, generator=generator(0, "distill"), dtype=torch.float64)
    parts = dict(made.pool._parts) | {"distill": (x, torch.full((DISTILL,), -1))}
    pool = Pool(parts, shards or made.pool.shards, NUM_CLASSES, dtype=torch.float64)
    active = made.active if shards is None else len(shards)
    return replace(made, pool=pool, active=active, training=replace(made.training, **training))


def alike(*owners: int, **training: Any) -> World:
    """Clients with the data of some shards, in the same order every time: equal owners stay equal."""
    shards = classification().pool.shards
    return world(Plain, [shards[i] for i in owners], shuffle=False, **training)


def used(played: Run, client: int) -> State:
    """The model that a client uses."""
    return played.algorithm.personal(played.net, played.state, client, played.engine.memory.get(client))


def soft(played: Run, model: State, temperature: float = 10.0) -> Tensor:
    """What a model says about the public examples."""
    x, _ = played.world.pool.all("distill")
    out, _ = played.net.apply(model.params, model.buffers, x, mode="frozen")
    return (out.logits / temperature).softmax(-1)


def opinions(*shape: int, seed: int = 0) -> Tensor:
    """Soft predictions, [..., C]."""
    return torch.randn(*shape, generator=generator(seed, "opinions"), dtype=torch.float64).softmax(-1)


def even(N: int) -> Tensor:
    """1/N everywhere, [N, N]."""
    return torch.full((N, N), 1 / N, dtype=torch.float64)


def rows(*shape: int, seed: int = 0) -> Tensor:
    """Coefficients inside the simplex."""
    return torch.rand(*shape, generator=generator(seed, "rows"), dtype=torch.float64).add(0.1).softmax(-1)


# -- the coefficients -------------------------------------------------------------------------------------------------


def misfit(c: Tensor, said: Tensor, own: Tensor, fit: str) -> Tensor:
    """The three misfits as they are written."""
    teacher, mine = weighted_sums(c, said), said[own]
    if fit == "kl":
        return (teacher * (teacher / mine).log()).sum((1, 2)) / said.shape[1]
    if fit == "mse":
        return (teacher - mine).square().mean((1, 2))
    spread = (said - said.mean(0)).square().sum()
    return (teacher - mine).flatten(1).square().sum(1) / spread / 2


@pytest.mark.parametrize("fit", ["kl", "mse", "weights"])
def test_card12_gradients_are_those_of_the_misfits(fit: Any) -> None:
    """By finite differences, and along the simplex: what all coefficients have in common moves nothing."""
    said, own, c = opinions(5, 7, NUM_CLASSES), torch.tensor([3, 0]), rows(2, 5)
    found = gradient(c, said, own, fit)
    for i in range(5):
        for j in range(5):
            along, h = torch.eye(5).double()[i] - torch.eye(5).double()[j], 1e-6
            slope = (misfit(c + h * along, said, own, fit) - misfit(c - h * along, said, own, fit)) / (2 * h)
            assert distance(found @ along, slope) < 1e-8


def test_card12_the_released_gradient_is_exact_in_every_direction() -> None:
    said, own, c = opinions(5, 7, NUM_CLASSES), torch.tensor([3, 0]), rows(2, 5).requires_grad_()
    (want,) = torch.autograd.grad(misfit(c, said, own, "mse").sum(), c)
    assert distance(gradient(c.detach(), said, own, "mse"), want) < 1e-15


def test_card12_the_released_step() -> None:
    """Down MSE + rho MSE(c, 1/N), about 0.01 long, then softmax(5 c)."""
    said, own, rho = opinions(5, 7, NUM_CLASSES), torch.tensor([3, 0]), 0.7
    c = rows(2, 5).requires_grad_()
    loss = misfit(c, said, own, "mse") + rho * (c - 0.2).square().mean(1)
    (slope,) = torch.autograd.grad(loss.sum(), c)
    moved = released(c.detach(), gradient(c.detach(), said, own, "mse"), rho).log() / 5
    step = (c.detach() - moved) - (c.detach() - moved).mean(1, keepdim=True)  # softmax forgets a common constant
    even = slope - slope.mean(1, keepdim=True)
    factor = (step * even).sum(1) / even.square().sum(1)
    assert distance(step, factor[:, None] * even) < 1e-12
    power = factor.log() / torch.tensor(5.0).log()
    assert distance(power, power.round()) < 1e-9
    assert ((slope.abs().mean(1) * factor > 0.01 / 5) & (slope.abs().mean(1) * factor < 0.05)).all()
    flat = released(torch.eye(3).double(), torch.zeros(3, 3).double(), 0.0)
    assert float(flat[0, 0] / flat[0, 1]) == pytest.approx(2.718281828**5, rel=1e-6)  # however sure a row was
    assert distance(released(torch.eye(3).double(), torch.ones(3, 3).double(), 0.0), flat) < 1e-12


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(0, 10_000), st.floats(0.01, 30))
def test_card12_the_projection_is_the_nearest_point(K: int, seed: int, scale: float) -> None:
    """Optimality: no point of the simplex is in front of it."""
    v = scale * torch.randn(3, K, generator=generator(seed, "v"), dtype=torch.float64)
    p = simplex(v)
    assert (p >= 0).all() and distance(p.sum(1), torch.ones(3).double()) < 1e-12
    ahead = (v - p) @ torch.eye(K).double() - ((v - p) * p).sum(1, keepdim=True)  # <v - p, corner - p>
    assert (ahead <= 1e-9 * scale).all()


def test_card12_the_step_finds_the_minimum() -> None:
    """Repeated on fixed opinions it ends where misfit + rho ||c - 1/K||^2 is least."""
    said, own, rho = opinions(4, 9, NUM_CLASSES), torch.arange(4), 0.05
    c, worst = even(4), torch.full((4,), torch.inf).double()
    for _ in range(300):
        c = projected(c, gradient(c, said, own, "kl"), rho, 1 / curvature(c, said).clamp(min=1))
        now = misfit(c, said, own, "kl") + rho * (c - 0.25).square().sum(1)
        assert (now <= worst + 1e-15).all(), "never uphill"
        worst = now
    best = misfit(c, said, own, "kl") + rho * (c - 0.25).square().sum(1)
    assert (c.diagonal() > 0.3).all(), "each trusts itself more than the others"
    for seed in range(100):
        near = simplex(c + 0.02 * torch.randn(4, 4, generator=generator(seed, "near"), dtype=torch.float64))
        assert (misfit(near, said, own, "kl") + rho * (near - 0.25).square().sum(1) >= best - 1e-12).all()


def test_card12_the_step_is_the_joint_objectives() -> None:
    """c goes down lam KL + rho ||c - 1/N||^2, as the clients do: only lam / rho matters, if both are large."""
    said, c = opinions(4, 9, NUM_CLASSES), rows(4, 4)
    moved = KTpFL(lam=50.0, rho=2.0)._moved(c, said, torch.arange(4))
    steep = 50 * curvature(c, said)
    want = simplex((c - 50 / steep * gradient(c, said, torch.arange(4), "kl") + 4 / steep / 4) / (1 + 4 / steep))
    assert (steep > 1).all() and distance(moved, want) < 1e-12
    assert distance(KTpFL(lam=500.0, rho=20.0)._moved(c, said, torch.arange(4)), moved) < 1e-12
    assert distance(KTpFL(lam=500.0, rho=2.0)._moved(c, said, torch.arange(4)), moved) > 1e-3
    still = KTpFL(lam=0.0, rho=2.0, step=1e9)._moved(c, said, torch.arange(4))
    assert distance(still, even(4)) < 1e-8, "without imitation only the pull is left"


@RULE
@EXCHANGE
@ENGINES
def test_card12_rows_stay_on_the_simplex(rule: Any, exchange: Any, engine: str) -> None:
    """Whoever takes part; those who have not spoken yet keep their share of a row."""
    played = Run(KTpFL(coefficients=rule, exchange=exchange, rho=0.01), engine, world=world())
    for active in (1, 4, 2, 6):
        played.active = active
        c = played.round().extra["coefficients"]
        assert (c >= 0).all() and distance(c.sum(1), torch.ones(6).double()) < 1e-12
        silent = ~played.state.extra["known"]
        assert (c[:, silent] == 1 / 6).all()
    assert distance(c, even(6)) > 1e-3


@RULE
@EXCHANGE
def test_card12_alike_clients_stay_alike(rule: Any, exchange: Any) -> None:
    """The gradient is 0, c stays 1/N, everybody is its own teacher, and imitation moves nobody."""
    made = alike(3, 3, 3)
    played, alone = Run(KTpFL(coefficients=rule, exchange=exchange), world=made), Run(LocalOnly(), world=made)
    for _ in range(3):
        played.round()
        alone.round()
        assert distance(played.state.extra["coefficients"], even(3)) < 1e-12
        for client in range(3):
            assert_near(used(played, client), used(alone, client))
    said = opinions(1, 7, NUM_CLASSES).expand(3, -1, -1)
    for fit in ("kl", "mse", "weights"):
        assert gradient(even(3), said, torch.arange(3), fit).abs().max() < 1e-15


@RULE
@EXCHANGE
def test_card12_one_client_trains_alone(rule: Any, exchange: Any) -> None:
    made = world(shards=[classification().pool.shards[3]])
    played, alone = (
        Run(KTpFL(coefficients=rule, exchange=exchange, batchnorm="frozen"), world=made),
        Run(LocalOnly(), world=made),
    )
    played.rounds(3)
    alone.rounds(3)
    assert_near(used(played, 0), used(alone, 0))
    assert played.state.extra["coefficients"].item() == pytest.approx(1.0)


def test_card12_a_strong_pull_is_the_plain_average() -> None:
    """rho to infinity: everybody has the same teacher, the mean of all predictions (FedMD)."""
    played = Run(KTpFL(rho=1e12), world=world(), active=6)
    played.round()
    assert distance(played.state.extra["coefficients"], even(6)) < 1e-9
    teacher = played.tasks("imitate")[0].own["teacher"]
    assert distance(teacher, played.state.extra["said"].mean(0).expand_as(teacher)) < 1e-9
    free = Run(KTpFL(rho=0.0), world=world(), active=6)
    free.rounds(4)
    assert (free.state.extra["coefficients"].diagonal() > 1.5 / 6).all(), "without a pull each teaches itself"


@RULE
@EXCHANGE
def test_card12_two_groups_make_blocks(rule: Any, exchange: Any) -> None:
    played = Run(KTpFL(coefficients=rule, exchange=exchange, rho=0.01), world=alike(2, 5, 2, 5, 5))
    c = played.rounds(3).extra["coefficients"]
    a, b = [0, 2], [1, 3, 4]
    for block in (c[a][:, a], c[a][:, b], c[b][:, a], c[b][:, b]):
        assert distance(block, block[0, 0].expand_as(block)) < 1e-9
    assert c[0, 2] > c[0, 1] + 1e-3 and c[1, 4] > c[1, 0] + 1e-3


# -- predictions, teachers, imitation ---------------------------------------------------------------------------------


@ENGINES
def test_card12_predictions_are_at_the_temperature_and_in_order(engine: str) -> None:
    """More examples than a probe sees at once."""
    made = world()
    x = torch.randn(1100, NUM_FEATURES, generator=generator(0, "more"), dtype=torch.float64)
    made.pool._parts["distill"] = x, torch.full((1100,), -1)
    played = Run(KTpFL(), engine, world=made)
    said = played.engine.measure(torch.arange(3), SoftPredictions(1100, 3.0), data="distill", at=played.state)["soft"]
    assert said.shape == (3, 1100, NUM_CLASSES)
    assert distance(said, soft(played, played.state, 3.0).expand_as(said)) < 1e-12


@ENGINES
def test_card12_a_teacher_is_the_clients_mixture_of_what_was_said(engine: str) -> None:
    played = Run(KTpFL(rho=0.01, epochs=0), engine, world=world(), active=6)
    played.round()
    said, c = played.state.extra["said"], played.state.extra["coefficients"]
    for client in range(6):  # no epochs: what a client uses is what it spoke from
        assert distance(said[client], soft(played, used(played, client))) < 1e-12
    teacher = played.tasks("imitate")[0].own["teacher"]
    assert distance(teacher, torch.einsum("nm,mdc->ndc", c, said)) < 1e-12


def test_card12_who_is_away_teaches_by_what_it_said_last_and_who_never_spoke_does_not() -> None:
    played = Run(KTpFL(rho=0.01), world=world())
    played.round(torch.tensor([1, 4]))
    first = played.state.extra
    played.round(torch.tensor([0, 4]))
    now = played.state.extra
    assert now["known"].tolist() == [True, True, False, False, True, False]
    assert torch.equal(now["said"][1], first["said"][1])
    assert not torch.equal(now["said"][4], first["said"][4])
    assert torch.equal(now["coefficients"][1], first["coefficients"][1]), "rows of the others are not touched"
    who = [0, 1, 4]
    mine = now["coefficients"][[0, 4]][:, who]
    want = torch.einsum("nm,mdc->ndc", mine / mine.sum(1, keepdim=True), now["said"][who])
    assert distance(played.tasks("imitate")[0].own["teacher"], want) < 1e-12
    before = first["coefficients"][[0, 4]][:, who]
    share = before.sum(1, keepdim=True)  # of those who have spoken; they make up a row of their own
    moved = played.algorithm._moved(before / share, now["said"][who], torch.tensor([0, 2]))
    assert (share < 1).all() and distance(mine, moved * share) < 1e-12


def test_card12_imitation_is_the_kl_to_the_teacher() -> None:
    """The teacher is the target, both at T, the mean over examples; 0 and without gradient where they agree."""
    played = Run(KTpFL(), world=world(Plain))
    x, y = played.world.pool.all("distill")
    params, buffers = played.state.params, played.state.buffers
    out, _ = played.net.apply(params, buffers, x, mode="frozen")
    index = torch.tensor([4, 0, 17])
    out = replace(out, logits=out.logits[index])
    model, batch = Model(played.net, played.state, buffers, {}, "frozen"), Batch(x[index], y[index], index)
    teacher = opinions(DISTILL, NUM_CLASSES)
    found = Imitation(3.0, 2.0).loss(out, model, params, batch, {}, {"teacher": teacher})
    want = 3 * kl_div((out.logits / 2).log_softmax(-1), teacher[index], reduction="batchmean")
    assert float(found) == pytest.approx(float(want), rel=1e-12)
    sure = torch.zeros(DISTILL, NUM_CLASSES, dtype=torch.float64).index_fill(1, torch.tensor([2]), 1.0)
    assert Imitation(1.0, 2.0).loss(out, model, params, batch, {}, {"teacher": sure}).isfinite()
    same = Imitation(1.0, 2.0).loss(out, model, params, batch, {}, {"teacher": soft(played, played.state, 2.0)})
    assert abs(float(same)) < 1e-12


@ENGINES
def test_card12_imitation_brings_a_client_to_its_teacher(engine: str) -> None:
    def gap(played: Run) -> float:
        teacher = played.tasks("imitate")[0].own["teacher"]
        clients = played.cohort(0).tolist()
        said = torch.stack([soft(played, used(played, client)) for client in clients])
        return float(kl_div(said.log(), teacher, reduction="sum"))

    still, taught, more = (
        Run(KTpFL(lam=lam, epochs=epochs), engine, world=world()) for lam, epochs in ((0.0, 1), (100.0, 1), (100.0, 20))
    )
    for played in (still, taught, more):
        played.round()
    assert gap(more) < gap(taught) < gap(still)


@EXCHANGE
@ENGINES
@pytest.mark.parametrize("off", [{"lam": 0.0}, {"epochs": 0}], ids=["lam", "epochs"])
def test_card12_without_imitation_it_is_local_training_bit_for_bit(exchange: Any, engine: str, off: Any) -> None:
    if exchange == "weights":
        off = {"lam": 0.0}  # takes no epochs anyway
    played, alone = Run(KTpFL(exchange=exchange, **off), engine, world=world()), Run(LocalOnly(), engine, world=world())
    played.rounds(3)
    alone.rounds(3)
    for client in range(6):
        assert_same(used(played, client), used(alone, client))


@ENGINES
def test_card12_without_weight_imitation_takes_no_steps(engine: str) -> None:
    """Steps down a loss of zero would end at the same model, and cost as much as any others."""
    still, taught = (Run(KTpFL(lam=lam), engine, world=world()) for lam in (0.0, 100.0))
    for played, epochs, steps in ((still, 0, 0), (taught, 1, 1)):
        played.round()
        (task,) = played.tasks("imitate")
        assert task.training is not None and task.training.epochs == epochs
        assert played.replies("imitate").steps.tolist() == [steps] * 4


def test_card12_statistics_stay_private_unless_asked_for() -> None:
    """Frozen: BatchNorm statistics are those of private training alone; updating is the released code's."""
    runs = {b: Run(KTpFL(batchnorm=b), world=world()) for b in ("frozen", "batch", "updating")}
    alone = Run(LocalOnly(), world=world())
    for played in (*runs.values(), alone):
        played.round()
    client = int(alone.cohort(0)[0])
    want = used(alone, client).buffers["norm.running_mean"]
    for b, played in runs.items():
        assert torch.equal(used(played, client).buffers["norm.running_mean"], want) == (b != "updating")


# -- the weights form -------------------------------------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize("lam", [0.3, 1.0, 100.0])
def test_card12_weights_go_towards_the_clients_mixture(engine: str, lam: float) -> None:
    """w_i + min(lam, 1) (sum_m c_im w_m - w_i); floating buffers too, integer ones stay."""
    played = Run(KTpFL(exchange="weights", rho=0.01, lam=lam), engine, world=world(), active=6)
    state = played.round()
    got, c, share = played.replies(), state.extra["coefficients"], min(lam, 1.0)
    for client in range(6):
        mine = used(played, client)
        assert distance(mine.params, got.params[client] + share * (c[client] @ got.params - got.params[client])) < 1e-12
        var = got.buffers["norm.running_var"]
        assert distance(mine.buffers["norm.running_var"], var[client] + share * (c[client] @ var - var[client])) < 1e-12
        assert mine.buffers["norm.num_batches_tracked"] == got.buffers["norm.num_batches_tracked"][client]


# -- what crosses, and FNR --------------------------------------------------------------------------------------------


@ENGINES
def test_card12_traffic(engine: str) -> None:
    def crossed(played: Run, way: str) -> int:
        return sum(count[way] for count in played.metered.bytes.values())

    played = Run(KTpFL(), engine, world=world())
    for _ in range(2):
        played.round()
        assert crossed(played, "up") == crossed(played, "down") == 4 * DISTILL * NUM_CLASSES * 4
    played = Run(KTpFL(exchange="weights"), engine, world=world())
    floats = 4 * played.net.size + 4 * 32
    for _ in range(2):
        played.round()
        assert crossed(played, "up") == 4 * (floats + 8)
        assert crossed(played, "down") == 4 * floats


@EXCHANGE
@ENGINES
def test_card12_with_fnr_the_refined_models_speak_and_persist(exchange: Any, engine: str) -> None:
    """After private training, before predictions; nothing is averaged, so without imitation nothing else changes."""
    played = Run(FNR(KTpFL(exchange=exchange, lam=0.0)), engine, world=world())
    alone = Run(FNR(LocalOnly()), engine, world=world())
    played.round()
    alone.round()
    assert len(played.engine.notes["refined"]) == 2
    for client in played.cohort(0).tolist():
        assert_same(used(played, client), used(alone, client))
        mine = used(played, client)
        want = soft(played, mine) if exchange == "logits" else mine.params
        assert distance(played.state.extra["said"][client], want) < 1e-12


def test_the_servers_model_stays_as_it_was_born() -> None:
    played = Run(KTpFL(), world=world())
    birth = played.state
    played.rounds(2)
    assert torch.equal(played.state.params, birth.params)


def test_who_is_lost_neither_speaks_nor_learns() -> None:
    played = Run(KTpFL(), world=world(), dropout=0.5)
    played.round(torch.arange(6))
    lost = played.engine.notes["dropped"]
    assert len(lost) == 3
    assert played.state.extra["known"].tolist() == [client not in lost for client in range(6)]
    assert list(played.engine.memory) == [client for client in range(6) if client not in lost]


def test_a_last_step_of_imitation_is_as_large_as_the_others() -> None:
    """30 examples in batches of 20 at most: two of 15, so that no batch is small."""
    played = Run(KTpFL(batch=20, epochs=2), world=world())
    played.round()
    assert played.replies("imitate").steps.tolist() == [4] * 4
    training = played.tasks("imitate")[0].training
    assert training == replace(
        Training(lr=0.05, batch=20, epochs=2), weight_decay=0.0, last_batch="even", batchnorm="updating"
    )


@pytest.mark.parametrize(
    "bad", [{"exchange": "gradients"}, {"coefficients": "cosine"}, {"temperature": 0.0}, {"rho": -1.0}, {"lam": -0.1}]
)
def test_bad_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        fnrfl.run("digits", out=None, rounds=1, algorithm={"name": "ktpfl", **bad})


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        weighted_sums,
        teachers_by_columns=("c @ said.flatten(1)", "c.mT @ said.flatten(1)"),
    ),
    *mutants(
        gradient,
        kl_turned_round=(
            "(teacher.clamp(min=tiny).log() - mine.clamp(min=tiny).log()) @ flat.mT",
            "(teacher - mine) @ flat.clamp(min=tiny).log().mT",
        ),
        kl_sign=(
            "teacher.clamp(min=tiny).log() - mine.clamp(min=tiny).log()",
            "mine.clamp(min=tiny).log() - teacher.clamp(min=tiny).log()",
        ),
        kl_not_averaged=(
            "(teacher.clamp(min=tiny).log() - mine.clamp(min=tiny).log()) @ flat.mT / said.shape[1]",
            "(teacher.clamp(min=tiny).log() - mine.clamp(min=tiny).log()) @ flat.mT",
        ),
        mse_half=("2 / flat.shape[1]", "1 / flat.shape[1]"),
        mse_not_averaged=("2 / flat.shape[1]", "2"),
        mse_sign=("teacher - mine", "mine - teacher"),
        weights_not_scaled=("flat / flat.square().sum().clamp(min=1e-12).sqrt()", "flat"),
    ),
    *mutants(
        curvature,
        curvature_not_averaged=(
            "(spread / teacher).sum(1, keepdim=True).div(said.shape[1])",
            "(spread / teacher).sum(1, keepdim=True)",
        ),
        curvature_of_the_mean=("flat - flat.mean(0)", "flat"),
    ),
    *mutants(
        simplex,
        projection_off_by_one=("count - 1", "(count - 2).clamp(min=0)"),
        projection_keeps_negatives=(
            "(rows - excess.gather(-1, count - 1)).clamp(min=0)",
            "rows - excess.gather(-1, count - 1)",
        ),
    ),
    *mutants(
        projected,
        step_up=("c - step * grad", "c + step * grad"),
        no_pull=("2 * step", "0.0"),
        half_the_pull=("2 * step", "step"),
    ),
    *mutants(
        released,
        released_pull_sign=("grad + 2 * rho / K * (c - 1 / K)", "grad - 2 * rho / K * (c - 1 / K)"),
        released_pull_not_averaged=("2 * rho / K", "2 * rho"),
        released_step_up=("c - scale * grad", "c + scale * grad"),
        released_without_five=("5 * (c - scale * grad)", "c - scale * grad"),
        released_step_not_scaled=("scale * grad", "grad"),
    ),
    *mutants(
        SoftPredictions.__call__,
        predictions_without_temperature=("out.logits / self.temperature", "out.logits"),
        predictions_out_of_order=(
            "soft.new_zeros(self.size, soft.shape[-1]).index_add(0, batch.index, soft)",
            "soft.new_zeros(self.size, soft.shape[-1]).index_add(0, batch.index.flip(0), soft)",
        ),
    ),
    *mutants(
        Imitation.loss,
        student_without_temperature=("out.logits / self.temperature", "out.logits"),
        imitation_sign=("... - teacher * said", "... + teacher * said"),
        imitation_unweighted=(
            "self.lam * batch.mean((torch.special.xlogy(teacher, teacher) - teacher * said).sum(-1))",
            "batch.mean((torch.special.xlogy(teacher, teacher) - teacher * said).sum(-1))",
        ),
        teacher_of_other_examples=("own['teacher'][batch.index]", "own['teacher'][:len(batch.index)]"),
        entropy_dropped=("torch.special.xlogy(teacher, teacher) - teacher * said", "-teacher * said"),
    ),
    *mutants(
        Approach.begin,
        away_from_the_mixture=("own['teacher'] - start.params", "start.params - own['teacher']"),
        the_whole_way=("self.lam * (own['teacher'] - start.params)", "1.0 * (own['teacher'] - start.params)"),
        buffers_stay=("start.buffers | moved", "start.buffers"),
    ),
    *mutants(
        KTpFL._imitation,
        share_above_one=("min(1.0, self.lam)", "self.lam"),
        weight_decay_in_imitation=("weight_decay=0.0", ""),
        imitates_without_lam=("self.exchange == 'weights' or not self.lam", "self.exchange == 'weights'"),
        imitates_on_private_data=("data='distill'", "data='private'"),
        statistics_updated=("self.batchnorm", "'updating'"),
    ),
    *mutants(
        KTpFL._teachers,
        the_silent_teach=("known.nonzero()[:, 0]", "torch.arange(N)"),
        rows_not_renormalised=("rows / among", "rows"),
        mass_of_the_silent_lost=("new * among", "new"),
        own_row_mixed_up=("torch.searchsorted(who, clients)", "torch.searchsorted(who, clients).flip(0)"),
        coefficients_stay=("c[clients[:, None], who] = new * among", "pass"),
        old_coefficients_teach=("weighted_sums(new, v[who])", "weighted_sums(rows / among, v[who])"),
    ),
    *mutants(
        KTpFL._moved,
        rules_swapped=("self.coefficients == 'mse'", "self.coefficients != 'mse'"),
        coefficients_ignore_lam=("self.lam * grad", "grad"),
        curvature_ignored=("self.step / steep", "self.step"),
    ),
]
