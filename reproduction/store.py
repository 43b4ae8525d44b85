"""Results of finished cells: a line of JSON each. Some are committed in results/, others were computed here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from reproduction.catalogue import Cell, UsageError, text

State = Literal["committed", "here", "older", "failed", "not-run"]
COMMITTED = Path(__file__).parent / "results"
HERE = Path("runs") / "reproduction" / "lines.jsonl"  # results that are computed on this machine


@dataclass(frozen=True)
class Line:
    """The result of a cell as its line of JSON has it, as far as tables need it; results/README.md has the fields."""

    id: str = ""
    recipe: str = ""
    overrides: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    date: str = ""
    device: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)
    failed: str = ""  # why there are no numbers
    accuracy: float = 0.0
    accuracies: list[float] = field(default_factory=list)
    clean: float | None = None
    noisy: float | None = None
    seconds_train: float = 0.0
    seconds_wall: float = 0.0
    seconds_of_rounds: list[float] = field(default_factory=list)
    seconds_date: str = ""  # of a later run that took less, or that ran alone
    processes: int = 1  # cells that ran beside each other
    kept_rounds: int | None = None  # of a cell that was stopped and went on
    no_measure: str = ""  # another reason why its seconds are no measure
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    model_sha256: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)
    state: State = "not-run"  # what `Results.find` says of it; no file does

    @property
    def bytes(self) -> float:  # both ways
        return float(self.bytes_up + self.bytes_down)

    @property
    def untimed(self) -> str:
        """Why its seconds are no measure, in two or three words; empty if they are one."""
        if self.processes > 1:  # beside other processes everything takes longer
            return text("values", "beside", others=self.processes - 1)
        if self.kept_rounds is not None:  # nobody knows what ran beside it before
            return text("values", "stopped")
        return self.no_measure

    @property
    def place(self) -> tuple[object, ...]:
        """What seconds depend on: device and engine."""
        return self.device, self.engine.get("name"), self.engine.get("precision")

    @property
    def made_from(self) -> tuple[str, tuple[str, ...]]:
        """Recipe and overrides, as its cell has them today unless the line is older."""
        return self.recipe, tuple(self.overrides)

    @property
    def usable(self) -> bool:
        """Whether a table may show its numbers."""
        return self.state in ("committed", "here")

    @property
    def origin(self) -> str:
        """Where the result comes from, for people."""
        if self.state != "committed":
            return text("values", self.state)
        timed = text("values", "timed", date=self.seconds_date) if self.seconds_date else ""
        return text("values", "committed", date=self.date, device=self.device) + timed


NEEDED = ("recipe", "overrides", "date", "device")
NUMBERS = ("accuracy", "accuracies", "seconds_train", "seconds_wall", "bytes_up", "bytes_down", "notes")
_FIELDS = {one.name for one in fields(Line)} - {"state"}


def on_one_machine(*lines: Line) -> bool:
    """Whether all seconds are a measure, of one device and one engine."""
    return not any(line.untimed for line in lines) and len({line.place for line in lines}) == 1


def timed_together(*lines: Line) -> bool:
    """Whether differences in seconds are those of methods: of one machine and of one day, since code changes."""
    return on_one_machine(*lines) and len({line.seconds_date or line.date for line in lines}) == 1


class Results:
    """The finished cells by id: committed ones, and those computed here."""

    def __init__(self, committed: Iterable[Line], here: Iterable[Line] = ()) -> None:
        self.committed, self.here = _one_of_each(committed), _one_of_each(here)

    @classmethod
    def read(cls, here: Path = HERE) -> Results:
        """Read the committed lines and those of a file, which need not be there."""
        return cls(committed_lines(), read_lines(here) if here.exists() else [])

    def find(self, cell: Cell) -> Line:
        """Return the line of a cell, or a line without numbers whose state says why.

        A line that was made from other overrides than the cell has today is never used. A cell with a leak is marked
        whatever the line says.
        """
        places: tuple[tuple[State, Mapping[str, Line]], ...] = (("committed", self.committed), ("here", self.here))
        known = [replace(lines[cell.id], state=state) for state, lines in places if cell.id in lines]
        fitting = [line for line in known if line.made_from == (cell.recipe, cell.overrides)]
        for line in fitting:
            if not line.failed:
                return replace(line, leaks=line.leaks or (["public_is_test"] if cell.leaks else []))
        if fitting:
            return replace(fitting[0], state="failed")
        return replace(known[0], state="older") if known else Line()


def committed_lines() -> list[Line]:
    """Return all committed lines, in the order of their files' names; a cell that was run again has several."""
    paths = sorted(COMMITTED.glob("*.jsonl"), key=lambda path: re.sub(r"\d+", lambda n: n[0].zfill(9), path.stem))
    return [line for path in paths for line in read_lines(path)]


def read_lines(path: Path) -> list[Line]:
    """Return all whole lines of a file; a kill may have left half of one."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}. Choose another file.") from error
    lines = []
    for number, one in enumerate(texts, 1):
        try:
            line = json.loads(one)
        except (ValueError, RecursionError):
            continue
        if not isinstance(line, dict) or not isinstance(line.get("id"), str):
            continue
        lacking = [name for name in (*NEEDED, *(() if "failed" in line else NUMBERS)) if line.get(name) is None]
        shares = [] if "failed" in line or lacking else [line["accuracy"], *line["accuracies"]]
        if lacking or not all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares):
            what = f"has no {', '.join(lacking)}" if lacking else "has an accuracy that is not a number from 0 to 1"
            raise UsageError(f"{path}, line {number}: the result of {line['id']} {what}. Take this line out.")
        lines.append(Line(**{name: value for name, value in line.items() if name in _FIELDS}))
    return lines


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line to a file and wait until it is on the disk; after half a line, which a kill left, on a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("ab") as file:
        file.write((b"" if whole else b"\n") + json.dumps(line, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _one_of_each(lines: Iterable[Line]) -> dict[str, Line]:
    """Return one line of each cell, of its last recipe: the first that succeeded, with the last seconds that count.

    So a cell that is run again for its seconds keeps its accuracy: nobody can run it until the accuracy pleases.
    """
    found: dict[str, Line] = {}
    for line in lines:
        before = found.get(line.id)
        if before is None or before.made_from != line.made_from or before.failed:
            found[line.id] = line
        elif not line.failed and not line.untimed and before.place == line.place:
            timed = {name: getattr(line, name) for name in ("seconds_train", "seconds_wall", "seconds_of_rounds")}
            timed |= {"processes": 1, "kept_rounds": None, "no_measure": ""}
            timed |= {} if line.date == before.date else {"seconds_date": line.date}
            found[line.id] = replace(before, **timed)
    return found
