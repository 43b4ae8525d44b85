"""The rule that ends a run: when, with which model, and that stops, crashes and networks change nothing of it."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_network import FakeNetwork, nodes_of
from faults import Crash, crashing
from fnrfl import evaluate
from fnrfl.config import RunConfig, load
from fnrfl.config.stopping import StopRule, best_round
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.federation import remote_clients
from fnrfl.results.compare import compare, grid, plan_grid
from fnrfl.results.report.load import read_run
from fnrfl.runs.result import Result
from fnrfl.runs.run import load as load_run
from fnrfl.runs.run import resume, run
from settings import with_keys

KEYS = [
    "rounds=30", "clients=4", "client.epochs=1", "client.lr=0.1", "model=mlp(hidden=16, norm=batch)",
    "seed=1", "engine.threads=1", "engine=loop",
]  # fmt: skip
LAST, BEST = "patience(2)", "patience(2, keep=best)"


def configured(stop: str, *words: str) -> RunConfig:
    return load("digits", [*KEYS, f"stop={stop}", *words])


@cache
def uninterrupted(stop: str, *words: str) -> Result:
    return run(configured(stop, *words), out=None)


def without_clock(result: Result) -> list[dict[str, object]]:
    return [{k: v for k, v in event.items() if k not in ("seconds", "seconds_preparing")} for event in result.rounds]


def assert_same(one: Result, other: Result) -> None:
    assert one.model_sha256 == other.model_sha256
    assert json.dumps(without_clock(one)) == json.dumps(without_clock(other))


# -- the rule ----------------------------------------------------------------------------------------------------------

values = st.lists(st.none() | st.sampled_from([0.1, 0.2, 0.5, 0.9]), max_size=12)


@given(values, st.integers(1, 5))
def test_a_run_ends_when_so_many_rounds_were_no_better_than_one_before(values: list[float | None], rounds: int) -> None:
    waited, best = 0, -1.0
    for value in values:  # as a person would count
        waited = 0 if value is not None and value > best else waited + 1
        best = max(best, -1.0 if value is None else value)
    assert StopRule(rounds).ends(values) == (waited >= rounds)
    assert not StopRule().ends(values)
    assert best_round(values) == (len(values) - waited if best >= 0 else 0)


@pytest.mark.parametrize("text", ["never", "patience(5)", "patience(5, keep=best)"])
def test_a_rule_is_read_as_it_is_written_and_in_any_spacing(text: str) -> None:
    assert str(StopRule.read(text)) == text == str(StopRule.read(f"  {text.upper().replace(' ', '')} "))
    assert str(StopRule.read("patience(5, keep=last)")) == "patience(5)"


@pytest.mark.parametrize("text", ["patience", "patience(0)", "patience(-1)", "patience(5, keep=first)", "5", "always"])
def test_no_other_rule_is_taken(text: str) -> None:
    with pytest.raises(ConfigError, match="stop = "):
        load("digits", [f"stop={text}"])


def test_equal_rules_are_one_config_and_never_is_the_config_of_before() -> None:
    assert (
        load("digits", ["stop=Patience( 5,keep = best )"]).sha256
        == load("digits", ["stop=patience(5, keep=best)"]).sha256
    )
    assert load("digits", ["stop=never"]).sha256 == load("digits").sha256


# -- what comes out ----------------------------------------------------------------------------------------------------

METHODS = ["fedavg", "scaffold", "fedbn", "local-only"]


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("method", METHODS)
def test_the_run_is_that_of_as_many_rounds_and_the_best_is_that_of_its_round(method: str, engine: str) -> None:
    words = (f"algorithm={method}", f"engine={engine}")
    last, best = uninterrupted(LAST, *words), uninterrupted(BEST, *words)
    judge = "validation_own" if method in ("fedbn", "local-only") else "validation_accuracy"
    done, seen = len(last.rounds), last.series(judge)
    assert done < 30 and StopRule(2).ends(seen) and not StopRule(2).ends(seen[:-1])
    assert last.model_sha256 == uninterrupted("never", f"rounds={done}", *words).model_sha256
    there = uninterrupted("never", f"rounds={best_round(seen)}", *words)
    assert best.model_sha256 == there.model_sha256 and best.accuracy == there.accuracy
    assert best.bytes_up == last.bytes_up and len(best.rounds) == done
    assert judge in best.rounds[-1]["ended"] and "ended" not in best.rounds[-2]


def test_the_best_model_is_kept_when_all_rounds_are_done_too() -> None:
    seen = uninterrupted(LAST).series("validation_accuracy")
    found = run(configured("patience(20, keep=best)", f"rounds={len(seen)}"), out=None)
    best = best_round(seen)
    assert best < len(seen) == len(found.rounds)
    assert found.model_sha256 == uninterrupted("never", f"rounds={best}").model_sha256


# -- on disk -----------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Somebody stops the run between two rounds."""


@pytest.mark.parametrize("stop", [LAST, BEST])
@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_a_run_that_is_stopped_anywhere_resumes_to_the_same_end(stop: str, method: str, tmp_path: Path) -> None:
    wanted = uninterrupted(stop, f"algorithm={method}")
    for after, every in itertools.product(range(1, len(wanted.rounds)), (0.0, 1000.0)):
        folder = tmp_path / f"{after}-{every}"

        def stopping(event: dict[str, object], last: int = after) -> None:
            if event["round"] == last:
                raise Stop

        with pytest.raises(Stop):
            run(configured(stop, f"algorithm={method}"), out=folder, progress=stopping, checkpoint_every=every)
        found = resume(folder)
        assert_same(found, wanted)
        assert_same(load_run(folder), wanted)
        assert_same(resume(folder), wanted)  # there is nothing left to do
        assert evaluate(folder, "digits").summary()["accuracy"] == wanted.accuracy


def test_a_crash_in_any_write_resumes_to_the_same_end(tmp_path: Path) -> None:
    wanted, config = uninterrupted(BEST, "algorithm=fedbn"), configured(BEST, "algorithm=fedbn")
    for operations in itertools.count(7, 9):
        folder = tmp_path / "run"
        try:
            with crashing(operations):
                run(config, out=folder, checkpoint_every=0.0)
        except Crash:
            assert_same(resume(folder) if folder.exists() else run(config, out=folder), wanted)
            shutil.rmtree(folder)
        else:
            assert operations > 50
            break
    there = {str(path.relative_to(folder)) for path in (folder / "rounds").rglob("*") if path.is_file()}
    index = json.loads((folder / "checkpoint.json").read_text())
    assert there == {file["file"] for file in (index["server"], *index["clients"].values())} and "best" not in index


def test_a_comparison_keeps_and_reports_it(tmp_path: Path) -> None:
    cells = grid("digits", [*KEYS[:-3], f"stop={LAST}"], ["algorithm=fedavg,scaffold"], [1])
    found = compare(cells, tmp_path / "grid")
    again = compare(cells, tmp_path / "grid")
    rounds = {one["group"]: one["rounds"] for one in found.runs}
    assert found.runs == again.runs and all(number < 30 for number in rounds.values())
    for cell in cells:
        read = read_run(tmp_path / "grid" / cell.name)
        assert read.finished and len(read.rounds) == rounds[cell.group.label]
    for planned in plan_grid(cells, tmp_path / "grid"):
        assert planned.state == "finished" and planned.rounds_done == rounds[planned.cell.group.label]


# -- on a network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stop", "method"), [(BEST, "fedavg"), (LAST, "scaffold")])
def test_on_a_network_the_end_is_the_same(
    stop: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_clients, "PAUSE", 0.0)
    words = (f"algorithm={method}", "engine.accelerate=false")
    config = configured(stop, *words)
    found = run(with_keys(config, {"engine.name": "flower"}), out=None, network=FakeNetwork(nodes_of(config, tmp_path)))
    wanted = uninterrupted(stop, *words)
    assert len(found.rounds) == len(wanted.rounds) and found.rounds[-1]["ended"] == wanted.rounds[-1]["ended"]
    assert found.accuracy == wanted.accuracy and all(found.weights[k].equal(v) for k, v in wanted.weights.items())


def test_models_of_clients_on_other_machines_are_not_kept(tmp_path: Path) -> None:
    config = configured(BEST, "algorithm=fedbn")
    with pytest.raises(CompatibilityError, match="keep=best"):
        run(with_keys(config, {"engine.name": "flower"}), out=None, network=FakeNetwork(nodes_of(config, tmp_path)))
