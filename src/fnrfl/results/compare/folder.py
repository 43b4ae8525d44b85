"""The folder of a comparison: which grid it belongs to, whether the runs in it belong together, and its table."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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

T = TypeVar("T")
# Of grid.json. 2: hashes of configs leave out keys at their defaults; in format 1 only names of runs can be compared
GRID_FORMAT = 2
RUN_INTO_ANOTHER_FOLDER = "Put it back as it was, or run all of them again into another folder with --out."
SHOWN_RUNS = 4  # by name, in a sentence


def read_file(path: Path, way_out: str, read: Callable[[Any], T]) -> T:
    """Return what `read` finds in a JSON file of a comparison; one that it cannot read is damaged."""
    try:
        return read(json.loads(files.read(path, f"a comparison has a {path.name}")))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}). {way_out}") from error


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
    another = "choose another folder with --out."
    written, theirs = read_file(path, another.capitalize(), lambda tree: (int(tree["format"]), dict(tree["cells"])))
    if written > GRID_FORMAT:
        raise ConfigError(
            f"{path} has format {written}, and this version reads formats up to {GRID_FORMAT}. Use the version that "
            f"wrote it, or {another}"
        )
    strange = (name for name in theirs if name not in ours or (written == GRID_FORMAT and ours[name] != theirs[name]))
    if (name := next(strange, None)) is not None:
        how = "with another config" if name in ours else "which this one has not"
        raise ConfigError(
            f"{out} belongs to another comparison: its run {name} is one {how}. Repeat the command that made it, "
            f"add to it, or {another}"
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


class Members:
    """The runs of a comparison that were found to belong to it: `plans` are the configs of its grid, by name."""

    def __init__(self, out: Path, plans: Mapping[str, Config], way_out: str = RUN_INTO_ANOTHER_FOLDER) -> None:
        self._out, self._plans, self._way_out = out, plans, way_out
        self._known: dict[str, Origin] = {}
        self._pairs = origin.Pairs(way_out)
        self._checked_data: list[Config] = []  # the keys of data that was read now

    @classmethod
    def of_cells(cls, out: Path, cells: Sequence[Cell]) -> Members:
        """Check every run that has begun; the first that does not belong is refused."""
        found = cls(out, {cell.name: flat_config(cell.config) for cell in cells})
        for cell in cells:
            if _has_begun(out / cell.name):
                found.add(cell.name)
        return found

    def add(self, name: str, run: Origin | None = None) -> None:
        """Check a run against its config and against the runs that are known."""
        run, planned = run or origin.read_origin(self._out / name), self._plans[name]
        if planned and differing_from_plan(planned, run.config):  # a grid of the first format has names alone
            raise ConfigError(wrong_run(run.folder, planned, run.config, self._plans, self._way_out))
        self._pairs.add(run)
        self._known[name] = run

    def check(self, name: str, built: Built) -> None:
        """Refuse a run that has not begun if its data or its split is not that of the runs that have."""
        self._checked_data.append(data_keys(self._plans[name]))
        header = {"data": {"sha256": built.dataset.checksum}}
        self._pairs.check(Origin(self._out / name, "", self._plans[name], header, built.manifest()))

    def refuse_changed_code(self) -> None:
        """Refuse runs whose modules of the user's own are no longer what they were when the runs began."""
        for module in dict.fromkeys(module for run in self._known.values() for module in run.code):
            now = usercode.find_source(module)
            if now is None or now.sha256 is None:
                continue
            if others := [run for run in self._known.values() if run.code.get(module, now.sha256) != now.sha256]:
                names = [str(run.folder) for run in others]
                more = f" and {len(names) - SHOWN_RUNS} more" if len(names) > SHOWN_RUNS else ""
                raise ConfigError(
                    f"{now.place} has changed since {', '.join(names[:SHOWN_RUNS])}{more} began: its sha256 was "
                    f"{origin.short_hash(others[0].code[module])} and is {origin.short_hash(now.sha256)}, and a "
                    f"comparison is of one code. {self._way_out}"
                )

    def refuse_changed_data(self, cells: Iterable[Cell], passed: PassedObjects) -> None:
        """Refuse runs whose data is not what they began with; that of runs which were built now has been checked."""
        from fnrfl.runs.data import data_hash_now

        for cell in cells:
            run = self._known.get(cell.name)
            if run is None or data_keys(run.config) in self._checked_data:
                continue
            if dict(run.header.get("versions") or {}).get("fnrfl") != fnrfl.__version__:
                continue  # another version may compute a hash in another way
            self._checked_data.append(data_keys(run.config))
            now = data_hash_now(cell.config, passed)
            if now is not None and now != run.data:
                raise ConfigError(
                    f"dataset = {value_in_words(cell.config.dataset.name)} is not the data that {run.folder} was "
                    f"begun with: its sha256 was {origin.short_hash(run.data)} and is {origin.short_hash(now)}. "
                    f"{self._way_out}"
                )


def _has_begun(folder: Path) -> bool:
    """Whether there is a run to check. One that cannot be read is left to whoever goes on with it: it fails alone."""
    try:
        tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        with (folder / "events.jsonl").open(encoding="utf-8") as log:
            json.loads(log.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return True
