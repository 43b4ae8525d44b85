"""Where a run is kept: a free name by default, and sentences about a folder that is taken."""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from fnrfl.config import RunConfig
from fnrfl.core.errors import ConfigError
from fnrfl.rundir import directory, files
from fnrfl.rundir.configs import differing_from_plan, flat, flat_config
from fnrfl.rundir.lock import InUse, holder_of


def run_dirs(config: RunConfig, out: str | Path | Literal[True] = True, *, overwrite: bool = False) -> Iterable[Path]:
    """List the folders that a run may have: by default its own name, then the same with -2, -3 and so on.

    A folder that was asked for and cannot be had is refused at once.
    """
    run_dir = config.run_dir if out is True else Path(out)
    if out is True and not overwrite:
        return map(run_dir.with_name, files.numbered_names(run_dir.name))
    directory.recover(run_dir)
    if os.path.lexists(run_dir):
        if not overwrite:
            raise taken(run_dir, config)
        directory.check_replaceable(run_dir)
    return [run_dir]


def choose_run_dir(config: RunConfig, out: Path | None, *, overwrite: bool) -> Path:
    """Choose where the command line keeps a run: the first of these folders that is free.

    A second start of a run that was begun under one of its names and is not finished is refused, because whoever types
    the same command again wants to go on.
    """
    for path in run_dirs(config, out or True, overwrite=overwrite):
        directory.recover(path)  # a kill may have left a run without its name, which is taken all the same
        if overwrite or not os.path.lexists(path):
            return path
        if is_begun(config, path):
            raise taken(path, config)
    raise AssertionError("there is always one more name")


def taken(run_dir: Path, config: RunConfig) -> ConfigError:
    """Say why a run is not begun in a folder, and the ways out; to resume is one only if that is the same run."""
    there, ways = f"{run_dir} exists already", "choose another directory with --out, or replace it with --overwrite."
    if not (run_dir / "config.toml").is_file():
        return ConfigError(f"{there} and is not a run. Choose another directory with --out.")
    if not is_of(config, run_dir):
        return ConfigError(f"{there}, with a run of another config: {ways}")
    if directory.is_finished(run_dir):
        return ConfigError(f"{there}: this run is finished there. To run it again, {ways}")
    if (process := holder_of(run_dir)) is not None:
        return InUse(run_dir, process)
    go_on = f"Go on with `fnrfl resume {shlex.quote(str(run_dir))}`"
    return ConfigError(f"{there}: this run was started there and is not finished. {go_on}, {ways}")


def is_begun(config: RunConfig, run_dir: Path) -> bool:
    """Whether a run directory is of this config and can be resumed."""
    return is_of(config, run_dir) and not directory.is_finished(run_dir)


def is_of(config: RunConfig, run_dir: Path) -> bool:
    """Whether a run directory is of this config."""
    try:
        written = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
        return not differing_from_plan(flat_config(config), flat(written))
    except (OSError, ValueError, LookupError, RecursionError):
        return False
