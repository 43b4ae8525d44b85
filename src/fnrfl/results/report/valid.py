"""What the files of a run must say for a page to be made of them; anything else is a damaged run, and is called so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, create_model

from fnrfl.core.quality import NUMBER_METRICS
from fnrfl.rundir.events import Event
from fnrfl.rundir.files import damaged

Share = float | None  # None: the data says nothing about this class or client


class _Lines(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class Settings(_Lines):
    """Keys of a config that a page names."""

    seed: int
    rounds: int
    clients: int
    dataset: str = Field(alias="dataset.name")
    scenario: str
    protocol: str
    model: str = Field(alias="model.name")
    algorithm: str = Field(alias="algorithm.name")
    engine: str = Field(alias="engine.name")
    precision: str = Field(alias="engine.precision")


class HeaderData(_Lines):
    """What a log's first line says about the data."""

    source: str
    sha256: str
    classes: list[str] = []


class HeaderMetric(_Lines):
    """What a log's first line says about a metric of the user's own."""

    function: str
    higher_is_better: bool


class Header(_Lines):
    """A log's first line."""

    leaks: list[str]
    notices: list[str]
    versions: dict[str, str]
    git: str | None
    device: str
    data: HeaderData
    partition: str
    parameters: int
    own_metrics: dict[str, HeaderMetric] = {}
    test_counts: list[NonNegativeInt] = []
    site_test_counts: list[NonNegativeInt] = []


class Round(_Lines):
    """Every other line."""

    round: int
    cohort: list[int]
    accuracy: float
    per_site: list[Share] | None = None
    balanced_accuracy: Share
    loss: Share
    per_class: list[Share]
    per_client: list[Share] = []  # of many clients in the last round alone
    worst_client: Share = None
    worst_site: Share = None
    validation_accuracy: Share
    bytes: dict[str, dict[str, int]]
    bytes_up: int
    bytes_down: int
    seconds: dict[str, float]
    confusion: list[list[int]] | None = None
    own_metrics: dict[str, Share] = {}
    refined: list[int] = []
    not_refined: list[int] = []
    dropped: list[int] = []
    missing: dict[str, str] = {}  # client -> phase and reason; names in JSON are text
    ranking: list[Share] | None = None
    norms: list[list[Share] | None] | None = None
    refined_before: list[Share] | None = None
    refined_after: list[Share] | None = None


_METRICS: dict[str, Any] = {name: (Share, None) for name in NUMBER_METRICS if name not in Round.model_fields}
ScoredRound = create_model("ScoredRound", __base__=Round, **_METRICS)


class PartitionFile(_Lines):
    """What a page needs of partition.json: each client's examples by class, and what the data calls the clients."""

    counts: list[list[int]] = Field(min_length=1)
    ids: list[str] | None = None


def check_run_files(where: Path, config: Mapping[str, Any], header: object, partition: Mapping[str, Any]) -> None:
    """Refuse a run whose files do not say what a page needs, with the file and the value that is wrong."""
    _check(where, "config.toml", Settings, config)
    _check(where, "partition.json", PartitionFile, partition)
    began = _check(where, "events.jsonl, line 1", Header, header)
    classes = {len(row) for row in partition["counts"]}
    if {len(told) for told in (began.test_counts, began.data.classes) if told} - classes:
        raise damaged(where, "events.jsonl, line 1: it has another number of classes than partition.json")
    if len(began.site_test_counts) not in (0, len(partition["counts"])):
        raise damaged(where, "events.jsonl, line 1: it has another number of clients than partition.json")


def checked_rounds(where: Path, rounds: Iterable[Event], partition: Mapping[str, Any]) -> Iterator[Event]:
    """Check the lines of a log after the first, one after another, and drop the keys that no page needs."""
    classes = {len(row) for row in partition["counts"]}
    for number, event in enumerate(rounds, 2):
        line = f"events.jsonl, line {number}"
        told = _check(where, line, ScoredRound, event)
        lengths = {len(told.per_class), *map(len, filter(None, (told.refined_before, told.refined_after))), *classes}
        lengths |= set() if told.confusion is None else {len(told.confusion), *map(len, told.confusion)}
        rows = {len(told.cohort), *(len(rows) for rows in (told.ranking, told.norms) if rows is not None)}
        sites = {len(partition["counts"]), *(len(names) for names in (told.per_site, partition.get("ids")) if names)}
        if len(lengths) > 1 or len(rows) > 1 or len(sites) > 1:
            raise damaged(where, f"{line}: lists for the same classes or clients have different lengths")
        yield {key: event[key] for key in ScoredRound.model_fields if key in event}


def _check(where: Path, file: str, model: type[Any], value: object) -> Any:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the line"
        raise damaged(where, f"{file}: {key}: {first['msg'].lower()}") from None
