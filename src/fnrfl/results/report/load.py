"""Run directories as plain values."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import printable
from fnrfl.results.report import consistency
from fnrfl.rundir import directory, events, files, origin
from fnrfl.rundir.configs import Config
from fnrfl.rundir.events import Event
from fnrfl.rundir.origin import Origin
from fnrfl.rundir.record import checked_rounds, listed_and_numbers
from fnrfl.runs.metrics import LOWEST, RunMetrics

OF_LAST_ROUND = ("per_class", "confusion", *LOWEST.values())


@dataclass(frozen=True)
class Run(RunMetrics):
    """One run directory."""

    origin: Origin
    rounds: list[Event]
    counts: list[list[int]]  # [clients][classes], from partition.json
    examples: dict[str, int]  # of each part of the data: test, validation, public, ...
    finished: bool
    test_counts: list[int]  # examples of each class in the test set; empty for runs of versions that did not say
    baseline: tuple[str, ...]  # run directories that its comparison takes for the baseline, by name
    compared_by: str | None  # the metric of its comparison

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.origin.folder

    @property
    def config(self) -> Config:
        """By dotted key."""
        return self.origin.config

    @property
    def about(self) -> Event:
        """The first line of the log."""
        return self.origin.header

    @property
    def seed(self) -> int:
        """The seed of all its randomness."""
        return int(self.config["seed"])

    @property
    def client_names(self) -> list[str]:
        """What a page calls each client: its id in the data, or "client" and its number."""
        ids = self.origin.partition.get("ids")
        return [printable(name) for name in ids] if ids else [f"client {number}" for number in range(len(self.counts))]

    @property
    def refines(self) -> bool:
        """Whether it was an FNR run."""
        return bool(self.config["fnr"] == "on")

    @property
    def classes(self) -> list[str]:
        """The names of the classes; their numbers, if the log has no names."""
        return self.about["data"].get("classes") or [str(c) for c in range(len(self.counts[0]))]

    @property
    def leaks(self) -> tuple[str, ...]:
        """The leaks that were on, by name."""
        return tuple(self.about["leaks"])


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
        found |= {run.resolve(): run for run in below if run.resolve() not in found}
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
    members, astray = consistency.of_their_grids(found, paths, failed.keys())
    runs: list[Run] = []
    damaged: list[ConfigError] = []
    for path in members:
        try:
            runs.append(read_run(path, *comparisons[path.parent][0].get(path.name, ())))
        except ConfigError as error:
            damaged.append(error)
    if not runs:
        raise damaged[0]
    inside: dict[Path, list[Origin]] = {folder: [] for folder in comparisons}
    for run in runs:
        inside[run.path.parent].append(run.origin)
    for folder, origins in inside.items():
        consistency.check_grid_folder(folder, origins)
    told = [f"{place.name}: {error}" for place, error in failed.items()]
    return Found(runs, told, [f"{error} It is left out." for error in damaged], astray)


def _comparison(folder: Path) -> tuple[dict[str, tuple[tuple[str, ...], str]], dict[str, str]]:
    """What `fnrfl compare` wrote beside its runs: for each the baseline's run directories and the metric; errors."""
    path = folder / "comparison.json"
    if not path.is_file():
        return {}, {}
    try:
        tree = json.loads(files.read(path, "a comparison has a comparison.json"))
        cells: dict[str, list[str]] = {}
        for run in tree["runs"]:
            cells.setdefault(run["group"], []).append(run["cell"])
        base = {row["group"]: row["baseline"] for row in tree["rows"]}
        metric = str(tree.get("metric", "accuracy"))
        known = {cell: (tuple(cells.get(base[group], ())), metric) for group, mine in cells.items() for cell in mine}
        return known, {failure["cell"]: failure["error"] for failure in tree["failed"]}
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}). Repeat the comparison, or remove the file.") from error


def read_run(path: Path, baseline: tuple[str, ...] = (), compared_by: str | None = None) -> Run:
    """One run directory, finished or not."""
    about = origin.read_origin(path)
    log = islice(events.read_events(path / "events.jsonl"), 1, None)
    rounds = list(_compact(map(listed_and_numbers, checked_rounds(path, log, about.partition))))
    return Run(
        origin=about,
        rounds=rounds,
        counts=about.partition["counts"],
        examples={k: v["examples"] for k, v in about.partition["splits"].items() if isinstance(v, dict)},
        finished=directory.is_finished(path),
        test_counts=about.header.get("test_counts", []),
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
