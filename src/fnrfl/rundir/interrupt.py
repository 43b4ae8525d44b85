"""Signals that let a round end, since what clients remember changes in the middle of one."""

from __future__ import annotations

import _thread
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ONCE_MORE = 0.01  # seconds after which a signal comes again that was ignored


class Interrupted(KeyboardInterrupt):
    """A signal other than Ctrl-C that ends the program; `exit_code` is what the command line returns."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class OutputClosed(KeyboardInterrupt):
    """Whoever read the output has gone, as `head` does: nobody is told any more."""

    exit_code = 128 + 13  # SIGPIPE, which not every system has


def exit_code(stop: KeyboardInterrupt) -> int:
    """What the command line returns when it was stopped: 130 for Ctrl-C, else by what has stopped it."""
    return int(getattr(stop, "exit_code", 130))


def interrupt(number: int, frame: FrameType | None = None) -> None:
    """The handler of whatever stops at once."""
    raise _stop(number)


@contextmanager
def interruptible() -> Iterator[Callable[[], KeyboardInterrupt | None]]:
    """Inside, the first signal makes `stop()` what is to be raised after the round; the second one interrupts at once.

    Ctrl-C, SIGTERM and SIGHUP are such signals. Where one does not have its usual meaning (another thread, a program
    with a handler of its own, a job in the background or under nohup), nothing changes, and it is not heard of here.
    """
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1:
            interrupt(number)
        again = "Press Ctrl-C again" if number == signal.SIGINT else f"Send {signal.Signals(number).name} again"
        with suppress(OSError):  # not sys.stderr, which the signal may have caught in the middle of a write
            os.write(2, f"\nfnrfl: stopping after this round, to save it. {again} to stop at once.\n".encode())

    with _handled(ask, *_USUAL):
        yield lambda: _stop(asked[0]) if asked else None


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP unwind the program as Ctrl-C does, so that nothing is left lying about."""
    with _handled(interrupt, *(_USUAL.keys() - {signal.SIGINT})):
        yield


def _stop(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Interrupted(number)


_USUAL = {
    number: signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    for number in signal.Signals
    if number.name in ("SIGINT", "SIGTERM", "SIGHUP")  # Windows lacks one
}


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object], *which: signal.Signals) -> Iterator[None]:
    """Inside, `handler` gets these signals, as far as they have their usual meaning."""
    found = {number: signal.getsignal(number) for number in which}
    mine = {number: before for number, before in found.items() if before in (_USUAL[number], interrupt)}
    if not mine or threading.current_thread() is not threading.main_thread():  # which alone may handle any
        yield
        return
    hook = sys.unraisablehook
    sys.unraisablehook = functools.partial(_send_again, hook)
    try:
        for number in mine:
            signal.signal(number, handler)
        yield
    finally:
        for number, before in mine.items():
            signal.signal(number, before)
        sys.unraisablehook = hook


def _send_again(others: Callable[[Any], object], ignored: Any) -> None:
    """Have a signal come once more if Python ignored what its handler raised, as it does while an object goes."""
    number = exit_code(ignored.exc_value) - 128 if isinstance(ignored.exc_value, KeyboardInterrupt) else None
    if number not in _USUAL:
        others(ignored)
        return
    send = functools.partial(os.kill, os.getpid()) if os.name == "posix" else _thread.interrupt_main
    again = threading.Timer(ONCE_MORE, send, [number])
    again.daemon = True
    again.start()
