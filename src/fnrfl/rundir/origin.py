"""What a run directory was made from: its config, its data and its split, as far as its files vouch for each other."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from fnrfl.core.errors import ConfigError
from fnrfl.rundir import events, files, record
from fnrfl.rundir.configs import Config, data_keys, differing, flat, value_in_words
from fnrfl.rundir.record import Index

FIXED_PARTS = ("train", "validation", "test")  # of the data: the same for every method
PUBLIC_PARTS = ("public", "ranking", "distill")  # of which a method decides how large each is
DRAWN_BY = ("scenario", "clients", "seed")  # keys that decide which example goes to whom, beside sections
SHORT = 12  # characters of a hash that are shown


@dataclass(frozen=True)
class Origin:
    """What the files of a run directory say, once they have been found to agree."""

    folder: Path
    toml: str  # config.toml as it is written
    config: Config
    header: dict[str, Any]  # the first line of events.jsonl
    partition: dict[str, Any]  # partition.json
    saved: Index | None = None  # the last checkpoint

    def log(self) -> Iterator[bytes]:
        """Read the lines of the event log up to the last checkpoint, the first line included."""
        return islice(events.read_log(self.folder / "events.jsonl"), (self.saved.round if self.saved else 0) + 1)

    @property
    def data(self) -> str:
        """The sha256 of the data."""
        return str(self.header["data"]["sha256"])

    @property
    def code(self) -> dict[str, str]:
        """The sha256 of the user's own modules, by name; a run of an older version says nothing of them."""
        return dict(self.header.get("code_sha256", {}))

    @cached_property
    def split(self) -> str:
        """The same for two runs exactly when every client, the validation and the test data are the same."""
        return _hash([self.partition["sha256"], *(self.partition["splits"][name] for name in FIXED_PARTS)])

    @cached_property
    def public(self) -> tuple[tuple[int, ...], str]:
        """The sizes of the public parts, and a hash of what is in them."""
        parts = [self.partition["splits"][name] for name in PUBLIC_PARTS]
        return tuple(int(part["examples"]) for part in parts), _hash(parts)


def read_origin(folder: Path) -> Origin:
    """Return what a run directory was made from; refused where its files contradict each other or break the schema."""
    text = files.read(folder / "config.toml", "a run directory has a config.toml")
    manifest = files.read(folder / "partition.json", "a run directory has a partition.json")
    header = next(events.read_events(folder / "events.jsonl"), {})
    try:
        config, partition = flat(tomllib.loads(text)), json.loads(manifest)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise files.damaged(folder, f"config.toml or partition.json: {_why(error)}") from error
    try:
        record.check_run(folder, header, partition)
        found = Origin(folder, text, config, header, partition, record.read_index(folder))
        _check_config(found)
        _check_split(found)
        found.split, found.public  # noqa: B018  # whatever is missing is noticed here
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise files.damaged(folder, _why(error)) from error
    _check_log(found)
    return found


def _check_config(found: Origin) -> None:
    begun = found.header["config"]
    method = {"name": begun["algorithm"]["name"], **begun["algorithm"]["options"]}
    begun_with = flat({**begun, "algorithm": method, "fnr": begun["fnr"] or "off"})  # in the form of config.toml
    for key in differing(found.config, begun_with)[:1]:
        there, before = value_in_words(found.config.get(key)), value_in_words(begun_with.get(key))
        raise files.damaged(
            found.folder / "config.toml",
            f"it is not the config that the run was begun with: {key} is {there} there and {before} in the first line "
            "of events.jsonl",
        )


def _check_split(found: Origin) -> None:
    """Compare partition.json with its own hashes, and with the first line of the log."""
    content = {key: value for key, value in found.partition.items() if key not in ("sha256", "set_aside", "splits")}
    parts = {key: value for key, value in found.partition["splits"].items() if key != "sha256"}
    drawn, begun_with = _hash(content, separators=(",", ":")), found.header["partition"]
    if {drawn, found.partition["sha256"]} != {begun_with} or _hash(parts) != found.partition["splits"]["sha256"]:
        raise files.damaged(
            found.folder / "partition.json",
            f"it is not the split that the run was begun with: its sha256 is {short_hash(drawn)}, and "
            f"{short_hash(begun_with)} in the first line of events.jsonl",
        )


def _check_log(found: Origin) -> None:
    """Compare the log, as far as the last checkpoint goes, with the hash in it; version 0.1.0 says none."""
    path, saved, lines = found.folder / "events.jsonl", found.saved, 0
    sha256 = hashlib.sha256()
    for lines, line in enumerate(found.log(), 1):  # noqa: B007
        sha256.update(line)
    if saved is not None and lines <= saved.round:
        raise files.damaged(path, f"it has {lines} lines, and the checkpoint beside it comes after round {saved.round}")
    if saved is not None and saved.log not in (None, sha256.hexdigest()):
        raise files.damaged(path, "it is not what the run wrote: its sha256 is not the one in checkpoint.json")


def _hash(value: object, separators: tuple[str, str] | None = None) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=separators).encode()).hexdigest()


def _why(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__


# -- runs that are compared --------------------------------------------------------------------------------------------


class Pairs:
    """Runs that are compared: what their configs call the same data, code or split must be the same."""

    def __init__(self, way_out: str) -> None:
        self._first: dict[str, tuple[Path, str]] = {}  # what configs share -> the first run that has it, its sha256
        self._way_out = way_out

    def add(self, run: Origin) -> None:
        """Check a run against those that were added before, and those that come against it."""
        self._first = self.check(run) | self._first

    def check(self, run: Origin) -> dict[str, tuple[Path, str]]:
        """Refuse a run that cannot be compared with one that was added; return what it can share with others."""
        found = {}
        for what, which, shared, sha256 in _comparable(run):
            name = json.dumps([what, shared], sort_keys=True, default=str)
            first, theirs = self._first.get(name, (run.folder, sha256))
            if first != run.folder and theirs != sha256:
                raise ConfigError(
                    f"{first} and {run.folder} {what}, so they cannot be compared: {which} has the sha256 "
                    f"{short_hash(theirs)} in the first and {short_hash(sha256)} in the second. {self._way_out}"
                )
            found[name] = run.folder, sha256
        return found


def _comparable(run: Origin) -> Iterator[tuple[str, str, object, str]]:
    """Yield (what may differ, which of it, what the configs of two runs have to share, its sha256)."""
    dataset, source = (value_in_words(run.config.get(key)) for key in ("dataset.name", "public.source"))
    drawn = {k: v for k, v in run.config.items() if k in DRAWN_BY or k.startswith(("public.", "validation."))}
    split, (sizes, public) = data_keys(run.config) | drawn, run.public
    which = "with one seed, scenario and number of clients, what clients, validation and test hold"
    yield "are of different data", f"dataset = {dataset}", data_keys(run.config), run.data
    for module, sha256 in run.code.items():
        yield "are of different code", f"the module {module}", module, sha256
    yield "have different splits of the same data", which, split, run.split
    # methods may divide public data in different ways
    yield "have different public data", f"public.source = {source}", [split, sizes], public


def short_hash(sha256: str) -> str:
    """A hash for a sentence."""
    return sha256[:SHORT]
