"""Processes of a deployment: started with a record, ended with everything that they have started.

A record has the process's number and the time of its start, so that a number that the system has given to another
process since is never touched. Processes that no record leads to, because their parents were killed, are found by the
mark in their environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fnrfl.core.errors import FnrflError
from fnrfl.rundir import files

GRACE = 8.0  # seconds that processes have to end by themselves
PROC = Path("/proc")


@dataclass(frozen=True)
class Recorded:
    """A process that was started, and what it is."""

    name: str
    pid: int
    started: str

    @property
    def alive(self) -> bool:
        """Whether this very process is there."""
        return start_of(self.pid) == self.started


def start_of(pid: int) -> str | None:
    """When a process started, in words of the system; None: there is none, or it has ended and waits for its parent."""
    if PROC.is_dir():
        try:
            after_name = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if after_name[0] in "ZX" else after_name[19]
    told = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return None if not told or told.startswith("Z") else told.split(maxsplit=1)[1]


@dataclass(frozen=True)
class Processes:
    """The records of a deployment, in a file."""

    file: Path
    mark: tuple[str, str]  # name and value in the environment of every process

    @property
    def recorded(self) -> list[Recorded]:
        """All that were started and not ended."""
        if not self.file.is_file():
            return []
        try:
            return [Recorded(**one) for one in json.loads(self.file.read_text())]
        except (ValueError, TypeError) as error:
            raise FnrflError(f"{self.file} is not a list of processes ({error}). Remove it.") from None

    @property
    def alive(self) -> list[Recorded]:
        """Those that run."""
        return [one for one in self.recorded if one.alive]

    def start(
        self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str], folder: Path
    ) -> Recorded:
        """Start a process in a new session, whose output and files only this user can read, and record it."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environment), cwd=folder,
                start_new_session=True, umask=0o077,
            )  # fmt: skip
        one = Recorded(name, started.pid, start_of(started.pid) or "")
        self._write([*(other for other in self.alive if other.name != name), one])  # the old one may be dying
        return one

    def stop(self, names: Iterable[str] | None = None) -> list[str]:
        """End recorded processes with all that they have started, or all of the deployment; what had to be killed."""
        every = names is None
        chosen = [one for one in self.alive if every or one.name in set(names or ())]
        family = _family({one.pid for one in chosen}) | (self._marked() if every else {})
        if every:
            family.pop(os.getpid(), None)
        _signal(family, signal.SIGTERM)
        left = _wait(family, GRACE)
        if every:  # a process may have been started meanwhile
            left |= self._marked()
        _signal(left, signal.SIGKILL)
        _wait(left, GRACE)
        self._write([one for one in self.recorded if one.alive])
        return [f"{pid}" for pid in left]

    def _marked(self) -> dict[int, str]:
        """Processes with the deployment's mark in their environment; where the system does not say, none."""
        wanted, found = f"{self.mark[0]}={self.mark[1]}".encode(), {}
        for folder in PROC.glob("[0-9]*"):
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    pid = int(folder.name)
                    found[pid] = start_of(pid) or ""
        return {pid: started for pid, started in found.items() if started and pid != os.getpid()}

    def _write(self, records: list[Recorded]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        files.write(self.file, json.dumps([asdict(one) for one in records], indent=1))


def _family(pids: set[int]) -> dict[int, str]:
    """Processes and all that they have started, with the times of their starts."""
    parents = _parents()
    family, new = set(pids), set(pids)
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - family
        family |= new
    found = {pid: start_of(pid) for pid in family}
    return {pid: started for pid, started in found.items() if started}


def _parents() -> dict[int, int]:
    """Every process's parent."""
    if not PROC.is_dir():
        told = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
        return {int(pid): int(parent) for pid, parent in (line.split() for line in told.splitlines())}
    found = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):
            found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _signal(family: Mapping[int, str], which: signal.Signals) -> None:
    for pid, started in family.items():
        if start_of(pid) == started:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, which)


def _wait(family: Mapping[int, str], seconds: float) -> dict[int, str]:
    """Those that are still there after so many seconds."""
    until = time.monotonic() + seconds
    left = dict(family)
    while left and time.monotonic() < until:
        for pid in left:
            with suppress(ChildProcessError):  # it is no child of ours, which would stay as a zombie
                os.waitpid(pid, os.WNOHANG)
        left = {pid: started for pid, started in left.items() if start_of(pid) == started}
        if left:
            time.sleep(0.05)
    return left
