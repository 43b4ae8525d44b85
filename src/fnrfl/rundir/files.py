"""Files that are either whole or not there, and that are what their name says: no link is followed in writing."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fnrfl.core.errors import ConfigError

_BINARY = getattr(os, "O_BINARY", 0)  # Windows has this one alone
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | _BINARY
_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | _BINARY


def sync(path: Path) -> None:
    """Wait until a file or folder has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, content: str | bytes) -> None:
    """Replace a file in one go: a reader sees the old content or the new one, whenever the power goes."""
    part = path.with_name(f"{path.name}.part")
    try:
        write_new(part, content)
        part.replace(path)
    except (OSError, KeyboardInterrupt):  # a full disk, for one: half a file is of no use to anybody
        with suppress(OSError):
            part.unlink()
        raise
    sync(path.parent)


def write_new(path: Path, content: str | bytes) -> None:
    """Write a file that nothing else has a name for; what stood under this name, a link too, is removed first."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o644), "wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def append(path: Path, content: bytes) -> None:
    """Add to the end of a file that is there already, and is a file of its own."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | _NO_LINK), "ab") as file:
        file.write(content)


def read(path: Path, what: str) -> str:
    """Read a file's text, or say why there is none."""
    try:
        return read_bytes(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); {what}.") from error


def read_bytes(path: Path) -> bytes:
    """Read a plain file."""
    with open_plain(path) as file:
        return file.read()


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file; anything else, such as a pipe that nobody writes to, is an OSError."""
    file = os.fdopen(os.open(path, os.O_RDONLY | _NO_WAITING), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a plain file")
    return file


def damaged(path: Path, why: str) -> ConfigError:
    """Return the error about a file or folder of a run that is not as the run wrote it."""
    return ConfigError(f"{path} is damaged ({why}). Put it back as it was, or run again into another directory.")


def is_plain_file(path: Path) -> bool:
    """Whether a path is a file: no link, folder, pipe or device."""
    return path.is_file() and not path.is_symlink()


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def numbered_names(name: str) -> Iterator[str]:
    """A name, then the same with -2, -3 and so on."""
    return itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
