"""Whether runs belong together: each has the config of its cell, and those that are paired the same data and code."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import fnrfl
from fnrfl import usercode
from fnrfl.core.errors import ConfigError
from fnrfl.results.compare.cells import Cell
from fnrfl.rundir import origin
from fnrfl.rundir.configs import Config, data_keys, differing_from_plan, flat_config, value_in_words, wrong_run
from fnrfl.rundir.origin import Origin

if TYPE_CHECKING:
    from fnrfl.runs.passed import PassedObjects
    from fnrfl.runs.setup.build import Built

RUN_INTO_ANOTHER_FOLDER = "Put it back as it was, or run all of them again into another folder with --out."
SHOWN_RUNS = 4  # by name, in a sentence


class Members:
    """The runs of a comparison that were found to belong to it."""

    def __init__(self, out: Path, cells: Sequence[Cell]) -> None:
        """Check every run that has begun; the first that does not belong is refused."""
        self.out, self.cells = out, cells
        self.known: dict[str, Origin] = {}
        self.pairs = origin.Pairs(RUN_INTO_ANOTHER_FOLDER)
        self.checked_data: list[Config] = []  # the keys of data that was read now
        for cell in cells:
            if _has_begun(out / cell.name):
                self.add(cell)

    def add(self, cell: Cell) -> None:
        """Check the run of a cell against its config and against the runs that are known."""
        found = origin.read_origin(self.out / cell.name)
        self._check_config(cell, found)
        self.pairs.add(found)
        self.known[cell.name] = found

    def check(self, cell: Cell, built: Built) -> None:
        """Refuse a run that has not begun if its data or its split is not that of the runs that have."""
        self.checked_data.append(data_keys(flat_config(cell.config)))
        header = {"data": {"sha256": built.dataset.checksum}}
        self.pairs.check(Origin(self.out / cell.name, "", flat_config(cell.config), header, built.manifest()))

    def refuse_changed_code(self) -> None:
        """Refuse runs whose modules of the user's own are no longer what they were when the runs began."""
        for module in dict.fromkeys(module for run in self.known.values() for module in run.code):
            now = usercode.find_source(module)
            others = [run for run in self.known.values() if now and run.code.get(module, now.sha256) != now.sha256]
            if now is not None and now.sha256 is not None and others:
                raise ConfigError(
                    f"{now.place} has changed since {_listed(others)} began: its sha256 was "
                    f"{origin.short_hash(others[0].code[module])} and is {origin.short_hash(now.sha256)}, and a "
                    f"comparison is of one code. {RUN_INTO_ANOTHER_FOLDER}"
                )

    def refuse_changed_data(self, passed: PassedObjects) -> None:
        """Refuse runs whose data is not what they began with; that of runs which were built now has been checked."""
        from fnrfl.runs.data import data_hash_now

        for cell in self.cells:
            found = self.known.get(cell.name)
            if found is None or data_keys(found.config) in self.checked_data or not _of_this_version(found):
                continue
            self.checked_data.append(data_keys(found.config))
            now = data_hash_now(cell.config, passed)
            if now is not None and now != found.data:
                raise ConfigError(
                    f"dataset = {value_in_words(cell.config.dataset.name)} is not the data that {found.folder} was "
                    f"begun with: its sha256 was {origin.short_hash(found.data)} and is {origin.short_hash(now)}. "
                    f"{RUN_INTO_ANOTHER_FOLDER}"
                )

    def _check_config(self, cell: Cell, found: Origin) -> None:
        planned = flat_config(cell.config)
        if differing_from_plan(planned, found.config):
            plans = {other.name: flat_config(other.config) for other in self.cells}
            raise ConfigError(wrong_run(found.folder, planned, found.config, plans, RUN_INTO_ANOTHER_FOLDER))


def _listed(runs: Sequence[Origin]) -> str:
    names = [str(run.folder) for run in runs]
    return ", ".join(names[:SHOWN_RUNS]) + (f" and {len(names) - SHOWN_RUNS} more" if len(names) > SHOWN_RUNS else "")


def _of_this_version(found: Origin) -> bool:
    """Whether the run was begun by this version: another one may compute a hash in another way."""
    return dict(found.header.get("versions") or {}).get("fnrfl") == fnrfl.__version__


def _has_begun(folder: Path) -> bool:
    """Whether there is a run to check. One that cannot be read is left to whoever goes on with it: it fails alone."""
    try:
        tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        with (folder / "events.jsonl").open(encoding="utf-8") as log:
            json.loads(log.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return True
