"""Kill runs without warning, resume them, and demand the bits of the run that nobody touched.

    python tests/kill.py [--kills 20] [--overwrites 10] [--rounds 250] [--out FOLDER]

SCAFFOLD under FNR on digits, in processes of its own: server state, client memories and BatchNorm buffers all have to
survive. Every third run is killed again while it is resumed. Then runs are killed while they replace a finished one:
the old or the new run must be there under its name, whole, and go on to its own bits. What a kill leaves behind is
judged with plain JSON, TOML and safetensors readers, not with the code on trial.
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
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file

import fnrfl
from fnrfl.core.rng import numpy_generator

RECIPE = (
    "digits", "algorithm=scaffold", "fnr=on", "model=cnn(norm=batch)", "participation=0.5", "client.epochs=5",
)  # fmt: skip
EVERY = "0.2"  # seconds between checkpoints, less than a round takes: most of them end in one
WHOLE = {"config.toml", "partition.json", "events.jsonl", "checkpoint.json", "model.safetensors"}
TIMEOUT = 900.0
OLD_SEED = 77  # of the run that is replaced

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
    moment: float = 0.0  # seconds after the start


class Broken(Exception):
    """Something that must never happen did."""


# -- processes ---------------------------------------------------------------------------------------------------------


class Process:
    """`fnrfl ...` in a process of its own."""

    def __init__(self, arguments: Sequence[str], scratch: Path) -> None:
        self.output = scratch / "output.txt"
        self.killed = False
        self.lived = 0.0  # seconds
        self.began = time.monotonic()
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fnrfl", *arguments, "--json", "--quiet"],
                stdout=output,
                stderr=subprocess.STDOUT,
                # A killed process cannot tidy up, so its temporary files go where this script does it.
                env=os.environ | {"PYTHONPATH": str(Path(fnrfl.__file__).parents[1]), "TMPDIR": str(scratch)},
            )

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

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.killed = self.process.wait() == -signal.SIGKILL
            self.lived = time.monotonic() - self.began

    def kill_inside(self, begun: Callable[[], bool], still: Callable[[], bool], dice: np.random.Generator) -> None:
        """Kill it inside a write: hold it once one has begun, and if that is over by then, wait for the next."""
        while self.until(begun, 0.0005):
            time.sleep(dice.uniform(0.0, 0.03))
            if self.process.poll() is not None:
                return
            os.kill(self.process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if still():
                return self.kill()
            os.kill(self.process.pid, signal.SIGCONT)

    def result(self, run_dir: Path) -> Outcome:
        """Wait for its end and read what came out."""
        self.until(lambda: False, 0.05)
        self.lived = time.monotonic() - self.began
        text = self.output.read_text()
        if self.process.returncode:
            raise Broken(f"exit code {self.process.returncode}: {text.strip()[-500:]}")
        sha256 = json.loads(text)["model_sha256"]
        facts = [{k: v for k, v in event.items() if k != "seconds"} for event in events(run_dir)[1:]]
        return Outcome(sha256, facts)


# -- what is on disk ---------------------------------------------------------------------------------------------------

Marks = set[tuple[str, int]]  # name and time of change


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The log; only its last line may be half of one."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().split("\n")[:-1]]


def checkpointed(run_dir: Path) -> tuple[int, set[str]]:
    """How many rounds the checkpoint holds, and the files that it names."""
    path = run_dir / "checkpoint.json"
    if not path.exists():
        return 0, set()
    index = json.loads(path.read_text())
    return index["round"], {file["file"] for file in (index["server"], *index["clients"].values())}


def parts(run_dir: Path) -> Marks:
    """Files and folders that are being written, or were when somebody was killed."""
    found = set()
    for pattern in ("*.part", "rounds/*.part"):
        for path in run_dir.glob(pattern):
            with suppress(FileNotFoundError):  # the writer goes on while we look
                found.add((path.name, path.stat().st_ctime_ns))
    return found


def torn(run_dir: Path) -> Marks:
    """What shows that a write was cut: parts, and folders with files that the checkpoint does not or no longer name."""
    named = checkpointed(run_dir)[1]
    folders = {p.parent for p in run_dir.glob("rounds/*/*") if str(p.relative_to(run_dir)) not in named}
    whole = {(f"{f.name} not named", f.stat().st_ctime_ns) for f in folders if f.suffix != ".part"}
    return parts(run_dir) | whole


def inspect(run_dir: Path, before: Marks) -> Wreck:
    """Read everything a kill has left; raises if anything that counts is not whole."""
    if not run_dir.exists():
        return Wreck("no directory", "", 0, 0)
    tomllib.loads((run_dir / "config.toml").read_text())
    json.loads((run_dir / "partition.json").read_text())
    log = events(run_dir)
    if [event["round"] for event in log[1:]] != list(range(1, len(log))):
        raise Broken("the log skips or repeats rounds")
    saved, named = checkpointed(run_dir)
    for name in named:
        load_file(run_dir / name)
    if (run_dir / "model.safetensors").exists():
        load_file(run_dir / "model.safetensors")
    if saved >= len(log):
        raise Broken(f"the checkpoint holds {saved} rounds and the log {len(log) - 1}")
    marks = sorted(torn(run_dir) - before)
    left = marks[-1][0] + (f" and {len(marks) - 1} more" if len(marks) > 1 else "") if marks else ""
    return Wreck("inside write" if left else "between" if saved else "before first", left, len(log) - 1, saved)


def leftovers(run_dir: Path) -> list[str]:
    """What a finished run directory should not have in it."""
    found = {str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if p.is_file()}
    return sorted(found - WHOLE - checkpointed(run_dir)[1])


# -- trials ------------------------------------------------------------------------------------------------------------


def strike(process: Process, run_dir: Path, aim: Aim, after: int, dice: np.random.Generator) -> Wreck:
    """Kill a process as aimed, once `after` rounds are in the log, and look at what it leaves."""
    before = torn(run_dir)  # by an earlier kill

    def logged() -> bool:
        log = run_dir / "events.jsonl"
        return log.exists() and log.read_bytes().count(b"\n") > after

    if aim == "start":
        time.sleep(dice.uniform(0.0, 1.5))
        process.kill()
    elif process.until(logged, 0.002 if aim == "first" else 0.02):
        if aim == "write":
            process.kill_inside(lambda: bool(parts(run_dir) - before), lambda: bool(torn(run_dir) - before), dice)
        else:
            time.sleep(dice.uniform(0.0, 0.3 if aim == "first" else 1.0))
            process.kill()
    if not process.killed:
        return Wreck("not killed", "", *[len(events(run_dir)) - 1] * 2)
    return replace(inspect(run_dir, before), moment=process.lived)


def beside(run_dir: Path) -> Path:
    """Where a run is made that will replace another."""
    return run_dir.with_name(f".{run_dir.name}.fnrfl-new")


def strike_replacing(process: Process, run_dir: Path, trial: int, dice: np.random.Generator) -> str:
    """Kill a process that replaces a run, at any time, once it has begun, or about when the two change places."""
    new = beside(run_dir)
    aim = ("start", "begun", "about to change places", "changing places")[trial % 4]
    if aim == "start":
        time.sleep(dice.uniform(0.5, 3.0))
    elif aim == "begun":
        process.until(new.exists, 0.001)
        time.sleep(dice.uniform(0.0, 0.5))
    elif aim == "about to change places":
        process.until(lambda: (new / "rounds").exists(), 0.0005)
        time.sleep(dice.uniform(0.0, 0.05))
    else:
        changed = run_dir.stat().st_ino
        process.until(lambda: run_dir.exists() and run_dir.stat().st_ino != changed, 0.0)
    process.kill()
    return aim


def replacing(
    folder: Path, trial: int, old: Outcome, wanted: Outcome, replace_by_new: Callable[[Path], Process], scratch: Path
) -> tuple[str, str, str]:
    """(aim, which run was there afterwards, what is wrong) of a kill while a finished run was being replaced."""
    dice = numpy_generator(0, "kill", "replacing", trial)
    run_dir = folder / f"replacing-{trial}"
    shutil.copytree(folder / "old", run_dir)
    process = replace_by_new(run_dir)
    aim = strike_replacing(process, run_dir, trial, dice)
    if not process.killed:
        return aim, "not killed", difference(wanted, process.result(run_dir))
    wreck = inspect(run_dir, set())
    if wreck.kind == "no directory":
        return aim, "nothing", "neither the old nor the new run is there"
    seed = tomllib.loads((run_dir / "config.toml").read_text())["seed"]
    there, expected = ("old", old) if seed == OLD_SEED else ("new", wanted)
    problem = difference(expected, Process(["resume", str(run_dir)], scratch).result(run_dir))
    if not problem and there == "old":
        problem = difference(wanted, replace_by_new(run_dir).result(run_dir))
    left = [path.name for path in folder.glob(f".replacing-{trial}.*")]
    problem = problem or ", ".join(leftovers(run_dir)) or ", ".join(left)
    if not problem:
        shutil.rmtree(run_dir)
    return aim, there, problem


def plan(kills: int, rounds: int) -> list[tuple[Aim, int]]:
    """What each trial aims at and after which round; the last two kinds are spread over the whole run."""
    dice = numpy_generator(0, "kill", "plan")
    trials: list[tuple[Aim, int]] = []
    trials += [("start", 0)] * (kills // 20)
    trials += [("first", 0)] * max(1, kills // 10)
    rest = kills - len(trials)
    for i in range(rest):
        trials.append(("write" if i % 2 == 0 else "anywhere", int(rounds * (i + dice.uniform()) / rest)))
    return trials


def difference(wanted: Outcome, got: Outcome) -> str:
    """What is not the same, in a few words; nothing if all is."""
    if got == wanted:
        return ""
    rounds = [a["round"] for a, b in zip(wanted.rounds, got.rounds, strict=False) if a != b]
    return f"{got.sha256[:12]}, {len(got.rounds)} rounds, of which {rounds[:5]} differ"


def main() -> int:
    """Print the table; 1 if a resumed run differs, or if too few kills hit what they aimed at."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--overwrites", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=250)
    parser.add_argument("--out", type=Path, help="keep the run directories here")
    given = parser.parse_args()
    kills, rounds = given.kills, given.rounds
    folder = given.out or Path(tempfile.mkdtemp(prefix="fnrfl-kill-"))
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)

    def run(run_dir: Path) -> Process:
        settings = (*RECIPE, f"rounds={rounds}", "--checkpoint-every", EVERY, "--out", str(run_dir))
        return Process(["run", *settings], scratch)

    def go_on(run_dir: Path) -> Process:
        # Without a directory there is nothing to resume: the run starts over.
        return Process(["resume", str(run_dir)], scratch) if run_dir.exists() else run(run_dir)

    whole = run(folder / "whole")
    wanted = whole.result(folder / "whole")
    print(f"uninterrupted: {rounds} rounds, {whole.lived:.1f} s, {wanted.sha256}", flush=True)
    row = "{:>5}  {:>8}  {:<12}  {:>6}  {:>5}  {:<30}  {:<5}  {}"
    print(row.format("trial", "moment", "kind", "rounds", "saved", "left behind", "equal", "killed again"), flush=True)

    wrecks: list[Wreck] = []
    wrong = 0
    for trial, (aim, after) in enumerate(plan(kills, rounds)):
        dice = numpy_generator(0, "kill", trial)
        run_dir = folder / f"trial-{trial}"
        wreck = Wreck("unreadable", "", 0, 0)
        again = ""
        try:
            wreck = strike(run(run_dir), run_dir, aim, after, dice)
            if trial % 3 == 2:
                after = int(dice.integers(min(wreck.done + 1, rounds), rounds + 1))
                second = strike(go_on(run_dir), run_dir, "write" if trial % 2 else "anywhere", after, dice)
                again = (
                    f"{second.moment:.1f} s, {second.kind} {second.left}, {second.done} rounds, {second.saved} saved"
                )
            problem = difference(wanted, go_on(run_dir).result(run_dir)) or ", ".join(leftovers(run_dir))
        except (Broken, OSError, ValueError, KeyError) as error:
            problem = repr(error)
        moment = f"{wreck.moment:.2f} s"
        equal = f"NO: {problem}" if problem else "yes"
        print(row.format(trial, moment, wreck.kind, wreck.done, wreck.saved, wreck.left, equal, again), flush=True)
        wrecks.append(wreck)
        wrong += bool(problem)
        if not problem:
            shutil.rmtree(run_dir)
    inside, early = (sum(w.kind == kind for w in wrecks) for kind in ("inside write", "before first"))
    print(f"{kills - wrong} of {kills} equal; {inside} killed inside a write, {early} before the first one", flush=True)

    again_wrong = 0
    if given.overwrites:
        short = (*RECIPE, "rounds=2", f"seed={OLD_SEED}", "--out", str(folder / "old"))
        old = Process(["run", *short], scratch).result(folder / "old")
    for trial in range(given.overwrites):

        def replace_by_new(run_dir: Path) -> Process:
            settings = (*RECIPE, f"rounds={rounds}", "--checkpoint-every", EVERY, "--out", str(run_dir))
            return Process(["run", *settings, "--overwrite"], scratch)

        try:
            aim, there, problem = replacing(folder, trial, old, wanted, replace_by_new, scratch)
        except (Broken, OSError, ValueError, KeyError) as error:
            aim, there, problem = "", "", repr(error)
        print(f"replacing {trial:>3}  {aim:<22}  {there:<10}  {f'NO: {problem}' if problem else 'yes'}", flush=True)
        again_wrong += bool(problem)
    print(f"{given.overwrites - again_wrong} of {given.overwrites} replacements left the old or the new run, whole")
    wrong += again_wrong
    shutil.rmtree(scratch)
    return int(wrong > 0 or inside < kills // 4 or early < 1)


if __name__ == "__main__":
    sys.exit(main())
