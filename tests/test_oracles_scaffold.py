"""Card 3, SCAFFOLD: what must come out, known without running a federation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.scaffold import AtStart, Controlled, Scaffold
from fnrfl.core.types import LocalTask, State, Training, Tree
from mutants import mutants
from toys import Run, assert_near, assert_same, bowls, classification, distance, optimum, quadratic, run

SIZES = (10, 20, 30, 40)
WEIGHTS = pytest.mark.parametrize("weights", ["examples", "uniform", "niid-bench"])
VARIATES = pytest.mark.parametrize("variates", ["I", "II"])


def shares(weights: str, sizes: tuple[int, ...] = SIZES) -> Tensor:
    """What the variates are weighed by: each client's part of all examples, or of all clients."""
    n = torch.tensor(sizes, dtype=torch.float64) if weights == "examples" else torch.ones(len(sizes)).double()
    return n / n.sum()


def remembered(played: Run) -> Tensor:
    """c_i of every client, [N, P]."""
    return torch.stack([played.engine.memory.get(i)["c"] for i in range(len(played.world.pool.shards))])


@VARIATES
@pytest.mark.parametrize("weights", ["examples", "uniform"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_card3_one_step_full_batch_is_gradient_descent(variates: str, weights: str, momentum: float) -> None:
    """(i): with everyone active the corrections cancel, in every round."""
    A, b = bowls()
    played = Run(Scaffold(variates=variates, weights=weights), world=quadratic(A, b, SIZES, lr=0.2, momentum=momentum))
    p, x = shares(weights), played.state.params.clone()
    for _ in range(8):
        gradients = A @ x - b  # [N, d]
        x = x - 0.2 * p @ gradients
        played.round()
        assert distance(played.state.params, x) < 1e-12
        assert distance(remembered(played), gradients) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_card3_option_II_is_the_mean_of_the_raw_gradients(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """(ii): a_k-weighted, with a_k how often the gradient of step k entered the displacement; 1 for plain SGD."""
    A, b = bowls()
    trails: list[list[Tensor]] = []  # raw gradients of each client, in cohort order
    correct = Controlled.correct

    def watched(self: Controlled, grad: Tensor, params: Tensor, start: Tensor, shared: Tree, own: Tree) -> Tensor:
        if torch.equal(params, start):
            trails.append([])
        trails[-1].append(grad)
        return correct(self, grad, params, start, shared, own)

    monkeypatch.setattr(Controlled, "correct", watched)
    world = quadratic(A, b, (10, 23, 31, 40), steps=2, batch=8, lr=0.05, momentum=momentum, active=3, spread=2.0)
    played = Run(Scaffold(), world=world)
    for t in range(4):
        trails.clear()
        played.round()
        longest_first = sorted(played.cohort(t).tolist(), key=lambda c: -len(world.pool.shards[c]))
        for client, raw in zip(longest_first, trails, strict=True):
            K = len(raw)
            a = torch.tensor([sum(momentum**j for j in range(K - k)) for k in range(K)], dtype=torch.float64)
            want = (a / a.sum()) @ torch.stack(raw)
            assert distance(played.engine.memory.get(client)["c"], want) < 1e-12


def test_card3_option_I_is_the_gradient_of_all_examples_at_the_model_received() -> None:
    """Not of a batch, not after training; weight decay is part of it. Ragged batches must not change it."""
    A, b = bowls()
    world = quadratic(A, b, (10, 23, 31, 40), steps=2, batch=8, lr=0.05, active=3, spread=2.0)
    played = Run(Scaffold(variates="I"), world=world, training=replace(world.training, weight_decay=0.1))
    for t in range(3):
        x = played.state.params
        played.round()
        for i in played.cohort(t).tolist():
            assert distance(played.engine.memory.get(i)["c"], A[i] @ x - b[i] + 0.1 * x) < 1e-12


@VARIATES
@WEIGHTS
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_card3_server_variate_is_the_mean_of_the_clients(variates: str, weights: str, engine: str) -> None:
    """(iii): after every round, at any participation, clients that never took part included."""
    played = Run(Scaffold(variates=variates, weights=weights), engine)
    p = shares(weights, tuple(len(s) for s in played.world.pool.shards))
    for active in (4, 1, 2, 6):
        played.active = active
        played.round()
        assert distance(played.state.extra["c"], p @ remembered(played)) < 1e-12


@VARIATES
@WEIGHTS
def test_card3_invariant_survives_a_client_that_is_left_out(variates: str, weights: str) -> None:
    """(iii) with client.nonfinite = skip: who did not answer must not count for the server's variate either.

    Client 1 is so steep that it diverges within its steps, though its gradient at the server model is finite.
    """
    A, b = bowls()
    A[1] *= 1e6
    world = quadratic(A, b, SIZES, steps=80)
    played = Run(Scaffold(variates=variates, weights=weights), world=world, nonfinite="skip")
    played.round(torch.tensor([0, 1, 3]))
    assert played.engine.notes["skipped"] == [1]
    assert distance(played.state.extra["c"], shares(weights) @ remembered(played)) < 1e-9


@VARIATES
@WEIGHTS
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_card3_optimum_is_a_fixed_point(variates: str, weights: str, momentum: float) -> None:
    """(iv): at x*, with c_i the gradients there and c = 0, any number of steps goes nowhere, whoever is active."""
    A, b = bowls()
    played = Run(
        Scaffold(variates=variates, weights=weights),
        world=quadratic(A, b, SIZES, steps=7, momentum=momentum, active=2),
    )
    best = optimum(A, b, shares(weights).tolist())
    for i in range(4):
        played.engine.memory.put(i, {"c": A[i] @ best - b[i]})
    played.state = State(best, {}, {"c": torch.zeros(3, dtype=torch.float64)})
    played.rounds(3)
    assert distance(played.state.params, best) < 1e-12
    assert played.state.extra["c"].abs().max() < 1e-12


@VARIATES
@WEIGHTS
def test_card3_finds_the_optimum_where_fedavg_does_not(variates: str, weights: str) -> None:
    """(v): ten local steps, two of four active; variates by examples find the pooled optimum, even ones the unweighted.

    So do those of NIID-Bench, whose models are weighed by examples.
    """
    A, b = bowls()
    pooled, unweighted = optimum(A, b, SIZES), optimum(A, b, [1.0] * 4)
    assert distance(pooled, unweighted) > 0.3
    world = quadratic(A, b, SIZES, steps=10, lr=0.08, active=2)
    found = run(Scaffold(variates=variates, weights=weights), rounds=60, world=world)[0]
    assert distance(found.params, pooled if weights == "examples" else unweighted) < 1e-8


def test_card3_fedavg_stays_off_in_the_same_world() -> None:
    """(v), the other half: even with everyone active."""
    A, b = bowls()
    bare = run(FedAvg(), rounds=30, world=quadratic(A, b, SIZES, steps=10, lr=0.08))[0]
    assert distance(bare.params, optimum(A, b, SIZES)) > 0.1
    assert distance(bare.params, optimum(A, b, [1.0] * 4)) > 0.1


@WEIGHTS
def test_card3_the_first_round_is_fedavg_if_models_are_weighed_by_examples(weights: str) -> None:
    """All variates are zero then; the paper's even weights make another model of the same clients'."""
    A, b = bowls()
    world = quadratic(A, b, SIZES, steps=3, momentum=0.9)
    controlled = Scaffold(weights=weights, correction="after-momentum")
    found, bare = (run(method, rounds=1, world=world)[0].params for method in (controlled, FedAvg()))
    assert (distance(found, bare) < 1e-12) is (weights != "uniform")


def test_card3_momentum_and_many_steps_do_not_diverge() -> None:
    """Dividing by K * lr would: |a| / K is 8.2 here, and above 2 deviations grow whatever the learning rate."""
    A, b = bowls()
    world = quadratic(A, b, SIZES, steps=50, lr=0.002, momentum=0.9)
    played = Run(Scaffold(), world=world)
    best = optimum(A, b, SIZES)
    began = distance(played.state.params, best)
    played.rounds(12)
    assert distance(played.state.params, best) < 0.01 * began


@WEIGHTS
@VARIATES
def test_card3_after_momentum_is_the_same_for_plain_sgd(variates: str, weights: str) -> None:
    """Without momentum a step of g - c_i + c is a step of g and one of c - c_i."""
    options = {"variates": variates, "weights": weights}
    training = replace(classification().training, momentum=0.0)
    inside, after = (
        Run(Scaffold(**options, correction=where), training=training) for where in ("gradient", "after-momentum")
    )
    for _ in range(3):
        assert_near(inside.round(), after.round(), atol=1e-12)


def test_card3_after_momentum_stays_bounded_and_ends_off_the_optimum() -> None:
    """c_i is the sum of a_k g_k over the number of steps: larger than a gradient, by a factor that does not grow."""
    A, b = bowls()
    best = optimum(A, b, SIZES)
    off = {}
    for lr, rounds in ((0.01, 60), (0.005, 120)):
        world = quadratic(A, b, SIZES, steps=10, lr=lr, momentum=0.9)
        played = Run(Scaffold(correction="after-momentum"), world=world)
        played.rounds(rounds)
        off[lr] = distance(played.state.params, best)
        gradients = A @ best - b
        assert remembered(played).abs().max() < 10 * gradients.abs().max()
        assert distance(shares("examples") @ remembered(played), played.state.extra["c"]) < 1e-12
    assert 0.02 < off[0.01] < 0.1
    assert off[0.01] / off[0.005] == pytest.approx(2, rel=0.2)  # of the order of the learning rate


@pytest.mark.parametrize("engine", ["batched", "loop-fast", "batched-fast"])
def test_card3_after_momentum_is_recorded_and_batched(engine: str) -> None:
    method = Scaffold(correction="after-momentum")
    assert_near(Run(method).rounds(3), Run(method, engine).rounds(3), atol=1e-10)
    assert distance(Run(method).rounds(2).params, Run(Scaffold()).rounds(2).params) > 1e-4


def test_card3_what_is_frozen_is_not_shifted() -> None:
    """Neither by the gradient nor after the momentum step."""
    played = Run(Scaffold(correction="after-momentum"))
    net, fixed = played.net, frozenset({"hidden.weight"})
    ones = torch.ones_like(played.state.params)
    training = replace(played.world.training, frozen=fixed)
    task = LocalTask(
        Controlled(True, after_momentum=True), "local", played.state, shared={"c": ones}, training=training
    )
    moved = played.engine.train(torch.tensor([0]), task).params[0] - played.state.params
    assert (moved[net.mask(fixed)] == 0).all()
    assert (moved[~net.mask(fixed)] != 0).all()


def test_card3_frozen_zero_variates_are_fedavg_bit_for_bit() -> None:
    """(vi)."""
    frozen, bare = Run(Scaffold()), Run(FedAvg())
    for _ in range(3):
        assert_same(frozen.round(), bare.round())
        assert frozen.state.extra["c"].abs().max() > 0
        frozen.state = State(frozen.state.params, frozen.state.buffers, {"c": torch.zeros_like(frozen.state.params)})
        frozen.engine.memory.clear()


@VARIATES
@WEIGHTS
def test_card3_alike_clients_are_fedavg(variates: str, weights: str) -> None:
    """(vii): the same loss everywhere, full batches: all c_i are equal and the corrections vanish."""
    A, b = bowls(1)
    world = quadratic(A.expand(4, -1, -1), b.expand(4, -1), SIZES, steps=6, lr=0.2, momentum=0.5)
    controlled, bare = Run(Scaffold(variates=variates, weights=weights), world=world), Run(FedAvg(), world=world)
    for _ in range(4):
        assert_near(controlled.round(), bare.round())
        c = remembered(controlled)
        assert distance(c, c[:1].expand(4, -1)) < 1e-12


def test_card3_the_server_rate_scales_the_displacement() -> None:
    A, b = bowls()
    world = quadratic(A, b, SIZES, steps=5)
    one, half = Run(Scaffold(), world=world), Run(Scaffold(server_lr=0.5), world=world)
    x = one.state.params
    assert distance(half.round().params, x + 0.5 * (one.round().params - x)) < 1e-12
    assert torch.equal(half.state.extra["c"], one.state.extra["c"])


@VARIATES
def test_card3_buffers_are_averaged_and_not_controlled(variates: str) -> None:
    """In the first round corrections are zero, so statistics must be FedAvg's; they stay positive afterwards."""
    played, bare = Run(Scaffold(variates=variates)), Run(FedAvg())
    played.round()
    bare.round()
    assert all(torch.equal(played.state.buffers[k], v) for k, v in bare.state.buffers.items())
    assert (played.rounds(4).buffers["norm.running_var"] > 0).all()


def test_card3_option_I_leaves_no_trace_of_its_extra_pass() -> None:
    """The pass at the server model must not move what was trained: BatchNorm and batches are those of option II."""
    training = Training(epochs=2, batch=16, lr=0.05, weight_decay=1e-3)
    first, second = (Run(Scaffold(variates=v), training=training, world=classification()) for v in ("I", "II"))
    first.round()
    second.round()
    assert torch.equal(first.state.params, second.state.params)
    assert all(torch.equal(first.state.buffers[k], v) for k, v in second.state.buffers.items())
    assert not torch.equal(first.state.extra["c"], second.state.extra["c"])


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        Controlled.correct,
        correction_signs=("grad - own['c'] + shared['c']", "grad + own['c'] - shared['c']"),
        no_client_variate=("grad - own['c']", "grad"),
        no_server_variate=("grad - own['c'] + shared['c']", "grad - own['c']"),
    ),
    *mutants(
        Controlled.finish,
        new_variate_sign=("start.params - end.params", "end.params - start.params"),
        new_variate_keeps_c=("own['c'] - shared['c']", "own['c']"),
        new_variate_forgets_ci=("own['c'] - shared['c']", "-shared['c']"),
        new_variate_without_travel=("(start.params - end.params) / travel", "start.params - end.params"),
        delta_sign=("new - own['c']", "own['c'] - new"),
    ),
    *mutants(
        AtStart.loss,
        whole_gradient_not_at_x=("model.start.params + (params - params.detach())", "params"),
        whole_gradient_unweighted=(
            "len(batch.y) * super().loss(model(here, batch.x), model, here, batch, shared, own)",
            "super().loss(model(here, batch.x), model, here, batch, shared, own)",
        ),
    ),
    *mutants(
        AtStart.finish,
        whole_gradient_not_averaged=("(start.params - end.params) / examples", "start.params - end.params"),
        whole_gradient_without_decay=(
            "(start.params - end.params) / examples + self.weight_decay * start.params",
            "(start.params - end.params) / examples",
        ),
    ),
    *mutants(
        Scaffold.round,
        also="tests/test_oracles_fnr.py",
        server_variate_of_the_cohort=(
            "new.examples.sum() / everybody.sum() * new.mean['delta_c']",
            "new.mean['delta_c']",
        ),
        even_variate_of_the_cohort=("new.total['delta_c'] / len(everybody)", "new.total['delta_c'] / len(new.clients)"),
        server_variate_sign=("state.extra['c'] + change", "state.extra['c'] - change"),
        weights_swapped=("self.weights == 'examples'", "self.weights != 'examples'"),
        no_server_rate=("self.server_lr * got.mean['moved']", "got.mean['moved']"),
        refinement_scaled=(
            "state.params + self.server_lr * got.mean['moved'] + got.mean['refinement']",
            "state.params + self.server_lr * (got.mean['moved'] + got.mean['refinement'])",
        ),
        refinement_dropped=(
            "state.params + self.server_lr * got.mean['moved'] + got.mean['refinement']",
            "state.params + self.server_lr * got.mean['moved']",
        ),
        always_by_examples=("self.weights == 'uniform'", "False"),
        models_as_variates=("self.weights == 'uniform'", "self.weights != 'examples'"),
    ),
]
