"""Locks of the whole process, which are free in a forked process, and turns that processes take with a folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

_locks: list[Any] = []
_long_turns: list[LongTurns] = []


def process_lock() -> AbstractContextManager[object]:
    """A lock for something that there is once in a process; a fork waits for it, so that nothing is left half done."""
    _locks.append(threading.RLock())
    return _locks[-1]  # type: ignore[no-any-return]


class LongTurns:
    """Threads take turns with something of the process, each for as long as a run; one thread may be inside repeatedly.

    A fork does not wait for the end of a turn, as it does for a lock of `process_lock`: that may be hours away. In the
    forked process the turns of other threads, which are not there, are over, and what they had changed is put back.
    """

    def __init__(self) -> None:
        self._lock, self._changes = threading.RLock(), list[ExitStack]()
        _long_turns.append(self)

    @contextmanager
    def taken(self) -> Iterator[ExitStack]:
        """Inside, it is this thread's turn; what is called back on the stack at its end puts back what was changed."""
        lock = self._lock  # not one that a forked process has in its place
        lock.acquire()
        try:
            with ExitStack() as changed:
                self._changes.append(changed)
                yield changed
        finally:
            with suppress(ValueError, RuntimeError):  # the turn of a thread that a forked process has not is over there
                self._changes.remove(changed)
                lock.release()

    def forked(self) -> None:
        """In a child process only the thread that forked is left."""
        if self._lock.acquire(blocking=False):  # nobody's turn, or that thread's
            self._lock.release()
            return
        self._lock = threading.RLock()
        while self._changes:
            self._changes.pop().close()


def _take_all() -> None:
    """Take every lock. Threads hold several, in orders of their own, so that who waits for one must not hold others."""
    busy = _locks[0]
    while busy is not None:
        busy = _first_busy(sorted(_locks, key=lambda lock: lock is not busy))


def _first_busy(locks: list[Any]) -> Any:
    """Wait for the first lock and take all that follow, None; or none of them, and the one that was not free."""
    with ExitStack() as taken:
        for place, lock in enumerate(locks):
            if not lock.acquire(blocking=not place):
                return lock
            taken.callback(lock.release)
        taken.pop_all()
    return None


def _release_all() -> None:
    for lock in _locks:
        lock.release()


def _begin_child() -> None:
    _release_all()
    for turns in _long_turns:
        turns.forked()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(before=_take_all, after_in_parent=_release_all, after_in_child=_begin_child)

# Python has one list of warning filters for all threads. Two threads that change it in turns, each with
# `warnings.catch_warnings`, would leave changes behind: whoever changes it holds this lock.
filters_lock = process_lock()


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Inside, no other process takes its turn with this folder, which itself is locked: no file is made for that."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # one that may be written to and not listed
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
