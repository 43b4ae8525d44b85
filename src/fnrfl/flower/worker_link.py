"""The way to a node's worker: a socket in the node's folder. Starts the worker where none answers; imports no torch."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fnrfl.core.errors import FnrflError
from fnrfl.flower.own_config import OwnConfig

SOCKET, LOG = "worker.sock", "worker.log"
GONE = 10.0  # seconds that a dying process may take
START = 120.0  # seconds that a worker may take to start: it imports torch and reads the node's data


@dataclass(frozen=True)
class WorkerLink:
    """Letters to the worker of a node."""

    config: OwnConfig

    @property
    def folder(self) -> Path:
        """Where the socket is."""
        return self.config.folder

    def ask(self, letter: bytes) -> bytes:
        """The worker's reply. A worker that dies meanwhile is started again, and asked once more."""
        try:
            return self._ask(letter)
        except (OSError, EOFError):
            self._until_gone()
            try:
                return self._ask(letter)
            except (OSError, EOFError) as error:
                raise FnrflError(
                    f"The worker of the node has ended twice while it answered ({error}). Its worker.log says why."
                ) from None

    def _until_gone(self) -> None:
        """Wait until a worker that dies has died: its socket would take one more letter."""
        until = time.monotonic() + GONE
        while time.monotonic() < until:
            with held(self.folder) as nobody:
                if nobody:
                    return
            time.sleep(0.05)

    def _ask(self, letter: bytes) -> bytes:
        with self._connected() as worker:
            send_frame(worker, letter)
            return receive_frame(worker)

    def _connected(self) -> socket.socket:
        """A connection; the worker is started if there is none."""
        started: subprocess.Popen[bytes] | None = None
        until = time.monotonic() + START
        while True:
            found = socket.socket(socket.AF_UNIX)
            try:
                with short_path(self.folder) as folder:
                    found.connect(f"{folder}/{SOCKET}")
                return found
            except (FileNotFoundError, ConnectionRefusedError):
                found.close()
            if started is None:
                started = self._start()
            elif started.poll() not in (None, 0) or time.monotonic() > until:
                raise FnrflError("The worker of the node does not start. The file worker.log of its folder says why.")
            time.sleep(0.02)

    def _start(self) -> subprocess.Popen[bytes]:
        """A worker of its own session, which lives until the process that starts apps on this node is gone."""
        told = json.dumps({**self.config.given, "folder": str(self.folder)})
        command = [sys.executable, "-m", "fnrfl.flower.worker", str(os.getppid()), told]
        with open(self.folder / LOG, "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Whether the lock of a node's folder is ours, inside: a worker has it as long as it lives."""
    with open(folder / "worker.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """The folder under a name of a few characters: the path of a socket may have about a hundred."""
    if len(os.fsencode(folder / SOCKET)) < 100 or not os.path.isdir("/proc/self/fd"):
        yield str(folder)
        return
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)


def send_frame(there: socket.socket, letter: bytes) -> None:
    """A letter after its length."""
    there.sendall(len(letter).to_bytes(8, "big"))
    if letter:
        there.sendall(letter)


def receive_frame(there: socket.socket) -> bytes:
    """The inverse of `send_frame`; EOFError where the other side has gone."""
    length = int.from_bytes(_exactly(there, 8), "big")
    return bytes(_exactly(there, length))


def _exactly(there: socket.socket, count: int) -> bytearray:
    got = bytearray(count)
    view, have = memoryview(got), 0
    while have < count:
        more = there.recv_into(view[have:])
        if not more:
            raise EOFError("the connection was closed")
        have += more
    return got
