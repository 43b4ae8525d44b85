"""Run directories as plain values, and whether they belong together."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted, printable
from fnrfl.results.compare.folder import Members, read_file
from fnrfl.rundir import directory, events, origin
from fnrfl.rundir.configs import Config, with_present_names
from fnrfl.rundir.events import Event
from fnrfl.rundir.origin import Origin, short_hash
from fnrfl.rundir.record import checked_rounds, listed_and_numbers
from fnrfl.runs.metrics import LOWEST, RunMetrics

MISSING_SHOWN = 6  # missing runs, by name
NAME_RUNS_ONE_BY_ONE = "Put it back as it was, or name the runs that belong together one by one."
REPEAT = "Repeat the comparison, or remove the file."
OF_LAST_ROUND = ("per_class", "confusion", *LOWEST.values())


@dataclass(frozen=True)
class Run(RunMetrics):
    """One run directory."""

    path: Path
    origin: Origin
    config: Config  # by dotted key
    about: Event  # the first line of the log
    rounds: list[Event]
    counts: list[list[int]]  # [clients][classes], from partition.json
    client_names: list[str]  # what a page calls each client: its id in the data, or "client" and its number
    classes: list[str]  # the names of the classes; their numbers, if the log has no names
    examples: dict[str, int]  # of each part of the data: test, validation, public, ...
    finished: bool
    leaks: tuple[str, ...]  # that were on, by name
    test_counts: list[int]  # examples of each class in the test set; empty for runs of versions that did not say
    baseline: tuple[str, ...] = ()  # run directories that its comparison takes for the baseline, by name
    compared_by: str | None = None  # the metric of its comparison

    @property
    def seed(self) -> int:
        """The seed of all its randomness."""
        return int(self.config["seed"])

    @property
    def refines(self) -> bool:
        """Whether it was an FNR run."""
        return bool(self.config["fnr"] == "on")


def find_run_dirs(paths: Sequence[Path]) -> list[Path]:
    """The run directories among and below some folders, each once."""
    if not paths:
        raise ConfigError("A report needs at least one run directory. Give a folder that `fnrfl run` has made.")
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        directory.recover(path)
        below = [path] if (path / "events.jsonl").is_file() else _below(path)
        if not below:
            raise ConfigError(
                f"{path} is not a run directory and has none below it: there is no events.jsonl. Give a folder that "
                "`fnrfl run` or `fnrfl compare` has made."
            )
        for run in below:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _below(path: Path) -> list[Path]:
    directory.recover_inside(path)
    logs = sorted(path.rglob("events.jsonl")) if path.is_dir() else []
    # A folder with a dot is one that a run is still preparing.
    return [log.parent for log in logs if not any(part.startswith(".") for part in log.relative_to(path).parts)]


@dataclass(frozen=True)
class Found:
    """What there is to report: runs, and sentences about those that are left out."""

    runs: Sequence[Run] = ()
    failed: Sequence[str] = ()  # runs that a comparison gave up
    damaged: Sequence[str] = ()  # runs that cannot be read
    astray: Sequence[str] = ()  # what a comparison's folder lacks, and what does not belong into it


def load_runs(paths: Sequence[Path]) -> Found:
    """All runs among and below some folders; one that cannot be read is named and left out, unless all are so."""
    found = find_run_dirs(paths)
    comparisons = {folder: _comparison(folder) for folder in dict.fromkeys([*(path.parent for path in found), *paths])}
    failed = {folder / cell: error for folder, (_, failures) in comparisons.items() for cell, error in failures.items()}
    members, astray = _of_their_grids(found, paths, failed.keys())
    runs: list[Run] = []
    damaged: list[ConfigError] = []
    for path in members:
        try:
            runs.append(read_run(path, *comparisons[path.parent][0].get(path.name, ())))
        except ConfigError as error:
            damaged.append(error)
    if not runs:
        raise damaged[0]
    inside: dict[Path, list[Origin]] = {}
    for run in runs:
        inside.setdefault(run.path.parent, []).append(run.origin)
    for folder, origins in inside.items():
        check_grid_folder(folder, origins)
    told = [f"{place.name}: {error}" for place, error in failed.items()]
    return Found(runs, told, [f"{error} It is left out." for error in damaged], astray)


def _comparison(folder: Path) -> tuple[dict[str, tuple[tuple[str, ...], str]], dict[str, str]]:
    """What `fnrfl compare` wrote beside its runs: for each the baseline's run directories and the metric; errors."""

    def read(tree: Any) -> tuple[dict[str, tuple[tuple[str, ...], str]], dict[str, str]]:
        cells: dict[str, list[str]] = {}
        for run in tree["runs"]:
            cells.setdefault(run["group"], []).append(run["cell"])
        base = {row["group"]: row["baseline"] for row in tree["rows"]}
        metric = str(tree.get("metric", "accuracy"))
        known = {cell: (tuple(cells.get(base[group], ())), metric) for group, mine in cells.items() for cell in mine}
        return known, {failure["cell"]: failure["error"] for failure in tree["failed"]}

    path = folder / "comparison.json"
    return read_file(path, REPEAT, read) if path.is_file() else ({}, {})


def read_run(path: Path, baseline: tuple[str, ...] = (), compared_by: str | None = None) -> Run:
    """One run directory, finished or not."""
    found = origin.read_origin(path)
    header, partition = found.header, found.partition
    log = islice(events.read_events(path / "events.jsonl"), 1, None)
    counts, ids = partition["counts"], partition.get("ids")
    return Run(
        path=path,
        origin=found,
        config=found.config,
        about=header,
        rounds=list(_compact(map(listed_and_numbers, checked_rounds(path, log, partition)))),
        counts=counts,
        client_names=[printable(name) for name in ids or [f"client {number}" for number in range(len(counts))]],
        classes=header["data"].get("classes") or [str(c) for c in range(len(counts[0]))],
        examples={k: v["examples"] for k, v in partition["splits"].items() if isinstance(v, dict)},
        finished=directory.is_finished(path),
        leaks=tuple(header["leaks"]),
        test_counts=header.get("test_counts", []),
        baseline=baseline,
        compared_by=compared_by,
    )


def _compact(rounds: Iterable[Event]) -> Iterator[Event]:
    """Drop what a page takes from the last round alone, and share what a round repeats: logs may have many lines."""
    before: Event = {}
    for event in rounds:
        event["seconds"] = {sys.intern(phase): spent for phase, spent in event["seconds"].items()}
        event |= {key: value for key, value in before.items() if event.get(key) == value}
        if before:
            lists = {key: [one for one in before.get(key) or () if one is not None] for key in LOWEST.values()}
            lowest = {key: [min(shares)] for key, shares in lists.items() if shares}
            yield {key: value for key, value in before.items() if key not in OF_LAST_ROUND} | lowest
        before = event
    if before:
        yield before


# -- folders of comparisons: one may be mixed up ----------------------------------------------------------------------


def _of_their_grids(found: Sequence[Path], asked: Sequence[Path], failed: Set[Path]) -> tuple[list[Path], list[str]]:
    """Drop runs that lie in a comparison's folder and not in its grid, unless they were `asked` for themselves.

    Returns the runs that stay, and sentences about the others, and about runs of a grid that are not there; the page
    has the errors of those that `failed`.
    """
    given = set(map(Path, asked))
    nested = [run for run in found if run not in given]
    around = dict.fromkeys(folder for run in nested for folder in run.parents if any(map(folder.is_relative_to, given)))
    grids = {folder: grid for folder in around if (grid := _grid(folder))}
    stray = [run for run in nested if _is_stray(run, grids)]
    told = [f"{run} is not a run of the comparison around it: its grid.json has none. It is left out." for run in stray]
    told += _lacking(grids, failed)
    members = set(found).difference(stray)
    if not members:
        raise ConfigError(f"There is no run to report on. {' '.join(told)}")
    return [run for run in found if run in members], told


def _is_stray(run: Path, grids: Mapping[Path, Mapping[str, Config]]) -> bool:
    """Tell whether a run lies in the folder of a grid, and in none of the grid's runs."""
    return any(folder in grids and run.relative_to(folder).parts[0] not in grids[folder] for folder in run.parents)


def _lacking(grids: Mapping[Path, Mapping[str, Config]], failed: Set[Path]) -> Iterator[str]:
    """Say which runs of each grid are neither there nor among those that failed."""
    for folder, grid in grids.items():
        if gone := [name for name in grid if not (folder / name).exists() and folder / name not in failed]:
            more = " and others" if len(gone) > MISSING_SHOWN else ""
            yield (
                f"{folder} lacks {counted(len(gone), 'run')} of its grid: {', '.join(gone[:MISSING_SHOWN])}{more}. The "
                "page is of those that are there. Repeat the comparison with the same --out to have all."
            )


def check_grid_folder(folder: Path, runs: Sequence[Origin]) -> None:
    """Refuse the folder of a comparison if its runs are not those of its grid, or do not belong together."""
    plans = _grid(folder)
    members = Members(folder, plans, NAME_RUNS_ONE_BY_ONE)
    for run in runs:
        if run.folder.name in plans:
            members.add(run.folder.name, run)


def _grid(folder: Path) -> Mapping[str, Config]:
    """The configs of a grid by the names of its runs; nothing is known of a grid of the first format but the names."""

    def read(tree: Any) -> dict[str, Config]:
        shared, own = dict(tree.get("config", {})), tree.get("own", {})
        return {name: with_present_names(shared | own.get(name, {})) for name in tree["cells"]}

    path = folder / "grid.json"
    return read_file(path, REPEAT, read) if path.is_file() else {}


# -- runs that look alike and are not: one name for different data, one seed with different splits ---------------------


def ambiguous(runs: Sequence[Origin]) -> dict[str, dict[str, Path]]:
    """Names of data sets that stand for different data: for each hash the first run that has it."""
    found: dict[str, dict[str, Path]] = {}
    for run in runs:
        found.setdefault(run.config["dataset.name"], {}).setdefault(run.data, run.folder)
    return {name: hashes for name, hashes in found.items() if len(hashes) > 1}


def kept_apart(runs: Sequence[Origin]) -> list[str]:
    """Say what is kept apart on a page, and why; each sentence names two run directories at least."""
    told = []
    for name, hashes in ambiguous(runs).items():
        places = ", ".join(f"sha256 {short_hash(sha256)} in {folder}" for sha256, folder in hashes.items())
        told.append(
            f"dataset = {json.dumps(name, ensure_ascii=False)} stands for different data in these runs: {places}. They "
            "are shown apart, and never averaged or compared with each other."
        )
    settings: dict[str, dict[str, Origin]] = {}  # the first run of each split
    for run in runs:
        keys = [run.data, *(run.config[key] for key in ("dataset.name", "scenario", "clients", "seed"))]
        settings.setdefault(json.dumps(keys), {}).setdefault(run.split, run)
    for one, other in (list(splits.values())[:2] for splits in settings.values() if len(splits) > 1):
        told.append(
            f"{one.folder} and {other.folder} have the same data, scenario, clients and seed, and different splits "
            f"(sha256 {short_hash(one.split)} and {short_hash(other.split)}): such runs are not paired."
        )
    return told
