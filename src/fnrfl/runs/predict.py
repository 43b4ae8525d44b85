"""Use the models that came out of a run: score them on data, or ask them about examples without labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fnrfl.core import trust as trusted
from fnrfl.core.errors import ConfigError
from fnrfl.core.feed import forward_batch
from fnrfl.core.isolation import isolated
from fnrfl.core.quality import TEST_METRICS
from fnrfl.core.types import State
from fnrfl.core.words import same_spelling
from fnrfl.data.batches import scaled
from fnrfl.data.datasets import DataSource, read_source
from fnrfl.data.frames import in_order_of, without_label
from fnrfl.data.in_memory import source_in_memory, values_in_memory
from fnrfl.data.reading import ONLY_PART, Expected, RawData, Reading
from fnrfl.runs import run as runs
from fnrfl.runs.custom_metrics import chosen, computed_metrics, with_given
from fnrfl.runs.data import reading_of
from fnrfl.runs.matching import (
    Asked,
    expected_of,
    is_table,
    matched,
    note_on_other_data,
    notes_on_changes,
    notes_on_columns,
    notes_on_labels,
    notes_on_public,
    notes_on_training,
    own_test_part,
)
from fnrfl.runs.model_score import pooled
from fnrfl.runs.model_score import score_model as score
from fnrfl.runs.passed import NOTHING_PASSED, PassedObjects
from fnrfl.runs.predictions import EVERYTHING, OTHER_TEST, TEST, WITHOUT_NAME, Evaluation, Prediction, TrainedRun
from fnrfl.runs.result import Result
from fnrfl.runs.round_scores import NUMBERS_LAST_ROUND

RunOrResult = str | Path | Result


@isolated()
def evaluate(
    run: RunOrResult,
    data: object,
    *,
    client: int | str | None = None,
    metrics: Sequence[str] = (),
    trust: bool = False,
    passed: PassedObjects = NOTHING_PASSED,
) -> Evaluation:
    """Score the model of a finished run on a data set, a file, a folder of images, or data that is passed in.

    Where clients have models of their own, all of those are scored, or one client's. The run's own data, known by its
    content, is judged by its test part; other data by the test part that it has of its own, or else by all of it. No
    feature noise is laid over it. `metrics` are those to be shown: names, "all", or "module:function" of the user's.
    """
    trained = open_run(run, trust=trust, passed=passed)
    own = with_given(trained.config.metrics, metrics)
    shown = chosen(metrics, own, [name for name, metric in TEST_METRICS.items() if not metric.in_runs_only])
    data, source = _read(data, expected_of(trained), reading_of(trained.config))
    part = "test" if len(source.raw.parts) > 1 else next(iter(source.raw.parts))
    examples, classes = source.raw.parts[part], source.raw.classes
    own_test, what = own_test_part(trained, source), TEST
    notes: tuple[str, ...] = ()
    asked = matched(trained, data, examples, classes) if own_test is None else own_test
    if asked.y is None:
        raise _without_labels(trained, data)
    if own_test is None:
        what = OTHER_TEST if part == "test" else EVERYTHING
        notes = (
            *notes_on_columns(trained, data, source), *notes_on_labels(trained, data, examples, classes),
            *notes_on_changes(trained, data, what), *notes_on_public(trained, data),
            *notes_on_training(trained, data, asked),
        )  # fmt: skip
    num_models = 1 if trained.clients is None or client is not None else len(trained.clients)
    keep = num_models * len(asked.y) * len(trained.classes) <= NUMBERS_LAST_ROUND
    scores = {
        one: score(trained.net, model, asked.x, asked.y, len(trained.classes), keep=keep)
        for one, model in trained.models(client)
    }
    per_client = {one: found.accuracy for one, found in scores.items() if one is not None}
    whole = pooled(list(scores.values()))
    return Evaluation(
        trained, data, what, whole, per_client or None, notes, computed_metrics(own, whole.answers), shown
    )


def _without_labels(trained: TrainedRun, data: str) -> ConfigError:
    columns = trained.data.columns
    lacking = f", which would be in the column {columns.label!r}" if columns and is_table(data) else ""
    return ConfigError(
        f"{data} has no labels{lacking}, so nothing can be scored. Use `fnrfl predict`, or add the labels."
    )


@isolated()
def predict(
    run: RunOrResult,
    data: object,
    *,
    client: int | str | None = None,
    id_column: str | None = None,
    trust: bool = False,
    passed: PassedObjects = NOTHING_PASSED,
) -> Prediction:
    """What the model of a finished run says about every example, in their order; the data may have no labels.

    Where clients have models of their own, it is the mean of their probabilities, or what one client's model says.
    `id_column` is carried along from a table.
    """
    trained = open_run(run, trust=trust, passed=passed)
    expected = replace(expected_of(trained), carried=_carried(data, id_column), labels_used=False)
    data, source = _read(data, expected, reading_of(trained.config))
    unlabelled = {name: replace(part, y=None) for name, part in source.raw.parts.items()}  # there may be other classes
    asked = {name: matched(trained, data, part, None) for name, part in unlabelled.items()}
    x = [part.x for part in asked.values()]
    mean, per_client = _ask(trained, torch.cat(x) if len(x) > 1 else x[0], client)
    cells = [cell for part in asked.values() for cell in part.carried or ()]
    return Prediction(
        trained,
        [row for part in asked.values() for row in part.rows],
        _labels_of(trained, mean),
        mean,
        per_client,
        parts=None if ONLY_PART in asked else [name for name, part in asked.items() for _ in part.rows],
        ids=None if id_column is None else (id_column, cells),
        notes=(*notes_on_columns(trained, data, source), *note_on_other_data(trained, data, source)),
        holders=_holders(list(asked.values())),
    )


def _carried(data: object, id_column: str | None) -> str | None:
    """The column that is carried along; data without columns is refused if one is named."""
    if id_column is not None and not is_table(_title(data)):
        raise ConfigError(
            f"{_title(data)} is no table, so it has no column {id_column!r}. Leave --id out, or give a .csv file."
        )
    return None if id_column is None else same_spelling(id_column)


def _holders(parts: Sequence[Asked]) -> list[str] | None:
    """The client of each example; None where some part does not say it."""
    of_parts = [part.clients for part in parts if part.clients is not None]
    return [one for clients in of_parts for one in clients] if len(of_parts) == len(parts) else None


def _read(data: object, expected: Expected, reading: Reading) -> tuple[str, DataSource]:
    """(what sentences call some data, the data): what a name stands for, or what was passed in."""
    if not isinstance(data, str | os.PathLike):
        inputs, labels = without_label(data, expected.columns)
        used = inputs if labels is None or not expected.labels_used else (inputs, labels)
        values = values_in_memory(used, _title(data), labelled=False)
        if isinstance(values, RawData):
            values = in_order_of(values, expected.columns, _title(data))
        return _title(data), source_in_memory(values, _title(data), reading, labels_used=expected.labels_used)
    trusted.given("dataset.name", _title(data))
    return _title(data), read_source(_title(data), expected, reading)


def _title(data: object) -> str:
    return os.fspath(data) if isinstance(data, str | os.PathLike) else WITHOUT_NAME


def _ask(trained: TrainedRun, x: Tensor, client: int | str | None) -> tuple[Tensor, dict[int | str, list[str]]]:
    """(mean probabilities [n, C] of all models asked, the labels that each client's model gives if all were asked)."""
    per_client: dict[int | str, list[str]] = {}
    total, count = torch.zeros(len(x), len(trained.classes), dtype=trained.net.dtype), 0
    for one, model in trained.models(client):
        shares = probabilities(trained, model, x)
        total, count = total.add_(shares), count + 1
        if one is not None and client is None:
            per_client[one] = _labels_of(trained, shares)
    return total / count, per_client


@torch.no_grad()
def probabilities(trained: TrainedRun, model: State, x: Tensor) -> Tensor:
    """The probability of each class for each example, [n, C]."""
    shares = []
    for xs in x.split(forward_batch(trained.net.device)):
        xs = trained.net.laid_out(scaled(xs, trained.net.input_dtype))
        logits = trained.net.eval_forward(model.params, model.buffers, xs).logits
        shares.append(logits[:, : len(trained.classes)].softmax(1))  # outputs beyond the classes mean nothing
    return torch.cat(shares)


def _labels_of(trained: TrainedRun, shares: Tensor) -> list[str]:
    return [trained.classes[index] for index in shares.argmax(1).tolist()]


def open_run(run: RunOrResult, *, trust: bool = False, passed: PassedObjects = NOTHING_PASSED) -> TrainedRun:
    """The model of a finished run; `trust` allows code that its config.toml names and that was never allowed before."""
    result = run if isinstance(run, Result) else runs.load(run, trust=trust, passed=passed)
    server = State(*result.net.pack(result.weights))
    return TrainedRun(result.run_dir, result.config, result.net, server, result.client_models, result.data)
