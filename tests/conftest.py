"""What holds for all tests."""

from __future__ import annotations

import signal

# A job that was started in the background ignores Ctrl-C, and so would the programs that the tests start and stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
