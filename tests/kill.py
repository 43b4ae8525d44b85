"""Kill runs without warning, resume them, and demand the bits of the run that nobody touched.

    python tests/kill.py [--kills 20] [--rounds 100] [--out FOLDER]

SCAFFOLD under FNR on digits, in processes of its own: server state, client memories and BatchNorm buffers all have to
survive. What a kill leaves behind is judged with plain JSON, TOML and safetensors readers, not with the code on trial.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file

import fnrfl
from fnrfl.rng import numpy_generator

RECIPE = (
    "digits", "algorithm=scaffold", "fnr=on", "model=cnn(norm=batch)", "participation=0.5", "client.epochs=5",
)  # fmt: skip
EVERY = "0.2"  # seconds between checkpoints, less than a round takes: most of them end in one
WHOLE = {"config.toml", "partition.json", "events.jsonl", "checkpoint.json", "model.safetensors"}
TIMEOUT = 900.0

Aim = Literal["start", "first", "write", "anywhere"]


@dataclass(frozen=True)
class Outcome:
    """What a run says in the end: its hash, and all facts of every round but the seconds."""

    sha256: str
    rounds: list[dict[str, Any]]


@dataclass(frozen=True)
class Wreck:
    """A run directory after a kill."""

    kind: str  # no directory, before first, inside write, between
    left: str  # what shows that a write was cut
    done: int  # rounds in the log
    saved: int  # rounds in the checkpoint


class Broken(Exception):
    """Something that must never happen did."""


# -- processes ---------------------------------------------------------------------------------------------------------


class Process:
    """`fnrfl ...` in a process of its own."""

    def __init__(self, arguments: Sequence[str], scratch: Path) -> None:
        source = str(Path(fnrfl.__file__).parents[1])
        self.output = scratch / "output.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fnrfl", *arguments, "--json", "--quiet"],
                stdout=output,
                stderr=subprocess.STDOUT,
                # A killed process cannot tidy up, so its temporary files go where this script does it.
                env=os.environ | {"PYTHONPATH": source, "TMPDIR": str(scratch)},
            )
        self.began = time.monotonic()

    def until(self, condition: Callable[[], bool], pause: float) -> bool:
        """Wait for a condition; False if the process ends before."""
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() - self.began > TIMEOUT:
                self.kill()
                raise Broken(f"a process took more than {TIMEOUT:.0f} s")
            time.sleep(pause)
        return True

    def kill(self) -> float:
        """Kill it; returns the seconds that it lived."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return time.monotonic() - self.began

    def hold(self) -> bool:
        """Stop it where it is; False if it has ended."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGSTOP)
            stopped = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            return stopped is not None and stopped.si_code == os.CLD_STOPPED
        return False

    def release(self) -> None:
        """Let it go on."""
        os.kill(self.process.pid, signal.SIGCONT)

    def result(self, run_dir: Path) -> Outcome:
        """Wait for its end and read what came out."""
        self.until(lambda: False, 0.05)
        text = self.output.read_text()
        if self.process.returncode:
            raise Broken(f"exit code {self.process.returncode}: {text.strip()[-500:]}")
        sha256 = json.loads(text)["model_sha256"]
        facts = [{k: v for k, v in event.items() if k != "seconds"} for event in events(run_dir)[1:]]
        return Outcome(sha256, facts)


# -- what is on disk ---------------------------------------------------------------------------------------------------


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The log; only its last line may be half of one."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().split("\n")[:-1]]


def parts(run_dir: Path) -> list[str]:
    """Files and folders that are being written."""
    return sorted(p.name for pattern in ("*.part", "rounds/*.part") for p in run_dir.glob(pattern))


def inspect(run_dir: Path) -> Wreck:
    """Read everything a kill has left; raises if anything that counts is not whole."""
    if not run_dir.exists():
        return Wreck("no directory", "", 0, 0)
    tomllib.loads((run_dir / "config.toml").read_text())
    json.loads((run_dir / "partition.json").read_text())
    log = events(run_dir)
    if [event["round"] for event in log[1:]] != list(range(1, len(log))):
        raise Broken("the log skips or repeats rounds")
    index = run_dir / "checkpoint.json"
    saved, named = 0, set()
    if index.exists():
        checkpoint = json.loads(index.read_text())
        saved, named = checkpoint["round"], {checkpoint["server"], *checkpoint["clients"].values()}
        for name in named:
            load_file(run_dir / name)
    if (run_dir / "model.safetensors").exists():
        load_file(run_dir / "model.safetensors")
    if saved >= len(log):
        raise Broken(f"the checkpoint holds {saved} rounds and the log {len(log) - 1}")
    unnamed = {str(p.relative_to(run_dir)) for p in run_dir.glob("rounds/*/*")} - named
    left = parts(run_dir) or sorted({name.split("/")[1] + " unnamed" for name in unnamed})
    kind = "inside write" if left else "between" if saved else "before first"
    return Wreck(kind, left[-1] if left else "", len(log) - 1, saved)


def leftovers(run_dir: Path) -> set[str]:
    """What a finished run directory should not have in it."""
    checkpoint = json.loads((run_dir / "checkpoint.json").read_text())
    found = {str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if p.is_file()}
    return found - WHOLE - {checkpoint["server"], *checkpoint["clients"].values()}


# -- a trial -----------------------------------------------------------------------------------------------------------


def strike(process: Process, run_dir: Path, aim: Aim, after: int, dice: np.random.Generator) -> float | None:
    """Kill a process as aimed, once `after` rounds are in the log; None if it ended before."""

    def logged() -> bool:
        log = run_dir / "events.jsonl"
        return log.exists() and log.read_bytes().count(b"\n") > after

    if aim == "start":
        time.sleep(dice.uniform(0.0, 1.5))
        return process.kill()
    if not process.until(logged, 0.002 if aim == "first" else 0.02):
        return None
    if aim == "write":
        while True:
            if not process.until(lambda: bool(parts(run_dir)), 0.0005):
                return None
            if process.hold():
                if parts(run_dir):  # still there now that it cannot move
                    return process.kill()
                process.release()
    time.sleep(dice.uniform(0.0, 0.3 if aim == "first" else 1.0))
    return process.kill() if process.process.poll() is None else None


def plan(kills: int, rounds: int) -> list[tuple[Aim, int]]:
    """What each trial aims at and after which round; the last two kinds are spread over the whole run."""
    aims: list[Aim] = ["start"] * (kills // 20) + ["first"] * max(1, kills // 10)
    rest = kills - len(aims)
    dice = numpy_generator(0, "kill", "plan")
    for i in range(rest):
        aims.append("write" if i % 2 == 0 else "anywhere")
    moments = [0] * (kills - rest) + [int(rounds * (i + dice.uniform()) / rest) for i in range(rest)]
    return list(zip(aims, moments, strict=True))


def main() -> int:
    """Print the table; 1 if a resumed run differs, or if too few kills hit what they aimed at."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, help="keep the run directories here")
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="fnrfl-kill-"))
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)

    def run(run_dir: Path) -> Process:
        settings = (*RECIPE, f"rounds={given.rounds}")
        return Process(["run", *settings, "--checkpoint-every", EVERY, "--out", str(run_dir)], scratch)

    began = time.monotonic()
    wanted = run(folder / "whole").result(folder / "whole")
    print(f"uninterrupted: {len(wanted.rounds)} rounds, {time.monotonic() - began:.1f} s, {wanted.sha256}", flush=True)
    row = "{:>5}  {:>8}  {:<12}  {:<22}  {:>6}  {:>5}  {:<34}  {}"
    print(row.format("trial", "moment", "kind", "left behind", "rounds", "saved", "killed again", "equal"), flush=True)

    kinds: list[str] = []
    wrong = 0
    for trial, (aim, after) in enumerate(plan(given.kills, given.rounds)):
        dice = numpy_generator(0, "kill", trial)
        run_dir = folder / f"trial-{trial}"
        lived, again, verdict = None, "", "yes"
        wreck = Wreck("not killed", "", given.rounds, given.rounds)
        try:
            lived = strike(run(run_dir), run_dir, aim, after, dice)
            wreck = inspect(run_dir) if lived is not None else wreck

            def go_on(run_dir: Path = run_dir) -> Process:
                # Without a directory there is nothing to resume: the run starts over.
                return Process(["resume", str(run_dir)], scratch) if run_dir.exists() else run(run_dir)

            if trial % 3 == 2:
                more: Aim = "write" if trial % 2 == 0 else "anywhere"
                second = strike(go_on(), run_dir, more, int(dice.integers(wreck.done, given.rounds)), dice)
                if second is not None:
                    next_wreck = inspect(run_dir)
                    again = f"{second:.1f} s, {next_wreck.kind} {next_wreck.left}, {next_wreck.done}/{next_wreck.saved}"
            got = go_on().result(run_dir)
            if got != wanted:
                different = [a["round"] for a, b in zip(wanted.rounds, got.rounds, strict=False) if a != b]
                verdict = f"NO: {got.sha256[:12]}, {len(got.rounds)} rounds, different {different[:5]}"
            elif leftovers(run_dir):
                verdict = f"NO: left over {sorted(leftovers(run_dir))}"
        except (Broken, OSError, ValueError, KeyError) as error:
            verdict = f"NO: {error!r}"
        moment = "-" if lived is None else f"{lived:.2f} s"
        print(row.format(trial, moment, wreck.kind, wreck.left, wreck.done, wreck.saved, again, verdict), flush=True)
        kinds.append(wreck.kind)
        wrong += verdict != "yes"
        if verdict == "yes":
            shutil.rmtree(run_dir)
    inside, early = kinds.count("inside write"), kinds.count("before first")
    print(f"{given.kills - wrong} of {given.kills} equal; {inside} killed inside a write, {early} before the first one")
    shutil.rmtree(scratch)
    return int(wrong > 0 or inside < given.kills // 4 or early < 1)


if __name__ == "__main__":
    sys.exit(main())
