"""The folder of a comparison: which grid it belongs to, and the table in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.results.compare.cells import Cell
from fnrfl.results.compare.tables import Comparison
from fnrfl.rundir import files
from fnrfl.rundir.configs import flat_config
from fnrfl.rundir.outputs import write_output

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
