"""The schema of a run's files: what a run writes into its log, its split and its checkpoint, and what readers rely on.

Readers refuse a file that breaks it, by name and value. A round may have more numbers than are listed here: each is a
metric, or something that a method notes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic asks for this one on Python 3.11

from fnrfl.core.errors import ConfigError
from fnrfl.rundir import files
from fnrfl.rundir.directory import CHECKPOINT_FOLDER
from fnrfl.rundir.events import Event

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
    worst_client: NotRequired[Share]
    worst_site: NotRequired[Share]
    validation_accuracy: Share
    confusion: NotRequired[list[list[int]] | None]
    own_metrics: NotRequired[dict[str, Share]]
    bytes: dict[str, dict[str, int]]
    bytes_up: int
    bytes_down: int
    seconds: dict[str, float]
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
    classes = {len(row) for row in partition["counts"]}
    if {len(one) for one in (began.get("test_counts"), began["data"].get("classes")) if one} - classes:
        raise files.damaged(where, "events.jsonl, line 1: it has another number of classes than partition.json")
    if len(began.get("site_test_counts", ())) not in (0, len(partition["counts"])):
        raise files.damaged(where, "events.jsonl, line 1: it has another number of clients than partition.json")


def checked_rounds(where: Path, rounds: Iterable[Event], partition: Mapping[str, Any]) -> Iterator[Event]:
    """Refuse the first round that breaks the schema."""
    classes = {len(row) for row in partition["counts"]}
    for number, event in enumerate(rounds, 2):
        line = f"events.jsonl, line {number}"
        found: RoundRecord = _check(where, line, RoundRecord, event)
        by_class = (found["per_class"], found.get("refined_before"), found.get("refined_after"))
        lengths = {*classes, *(len(values) for values in by_class if values)}
        if (confusion := found.get("confusion")) is not None:
            lengths |= {len(confusion), *map(len, confusion)}
        by_row = (found["cohort"], found.get("ranking"), found.get("norms"))
        rows = {len(values) for values in by_row if values is not None}
        sites = {len(names) for names in (partition["counts"], found.get("per_site"), partition.get("ids")) if names}
        if len(lengths) > 1 or len(rows) > 1 or len(sites) > 1:
            raise files.damaged(where, f"{line}: lists for the same classes or clients have different lengths")
        yield event


def listed_and_numbers(event: Event) -> Event:
    """Return what readers know of a round: the keys of the schema, and every number, which may be a metric."""
    keys = RoundRecord.__annotations__
    return {k: v for k, v in event.items() if k in keys or v is None or isinstance(v, int | float)}


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _check(where: Path, file: str, schema: Any, value: object) -> Any:
    try:
        return _adapter(schema).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the line"
        raise files.damaged(where, f"{file}: {key}: {first['msg'].lower()}") from None


# -- checkpoint.json ---------------------------------------------------------------------------------------------------


class File(BaseModel):
    """A file of a checkpoint; its hash is None in checkpoints of format 2."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    file: str
    sha256: str | None


class Index(BaseModel):
    """What `checkpoint.json` says."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: int
    round: int
    config: str
    log: str | None
    server: File
    clients: dict[Annotated[int, Strict(False)], File]
    model: str | None  # sha256 of model.safetensors, once the run is finished


def read_index(run_dir: Path) -> Index | None:
    """Return what `checkpoint.json` says; None before the first checkpoint."""
    path = run_dir / "checkpoint.json"
    if not path.exists() and not path.is_symlink():
        return None
    try:
        content = json.loads(files.read(path, "it must be as the run left it"))
        found = content["format"]
        if found == 2:
            content = _of_format_2(content)
        if found in (2, CHECKPOINT_FORMAT):
            return _checked_index(path, Index.model_validate(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise files.damaged(path, type(error).__name__) from error
    raise ConfigError(
        f"{path} has format {found}, and this version reads formats 2 and {CHECKPOINT_FORMAT}. Resume it with the "
        "version that wrote it, or run again."
    )


def _of_format_2(content: dict[str, object]) -> dict[str, object]:
    """Return the index of a run of version 0.1.0, which has no hashes, in today's form."""
    clients = content["clients"]
    if not isinstance(clients, dict):
        raise TypeError("its clients are no table")
    named = {client: {"file": file, "sha256": None} for client, file in clients.items()}
    return content | {
        "log": None, "model": None, "clients": named, "server": {"file": content["server"], "sha256": None},
    }  # fmt: skip


def _checked_index(path: Path, found: Index) -> Index:
    """Refuse names that a checkpoint cannot have given, and one of this format without its hashes."""
    named = [(found.server, "server"), *((file, f"client-{client}") for client, file in found.clients.items())]
    for file, stem in named:
        top, _, rest = file.file.partition("/")
        folder, _, name = rest.partition("/")
        if top != "rounds" or not CHECKPOINT_FOLDER.fullmatch(folder) or name != f"{stem}.safetensors":
            raise ConfigError(
                f"{path} names {file.file!r} as the file of {stem}, which no checkpoint has written. Put it back as it "
                "was, or run again into another directory."
            )
    hashed = found.log is not None and all(file.sha256 is not None for file, _ in named)
    if found.round < 0 or (found.format == CHECKPOINT_FORMAT and not hashed):
        raise files.damaged(path, "a hash is missing, or its round")
    return found
