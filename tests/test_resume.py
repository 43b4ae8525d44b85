"""Stopping, crashing, damage on disk: a run resumes to the same bits, or says in a sentence why it cannot."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faults import Crash, crashing, snapshot
from fnrfl.config import RunConfig, load, loads
from fnrfl.core.errors import ConfigError
from fnrfl.core.rng import numpy_generator
from fnrfl.rundir import events, files, record
from fnrfl.runs import run as runs
from fnrfl.runs.result import Result
from fnrfl.runs.run import load as load_run
from fnrfl.runs.run import resume, run

ROUNDS = 3
METHODS: tuple[dict[str, Any], ...] = (
    {"name": "fedavg"},
    {"name": "fedprox"},
    {"name": "fednova"},
    {"name": "scaffold"},
    {"name": "scaffold", "variates": "I"},
    {"name": "moon"},
)
REFINEMENTS: tuple[Any, ...] = ("off", {"epochs": 1}, {"epochs": 1, "when": "both"})
Damage = Callable[[Path], object]


class Stop(Exception):
    """Somebody stops the run between two rounds."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ninety small images of three classes to train on, thirty to test."""
    path = tmp_path_factory.mktemp("data") / "tiny.npz"
    dice = numpy_generator(0, "tiny")
    y = np.arange(120) % 3
    x = (dice.normal(size=(120, 1, 4, 4)) + y[:, None, None, None]).astype(np.float32)
    np.savez(path, x_train=x[:90], y_train=y[:90], x_test=x[90:], y_test=y[90:])
    return path


def configured(data: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    """SCAFFOLD under FNR with BatchNorm, part of the clients at a time: all that a checkpoint can hold."""
    small = {
        "dataset": str(data),
        "model": "cnn(norm=batch)",
        "rounds": ROUNDS,
        "clients": 5,
        "participation": 0.6,
        "scenario": "label-dirichlet(1.0, min=4)",
        "algorithm": "scaffold",
        "fnr": {"epochs": 1},
        "client": {"epochs": 1, "batch": 8, "lr": 0.05, "lr_decay": 0.9},
        "engine": {"name": "loop", "threads": 1},
    }
    return load("digits", small | (changes or {}))


@cache
def uninterrupted(config: str) -> Result:
    """The run that nobody stops, and that writes nothing."""
    return run(loads(config), out=None)


def facts(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Everything in the log of rounds that a clock has no part in."""
    return [{k: v for k, v in event.items() if k != "seconds"} for event in rounds]


def assert_same(got: Result, config: RunConfig) -> None:
    """The uninterrupted run's model and rounds, in the result and on disk."""
    wanted = uninterrupted(config.to_toml())
    assert got.model_sha256 == wanted.model_sha256
    assert facts(got.rounds) == facts(wanted.rounds)
    assert got.run_dir is not None
    log = list(events.read_events(got.run_dir / "events.jsonl"))
    assert log[0]["config"] == got.config.as_dict()
    assert facts(log[1:]) == json.loads(json.dumps(facts(wanted.rounds)))


def stopping(after: int) -> Callable[[dict[str, Any]], None]:
    """A progress display that ends the run after some round."""

    def progress(event: dict[str, Any]) -> None:
        if event["round"] == after:
            raise Stop

    return progress


def stopped(config: RunConfig, run_dir: Path, after: int, every: float = 0.0) -> Path:
    """A run directory as it is after a stop."""
    with pytest.raises(Stop):
        run(config, out=run_dir, progress=stopping(after), checkpoint_every=every)
    return run_dir


def checkpoint_files(run_dir: Path) -> tuple[set[str], set[str]]:
    """(files under rounds/, files that checkpoint.json names)."""
    index = json.loads((run_dir / "checkpoint.json").read_text())
    there = {str(p.relative_to(run_dir)) for p in (run_dir / "rounds").rglob("*") if p.is_file()}
    return there, {file["file"] for file in (index["server"], *index["clients"].values())}


@pytest.fixture(scope="module")
def config(data: Path) -> RunConfig:
    return configured(data)


@pytest.fixture(scope="module")
def halfway(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after its second round, with a checkpoint of it; not to be touched."""
    return stopped(config, tmp_path_factory.mktemp("halfway") / "run", after=2)


@pytest.fixture(scope="module")
def unsaved(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same before its first checkpoint."""
    run_dir = stopped(config, tmp_path_factory.mktemp("unsaved") / "run", after=2, every=1e9)
    shutil.rmtree(run_dir / "rounds")  # whoever stops a run by an exception has it saved; a kill has not
    (run_dir / "checkpoint.json").unlink()
    return run_dir


@pytest.fixture
def run_dir(halfway: Path, tmp_path: Path) -> Path:
    """The run with a checkpoint, to do anything to."""
    return Path(shutil.copytree(halfway, tmp_path / "run"))


@pytest.fixture(scope="module")
def finished(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that came to its end, with its directory."""
    return run(config, out=tmp_path_factory.mktemp("finished") / "run")


# -- stopping between rounds -------------------------------------------------------------------------------------------

CHOICES = {
    "method": st.sampled_from(METHODS),
    "fnr": st.sampled_from(REFINEMENTS),
    "engine": st.sampled_from(("loop", "batched")),
    "at_once": st.sampled_from((2, 3)),  # with fewer than the cohort of three, memories live on disk
    "stops": st.lists(st.integers(1, ROUNDS), max_size=3),
    "every": st.integers(1, ROUNDS + 1),
}


def check_stops(
    data: Path,
    folder: Path,
    method: dict[str, Any],
    fnr: Any,
    engine: str,
    at_once: int,
    stops: Sequence[int],
    every: int,
) -> None:
    """Stop after each of these rounds in turn, going on in between; `every` counts rounds between checkpoints."""
    model = "cnn(norm=batch)" if engine == "loop" else "mlp(hidden=8)"
    engines = {"name": engine, "clients_at_once": at_once, "threads": 1}
    config = configured(data, {"algorithm": method, "fnr": fnr, "model": model, "engine": engines})
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)  # of the last example

    def go(progress: Callable[[dict[str, Any]], None] | None = None) -> Result:
        with pytest.MonkeyPatch.context() as patch:
            # A clock that moves on by a second whenever somebody looks, so that `checkpoint_every` counts rounds.
            patch.setattr(runs, "time", SimpleNamespace(monotonic=itertools.count().__next__))
            if run_dir.exists():
                return resume(run_dir, progress=progress, checkpoint_every=every)
            return run(config, out=run_dir, progress=progress, checkpoint_every=every)

    for stop in stops:
        try:
            go(stopping(stop))
        except Stop:
            continue
    assert_same(go(), config)
    there, named = checkpoint_files(run_dir)
    assert there == named


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@settings(max_examples=8)
@given(**CHOICES)
def test_stopping_after_any_round_changes_nothing(data: Path, folder: Path, **choice: Any) -> None:
    check_stops(data, folder, **choice)


@pytest.mark.slow
@settings(max_examples=100)
@given(**CHOICES)
def test_stopping_changes_nothing_thoroughly(data: Path, folder: Path, **choice: Any) -> None:
    check_stops(data, folder, **choice)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("at_once", [2, 3])
def test_memories_survive_a_stop_after_every_round(data: Path, folder: Path, engine: str, at_once: int) -> None:
    check_stops(data, folder, {"name": "scaffold"}, {"epochs": 1}, engine, at_once, [1, 2, 3], every=1)


def test_without_its_memories_a_run_would_end_elsewhere(config: RunConfig, run_dir: Path) -> None:
    """So that the tests above could fail at all."""
    change_index(clients={})(run_dir)
    assert resume(run_dir).model_sha256 != uninterrupted(config.to_toml()).model_sha256


# -- crashing inside a write -------------------------------------------------------------------------------------------


def check_crash(config: RunConfig, folder: Path, first: int, second: int) -> bool:
    """Crash, crash again while going on, go on; returns whether the first crash happened."""
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)

    def go() -> Result:
        if run_dir.exists():
            return resume(run_dir, checkpoint_every=0)
        return run(config, out=run_dir, checkpoint_every=0)

    crashes = 0
    for operations in (first, second):
        try:
            with crashing(operations):
                go()
        except Crash:
            crashes += 1
    assert_same(go(), config)
    there, named = checkpoint_files(run_dir)
    assert there == named
    assert not list(run_dir.glob("*.part"))
    return crashes > 0


@settings(max_examples=4)
@given(first=st.integers(0, 90), second=st.integers(0, 90))
def test_a_crash_in_a_file_operation_changes_nothing(config: RunConfig, folder: Path, first: int, second: int) -> None:
    check_crash(config, folder, first, second)


@pytest.mark.slow
def test_a_crash_in_every_file_operation_changes_nothing(config: RunConfig, folder: Path) -> None:
    tried = next(n for n in itertools.count() if not check_crash(config, folder, n, second=10**9))
    assert tried > 50  # three checkpoints with client memories cannot take less


def test_a_crash_before_the_index_is_replaced(config: RunConfig, tmp_path: Path) -> None:
    def write(path: Path, text: Any, original: Callable[..., None] = files.write) -> None:
        if path.name == "checkpoint.json" and json.loads(text)["round"] == 2:
            raise Crash
        original(path, text)

    run_dir = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", write)
        with pytest.raises(Crash):
            run(config, out=run_dir, checkpoint_every=0)
    assert (run_dir / "rounds" / "000002" / "server.safetensors").exists()
    assert json.loads((run_dir / "checkpoint.json").read_text())["round"] == 1

    seen: list[int] = []
    assert_same(resume(run_dir, progress=lambda event: seen.append(event["round"])), config)
    assert seen == [2, 3]


def test_pruning_keeps_what_the_checkpoint_names_and_nothing_else(config: RunConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    folders: list[set[str]] = []

    def progress(event: dict[str, Any]) -> None:
        there, named = checkpoint_files(run_dir)
        assert there == named
        folders.append({Path(name).parts[1] for name in there})
        stale = run_dir / "rounds" / "000099.part"  # as a kill leaves it
        assert not stale.exists()
        stale.mkdir()
        (stale / "server.safetensors").write_bytes(b"half")

    run(config, out=run_dir, progress=progress, checkpoint_every=0)
    assert folders[0] == {"000001"}
    # Memories that did not change since an older checkpoint stay where they are.
    assert all("000003" in later and later - {"000003"} for later in folders[2:])


# -- damage ------------------------------------------------------------------------------------------------------------


def assert_refused(run_dir: Path, *words: str) -> None:
    """Going on is refused with a sentence that has these words, and nothing is changed."""
    before = snapshot(run_dir)
    with pytest.raises(ConfigError) as error:
        resume(run_dir)
    for word in words:
        assert word in str(error.value)
    assert str(error.value).rstrip().endswith(".")
    assert snapshot(run_dir) == before


def change_index(**changes: Any) -> Damage:
    def damage(run_dir: Path) -> None:
        path = run_dir / "checkpoint.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def cut(name: str, keep: float) -> Damage:
    """Cut the first file of that name, keeping a share of it."""

    def damage(run_dir: Path) -> None:
        path = next(iter(sorted(run_dir.rglob(name))))
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])

    return damage


def replace_text(name: str, text: bytes) -> Damage:
    return lambda run_dir: (run_dir / name).write_bytes(text)


def remove(name: str) -> Damage:
    return lambda run_dir: next(iter(sorted(run_dir.rglob(name)))).unlink()


def swap(name: str, old: str, new: str) -> Damage:
    def damage(run_dir: Path) -> None:
        text = (run_dir / name).read_text()
        assert old in text
        (run_dir / name).write_text(text.replace(old, new, 1))

    return damage


def keep_lines(count: int) -> Damage:
    def damage(run_dir: Path) -> None:
        path = run_dir / "events.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))

    return damage


def a_client(run_dir: Path) -> dict[str, str]:
    clients: dict[str, dict[str, str]] = json.loads((run_dir / "checkpoint.json").read_text())["clients"]
    return clients[max(clients)]


FILE = {"file": "rounds/000002/server.safetensors", "sha256": "0" * 64}
LATER = record.CHECKPOINT_FORMAT + 1
DAMAGE: dict[str, tuple[Damage, list[str]]] = {  # what is done, and what the refusal names
    "empty server state": (cut("server.safetensors", 0.0), ["server.safetensors"]),
    "half a server state": (cut("server.safetensors", 0.5), ["server.safetensors"]),
    "server state without its end": (cut("server.safetensors", 0.999), ["server.safetensors"]),
    "half a client memory": (cut("client-*.safetensors", 0.5), ["client-"]),
    "no server state": (remove("server.safetensors"), ["server.safetensors"]),
    "no client memory": (remove("client-*.safetensors"), ["client-"]),
    "empty index": (cut("checkpoint.json", 0.0), ["checkpoint.json", "damaged"]),
    "half an index": (cut("checkpoint.json", 0.5), ["checkpoint.json", "damaged"]),
    "index is a list": (replace_text("checkpoint.json", b"[]"), ["checkpoint.json", "damaged"]),
    "index is no text": (replace_text("checkpoint.json", b"\xff\xfe"), ["checkpoint.json", "damaged"]),
    "index without files": (replace_text("checkpoint.json", b'{"format": 1}'), ["checkpoint.json", "damaged"]),
    "round is a word": (change_index(round="two"), ["checkpoint.json", "damaged"]),
    "clients are a list": (change_index(clients=["rounds/000002/client-0.safetensors"]), ["checkpoint.json"]),
    "client is a word": (change_index(clients={"somebody": FILE}), ["checkpoint.json"]),
    "server is nothing": (change_index(server=None), ["checkpoint.json"]),
    "server is a client": (lambda run_dir: change_index(server=a_client(run_dir))(run_dir), ["client-"]),
    "server is another file": (change_index(server=FILE | {"file": "config.toml"}), ["config.toml"]),
    "server is outside": (change_index(server=FILE | {"file": "../../../etc/passwd"}), ["checkpoint.json", "etc"]),
    "server is a path": (change_index(server=FILE | {"file": "/rounds/000001/server.safetensors"}), ["/rounds"]),
    "another format": (change_index(format=LATER), [f"format {LATER}"]),
    "another format with other keys": (replace_text("checkpoint.json", b'{"format": 99, "state": ""}'), ["format 99"]),
    "half a config": (replace_text("config.toml", b"seed = "), ["config.toml"]),
    "config is no text": (replace_text("config.toml", b"\xff\xfe"), ["config.toml"]),
    "no config": (remove("config.toml"), ["config.toml"]),
    "another lr": (swap("config.toml", "lr = 0.05", "lr = 0.06"), ["events.jsonl", "config.toml"]),
    "another seed": (swap("config.toml", "seed = 0", "seed = 1"), ["events.jsonl", "config.toml"]),
    "more rounds": (swap("config.toml", "rounds = 3", "rounds = 4"), ["events.jsonl", "config.toml"]),
    "no log": (remove("events.jsonl"), ["events.jsonl"]),
    "a log cut in the middle": (swap("events.jsonl", '"cohort": ', ""), ["events.jsonl"]),
    **{f"a log of {lines} lines": (keep_lines(lines), ["events.jsonl"]) for lines in range(3)},  # after a power failure
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_is_refused_and_left_alone(run_dir: Path, damage: str) -> None:
    harm, words = DAMAGE[damage]
    harm(run_dir)
    assert_refused(run_dir, *words)


def test_a_config_edited_before_the_first_checkpoint_is_refused(unsaved: Path, tmp_path: Path) -> None:
    """The log's first line and the partition tell of the old one."""
    run_dir = Path(shutil.copytree(unsaved, tmp_path / "run"))
    swap("config.toml", "seed = 0", "seed = 1")(run_dir)
    assert_refused(run_dir, "config.toml")


def test_data_that_changed_since_the_stop_is_refused(data: Path, tmp_path: Path) -> None:
    own = Path(shutil.copy(data, tmp_path / "own.npz"))
    run_dir = stopped(configured(own), tmp_path / "run", after=2)
    with np.load(own) as arrays:
        changed = {name: arrays[name] for name in arrays.files}
    changed["x_train"] = changed["x_train"] + 1
    np.savez(own, **changed)
    assert_refused(run_dir, "own.npz")


@pytest.mark.parametrize("source", ["halfway", "unsaved"])
@pytest.mark.parametrize("half", ["{", '{"round": 3}'], ids=["cut", "without its end"])
def test_half_a_line_at_the_end_of_the_log_is_forgiven(
    config: RunConfig, tmp_path: Path, request: pytest.FixtureRequest, source: str, half: str
) -> None:
    run_dir = Path(shutil.copytree(request.getfixturevalue(source), tmp_path / "run"))
    with (run_dir / "events.jsonl").open("a") as log:
        log.write(half)
    assert_same(resume(run_dir), config)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"config\.toml"):
            resume(path)
    assert not list(tmp_path.iterdir())


# -- finished runs -----------------------------------------------------------------------------------------------------


def test_resuming_a_finished_run_changes_nothing(config: RunConfig, finished: Result) -> None:
    assert finished.run_dir is not None
    before = snapshot(finished.run_dir)
    seen: list[Any] = []
    again = resume(finished.run_dir, progress=seen.append)
    assert_same(again, config)
    assert again.summary() == finished.summary() and not seen and snapshot(finished.run_dir) == before
    torch.testing.assert_close(again.model.state_dict(), finished.model.state_dict(), rtol=0, atol=0)


@pytest.fixture
def ended(finished: Result, tmp_path: Path) -> Path:
    """The finished run, to do anything to."""
    return Path(shutil.copytree(finished.run_dir or "", tmp_path / "run"))


@pytest.mark.parametrize("stem", ["server", "client-*"])
def test_a_damaged_checkpoint_of_a_finished_run_is_refused(ended: Path, stem: str) -> None:
    damaged = sorted(ended.glob(f"rounds/*/{stem}.safetensors"))[0]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1  # one bit of the last number
    damaged.write_bytes(content)
    assert_refused(ended, damaged.name)
    with pytest.raises(ConfigError, match=damaged.name):
        load_run(ended)
    damaged.unlink()
    assert_refused(ended, damaged.name)
