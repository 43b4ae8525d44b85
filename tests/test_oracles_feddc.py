"""Card 9, FedDC: what must come out, known without running a federation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fnrfl
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.feddc import Decoupled, FedDC
from fnrfl.algorithms.feddyn import Dynamic, FedDyn
from fnrfl.algorithms.fedprox import FedProx
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.scaffold import Scaffold
from fnrfl.core.errors import ConfigError
from fnrfl.core.types import Decorator, LocalTask, Replies, State, Tree
from mutants import mutants
from toys import Run, assert_same, bowls, distance, optimum, quadratic, run

SIZES = (10, 20, 30, 40)
W = torch.tensor(SIZES, dtype=torch.float64) / 25  # N n_i / sum n
WEIGHTS = pytest.mark.parametrize("weights", ["examples", "uniform"])
MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.9])
ACTIVE = pytest.mark.parametrize("active", [4, 2])


def remembered(played: Run, name: str) -> Tensor:
    """What every client remembers under a name, [N, P]."""
    return torch.stack([played.engine.memory.get(i)[name] for i in range(len(played.world.pool.shards))])


def forget(played: Run, name: str) -> None:
    """Set a state to zero, at the server and at every client."""
    played.state = replace(played.state, extra=played.state.extra | {name: torch.zeros_like(played.state.params)})
    for i in range(len(played.world.pool.shards)):
        played.engine.memory.put(i, played.engine.memory.get(i) | {name: torch.zeros_like(played.state.params)})


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_card9_without_variates_is_feddyn_bit_for_bit(engine: str) -> None:
    """On a net with BatchNorm and ragged clients; the variates are set to zero after every round."""
    frozen, dynamic = Run(FedDC(alpha=0.1), engine), Run(FedDyn(alpha=0.1), engine)
    for _ in range(4):
        frozen.round()
        assert frozen.state.extra["g"].abs().max() > 0
        assert_same(frozen.state, dynamic.round())
        assert torch.equal(remembered(frozen, "h"), remembered(dynamic, "h"))
        forget(frozen, "g")


def test_card9_variates_change_the_second_round() -> None:
    free, dynamic = Run(FedDC(alpha=0.1)), Run(FedDyn(alpha=0.1))
    assert_same(free.round(), dynamic.round())
    assert distance(free.round().params, dynamic.round().params) > 1e-4


@MOMENTA
def test_card9_without_drift_and_alpha_is_scaffold_II(momentum: float) -> None:
    """alpha = 0 and h forced to 0, in the server's step too; alpha = 0 alone is not, since h still enters."""
    A, b = bowls()
    world = quadratic(A, b, SIZES, steps=5, momentum=momentum, active=3)
    plain, controlled = (
        Run(FedDC(alpha=0.0, weights="uniform"), world=world),
        Run(Scaffold(weights="uniform"), world=world),
    )
    for _ in range(6):
        plain.round()
        assert plain.state.extra["h"].abs().max() > 1e-3
        plain.state = replace(plain.state, params=plain.state.params - plain.state.extra["h"])
        forget(plain, "h")
        controlled.round()
        assert distance(plain.state.params, controlled.state.params) < 1e-12
        assert distance(plain.state.extra["g"], controlled.state.extra["c"]) < 1e-12
        assert distance(remembered(plain, "g"), remembered(controlled, "c")) < 1e-12


@ACTIVE
@WEIGHTS
def test_card9_finds_the_optimum_of_its_weights(active: int, weights: str) -> None:
    """Unequal sizes, five local steps, everyone or half active."""
    A, b = bowls()
    pooled, unweighted = optimum(A, b, SIZES), optimum(A, b, [1.0] * 4)
    best = pooled if weights == "examples" else unweighted
    assert distance(pooled, unweighted) > 0.3
    played = Run(FedDC(alpha=1.0, weights=weights), world=quadratic(A, b, SIZES, steps=5, lr=0.3, active=active))
    played.rounds(50 if active == 4 else 70)
    assert distance(played.state.params, best) < 1e-8
    assert played.state.extra["h"].abs().max() < 1e-8
    assert played.state.extra["g"].abs().max() < 1e-8
    assert distance(played.replies().trained, best.expand(active, -1)) < 1e-8


@ACTIVE
def test_card9_fedavg_stays_off_in_the_same_world(active: int) -> None:
    A, b = bowls()
    bare = run(FedAvg(), rounds=40, world=quadratic(A, b, SIZES, steps=5, lr=0.3, active=active))[0]
    assert distance(bare.params, optimum(A, b, SIZES)) > 0.1


@MOMENTA
def test_card9_optimum_is_a_fixed_point(momentum: float) -> None:
    """Wherever the gradients at x* are split between h_i and g_i, as long as both have mean zero."""
    A, b = bowls()
    best = optimum(A, b, SIZES)
    played = Run(FedDC(alpha=0.3), world=quadratic(A, b, SIZES, steps=7, momentum=momentum, active=2))
    for i in range(4):
        slope = A[i] @ best - b[i]
        played.engine.memory.put(i, {"h": -0.4 * slope * W[i] / 0.3, "g": 0.6 * slope})
    played.state = State(best, {}, {"h": torch.zeros_like(best), "g": torch.zeros_like(best)})
    played.rounds(3)
    assert distance(played.state.params, best) < 1e-12


@WEIGHTS
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_card9_server_states_are_means_over_all_clients(engine: str, weights: str) -> None:
    """G = 1/N sum w_i G_i and h = 1/N sum h_i, after every round and at any participation."""
    played = Run(FedDC(alpha=0.1, weights=weights), engine)
    n = torch.tensor([len(s) for s in played.world.pool.shards], dtype=torch.float64)
    w = n / n.mean() if weights == "examples" else torch.ones(6).double()
    for active in (4, 1, 2, 6):
        played.active = active
        played.round()
        assert distance(played.state.extra["g"], w @ remembered(played, "g") / 6) < 1e-12
        assert distance(played.state.extra["h"], remembered(played, "h").mean(0)) < 1e-12
        mean = played.replies().params.mean(0)
        assert distance(played.state.params, mean + remembered(played, "h").mean(0)) < 1e-12


def test_card9_invariant_survives_a_client_that_is_left_out() -> None:
    A, b = bowls()
    A[1] *= 1e6
    played = Run(FedDC(alpha=0.1), world=quadratic(A, b, SIZES, steps=80), nonfinite="skip")
    played.round(torch.tensor([0, 1, 3]))
    assert played.engine.notes["skipped"] == [1]
    assert distance(played.state.extra["g"], W @ remembered(played, "g") / 4) < 1e-9


@WEIGHTS
@MOMENTA
def test_card9_first_round_is_fedprox_with_alpha_i(weights: str, momentum: float) -> None:
    """And everyone active: theta + 2 mean(y_i - theta)."""
    A, b = bowls()
    world = quadratic(A, b, SIZES, steps=8, momentum=momentum)
    played = Run(FedDC(alpha=0.2, weights=weights), world=world)
    theta = played.state.params
    played.round()
    for i in range(4):
        near = Run(FedProx(mu=0.2 / float(W[i] if weights == "examples" else 1)), world=world)
        near.round(torch.tensor([i]))
        assert distance(played.replies().trained[i], near.replies().trained[0]) < 1e-12
    assert distance(played.state.params, theta + 2 * (played.replies().trained - theta).mean(0)) < 1e-12


def test_card9_drift_is_the_sum_of_a_clients_displacements() -> None:
    played = Run(FedDC(alpha=0.1))
    sums = torch.zeros_like(remembered(played, "h"))
    for t in range(4):
        start = played.state.params
        played.round()
        sums[played.cohort(t)] += played.replies().trained - start
        assert distance(remembered(played, "h"), sums) < 1e-12


@MOMENTA
def test_card9_variate_is_the_mean_of_the_gradients_with_their_pull(
    momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a_k-weighted, each client by its own steps; what is sent up is w_i times the change."""
    A, b = bowls()
    trails: list[list[Tensor]] = []  # gradients with the pull, of each client
    correct = Dynamic.correct

    def watched(self: Dynamic, grad: Tensor, params: Tensor, start: Tensor, shared: Tree, own: Tree) -> Tensor:
        if torch.equal(params, start):
            trails.append([])
        trails[-1].append(correct(self, grad, params, start, shared, own))
        return trails[-1][-1]

    monkeypatch.setattr(Dynamic, "correct", watched)
    world = quadratic(A, b, (10, 23, 31, 40), steps=2, batch=8, lr=0.05, momentum=momentum, active=3, spread=2.0)
    played = Run(FedDC(alpha=0.2), world=world)
    for t in range(4):
        trails.clear()
        before = remembered(played, "g")
        played.round()
        cohort = played.cohort(t).tolist()
        for client, raw in zip(sorted(cohort, key=lambda c: -len(world.pool.shards[c])), trails, strict=True):
            K = len(raw)
            a = torch.tensor([sum(momentum**j for j in range(K - k)) for k in range(K)], dtype=torch.float64)
            want = (a / a.sum()) @ torch.stack(raw)
            assert distance(played.engine.memory.get(client)["g"], want) < 1e-11
            sent = played.replies().extras["g"][cohort.index(client)]
            assert distance(sent, len(world.pool.shards[client]) / 26 * (want - before[client])) < 1e-11


def test_card9_momentum_and_many_steps_do_not_diverge() -> None:
    """Dividing by K * lr would: |a| / K is 4.6 here, and above 2 variates grow whatever the learning rate."""
    A, b = bowls()
    played = Run(FedDC(alpha=0.5), world=quadratic(A, b, SIZES, steps=12, lr=0.01, momentum=0.9))
    best = optimum(A, b, SIZES)
    began = distance(played.state.params, best)
    played.rounds(18)
    assert distance(played.state.params, best) < 0.001 * began


def test_card9_unlike_steps_find_the_optimum() -> None:
    """Each client divides by its own travel, so epochs over unlike shards are right; so is a falling rate."""
    A, b = bowls()
    world = quadratic(A, b, SIZES, steps=1, batch=10, lr=0.3)
    played = Run(FedDC(alpha=1.0), world=world, lr_decay=0.995)
    played.rounds(50)
    assert played.replies().steps.tolist() == [1, 2, 3, 4]
    assert distance(played.state.params, optimum(A, b, SIZES)) < 1e-6


def test_card9_buffers_are_averaged_and_not_corrected() -> None:
    played = Run(FedDC(alpha=0.1))
    for _ in range(4):
        played.round()
        got = played.replies()
        share = got.examples.double() / got.examples.sum()
        assert distance(played.state.buffers["norm.running_var"], share @ got.buffers["norm.running_var"]) < 1e-12
    assert (played.state.buffers["norm.running_var"] > 0).all()


def test_card9_sends_two_vectors_and_a_number_beside_the_model() -> None:
    played = Run(FedDC())
    played.round()
    size = played.net.size
    model = 4 * (size + 32) + 8  # BatchNorm of 16, with its counter
    assert played.metered.bytes["local"]["down"] == 4 * (model + 4 * size)
    assert played.metered.bytes["local"]["up"] == 4 * (model + 4 * size)


def test_card9_alpha_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="algorithm.alpha = .* it must be a number > 0"):
        fnrfl.run("digits", out=None, algorithm={"name": "feddc", "alpha": 0.0})


# -- with FNR ---------------------------------------------------------------------------------------------------------


class Nudged(Decorator):
    """Refinement as the server sees it: every client hands over y_i + r_i."""

    def __init__(self, engine: Any, by: Tensor) -> None:
        super().__init__(engine)
        self.by = by  # [N, P]

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        for replies in self.engine.stream(cohort, task):
            yield replace(replies, refined=replies.params + self.by[replies.clients])


def test_card9_fnr_fixed_point_is_feddyns() -> None:
    """Variates do not move it: sum_i pi_i grad f_i = alpha * mean(r), because theirs have mean zero."""
    A, b = bowls()
    r = 0.1 * b * torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)[:, None]
    played = Run(FedDC(alpha=1.0), world=quadratic(A, b, SIZES, steps=5, lr=0.3))
    played.metered.engine = Nudged(played.recorder, r)
    played.rounds(40)
    slopes = torch.einsum("nij,j->ni", A, played.state.params) - b
    assert distance((W / 4) @ slopes, r.mean(0)) < 1e-7
    assert distance(played.state.extra["h"], -r.mean(0)) < 1e-7
    assert played.state.extra["g"].abs().max() < 1e-7


def test_card9_fnr_leaves_drift_and_variates_to_private_training() -> None:
    """theta+ = mean z_i + mean h; h_i and g_i from y_i and its own travel."""
    played = Run(FNR(FedDC(alpha=0.1)))
    n = torch.tensor([len(s) for s in played.world.pool.shards], dtype=torch.float64)
    for t in range(3):
        h, g, start, G = remembered(played, "h"), remembered(played, "g"), played.state.params, played.state.extra["g"]
        played.round()
        cohort, got = played.cohort(t), played.replies()
        y, z, refined = got.trained, got.trained.clone(), played.replies("refine")
        z[torch.searchsorted(cohort, refined.clients)] = refined.params
        assert distance(y, z) > 1e-3
        w = (n / n.mean())[cohort, None]
        h = h.index_add(0, cohort, y - start)
        g = g.index_add(0, cohort, (start - y) / got.travel[:, None] - G / w)
        assert distance(remembered(played, "h"), h) < 1e-12
        assert distance(remembered(played, "g"), g) < 1e-12
        assert distance(played.state.params, z.mean(0) + h.mean(0)) < 1e-12


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        Decoupled.correct,
        correction_signs=(
            "super().correct(grad, params, start, shared, own) + (shared['g'] / own['w'] - own['g'])",
            "super().correct(grad, params, start, shared, own) - (shared['g'] / own['w'] - own['g'])",
        ),
        no_client_variate=("shared['g'] / own['w'] - own['g']", "shared['g'] / own['w']"),
        no_server_variate=("shared['g'] / own['w'] - own['g']", "-own['g']"),
        server_variate_not_scaled=("shared['g'] / own['w']", "shared['g']"),
        no_pull=("super().correct(grad, params, start, shared, own)", "grad"),
    ),
    *mutants(
        Decoupled.finish,
        variate_sign=("start.params - end.params", "end.params - start.params"),
        variate_without_travel=("(start.params - end.params) / travel", "start.params - end.params"),
        variate_keeps_g=(
            "(start.params - end.params) / travel - shared['g'] / own['w']",
            "(start.params - end.params) / travel",
        ),
        variate_with_unscaled_g=("shared['g'] / own['w']", "shared['g']"),
        change_not_scaled=("own['w'] * change", "change"),
        change_sign=("own['w'] * change", "-own['w'] * change"),
        variate_forgets=("own['g'] + change", "change"),
        drift_forgotten=("kept | {'g': own['g'] + change}", "{'g': own['g'] + change}"),
    ),
]
