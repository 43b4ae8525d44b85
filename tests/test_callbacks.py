"""Callbacks: who is told what, in which order, and what happens when one of them fails."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fnrfl
from fnrfl import cli
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.results.compare import compare, grid
from fnrfl.rundir.events import read_events
from fnrfl.runs import loggers
from fnrfl.runs.loggers import scalars

KEYS: dict[str, Any] = {"rounds": 4, "client": {"epochs": 1}, "clients": 4}


class Heard(fnrfl.Callback):
    """Writes down everything, and fails or stops where it is told to."""

    def __init__(self, fails: str = "", error: BaseException | None = None) -> None:
        self.moments, self.facts = list[str](), dict[str, Any]()
        self.events, self.results, self.errors = list[dict[str, Any]](), list[Any](), list[BaseException]()
        self.fails, self.error = fails, error or ValueError("it broke")

    def _hear(self, moment: str) -> None:
        self.moments.append(moment)
        if moment == self.fails:
            raise self.error

    def begin(self, config: Any, facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)
        self._hear("begin")

    def round(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self._hear(f"round {event['round']}")

    def end(self, result: Any) -> None:
        self.results.append(result)
        self._hear("end")

    def stop(self, error: BaseException) -> None:
        self.errors.append(error)
        self._hear("stop")


def all_of(first: int = 1, last: int = 4) -> list[str]:
    return [f"round {number}" for number in range(first, last + 1)]


pytestmark = pytest.mark.usefixtures("tmp_cwd")


def run(*callbacks: Any, out: Any = None, **more: Any) -> Any:
    return fnrfl.run("digits", out=out, callbacks=list(callbacks), **KEYS, **more)


def test_a_callback_hears_the_log_and_without_a_directory_the_same() -> None:
    heard, free, told = Heard(), Heard(), []
    result = run(heard, out="here", progress=told.append)
    header, *rounds = read_events(Path("here/events.jsonl"))
    assert heard.moments == ["begin", *all_of(), "end"]
    assert heard.events == rounds and heard.results == [result] and result.run_dir == Path("here")
    known = {key: value for key, value in header.items() if key != "config"} | {"rounds_done": 0, "resumed": False}
    assert heard.facts == known | {"run_dir": Path("here"), "folder": Path("here").absolute()}
    assert [event["round"] for event in told] == [1, 2, 3, 4]
    run(free)
    assert free.moments == heard.moments and free.facts == known | {"run_dir": None, "folder": None}


def test_a_callback_cannot_change_a_run() -> None:
    class Vandal(fnrfl.Callback):
        def begin(self, config: Any, facts: Any) -> None:
            facts["data"].clear()

        def round(self, event: dict[str, Any]) -> None:
            event["per_class"].clear()
            event["seconds"].clear()

    heard = Heard()
    result, plain = run(Vandal(), heard), run()
    assert result.model_sha256 == plain.model_sha256
    assert all(event["per_class"] and event["seconds"] for event in [*result.rounds, *heard.events])
    assert heard.facts["data"]


def test_a_resumed_run_tells_the_other_rounds() -> None:
    first, second, whole = Heard("round 2", KeyboardInterrupt()), Heard(), Heard()
    with pytest.raises(KeyboardInterrupt):
        run(first, out="here")
    result = fnrfl.resume("here", callbacks=[second])
    assert first.moments == ["begin", "round 1", "round 2", "stop"] and isinstance(first.errors[0], KeyboardInterrupt)
    assert second.moments == ["begin", *all_of(3), "end"]
    assert second.facts["resumed"] and second.facts["rounds_done"] == 2
    assert first.facts["config_sha256"] == second.facts["config_sha256"]
    run(whole, out="whole")
    told = [*first.events, *second.events]
    assert [event["accuracy"] for event in told] == [event["accuracy"] for event in whole.events]
    assert result.model_sha256 == whole.results[0].model_sha256
    again = Heard()
    fnrfl.resume("here", callbacks=[again])
    assert again.moments == []  # it is finished: there is nothing to tell


@pytest.mark.parametrize("fails", ["begin", "round 1", "round 3"])
def test_an_error_names_the_callback_and_can_be_resumed(fails: str) -> None:
    before, broken, after = Heard(), Heard(fails), Heard()
    with pytest.raises(FnrflError, match=r"The callback Heard has failed .*\(ValueError: it broke\.\)") as caught:
        run(before, broken, after, out="here")
    assert isinstance(caught.value.__cause__, ValueError)
    begun = fails == "begin"
    assert before.moments[-1] == broken.moments[-1] == "stop" and after.moments[-1:] == ([] if begun else ["stop"])
    assert before.errors == broken.errors == [caught.value]
    assert f"in {fails}" in str(caught.value) or begun
    assert ("`fnrfl resume here`" in str(caught.value)) is not begun
    heard = Heard()
    result = fnrfl.resume("here", callbacks=[heard])
    done = 0 if begun else int(fails[-1])
    assert heard.moments == ["begin", *all_of(done + 1), "end"]
    assert result.model_sha256 == run().model_sha256


def test_an_error_at_the_end_loses_no_run_and_one_in_stop_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    broken, after, other = Heard("end"), Heard(), Heard("round 1")
    with caplog.at_level(logging.WARNING, "fnrfl"):
        assert run(broken, after).accuracy > 0 and after.moments[-1] == "end"
        assert "callback Heard has failed in end: ValueError: it broke." in caplog.text
        with pytest.raises(FnrflError, match="has failed in round 1"):
            run(Heard("stop"), other)
    assert other.moments[-1] == "stop" and "has failed in stop: ValueError: it broke." in caplog.text


def test_ctrl_c_at_the_end_still_closes_the_others() -> None:
    broken, after = Heard("end", KeyboardInterrupt()), Heard()
    with pytest.raises(KeyboardInterrupt):
        run(broken, after, out="here")
    assert broken.moments[-2:] == ["end", "stop"] and after.moments[-1] == "stop"
    assert fnrfl.load("here").accuracy > 0


def test_any_object_with_some_of_the_methods_will_do() -> None:
    heard = SimpleNamespace(round=(events := []).append)
    run(heard)
    assert len(events) == 4


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ([print], r"callbacks\[0\] is builtin_function_or_method, .* none of the methods begin, round"),
        ([Heard(), Heard], r"callbacks\[1\] is the class Heard; give an object"),
        (Heard(), "must be a list"),
    ],
)
def test_what_cannot_be_told_is_refused_at_once(callbacks: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fnrfl.run("digits", out="here", callbacks=callbacks, **KEYS)
    assert not Path("here").exists()


def test_one_object_hears_of_every_new_run_of_a_comparison() -> None:
    cells = grid("digits", ["rounds=2", "client.epochs=1"], ["algorithm=fedavg,fedprox"], [0])
    compare(cells[:1], "here")
    heard = Heard()
    compare(cells, "here", callbacks=[heard])
    assert heard.moments == ["begin", "round 1", "round 2", "end"]
    assert heard.facts["run_dir"] == Path("here") / cells[1].name
    broken = Heard("round 1")
    found = compare(cells, "there", callbacks=[broken])
    assert all(failure.error.startswith("The callback Heard has failed in round 1") for failure in found.failed)
    assert broken.moments == ["begin", "round 1", "stop"] * 2


# -- loggers without their packages ------------------------------------------------------------------------------------

words = st.sampled_from(["accuracy", "loss", "bytes", "up"])
leaves = st.sampled_from([0, 1, -0.5, 1e300, 10**20, True, False, None, "text", [1, 2], []])
trees = st.dictionaries(words, st.recursive(leaves, lambda inner: st.dictionaries(words, inner), max_leaves=6))


@given(trees)
def test_scalars_are_all_numbers_and_nothing_else(event: dict[str, Any]) -> None:
    found = scalars(event | {"round": 1, "rounds": 2})
    for name, value in found.items():
        assert type(value) in (int, float) and reduce(lambda tree, word: tree[word], name.split("/"), event) == value

    def count(tree: Any) -> int:
        return sum(map(count, tree.values())) if isinstance(tree, dict) else type(tree) in (int, float)

    assert len(found) == count(event)


@pytest.mark.parametrize("words", [("run",), ("compare", "--over", "fnr=off")])
def test_a_missing_package_and_an_unknown_logger_are_said_at_once(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda module: None)
    for name in (*loggers.LOGGERS, "tensorbord"):
        got = CliRunner().invoke(cli.app, [*words, "rounds=1", "--log", name])
        said = f"`pip install {name}`" if name in loggers.LOGGERS else "Did you mean tensorboard?"
        assert got.exit_code == 2 and said in got.stderr and not list(Path().iterdir())


def test_a_run_imports_no_logger() -> None:
    heavy = "('tensorboard', 'mlflow', 'wandb', 'torch')"
    script = f"import fnrfl, sys; fnrfl.loggers; fnrfl.Callback; print([m for m in {heavy} if m in sys.modules])"
    got = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(got.stdout) == []
