"""What `fnr.watch` logs is what a plain loop over the clients' models finds, and no model, byte or step changes."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from fnrfl.algorithms.cfedfn import CFedFN
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR, Refining
from fnrfl.algorithms.ktpfl import KTpFL
from fnrfl.algorithms.parts.norms import ClassNorms
from fnrfl.algorithms.parts.watching import RefinementWatch, pair_cosines, pair_gaps
from fnrfl.algorithms.scaffold import Scaffold
from fnrfl.core.algorithm import Algorithm
from fnrfl.runs.metrics import training_seconds
from mutants import mutants
from settings import with_keys
from toys import NUM_CLASSES, Run, assert_same

INNERS: list[Algorithm] = [FedAvg(), Scaffold(), CFedFN(clusters=2)]


def watched(run: Run) -> list[dict[str, Any]]:
    return list(run.engine.notes["watched"])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b))


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("inner", INNERS, ids=lambda inner: type(inner).__name__)
@pytest.mark.parametrize("leak", [False, True])
def test_watching_changes_no_bit_no_byte_and_no_other_note(inner: Algorithm, engine: str, leak: bool) -> None:
    alone, seen = (Run(FNR(inner, watch=watch, norm_pass_train_mode=leak), engine, active=6) for watch in (False, True))
    for _ in range(3):
        assert_same(alone.round(), seen.round())
        assert alone.metered.bytes == seen.metered.bytes
        notes = dict(seen.engine.notes)
        assert notes.pop("watched") and notes == alone.engine.notes


def test_watching_in_chunks_sees_the_same() -> None:
    whole, chunks = Run(FNR(FedAvg(), watch=True)), Run(FNR(FedAvg(), watch=True), clients_at_once=2)
    whole.rounds(2)
    chunks.rounds(2)
    (one,), (other,) = watched(whole), watched(chunks)
    for name, values in one.items():
        assert torch.allclose(torch.tensor(values), torch.tensor(other[name]), atol=1e-9), name


@pytest.mark.parametrize("dropout", [0.0, 0.34])
def test_cosines_are_those_of_the_models_that_were_trained_and_handed_over(dropout: float) -> None:
    """SCAFFOLD has both models of every client uploaded, so they can be looked at here."""
    run = Run(FNR(Scaffold(), watch=True), active=6, dropout=dropout)
    run.round()
    start = run.state.params
    run.round()
    trained, refined = run.replies("local"), run.replies("refine")
    (seen,) = watched(run)
    assert seen["clients"] == trained.clients.tolist() and seen["refined"] == refined.clients.tolist()
    before = dict(zip(seen["clients"], trained.params - start, strict=True))
    after = before | dict(zip(seen["refined"], refined.params - start, strict=True))
    for name, updates in (("cosines_before", before), ("cosines_after", after)):
        pairs = [cosine(updates[i], updates[j]) for i, j in combinations(seen["clients"], 2)]
        assert seen[name] == pytest.approx(pairs, abs=1e-12)
    assert seen["cosines_before"] != seen["cosines_after"]


def test_gaps_are_distances_of_class_norms_before_and_after() -> None:
    run = Run(FNR(FedAvg(), watch=True))
    run.round()
    (seen,), norms = watched(run), torch.tensor(run.engine.notes["norms"], dtype=torch.float64)
    assert seen["gaps_before"] == pytest.approx([float((a - b).norm()) for a, b in combinations(norms, 2)])
    held = run.engine.measure(torch.tensor(seen["clients"]), ClassNorms(NUM_CLASSES))["norms"]
    assert seen["gaps_after"] == pytest.approx([float((a - b).norm()) for a, b in combinations(held, 2)])
    assert seen["gaps_before"] != seen["gaps_after"]


def test_rows_of_refined_clients_average_to_what_was_noted_before() -> None:
    run = Run(FNR(FedAvg(), watch=True))
    run.round()
    (seen,), notes = watched(run), run.engine.notes
    for when in ("before", "after"):
        rows = torch.tensor(seen[f"accuracy_{when}"])
        assert rows.mean(0).tolist() == pytest.approx(notes[f"refined_{when}"])
    labels = run.world.pool._parts["private"][1]
    for client, counts in zip(seen["refined"], seen["counts"], strict=True):
        mine = labels[run.world.pool.shards[client]]
        assert counts == torch.bincount(mine, minlength=NUM_CLASSES).tolist()


def test_refining_for_no_epoch_leaves_everything_where_it_was() -> None:
    run = Run(FNR(FedAvg(), watch=True, epochs=0))
    run.round()
    (seen,) = watched(run)
    for what in ("cosines", "gaps", "accuracy"):
        assert seen[f"{what}_before"] == seen[f"{what}_after"]


def test_each_cluster_is_watched_apart_and_models_of_their_own_are_starts() -> None:
    clustered = Run(FNR(CFedFN(clusters=2)), active=6)
    clustered.rounds(2)
    assert "watched" not in clustered.engine.notes
    clustered = Run(FNR(CFedFN(clusters=2), watch=True), active=6)
    clustered.rounds(2)
    for seen in watched(clustered):
        assert len(seen["cosines_before"]) == math.comb(len(seen["clients"]), 2)
    personal = Run(FNR(KTpFL(), watch=True))
    personal.rounds(2)
    for seen in personal.engine.notes.get("watched", []):
        assert all(-1 <= value <= 1 for value in seen["cosines_after"])


def test_pairs_are_in_the_order_of_combinations_and_an_update_of_nothing_has_no_direction() -> None:
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[2] = 0
    assert [math.isnan(value) for value in pair_cosines(rows)] == [2 in pair for pair in combinations(range(5), 2)]
    assert pair_cosines(rows[:1]).tolist() == pair_gaps(rows[:1]).tolist() == []


def test_seconds_of_watching_are_no_training() -> None:
    from fnrfl.config import load
    from fnrfl.runs.forecast import forecast
    from fnrfl.runs.run import run

    config = load("digits", ["fnr.watch=true", "rounds=1", "client.epochs=1", "fnr.epochs=1"])
    assert forecast(config).sent == forecast(with_keys(config, {"fnr.watch": False})).sent
    told = run(config, out=None).rounds[-1]
    assert told["seconds"]["observe"] > 0
    assert training_seconds(told) == pytest.approx(
        sum(value for phase, value in told["seconds"].items() if phase not in ("observe", "evaluate"))
    )


MUTANTS = [
    *mutants(
        RefinementWatch._take_refined,
        keeps_the_old_updates=("self.updates[rows] = models - start.to(models)", "pass"),
    ),
    *mutants(
        RefinementWatch._take_all,
        models_not_updates=("models - self.start.to(models)", "models.clone()"),
    ),
    *mutants(
        Refining._watch,
        never_watches=("task.start is None", "True"),
    ),
]
