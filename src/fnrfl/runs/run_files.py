"""The files of a run: written when it begins, and held against each other and against its data when it goes on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import fnrfl
from fnrfl.config import RunConfig, loads
from fnrfl.core.errors import ConfigError
from fnrfl.core.ndarrays import sizes_of
from fnrfl.core.own_code import source_hashes
from fnrfl.rundir import checkpoint, directory, events, files, places
from fnrfl.rundir.configs import flat_config
from fnrfl.rundir.directory import RunDir
from fnrfl.rundir.events import Event
from fnrfl.runs.build import Built

log = logging.getLogger("fnrfl")

# -- when a run begins -------------------------------------------------------------------------------------------------


def possible_run_dirs(config: RunConfig, out: str | Path | Literal[True], overwrite: bool) -> Iterable[Path]:
    """The names that a run may get, in order. A name that was asked for and cannot be had is refused at once."""
    if out is True and not overwrite:
        return places.run_dirs(config)
    run_dir = config.run_dir if out is True else Path(out)
    directory.recover(run_dir)
    if os.path.lexists(run_dir):
        if not overwrite:
            raise places.taken(run_dir, config)
        directory.check_replaceable(run_dir)
    return [run_dir]


def create_run_dir(stack: ExitStack, names: Iterable[Path], built: Built, *, overwrite: bool) -> tuple[RunDir, Event]:
    """(run directory, the first line of its log) of a run that begins, under the first of the names that can be had."""
    header = log_header(built)
    contents: dict[str, str | bytes] = {
        "config.toml": built.passed.heading(built.config) + built.config.to_toml(),
        "partition.json": json.dumps(built.manifest()) + "\n",
        "events.jsonl": events.line(header),
    }
    return directory.create_first(stack, names, contents, overwrite=overwrite), header


def log_header(built: Built) -> Event:
    """The first line of a run's log: what it is, on what data, by which versions."""
    return {
        "config": built.config.as_dict(),
        "config_sha256": built.config.sha256,
        "leaks": list(built.config.leaks_on),
        "personalised": built.algorithm.personalised,
        "notices": list(built.notices),
        "versions": versions(),
        "git": _revision(),
        "device": _device(built.net.device),
        "data": built.facts.as_json(),
        "test_counts": torch.bincount(built.splits.test.y, minlength=built.dataset.num_classes).tolist(),
        **({"site_test_counts": sizes_of(tests).tolist()} if (tests := built.splits.site_tests) else {}),
        "partition": built.partition.sha256,
        "parameters": built.net.size,
        **({"given": given} if (given := built.passed.as_json(built.config)) else {}),
        **({"code_sha256": code} if (code := source_hashes(flat_config(built.config))) else {}),
        **({} if built.scaling is None else {"scale": built.scaling.as_json()}),
        **({} if built.connection is None else {"run_at_nodes": built.connection.run}),
        **({"own_metrics": {one.name: one.as_json() for one in built.metrics}} if built.metrics else {}),
    }


def _device(device: torch.device) -> str:
    cores = f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{torch.cuda.get_device_name(device)}; {cores}" if device.type == "cuda" else cores


def _revision() -> str | None:
    """The git revision of the code, where it runs from a checkout."""
    try:
        # No timeout: it would poll by sleeping, which never ends where the clock is set to before 1970 by a library.
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def versions() -> dict[str, str]:
    """The versions that a result may depend on."""
    return {
        "fnrfl": fnrfl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


# -- when a run goes on ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verified:
    """What the files of a run directory say, once they have been found to belong together."""

    run_dir: Path
    config: RunConfig
    saved: checkpoint.Index | None  # the last checkpoint
    log: list[bytes]  # the lines of the event log up to it

    @property
    def events_so_far(self) -> list[Event]:
        """The first line of the log, about the run, and one event for each round."""
        return list(events.parse_events(self.run_dir / "events.jsonl", self.log))


def verify(run_dir: Path, *, trust: bool) -> Verified:
    """What a run directory holds; refused if its files do not belong together."""
    text = files.read(run_dir / "config.toml", "it must be the config that the run was begun with")
    config = loads(text, origin=str(run_dir / "config.toml"), trust=trust, of_run=True)
    saved = checkpoint.index(run_dir)
    path = run_dir / "events.jsonl"
    done = 0 if saved is None else saved.round
    log = list(islice(events.read_log(path), done + 1))
    if len(log) <= done:
        raise files.damaged(path, f"it has {len(log)} lines, and the checkpoint beside it comes after round {done}")
    header = next(events.parse_events(path, log))
    if not (_has_text(header, "data", "sha256") and _has_text(header, "partition")):
        raise files.damaged(path, "its first line does not say which data and which split the run has")
    events.check_log(path, log, None if saved is None else saved.log)
    _refuse_other_config(run_dir, config, text, header, saved)
    return Verified(run_dir, config, saved, log)


def _refuse_other_config(
    run_dir: Path, config: RunConfig, text: str, header: Event, saved: checkpoint.Index | None
) -> None:
    """Refuse a log or a checkpoint that was written under another config than the text of config.toml."""
    # Version 0.1.0 hashed the text; a hash of the values goes on being right when a later version adds a key.
    hashes = {config.sha256, hashlib.sha256(text.encode()).hexdigest()}
    for name, found in (("events.jsonl", header.get("config_sha256")), ("checkpoint.json", saved and saved.config)):
        if found is not None and found not in hashes:
            raise ConfigError(
                f"{run_dir / name} belongs to another config than the config.toml beside it. Put that file back as it "
                "was, or run again into another directory."
            )


def _has_text(tree: object, *keys: str) -> bool:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return isinstance(tree, str)


def refuse_changed_inputs(run_dir: Path, began: Event, built: Built) -> None:
    """Refuse to go on with other data or another split than the run began with."""
    other = _other_versions(began)
    by = f" It was begun with {_listed(began['versions'], other)}; that may be why." if other else ""
    if began["data"]["sha256"] != built.dataset.checksum:
        raise ConfigError(
            f'dataset = "{built.config.dataset.name}" is not the data that {run_dir} was begun with.{by} Put it '
            "back as it was, or run again into another directory."
        )
    if began["partition"] != built.partition.sha256:
        raise ConfigError(
            f"The split among the clients is not the one that {run_dir} was begun with.{by} Run again into another "
            "directory."
        )


def warn_of_other_versions(run_dir: Path, began: Event) -> None:
    """Say so if a run goes on with other versions than it began with."""
    if other := _other_versions(began):
        log.warning(
            f"{run_dir} was begun with {_listed(began['versions'], other)} and goes on with "
            f"{_listed(versions(), other)}: its numbers may differ by rounding from those of a run that was not "
            "interrupted."
        )


def _other_versions(began: Event) -> list[str]:
    """The packages that had another version when the run began, as far as its log says."""
    then = began.get("versions")
    then = then if isinstance(then, dict) else {}
    return [name for name, now in versions().items() if name in then and then[name] != now]


def _listed(version: dict[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {version[name]}" for name in names)
