"""How a run is kept from its end: by Ctrl-C, by another run, by a disk that is full, read-only or somebody else's."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

from command_line import assert_refused, fnrfl, tree
from fnrfl.cli import display as shown
from fnrfl.config import load
from fnrfl.rundir import checkpoint, events, files
from fnrfl.rundir.lock import lock_file
from fnrfl.runs import run as runs
from fnrfl.runs.predict import predict

MAIN = """
from fnrfl.cli import display, main
Display = display.Display
display.Display = lambda round, phase: Display(round, lambda name: print("phase", name, flush=True))
main()
"""
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def folder(tmp_cwd: Path) -> Path:
    return tmp_cwd


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the command line in a process of its own; whatever is left of it in the end is killed."""
    begun: list[subprocess.Popen[str]] = []

    def command(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        begun.append(process)
        return process

    yield command
    for process in begun:
        process.kill()
        process.communicate()


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def rounds(run_dir: Path) -> int:
    log = run_dir / "events.jsonl"
    return log.read_bytes().count(b"\n") - 1 if log.exists() else -1


KEYS = ("rounds=400", "algorithm=scaffold")


def test_ctrl_c_saves_and_a_resumed_run_is_the_same(start: Start, folder: Path) -> None:
    process = start("run", *KEYS, "-o", "my runs/a")
    wait(lambda: rounds(folder / "my runs/a") > 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "stopping after this round" in err
    assert err.endswith("fnrfl: stopped. To go on: fnrfl resume 'my runs/a'\n")
    run_dir = folder / "my runs/a"
    done = json.loads((run_dir / "checkpoint.json").read_text())["round"]
    assert done == rounds(run_dir) == len(re.findall("^round ", out, re.MULTILINE))
    assert not lock_file(run_dir).exists()
    # Of as many rounds: whether steps are recorded depends on how many there will be, and rounding depends on that.
    for go in (partial(runs.run, load(None, [*KEYS]), out="whole"), partial(runs.resume, run_dir)):
        with pytest.raises(Stop):
            go(progress=stopping_after(done + 1))
    last, of_whole = (last_event(path) for path in (run_dir, folder / "whole"))
    assert last["round"] == of_whole["round"] == done + 1
    assert last["loss"] == of_whole["loss"]
    assert last["per_client"] == of_whole["per_client"]


class Stop(Exception):
    pass


def stopping_after(round: int) -> Callable[[Mapping[str, Any]], None]:
    def stop(event: Mapping[str, Any]) -> None:
        if event["round"] == round:
            raise Stop

    return stop


def last_event(run_dir: Path) -> dict[str, Any]:
    last: dict[str, Any] = json.loads((run_dir / "events.jsonl").read_text().splitlines()[-1])
    return last


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_second_ctrl_c_stops_at_once(start: Start, folder: Path, engine: str) -> None:
    long = ("client.epochs=1000", "client.batch=8", "model=mlp(hidden=4000)")
    process = start("run", *long, f"engine={engine}", "engine.threads=2", "-o", "run")
    assert process.stdout is not None
    assert process.stderr is not None
    assert "phase local\n" in process.stdout
    time.sleep(0.5)  # into the middle of it
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "\n"
    assert "stopping after this round" in process.stderr.readline()
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert time.monotonic() - began < 10
    assert err == "fnrfl: stopped. To go on: fnrfl resume run\n"


def test_ctrl_c_in_the_last_round_changes_nothing(folder: Path) -> None:
    config = load(None, ["rounds=2"])

    def press(event: dict[str, object]) -> None:
        if event["round"] == 1:
            pressed.append(True)

    pressed: list[bool] = []

    def phase(name: str) -> None:
        if pressed and name == "local":
            pressed.clear()
            os.kill(os.getpid(), signal.SIGINT)

    result = runs.run(config, out="run", progress=press, phase=phase)
    assert result.model_sha256 == runs.run(config, out=None).model_sha256
    assert (folder / "run" / "model.safetensors").is_file()


def test_ctrl_c_without_a_directory_interrupts_as_usual() -> None:
    def phase(name: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        runs.run(load(None, ["rounds=2"]), out=None, phase=phase)


def test_a_directory_in_use_is_refused(start: Start, folder: Path) -> None:
    process = start("run", "rounds=100000", "-o", "run", "-q")
    wait(lambda: rounds(folder / "run") > 0)
    for words in (("resume", "run"), ("run", "-o", "run", "--overwrite")):
        assert_refused(fnrfl(*words), f"run is in use by process {process.pid}. Wait until it is done")
    assert "exists already" in fnrfl("run", "-o", "run").stderr
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert (folder / ".run.lock").exists()
    fnrfl("run", "rounds=1", "-o", "run", "--overwrite", code=0)  # nobody works there any more
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_two_runs_that_race_for_a_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second finds out when it wants to write, and says what it would have said before."""
    first = runs.run(load(None, ["rounds=1"]), out="other")

    def meanwhile(*given: object, **named: object) -> object:
        shutil.copytree("other", "run", dirs_exist_ok=True)
        return build(*given, **named)  # type: ignore[arg-type]

    build = runs.build
    monkeypatch.setattr(runs, "build", meanwhile)
    assert_refused(fnrfl("run", "rounds=1", "seed=1", "-o", "run"), "run exists already")
    assert runs.load("run").model_sha256 == first.model_sha256
    assert sorted(path.name for path in folder.iterdir()) == ["other", "run"]


def test_phases_are_told_as_they_begin() -> None:
    heard: list[str] = []
    runs.run(load(None, ["rounds=1", "fnr=on"]), out=None, phase=heard.append)
    assert heard[:2] == ["local", "measure"]
    assert "refine" in heard
    assert heard[-1] == "evaluate"


def test_the_command_line_shows_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    real = shown.Display

    def display(round: object, phase: object) -> shown.Display:
        return real(round, told.append)  # type: ignore[arg-type]

    monkeypatch.setattr(shown, "Display", display)
    fnrfl("run", "rounds=1", "-q", code=0)
    assert told == ["local", "evaluate"]


def test_a_model_is_of_use_without_its_data(folder: Path) -> None:
    dice = np.random.default_rng(0)
    y = dice.integers(3, size=300)
    np.savez("mine.npz", x=(dice.normal(size=(300, 4)) + 3 * np.eye(3, 4)[y]).astype(np.float32), y=y)
    result = runs.run(load(None, ["dataset=mine.npz", "rounds=1", "clients=3"]), out="run")
    (folder / "mine.npz").unlink()
    assert runs.load("run").model_sha256 == result.model_sha256
    np.savez("new.npz", x=np.eye(3, 4, dtype=np.float32))
    assert len(predict("run", "new.npz").labels) == 3


def test_noise_in_a_mask_on_a_table_is_refused_before_anything_is_written(folder: Path) -> None:
    (folder / "t.csv").write_text("a,b,label\n" + "".join(f"{i},{i % 3},{i % 2}\n" for i in range(400)))
    assert_refused(fnrfl("run", "dataset=t.csv", "scenario=feature-noise(1, kind=mask)"), "kind=level")
    assert [*tree(folder)] == ["t.csv"]


# -- disks -------------------------------------------------------------------------------------------------------------

RUN = ("run", "rounds=2", "client.epochs=1", "-o", "run", "--quiet", "--checkpoint-every", "0")


assert_failed = partial(assert_refused, code=3)


def refusing(number: int, original: Callable[..., Any], after: int = 0) -> Callable[..., Any]:
    """The same function until it has been called so many times; then the system refuses."""
    calls = iter(range(10**6))

    def function(*given: Any, **named: Any) -> Any:
        if next(calls) >= after:
            raise OSError(number, os.strerror(number), "somewhere")
        return original(*given, **named)

    return function


CODES = [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EIO]


@pytest.mark.parametrize("number", CODES, ids=errno.errorcode.get)
def test_a_refusal_before_the_first_round_leaves_nothing(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "write", refusing(number, files.write))
    got = fnrfl(*RUN)
    assert_failed(got, f"somewhere: {os.strerror(number)}.")
    assert ("Make room" in got.stderr) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert not list(folder.iterdir())


WRITES = {
    "log": (events, "append_event", 1),
    "checkpoint": (checkpoint, "save_checkpoint", 1),
    "sync": (files, "sync", 6),
}


@pytest.mark.parametrize("number", CODES[:3], ids=errno.errorcode.get)
@pytest.mark.parametrize("place", WRITES)
def test_a_refusal_during_a_run_says_how_to_go_on(
    place: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, after = WRITES[place]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, refusing(number, getattr(module, name), after))
        assert_failed(fnrfl(*RUN), os.strerror(number), "To go on: fnrfl resume run")
    fnrfl("resume", "run", "--quiet", code=0)
    config = load(None, ["rounds=2", "client.epochs=1"])
    assert runs.load("run").model_sha256 == runs.run(config, out=None).model_sha256


def test_what_safetensors_says_of_a_full_disk_is_said_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_checkpoint", full)
    assert_failed(fnrfl(*RUN), "fnrfl: No space left on device. Make room. To go on: fnrfl resume run")


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write", refusing(errno.EROFS, files.write))
    assert isinstance(fnrfl(*RUN, "--debug").exception, OSError)


def test_not_enough_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(runs, "run", starved)
    assert_failed(fnrfl(*RUN), "not enough memory", "engine.clients_at_once")


# -- a real one --------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(folder: Path) -> Iterator[Callable[[str], Path]]:
    """A small disk in memory, mounted with some options, and again with others."""
    place = folder / "disk"
    place.mkdir()
    mounted = False

    def mount(options: str) -> Path:
        nonlocal mounted
        change = "remount," if mounted else ""
        got = subprocess.run(["mount", "-t", "tmpfs", "-o", change + options, "fnrfl-test", place], capture_output=True)
        if got.returncode:
            pytest.skip(f"a disk of one's own cannot be mounted here: {got.stderr.decode().strip()}")
        mounted = True
        return place

    yield mount
    if mounted:
        subprocess.run(["umount", place], check=True)


@pytest.mark.slow
def test_a_run_on_a_full_disk_goes_on_once_there_is_room(disk: Callable[[str], Path]) -> None:
    """At every size from too small for anything to large enough, there is a sentence or a result."""
    config = load(None, ["algorithm=moon", "rounds=3", "client.epochs=1"])
    whole = runs.run(config, out=None).model_sha256
    begun = 0
    for size in range(4, 700, 60):
        place = disk(f"size={size}k")
        line = ("algorithm=moon", "rounds=3", "client.epochs=1", "-q", "--checkpoint-every", "0")
        got = fnrfl("run", *line, "-o", str(place / "run"))
        if got.exit_code:
            assert_failed(got, "No space left on device", "Make room")
            assert not list(place.glob(".run-*"))
        way_on = re.search(r"fnrfl resume (\S+)", got.stderr)
        disk("size=20m")
        if way_on is not None:
            begun += 1
            assert fnrfl("resume", way_on[1], "-q").exit_code == 0
        if way_on is not None or not got.exit_code:
            assert runs.load(place / "run").model_sha256 == whole
        subprocess.run(["rm", "-rf", place / "run"], check=True)
    assert begun > 2


@pytest.mark.slow
def test_a_read_only_disk(disk: Callable[[str], Path]) -> None:
    place = disk("size=1m")
    disk("ro")
    got = fnrfl("run", "rounds=1", "-q", "-o", str(place / "run"))
    assert_failed(got, "Read-only file system", str(place))
    got = fnrfl("scenario", "save", str(place / "split.json"), "iid")
    assert_failed(got, "Read-only file system")
