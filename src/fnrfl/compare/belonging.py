"""Whether runs belong together: each has the config of its cell, and those that are paired have the same data."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnrfl import config, origin
from fnrfl.compare.cells import Cell
from fnrfl.errors import ConfigError
from fnrfl.origin import Origin, short

if TYPE_CHECKING:
    from fnrfl.build import Built

WAY_OUT = "Put it back as it was, or run all of them again into another folder with --out."


class Members:
    """The runs of a comparison that were found to belong to it."""

    def __init__(self, out: Path, cells: Sequence[Cell]) -> None:
        """Check every run that has begun; the first that does not belong is refused."""
        self.out, self.cells = out, cells
        self.known: dict[str, tuple[Cell, Origin]] = {}
        for cell in cells:
            if _has_begun(out / cell.name):
                self.add(cell)

    def add(self, cell: Cell) -> None:
        """Check the run of a cell against its config and against the runs that are known."""
        found = origin.read(self.out / cell.name)
        self._check_config(cell, found)
        self._check_pairs(cell, found)
        self.known[cell.name] = cell, found

    def check(self, cell: Cell, built: Built) -> None:
        """Refuse a run that has not begun if its data or its split is not that of the runs that have."""
        partition = built.partition.manifest() | {"splits": built.splits.manifest()}
        header = {"data": {"sha256": built.dataset.checksum}}
        self._check_pairs(cell, Origin(self.out / cell.name, "", _flat(cell), header, partition))

    def _check_pairs(self, cell: Cell, found: Origin) -> None:
        for other, known in self.known.values():
            if other.name == cell.name:
                continue
            if cell.config.dataset == other.config.dataset:
                _check_data(found, known)
            if split_keys(cell) == split_keys(other):
                _check_split(found, known)
                _check_public(found, known)

    def _check_config(self, cell: Cell, found: Origin) -> None:
        keys = _differing(cell, found)
        if not keys:
            return
        ours, theirs = _flat(cell).get(keys[0]), found.config.get(keys[0])
        twin = next((other.name for other in self.cells if not _differing(other, found)), None)
        of = f" That is the config of {twin}: the two folders may have been exchanged." if twin else ""
        raise ConfigError(
            f"{found.folder} does not hold the run {cell.name} of this comparison: {keys[0]} is {json.dumps(theirs)} "
            f"in its config.toml and {json.dumps(ours)} in the grid.{of} {WAY_OUT}"
        )


def split_keys(cell: Cell) -> tuple[object, ...]:
    """What decides which example goes to whom."""
    it = cell.config
    return (it.dataset, it.scenario, it.clients, it.seed, it.public, it.validation)


def _has_begun(folder: Path) -> bool:
    """Whether there is a run to check. One that cannot be read is left to whoever goes on with it: it fails alone."""
    try:
        tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        with (folder / "events.jsonl").open(encoding="utf-8") as log:
            json.loads(log.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _flat(cell: Cell) -> dict[str, Any]:
    return origin.flat(tomllib.loads(cell.config.to_toml()))


def _differing(cell: Cell, found: Origin) -> list[str]:
    """Keys in which a run is not that of a cell; what the engine chose by itself does not count.

    A run of an older version lacks keys; they have the value that they were introduced with.
    """
    ours = _flat(cell)
    theirs = config.introduced(cell.config.algorithm.name) | found.config
    free = {key for key, value in ours.items() if key.startswith("engine.") and value == "auto"}
    if found.config["fnr"] == "off":
        theirs = {key: value for key, value in theirs.items() if not key.startswith("fnr.")}
    keys = [key for key in origin.differing(ours, theirs) if key not in free]
    return ["fnr"] if "fnr" in keys else keys


def _check_data(found: Origin, known: Origin) -> None:
    if found.data != known.data:
        raise ConfigError(
            f"{known.folder} and {found.folder} are of different data, so they cannot be compared: dataset = "
            f"{json.dumps(found.config['dataset'])} has the sha256 {short(known.data)} in the first and "
            f"{short(found.data)} in the second. {WAY_OUT}"
        )


def _check_split(found: Origin, known: Origin) -> None:
    if found.split != known.split:
        raise ConfigError(
            f"{known.folder} and {found.folder} have different splits of the same data, so they cannot be compared: "
            "with the same seed, scenario and number of clients, the examples of the clients, of validation or of the "
            f"test differ (sha256 {short(known.split)} and {short(found.split)}). {WAY_OUT}"
        )


def _check_public(found: Origin, known: Origin) -> None:
    """Methods may divide public data in different ways; where two divide it alike, it must be the same data."""
    (sizes, data), (other_sizes, other_data) = found.public, known.public
    if sizes == other_sizes and data != other_data:
        raise ConfigError(
            f"{known.folder} and {found.folder} have different public data, so they cannot be compared: public.source "
            f"= {json.dumps(found.config['public.source'])} was changed between them. {WAY_OUT}"
        )
