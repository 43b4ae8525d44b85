"""Card 5, FedNova: what must come out, known without running a federation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fednova import FedNova
from fnrfl.core import optim
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.types import State, Training
from mutants import mutants
from toys import Run, World, assert_near, bowls, classification, distance, optimum, quadratic, run

SIZES, STEPS = (10, 25, 70, 200), (1, 3, 7, 20)  # in batches of ten
P = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])
MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.9])


def effective_steps(steps: int, momentum: float) -> float:
    """|a|: the closed form."""
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@MOMENTA
@ENGINES
def test_card5_equal_steps_are_fedavg(engine: str, momentum: float) -> None:
    """To rounding: directions are divided by |a| and multiplied again."""
    A, b = bowls()
    world = quadratic(A, b, SIZES, steps=5, lr=0.1, momentum=momentum, active=3)
    assert_near(run(FedNova(), engine, 4, world=world)[0], run(FedAvg(), engine, 4, world=world)[0])


def test_card5_equal_steps_are_fedavg_on_a_net() -> None:
    training = Training(epochs=3, batch=1000, lr=0.05, last_batch="keep")
    assert_near(run(FedNova(), rounds=3, training=training)[0], run(FedAvg(), rounds=3, training=training)[0])


@MOMENTA
@ENGINES
def test_card5_linear_losses_weigh_every_gradient_by_its_share(engine: str, momentum: float) -> None:
    """f_i = b_i.y, unequal steps: x - lr tau_eff sum_i p_i b_i, where FedAvg weighs by steps as well."""
    _, b = bowls()
    lr = 0.01
    world = quadratic(torch.zeros(4, 3, 3).double(), -b, SIZES, batch=10, lr=lr, momentum=momentum)
    nova, bare = Run(FedNova(), engine, world=world), Run(FedAvg(), engine, world=world)
    x = nova.state.params
    nova.round()
    bare.round()
    assert nova.replies().steps.tolist() == list(STEPS)
    a = torch.tensor([effective_steps(K, momentum) for K in STEPS], dtype=torch.float64)
    assert distance(nova.state.params, x - lr * (P @ a) * (P @ b)) < 1e-10
    assert distance(bare.state.params, x - lr * (P * a) @ b) < 1e-10
    assert distance(nova.state.params, bare.state.params) > 0.01


@MOMENTA
@pytest.mark.parametrize("steps", [1, 2, 20])
def test_card5_travel_is_the_closed_form(steps: int, momentum: float) -> None:
    """The recursion, as the engines report it in `travel` = lr |a|."""
    A, b = bowls(1)
    played = Run(FedNova(), world=quadratic(A, b, (10,), steps=steps, lr=0.05, momentum=momentum))
    played.round()
    assert float(played.replies().travel[0]) == pytest.approx(0.05 * effective_steps(steps, momentum), abs=1e-12)


def test_card5_travel_of_twenty_steps() -> None:
    """120.9419 for K = 20 and momentum 0.9, a number from the card."""
    training, params = Training(lr=1.0, momentum=0.9), torch.zeros(1).double()
    memory = optim.new_memory(training, params)
    for _ in range(20):
        optim.update(training, 1.0, params, torch.ones(1).double(), memory)
    travel = optim.travel(training, 20)
    assert travel == pytest.approx(120.9419, abs=5e-5)
    assert travel == pytest.approx(float(-params), abs=1e-10)  # with gradients of one, it is the displacement


def fixed_point(algorithm: Algorithm, world: World) -> Tensor:
    """Where rounds lead to: on quadratics a round is affine in x, so it is known from its values at d + 1 points."""
    played = Run(algorithm, world=world)
    points = torch.cat([torch.zeros(1, 3), torch.eye(3)]).double()
    images = []
    for x in points:
        played.state = State(x, {})
        images.append(played.round().params)
    shift, linear = images[0], torch.stack(images[1:], 1) - images[0][:, None]
    return torch.linalg.solve(torch.eye(3).double() - linear, shift)


def test_card5_error_falls_with_the_learning_rate_where_fedavg_stays_off() -> None:
    """Unequal steps on unlike quadratics: FedNova's fixed point is O(lr) from the pooled optimum, FedAvg's is not."""
    A, b = bowls()
    best = optimum(A, b, SIZES)
    worlds = [quadratic(A, b, SIZES, batch=10, lr=lr) for lr in (0.05, 0.005, 0.0005)]
    nova = [distance(fixed_point(FedNova(), w), best) for w in worlds]
    bare = [distance(fixed_point(FedAvg(), w), best) for w in worlds]
    assert nova[0] > 0.01  # there is an error to fall
    assert nova[0] / nova[1] == pytest.approx(10, rel=0.3)
    assert nova[1] / nova[2] == pytest.approx(10, rel=0.1)
    assert min(bare) > 0.3


def test_card5_fixed_points_are_where_rounds_end() -> None:
    """Of the instrument of the test above."""
    A, b = bowls()
    world = quadratic(A, b, SIZES, batch=10, lr=0.05)
    for method in (FedNova(), FedAvg()):
        assert distance(run(method, rounds=40, world=world)[0].params, fixed_point(method, world)) < 1e-6


@MOMENTA
def test_card5_one_participant_keeps_its_model(momentum: float) -> None:
    A, b = bowls()
    played = Run(FedNova(), world=quadratic(A, b, SIZES, batch=10, momentum=momentum))
    played.round(torch.tensor([2]))
    assert distance(played.state.params, played.replies().trained[0]) < 1e-12


def test_card5_shares_are_renormalised_over_the_cohort() -> None:
    """Linear losses again, two of four active."""
    _, b = bowls()
    played = Run(FedNova(), world=quadratic(torch.zeros(4, 3, 3).double(), -b, SIZES, batch=10, lr=0.01))
    x, some = played.state.params, [1, 3]
    played.round(torch.tensor(some))
    p = P[some] / P[some].sum()
    a = torch.tensor([float(STEPS[i]) for i in some], dtype=torch.float64)
    assert distance(played.state.params, x - 0.01 * (p @ a) * (p @ b[some])) < 1e-10


def test_card5_buffers_are_plainly_averaged() -> None:
    """Normalised weights extrapolate: on these replies they would make a running variance negative."""
    training = replace(classification().training, batch=2, epochs=1, lr=0.001)
    nova, bare = Run(FedNova(), training=training), Run(FedAvg(), training=training)
    before, some = nova.state.buffers["norm.running_var"], torch.tensor([0, 5])  # 20 and 97 examples
    nova.round(some)
    bare.round(some)
    replies = nova.replies()
    p, a = replies.examples.double() / replies.examples.sum(), replies.travel
    assert (before + (p @ a) * (p / a) @ (replies.buffers["norm.running_var"] - before)).min() < 0
    assert all(torch.equal(nova.state.buffers[k], v) for k, v in bare.state.buffers.items())
    for _ in range(4):
        assert (nova.round().buffers["norm.running_var"] > 0).all()


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        FedNova.round,
        also="tests/test_oracles_fnr.py",
        not_normalised=("(r.trained - state.params) / r.travel[:, None]", "r.trained - state.params"),
        normalised_by_steps=("r.travel[:, None]", "r.steps[:, None]"),
        effective_steps_uniform=("got.weigh(got.travel)", "got.travel.mean()"),
        effective_steps_of_counts=("got.weigh(got.travel)", "got.weigh(got.steps.to(got.travel.dtype))"),
        sign=("state.params + effective * got.mean['direction']", "state.params - effective * got.mean['direction']"),
        direction_from_refined=("r.trained - state.params", "r.params - state.params"),
        refinement_dropped=(
            "state.params + effective * got.mean['direction'] + got.mean['refinement']",
            "state.params + effective * got.mean['direction']",
        ),
    ),
]
