"""Flower's SuperNode, without its long waits: `python -m fnrfl.flower.supernode` takes what `flower-supernode` takes.

Its waits are short while messages come (`short_waits.py`). With `--isolation process` an executor takes its tasks and
forks a process for each, instead of starting a program (`executor.py`). Everything else is Flower's own code, the check
of the app's signature too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from threading import Thread

from fnrfl.flower.short_waits import shorten_waits

TRY_UNTIL = "FNRFL_TRY_UNTIL"  # when it is no longer tried to begin; in seconds, as `time.time()` has them
PAUSE_SECONDS = 3.0


def run_supernode() -> None:
    """`flower-supernode` with short waits; tasks are taken by a forking executor.

    A SuperLink takes a node's key once. If the node was killed, it refuses the key until it has missed the old node's
    heartbeats, and Flower's SuperNode ends. This one tries again, if the environment says until when.
    """
    from flwr.supernode.cli import flower_supernode
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    args = _parse_args_run_supernode().parse_args()
    shorten_waits()
    stopping: list[bool] = []
    executor = None
    if args.isolation == "process":
        command = [sys.executable, "-m", "fnrfl.flower.executor", f"{args.host}:{args.port}", str(os.getpid())]
        executor = subprocess.Popen([*command, *filter(None, [args.superexec_auth_secret_file])])
        Thread(target=_end_with, args=(executor, stopping), daemon=True).start()
    try:
        flower_supernode()
    except SystemExit as end:
        if not end.code or time.time() + PAUSE_SECONDS > float(os.environ.get(TRY_UNTIL, "0")):
            raise
        stopping.append(True)
        if executor is not None:
            executor.kill()
            executor.wait()
        again = (
            f"import time; time.sleep({PAUSE_SECONDS}); from fnrfl.flower import supernode; supernode.run_supernode()"
        )
        os.execv(sys.executable, [sys.executable, "-c", again, *sys.argv[1:]])


def _end_with(executor: subprocess.Popen[bytes], stopping: list[bool]) -> None:
    """A SuperNode without an executor would take messages and never answer them: it ends."""
    executor.wait()
    if not stopping:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    run_supernode()
