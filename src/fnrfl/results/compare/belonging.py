"""Whether runs belong together: each has the config of its cell, and those that are paired have the same data."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fnrfl.core.errors import ConfigError
from fnrfl.results.compare.cells import Cell
from fnrfl.rundir import origin
from fnrfl.rundir.configs import differing_from_plan, flat_config, wrong_run
from fnrfl.rundir.origin import Origin

if TYPE_CHECKING:
    from fnrfl.runs.build import Built

RUN_INTO_ANOTHER_FOLDER = "Put it back as it was, or run all of them again into another folder with --out."


class Members:
    """The runs of a comparison that were found to belong to it."""

    def __init__(self, out: Path, cells: Sequence[Cell]) -> None:
        """Check every run that has begun; the first that does not belong is refused."""
        self.out, self.cells = out, cells
        self.known: dict[str, Origin] = {}
        for cell in cells:
            if _has_begun(out / cell.name):
                self.add(cell)

    def add(self, cell: Cell) -> None:
        """Check the run of a cell against its config and against the runs that are known."""
        found = origin.read_origin(self.out / cell.name)
        self._check_config(cell, found)
        self._check_pairs(cell, found)
        self.known[cell.name] = found

    def check(self, cell: Cell, built: Built) -> None:
        """Refuse a run that has not begun if its data or its split is not that of the runs that have."""
        header = {"data": {"sha256": built.dataset.checksum}}
        self._check_pairs(cell, Origin(self.out / cell.name, "", flat_config(cell.config), header, built.manifest()))

    def _check_pairs(self, cell: Cell, found: Origin) -> None:
        for name, known in self.known.items():
            if name != cell.name:
                origin.check_pair(known, found, RUN_INTO_ANOTHER_FOLDER)

    def _check_config(self, cell: Cell, found: Origin) -> None:
        planned = flat_config(cell.config)
        if differing_from_plan(planned, found.config):
            plans = {other.name: flat_config(other.config) for other in self.cells}
            raise ConfigError(wrong_run(found.folder, planned, found.config, plans, RUN_INTO_ANOTHER_FOLDER))


def _has_begun(folder: Path) -> bool:
    """Whether there is a run to check. One that cannot be read is left to whoever goes on with it: it fails alone."""
    try:
        tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        with (folder / "events.jsonl").open(encoding="utf-8") as log:
            json.loads(log.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return True
