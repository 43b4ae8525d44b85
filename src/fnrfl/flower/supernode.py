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
from threading import Thread

from fnrfl.flower.short_waits import shorten_waits


def run_supernode() -> None:
    """`flower-supernode` with short waits; tasks are taken by a forking executor."""
    from flwr.supernode.cli import flower_supernode
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    args = _parse_args_run_supernode().parse_args()
    shorten_waits()
    if args.isolation == "process":
        command = [sys.executable, "-m", "fnrfl.flower.executor", f"{args.host}:{args.port}", str(os.getpid())]
        executor = subprocess.Popen([*command, *filter(None, [args.superexec_auth_secret_file])])
        Thread(target=_end_with, args=(executor,), daemon=True).start()
    flower_supernode()


def _end_with(executor: subprocess.Popen[bytes]) -> None:
    """A SuperNode without an executor would take messages and never answer them: it ends."""
    executor.wait()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    run_supernode()
