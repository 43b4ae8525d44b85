"""Numbers that are not finite, and clients that are left alone: the right one is named, and no log has a bare NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fnrfl
from fnrfl import cli
from fnrfl.algorithms.parts.norms import norm_targets
from fnrfl.config.registry import load_method
from fnrfl.core.errors import ClientError, CompatibilityError, FnrflError
from fnrfl.core.types import State
from fnrfl.rundir import events
from fnrfl.runs.error_context import check_scores, check_state, for_json

KEYS: dict[str, Any] = {"rounds": 2, "clients": 3, "out": None, "client": {"epochs": 1}, "model": "mlp(hidden=8)"}


@pytest.mark.parametrize("fnr", ["off", {"epochs": 1}])
@pytest.mark.parametrize("algorithm", ["fedavgm", "scaffold"])
def test_a_server_that_goes_too_far_is_named(algorithm: str, fnr: Any) -> None:
    with pytest.raises(FnrflError) as caught:
        fnrfl.run("digits", algorithm={"name": algorithm, "server_lr": 1e39}, fnr=fnr, **KEYS)
    assert not isinstance(caught.value, ClientError)
    assert str(caught.value) == (
        "The server's model is no longer finite after round 1, although the models of the clients were. Lower "
        "algorithm.server_lr or client.lr."
    )


def test_memory_of_the_server_counts_and_a_mask_does_not() -> None:
    fine, bad = torch.zeros(2), torch.tensor([0.0, torch.inf])
    method = load_method("fedavg")()
    masked = State(fine, {"mask": bad, "count": torch.tensor([1])})
    check_state(masked, masked, method, 0)
    with pytest.raises(FnrflError, match="memory is no longer finite after round 5.*Lower client.lr"):
        check_state(State(fine, {}, {"c": bad}), State(fine, {}), method, 4)
    with pytest.raises(FnrflError, match="model is no longer finite"):
        check_state(State(fine, {"var": bad}), State(fine, {"var": fine}), method, 4)


def test_scores_that_are_not_finite_end_a_run() -> None:
    with pytest.raises(FnrflError, match="The loss after round 1 is not finite, although.*Lower algorithm.server_lr"):
        fnrfl.run("digits", algorithm={"name": "fedavgm", "server_lr": 1e30}, **KEYS | {"rounds": 1})
    with pytest.raises(FnrflError, match="The loss after round 3 is not finite"):
        check_scores({"accuracy": 0.5, "loss": float("inf"), "validation_accuracy": None}, load_method("fedavg")(), 2)


def test_the_log_takes_no_bare_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        events.append_event(tmp_path / "events.jsonl", {"loss": float("nan")})
    assert for_json({"a": [float("nan"), 1.0, {"b": (float("inf"),)}], "c": "nan"}) == {
        "a": [None, 1.0, {"b": [None]}], "c": "nan",
    }  # fmt: skip


def test_the_command_line_says_it_and_leaves_no_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "rounds=2", "clients=3", "client.epochs=1", "algorithm=fedavgm", "algorithm.server_lr=1e30"]
    got = CliRunner().invoke(cli.app, [*words, "-o", "run", "--json"])
    assert got.exit_code == 3, got.output
    assert "not finite" in got.stderr
    assert "client 0" not in got.stderr
    assert "NaN" not in got.stdout + (tmp_path / "run" / "events.jsonl").read_text()


# -- a client that is left alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"clients": 1, "fnr": {"share": 1.0, "target": "all"}},
        {"clients": 3, "client": {"dropout": 0.95}, "fnr": {"share": 1.0, "target": "all"}},
    ],
)
def test_nobody_to_take_targets_from_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(CompatibilityError, match=r"refines 1 of the 1 that answer.*there are none\. Set a smaller"):
        fnrfl.run("digits", **KEYS | keys)
    keys["fnr"] = keys["fnr"] | {"weight": 0.0, "epochs": 1}  # the control needs no targets
    assert fnrfl.run("digits", **KEYS | {"rounds": 1} | keys).rounds[0]["refined"]


def test_no_others_are_no_targets() -> None:
    norms = torch.tensor([[2.0, 3.0]])
    assert norm_targets(norms, torch.tensor([0]), "all").tolist() == [[0.0, 0.0]]
    assert norm_targets(norms, torch.tensor([0]), "others").tolist() == [[0.0, 0.0]]


def test_who_is_left_alone_in_a_round_is_refined_without_the_penalty() -> None:
    """cFedFN refines cluster by cluster, and one of these has a single client."""
    keys: dict[str, Any] = {
        "clients": 3, "rounds": 2, "algorithm": {"name": "cfedfn", "clusters": 3}, "client": {"epochs": 1}, "out": None,
        "model": "mlp(hidden=8)",
    }  # fmt: skip
    with_it = fnrfl.run("digits", fnr={"share": 1.0, "target": "all", "epochs": 1, "weight": 100.0}, **keys)
    first, second = with_it.rounds
    assert "refined_without_target" not in first
    assert second["refined_without_target"] == second["refined"] == [0, 1, 2]
    assert json.loads(json.dumps(with_it.rounds, allow_nan=False))
