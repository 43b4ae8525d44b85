"""Locks of the whole process that are free in a forked process."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager


def process_lock() -> AbstractContextManager[object]:
    """A lock for something that there is once in a process; a fork waits for it, so that nothing is left half done."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # Windows forks nothing
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


# Python has one list of warning filters for all threads. Two threads that change it in turns, each with
# `warnings.catch_warnings`, would leave changes behind: whoever changes it holds this lock.
filters_lock = process_lock()
