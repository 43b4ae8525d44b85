"""How many steps a run will take, and what of them is worth compiling."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fnrfl.engines.expected import BESIDE_ANOTHER, ExpectedWork


def job(epochs: int, batch: int, clients: int) -> Any:
    return SimpleNamespace(
        task=SimpleNamespace(data="private"), training=SimpleNamespace(epochs=epochs, batch=batch),
        clients=list(range(clients)),
    )  # fmt: skip


def test_every_step_of_every_client_is_in_a_group_of_some_rows() -> None:
    work = ExpectedWork(examples=[64 * n for n in (1, 2, 3, 40)], rounds=5)
    by_rows = work.steps_by_rows(job(epochs=2, batch=64, clients=4), width=4)
    assert set(by_rows) <= {4, 2, 1}
    assert sum(by_rows.values()) >= 5 * 2 * (1 + 2 + 3 + 40)  # idle rows are counted too
    assert by_rows[1] > by_rows[4]


def test_a_width_that_is_not_rare_is_compiled_beside_the_most_frequent_one() -> None:
    work = ExpectedWork(examples=[6400, 6400, 32000, 32000], rounds=10)
    task = job(epochs=2, batch=64, clients=4)
    by_rows, together = work.steps_by_rows(task, 4), work.compiled_together(task, 4)
    assert min(by_rows.values()) >= BESIDE_ANOTHER
    assert set(together.values()) == {max(by_rows.values())} and together.keys() == by_rows.keys()


def test_a_rare_width_counts_for_itself() -> None:
    work = ExpectedWork(examples=[64000, 64000, 64000, 64640], rounds=10)
    task = job(epochs=1, batch=64, clients=4)
    by_rows, together = work.steps_by_rows(task, 4), work.compiled_together(task, 4)
    assert 0 < by_rows[1] < BESIDE_ANOTHER < by_rows[4]
    assert together == by_rows
