"""Commands and faults in any order on one folder: no traceback, no finished run lost, no file outside touched, and
every number is the one that a clean computation gives."""

from __future__ import annotations

import csv
import errno
import itertools
import json
import os
import random
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from typer.testing import CliRunner

from faults import Crash, crashing, snapshot
from fnrfl import cli
from fnrfl.config import RunConfig, load
from fnrfl.core.errors import FnrflError
from fnrfl.rundir import files
from fnrfl.runs import run as runs

NAMES = ("one", "two")
CONFIGS: tuple[tuple[str, ...], ...] = (  # told apart by their seed
    ("seed=0", "algorithm=fedavg"),
    ("seed=1", "algorithm=scaffold", "fnr=on", "fnr.epochs=1", "model=mlp(hidden=4, norm=batch)"),
    ("seed=2", "algorithm=local-only"),
)
COMMON = (
    "dataset=data.csv", "model=mlp(hidden=4)", "clients=2", "rounds=3", "scenario=iid", "client.epochs=1",
    "client.batch=8", "engine=loop", "engine.threads=1", "public.size=0.2",
)  # fmt: skip
ROUNDS = 3


def write_table(path: Path, version: int) -> None:
    dice = random.Random(version)
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["height", "weight", "label"])
        for _ in range(60):
            height, weight = dice.gauss(0, 1), dice.gauss(0, 1)
            table.writerow([f"{height:.3f}", f"{weight:.3f}", "large" if height + weight > 0 else "small"])


def configured(number: int) -> RunConfig:
    return load("digits", [*COMMON, *CONFIGS[number]])


@cache
def clean(number: int, version: int) -> runs.Result:
    """The run that nothing happens to, in a folder of its own."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            write_table(Path("data.csv"), version)
            return runs.run(configured(number), out=None)
        finally:
            os.chdir(before)


def accuracy_on_all(result: runs.Result, path: Path) -> float:
    """Accuracy on every row of a table, by plain torch; the mean over clients where each has a model of its own."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    x = torch.tensor([[float(row["height"]), float(row["weight"])] for row in rows])
    y = torch.tensor([result.classes.index(row["label"]) for row in rows])
    own = result.config.algorithm.name == "local-only"
    models = [result.client_model(client) for client in range(2)] if own else [result.model]
    with torch.no_grad():
        return float(np.mean([(model(x)[:, :2].argmax(1) == y).double().mean().item() for model in models]))


@dataclass(frozen=True)
class Known:
    """What must be under a name."""

    config: int
    version: int  # of the data
    finished: bool
    tainted: bool = False  # somebody has changed a file: refused or right, nothing in between


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """No room from some operation on."""
    left = itertools.count(after, -1)

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*given: Any, **named: Any) -> Any:
            if next(left) <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(given[0]))
            return original(*given, **named)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_new", "append"):
            patch.setattr(files, name, refusing(getattr(files, name)))
        yield


@contextmanager
def stopped_by_hand(after: int) -> Iterator[None]:
    """Ctrl-C in some round."""
    asked = itertools.count(after, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            runs, "interruptible", lambda: nullcontext(lambda: KeyboardInterrupt() if next(asked) <= 0 else None)
        )
        yield


FAULTS: dict[str, Callable[[int], Any]] = {
    "none": lambda after: nullcontext(),
    "kill": crashing,
    "full disk": full_disk,
    "ctrl-c": lambda after: stopped_by_hand(after % ROUNDS),
}
fault = st.sampled_from(sorted(FAULTS))
moment = st.integers(0, 45)
name = st.sampled_from(NAMES)
config = st.integers(0, len(CONFIGS) - 1)


class Machine(RuleBasedStateMachine):
    """A folder with runs in it, and what must be true of them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = os.getcwd()
        self.root = Path(tempfile.mkdtemp(prefix="machine-"))
        (self.root / "outside").mkdir()
        for name in ("thesis.tex", "server.safetensors", "client-0.safetensors", "events.jsonl"):
            (self.root / "outside" / name).write_text("three years of work")
        self.outside = snapshot(self.root / "outside")
        (self.root / "work" / "runs").mkdir(parents=True)
        os.chdir(self.root / "work")
        self.version = 0
        write_table(Path("data.csv"), 0)
        self.known: dict[str, Known] = {}
        self.notes: list[str] = []

    def teardown(self) -> None:
        os.chdir(self.before)
        shutil.rmtree(self.root)

    # -- commands -----------------------------------------------------------------------------------------------------
    def call(self, *arguments: str, fault: str = "none", after: int = 0) -> Any:
        """The command's result; None if the process was killed."""
        try:
            with FAULTS[fault](after):
                got = CliRunner().invoke(cli.app, list(arguments))
        except Crash:
            return None
        said = got.output + got.stderr
        assert got.exit_code in (0, 2, 3, 130), (arguments, got.exit_code, said, got.exception)
        assert "Traceback" not in said and "please report it" not in said, (arguments, said)
        return got

    def look(self, name: str, *possible: Known | None) -> None:
        """Find out which of the possible things is under a name after a command that may have been cut short."""
        folder = Path("runs") / name
        if not os.path.lexists(folder):
            assert None in possible, f"{name} is gone"
            self.known.pop(name, None)
            return
        seed = int(tomllib.loads((folder / "config.toml").read_text())["seed"])
        found = [one for one in possible if one is not None and CONFIGS[one.config][0] == f"seed={seed}"]
        assert found, f"{name} holds a run with seed {seed}"
        finished = (folder / "model.safetensors").exists()
        self.known[name] = replace(found[0], finished=finished)

    @rule(name=name, config=config, fault=fault, after=moment)
    def run(self, name: str, config: int, fault: str, after: int) -> None:
        there, before = name in self.known, snapshot(Path("runs"))
        arguments = ("run", "digits", *COMMON, *CONFIGS[config], "-o", f"runs/{name}", "--checkpoint-every", "0")
        got = self.call(*arguments, fault=fault, after=after)
        if there:
            assert got is None or got.exit_code == 2
            assert snapshot(Path("runs")) == before or got is None
            return
        self.look(name, Known(config, self.version, finished=False), None)
        if fault == "none":
            assert got.exit_code == 0, got.output

    @rule(name=name, config=config, fault=fault, after=moment, every=st.sampled_from(["0", "1000"]))
    def overwrite(self, name: str, config: int, fault: str, after: int, every: str) -> None:
        old, new = self.known.get(name), Known(config, self.version, finished=False)
        arguments = ("run", "digits", *COMMON, *CONFIGS[config], "-o", f"runs/{name}", "--overwrite")
        got = self.call(*arguments, "--checkpoint-every", every, fault=fault, after=after)
        cut_short = got is None or got.exit_code != 0
        if old is not None and old.tainted and cut_short:
            # Perhaps it no longer passes for a run and is left alone; perhaps the new run is there, cut short.
            self.known[name] = replace(new, tainted=True) if self.is_log_of(name, new) else old
            return
        if old is not None and old.config == config and cut_short:  # the log can tell which of the two is there
            self.look(name, old if old.version == self.version or self.is_log_of(name, old) else new)
        else:
            self.look(name, new, old)
        if fault == "none":
            assert got is not None and got.exit_code == 0, got.output
            assert self.known[name] == replace(new, finished=True)

    def is_log_of(self, name: str, one: Known) -> bool:
        """Whether the log under a name is that of a run."""
        log = Path("runs") / name / "events.jsonl"
        try:
            first = json.loads(log.read_text().partition("\n")[0]) if log.is_file() else {}  # a pipe would wait
            found = first["data"]["sha256"], first["config"]["seed"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return found == (self.checksum(one), configured(one.config).seed)

    @rule(name=name, fault=fault, after=moment)
    def resume(self, name: str, fault: str, after: int) -> None:
        got = self.call("resume", f"runs/{name}", "--checkpoint-every", "0", fault=fault, after=after)
        known = self.known.get(name)
        if known is None:
            assert got is None or got.exit_code == 2
            return
        if known.tainted:
            return
        self.look(name, known)
        if got is not None and not known.finished and known.version != self.version:
            assert got.exit_code == 2 and "data" in got.stderr
        elif fault == "none":
            assert got.exit_code == 0, got.output

    @rule(name=name)
    def evaluate(self, name: str) -> None:
        got = self.call("evaluate", f"runs/{name}", "data.csv", "--json")
        known = self.known.get(name)
        if known is None or (not known.finished and not known.tainted):
            assert got.exit_code == 2
        elif got.exit_code == 0:
            scored, wanted = json.loads(got.stdout), clean(known.config, known.version)
            own = known.version == self.version
            assert scored["examples"] == (12 if own else 60)
            expected = wanted.accuracy if own else accuracy_on_all(wanted, Path("data.csv"))
            assert scored["accuracy"] == pytest.approx(expected, abs=1e-9)
        else:
            assert known.tainted, got.output

    @rule(name=name)
    def predict(self, name: str) -> None:
        got = self.call("predict", f"runs/{name}", "data.csv")
        known = self.known.get(name)
        if known is not None and known.finished and not known.tainted:
            assert got.exit_code == 0, got.output
            assert len(got.stdout.splitlines()) == 61

    @rule(name=st.sampled_from([*NAMES, "."]))
    def report(self, name: str) -> None:
        got = self.call("report", f"runs/{name}", "--no-plots")
        known = self.known.get(name)
        if known is not None and known.finished and not known.tainted:
            assert got.exit_code == 0, got.output
        Path("runs/report.html").unlink(missing_ok=True)

    # -- what people and machines do to a folder ----------------------------------------------------------------------
    @rule(version=st.integers(0, 1))
    def change_the_data(self, version: int) -> None:
        self.version = version
        write_table(Path("data.csv"), version)

    @rule(name=name, place=st.integers(0, 10**6), how=st.sampled_from(["flip", "cut", "delete", "link", "pipe"]))
    def damage(self, name: str, place: int, how: str) -> None:
        if name not in self.known:
            return
        files = (p for p in (Path("runs") / name).rglob("*") if p.is_file() and not p.is_symlink())
        found = sorted(p for p in files if p.suffix != ".txt")  # through a link it would be this test that does harm
        path = found[place % len(found)]
        content = bytearray(path.read_bytes())
        if how == "flip" and content:
            content[place % len(content)] ^= 1 + place % 7
            path.write_bytes(content)
        elif how == "cut":
            path.write_bytes(content[: place % (len(content) + 1)])
        else:
            path.unlink()
            if how == "link":
                path.symlink_to(self.root / "outside" / "events.jsonl")
            elif how == "pipe":
                os.mkfifo(path)
        self.known[name] = replace(self.known[name], tainted=True)

    @rule(name=name, place=st.integers(0, 10**6))
    def mix(self, name: str, place: int) -> None:
        """Copy a file of the other run over, under the same name or as a new one."""
        other = NAMES[1 - NAMES.index(name)]
        if {name, other} - self.known.keys():
            return
        theirs = sorted(p for p in (Path("runs") / other).rglob("*") if p.is_file() and p.suffix != ".txt")
        path = theirs[place % len(theirs)]
        to = Path("runs") / name / path.relative_to(Path("runs") / other)
        if to.parent.is_dir() and not to.is_symlink() and (to.is_file() or not to.exists()):
            shutil.copy(path, to)
            self.known[name] = replace(self.known[name], tainted=True)

    @rule(name=name)
    def remove_a_tainted_run(self, name: str) -> None:
        """As its owner would, after the sentence that it cannot be used."""
        if name in self.known and self.known[name].tainted:
            self.notes = [note for note in self.notes if not list((Path("runs") / name).rglob(f"{note}.txt"))]
            shutil.rmtree(Path("runs") / name)
            del self.known[name]

    @rule(name=name, link=st.booleans())
    def leave_something(self, name: str, link: bool) -> None:
        if name not in self.known:
            return
        rounds = Path("runs") / name / "rounds"
        folder = rounds if rounds.is_dir() and not rounds.is_symlink() else rounds.parent
        if link:
            with tempfile.TemporaryDirectory(dir=folder) as free:
                pass
            Path(free).symlink_to(self.root / "outside")
        else:
            note = f"note-{len(self.notes)}-{random.Random(len(self.notes)).random()}"
            (folder / f"{note}.txt").write_text(note)
            self.notes.append(note)

    @rule()
    def exchange_names(self) -> None:
        if set(NAMES) <= self.known.keys():
            one, two = (Path("runs") / name for name in NAMES)
            one.rename("runs/aside")
            two.rename(one)
            Path("runs/aside").rename(two)
            self.known[NAMES[0]], self.known[NAMES[1]] = self.known[NAMES[1]], self.known[NAMES[0]]

    # -- what always holds --------------------------------------------------------------------------------------------
    @invariant()
    def nothing_outside_is_touched(self) -> None:
        assert snapshot(self.root / "outside") == self.outside

    @invariant()
    def finished_runs_are_what_they_were(self) -> None:
        for name, known in self.known.items():
            if not known.finished and not known.tainted:
                continue
            try:
                got = runs.load(Path("runs") / name)
                got_hash = got.model_sha256
            except FnrflError:
                assert known.tainted, name
                continue
            wanted = clean(known.config, known.version)
            assert got_hash == wanted.model_sha256
            assert [e["accuracy"] for e in got.rounds] == [e["accuracy"] for e in wanted.rounds]

    @invariant()
    def nobodys_notes_are_lost(self) -> None:
        there = {path.stem for path in self.root.rglob("*.txt")}
        assert set(self.notes) <= there

    def checksum(self, known: Known) -> str:
        from fnrfl.data.datasets import load as load_data

        with tempfile.TemporaryDirectory() as folder:
            write_table(Path(folder) / "data.csv", known.version)
            return load_data(f"{folder}/data.csv").checksum


def sequences(count: int, steps: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a shorter sequence takes minutes to find
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_any_sequence_of_commands_and_faults() -> None:
    run_state_machine_as_test(Machine, settings=sequences(20, 9))


@pytest.mark.slow
def test_any_of_500_sequences_of_commands_and_faults() -> None:
    run_state_machine_as_test(Machine, settings=sequences(500, 25))
