"""Replies that wait on disk: the same when they come back, each tensor written once, no folder without need."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fnrfl.algorithms.parts.spilled import SpilledReplies
from fnrfl.core import trees
from fnrfl.core.errors import FnrflError
from fnrfl.core.values import Replies


def chunk(*clients: int, size: int = 1000) -> Replies:
    ids, numbers = torch.tensor(clients), torch.tensor(clients, dtype=torch.float32)
    models = numbers[:, None] + torch.arange(size)
    return Replies(ids, ids * 10, ids + 1, numbers, numbers, models, {"mean": models[:, :3]}, {})


def assert_same(one: Replies, other: Replies) -> None:
    assert all(map(torch.equal, trees.leaves(one), trees.leaves(other)))


def test_a_single_chunk_needs_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda **_: pytest.fail("a folder was made"))
    (got,) = SpilledReplies([chunk(0, 1)], keep_models=True)
    assert_same(got, chunk(0, 1))


@pytest.mark.parametrize("refined", [False, True])
def test_chunks_come_back_as_they_were_and_a_model_is_written_once(
    refined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    chunks = [chunk(0, 1), chunk(2), chunk(3, 4)]
    if refined:  # what is handed over is not what private training came to
        chunks = [replace(each, refined=each.params + 1) for each in chunks]
    waiting = SpilledReplies(chunks, keep_models=True)
    assert waiting.clients.tolist() == [0, 1, 2, 3, 4]
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    models = sum(each.params.numel() * 4 for each in chunks) * (2 if refined else 1)
    assert models < written < 1.3 * models
    got = list(waiting)
    for one, other in zip(got, chunks, strict=True):
        assert_same(one, other)
        assert (one.refined is not None) is refined
    assert not list(tmp_path.iterdir())


def test_models_that_clients_keep_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    got = list(SpilledReplies([chunk(0), chunk(1)], keep_models=False))
    assert [one.clients.tolist() for one in got] == [[0], [1]]
    assert all(one.params.shape == one.trained.shape == (1, 0) and not one.buffers for one in got)


def test_nobody_has_answered() -> None:
    with pytest.raises(FnrflError, match="No client of the cohort"):
        SpilledReplies([], keep_models=True)
