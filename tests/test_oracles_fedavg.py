"""Card 1, FedAvg: what must come out, known without running a federation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.core.rng import generator, seeded
from fnrfl.core.types import State, Training
from fnrfl.data.batches import Pool, plan
from mutants import mutants
from toys import Plain, Run, World, assert_near, bowls, classification, distance, optimum, quadratic, run

SIZES = (10, 20, 30, 40)


class NoDropout(nn.Module):
    """With BatchNorm, whose statistics must be those of ordinary training too."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.head = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.hidden(x)).relu())
        return logits


def centralised(world: World, client: int, training: Training, rounds: int, seed: int) -> nn.Module:
    """Plain torch: the client's batches in the client's order, with a new optimiser every `training.epochs` epochs."""
    with seeded(1, "init"):
        module = world.module()
    module.train()
    shard = world.pool.shards[client]
    for t in range(rounds):
        options = {"lr": training.lr, "weight_decay": training.weight_decay}
        optimiser: torch.optim.Optimizer
        if training.optimizer == "adam":
            optimiser = torch.optim.Adam(module.parameters(), **options)
        else:
            optimiser = torch.optim.SGD(module.parameters(), momentum=training.momentum, **options)
        for positions in plan(
            len(shard),
            training,
            lambda name, t=t: generator(seed, t, client, "local", name),
        ).batches:
            x, y = world.pool.take("private", shard[positions])
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimiser.step()
    return module


@pytest.mark.parametrize(
    "training",
    [
        Training(epochs=3, batch=16, lr=0.05, momentum=0.9, weight_decay=1e-2),
        Training(epochs=3, batch=20, lr=0.05, momentum=0.0, weight_decay=0.0, last_batch="keep"),
        Training(epochs=3, batch=16, lr=0.01, weight_decay=1e-2, optimizer="adam"),
    ],
    ids=["sgd-momentum-decay", "sgd-plain", "adam"],
)
def test_card1_one_participant_is_centralised_training_with_optimiser_reset(training: Training) -> None:
    """To rounding, not bit for bit: the server adds the displacement, and x + (y - x) need not be y in the last bit."""
    world = classification(module=NoDropout)
    played = Run(FedAvg(), world=world, training=training)
    for _ in range(3):
        played.round(torch.tensor([5]))
    alone = centralised(world, 5, training, rounds=3, seed=played.seed)
    want = State(torch.cat([p.detach().flatten() for p in alone.parameters()]), dict(alone.named_buffers()))
    assert_near(played.state, want)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_card1_one_step_full_batch_is_gradient_descent(engine: str) -> None:
    """One step on all of one's examples, weighted by how many they are, is one step on the pooled mean loss."""
    world = classification(module=Plain)
    lr = 0.3
    training = Training(epochs=1, batch=1000, lr=lr, momentum=0.9, weight_decay=0.0, last_batch="keep")
    played = Run(FedAvg(), engine, world=world, training=training)
    with seeded(1, "init"):
        module = world.module()
    for t in range(3):
        pooled = torch.cat([world.pool.shards[i] for i in played.cohort(t).tolist()])
        x, y = world.pool.take("private", pooled)
        gradient = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), list(module.parameters()))
        with torch.no_grad():
            for p, g in zip(module.parameters(), gradient, strict=True):
                p -= lr * g
        played.round()
        want = torch.cat([p.detach().flatten() for p in module.parameters()])
        assert distance(played.state.params, want) < 1e-12


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_card1_zero_learning_rate_leaves_the_model_exactly(engine: str) -> None:
    """Weights are applied to displacements, so sizes whose shares do not sum to one in floats cannot matter."""
    played = Run(FedAvg(), engine, training=replace(classification().training, lr=0.0))
    before = played.state.params.clone()
    assert torch.equal(played.rounds(3).params, before)


def test_card1_identical_participants_average_to_either() -> None:
    A, b = bowls(2)
    twins = quadratic(A[:1].expand(2, -1, -1), b[:1].expand(2, -1), (12, 12), steps=2, batch=5, lr=0.2)
    x, y = twins.pool.take("private", torch.arange(12))
    x[:, -3:] += torch.randn(12, 3, generator=generator(0, "examples"), dtype=torch.float64)  # batches matter
    pool = Pool({"private": (x.repeat(2, 1), y.repeat(2))}, torch.arange(24).split(12), 3, dtype=torch.float64)
    training = replace(twins.training, shuffle=False, momentum=0.9)  # the streams differ by client, so none are used
    played = Run(FedAvg(), world=replace(twins, pool=pool, training=training))
    played.round()
    one, other = played.replies().params
    assert distance(one, other) < 1e-14
    assert distance(played.state.params, one) < 1e-14
    assert played.replies().steps.tolist() == [6, 6]


def test_card1_the_order_of_participants_does_not_matter() -> None:
    there, back = Run(FedAvg()), Run(FedAvg())
    for t in range(3):
        there.round()
        back.round(back.cohort(t).flip(0))
    assert_near(there.state, back.state)


def test_card1_names_of_participants_do_not_matter() -> None:
    A, b = bowls()
    order = [2, 0, 3, 1]
    played = run(FedAvg(), rounds=3, world=quadratic(A, b, SIZES, steps=5))[0]
    renamed = run(FedAvg(), rounds=3, world=quadratic(A[order], b[order], [SIZES[i] for i in order], steps=5))[0]
    assert_near(played, renamed)


def test_card1_weights_are_shares_of_the_cohort_and_buffers_follow_them() -> None:
    """Renormalised over the active clients; integer buffers are never averaged."""
    played = Run(FedAvg())
    before = played.state
    after = played.round()
    replies = played.replies()
    n = torch.tensor([float(len(played.world.pool.shards[i])) for i in replies.clients.tolist()], dtype=torch.float64)
    p = n / n.sum()
    assert replies.clients.tolist() == played.cohort(0).tolist()
    assert distance(after.params, before.params + p @ (replies.params - before.params)) < 1e-12
    assert distance(after.buffers["norm.running_var"], p @ replies.buffers["norm.running_var"]) < 1e-12
    counters = replies.buffers["norm.num_batches_tracked"]
    assert len(set(counters.tolist())) > 1
    assert after.buffers["norm.num_batches_tracked"] == counters.max()
    assert after.buffers["norm.num_batches_tracked"].dtype == torch.int64


def test_card1_is_biased_on_unlike_quadratics() -> None:
    """Several local steps move the fixed point off the optimum: the worlds of these tests are really unlike."""
    A, b = bowls()
    best = optimum(A, b, SIZES)
    many = run(FedAvg(), rounds=40, world=quadratic(A, b, SIZES, steps=10))[0]
    once = run(FedAvg(), rounds=40, world=quadratic(A, b, SIZES, steps=1, lr=0.9))[0]
    assert distance(many.params, best) > 0.1
    assert distance(once.params, best) < 1e-9


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        FedAvg.round,
        also="tests/test_oracles_fnr.py",
        sign_of_the_step=("state.params + got.mean['moved']", "state.params - got.mean['moved']"),
        average_forgets_refinement=("r.params - state.params", "r.trained - state.params"),
        displacement_not_taken=("r.params - state.params", "r.params"),
    ),
]
