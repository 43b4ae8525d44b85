"""What holds for all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

# A job that was started in the background ignores Ctrl-C, and so would the programs that the tests start and stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What tests allow to run is not remembered in the home of whoever starts them.
os.environ["FNRFL_STATE"] = tempfile.mkdtemp(prefix="fnrfl-state-")
atexit.register(shutil.rmtree, os.environ["FNRFL_STATE"], ignore_errors=True)
