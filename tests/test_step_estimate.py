"""How many steps a run will take, and what of them is worth compiling."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.core.values import SERVER
from fnrfl.engines.groups import halves
from fnrfl.engines.step_estimate import MIN_STEPS_FOR_OWN_WIDTH, StepEstimate
from toys import Run, assert_near, classification


def job(epochs: int, batch: int, clients: int) -> Any:
    return SimpleNamespace(
        task=SimpleNamespace(data="private"), training=SimpleNamespace(epochs=epochs, batch=batch, last_batch="keep"),
        clients=list(range(clients)),
    )  # fmt: skip


def test_every_step_of_every_client_is_in_a_group_of_some_rows() -> None:
    work = StepEstimate(examples=[64 * n for n in (1, 2, 3, 40)], rounds=5)
    by_rows = work.steps_by_rows(job(epochs=2, batch=64, clients=4), halves(4))
    assert set(by_rows) <= {4, 2, 1}
    assert sum(by_rows.values()) >= 5 * 2 * (1 + 2 + 3 + 40)  # idle rows are counted too
    assert by_rows[1] > by_rows[4]


def test_every_width_is_compiled_beside_the_most_frequent_one() -> None:
    work = StepEstimate(examples=[6400, 6400, 32000, 32000], rounds=10)
    task = job(epochs=2, batch=64, clients=4)
    assert work.most_frequent(task, halves(4)) == max(work.steps_by_rows(task, halves(4)).values())


def test_a_task_on_public_data_counts_for_the_whole_cohort_however_few_clients_a_chunk_has() -> None:
    work, task = StepEstimate(examples=[64] * 40, rounds=5, participation=0.5), job(epochs=2, batch=8, clients=3)
    task.task.data, task.plans = "public", [SimpleNamespace(order=range(2 * 19))]
    assert work.frequent_sizes(task, 9) == set()  # 3: 20 clients, 2 epochs, 5 rounds
    assert replace(work, rounds=8).frequent_sizes(task, 9) == {3}
    task.clients = [SERVER]
    assert replace(work, rounds=8).frequent_sizes(task, 9) == set()


@pytest.mark.parametrize("rounds", [1, 3, 10, 1000])
def test_a_width_of_few_steps_needs_no_program_where_idle_rows_cost_little(rounds: int) -> None:
    work, task = StepEstimate(examples=[640, 6400, 32000, 32640], rounds=rounds), job(epochs=2, batch=64, clients=4)
    widths, halved = work.widths(task, 4), work.steps_by_rows(task, halves(4))
    assert widths == [rows for rows in halves(4) if rows == 4 or halved[rows] // rows >= MIN_STEPS_FOR_OWN_WIDTH]
    assert (len(widths), widths[-1]) == ({1: 2, 3: 2, 10: 2, 1000: 3}[rounds], 4)
    taken = work.steps_by_rows(task, widths)  # wider, and as many
    assert set(taken) == set(widths) and sum(taken.values()) >= sum(halved.values())


@pytest.mark.parametrize(("engine", "rounds"), [("gpu-fast", 1), ("gpu-fast", 10_000), ("batched-fast", 1)])
@pytest.mark.usefixtures("no_programs")
def test_groups_shrink_to_widths_that_have_a_program(engine: str, rounds: int) -> None:
    """Where idle rows cost time, to a half each time."""
    training = replace(classification().training, batch=7)
    run = Run(FedAvg(), engine, training=training, active=6, rounds=rounds)
    run.rounds(2)
    assert_near(run.state, Run(FedAvg(), training=training, active=6).rounds(2), atol=1e-9)
    recorder = run.engine.server.runner.recorder
    assert recorder is not None
    widths: Any = {key[0] for key in recorder.programs}  # type: ignore[index]
    assert widths == ({6} if (engine, rounds) == ("gpu-fast", 1) else set(halves(6)))
