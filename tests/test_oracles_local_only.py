"""Local-only, the lower bound: every client trains as if there were nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.local_only import GoingOn, Keeping, LocalOnly
from fnrfl.core.types import State
from mutants import mutants
from toys import NUM_CLASSES, Run, assert_near, assert_same, bowls, distance, quadratic

ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])


def used(played: Run, client: int) -> State:
    """The model that a client uses."""
    return played.algorithm.personal(played.net, played.state, client, played.engine.memory.get(client))


@ENGINES
def test_a_client_trains_as_if_it_were_alone(engine: str) -> None:
    """FedAvg of one client is ordinary training; batches are addressed by client and round, whoever else is there."""
    played = Run(LocalOnly(), engine)
    played.rounds(3)
    for client in range(6):
        alone = Run(FedAvg())
        for t in range(3):
            if client in played.cohort(t):
                alone.t = t
                alone.round(torch.tensor([client]))
        assert_near(used(played, client), State(alone.state.params, alone.state.buffers))


def test_on_a_quadratic_it_descends_its_own_loss() -> None:
    """w_i <- w_i - lr (A_i w_i - b_i), and the end is each client's own optimum, not the pooled one."""
    A, b = bowls()
    played = Run(LocalOnly(), world=quadratic(A, b, (10, 20, 30, 40), lr=0.3, steps=2))
    w = played.state.params.expand(4, -1)
    for _ in range(3):
        played.round()
        for _ in range(2):
            w = w - 0.3 * ((A @ w[..., None])[..., 0] - b)
        assert distance(torch.stack([used(played, i).params for i in range(4)]), w) < 1e-12
    played.rounds(60)
    best = torch.linalg.solve(A, b)
    assert distance(torch.stack([used(played, i).params for i in range(4)]), best) < 1e-7


@ENGINES
def test_nothing_crosses(engine: str) -> None:
    played = Run(LocalOnly(), engine)
    for _ in range(2):
        played.round()
        assert all(count["up"] == count["down"] == 0 for count in played.metered.bytes.values())


def test_the_server_learns_nothing() -> None:
    played = Run(LocalOnly())
    birth = played.state
    assert_same(played.rounds(3), birth)
    assert played.state.extra == {}


def test_who_does_not_take_part_stays_as_it_is() -> None:
    played = Run(LocalOnly())
    played.round(torch.tensor([1, 4]))
    assert list(played.engine.memory) == [1, 4]
    assert_same(used(played, 0), State(*played.net.flatten()))
    before = used(played, 4)
    played.round(torch.tensor([1]))
    assert_same(used(played, 4), before)


def test_who_is_lost_stays_as_it_was() -> None:
    played, sound = Run(LocalOnly()), Run(LocalOnly())
    everybody = torch.arange(6)
    played.round(everybody)
    sound.round(everybody)
    before = [used(sound, client) for client in range(6)]
    played.engine.options = replace(played.engine.options, dropout=0.5)
    played.round(everybody)
    sound.round(everybody)
    lost = played.engine.notes["dropped"]
    assert len(lost) == 3
    for client in range(6):
        assert_same(used(played, client), before[client] if client in lost else used(sound, client))


def held(played: Run, client: int) -> Tensor:
    return played.engine.clients.held_models.get(client)["model"]


@ENGINES
def test_with_fnr_the_refined_model_persists(engine: str) -> None:
    """Who was refined keeps that, the others what they trained, and the next round goes on from there."""
    played, bare = Run(FNR(LocalOnly()), engine), Run(LocalOnly(), engine)
    played.round()
    bare.round()
    refined = played.engine.notes["refined"]
    assert len(refined) == 2
    for client in played.cohort(0).tolist():
        assert torch.equal(used(played, client).params, held(played, client))
        moved = distance(used(played, client).params, used(bare, client).params)
        assert moved > 1e-4 if client in refined else moved == 0
    start = used(played, refined[0])
    played.round(torch.tensor([refined[0]]))  # a cohort of one refines nobody
    alone = Run(FedAvg())
    alone.t, alone.state = 1, start
    alone.round(torch.tensor([refined[0]]))
    assert distance(used(played, refined[0]).params, alone.state.params) < 1e-12


def test_with_fnr_only_answers_and_targets_cross() -> None:
    played = Run(FNR(LocalOnly()))
    played.round()
    up = sum(count["up"] for count in played.metered.bytes.values())
    down = sum(count["down"] for count in played.metered.bytes.values())
    assert up == 4 * 4 * (NUM_CLASSES + 1)
    assert down == 2 * 4 * NUM_CLASSES


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        GoingOn.begin,
        always_from_the_start=('State.unpacked("model", own)', "start"),
        foreign_buffers=('State.unpacked("model", own)', 'State(own["model"], start.buffers)'),
    ),
    *mutants(
        Keeping.finish,
        forgets_the_model=("end.packed('model')", "{}"),
        forgets_the_buffers=("end.packed('model')", "{'model': end.params}"),
    ),
    *mutants(
        LocalOnly.round,
        models_uploaded=(
            "LocalTask(GoingOn(), 'local', send_model=False, hold_model=True)",
            "LocalTask(GoingOn(), 'local', send_model=True, hold_model=True)",
        ),
        not_held=("hold_model=True", ""),
        lost_clients_keep_too=("engine.fold(got.clients, ..., mean=nothing)", "engine.fold(cohort, ..., mean=nothing)"),
    ),
    *mutants(
        LocalOnly.personal,
        the_servers_model_is_used=("State.unpacked('model', memory)", "state"),
    ),
]
