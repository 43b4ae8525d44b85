"""Where a run is kept: a free name by default, and sentences about a folder that is taken."""

from __future__ import annotations

import itertools
import os
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

from fnrfl.config import RunConfig
from fnrfl.core.errors import ConfigError
from fnrfl.rundir import directory, files
from fnrfl.rundir.configs import differing_from_plan, flat, flat_config
from fnrfl.rundir.lock import InUse, holder_of


def run_dirs(config: RunConfig) -> Iterator[Path]:
    """The folders that a run may have by default, in order: its own name, then the same with -2, -3 and so on."""
    first = config.run_dir
    for path in map(first.with_name, files.numbered_names(first.name)):
        directory.recover(path)  # a kill may have left a run without its name, which is taken all the same
        yield path


def free_run_dir(config: RunConfig) -> Path:
    """The first of them that is not taken."""
    return next(path for path in run_dirs(config) if not os.path.lexists(path))


def choose_run_dir(config: RunConfig, out: Path | None, *, overwrite: bool) -> Path:
    """Where the command line keeps a run.

    Refused is a folder given with --out that is taken; and, without --out, a second start of a run that was begun
    under one of its names and is not finished, because whoever types the same command again wants to go on.
    """
    if overwrite:
        return out or config.run_dir
    if out is not None:
        directory.recover(out)
        if os.path.lexists(out):
            raise taken(out, config)
        return out
    for path in itertools.takewhile(os.path.lexists, run_dirs(config)):
        if is_begun(config, path):
            raise taken(path, config)
    return free_run_dir(config)


def taken(run_dir: Path, config: RunConfig) -> ConfigError:
    """Why a run is not begun in a folder, and the ways out; to resume is one only if that is the same run."""
    ways = "choose another directory with --out, or replace it with --overwrite."
    if not (run_dir / "config.toml").is_file():
        return ConfigError(f"{run_dir} exists already and is not a run. Choose another directory with --out.")
    if not is_of(config, run_dir):
        return ConfigError(f"{run_dir} exists already, with a run of another config: {ways}")
    if _is_unfinished(run_dir):
        if (process := holder_of(run_dir)) is not None:
            return InUse(run_dir, process)
        begun = f"{run_dir} exists already: this run was started there and is not finished."
        return ConfigError(f"{begun} Go on with `fnrfl resume {shlex.quote(str(run_dir))}`, {ways}")
    return ConfigError(f"{run_dir} exists already: this run is finished there. To run it again, {ways}")


def is_begun(config: RunConfig, run_dir: Path) -> bool:
    """Whether a run directory is of this config and can be resumed."""
    return _is_unfinished(run_dir) and is_of(config, run_dir)


def is_of(config: RunConfig, run_dir: Path) -> bool:
    """Whether a run directory is of this config."""
    try:
        written = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
        return not differing_from_plan(flat_config(config), flat(written))
    except (OSError, ValueError, LookupError, RecursionError):
        return False


def _is_unfinished(run_dir: Path) -> bool:
    return (run_dir / "config.toml").is_file() and not directory.is_finished(run_dir)
