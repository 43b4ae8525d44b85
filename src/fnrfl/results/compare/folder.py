"""The folder of a comparison: which grid it belongs to, whether the runs in it belong together, and its table."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import fnrfl
from fnrfl import usercode
from fnrfl.core.errors import ConfigError
from fnrfl.results.compare.cells import Cell
from fnrfl.results.compare.tables import Comparison
from fnrfl.rundir import files, origin
from fnrfl.rundir.configs import Config, data_keys, differing_from_plan, flat_config, value_in_words, wrong_run
from fnrfl.rundir.origin import Origin
from fnrfl.rundir.outputs import write_output

if TYPE_CHECKING:
    from fnrfl.runs.passed import PassedObjects
    from fnrfl.runs.setup.build import Built

# Of grid.json. 2: hashes of configs leave out keys at their defaults; in format 1 only names of runs can be compared
GRID_FORMAT = 2


def default_out(cells: Sequence[Cell]) -> Path:
    """Where a comparison is kept unless somebody says otherwise: the same grid has the same folder."""
    return Path("runs") / f"compare-{cells[0].config.name}-{_hash(_claims(cells))[:6]}"


def check_comparison_folder(out: Path, cells: Sequence[Cell]) -> None:
    """Refuse a folder with something else in it; a grid that contains the one there is a continuation of it."""
    path, ours = out / "grid.json", _claims(cells)
    if not path.exists():
        if out.exists() and any(found.name != "grid.json.part" for found in out.iterdir()):
            raise ConfigError(f"{out} holds something else than a comparison. Choose another folder with --out.")
        return
    try:
        found = json.loads(files.read(path, "a comparison has a grid.json"))
        written, theirs = int(found["format"]), dict(found["cells"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}). Choose another folder with --out.") from error
    if written > GRID_FORMAT:
        raise ConfigError(
            f"{path} has format {written}, and this version reads formats up to {GRID_FORMAT}. Use the version that "
            "wrote it, or choose another folder with --out."
        )
    if written < GRID_FORMAT:
        theirs = {name: ours.get(name) for name in theirs}
    strange = next((name for name, sha256 in theirs.items() if name not in ours or ours[name] != sha256), None)
    if strange is not None:
        how = "with another config" if strange in ours else "which this one has not"
        raise ConfigError(
            f"{out} belongs to another comparison: its run {strange} is one {how}. Repeat the command that made it, "
            "add to it, or choose another folder with --out."
        )


def write_grid(out: Path, cells: Sequence[Cell]) -> None:
    """What `check_comparison_folder` will find."""
    claims = _claims(cells)
    configs = {cell.name: flat_config(cell.config) for cell in cells}
    first = next(iter(configs.values()))
    shared = [key for key in first if all(key in it and it[key] == first[key] for it in configs.values())]
    grid_file = {
        "format": GRID_FORMAT,
        "sha256": _hash(claims),
        "cells": claims,
        "config": {key: first[key] for key in shared},  # what all runs share, and below what each has of its own
        "own": {name: {key: it[key] for key in it if key not in shared} for name, it in configs.items()},
    }
    write_output(out / "grid.json", json.dumps(grid_file, indent=1) + "\n")


def write_tables(out: Path, found: Comparison) -> None:
    """The comparison in every form that a file can have."""
    for suffix, text in (("json", found.to_json()), ("csv", found.to_csv()), ("md", found.to_markdown())):
        write_output(out / f"comparison.{suffix}", text)


def _claims(cells: Iterable[Cell]) -> dict[str, str]:
    """What makes a grid: the names of its runs and the hashes of their configs."""
    return {cell.name: cell.config.sha256 for cell in cells}


def _hash(claims: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(claims, sort_keys=True).encode()).hexdigest()


# -- whether runs belong together --------------------------------------------------------------------------------------

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
