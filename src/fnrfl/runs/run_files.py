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
from pathlib import Path

import numpy as np
import torch

import fnrfl
from fnrfl.config import RunConfig, loads
from fnrfl.core.errors import ConfigError
from fnrfl.core.ndarrays import sizes_of
from fnrfl.rundir import directory, events
from fnrfl.rundir.configs import flat_config
from fnrfl.rundir.directory import RunDir
from fnrfl.rundir.events import Event
from fnrfl.rundir.origin import read_origin
from fnrfl.rundir.record import Index, checked_rounds
from fnrfl.runs.setup.build import Built
from fnrfl.usercode import source_hashes

log = logging.getLogger("fnrfl")

# -- when a run begins -------------------------------------------------------------------------------------------------


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
    """Return the first line of a run's log, with the keys of `RunHeader`."""
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

    config: RunConfig
    saved: Index | None  # the last checkpoint
    log: list[bytes]  # the lines of the event log up to it
    events_so_far: list[Event]  # the same: the first line, about the run, and one event for each round


def verify(run_dir: Path, *, trust: bool) -> Verified:
    """Return what a run directory holds; refused if its files do not belong together."""
    found = read_origin(run_dir)
    config = loads(found.toml, origin=str(run_dir / "config.toml"), trust=trust, of_run=True)
    # Version 0.1.0 hashed the text; a hash of the values goes on being right when a later version adds a key.
    hashes = {config.sha256, hashlib.sha256(found.toml.encode()).hexdigest(), None}
    written = {"events.jsonl": found.header["config_sha256"], "checkpoint.json": found.saved and found.saved.config}
    for name, sha256 in written.items():
        if sha256 not in hashes:
            raise ConfigError(
                f"{run_dir / name} belongs to another config than the config.toml beside it. Put that file back as it "
                "was, or run again into another directory."
            )
    log = list(found.log())
    header, *rounds = events.read_events(run_dir / "events.jsonl", log)
    return Verified(config, found.saved, log, [header, *checked_rounds(run_dir, rounds, found.partition)])


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
