"""Files that are either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from fnrfl.errors import ConfigError


def sync(path: Path) -> None:
    """Wait until a file or folder has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, text: str) -> None:
    """Replace a file in one go: a reader sees the old text or the new, whenever the power goes."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    sync(part)
    part.replace(path)
    sync(path.parent)


def read(path: Path, what: str) -> str:
    """A file's text, or a sentence about why there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); {what}.") from error
