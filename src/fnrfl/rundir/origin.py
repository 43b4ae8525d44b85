"""What a run directory was made from: its config, its data and its split, as far as its files vouch for each other."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
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

    def log(self) -> list[bytes]:
        """Return the lines of the event log up to the last checkpoint, the first line included."""
        done = 0 if self.saved is None else self.saved.round
        return list(islice(events.read_log(self.folder / "events.jsonl"), done + 1))

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
        return _hash([self.partition["sha256"], *(self._part(name) for name in FIXED_PARTS)])

    @cached_property
    def public(self) -> tuple[tuple[int, ...], str]:
        """The sizes of the public parts, and a hash of what is in them."""
        parts = [self._part(name) for name in PUBLIC_PARTS]
        return tuple(int(part["examples"]) for part in parts), _hash(parts)

    def _part(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.partition["splits"][name]
        return found


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
        _check_config(found, flat(_as_toml(header["config"])))
        _check_split(found, str(header["partition"]))
        found.split, found.public  # noqa: B018  # whatever is missing is noticed here
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise files.damaged(folder, _why(error)) from error
    _check_log(found)
    return found


class Pairs:
    """Check runs for `check_pair`, each against the first with its data, code, split and sizes, not against all."""

    def __init__(self, way_out: str) -> None:
        self._first: dict[str, Origin] = {}
        self._way_out = way_out

    def add(self, run: Origin) -> None:
        """Check a run against those that were added before, and those that come against it."""
        for shared in self.check(run):
            self._first.setdefault(shared, run)

    def check(self, run: Origin) -> list[str]:
        """Refuse a run that cannot be compared with one that was added; return what it can share with others."""
        split = split_keys(run.config)
        shared = (data_keys(run.config), *run.code, split, (split, run.public[0]))
        names = [json.dumps(one, sort_keys=True, default=str) for one in shared]
        for first in {self._first[name].folder: self._first[name] for name in names if name in self._first}.values():
            if first.folder != run.folder:
                check_pair(first, run, self._way_out)
        return names


def check_pair(one: Origin, other: Origin, way_out: str) -> None:
    """Refuse two runs that are to be compared if what their configs call the same data, code or split is not."""
    same_split = split_keys(one.config) == split_keys(other.config)
    dataset, source = (value_in_words(one.config.get(key)) for key in ("dataset.name", "public.source"))
    rules = [  # (what differs, which of it, its value in each): equal values are the same
        ("are of different code", f"the module {module}", one.code[module], other.code[module])
        for module in one.code.keys() & other.code.keys()
    ]
    if data_keys(one.config) == data_keys(other.config):
        rules.insert(0, ("are of different data", f"dataset = {dataset}", one.data, other.data))
    if same_split:
        which = "with one seed, scenario and number of clients, what clients, validation and test hold"
        rules.append(("have different splits of the same data", which, one.split, other.split))
    if same_split and one.public[0] == other.public[0]:  # methods may divide public data in different ways
        rules.append(("have different public data", f"public.source = {source}", one.public[1], other.public[1]))
    for what, which, mine, theirs in rules:
        if mine != theirs:
            raise ConfigError(
                f"{one.folder} and {other.folder} {what}, so they cannot be compared: {which} has the sha256 "
                f"{short_hash(mine)} in the first and {short_hash(theirs)} in the second. {way_out}"
            )


def split_keys(config: Config) -> Config:
    """The keys that decide which example goes to whom, and their values."""
    alone, sections = ("scenario", "clients", "seed"), ("public.", "validation.")
    drawn = {key: value for key, value in config.items() if key in alone or key.startswith(sections)}
    return data_keys(config) | drawn


def short_hash(sha256: str) -> str:
    """A hash for a sentence."""
    return sha256[:SHORT]


def _check_config(found: Origin, begun_with: Config) -> None:
    keys = differing(found.config, begun_with)
    if keys:
        raise ConfigError(
            f"{found.folder / 'config.toml'} is not the config that the run was begun with: {keys[0]} is "
            f"{value_in_words(found.config.get(keys[0]))} there and {value_in_words(begun_with.get(keys[0]))} in "
            "the first line of events.jsonl. Put the file back as it was, or run again into another directory."
        )


def _check_split(found: Origin, begun_with: str) -> None:
    """Compare partition.json with its own hashes, and with the first line of the log."""
    content = {key: value for key, value in found.partition.items() if key not in ("sha256", "set_aside", "splits")}
    parts = {key: value for key, value in found.partition["splits"].items() if key != "sha256"}
    drawn = _hash(content, separators=(",", ":"))
    if {drawn, str(found.partition["sha256"])} != {begun_with} or _hash(parts) != found.partition["splits"]["sha256"]:
        raise ConfigError(
            f"{found.folder / 'partition.json'} is not the split that the run was begun with: it was changed "
            f"afterwards (sha256 {short_hash(drawn)}, and {short_hash(begun_with)} in the first line of events.jsonl). "
            "Put the file back as it was, or run again into another directory."
        )


def _check_log(found: Origin) -> None:
    """Compare the log, as far as the last checkpoint goes, with the hash in it; version 0.1.0 says none."""
    path, saved, log = found.folder / "events.jsonl", found.saved, hashlib.sha256()
    lines = 0
    for lines, line in enumerate(islice(events.read_log(path), 1 if saved is None else saved.round + 1), 1):  # noqa: B007
        log.update(line)
    if saved is None:
        return
    if lines <= saved.round:
        raise files.damaged(path, f"it has {lines} lines, and the checkpoint beside it comes after round {saved.round}")
    if saved.log not in (None, log.hexdigest()):
        raise files.damaged(path, "it is not what the run wrote: its sha256 is not the one in checkpoint.json")


def _as_toml(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a log's first line in the form of config.toml."""
    method = {"name": config["algorithm"]["name"], **config["algorithm"]["options"]}
    return {**config, "algorithm": method, "fnr": "off" if config["fnr"] is None else config["fnr"]}


def _hash(value: object, separators: tuple[str, str] | None = None) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=separators).encode()).hexdigest()


def _why(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
