"""Files that commands write for people: never over a file of a run or what is read, and whole or not at all."""

from __future__ import annotations

import csv
import io
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fnrfl.config.registry import DATASETS
from fnrfl.core.errors import ConfigError
from fnrfl.rundir import files
from fnrfl.rundir.directory import WRITTEN

OF_A_RUN = {*WRITTEN, "rounds"} - {"report.html"}
# Text that a spreadsheet would run, and no number; as in exports.js
FORMULA = re.compile(r"(?!\s*[+-]?[\d.]+(e[+-]?\d+)?$)\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]", re.I)
OF_A_COMPARISON = ("grid.json", "comparison.json", "comparison.csv", "comparison.md")


def check_output(path: Path) -> Path:
    """The same path; refused if it is a file that a run or a comparison needs, or would be inside of a file."""
    place = Path(os.path.realpath(path.parent)) / path.name
    for folder in place.parents:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{path} cannot be written: {folder} is a file. Choose another place.")
        inside = place.relative_to(folder)
        if (folder / "config.toml").is_file() and (folder / "events.jsonl").is_file():
            needed = inside.parts[0] in OF_A_RUN or inside.suffix == ".safetensors"
        else:
            needed = (folder / "grid.json").is_file() and str(inside) in OF_A_COMPARISON
        if needed:
            raise ConfigError(f"{path} is a file of the run in {folder}: it is not written over. Choose another name.")
    return path


def check_not_read(path: Path, data: str) -> None:
    """Refuse a path that is the data itself, or lies in its folder: the next to read that would take it for data."""
    source = Path(os.path.expanduser(data))  # of an unknown user: as it is, where Path would raise
    if data in DATASETS or not source.exists():
        return
    if path.exists() and path.samefile(source):
        raise ConfigError(f"{path} is the data that is read: it is not written over. Choose another name.")
    place = Path(os.path.realpath(path.parent)) / path.name
    if source.is_dir() and any(folder.exists() and folder.samefile(source) for folder in place.parents):
        raise ConfigError(f"{path} would lie in {data}, and be taken for data there. Choose another folder.")


def check_new(path: Path) -> Path:
    """The same path; refused if a file is there, or a link that may lead to one."""
    if os.path.lexists(path) and not _is_channel(path):
        raise ConfigError(f"{path} exists. Choose another name, or give --overwrite.")
    return path


def _is_channel(path: Path) -> bool:
    """Whether a path leads to a device, a pipe or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_named(path: Path, content: str) -> None:
    """Write into the device or pipe that a user has named; else replace the file in one go."""
    if _is_channel(path):
        path.write_text(content, encoding="utf-8", errors="backslashreplace")
    else:
        write_output(path, content)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Format rows as CSV; text that a spreadsheet would run as a formula gets an apostrophe, a number stays."""
    lines = []
    for row in rows:
        line = io.StringIO()  # which ends in \r\n, so that a cell with \r is quoted
        csv.writer(line).writerow(f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell for cell in row)
        lines.append(line.getvalue().removesuffix("\r\n") + "\n")
    return "".join(lines)


def write_output(path: Path, content: str | bytes) -> None:
    """Replace a file in one go; what a text has that is no text, such as half of a character, is written in digits.

    What is not whole yet is in a folder of its own, so that no other file is in its way.
    """
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    if os.path.lexists(path) and not files.is_plain_file(path):
        raise ConfigError(f"{path} is not a plain file, so it is not replaced. Remove it, or choose another name.")
    try:
        with tempfile.TemporaryDirectory(prefix=".fnrfl-", dir=path.parent) as folder:
            files.write(Path(folder) / path.name, data)
            (Path(folder) / path.name).replace(path)
        files.sync(path.parent)
    except OSError as error:  # a full disk does not say which file, and others name one that nobody knows
        raise OSError(error.errno, error.strerror, str(path)) from error
