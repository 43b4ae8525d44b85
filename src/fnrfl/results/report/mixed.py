"""Runs that look alike and are not: one name for different data, one seed with different splits, a folder mixed up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.rundir import files, origin
from fnrfl.rundir.configs import Config, differing_from_plan, with_present_names, wrong_run
from fnrfl.rundir.origin import Origin, short_hash

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


def check_grid_folder(folder: Path, runs: Sequence[Origin]) -> None:
    """Refuse the folder of a comparison if its runs are not those of its grid, or do not belong together."""
    configs = _grid(folder / "grid.json")
    cells = [run for run in runs if run.folder.name in configs]
    for run in cells:
        planned = configs[run.folder.name]
        if planned and differing_from_plan(planned, run.config):
            raise ConfigError(wrong_run(run.folder, planned, run.config, configs, NAME_RUNS_ONE_BY_ONE))
    for place, run in enumerate(cells):
        for other in cells[:place]:
            origin.check_pair(other, run, NAME_RUNS_ONE_BY_ONE)


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
