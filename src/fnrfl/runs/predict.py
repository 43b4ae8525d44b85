"""Use the models that came out of a run: score them on data, or ask them about examples without labels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnrfl import usercode
from fnrfl.core.errors import ConfigError
from fnrfl.core.feed import forward_batch
from fnrfl.core.types import State
from fnrfl.core.words import counted, same_spelling
from fnrfl.data.batches import scaled
from fnrfl.data.datasets import DataSource, object_source, read_source
from fnrfl.data.reading import ONLY_PART, Expected, Reading
from fnrfl.process import isolated
from fnrfl.rundir.outputs import csv_text
from fnrfl.runs.custom_metrics import select_metrics, typed_metrics
from fnrfl.runs.data import reading_of
from fnrfl.runs.metrics import OWN
from fnrfl.runs.passed import objects_for_run
from fnrfl.runs.prepared_data import (
    expected_of,
    is_table,
    notes_on_columns,
    notes_on_labels,
    notes_on_training,
    own_data,
    prepare,
)
from fnrfl.runs.quality import TEST_METRICS, recall_by_class
from fnrfl.runs.result import Result
from fnrfl.runs.run import load
from fnrfl.runs.scores import NUMBERS_LAST_ROUND, Score, pooled, score_model

TEST = "the test part"  # of the run's own data, which the model has not seen
OTHER_TEST = "the test part of other data"
EVERYTHING = "all examples"
WITHOUT_NAME = "The data"  # what sentences that begin with data call what was passed in
RunOrResult = str | Path | Result
Client = int | str  # by its number, or as the data names it


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How good a model is on some data."""

    trained: Result
    data: str
    what: str  # which examples of the data
    score: Score  # of the clients' models taken together, where each has its own
    per_client: dict[int | str, float] | None  # accuracy of each model that was asked; None if all use the same
    notes: tuple[str, ...] = ()  # what one should know beside the numbers
    own_metrics: dict[str, float | None] = field(default_factory=dict)  # of the user, by name
    shown: tuple[str, ...] = ()  # the metrics that were asked for, by name

    @property
    def accuracy(self) -> float:
        """The share of examples that the model has right."""
        return self.score.accuracy

    def __repr__(self) -> str:
        return f"Evaluation(accuracy {self.accuracy:.4f} on {counted(self.examples, 'example')}: {self.where})"

    @property
    def models(self) -> int:
        """How many models were scored on each example."""
        return 1 if self.per_client is None else len(self.per_client)

    @property
    def examples(self) -> int:
        """How many examples there were."""
        return len(self.score.labels) // self.models

    @property
    def where(self) -> str:
        """Say which examples of which data, and whose models, were scored."""
        data = "the data" if self.data == WITHOUT_NAME else self.data
        other = self.what == OTHER_TEST
        said = f"the test part of {data}, which is not the run's data" if other else f"{self.what} of {data}"
        if self.per_client is None:
            return said
        clients = list(self.per_client)
        whose = f"model of client {clients[0]}" if len(clients) == 1 else f"mean over {len(clients)} clients' models"
        return f"{said}; {whose}"

    def summary(self) -> dict[str, Any]:
        """Return the scores as one JSON object."""
        return {
            "run_dir": None if self.trained.run_dir is None else str(self.trained.run_dir),
            "data": self.data,
            "part": self.what,
            "notes": list(self.notes),
            "examples": self.examples,
            "accuracy": self.score.accuracy,
            "per_client": self.per_client,
            "balanced_accuracy": self.score.balanced,
            "loss": self.score.loss,
            **{name: metric.compute(self.score.answers) for name, metric in TEST_METRICS.items() if metric.compute},
            OWN: self.own_metrics,
            "classes": list(self.trained.classes),
            "per_class": recall_by_class(self.score.answers),
            "examples_per_class": [int(count) // self.models for count in self.score.answers.count],
            "leaks": list(self.trained.config.leaks_on),
        }


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says about each example, in the order of the data."""

    trained: Result
    rows: Sequence[str]  # where each example is in its part or its client's file: from 0, or an image's path
    labels: list[str]
    probabilities: Tensor  # [n, C]; the mean over clients, where each has a model of its own
    per_client: dict[int | str, list[str]]  # the label that each client's own model gives, where several were asked
    parts: Sequence[str] | None = None  # train or test, where the data has parts of its own
    ids: tuple[str, Sequence[str]] | None = None  # a column of the table that was carried along: its name and cells
    notes: tuple[str, ...] = ()  # what one should know beside the answers
    holders: Sequence[str] | None = None  # the client of each example, where the data names clients

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the probabilities."""
        return self.trained.classes

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shown = ", ".join(self.labels[:5]) + (", ..." if len(self) > 5 else "")
        return f"Prediction({counted(len(self), 'example')}: {shown})"

    def to_csv(self) -> str:
        """Return a line per example: where it is, the likeliest class, each probability, each client's label."""
        answers = [
            "label",
            *(f"p_{name}" for name in self.trained.classes),
            *(f"client_{one}" for one in self.per_client),
        ]
        places: dict[str, Sequence[str]] = {"row": self.rows}
        if self.holders is not None:
            places["client"] = self.holders
        if self.parts is not None:
            places["part"] = self.parts
        if self.ids is not None:
            name, cells = self.ids
            places[f"id_{name}" if name in (*places, *answers) else name] = cells
        rows = [[*places, *answers]]
        for at, shares in enumerate(self.probabilities.tolist()):
            said = (labels[at] for labels in self.per_client.values())
            where = (column[at] for column in places.values())
            rows.append([*where, self.labels[at], *(f"{share:.6g}" for share in shares), *said])
        return csv_text(rows)


@isolated()
def evaluate(
    run: RunOrResult,
    data: object,
    *,
    client: Client | None = None,
    metrics: Sequence[str] = (),
    model: Any = None,
    algorithm: Any = None,
    init: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Evaluation:
    """Score the model of a finished run on any data, as `fnrfl evaluate` does.

    `data` is what `dataset` of `run` may be: a name, a file, a folder, or objects. The run's own data, known by its
    content, is judged by its test part; other data by the test part that it has of its own, or else by all of it. No
    feature noise is laid over it. Where clients have models of their own, all of those are scored, or one client's.
    `metrics` are those to be shown: what `fnrfl list metrics` names, "all", or "module:function". A run directory that
    was given its model in Python needs it again.
    """
    result = _opened(run, trust, model=model, algorithm=algorithm, init=init)
    facts, config, classes = result.data, result.config, len(result.classes)
    custom = typed_metrics(config.metrics, metrics)
    shown = select_metrics(metrics, custom, [name for name, metric in TEST_METRICS.items() if not metric.in_runs_only])
    title, source = _read(data, expected_of(facts), reading_of(config))
    part, what, notes = source.raw.parts.get("test"), OTHER_TEST, list[str]()
    if part is None:
        part, what = next(iter(source.raw.parts.values())), EVERYTHING
    if (own := own_data(facts, source)) is not None:
        x, y, what = own.test.x, own.test.y, TEST
    else:
        prepared = prepare(result, title, part, source.raw.classes)
        if prepared.y is None:
            column = (
                f", which would be in the column {facts.columns.label!r}" if facts.columns and is_table(title) else ""
            )
            raise ConfigError(
                f"{title} has no labels{column}, so nothing can be scored. Use `fnrfl predict`, or add the labels."
            )
        x, y = prepared.x, prepared.y
        notes += notes_on_columns(facts, title, source)
        notes += notes_on_labels(facts.classes, title, part, source.raw.classes)
        notes += notes_on_training(result, title, x)
    num_models = 1 if result.client_models is None or client is not None else len(result.client_models)
    keep = num_models * len(y) * classes <= NUMBERS_LAST_ROUND
    scores = {one: score_model(result.net, model, x, y, classes, keep=keep) for one, model in _models(result, client)}
    per_client = {one: found.accuracy for one, found in scores.items() if one is not None}
    whole = pooled(list(scores.values()))
    values = {metric.name: metric.ask(whole.answers) for metric in custom}
    return Evaluation(result, title, what, whole, per_client or None, tuple(notes), values, shown)


@isolated()
def predict(
    run: RunOrResult,
    data: object,
    *,
    client: Client | None = None,
    id_column: str | None = None,
    model: Any = None,
    algorithm: Any = None,
    init: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Prediction:
    """Return what the model of a finished run says about every example, in their order, as `fnrfl predict` does.

    `data` is what `dataset` of `run` may be, or an array of examples without labels. Where clients have models of their
    own, it is the mean of their probabilities, or what one client's model says. `id_column` is carried along from a
    table.
    """
    result = _opened(run, trust, model=model, algorithm=algorithm, init=init)
    expected = replace(expected_of(result.data), carried=_carried(data, id_column), labels_used=False)
    title, source = _read(data, expected, reading_of(result.config))
    # Labels are left aside: there may be other classes.
    parts = {name: prepare(result, title, replace(part, y=None), None) for name, part in source.raw.parts.items()}
    prepared = list(parts.values())
    mean, per_client = _mean_probabilities(result, torch.cat([part.x for part in prepared]), client)
    holders = _joined(part.clients for part in prepared)
    return Prediction(
        result,
        _joined(part.rows for part in prepared),
        _labels_of(result, mean),
        mean,
        per_client,
        parts=None if ONLY_PART in parts else [name for name, part in parts.items() for _ in part.rows],
        ids=None if id_column is None else (id_column, _joined(part.carried for part in prepared)),
        notes=tuple(notes_on_columns(result.data, title, source)),
        holders=holders if len(holders) == len(mean) else None,
    )


def _opened(run: RunOrResult, trust: bool, **objects: object) -> Result:
    return run if isinstance(run, Result) else load(run, trust=trust, passed=objects_for_run(**objects))


def _carried(data: object, id_column: str | None) -> str | None:
    """Return the column that is carried along; refuse one where data has no columns."""
    if id_column is not None and not is_table(_title(data)):
        raise ConfigError(
            f"{_title(data)} is no table, so it has no column {id_column!r}. Leave --id out, or give a .csv file."
        )
    return None if id_column is None else same_spelling(id_column)


def _joined(columns: Iterable[Sequence[str] | None]) -> list[str]:
    return [one for column in columns for one in column or ()]


def _read(data: object, expected: Expected, reading: Reading) -> tuple[str, DataSource]:
    """Return (what sentences call some data, the data): what a name stands for, or what was passed in."""
    title = _title(data)
    if isinstance(data, str | os.PathLike):
        usercode.allow("dataset.name", title)
        return title, read_source(title, expected, reading)
    return title, object_source(data, title, reading, expected)


def _title(data: object) -> str:
    return os.fspath(data) if isinstance(data, str | os.PathLike) else WITHOUT_NAME


def _models(result: Result, client: Client | None) -> Iterator[tuple[Client | None, State]]:
    """Yield (client, its model) of everybody or of one client, one at a time; (None, model) if all use the same."""
    clients = result.client_models
    if clients is not None:
        for one in range(len(clients)) if client is None else (clients.number(client),):
            yield one if result.data.clients is None else result.data.clients[one], clients[one]
        return
    if client is not None:
        raise ConfigError(
            f"{result.run_dir or 'The run'} has one model for all clients, because {result.config.algorithm.name} "
            f"trains one, so client {client} has none of its own. Leave --client out."
        )
    yield None, State(*result.net.pack(result.weights))


def _mean_probabilities(result: Result, x: Tensor, client: Client | None) -> tuple[Tensor, dict[Client, list[str]]]:
    """Return (mean probabilities [n, C] of all models, the labels that each client's model gives, of several)."""
    per_client: dict[Client, list[str]] = {}
    total, count = torch.zeros(len(x), len(result.classes), dtype=result.net.dtype), 0
    for one, model in _models(result, client):
        shares = _probabilities(result, model, x)
        total, count = total.add_(shares), count + 1
        if one is not None and client is None:
            per_client[one] = _labels_of(result, shares)
    return total / count, per_client


@torch.no_grad()
def _probabilities(result: Result, model: State, x: Tensor) -> Tensor:
    """Return the probability of each class for each example, [n, C]."""
    net, shares = result.net, []
    for xs in x.split(forward_batch(net.device)):
        logits = net.eval_forward(model.params, model.buffers, net.laid_out(scaled(xs, net.input_dtype))).logits
        shares.append(logits[:, : len(result.classes)].softmax(1))  # outputs beyond the classes mean nothing
    return torch.cat(shares)


def _labels_of(result: Result, shares: Tensor) -> list[str]:
    return [result.classes[index] for index in shares.argmax(1).tolist()]
