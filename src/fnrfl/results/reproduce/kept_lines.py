"""Results of finished cells: a line of JSON each. Some are part of the package, others were computed here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fnrfl.config.registry import PACKAGE_FOLDER
from fnrfl.core.errors import ConfigError
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.titles import HERE
from fnrfl.rundir.outputs import check_output

CellLine = dict[str, Any]
Standing = Literal["committed", "here", "older recipe", "failed", "not run"]

OF_PACKAGE = PACKAGE_FOLDER / "results" / "reproduce" / "committed"  # where a wheel has results/reproduction
OF_SOURCES = PACKAGE_FOLDER.parent.parent / "results" / "reproduction"
ABOUT_CELLS: dict[str, type] = {"recipe": str, "overrides": list, "date": str, "device": str}  # of every line
CELL_NUMBERS: dict[str, type] = {
    "accuracy": float, "accuracies": list, "seconds_train": float, "seconds_wall": float, "seconds_preparing": float,
    "bytes_up": float, "bytes_down": float, "notes": dict,
}  # fmt: skip
# What stands in a line whose seconds are no measure.
MARKS: dict[str, type] = {"processes": float, "kept_rounds": float, "no_measure": str}
_KIND_NAMES = {str: "text", list: "a list", float: "a number", dict: "an object"}
BEGINNING = '{"id": "'  # of every line: what may be all that a full disk has taken of the first one


@dataclass(frozen=True)
class CellResult:
    """What is known of a cell: where its line comes from, and the line if there is one that counts."""

    state: Standing
    line: CellLine = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether a table may show its numbers."""
        return self.state in ("committed", "here")

    @property
    def words(self) -> str:
        """Where the result comes from, for people."""
        if self.state == "committed":
            timed = f", seconds of {self.line['seconds_date']}" if "seconds_date" in self.line else ""
            return f"committed {self.line['date']} {self.line['device']}{timed}"
        return "computed here" if self.state == "here" else self.state


class KeptLines:
    """The finished cells by id: committed ones, and those computed here, which count first if `prefer_here`."""

    def __init__(self, committed: Iterable[CellLine], here: Iterable[CellLine], *, prefer_here: bool = False) -> None:
        self.committed, self.here = _one_of_each(committed), _one_of_each(here)
        self._prefer_here = prefer_here

    @classmethod
    def read(cls, here: Path = HERE, *, prefer_here: bool = False) -> KeptLines:
        """Read the lines of the package and those of a file, which need not be there."""
        return cls(committed_lines(), read_lines(here) if here.exists() else [], prefer_here=prefer_here)

    def __iter__(self) -> Iterator[CellLine]:
        """All lines, the committed ones first."""
        yield from self.committed.values()
        yield from self.here.values()

    def find(self, cell: PaperCell, *, prefer_here: bool = False) -> CellResult:
        """What is known of a cell; with `prefer_here`, a line computed here counts first whatever the lines prefer.

        A line that was made from other overrides than the cell has today is never used: it is an older recipe. Its
        leaks are those of the cell, whatever the file says, and any others that the file names.
        """
        places: list[tuple[Standing, Mapping[str, CellLine]]] = [("committed", self.committed), ("here", self.here)]
        known = [(state, lines[cell.id]) for state, lines in places if cell.id in lines]
        if prefer_here or self._prefer_here:
            known.reverse()
        fitting = [(state, line) for state, line in known if is_of_today(cell, line)]
        for state, line in fitting:
            if "failed" not in line:
                leaks = dict.fromkeys([*cell.leaks, *line.get("leaks", ())])
                return CellResult(state, line | {"leaks": list(leaks)})
        if fitting:
            return CellResult("failed", fitting[0][1])
        return CellResult("older recipe", known[0][1]) if known else CellResult("not run")


def committed_lines() -> list[CellLine]:
    """All lines of the package, in the order of their files' names; a cell that was run again has several."""
    folder = OF_SOURCES if OF_SOURCES.is_dir() else OF_PACKAGE
    return [line for path in sorted(folder.glob("*.jsonl"), key=_in_order) for line in read_lines(path)]


def _in_order(path: Path) -> list[tuple[int, str]]:
    """A name as people sort it: 2 before 10, and a name before the same with a number."""
    parts = re.split(r"(\d+)", path.stem)  # by turns words and digits
    return [(int(part), "") if turn % 2 else (-1, part) for turn, part in enumerate(parts)]


def is_of_today(cell: PaperCell, line: CellLine) -> bool:
    """Whether a line was made from the recipe and the overrides that its cell has now."""
    return _made_from(line) == (cell.recipe, cell.overrides)


def _made_from(line: CellLine) -> tuple[object, tuple[str, ...]]:
    return line.get("recipe"), tuple(line.get("overrides", ()))


def seconds_count(line: CellLine) -> bool:
    """Whether its seconds are a measure, which tables and claims may take."""
    return not why_no_measure(line)


def why_no_measure(line: CellLine) -> str:
    """Why its seconds are no measure, in two or three words; no words if they are one.

    Beside other processes everything takes longer. Of a cell that was stopped and went on, nobody knows what ran beside
    it before. A line may also name a reason of its own.
    """
    if others := line.get("processes", 1) - 1:
        return f"beside {others}"
    if "kept_rounds" in line:
        return "after a stop"
    return str(line.get("no_measure", ""))


def bytes_both_ways(line: CellLine) -> float:
    """Bytes of both directions."""
    return float(line["bytes_up"] + line["bytes_down"])


def on_one_machine(*lines: CellLine) -> bool:
    """Whether all seconds are a measure, of one device and one engine."""
    return all(map(seconds_count, lines)) and len(set(map(_place, lines))) == 1


def timed_together(*lines: CellLine) -> bool:
    """Whether differences in seconds are those of methods: of one machine and of one day, since code changes."""
    return on_one_machine(*lines) and len({line.get("seconds_date", line.get("date")) for line in lines}) == 1


def _place(line: CellLine) -> tuple[object, ...]:
    engine = line.get("engine", {})
    return line["device"], engine.get("name"), engine.get("precision")


def read_lines(path: Path) -> list[CellLine]:
    """All whole lines of a file; a kill may have left half of one."""
    try:
        if not path.is_file():  # a pipe or a device may never end
            raise OSError(0, "it is not an ordinary file")
        texts = path.read_text(encoding="utf-8-sig").splitlines()  # a mark at its beginning is Windows'
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}. Choose another file.") from error
    found = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("id"), str):
            if (wrong := _what_is_wrong(line)) is not None:
                raise ConfigError(
                    f"{path}, line {number}: the result of {line['id']} {wrong}. "
                    "Take this line out, and the cell can be run again."
                )
            found.append(line)
    return found


def _what_is_wrong(line: CellLine) -> str | None:
    """Why tables cannot use a line; None if they can."""
    for name, kind in (ABOUT_CELLS if "failed" in line else ABOUT_CELLS | CELL_NUMBERS).items():
        value = line.get(name)
        if value is None:
            return f'has no "{name}", which tables need'
        if not (_is_number(value) if kind is float else isinstance(value, kind)):
            return f'has "{name}", but it is not {_KIND_NAMES[kind]}'
    for name, kind in MARKS.items():
        if name in line and not (_is_number(line[name]) if kind is float else isinstance(line[name], kind)):
            return f'has "{name}", but it is not {_KIND_NAMES[kind]}'
    for accuracy in (line["accuracy"], *line["accuracies"]) if "failed" not in line else ():
        if not _is_number(accuracy) or not 0 <= accuracy <= 1:
            return "has an accuracy that is not a number from 0 to 1"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_lines_file(path: Path) -> None:
    """Refuse a file that has something else in it: no result is added to a log, or to somebody's notes."""
    check_output(path)
    if path.exists() and not read_lines(path) and not BEGINNING.startswith(path.read_text("utf-8")[: len(BEGINNING)]):
        raise ConfigError(f"{path} has something else in it than results of cells. Choose another file with --out.")


def make_room(path: Path) -> None:
    """Make the folder of a file of lines, before hours are spent on what cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for place in (path.parent, path):
        if place.exists() and not os.access(place, os.W_OK):
            raise ConfigError(f"{place} cannot be written. Choose another file with --out.")


def append_line(path: Path, line: CellLine) -> None:
    """Add a line to a file and wait until it is on the disk; after half a line, which a kill left, on a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
            whole = not size or file.read(1) == b"\n"
            file.write((b"" if whole else b"\n") + json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a full disk does not say which file
        raise OSError(error.errno, error.strerror, str(path)) from error


def _one_of_each(lines: Iterable[CellLine]) -> dict[str, CellLine]:
    """One line of each cell, of its last recipe: the first that succeeded, with the last seconds that are a measure.

    So a cell that is run again for its seconds keeps its accuracy: nobody can run it until the accuracy pleases.
    """
    found: dict[str, CellLine] = {}
    for line in lines:
        before = found.get(line["id"], line)
        if before is line or _made_from(before) != _made_from(line) or "failed" in before:
            found[line["id"]] = line
        elif "failed" not in line and seconds_count(line) and _place(before) == _place(line):
            found[line["id"]] = _with_seconds_of(line, before)
    return found


def _with_seconds_of(timed: CellLine, line: CellLine) -> CellLine:
    kept = {name: value for name, value in line.items() if name not in MARKS}
    dated = {} if timed["date"] == line["date"] else {"seconds_date": timed["date"]}
    return kept | dated | {name: value for name, value in timed.items() if name.startswith("seconds")}
