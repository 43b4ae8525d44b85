"""Card 14, FedAvgM, FedAdagrad, FedAdam and FedYogi: what must come out, known without running a federation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fnrfl
from fnrfl.algorithms._optimised import Adaptive, Optimised, _check_inner
from fnrfl.algorithms.fedadagrad import FedAdagrad
from fnrfl.algorithms.fedadam import FedAdam
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fedavgm import FedAvgM
from fnrfl.algorithms.fedbn import FedBN
from fnrfl.algorithms.fednova import FedNova
from fnrfl.algorithms.fedprox import FedProx
from fnrfl.algorithms.fedyogi import FedYogi
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.moon import Moon
from fnrfl.algorithms.parts.optimisers import Apart, adaptive, average, correction, momentum, yogi
from fnrfl.algorithms.scaffold import Scaffold
from fnrfl.core.algorithm import Algorithm, MethodWrapper
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.types import State
from mutants import mutants
from toys import Run, World, assert_near, assert_same, bowls, classification, distance, quadratic

SIZES = (10, 20, 30, 40)
P = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
NEUTRAL: dict[str, Any] = {"beta": 0.0, "server_lr": 1.0}
FAMILY = pytest.mark.parametrize("cls", [FedAvgM, FedAdagrad, FedAdam, FedYogi])
ADAPTIVE = pytest.mark.parametrize("cls", [FedAdagrad, FedAdam, FedYogi])
ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])


def world() -> World:
    A, b = bowls()
    return quadratic(A, b, SIZES, steps=3, lr=0.1, active=3)


def displacement(state: State, t: int) -> Tensor:
    """D at a model in round t, from FedAvg: the mean of the clients' displacements."""
    plain = Run(FedAvg(), world=world())
    plain.state, plain.t = State(state.params, state.buffers), t
    return plain.round().params - state.params


# -- the equations ----------------------------------------------------------------------------------------------------


@ENGINES
def test_card14_no_momentum_and_a_full_step_are_fedavg_bit_for_bit(engine: str) -> None:
    momentum, bare = Run(FedAvgM(**NEUTRAL), engine), Run(FedAvg(), engine)
    for _ in range(4):
        assert_same(momentum.round(), bare.round())


def test_card14_no_momentum_and_a_full_step_are_fedavg_in_single_precision() -> None:
    """Where x + (y - x) is often not y."""
    small = classification(torch.float32)
    assert_same(Run(FedAvgM(**NEUTRAL), world=small).rounds(4), Run(FedAvg(), world=small).rounds(4))


def test_card14_momentum_under_a_constant_displacement() -> None:
    """Linear losses, everybody active: server_lr D sum_{t <= T} (1 - beta^t) / (1 - beta), D = -lr K sum_i p_i b_i."""
    _, b = bowls()
    linear = quadratic(torch.zeros(4, 3, 3).double(), -b, SIZES, steps=3, lr=0.1)
    played = Run(FedAvgM(server_lr=0.5, beta=0.8), world=linear)
    x, D = played.state.params, -0.1 * 3 * P @ b
    for T in range(1, 7):
        grown = sum((1 - 0.8**t) / (1 - 0.8) for t in range(1, T + 1))
        assert distance(played.round().params, x + 0.5 * grown * D) < 1e-12


def test_card14_adam_without_memory_steps_by_the_sign() -> None:
    played = Run(FedAdam(server_lr=0.1, beta1=0.0, beta2=0.0, tau=0.0), world=world())
    for t in range(3):
        before = played.state
        D = displacement(before, t)
        assert D.abs().min() > 1e-6
        assert distance(played.round().params, before.params + 0.1 * D.sign()) < 1e-12


@pytest.mark.parametrize("v0", ["zero", "tau"])
def test_card14_the_first_round_of_adagrad(v0: Any) -> None:
    """From v = 0 it is server_lr D / (|D| + tau); from tau^2, server_lr D / (sqrt(tau^2 + D^2) + tau)."""
    played = Run(FedAdagrad(server_lr=0.2, tau=0.05, v0=v0), world=world())
    x, D = played.state.params, displacement(played.state, 0)
    root = D.abs() if v0 == "zero" else (0.05**2 + D**2).sqrt()
    assert distance(played.round().params, x + 0.2 * D / (root + 0.05)) < 1e-12


def test_card14_yogi_begins_like_adam_and_goes_its_own_way() -> None:
    """From v = 0 the first rounds are the same; then Adam forgets and Yogi adds."""
    adam, yogi = (Run(cls(v0="zero", server_lr=0.1), world=world()) for cls in (FedAdam, FedYogi))
    assert_same(adam.round(), yogi.round())
    adam.round()
    yogi.round()
    assert distance(adam.state.extra["server.v"], yogi.state.extra["server.v"]) > 1e-6


def test_card14_yogi_stays_put_where_v_is_the_square() -> None:
    """sign(0) = 0."""
    square = torch.tensor([0.25, 0.25, 0.25]).double()
    new = FedYogi(beta2=0.9).second(torch.tensor([0.25, 1.0, 0.04], dtype=torch.float64), square)
    assert distance(new, torch.tensor([0.25, 1.0 - 0.025, 0.04 + 0.025], dtype=torch.float64)) < 1e-15


SECOND: dict[type[Optimised], Callable[[float, float, float], float]] = {
    FedAdagrad: lambda v, d, b: v + d * d,
    FedAdam: lambda v, d, b: b * v + (1 - b) * d * d,
    FedYogi: lambda v, d, b: v - (1 - b) * d * d * math.copysign(1.0, v - d * d),
}


@ADAPTIVE
@pytest.mark.parametrize("v0", ["tau", "zero"])
@pytest.mark.parametrize("correction", [False, True])
def test_card14_every_round_is_the_formula_number_by_number(cls: type[Adaptive], v0: Any, correction: bool) -> None:
    """One float at a time, with its own moments; rounds are counted from 1 where the bias is corrected."""
    options: dict[str, Any] = {"server_lr": 0.3, "beta1": 0.7, "tau": 0.02, "v0": v0}
    if cls is FedAdagrad:
        if correction:
            pytest.skip("its sum has no bias to correct")
    else:
        options |= {"beta2": 0.8, "correction": correction}
    played = Run(cls(**options), world=world())
    m, v = [0.0] * 3, [0.02**2 if v0 == "tau" else 0.0] * 3
    for t in range(5):
        x, D = played.state.params.tolist(), displacement(played.state, t).tolist()
        lr = 0.3 * (math.sqrt(1 - 0.8 ** (t + 1)) / (1 - 0.7 ** (t + 1)) if correction else 1.0)
        for k in range(3):
            m[k] = 0.7 * m[k] + 0.3 * D[k]
            v[k] = SECOND[cls](v[k], D[k], 0.8)
            x[k] += lr * m[k] / (math.sqrt(v[k]) + 0.02)
        played.round()
        assert distance(played.state.params, torch.tensor(x, dtype=torch.float64)) < 1e-12
        assert distance(played.state.extra["server.m"], torch.tensor(m, dtype=torch.float64)) < 1e-12
        assert distance(played.state.extra["server.v"], torch.tensor(v, dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize(
    ("method", "torchs"),
    [
        (FedAvgM(server_lr=0.7, beta=0.6), lambda x: torch.optim.SGD([x], lr=0.7, momentum=0.6)),
        (
            FedAdam(server_lr=0.2, beta1=0.8, beta2=0.95, tau=1e-30, v0="zero", correction=True),
            lambda x: torch.optim.Adam([x], lr=0.2, betas=(0.8, 0.95), eps=1e-30),
        ),
    ],
    ids=["fedavgm", "fedadam"],
)
def test_card14_torch_takes_the_same_steps_with_minus_d_as_gradient(
    method: Optimised, torchs: Callable[[Tensor], torch.optim.Optimizer]
) -> None:
    played = Run(method, world=world())
    x = played.state.params.clone().requires_grad_()
    optimiser = torchs(x)
    for t in range(4):
        x.grad = -displacement(played.state, t)
        optimiser.step()
        assert distance(played.round().params, x.detach()) < 1e-12


@ADAPTIVE
def test_card14_the_second_moment_is_never_negative(cls: type[Adaptive]) -> None:
    """Displacements of every size in turn, from a v of zero, where a wrong sign would show."""
    method, v = cls(v0="zero"), torch.zeros(50).double()
    for size in (1.0, 1e-3, 0.1, 1e-6, 10.0, 0.0, 0.3):
        v = method.second(v, (size * torch.linspace(-1, 1, 50).double()).square())
        assert (v >= 0).all()
    assert v.max() > 0
    played = Run(cls())
    for _ in range(4):
        assert (played.round().extra["server.v"] >= 0).all()


@FAMILY
def test_card14_buffers_are_fedavgs(cls: type[Optimised]) -> None:
    """Averaged, never through the optimiser: the first round is that of FedAvg, later variances stay positive."""
    played, bare = Run(cls()), Run(FedAvg())
    played.round()
    bare.round()
    assert all(torch.equal(played.state.buffers[k], v) for k, v in bare.state.buffers.items())
    assert (played.rounds(4).buffers["norm.running_var"] > 0).all()


@FAMILY
def test_card14_what_does_not_move_stays(cls: type[Optimised]) -> None:
    """D = 0, as for a layer that nobody uses: no step, and no 0 / 0."""
    still = replace(classification().training, lr=0.0)
    played = Run(cls(), training=still)
    before = played.state.params
    assert torch.equal(played.rounds(2).params, before)


@FAMILY
def test_card14_clients_do_as_without_it(cls: type[Optimised]) -> None:
    """The task, the bytes and the trained models of a first round are FedAvg's."""
    played, bare = Run(cls()), Run(FedAvg())
    played.round()
    bare.round()
    assert torch.equal(played.replies().trained, bare.replies().trained)
    assert played.metered.bytes == bare.metered.bytes


# -- around any method ------------------------------------------------------------------------------------------------

INNER = pytest.mark.parametrize(
    "inner", [FedAvg(), FedProx(), Scaffold(), FedNova(), Moon()], ids=lambda m: type(m).__name__.lower()
)


@INNER
def test_card14_a_step_of_d_is_the_inner_method_bit_for_bit(inner: Algorithm) -> None:
    """Its state and what its clients remember included."""
    wrapped, bare = Run(FedAvgM(inner=type(inner).__name__.lower(), **NEUTRAL)), Run(inner)
    for _ in range(3):
        assert_same(wrapped.round(), bare.round())
    assert bare.state.extra.keys() <= wrapped.state.extra.keys()
    for client in range(6):
        mine, theirs = wrapped.engine.memory.get(client), bare.engine.memory.get(client)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in theirs)


@INNER
def test_card14_under_fnr_a_step_of_d_is_the_inner_method(inner: Algorithm) -> None:
    """Bit for bit where the step sees refinement; to rounding where it is added afterwards. So both coincide."""
    name = type(inner).__name__.lower()
    bare = Run(FNR(inner)).rounds(3)
    assert_same(Run(FNR(FedAvgM(inner=name, refinement="inside", **NEUTRAL))).rounds(3), bare)
    assert_near(Run(FNR(FedAvgM(inner=name, **NEUTRAL))).rounds(3), bare, atol=1e-11)


def test_card14_the_gradient_is_the_inner_methods_displacement() -> None:
    """FedNova's, where steps differ, and not FedAvg's."""
    adam, nova, bare = (Run(m) for m in (FedAdam(inner="fednova"), FedNova(), FedAvg()))
    x = adam.state.params
    D, other = nova.round().params - x, bare.round().params - x
    assert distance(adam.round().extra["server.m"], 0.1 * D) < 1e-12
    assert distance(D, other) > 1e-4


@FAMILY
def test_card14_it_asks_for_what_the_inner_method_needs(cls: type[Optimised]) -> None:
    assert cls().needs == {"uses-trained"}
    assert cls(refinement="inside").needs == frozenset()
    assert cls(inner="fednova", refinement="inside").needs == FedNova().needs
    assert cls(inner="moon").needs == {"features", "uses-trained"}
    assert not cls().personalised


def test_card14_clients_with_models_of_their_own_keep_them() -> None:
    wrapped, bare = Run(FedAvgM(inner="fedbn", **NEUTRAL)), Run(FedBN())
    wrapped.rounds(2)
    bare.rounds(2)
    assert wrapped.algorithm.personalised
    for client in range(6):
        mine, theirs = (
            run.algorithm.personal(run.net, run.state, client, run.engine.memory.get(client)) for run in (wrapped, bare)
        )
        assert_same(mine, theirs)


# -- under FNR --------------------------------------------------------------------------------------------------------


@FAMILY
def test_card14_refinement_is_added_as_it_is(cls: type[Optimised]) -> None:
    """Outside: after a round the model is that of the bare method plus sum_i p_i r_i, which FedAvg tells."""
    r = Run(FNR(FedAvg())).round().params - Run(FedAvg()).round().params
    assert r.abs().max() > 1e-3
    bare, fnr = Run(cls()), Run(FNR(cls()))
    bare.round()
    fnr.round()
    assert distance(fnr.state.params, bare.state.params + r) < 1e-12
    assert all(torch.equal(fnr.state.extra[k], v) for k, v in bare.state.extra.items())


def test_card14_momentum_keeps_past_refinements_only_where_it_sees_them() -> None:
    """What it holds after a round, beyond that of the bare method: nothing outside, the refinement inside."""
    bare = Run(FedAvgM())
    bare.round()
    for refinement, holds in (("outside", False), ("inside", True)):
        played = Run(FNR(FedAvgM(refinement=refinement)))  # type: ignore[arg-type]
        played.round()
        assert (distance(played.state.extra["server.m"], bare.state.extra["server.m"]) > 1e-3) is holds


@FAMILY
def test_card14_inside_the_step_sees_refined_models(cls: type[Optimised]) -> None:
    """D = sum_i p_i (z_i - x), from FedAvg under FNR."""
    played, bare = Run(FNR(cls(refinement="inside"))), Run(FNR(FedAvg()))
    x = played.state.params
    D = bare.round().params - x
    step, memory = played.algorithm.inner.step(D, played.state.extra, 1)
    played.round()
    assert distance(played.state.params, x + step) < 1e-12
    assert all(distance(played.state.extra[k], v) < 1e-12 for k, v in memory.items())


def test_card14_chunks_are_weighted_by_examples() -> None:
    """The mean of the refinement, gathered one client at a time."""
    assert_near(Run(FNR(FedAdam()), clients_at_once=1).rounds(2), Run(FNR(FedAdam())).rounds(2), atol=1e-12)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        ("fedavgg", "is not a method"),
        ("_optimised", "is not a method"),
        ("fedadam", "goes around a method itself"),
        ("fedyogi", "goes around a method itself"),
        ("fnr", "goes around a method itself"),
    ],
)
def test_card14_an_inner_method_that_cannot_be_is_refused(inner: str, reason: str) -> None:
    with pytest.raises(CompatibilityError, match=reason) as caught:
        FedAdam(inner=inner)
    assert "fedavg, " in str(caught.value)
    assert "scaffold" in str(caught.value)
    assert "fedyogi," not in str(caught.value)
    with pytest.raises(CompatibilityError, match=reason):
        fnrfl.run("digits", out=None, algorithm={"name": "fedadam", "inner": inner})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("fedavgm", "beta", 1.0),
        ("fedavgm", "server_lr", 0.0),
        ("fedadam", "tau", 0.0),
        ("fedadam", "beta2", -0.1),
        ("fedyogi", "beta1", 1.5),
        ("fedadagrad", "correction", True),
        ("fedadagrad", "v0", "one"),
    ],
)
def test_card14_options_out_of_range_are_refused(name: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        fnrfl.run("digits", out=None, algorithm={"name": name, key: value})


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        momentum,
        momentum_forgotten=("beta * m", "0.0 * m"),
        momentum_damped=("beta * m + D", "beta * m + (1 - beta) * D"),
    ),
    *mutants(
        average,
        average_weights_swapped=("beta * m + (1 - beta) * D", "(1 - beta) * m + beta * D"),
        average_not_damped=("(1 - beta) * D", "D"),
    ),
    *mutants(
        yogi,
        yogi_sign=("v - square", "square - v"),
        yogi_without_sign=("(1 - beta) * square * (v - square).sign()", "(1 - beta) * square"),
        yogi_weight_swapped=("1 - beta", "beta"),
    ),
    *mutants(
        adaptive,
        adaptive_without_root=("v.sqrt()", "v"),
        adaptive_tau_inside_the_root=("v.sqrt() + tau", "(v + tau).sqrt()"),
    ),
    *mutants(
        correction,
        correction_swapped=(
            "math.sqrt(1 - beta2 ** t) / (1 - beta1 ** t)",
            "(1 - beta1 ** t) / math.sqrt(1 - beta2 ** t)",
        ),
        correction_without_root=("math.sqrt(1 - beta2 ** t)", "1 - beta2 ** t"),
        correction_betas_swapped=(
            "math.sqrt(1 - beta2 ** t) / (1 - beta1 ** t)",
            "math.sqrt(1 - beta1 ** t) / (1 - beta2 ** t)",
        ),
    ),
    *mutants(
        Apart.stream,
        refinement_weighted_uniformly=("replies.examples", "0 * replies.examples + 1"),
        refinement_sign=("replies.params - replies.trained", "replies.trained - replies.params"),
        refinement_twice=("replies = replace(replies, refined=None)", "pass"),
    ),
    *mutants(
        Optimised.round,
        step_sign=("step - D", "-step - D"),
        displacement_twice=("step - D", "step"),
        refinement_lost=("new.params + (step - D) + apart.refinement", "new.params + (step - D)"),
        refinement_always_inside=("apart if self.refinement == 'outside' else engine", "engine"),
        refinement_always_outside=("apart if self.refinement == 'outside' else engine", "apart"),
        rounds_counted_from_zero=("engine.round + 1", "engine.round"),
        buffers_not_renewed=("State(..., new.buffers, ...)", "State(..., state.buffers, ...)"),
        inner_state_lost=("new.extra | memory", "state.extra | memory"),
    ),
    *mutants(
        Adaptive.memory,
        v_starts_at_tau=("self.tau ** 2", "self.tau"),
        v_always_starts_at_zero=("self.v0 == 'tau'", "False"),
    ),
    *mutants(
        Adaptive.step,
        moments_swapped=("memory['server.v']", "memory['server.m']"),
        not_squared=("D.square()", "D"),
        rate_forgotten=("self.rate(t) * optimisers.adaptive(m, v, self.tau)", "optimisers.adaptive(m, v, self.tau)"),
    ),
    *mutants(
        Optimised,
        needs_of_the_inner_method_forgotten=(
            "self.method.needs | (... if self.refinement == 'outside' else ...)",
            "frozenset(... if self.refinement == 'outside' else ...)",
        ),
        uses_trained_unsaid=("{'uses-trained'} if self.refinement == 'outside' else ...", "..."),
        inner_method_ignored=("_class(name)", "_class('fedavg')"),
    ),
    *mutants(
        _check_inner,
        wrappers_allowed=("not issubclass(_class(name), MethodWrapper)", "True"),
    ),
    *mutants(
        MethodWrapper.client_state,
        client_memory_of_the_inner_method_forgotten=("self.method.client_state(net)", "{}"),
    ),
    *mutants(
        MethodWrapper.personal,
        own_models_forgotten=("self.method.personal(net, state, client, memory)", "state"),
    ),
    *mutants(
        FedAvgM.step,
        rate_forgotten=("self.server_lr * m", "m"),
        momentum_not_remembered=("{'server.m': m}", "{}"),
    ),
    *mutants(
        FedAdagrad.second,
        forgets=("v + square", "square"),
        sign=("v + square", "v - square"),
    ),
    *mutants(
        FedAdam.second,
        wrong_beta=("optimisers.average(v, square, self.beta2)", "optimisers.average(v, square, self.beta1)"),
    ),
    *mutants(
        FedAdam.rate,
        always_corrected=("self.correction", "True"),
        never_corrected=("self.correction", "False"),
    ),
    *mutants(
        FedYogi.second,
        is_adam=("optimisers.yogi", "optimisers.average"),
    ),
]
