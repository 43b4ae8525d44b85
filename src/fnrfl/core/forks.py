"""Locks of the whole process that are free in a forked process."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, ExitStack
from typing import Any

_locks: list[Any] = []


def process_lock() -> AbstractContextManager[object]:
    """A lock for something that there is once in a process; a fork waits for it, so that nothing is left half done."""
    _locks.append(threading.RLock())
    return _locks[-1]  # type: ignore[no-any-return]


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


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(before=_take_all, after_in_parent=_release_all, after_in_child=_release_all)

# Python has one list of warning filters for all threads. Two threads that change it in turns, each with
# `warnings.catch_warnings`, would leave changes behind: whoever changes it holds this lock.
filters_lock = process_lock()
