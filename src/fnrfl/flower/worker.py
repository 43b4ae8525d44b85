"""The worker of a node: it stays between messages, with torch, the node's data and its client's memory.

    python -m fnrfl.flower.worker PARENT '{"folder": "...", "partition": 0}'

It answers letters on a socket in the node's folder. It ends when the process PARENT is gone, which starts apps on this
node, and when it has been idle for long. One worker at a time holds a node: it has the lock of the folder.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

from fnrfl.flower.own_config import OwnConfig
from fnrfl.flower.worker_link import SOCKET, held, receive_frame, send_frame, short_path

IDLE = 900.0  # seconds without a letter after which a worker ends; the next letter starts another
WATCH_SECONDS = 0.3  # seconds between two looks whether the parent is there


def answer_letters(folder: Path, answer: Callable[[bytes], bytes]) -> None:
    """Answer letters, one after the other, until none has come for long; nothing if another worker has the folder."""
    with held(folder) as mine, short_path(folder) as name, socket.socket(socket.AF_UNIX) as door:
        if not mine:
            return
        (folder / SOCKET).unlink(missing_ok=True)  # of a worker that was killed: this one has the lock
        door.bind(f"{name}/{SOCKET}")
        door.listen()
        try:
            while True:
                door.settimeout(IDLE)
                there, _ = door.accept()
                with there, suppress(OSError, EOFError):  # whoever has gone before the reply loses it
                    there.settimeout(None)
                    send_frame(there, answer(receive_frame(there)))
        except TimeoutError:
            (folder / SOCKET).unlink(missing_ok=True)


def end_with(parent: int) -> None:
    """End this process as soon as that one is gone, whatever it does: files half written do not count."""
    while _exists(parent):
        time.sleep(WATCH_SECONDS)
    os._exit(0)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def work(parent: str, given: str) -> None:
    """Open the node and answer its letters."""
    config = OwnConfig.of(json.loads(given))
    Thread(target=end_with, args=(int(parent),), daemon=True).start()
    from fnrfl.core.isolation import isolated
    from fnrfl.federation.node_service import NodeService

    with isolated():  # torch's settings for a run last from its first letter to its last
        answer_letters(config.folder, NodeService(config.read, Path(config.read().folder) / "runs").answer)


if __name__ == "__main__":
    work(*sys.argv[1:])
