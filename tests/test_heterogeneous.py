"""Slow and lost clients: who they are, what they do, and what nobody else may notice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fnrfl
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fednova import FedNova
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.moon import Moon
from fnrfl.algorithms.scaffold import Scaffold
from fnrfl.config import load
from fnrfl.core import optim
from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.errors import ClientError, ConfigError
from fnrfl.core.types import LocalTask, State
from fnrfl.data.batches import Pool
from fnrfl.rundir import checkpoint, record
from fnrfl.runs import forecast as plan
from fnrfl.runs import run as runs
from settings import with_keys
from toys import Run, assert_near, assert_same, bowls, classification, distance, named, quadratic

ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])
METHODS = pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold(), FNR(Moon()), FNR(FedNova())], ids=named)
EPOCHS = 5
LONG = replace(classification().training, epochs=EPOCHS, last_batch="keep", batch=15)
EVERYONE = torch.arange(6)
pytestmark = pytest.mark.xdist_group("heterogeneous")  # by one worker: the tests share runs


def ragged(algorithm: Algorithm, engine: str = "loop", **options: Any) -> Run:
    """Five epochs, half of the cohort slow and a third of it lost, unless told otherwise."""
    return Run(algorithm, engine, **{"training": LONG, "active": 6, "stragglers": 0.5, "dropout": 0.34} | options)


@cache
def played(algorithm: Algorithm, engine: str = "loop") -> tuple[Run, list[State], list[dict[str, Any]]]:
    """Four rounds of that, with the states and the notes of each round; several tests look at them."""
    run, states, said = ragged(algorithm, engine), [], []
    for _ in range(4):
        states.append(run.round())
        said.append(dict(run.engine.notes))
    return run, states, said


def hit(run: Run) -> tuple[Any, Any]:
    """(who was slow, who was lost) in the last round."""
    return run.engine.notes.get("stragglers"), run.engine.notes.get("dropped")


# -- who --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.16, 0), (0.17, 1), (0.5, 3), (0.99, 5)])
@pytest.mark.parametrize(("key", "name"), [("stragglers", "stragglers"), ("dropout", "dropped")])
def test_the_floor_of_the_share_is_hit(key: str, name: str, share: float, count: int) -> None:
    run = ragged(FedAvg(), **{"stragglers": 0.0, "dropout": 0.0, key: share})
    run.round()
    said = run.engine.notes.get(name, [])
    assert len(said) == len(set(said)) == count
    assert set(said) <= set(range(6)) and said == sorted(said)


@pytest.mark.parametrize("tenths", range(10))
def test_tenths_of_ten_are_exact_although_floats_are_not(tenths: int) -> None:
    assert len(Run(FedAvg()).engine.drawn_clients(torch.arange(10), tenths / 10, "stragglers")) == tenths


def test_who_is_hit_changes_from_round_to_round_and_with_the_seed() -> None:
    one, other = (
        [(run.round(), hit(run))[1] for _ in range(4)] for run in (ragged(FedAvg()), ragged(FedAvg(), seed=8))
    )
    for which in (0, 1):
        assert len({tuple(who[which]) for who in one}) > 1
    assert one != other
    assert any(not set(lost) <= set(slow) for slow, lost in one), "two draws, not one"


@ENGINES
@METHODS
def test_everybody_meets_the_same_clients(algorithm: Algorithm, engine: str) -> None:
    for mine, theirs in zip(played(algorithm, engine)[2], played(FedAvg())[2], strict=True):
        assert (mine["stragglers"], mine["dropped"]) == (theirs["stragglers"], theirs["dropped"])


def test_the_cohort_decides_and_not_its_order_or_its_chunks() -> None:
    """And a slow client is as slow in any of them."""
    some = torch.tensor([5, 0, 3, 4])
    runs = [ragged(FedAvg()), ragged(FedAvg()), ragged(FedAvg(), clients_at_once=1, threads=2)]
    for run, cohort in zip(runs, (some, some.flip(0), some), strict=True):
        run.round(cohort)
        assert hit(run) == hit(runs[0]) and epochs_done(run) == epochs_done(runs[0])
        assert_near(run.state, runs[0].state)
    assert set(hit(runs[0])[0]) <= set(some.tolist())


@METHODS
def test_a_share_of_nothing_is_the_ordinary_run(algorithm: Algorithm) -> None:
    none, bare = ragged(algorithm, stragglers=0.0, dropout=0.0), Run(algorithm, training=LONG, active=6)
    assert_same(none.rounds(2), bare.rounds(2))
    assert none.metered.bytes == bare.metered.bytes
    assert "stragglers" not in none.engine.notes and "dropped" not in none.engine.notes


# -- slow clients -----------------------------------------------------------------------------------------------------


def epochs_done(run: Run) -> dict[int, int]:
    """The epochs that each client took, from its steps."""
    replies = run.replies()
    whole = -(-run.engine.examples[replies.clients] // LONG.batch)
    epochs = replies.steps / whole
    assert torch.equal(epochs, epochs.round())
    return dict(zip(replies.clients.tolist(), epochs.int().tolist(), strict=True))


@ENGINES
def test_a_straggler_takes_one_to_all_but_one_epochs(engine: str) -> None:
    run = ragged(FedAvg(), engine, stragglers=0.99, dropout=0.0)
    seen: set[int] = set()
    for _ in range(8):
        run.round()
        done = epochs_done(run)
        slow = run.engine.notes["stragglers"]
        assert all(done[client] == EPOCHS for client in done if client not in slow)
        seen |= {done[client] for client in slow}
    assert seen == set(range(1, EPOCHS))


def test_a_straggler_stops_early_and_does_nothing_else() -> None:
    """Its model is the one that ordinary training of so many epochs ends in."""
    slow = ragged(FedAvg(), stragglers=0.99, dropout=0.0)
    slow.round()
    done = epochs_done(slow)
    for client, row in zip(slow.replies().clients.tolist(), slow.replies().params, strict=True):
        plain = Run(FedAvg(), training=replace(LONG, epochs=done[client]), active=6)
        plain.round(torch.tensor([client]))
        assert distance(plain.replies().params[0], row) < 1e-12


def test_with_one_epoch_everybody_does_all_of_it() -> None:
    once = replace(LONG, epochs=1)
    slow, bare = ragged(FedAvg(), training=once, dropout=0.0), Run(FedAvg(), training=once, active=6)
    assert_same(slow.rounds(2), bare.rounds(2))
    assert len(slow.engine.notes["stragglers"]) == 3


@ENGINES
def test_refinement_is_never_cut_short(engine: str) -> None:
    """Only private training is: all refined clients take the same steps on public data."""
    run = ragged(FNR(FedAvg(), epochs=3), engine, stragglers=0.99, dropout=0.0)
    run.round()
    assert len(set(run.replies("refine").steps.tolist())) == 1
    assert len(run.engine.notes["refined"]) == 3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@ENGINES
def test_fednova_divides_by_the_steps_that_were_taken(engine: str, momentum: float) -> None:
    """Linear losses: whatever part a straggler did, its gradient counts by its share of the examples."""
    _, b = bowls()
    lr, sizes = 0.01, (10, 25, 70, 200)
    world = quadratic(torch.zeros(4, 3, 3).double(), -b, sizes, batch=10, lr=lr, momentum=momentum, steps=6)
    nova = Run(FedNova(), engine, world=world, stragglers=0.75)
    bare = Run(FedAvg(), engine, world=world, stragglers=0.75)
    x = nova.state.params
    nova.round()
    bare.round()
    replies = nova.replies()
    assert len(nova.engine.notes["stragglers"]) == 3
    assert replies.steps.tolist() != [6 * n for n in (1, 3, 7, 20)]
    travel = [optim.travel(nova.engine.training, steps) for steps in replies.steps.tolist()]
    assert replies.travel.tolist() == travel
    p, t = (torch.tensor(v, dtype=torch.float64) for v in (sizes, travel))
    p = p / p.sum()
    assert distance(nova.state.params, x - (p @ t) * (p @ b)) < 1e-10
    assert distance(bare.state.params, x - (p * t) @ b) < 1e-10
    assert distance(nova.state.params, bare.state.params) > 1e-3


# -- lost clients -----------------------------------------------------------------------------------------------------


@ENGINES
def test_lost_replies_do_not_enter_the_average(engine: str) -> None:
    """As if the others had been the cohort."""
    lossy = ragged(FedAvg(), engine, stragglers=0.0)
    lossy.round(EVERYONE)
    lost = lossy.engine.notes["dropped"]
    there = torch.tensor([c for c in range(6) if c not in lost])
    assert len(lost) == 2 and lossy.replies().clients.tolist() == there.tolist()
    whole = Run(FedAvg(), engine, training=LONG)
    whole.round(there)
    assert_near(lossy.state, whole.state)


@ENGINES
@METHODS
def test_a_lost_client_that_diverges_does_not_fail_the_round(algorithm: Algorithm, engine: str) -> None:
    """It is as if it had not been asked, whatever would have come of it."""
    sound = ragged(algorithm, engine, stragglers=0.0)
    sound.round(EVERYONE)
    lost = sound.engine.notes["dropped"]
    pool = sound.world.pool
    x, y = pool.all("private")
    x[pool.shards[lost[0]]] = torch.nan
    parts = {k: pool.all(k) for k in ("public", "ranking")} | {"private": (x, y)}
    broken = replace(sound.world, pool=Pool(parts, pool.shards, pool.num_classes, dtype=torch.float64))
    run = ragged(algorithm, engine, world=broken, stragglers=0.0, nonfinite="fail")
    run.round(EVERYONE)
    assert run.engine.notes["dropped"] == lost and "skipped" not in run.engine.notes
    assert_same(run.state, sound.state)
    with pytest.raises(ClientError, match=f"client {lost[0]}, round 1, .*no longer finite"):
        ragged(algorithm, engine, world=broken, stragglers=0.0, dropout=0.0, nonfinite="fail").round(EVERYONE)


@ENGINES
@pytest.mark.parametrize("algorithm", [Scaffold(), Moon(), FNR(Scaffold())], ids=named)
def test_a_lost_client_remembers_what_it_did(algorithm: Algorithm, engine: str) -> None:
    run = ragged(algorithm, engine)
    run.round()
    for _ in range(3):
        before = [run.engine.memory.get(client) for client in range(6)]
        copies = [{k: v.clone() for k, v in mine.items()} for mine in before]
        run.round()
        lost = run.engine.notes["dropped"]
        assert len(lost) == 2
        for client in range(6):
            now = run.engine.memory.get(client)
            same = all(torch.equal(now[k], v) for k, v in copies[client].items())
            assert same == (client in lost)


def test_scaffolds_server_variate_stays_the_mean_of_the_clients() -> None:
    """The invariant of the method, whoever is slow or lost."""
    run = ragged(Scaffold())
    run.rounds(4)
    c = torch.stack([run.engine.memory.get(client)["c"] for client in range(6)])
    share = run.engine.examples / run.engine.examples.sum()
    assert distance(run.state.extra["c"], share @ c) < 1e-10


@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold()], ids=named)
def test_bytes_down_are_counted_and_bytes_up_are_not(algorithm: Algorithm) -> None:
    lossy, whole = ragged(algorithm), ragged(algorithm, dropout=0.0, stragglers=0.0)
    lossy.round()
    whole.round()
    mine, all_of_it = lossy.metered.bytes["local"], whole.metered.bytes["local"]
    assert mine["down"] == all_of_it["down"]
    assert 6 * mine["up"] == 4 * all_of_it["up"] > 0


def test_lost_clients_are_neither_measured_nor_refined() -> None:
    run = ragged(FNR(FedAvg()))
    for _ in range(3):
        run.round()
        said = run.engine.notes
        assert len(said["dropped"]) == 2
        for what in ("norms", "ranking"):
            assert [c for c, value in enumerate(said[what]) if value is None] == said["dropped"]
        assert len(said["refined"]) == 2, "half of those that are there"
        assert not set(said["refined"]) & set(said["dropped"])
        assert list(run.engine.clients.held_models) == [c for c in range(6) if c not in said["dropped"]]


@ENGINES
def test_fnr_goes_on_when_too_few_are_left_to_refine_anybody(engine: str) -> None:
    """Half of two is one; with one of them lost, half of one is nobody."""
    run = ragged(FNR(FedAvg()), engine, stragglers=0.0, dropout=0.5)
    bare = ragged(FedAvg(), engine, stragglers=0.0, dropout=0.5)
    some = torch.tensor([1, 4])
    run.round(some)
    bare.round(some)
    assert run.engine.notes.get("refined", []) == []
    assert_near(run.state, bare.state)


def test_somebody_always_answers() -> None:
    """The share is below one, so the floor leaves one at least, for a cohort of one too."""
    for share in (0.5, 0.99, 1 - 1e-12):
        run = ragged(FedAvg(), stragglers=0.0, dropout=share)
        run.round(torch.tensor([3]))
        assert "dropped" not in run.engine.notes
        run.round(EVERYONE)
        assert len(run.replies().clients) >= 1


def test_the_server_itself_is_never_slow_or_lost() -> None:
    run, plain = ragged(FedAvg(), stragglers=0.99, dropout=0.99), Run(FedAvg(), training=LONG)
    task = LocalTask(Objective(), "local", run.state, data="public", training=replace(LONG, epochs=4))
    assert_same(run.engine.fit(task), plain.engine.fit(task))


# -- runs -------------------------------------------------------------------------------------------------------------


@METHODS
def test_engines_agree(algorithm: Algorithm) -> None:
    loop, other = played(algorithm)[0], played(algorithm, "batched")[0]
    assert_near(loop.state, other.state, atol=1e-9)
    for client in range(6):
        mine, theirs = loop.engine.memory.get(client), other.engine.memory.get(client)
        assert all(distance(mine[k], theirs[k]) < 1e-9 for k in mine)


@METHODS
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_resumed_run_is_bit_identical(algorithm: Algorithm, engine: str, tmp_path: Path) -> None:
    whole, first, second = played(algorithm, engine)[0], ragged(algorithm, engine), ragged(algorithm, engine)
    first.rounds(2)
    checkpoint.save_checkpoint(tmp_path, 2, first.state, first.engine.memory, config="config", log="log")
    found = record.read_index(tmp_path)
    assert found is not None
    second.t, second.state = found.round, checkpoint.load_checkpoint(tmp_path, found, second.engine.memory)
    assert_same(whole.state, second.rounds(2))
    assert whole.engine.notes == second.engine.notes


def client(**keys: Any) -> dict[str, Any]:
    return {"rounds": 2, "clients": 6, "out": None, "client": {"epochs": 3, "lr": 0.05, "batch": 32} | keys}


def test_events_name_them_and_a_share_of_nothing_says_nothing() -> None:
    plain = fnrfl.run("digits", **client())
    none = fnrfl.run("digits", **client(stragglers=0.0, dropout=0.0))
    assert plain.model_sha256 == none.model_sha256
    assert all("stragglers" not in event and "dropped" not in event for event in plain.rounds)
    found = fnrfl.run("digits", **client(stragglers=0.5, dropout=0.34), fnr="on")
    for event, whole in zip(found.rounds, plain.rounds, strict=True):
        assert len(event["stragglers"]) == 3 and len(event["dropped"]) == 2
        assert event["bytes"]["local"]["down"] == whole["bytes"]["local"]["down"]
    assert found.model_sha256 != plain.model_sha256


def test_a_dry_run_counts_everybody_whole() -> None:
    """An upper bound of steps and bytes up; bytes down are exact."""
    config = load("digits", ["rounds=2", "client.epochs=3", "client.stragglers=0.5", "client.dropout=0.3", "fnr=off"])
    forecast = plan.forecast(config)
    whole = plan.forecast(with_keys(config, ["client.stragglers=0.0", "client.dropout=0.0"]))
    assert forecast.steps == whole.steps
    assert forecast.sent == whole.sent
    result = runs.run(config, out=None)
    for t, event in enumerate(result.rounds):
        assert event["bytes_down"] == forecast.sent[t]["down"]
        assert event["bytes_up"] < forecast.sent[t]["up"]


@pytest.mark.parametrize("key", ["client.stragglers", "client.dropout"])
@pytest.mark.parametrize("value", ["1", "1.0", "-0.1", "nan", "some"])
def test_shares_are_from_zero_to_below_one(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} = .*>= 0 and < 1"):
        load("digits", [f"{key}={value}"])
