"""One run at a time in a directory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fnrfl.core.errors import ConfigError

NAME = ".lock"


class InUse(ConfigError):
    """A folder in which another run is at work."""

    def __init__(self, folder: Path, process: str) -> None:
        super().__init__(
            f"{folder} is in use by process {process}. Wait until it is done, or choose another place with --out."
        )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other process works in this folder; one that already does is named, and refused to.

    The file holds the number of the process. The system lets go of it when the process ends, however it ends, so a
    file that a killed run left behind is in nobody's way. The lock belongs to the folder, not to its name: it stays
    when the folder is renamed.
    """
    try:
        import fcntl
    except ImportError:  # Windows: a directory that exists is still refused
        yield
        return
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        handle = _locked(fcntl, folder, inside)
    except BaseException:
        os.close(inside)
        raise
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(NAME, dir_fd=inside)
        os.close(handle)
        os.close(inside)


def holder_of(folder: Path) -> str | None:
    """The number of the process that is at work in a folder; None if there is none, or nobody can tell."""
    try:
        import fcntl

        handle = os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (ImportError, OSError):  # Windows; or nobody has locked it
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(handle)
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(handle)
    return None


def _locked(fcntl: object, folder: Path, inside: int) -> int:
    """The folder's lock file, open and locked, or where the file system has no locks, open."""
    while True:
        handle = _opened(folder, inside)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[attr-defined]
        except BlockingIOError:
            holder = _holder(handle)
            os.close(handle)
            raise InUse(folder, holder) from None
        except OSError:  # a file system without locks, such as some network mounts
            return handle
        if _is_still(handle, inside):
            return handle
        os.close(handle)  # whoever had it removed the file while this process waited


def _holder(handle: int) -> str:
    """The process that a lock file names."""
    return os.pread(handle, 20, 0).decode(errors="replace").strip()


def _opened(folder: Path, inside: int) -> int:
    """The lock file, which must be a file of its own: what another name stands for is not written to."""
    try:
        handle = os.open(NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=inside)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a pipe or socket
            raise _strange(folder) from error
        raise
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(handle)
        raise _strange(folder)
    return handle


def _strange(folder: Path) -> ConfigError:
    return ConfigError(f"{folder / NAME} is not a plain file of its own, so it is not written to. Remove it.")


def _is_still(handle: int, inside: int) -> bool:
    try:
        return os.path.samestat(os.stat(NAME, dir_fd=inside, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False
