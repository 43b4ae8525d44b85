"""The walk of CONTRIBUTING.md, followed: a file in a folder, trained from the command line, bare and under FNR."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fnrfl
from command_line import assert_refused
from command_line import fnrfl as command
from fnrfl.core.errors import FnrflError

PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
STEADY = re.findall(r"^```python runnable steady\.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
# One that uses everything that the walk speaks of: memory, numbers sent beside the model, draws of the server.
SLOWING = '''"""Slowing: clients remember how often they took part, and their steps shrink with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fnrfl.method import Algorithm, Engine, Flat, LocalTask, Net, Objective, State, Tree, option


@dataclass(frozen=True)
class Counting(Objective):
    """The gradient over 1 + rate * (rounds that the client took part in)."""

    rate: float

    def correct(self, grad: Flat, params: Flat, start: Flat, shared: Tree, own: Tree) -> Flat:
        return grad / (1 + self.rate * own["times"])

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        return {"times": own["times"]}, {"times": own["times"] + 1}


@dataclass(frozen=True)
class Slowing(Algorithm):
    """x <- x + mean(z_i - x); the server counts, and draws a number that it does not use."""

    needs: ClassVar[frozenset[str]] = frozenset({"linear-optimiser"})
    rate: float = option(0.1, "how fast", ge=0.0)

    def client_state(self, net: Net) -> Tree:
        return {"times": torch.zeros((), dtype=net.dtype)}

    def init(self, net: Net) -> State:
        return State(*net.flatten(), {"seen": torch.zeros((), dtype=net.dtype)})

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        torch.rand((), generator=engine.generator("nothing"))
        task = LocalTask(Counting(self.rate), "local", state)
        got = engine.fold(cohort, task, mean=lambda r: {"y": r.params - state.params}, total=lambda r: r.extras)
        engine.note(times=float(got.total["times"]))
        return state.step(got, state.params + got.mean["y"], seen=state.extra["seen"] + got.total["times"])
'''
TOYS = {"steady:Steady": STEADY, "slowing:Slowing": SLOWING}


@pytest.fixture(autouse=True)
def folder(tmp_cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the files in it, and nothing of them left afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for target, body in TOYS.items():
        (tmp_cwd / f"{target.partition(':')[0]}.py").write_text(body, encoding="utf-8")
    yield tmp_cwd
    for target in TOYS:
        sys.modules.pop(target.partition(":")[0], None)


def trained(*words: str) -> dict[str, Any]:
    """What `fnrfl run` says at its end."""
    got = command("run", "digits", "rounds=3", "scenario=label-dirichlet(1)", *words, "--json", code=0)
    return dict(json.loads(got.stdout))


@pytest.mark.parametrize("target", TOYS)
def test_a_file_in_the_working_folder_is_trained_bare_and_under_fnr_on_both_engines(target: str) -> None:
    found = {
        (fnr, engine): trained(
            *(f"algorithm={target}", f"fnr={fnr}", f"engine={engine}", "engine.precision=float64"),
            *("-o", f"{fnr}-{engine}"),
        )
        for fnr in ("off", "on")
        for engine in ("loop", "batched")
    }
    for fnr in ("off", "on"):
        loop, batched = found[fnr, "loop"], found[fnr, "batched"]
        assert loop["accuracy"] == batched["accuracy"] > 3 / 10
        assert loop["bytes_up"] == batched["bytes_up"]
        assert loop["algorithm"] == target
    assert found["off", "loop"]["model_sha256"] != found["on", "loop"]["model_sha256"]
    assert fnrfl.load("on-loop").rounds[-1]["refined"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("steady:Steady algorithm.beta=2", ("algorithm.beta = 2", "a number >= 0 and <= 1")),
        ("steady:Steady algorithm.betta=0.1", ("algorithm.clip, algorithm.beta",)),
        ("slowing:Slowing client.optimizer=adam", ("slowing:Slowing needs", "linear in the gradients")),
    ],
)
def test_its_options_and_needs_are_checked(keys: str, said: tuple[str, ...]) -> None:
    assert_refused(command("run", "digits", *f"algorithm={keys} -o x".split()), *said)
    assert not Path("x").exists()


@pytest.mark.parametrize("option", ["--dry-run", "--json"])
def test_what_its_file_prints_is_not_in_the_answer(option: str, folder: Path) -> None:
    (folder / "steady.py").write_text(STEADY + 'print("hello")\n', encoding="utf-8")
    got = command("run", "digits", "rounds=1", "algorithm=steady:Steady", option, code=0)
    assert "hello" in got.stderr and "hello" not in got.stdout


def test_memory_and_state_last_from_round_to_round_and_notes_reach_the_log() -> None:
    """Ten clients: the sum of what they remember is 0, 10, 20."""
    trained("algorithm=slowing:Slowing", "-o", "run")
    assert [event["times"] for event in fnrfl.load("run").rounds] == [0, 10, 20]


def test_the_walk_names_the_signatures_that_there_are() -> None:
    assert "def init(self, net: Net) -> State" in STEADY
    assert "`client_state(net)`" in PAGE and "`init(net)`" in PAGE
    assert "`needs`" in PAGE and "`traffic`" in PAGE


def test_private_training_is_a_field_and_not_a_word(folder: Path) -> None:
    """Whatever a method calls its phase, FNR refines its clients, and dropout loses some."""
    keys: dict[str, Any] = {"rounds": 2, "clients": 6, "engine": "loop", "client": {"epochs": 1}, "out": None}
    (folder / "steady.py").write_text(STEADY.replace('"local"', '"train"'), encoding="utf-8")
    bare = fnrfl.run("digits", algorithm="steady:Steady", **keys)
    refined = fnrfl.run("digits", algorithm="steady:Steady", fnr={"epochs": 1}, **keys)
    assert len(refined.rounds[-1]["refined"]) == 3
    assert refined.model_sha256 != bare.model_sha256
    lossy = fnrfl.run("digits", algorithm="steady:Steady", **keys | {"client": {"epochs": 1, "dropout": 0.5}})
    assert len(lossy.rounds[-1]["dropped"]) == 3


def test_a_round_of_fnr_without_private_training_is_refused(folder: Path) -> None:
    body = STEADY.replace('"local", state)', '"train", state, role="extra")')
    (folder / "steady.py").write_text(body, encoding="utf-8")
    with pytest.raises(FnrflError, match="No task of Steady in round 1 was private training"):
        fnrfl.run("digits", algorithm="steady:Steady", fnr="on", rounds=1, out=None)
