"""The schema of a run's files: what a run writes into its log, its split and its checkpoint, and what readers rely on.

Readers refuse a file that breaks it, by name and value. A round may have more numbers than are listed here: each is a
metric, or something that a method notes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, Strict, TypeAdapter, ValidationError, model_validator
from typing_extensions import TypedDict  # pydantic asks for this one on Python 3.11

from fnrfl.core.errors import ConfigError
from fnrfl.rundir import files
from fnrfl.rundir.directory import CHECKPOINT_FOLDER
from fnrfl.rundir.events import Event, in_their_round

Share = float | None  # None: the data says nothing about this class or client
CHECKPOINT_FORMAT = 3  # 2 (version 0.1.0): no hashes; 1: convolutions were not channels-last


class DataFacts(TypedDict):
    """What the first line says about the data; `Facts` has more."""

    source: str
    sha256: str
    classes: NotRequired[list[str]]


class MetricFacts(TypedDict):
    """What the first line says about a metric of the user's own."""

    function: str
    higher_is_better: bool


class RunHeader(TypedDict):
    """The first line of events.jsonl: what the run is, on what data, by which versions."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    config: dict[str, Any]
    config_sha256: str
    leaks: list[str]
    personalised: NotRequired[bool]
    notices: list[str]
    versions: dict[str, str]
    git: str | None
    device: str
    data: DataFacts
    test_counts: NotRequired[list[NonNegativeInt]]
    site_test_counts: NotRequired[list[NonNegativeInt]]
    partition: str  # its sha256
    parameters: int
    given: NotRequired[dict[str, Any]]  # objects from Python
    code_sha256: NotRequired[dict[str, str]]
    scale: NotRequired[dict[str, Any]]
    run_at_nodes: NotRequired[str]
    own_metrics: NotRequired[dict[str, MetricFacts]]


class RoundRecord(TypedDict):
    """Every other line of events.jsonl: one round."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    round: int
    rounds: NotRequired[int]
    cohort: list[int]
    lr: NotRequired[float]
    accuracy: float
    balanced_accuracy: Share
    loss: Share
    per_class: list[Share]
    per_client: NotRequired[list[Share]]  # of many clients in the last round alone
    per_site: NotRequired[list[Share] | None]
    per_site_interval: NotRequired[list[Annotated[list[float], Field(min_length=2, max_length=2)] | None]]
    worst_client: NotRequired[Share]
    worst_site: NotRequired[Share]
    site_scores_before: NotRequired[dict[str, Any]]  # readers have it in the round before, of whose model it is
    validation_accuracy: Share
    validation_own: NotRequired[Share]
    confusion: NotRequired[list[list[int]] | None]
    own_metrics: NotRequired[dict[str, Share]]
    bytes: dict[str, dict[str, int]]
    bytes_up: int
    bytes_down: int
    seconds: dict[str, float]
    ended: NotRequired[str]  # of the last round, why it is the last or whose model is kept
    refined: NotRequired[list[int]]
    not_refined: NotRequired[list[int]]
    dropped: NotRequired[list[int]]
    missing: NotRequired[dict[str, str]]  # client -> phase and reason; names in JSON are text
    ranking: NotRequired[list[Share] | None]
    norms: NotRequired[list[list[Share] | None] | None]
    refined_before: NotRequired[list[Share] | None]
    refined_after: NotRequired[list[Share] | None]


class PartitionFile(TypedDict):
    """partition.json as far as readers look: each client's examples by class, and what the data calls the clients."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    counts: Annotated[list[list[int]], Field(min_length=1)]
    ids: NotRequired[list[str] | None]


def check_run(where: Path, header: object, partition: Mapping[str, Any]) -> None:
    """Refuse a run whose first line or split breaks the schema, with the file and the value that is wrong."""
    _check(where, "partition.json", PartitionFile, partition)
    began: RunHeader = _check(where, "events.jsonl, line 1", RunHeader, header)
    by_class = (*partition["counts"], began.get("test_counts"), began["data"].get("classes"))
    classes = {len(one) for one in by_class if one}
    sites = {len(one) for one in (partition["counts"], began.get("site_test_counts")) if one}
    if len(classes) > 1 or len(sites) > 1:
        raise files.damaged(where, "events.jsonl, line 1: partition.json has another number of classes or clients")


def checked_rounds(where: Path, rounds: Iterable[Event], partition: Mapping[str, Any]) -> Iterator[Event]:
    """Refuse the first round that breaks the schema."""
    classes = {len(row) for row in partition["counts"]}
    for number, event in enumerate(in_their_round(rounds), 2):
        line = f"events.jsonl, line {number}"
        found: RoundRecord = _check(where, line, RoundRecord, event)
        by_class = (found["per_class"], found.get("refined_before"), found.get("refined_after"))
        lengths = {*classes, *(len(values) for values in by_class if values)}
        if (confusion := found.get("confusion")) is not None:
            lengths |= {len(confusion), *map(len, confusion)}
        by_row = (found["cohort"], found.get("ranking"), found.get("norms"))
        rows = {len(values) for values in by_row if values is not None}
        of_sites = (partition["counts"], found.get("per_site"), found.get("per_site_interval"), partition.get("ids"))
        sites = {len(names) for names in of_sites if names}
        if len(lengths) > 1 or len(rows) > 1 or len(sites) > 1:
            raise files.damaged(where, f"{line}: lists for the same classes or clients have different lengths")
        yield event


def listed_and_numbers(event: Event) -> Event:
    """Return what readers know of a round: the keys of the schema, and every number, which may be a metric."""
    keys = RoundRecord.__annotations__
    return {k: v for k, v in event.items() if k in keys or v is None or isinstance(v, int | float)}


_adapter = cache(TypeAdapter[Any])


def _check(where: Path, file: str, schema: Any, value: object) -> Any:
    try:
        return _adapter(schema).validate_python(value)
    except ValidationError as error:
        raise files.damaged(where, f"{file}: {_first(error, 'the line')}") from None


def _first(error: ValidationError, whole: str) -> str:
    """Say which key is wrong first, and why."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg'].lower()}"


# -- checkpoint.json ---------------------------------------------------------------------------------------------------


class File(BaseModel):
    """A file of a checkpoint; its hash is None in checkpoints of format 2."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    file: str
    sha256: str | None


class Kept(BaseModel):
    """The files of an earlier checkpoint that are still needed: those of the best round so far."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    server: File
    clients: dict[Annotated[int, Strict(False)], File]


class Index(BaseModel):
    """What `checkpoint.json` says."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: int
    round: NonNegativeInt
    config: str
    log: str | None
    server: File
    clients: dict[Annotated[int, Strict(False)], File]
    best: Kept | None = None  # while a run goes on that will keep its best model
    model: str | None  # sha256 of model.safetensors, once the run is finished

    @model_validator(mode="after")
    def _names_what_a_checkpoint_writes(self) -> Index:
        both = (self, self.best) if self.best else (self,)
        pairs = [(f"client-{client}", file) for one in both for client, file in one.clients.items()]
        pairs += [("server", one.server) for one in both]
        for stem, file in pairs:
            if not re.fullmatch(rf"{CHECKPOINT_FOLDER}/{stem}\.safetensors", file.file):
                raise ValueError(f"{file.file!r} is named as the file of {stem}, which no checkpoint has written")
        if self.format == CHECKPOINT_FORMAT and None in (self.log, *(file.sha256 for _, file in pairs)):
            raise ValueError("a hash is missing")
        return self


def read_index(run_dir: Path) -> Index | None:
    """Return what `checkpoint.json` says; None before the first checkpoint."""
    path = run_dir / "checkpoint.json"
    if not os.path.lexists(path):
        return None
    try:
        content = json.loads(files.read(path, "it must be as the run left it"))
        found = content["format"]
        if found == 2:  # of version 0.1.0, which has no hashes
            clients = {client: {"file": file, "sha256": None} for client, file in content["clients"].items()}
            server = {"file": content["server"], "sha256": None}
            content |= {"log": None, "model": None, "clients": clients, "server": server}
        if found in (2, CHECKPOINT_FORMAT):
            return Index.model_validate(content)
    except ValidationError as error:
        raise files.damaged(path, _first(error, "the file")) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise files.damaged(path, type(error).__name__) from error
    raise ConfigError(
        f"{path} has format {found}, and this version reads formats 2 and {CHECKPOINT_FORMAT}. Resume it with the "
        "version that wrote it, or run again."
    )
