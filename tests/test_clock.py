"""A run does not ask what time it is: a clock before 1970, or one that stands still, changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEFORE_1970 = """
import time
time.time = lambda: -3e8
time.time_ns = lambda: -3 * 10**17
def sleep(seconds):
    raise SystemExit("the run sleeps by the clock")
time.sleep = sleep
"""


@pytest.mark.skipif(sys.platform == "win32", reason="git is a script here")
def test_a_run_ends_with_a_clock_before_1970(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BEFORE_1970)
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text("#!/bin/sh\nexec >&- 2>&-\nsleep 1\nexit 1\n")  # it says nothing more, and does not end at once
    git.chmod(0o755)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path]),
        "PATH": os.pathsep.join([str(git.parent), os.environ["PATH"]]),
    }
    words = ["run", "digits", "rounds=1", "clients=2", "client.epochs=1", "fnr=on", "-o", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "fnrfl", *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    again = [sys.executable, "-m", "fnrfl", "evaluate", str(tmp_path / "run"), "digits"]
    assert subprocess.run(again, env=environment, cwd=tmp_path, capture_output=True, timeout=300).returncode == 0
