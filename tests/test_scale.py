"""What clients cost: start-up in proportion to their number, and a round nothing for those who are not active.

Operations are counted and not seconds: calls of functions, and elements that builtins such as `sum` go through.
"""

from __future__ import annotations

import builtins
import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fnrfl.config import RunConfig
from fnrfl.config import load as load_config
from fnrfl.core.ndarrays import Ragged, sizes_of
from fnrfl.data.partition import by_client as natural
from fnrfl.results.report.page import report
from fnrfl.runs import scores
from fnrfl.runs.run import load as load_run
from fnrfl.runs.run import run as run_config
from fnrfl.runs.setup.build import build

ACTIVE, TESTED = 10, 300  # clients of a cohort; clients that bring a test example
KINDS = ("iid", "natural")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def crowd(kind: str, clients: int, **keys: object) -> RunConfig:
    """Two training examples for each client, and the same test set for any number of them."""
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((2 * clients, 3)).astype(np.float32), np.arange(2 * clients) % 2
    ids = np.array([f"H{client}" for client in range(clients)])
    named = (
        {"client_train": np.tile(ids, 2), "client_test": np.resize(ids, len(y[:TESTED]))} if kind == "natural" else {}
    )
    file = f"{kind}-{clients}.npz"
    np.savez(file, x_train=x, y_train=y, x_test=x[:TESTED], y_test=y[:TESTED], **named)
    config = {"dataset": {"name": file, "scale": "none"}, "scenario": kind, "clients": clients, "model": "mlp"}
    rest = {"participation": ACTIVE / clients, "public": {"size": 0}, "validation": {"size": 0}, "engine": "batched"}
    return load_config(None, config | rest | keys)


class Operations:
    """Inside, calls are counted, and elements that go through some builtins; `so_far` is how many there were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.so_far, self._patch = 0, monkeypatch

    def __enter__(self) -> Operations:
        for name in ("sum", "min", "max", "sorted", "any", "all"):
            self._patch.setattr(builtins, name, self._counted(getattr(builtins, name)))
        gc.disable()  # what it calls depends on what was there before
        sys.setprofile(lambda frame, event, arg: self._add(event in ("call", "c_call")))
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()
        self._patch.undo()

    def _add(self, count: int) -> None:
        self.so_far += count

    def _counted(self, builtin: Callable[..., Any]) -> Callable[..., Any]:
        def elements(values: Iterable[Any]) -> Iterator[Any]:
            for value in values:
                self._add(1)
                yield value

        return lambda *of, **named: builtin(elements(of[0]) if len(of) == 1 else of[0], *of[1:], **named)


@pytest.mark.parametrize("kind", KINDS)
def test_start_up_grows_in_proportion_to_clients_at_most(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build(crowd(kind, 20))  # what a process does once
    counts = []
    for clients in (1_000, 4_000):
        config = crowd(kind, clients)
        with monkeypatch.context() as patch, Operations(patch) as operations:
            build(config).manifest()
        counts.append(operations.so_far)
    assert counts[1] <= 4.1 * counts[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_does_no_more_where_more_clients_are_not_active(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_config(crowd(kind, 20, rounds=2), out=None)
    operations_of, line_of = [], []
    for clients in (1_500, 6_000):
        config, seen, lines = crowd(kind, clients, rounds=4), [], []
        with monkeypatch.context() as patch, Operations(patch) as operations:

            def progress(event: dict[str, Any]) -> None:
                seen.append(operations.so_far)  # noqa: B023
                lines.append(len(json.dumps(event)))  # noqa: B023

            run_config(config, out=None, progress=progress)
        operations_of.append(seen[2] - seen[1])
        line_of.append(lines[1])
    assert operations_of[1] - operations_of[0] <= 0.1 * (6_000 - 1_500)  # of several thousand; one each would be 4,500
    assert line_of[1] == pytest.approx(line_of[0], abs=300)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_takes_no_tensors_of_its_own(kind: str) -> None:
    build(crowd(kind, 20))

    def tensors(clients: int) -> int:
        gc.collect()
        built = build(crowd(kind, clients))
        count = sum(type(one) is torch.Tensor for one in gc.get_objects())
        assert len(built.splits.clients) == clients
        return count

    assert tensors(2_000) <= tensors(500) + 10


def test_names_of_clients_are_sorted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, config, names = 500, crowd("natural", 500), list[str]()
    key = natural.sort_key
    monkeypatch.setattr(natural, "sort_key", lambda name: names.append(name) or key(name))
    build(config)
    assert len(names) == clients


def test_of_many_clients_a_log_has_all_scores_at_the_end_and_the_lowest_always(monkeypatch: pytest.MonkeyPatch) -> None:
    config = crowd("natural", 40, rounds=3)
    few = run_config(config, out="few")
    monkeypatch.setattr(scores, "CLIENTS_EVERY_ROUND", 39)
    many = run_config(config, out="many")
    for name in ("worst_client", "worst_site", "accuracy_own", "accuracy_site", "accuracy_site_pooled"):
        assert many.series(name) == few.series(name)
    assert None not in many.series("worst_client")
    assert ["per_client" in event for event in many.rounds] == [False, False, True]
    assert ["per_site" in event for event in many.rounds] == [False, False, True]
    assert many.per_site == few.per_site == load_run("many").per_site
    assert report([Path("many")], Path("page.html")).exists()


def test_short_arrays_end_to_end_are_views() -> None:
    apart = [torch.arange(3), torch.arange(0), torch.tensor([7, 8])]
    rows = Ragged.joined(apart, torch.cat)
    assert [row.tolist() for row in rows] == [row.tolist() for row in apart]
    assert rows[-1].tolist() == [7, 8] and [len(row) for row in rows[::-1]] == [2, 0, 3]
    assert sizes_of(rows).tolist() == sizes_of(apart).tolist() == [3, 0, 2]
    rows[2][0] = 9
    assert rows.flat.tolist() == [0, 1, 2, 9, 8] and apart[2][0] == 7
    with pytest.raises(IndexError):
        rows[3]
