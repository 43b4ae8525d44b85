"""One run at a time in a directory: a lock beside it, which the system releases however its process ends."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.rundir import files


class InUse(ConfigError):
    """A folder in which another run is at work."""

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        super().__init__(
            f"{folder} is in use by process {process}. Wait until it is done, or choose another place with --out."
        )


def lock_file(folder: Path) -> Path:
    """Return the file whose lock stands for a folder, whatever path leads there; it holds the number of a process."""
    real = Path(os.path.realpath(folder))
    return real.with_name(f".{real.name}.lock")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other process works in this folder; one that already does is named, and refused to."""
    from filelock import FileLock, Timeout  # of use to those who write alone

    path = lock_file(folder)
    with suppress(FileNotFoundError):  # another process may remove it at any time
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise ConfigError(f"{path} is not a plain file of its own, so it is not written to. Remove it.")
    held: AbstractContextManager[object] = nullcontext()
    try:
        held = FileLock(path).acquire(timeout=0)
    except Timeout:
        process = ""
        with suppress(OSError, UnicodeDecodeError):  # it has just ended
            process = path.read_text().strip()
        raise InUse(folder, process or "unknown") from None
    except (OSError, NotImplementedError) as error:  # of a file system without locks, such as some network mounts
        if getattr(error, "errno", None) not in (None, errno.ENOLCK, errno.ENOTSUP):
            raise
    with held:
        path.write_text(f"{os.getpid()}\n")
        try:
            yield
        finally:
            with suppress(OSError):  # Windows removes no open file
                os.unlink(path)


def holder_of(folder: Path) -> str | None:
    """Return the number of the process that is at work in a folder; None if there is none, or nobody can tell."""
    try:
        if files.is_plain_file(lock_file(folder)):
            with alone(folder):  # which removes the lock of a process that was killed
                pass
    except InUse as error:
        return error.process
    except (OSError, ConfigError):  # a folder that is read alone
        pass
    return None
