"""One run at a time in a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fnrfl.errors import ConfigError

NAME = ".lock"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other process works in this folder; one that already does is named, and refused to.

    The file holds the number of the process. The system lets go of it when the process ends, however it ends, so a
    file that a killed run left behind is in nobody's way.
    """
    try:
        import fcntl
    except ImportError:  # Windows: a directory that exists is still refused
        yield
        return
    path = folder / NAME
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 20, 0).decode(errors="replace").strip()
            os.close(handle)
            raise ConfigError(
                f"{folder} is in use by process {holder}. Wait until it is done, or choose another directory with "
                "--out."
            ) from None
        except OSError:  # a file system without locks, such as some network mounts
            break
        if _is_still(path, handle):
            break
        os.close(handle)  # whoever had it removed the file while this process waited
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
