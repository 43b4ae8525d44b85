"""Card 6, FedDyn: what must come out, known without running a federation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fnrfl
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.feddyn import Dynamic, FedDyn
from fnrfl.algorithms.fedprox import FedProx
from fnrfl.algorithms.fnr import FNR
from fnrfl.core.errors import ConfigError
from fnrfl.core.types import Decorator, LocalTask, Replies, State, Training
from mutants import mutants
from toys import Run, bowls, distance, optimum, quadratic, run

SIZES = (10, 20, 30, 40)
W = torch.tensor(SIZES, dtype=torch.float64) / 25  # N n_i / sum n
WEIGHTS = pytest.mark.parametrize("weights", ["examples", "uniform"])
MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.9])
ACTIVE = pytest.mark.parametrize("active", [4, 2])


def remembered(played: Run, name: str = "h") -> Tensor:
    """What every client remembers under a name, [N, P]."""
    return torch.stack([played.engine.memory.get(i)[name] for i in range(len(played.world.pool.shards))])


def gradients(A: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Of every client at its row of x, or at x."""
    slope: Tensor = torch.einsum("nij,nj->ni", A, x.expand_as(b)) - b
    return slope


@WEIGHTS
@ACTIVE
def test_card6_state_is_the_gradient_where_the_client_ended(weights: str, active: int) -> None:
    """Exact local solves: -alpha_i h_i = grad f_i(y_i) after each update. The state stands for lambda_i."""
    A, b = bowls()
    alpha_i = 1.5 / (W if weights == "examples" else torch.ones(4))
    played = Run(FedDyn(alpha=1.5, weights=weights), world=quadratic(A, b, SIZES, steps=55, lr=0.3, active=active))
    for t in range(3):
        played.round()
        y = played.replies().trained
        for row, i in enumerate(played.cohort(t).tolist()):
            h = played.engine.memory.get(i)["h"]
            assert distance(-alpha_i[i] * h, A[i] @ y[row] - b[i]) < 1e-10


@ACTIVE
@WEIGHTS
def test_card6_finds_the_optimum_of_its_weights(active: int, weights: str) -> None:
    """Five inexact local steps, everyone or half active: the pooled optimum, mean h = 0 and every y_i there."""
    A, b = bowls()
    pooled, unweighted = optimum(A, b, SIZES), optimum(A, b, [1.0] * 4)
    assert distance(pooled, unweighted) > 0.3
    best = pooled if weights == "examples" else unweighted
    played = Run(FedDyn(alpha=1.5, weights=weights), world=quadratic(A, b, SIZES, steps=5, lr=0.3, active=active))
    played.rounds(60 if active == 4 else 80)
    assert distance(played.state.params, best) < 1e-8
    assert played.state.extra["h"].abs().max() < 1e-8
    assert distance(played.replies().trained, best.expand(active, -1)) < 1e-8
    assert (
        distance(-1.5 * remembered(played), gradients(A, b, best) * (W[:, None] if weights == "examples" else 1)) < 1e-7
    )


@ACTIVE
def test_card6_fedavg_stays_off_in_the_same_world(active: int) -> None:
    A, b = bowls()
    bare = run(FedAvg(), rounds=40, world=quadratic(A, b, SIZES, steps=5, lr=0.3, active=active))[0]
    assert distance(bare.params, optimum(A, b, SIZES)) > 0.1


@MOMENTA
def test_card6_optimum_is_a_fixed_point(momentum: float) -> None:
    """With h_i = -grad f_i(x*) / alpha_i, any number of steps goes nowhere, whoever is active."""
    A, b = bowls()
    best = optimum(A, b, SIZES)
    played = Run(FedDyn(alpha=0.3), world=quadratic(A, b, SIZES, steps=7, momentum=momentum, active=2))
    for i in range(4):
        played.engine.memory.put(i, {"h": -(A[i] @ best - b[i]) * W[i] / 0.3})
    played.state = State(best, {}, {"h": torch.zeros_like(best)})
    played.rounds(3)
    assert distance(played.state.params, best) < 1e-12
    assert played.state.extra["h"].abs().max() < 1e-12


@MOMENTA
def test_card6_is_the_papers_form(momentum: float) -> None:
    """lambda_i ~ grad f_i and a server state of -alpha mean(h), written as plain loops; clients of one size."""
    A, b = bowls()
    alpha, lr, steps = 0.4, 0.05, 6
    world = quadratic(A, b, (10,) * 4, steps=steps, lr=lr, momentum=momentum, active=3)
    played = Run(FedDyn(alpha=alpha), world=world)
    theta, server = played.state.params.clone(), torch.zeros(3).double()
    dual = torch.zeros(4, 3).double()
    for t in range(6):
        ends = []
        for i in played.cohort(t).tolist():
            y, velocity = theta.clone(), torch.zeros_like(theta)
            for _ in range(steps):
                velocity = momentum * velocity + (A[i] @ y - b[i]) - dual[i] + alpha * (y - theta)
                y = y - lr * velocity
            dual[i] = dual[i] - alpha * (y - theta)
            ends.append(y)
        y = torch.stack(ends)
        server = server - alpha / 4 * (y - theta).sum(0)
        theta = y.mean(0) - server / alpha
        played.round()
        assert distance(played.state.params, theta) < 1e-12
        assert distance(-alpha * remembered(played), dual) < 1e-12
        assert distance(-alpha * played.state.extra["h"], server) < 1e-12


@WEIGHTS
@MOMENTA
def test_card6_first_round_is_fedprox_with_alpha_i(weights: str, momentum: float) -> None:
    A, b = bowls()
    world = quadratic(A, b, SIZES, steps=8, momentum=momentum)
    played = Run(FedDyn(alpha=0.2, weights=weights), world=world)
    played.round()
    for i in range(4):
        near = Run(FedProx(mu=0.2 / float(W[i] if weights == "examples" else 1)), world=world)
        near.round(torch.tensor([i]))
        assert distance(played.replies().trained[i], near.replies().trained[0]) < 1e-12


def test_card6_first_round_goes_twice_as_far() -> None:
    """Everyone active: theta + 2 mean(y_i - theta), uniformly whatever the sizes. Three of four: 1 + 3/4 as far."""
    A, b = bowls()
    for active, factor in ((4, 2.0), (3, 1.75)):
        played = Run(FedDyn(), world=quadratic(A, b, SIZES, steps=8, active=active))
        theta = played.state.params
        played.round()
        drift = (played.replies().trained - theta).mean(0)
        assert distance(played.state.params, theta + factor * drift) < 1e-12


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_card6_server_state_is_the_mean_over_all_clients(engine: str) -> None:
    """After every round, at any participation; whoever never took part counts with h_i = 0."""
    played = Run(FedDyn(alpha=0.1), engine)
    for active in (4, 1, 2, 6):
        played.active = active
        played.round()
        h = remembered(played)
        assert distance(played.state.extra["h"], h.mean(0)) < 1e-12
        mean = played.replies().params.mean(0)
        assert distance(played.state.params, mean + h.mean(0)) < 1e-12
        assert played.engine.notes["correction"] == pytest.approx(float((played.state.params - mean).norm()))


def test_card6_state_is_the_sum_of_a_clients_displacements() -> None:
    played = Run(FedDyn(alpha=0.1))
    sums = torch.zeros_like(remembered(played))
    for t in range(4):
        start = played.state.params
        played.round()
        sums[played.cohort(t)] += played.replies().trained - start
        assert distance(remembered(played), sums) < 1e-12


def test_card6_invariant_survives_a_client_that_is_left_out() -> None:
    """With client.nonfinite = skip, who did not answer counts neither for m nor for the sum."""
    A, b = bowls()
    A[1] *= 1e6
    played = Run(FedDyn(alpha=0.1), world=quadratic(A, b, SIZES, steps=80), nonfinite="skip")
    theta = played.state.params
    played.round(torch.tensor([0, 1, 3]))
    assert played.engine.notes["skipped"] == [1]
    drift = remembered(played)
    assert drift[1].abs().max() == 0
    assert distance(played.state.params, theta + drift.sum(0) / 2 + drift.sum(0) / 4) < 1e-9


def test_card6_momentum_carries_the_pull() -> None:
    """The pull is part of the gradient, so the optimum is found with momentum as well."""
    A, b = bowls()
    world = quadratic(A, b, SIZES, steps=5, lr=0.05, momentum=0.9)
    assert distance(run(FedDyn(alpha=1.0), rounds=50, world=world)[0].params, optimum(A, b, SIZES)) < 1e-8


def test_card6_the_smallest_clients_pull_is_bounded() -> None:
    """w_i is at least `smallest`: alpha_i of 1 example among 400 would be a hundred times alpha."""
    A, b = bowls()
    sizes = (1, 99, 100, 200)
    world = quadratic(A, b, sizes, steps=5, lr=0.3)
    free, bounded = (Run(FedDyn(alpha=1.0, smallest=smallest), world=world) for smallest in (0.0, 0.5))
    free.round()
    bounded.round()
    assert distance(free.tasks("local")[0].own["w"], torch.tensor(sizes).double() / 100) < 1e-12
    assert bounded.tasks("local")[0].own["w"].tolist() == [0.5, 0.99, 1.0, 2.0]
    assert torch.equal(free.replies().trained[1:], bounded.replies().trained[1:])
    near = Run(FedProx(mu=2.0), world=world)
    near.round(torch.tensor([0]))
    assert distance(bounded.replies().trained[0], near.replies().trained[0]) < 1e-12
    bounded.rounds(40)
    assert distance(bounded.state.params, optimum(A, b, [0.5, 0.99, 1.0, 2.0])) < 1e-5


def test_card6_buffers_are_averaged_and_not_corrected() -> None:
    """mean y + h would make running variances negative; they are the cohort's average by examples."""
    played = Run(FedDyn(alpha=0.1))
    for _ in range(4):
        played.round()
        got = played.replies()
        share = got.examples.double() / got.examples.sum()
        for name in ("norm.running_mean", "norm.running_var"):
            assert distance(played.state.buffers[name], share @ got.buffers[name]) < 1e-12
    assert (played.state.buffers["norm.running_var"] > 0).all()


def test_card6_adam_is_allowed() -> None:
    """Nothing is divided by the steps taken."""
    played = Run(FedDyn(), training=Training(optimizer="adam", lr=0.01, batch=16, epochs=1))
    assert played.rounds(3).params.isfinite().all()


@pytest.mark.parametrize("alpha", [0.0, -0.1])
def test_card6_alpha_must_be_positive(alpha: float) -> None:
    with pytest.raises(ConfigError, match="algorithm.alpha = .* it must be a number > 0"):
        fnrfl.run("digits", out=None, algorithm={"name": "feddyn", "alpha": alpha})


@pytest.mark.parametrize("keys", [{"weights": "size"}, {"smallest": -1.0}, {"beta": 1.0}])
def test_card6_bad_options_are_named(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{next(iter(keys))}"):
        fnrfl.run("digits", out=None, algorithm={"name": "feddyn", **keys})


def test_card6_sends_one_number_beside_the_model() -> None:
    played = Run(FedDyn())
    played.round()
    model = 4 * (played.net.size + 32) + 8  # BatchNorm of 16, with its counter
    assert played.metered.bytes["local"]["down"] == 4 * model
    assert played.metered.bytes["local"]["up"] == 4 * model


# -- with FNR ---------------------------------------------------------------------------------------------------------


class Nudged(Decorator):
    """Refinement as the server sees it: every client hands over y_i + r_i."""

    def __init__(self, engine: Any, by: Tensor) -> None:
        super().__init__(engine)
        self.by = by  # [N, P]

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        for replies in self.engine.stream(cohort, task):
            yield replace(replies, refined=replies.params + self.by[replies.clients])


def refinement(b: Tensor) -> Tensor:
    """r_i of two clients, [N, d]."""
    return 0.1 * b * torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)[:, None]


@pytest.mark.parametrize("alpha", [1.0, 0.1, 0.01])
def test_card6_fnr_fixed_point_is_where_alpha_says(alpha: float) -> None:
    """h_i from y_i, the average of z_i: nothing moves where sum_i pi_i grad f_i = alpha * mean(r).

    For small alpha that is the private optimum, and refinement is undone.
    """
    A, b = bowls()
    r = refinement(b)
    end = torch.linalg.solve(torch.einsum("n,nij->ij", W / 4, A), (W / 4) @ b + alpha * r.mean(0))
    h = -W[:, None] / alpha * gradients(A, b, end)
    played = Run(FedDyn(alpha=alpha), world=quadratic(A, b, SIZES, steps=5))
    played.metered.engine = Nudged(played.recorder, r)
    for i in range(4):
        played.engine.memory.put(i, {"h": h[i]})
    played.state = State(end, {}, {"h": h.mean(0)})
    assert distance(h.mean(0), -r.mean(0)) < 1e-12
    played.rounds(3)
    assert distance(played.state.params, end) < 1e-12
    assert distance(remembered(played), h) < 1e-10
    off = distance(end, optimum(A, b, SIZES))
    assert 0.05 * alpha < off < alpha


def test_card6_fnr_rounds_end_there() -> None:
    """From anywhere else, and h_i stays the private gradient all the while."""
    A, b = bowls()
    r = refinement(b)
    played = Run(FedDyn(alpha=1.5), world=quadratic(A, b, SIZES, steps=5, lr=0.3))
    played.metered.engine = Nudged(played.recorder, r)
    played.rounds(45)
    assert distance((W / 4) @ gradients(A, b, played.state.params), 1.5 * r.mean(0)) < 1e-6
    assert distance(-1.5 / W[:, None] * remembered(played), gradients(A, b, played.replies().trained)) < 1e-6


def test_card6_fnr_averages_refined_models_and_adds_private_drift() -> None:
    """theta+ = mean z_i + mean h, h_i from y_i."""
    played = Run(FNR(FedDyn(alpha=0.1)))
    for t in range(3):
        before, start = remembered(played), played.state.params
        played.round()
        cohort, y, z = played.cohort(t), played.replies().trained, played.replies().trained.clone()
        refined = played.replies("refine")
        z[torch.searchsorted(cohort, refined.clients)] = refined.params
        assert distance(y, z) > 1e-3
        h = before.index_add(0, cohort, y - start)
        assert distance(remembered(played), h) < 1e-12
        assert distance(played.state.params, z.mean(0) + h.mean(0)) < 1e-12


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        Dynamic.correct,
        pull_sign=(
            "grad + self.alpha / own['w'] * (params - start + own['h'])",
            "grad - self.alpha / own['w'] * (params - start + own['h'])",
        ),
        pull_without_state=("params - start + own['h']", "params - start"),
        pull_without_prox=("params - start + own['h']", "own['h']"),
        pull_state_sign=("params - start + own['h']", "params - start - own['h']"),
        alpha_not_scaled=("self.alpha / own['w']", "self.alpha"),
        alpha_scaled_up=("self.alpha / own['w']", "self.alpha * own['w']"),
    ),
    *mutants(
        Dynamic.finish,
        state_sign=("own['h'] + (end.params - start.params)", "own['h'] - (end.params - start.params)"),
        state_forgets=("own['h'] + (end.params - start.params)", "end.params - start.params"),
    ),
    *mutants(
        FedDyn.round,
        weights_swapped=("self.weights == 'examples'", "self.weights != 'examples'"),
        weights_not_mean_one=("everybody.mean", "everybody.sum"),
        weights_of_other_clients=(
            "w.clamp(min=self.smallest).to(x.dtype)[cohort]",
            "w.clamp(min=self.smallest).to(x.dtype)[:len(cohort)]",
        ),
        no_smallest=("w.clamp(min=self.smallest)", "w"),
        models_by_examples=("uniform=True", "uniform=False"),
        average_forgets_refinement=("r.params - x", "r.trained - x"),
        state_from_refined=("r.trained - x", "r.params - x"),
        state_of_the_cohort=("len(everybody)", "len(cohort)"),
        server_state_sign=("state.extra[k] + change / len(everybody)", "state.extra[k] - change / len(everybody)"),
        server_state_forgets=("state.extra[k] + change / len(everybody)", "change / len(everybody)"),
        no_state_in_the_step=("x + got.mean['moved'] + kept['h']", "x + got.mean['moved']"),
        old_state_in_the_step=("x + got.mean['moved'] + kept['h']", "x + got.mean['moved'] + state.extra['h']"),
        step_sign=("x + got.mean['moved']", "x - got.mean['moved']"),
        note_of_the_old_state=("kept['h'].norm", "state.extra['h'].norm"),
    ),
]
