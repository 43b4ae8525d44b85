"""Kill runs without warning, resume them, and demand the bits of the run that nobody touched.

    python tests/kill.py [KILLS] [OVERWRITES] [ROUNDS]

SCAFFOLD under FNR on digits, in processes of its own: server state, client memories and BatchNorm buffers all have to
survive. Kills are spread over the whole run, half of them wait for a write; every third run is killed again while it is
resumed. Then runs are killed while they replace a finished one: the old or the new run must go on to its own bits. What
a kill leaves is judged with plain JSON, TOML and safetensors readers, not with the code on trial. What a crash in each
single operation leaves is tested in test_rundir.py and test_resume.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

import fnrfl
from fnrfl.core.rng import numpy_generator

RECIPE = ("digits", "algorithm=scaffold", "fnr=on", "model=cnn(norm=batch)", "participation=0.5", "client.epochs=5")
EVERY = ("--checkpoint-every", "0.2")  # seconds, less than a round takes: most rounds end in a checkpoint
WHOLE = {"config.toml", "partition.json", "events.jsonl", "checkpoint.json", "model.safetensors"}
OLD_SEED = 77  # of the run that is replaced
Outcome = tuple[str, list[dict[str, Any]]]  # the model's hash, and all facts of every round but the seconds


def started(*words: str) -> subprocess.Popen[str]:
    """`fnrfl ...` in a process of its own."""
    source = str(Path(fnrfl.__file__).parents[1])
    command = [sys.executable, "-m", "fnrfl", *words, "--json", "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": source})


def finished(run_dir: Path, *words: str) -> Outcome:
    """What a command says that nobody kills, and the log of its run."""
    process = started(*words)
    told = process.communicate(timeout=900)[0]
    assert process.returncode == 0, f"exit code {process.returncode}"
    logged = [event.items() for event in events(run_dir)[1:]]
    facts = [{key: value for key, value in event if not key.startswith("seconds")} for event in logged]
    return json.loads(told)["model_sha256"], facts


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The log; only its last line may be half of one."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().split("\n")[:-1]]


def named(run_dir: Path) -> tuple[int, set[str]]:
    """How many rounds the checkpoint holds, and the files that it names."""
    if not (run_dir / "checkpoint.json").exists():
        return 0, set()
    index = json.loads((run_dir / "checkpoint.json").read_text())
    return index["round"], {file["file"] for file in (index["server"], *index["clients"].values())}


def inspect(run_dir: Path) -> str:
    """Read everything that a kill has left, and say how far it is; an assertion fails if what counts is not whole."""
    if not run_dir.exists():
        return "no directory"
    tomllib.loads((run_dir / "config.toml").read_text())
    json.loads((run_dir / "partition.json").read_text())
    log, (saved, files) = events(run_dir), named(run_dir)
    assert [event["round"] for event in log[1:]] == list(range(1, len(log))), "the log skips or repeats rounds"
    assert saved < len(log), f"the checkpoint holds {saved} rounds and the log {len(log) - 1}"
    for name in (*files, *(["model.safetensors"] if (run_dir / "model.safetensors").exists() else [])):
        load_file(run_dir / name)
    return f"{len(log) - 1} rounds, {saved} saved, {len(list(run_dir.rglob('*.part')))} parts"


def strike(process: subprocess.Popen[str], seconds: float, writing: Callable[[], bool], pause: float) -> None:
    """Kill a process after some seconds, or a moment after it next begins what `writing` tells."""
    end = time.monotonic() + seconds
    while process.poll() is None and (time.monotonic() < end or not writing()):
        time.sleep(0.0005)
    time.sleep(pause)
    process.kill()
    process.communicate()


def left(run_dir: Path) -> str:
    """What a finished run must not leave in its folder, or beside it."""
    found = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    beside = {path.name for path in run_dir.parent.glob(f".{run_dir.name}.*")}
    return ", ".join(sorted(found - WHOLE - named(run_dir)[1] | beside))


def trial(folder: Path, number: int, rounds: int, seconds: float, wanted: Outcome, old: Outcome | None) -> str:
    """Kill a run, which replaces the one of `old` if there is one, and say how far it was."""
    dice, run_dir = numpy_generator(0, "kill", number, old is not None), folder / f"{number}-{old is not None}"
    run = ["run", *RECIPE, f"rounds={rounds}", *EVERY, "--out", str(run_dir)]
    new, waits = run_dir.with_name(f".{run_dir.name}.fnrfl-new"), number % 2 == 1
    if old is not None:
        shutil.copytree(folder / "old", run_dir)
        run.append("--overwrite")

    def writing() -> bool:
        return not waits or (new / "rounds").exists() or any(run_dir.rglob("*.part"))

    moment = float(dice.uniform(0.0, 3.0 if old is not None else seconds))
    strike(started(*run), moment, writing, dice.uniform(0.0, 0.03))
    said = inspect(run_dir)
    if number % 3 == 2 and run_dir.exists():
        strike(started("resume", str(run_dir)), moment, writing, dice.uniform(0.0, 0.03))
        said += f"; again: {inspect(run_dir)}"
    there = run_dir.exists() or old is not None  # between two renames the next command gives the old run its name
    got = finished(run_dir, *(["resume", str(run_dir)] if there else run))
    if old is not None and events(run_dir)[0]["config"]["seed"] == OLD_SEED:
        assert got == old, "the old run is not what it was"
        said, got = f"{said}; the old run was there", finished(run_dir, *run)
    assert got == wanted, f"{got[0][:12]} and {len(got[1])} rounds differ"
    assert not left(run_dir), left(run_dir)
    shutil.rmtree(run_dir)
    return said


def main(kills: int = 20, overwrites: int = 10, rounds: int = 250) -> int:
    """Print a line for each kill; 1 if a run that went on differs."""
    folder = Path(tempfile.mkdtemp(prefix="fnrfl-kill-"))
    began, whole, before = time.monotonic(), folder / "whole", folder / "old"
    wanted = finished(whole, "run", *RECIPE, f"rounds={rounds}", *EVERY, "--out", str(whole))
    seconds = time.monotonic() - began
    print(f"uninterrupted: {rounds} rounds, {seconds:.1f} s, {wanted[0]}", flush=True)
    old = finished(before, "run", *RECIPE, "rounds=2", f"seed={OLD_SEED}", "--out", str(before))
    trials = [(n, None) for n in range(kills)] + [(n, old) for n in range(overwrites)]
    wrong = 0
    for number, replaced in trials:
        try:
            said = trial(folder, number, rounds, seconds, wanted, replaced)
        except (AssertionError, OSError, ValueError, KeyError) as error:
            said, wrong = f"NO: {error!r}", wrong + 1
        print(f"{'replacing' if replaced else 'killed':<9} {number:>3}  {said}", flush=True)
    print(f"{len(trials) - wrong} of {len(trials)} equal")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
