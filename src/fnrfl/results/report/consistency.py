"""Runs that look alike and are not: one name for different data, one seed with different splits, a folder mixed up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
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


def of_their_grids(found: Sequence[Path], asked: Sequence[Path], failed: Set[Path]) -> tuple[list[Path], list[str]]:
    """Drop runs that lie in a comparison's folder and not in its grid, unless they were `asked` for themselves.

    Returns the runs that stay, and sentences about the others, and about runs of a grid that are not there; the page
    has the errors of those that `failed`.
    """
    given = set(map(Path, asked))
    nested = [run for run in found if run not in given]
    around = dict.fromkeys(folder for run in nested for folder in run.parents if any(map(folder.is_relative_to, given)))
    grids = {folder: grid for folder in around if (grid := _grid(folder / "grid.json"))}
    stray = dict.fromkeys(run for run in nested if _is_stray(run, grids))
    told = [f"{run} is not a run of the comparison around it: its grid.json has none. It is left out." for run in stray]
    told += _lacking(grids, failed)
    members = [run for run in found if run not in stray]
    if not members:
        raise ConfigError(f"There is no run to report on. {' '.join(told)}")
    return members, told


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
