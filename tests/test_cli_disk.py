"""A disk that is full, read-only or somebody else's: one sentence, exit code 3, and a run that can go on."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from typer.testing import CliRunner, Result

from fnrfl import cli
from fnrfl.config import load
from fnrfl.rundir import checkpoint, events, files
from fnrfl.runs import run as runs

RUN = ("run", "rounds=2", "client.epochs=1", "-o", "run", "--quiet", "--checkpoint-every", "0")


def fnrfl(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def assert_told(got: Result, *said: str) -> None:
    assert got.exit_code == 3, got.output
    assert got.stderr.startswith("fnrfl: ")
    assert got.stderr.count("\n") == 1
    assert "Unexpected" not in got.stderr
    assert "Traceback" not in got.output
    for words in said:
        assert words in got.stderr


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    assert_told(got, f"somewhere: {os.strerror(number)}.")
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
        assert_told(fnrfl(*RUN), os.strerror(number), "To go on: fnrfl resume run")
    got = fnrfl("resume", "run", "--quiet")
    assert got.exit_code == 0, got.output
    config = load(None, ["rounds=2", "client.epochs=1"])
    assert runs.load("run").model_sha256 == runs.run(config, out=None).model_sha256


def test_what_safetensors_says_of_a_full_disk_is_said_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_checkpoint", full)
    assert_told(fnrfl(*RUN), "fnrfl: No space left on device. Make room. To go on: fnrfl resume run")


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write", refusing(errno.EROFS, files.write))
    assert isinstance(fnrfl(*RUN, "--debug").exception, OSError)


def test_not_enough_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(runs, "run", starved)
    assert_told(fnrfl(*RUN), "not enough memory", "engine.clients_at_once")


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
            assert_told(got, "No space left on device", "Make room")
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
    assert_told(got, "Read-only file system", str(place))
    got = fnrfl("scenario", "save", str(place / "split.json"), "iid")
    assert_told(got, "Read-only file system")
