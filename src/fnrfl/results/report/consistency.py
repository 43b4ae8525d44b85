"""Runs that look alike and are not: one name for different data, one seed with different splits, a folder mixed up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted
from fnrfl.rundir import files, origin
from fnrfl.rundir.configs import Config, differing_from_plan, with_present_names, wrong_run
from fnrfl.rundir.origin import Origin, short_hash

MISSING_SHOWN = 6  # missing runs, by name
NAME_RUNS_ONE_BY_ONE = "Put it back as it was, or name the runs that belong together one by one."


def ambiguous(runs: Sequence[Origin]) -> dict[str, dict[str, Path]]:
    """Names of data sets that stand for different data: for each hash the first run that has it."""
    found: dict[str, dict[str, Path]] = {}
    for run in runs:
        found.setdefault(run.config["dataset.name"], {}).setdefault(run.data, run.folder)
    return {name: hashes for name, hashes in found.items() if len(hashes) > 1}


def sentences(runs: Sequence[Origin]) -> list[str]:
    """What is kept apart on a page, and why; each sentence names two run directories at least."""
    return [*_about_data(runs), *_about_splits(runs)]


def _about_data(runs: Sequence[Origin]) -> list[str]:
    return [
        f"dataset = {json.dumps(name, ensure_ascii=False)} stands for different data in these runs: "
        + ", ".join(f"sha256 {short_hash(sha256)} in {folder}" for sha256, folder in hashes.items())
        + ". They are shown apart, and never averaged or compared with each other."
        for name, hashes in ambiguous(runs).items()
    ]


def _about_splits(runs: Sequence[Origin]) -> list[str]:
    """One sentence for each setting in which runs of the same seed have different splits."""
    settings: dict[str, dict[str, list[Origin]]] = {}
    for run in runs:
        keys = [run.data, *(run.config[key] for key in ("dataset.name", "scenario", "clients", "seed"))]
        settings.setdefault(json.dumps(keys), {}).setdefault(run.split, []).append(run)
    told = []
    for splits in settings.values():
        if len(splits) > 1:
            (one, *_), (other, *_) = list(splits.values())[:2]
            told.append(
                f"{one.folder} and {other.folder} have the same data, scenario, clients and seed, and different splits "
                f"(sha256 {short_hash(one.split)} and {short_hash(other.split)}): runs with different splits are "
                "not paired."
            )
    return told


@dataclass(frozen=True)
class Membership:
    """Which of the runs in folders of comparisons are those of the grids, and what is wrong with the others."""

    members: list[Path]
    told: list[str]


def of_their_grids(found: Sequence[Path], asked: Sequence[Path], failed: Set[Path]) -> Membership:
    """Leave runs out that lie in a comparison's folder and not in its grid, unless they were `asked` for themselves.

    Runs of a grid that are not there are named too, but for those that `failed`: the page has their errors.
    """
    folders = {folder: grid for folder in _folders(found, asked) if (grid := _grid(folder / "grid.json"))}
    given = set(map(Path, asked))
    strange = {run: None for run in found if not any(_belongs(run, path, folders) for path in _upwards(run, given))}
    told = [
        f"{run} is not a run of the comparison around it: its grid.json has none. It is left out." for run in strange
    ]
    told += [sentence for folder, grid in folders.items() for sentence in _about_missing(folder, grid, failed)]
    members = [run for run in found if run not in strange]
    if not members:
        raise ConfigError(f"There is no run to report on. {' '.join(told)}")
    return Membership(members, told)


def _about_missing(folder: Path, grid: Mapping[str, Config], failed: Set[Path]) -> list[str]:
    """A sentence about runs of a grid that are not there; none if all are."""
    gone = [name for name in grid if not (folder / name).exists() and folder / name not in failed]
    more = " and others" if len(gone) > MISSING_SHOWN else ""
    told = (
        f"{folder} lacks {counted(len(gone), 'run')} of its grid: {', '.join(gone[:MISSING_SHOWN])}{more}. The page is "
        "of those that are there. Repeat the comparison with the same --out to have all."
    )
    return [told] if gone else []


def _folders(found: Sequence[Path], asked: Sequence[Path]) -> list[Path]:
    """The folders at and below those that were asked for, as far as there are runs in them."""
    given, above = set(map(Path, asked)), dict.fromkeys(folder for run in found for folder in run.parents)
    return list(dict.fromkeys([*asked, *(folder for folder in above if _upwards(folder, given))]))


def _upwards(path: Path, folders: Set[Path]) -> list[Path]:
    """Those of some folders that a path is or lies in."""
    return [folder for folder in (path, *path.parents) if folder in folders]


def _belongs(run: Path, asked: Path, folders: Mapping[Path, Mapping[str, Config]]) -> bool:
    """Whether no grid between a run and the folder around it that was asked for is without the run."""
    around = [folder for folder in run.parents if folder.is_relative_to(asked) and folder in folders]
    return all(run.relative_to(folder).parts[0] in folders[folder] for folder in around)


def check_grid_folder(folder: Path, runs: Sequence[Origin]) -> None:
    """Refuse the folder of a comparison if its runs are not those of its grid, or do not belong together."""
    configs = _grid(folder / "grid.json")
    cells = [run for run in runs if run.folder.name in configs]
    for run in cells:
        planned = configs[run.folder.name]
        if planned and differing_from_plan(planned, run.config):
            raise ConfigError(wrong_run(run.folder, planned, run.config, configs, NAME_RUNS_ONE_BY_ONE))
    pairs = origin.Pairs(NAME_RUNS_ONE_BY_ONE)
    for run in cells:
        pairs.add(run)


def _grid(path: Path) -> dict[str, Config]:
    """The configs of a grid by the names of its runs; nothing is known of a grid of the first format but the names."""
    if not path.is_file():
        return {}
    try:
        tree = json.loads(files.read(path, "a comparison has a grid.json"))
        shared, own = dict(tree.get("config", {})), tree.get("own", {})
        return {name: with_present_names(shared | own.get(name, {})) for name in tree["cells"]}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}). Repeat the comparison, or remove the file.") from error
