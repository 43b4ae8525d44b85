"""Ctrl-C that lets a round end, since what clients remember changes in the middle of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

NOTICE = b"\nfnrfl: stopping after this round, to save it. Press Ctrl-C again to stop at once.\n"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C makes `stop()` true and says so; the second one interrupts as usual.

    Where Ctrl-C does not have its usual meaning (another thread, a program with a handler of its own, a job in the
    background), nothing changes, and `stop()` is never true.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        with suppress(OSError):
            os.write(2, NOTICE)  # not sys.stderr, which the signal may have caught in the middle of a write

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: asked
        return
    try:
        signal.signal(signal.SIGINT, ask)
    except ValueError:  # only the main thread may
        yield lambda: asked
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
