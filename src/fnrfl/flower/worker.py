"""The worker of a node: a process that stays between messages, with torch, the node's data and its client's memory.

    python -m fnrfl.flower.worker PARENT '{"folder": "...", "partition": 0}'

It answers letters on a socket in the node's folder. It ends when the process PARENT is gone, which starts apps on this
node, and when it has been idle for long. One worker at a time holds a node: it has the lock of the folder. `WorkerLink`
is the other end: it starts the worker where none answers, and imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from threading import Thread

import psutil
from filelock import FileLock, Timeout

from fnrfl.core.errors import FnrflError
from fnrfl.flower.deployment import NodeSettings

SOCKET, LOCK, LOG = "worker.sock", "worker.lock", "worker.log"
IDLE = 900.0  # seconds without a letter after which a worker ends; the next letter starts another
EXIT_TIMEOUT = 10.0  # seconds that a dying worker may take
START_TIMEOUT = 120.0  # seconds that a worker may take to start: it imports torch and reads the node's data


@dataclass(frozen=True)
class WorkerLink:
    """The way to the worker of a node."""

    config: NodeSettings

    def ask(self, letter: bytes) -> bytes:
        """Return the worker's reply. A worker that dies meanwhile is started again, and asked once more."""
        for _ in range(2):
            with suppress(OSError, EOFError), self._connected() as worker:
                worker.send_bytes(letter)
                return worker.recv_bytes()
            with suppress(Timeout), FileLock(self.config.folder / LOCK, timeout=EXIT_TIMEOUT):
                pass  # it is gone: until then its socket would take one more letter
        raise FnrflError("The worker of the node has ended twice while it answered. Its worker.log says why.")

    def _connected(self) -> Connection:
        """Return a connection to the worker, which is started if there is none."""
        started: subprocess.Popen[bytes] | None = None
        until = time.monotonic() + START_TIMEOUT
        while True:
            with suppress(FileNotFoundError, ConnectionRefusedError), chdir(self.config.folder):
                return Client(SOCKET, "AF_UNIX")  # from within: the path of a socket has a hundred bytes at most
            if started is None:
                started = self._start()
            elif started.poll() not in (None, 0) or time.monotonic() > until:
                raise FnrflError("The worker of the node does not start. The file worker.log of its folder says why.")
            time.sleep(0.02)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a worker in a new session, which lives until the process that starts apps on this node is gone."""
        folder, nothing = self.config.folder, subprocess.DEVNULL
        given = json.dumps({**self.config.given, "folder": str(folder)})
        command = [sys.executable, "-m", "fnrfl.flower.worker", str(os.getppid()), given]
        with open(folder / LOG, "ab") as log:
            return subprocess.Popen(command, stdin=nothing, stdout=log, stderr=log, start_new_session=True, cwd=folder)


def answer_letters(folder: Path, answer: Callable[[bytes], bytes]) -> None:
    """Answer letters, one after the other, until none has come for long; nothing if another worker has the folder."""
    with suppress(Timeout), FileLock(folder / LOCK, timeout=0), socket.socket(socket.AF_UNIX) as door:
        (folder / SOCKET).unlink(missing_ok=True)  # of a worker that was killed: this one has the lock
        with chdir(folder):
            door.bind(SOCKET)
        door.listen()
        with suppress(TimeoutError):
            while True:
                door.settimeout(IDLE)
                there = door.accept()[0]
                there.setblocking(True)
                with Connection(there.detach()) as link, suppress(OSError, EOFError):  # who has gone loses the reply
                    link.send_bytes(answer(link.recv_bytes()))
        (folder / SOCKET).unlink(missing_ok=True)


def end_with(parent: int) -> None:
    """End this process as soon as that one is gone, whatever it does: files half written do not count."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(parent).wait()
    os._exit(0)


def work(parent: str, given: str) -> None:
    """Open the node and answer its letters."""
    config = NodeSettings.of(json.loads(given))
    Thread(target=end_with, args=(int(parent),), daemon=True).start()
    from fnrfl.federation.node_service import NodeService
    from fnrfl.process import isolated

    with isolated():  # torch's settings for a run last from its first letter to its last
        answer_letters(config.folder, NodeService(config.read, Path(config.read().folder) / "runs").answer)


if __name__ == "__main__":
    work(*sys.argv[1:])
