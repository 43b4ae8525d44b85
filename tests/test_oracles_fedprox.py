"""Card 2, FedProx: what must come out, known without running a federation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fedprox import FedProx, Proximal
from fnrfl.core.types import Training
from mutants import mutants
from toys import Run, assert_near, assert_same, bowls, classification, distance, quadratic, run

SIZES = (10, 20, 30, 40)
EYE = torch.eye(3, dtype=torch.float64)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_card2_mu_zero_is_fedavg_bit_for_bit(engine: str) -> None:
    assert_same(run(FedProx(mu=0.0), engine, rounds=3)[0], run(FedAvg(), engine, rounds=3)[0])


@pytest.mark.parametrize("mu", [0.01, 5.0])
def test_card2_one_step_is_fedavg_for_any_mu(mu: float) -> None:
    """There is no pull at the anchor itself; a wrong anchor would show here. Bit for bit."""
    training = replace(classification().training, epochs=1, batch=1000, last_batch="keep", momentum=0.9)
    assert_same(
        run(FedProx(mu=mu), rounds=3, training=training)[0],
        run(FedAvg(), rounds=3, training=training)[0],
    )


def test_card2_several_steps_depend_on_mu() -> None:
    """So that the two equalities above are not those of a term that is never used."""
    assert distance(run(FedProx(mu=1.0), rounds=1)[0].params, run(FedAvg(), rounds=1)[0].params) > 1e-4


def local_minimiser(mu: float, steps: int = 400, lr: float = 0.15) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, where client 0 ends after many small steps)."""
    A, b = bowls()
    played = Run(FedProx(mu=mu), world=quadratic(A, b, SIZES, steps=steps, lr=lr))
    x = played.state.params.clone()
    played.round(torch.tensor([0]))
    return x, played.replies().trained[0]


@pytest.mark.parametrize("mu", [0.0, 0.3, 2.0])
def test_card2_quadratic_has_the_closed_form(mu: float) -> None:
    """y -> (A + mu I)^-1 (b + mu x)."""
    A, b = bowls()
    x, y = local_minimiser(mu)
    assert distance(y, torch.linalg.solve(A[0] + mu * EYE, b[0] + mu * x)) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_card2_two_steps_by_hand(momentum: float) -> None:
    """y2 = x - lr g0 - lr (g1 - mu lr g0); the pull is inside the gradient, so momentum carries it."""
    A, b = bowls()
    mu, lr = 0.7, 0.1
    played = Run(FedProx(mu=mu), world=quadratic(A, b, SIZES, steps=2, lr=lr, momentum=momentum))
    x = played.state.params.clone()
    played.round(torch.tensor([2]))
    g0 = A[2] @ x - b[2]
    g1 = A[2] @ (x - lr * g0) - b[2]
    want = x - lr * g0 - lr * (momentum * g0 + g1 - mu * lr * g0)
    assert distance(played.replies().trained[0], want) < 1e-14


def test_card2_distance_to_the_anchor_falls_with_mu() -> None:
    lengths = []
    for mu in (0.0, 0.1, 1.0, 10.0):
        x, y = local_minimiser(mu)
        lengths.append(float((y - x).norm()))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[-1] > 0


def test_card2_buffers_are_not_pulled() -> None:
    """The penalty lives on trainable parameters: after one step statistics are those of FedAvg, for a huge mu too."""
    training = Training(epochs=1, batch=1000, last_batch="keep", lr=0.01)
    bare, pulled = (run(m, rounds=1, training=training)[0] for m in (FedAvg(), FedProx(mu=50.0)))
    assert_near(bare, pulled, atol=0.0)
    assert not torch.equal(bare.buffers["norm.running_mean"], torch.zeros(16, dtype=torch.float64))


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        Proximal.correct,
        sign_of_the_pull=("grad + self.mu * (params - start)", "grad - self.mu * (params - start)"),
        no_pull=("grad + self.mu * (params - start)", "grad"),
        half_the_pull=("self.mu * (params - start)", "0.5 * self.mu * (params - start)"),
        pull_to_zero=("params - start", "params"),
    ),
]
