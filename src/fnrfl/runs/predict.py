"""Use the models that came out of a run: score them on data, or ask them about examples without labels.

The run's own data is known by its content, whatever it is called; other data is brought into the form that the model
takes, columns and classes matched by their names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnrfl import usercode
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.core.types import State
from fnrfl.core.words import counted, same_spelling
from fnrfl.data.arrays import tensor
from fnrfl.data.batches import check_fits
from fnrfl.data.datasets import AT_SITES, Dataset, DataSource, Facts, object_source, read_source
from fnrfl.data.partition.views import num_shared
from fnrfl.data.reading import ONLY_PART, Examples, Expected
from fnrfl.data.sites import has_tables
from fnrfl.data.sources import NAMED_DATASETS, available
from fnrfl.process import isolated
from fnrfl.rundir.origin import read_origin
from fnrfl.rundir.outputs import csv_text
from fnrfl.runs.data import reading_of
from fnrfl.runs.metrics import OWN
from fnrfl.runs.passed import objects_for_run
from fnrfl.runs.quality import TEST_METRICS, recall_by_class, select_metrics, typed_metrics
from fnrfl.runs.result import Result
from fnrfl.runs.run import load
from fnrfl.runs.scores import NUMBERS_LAST_ROUND, Score, pooled, score_model
from fnrfl.runs.setup.model import check_tokens

TEST = "the test part"  # of the run's own data, which the model has not seen
OTHER_TEST = "the test part of other data"
EVERYTHING = "all examples"
WITHOUT_NAME = "The data"  # what sentences that begin with data call what was passed in
MAX_LISTED = 6  # classes and columns that a note names
MAX_BYTES = 1 << 26  # of files that are read once more: some seconds
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
    ids: Mapping[str, Sequence[str]] = field(default_factory=dict)  # columns of the table that were carried along
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
        shares, each = [f"p_{name}" for name in self.classes], [f"client_{one}" for one in self.per_client]
        answers = ["label", *shares, *each]
        places: dict[str, Sequence[str]] = {"row": self.rows}
        if self.holders is not None:
            places["client"] = self.holders
        if self.parts is not None:
            places["part"] = self.parts
        for name, cells in self.ids.items():
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
    title, source = _read(data, _expected_of(facts), result)
    part, what, notes = source.raw.parts.get("test"), OTHER_TEST, list[str]()
    if part is None:
        part, what = next(iter(source.raw.parts.values())), EVERYTHING
    if (own := own_data(facts, source)) is not None:
        x, y, what = own.test.x, own.test.y, TEST
    else:
        x = _prepared(result, title, part)
        if part.y is None:
            known = facts.columns if _is_table(title) else None
            column = f", which would be in the column {known.label!r}" if known else ""
            raise ConfigError(
                f"{title} has no labels{column}, so nothing can be scored. Use `fnrfl predict`, or add the labels."
            )
        y = _labels(facts, title, part.y, source.raw.classes)
        notes += [*_notes_on_columns(facts, title, source), *_notes_on_labels(facts, title, part.y, source.raw.classes)]
        notes += [*_notes_on_site(result, title, x), *_notes_on_training(result, title, x)]
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
    id_column: str | Sequence[str] | None = None,
    model: Any = None,
    algorithm: Any = None,
    init: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Prediction:
    """Return what the model of a finished run says about every example, in their order, as `fnrfl predict` does.

    `data` is what `dataset` of `run` may be, or an array of examples without labels. Where clients have models of their
    own, it is the mean of their probabilities, or what one client's model says. The columns that `id_column` names
    are carried along from a table.
    """
    result = _opened(run, trust, model=model, algorithm=algorithm, init=init)
    title, ids = _title(data), _ids(id_column)
    if ids and not _is_table(title):
        raise ConfigError(f"{title} is no table, so it has no column {ids[0]!r}. Leave --id out, or give a table.")
    expected = replace(_expected_of(result.data), carried=tuple(map(same_spelling, ids)), labels_used=False)
    title, source = _read(data, expected, result)
    parts = list(source.raw.parts.items())
    mean, per_client = _ask(result, torch.cat([_prepared(result, title, part) for _, part in parts]), client)
    holders = _joined(part.clients for _, part in parts)
    return Prediction(
        result,
        _joined(part.names or range(len(part.x)) for _, part in parts),
        _labels_of(result, mean),
        mean,
        per_client,
        parts=None if ONLY_PART in source.raw.parts else _joined([name] * len(part.x) for name, part in parts),
        ids={name: [row[at] for _, part in parts for row in part.carried or ()] for at, name in enumerate(ids)},
        notes=tuple(_notes_on_columns(result.data, title, source)),
        holders=holders if len(holders) == len(mean) else None,
    )


def _ids(named: str | Sequence[str] | None) -> list[str]:
    return [named] if isinstance(named, str) else [*dict.fromkeys(named or ())]


def _joined(columns: Iterable[Iterable[object] | None]) -> list[str]:
    return [str(one) for column in columns if column is not None for one in column]


def _labels_of(result: Result, shares: Tensor) -> list[str]:
    return [result.classes[index] for index in shares.argmax(1).tolist()]


def _ask(result: Result, x: Tensor, client: Client | None) -> tuple[Tensor, dict[Client, list[str]]]:
    """Return (mean probabilities [n, C] of all models, the labels that each client's model gives, of several)."""
    per_client: dict[Client, list[str]] = {}
    nobody, classes, asked = torch.zeros(len(x), dtype=torch.int64), len(result.classes), 0
    total = torch.zeros(len(x), classes, dtype=result.net.dtype)
    for one, model in _models(result, client):
        logits = score_model(result.net, model, x, nobody, classes, keep=True).logits
        assert logits is not None
        shares = logits.softmax(1)  # outputs beyond the classes mean nothing
        total, asked = total.add_(shares), asked + 1
        if one is not None and client is None:
            per_client[one] = _labels_of(result, shares)
    return total / asked, per_client


def _opened(run: RunOrResult, trust: bool, **objects: object) -> Result:
    return run if isinstance(run, Result) else load(run, trust=trust, passed=objects_for_run(**objects))


def _read(data: object, expected: Expected, result: Result) -> tuple[str, DataSource]:
    """Return (what sentences call some data, the data): what a name stands for, or what was passed in."""
    title, reading = _title(data), reading_of(result.config)
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


# -- data in the form that the model takes -----------------------------------------------------------------------------


def _prepared(result: Result, title: str, part: Examples) -> Tensor:
    """Return the inputs of examples in the form of those that the model was trained on."""
    facts, net, x = result.data, result.net, tensor(part.x)
    pixels = x.dtype == torch.uint8
    if not pixels and x.ndim == 2 and not facts.pixels and x.shape[1] == prod(facts.input_shape):
        x = x.reshape(-1, *facts.input_shape)
    if tuple(x.shape[1:]) != facts.input_shape or pixels != facts.pixels:
        kinds = ["pixels" if of_bytes else "numbers" for of_bytes in (pixels, facts.pixels)]
        raise CompatibilityError(
            f"{title} has examples of {kinds[0]} {list(x.shape[1:])}, and the model was trained on {kinds[1]} "
            f"{list(facts.input_shape)}; they must be alike. Prepare the data in the same way."
        )
    check_fits(x, net.input_dtype, title)
    check_tokens(net, x, title)
    return x


def _labels(facts: Facts, title: str, y: np.ndarray, classes: Sequence[str] | None) -> Tensor:
    """Return labels as numbers of the model's classes, matched by name where there are names.

    `classes` are the data's own names for the classes that it numbers.
    """
    known, (values, places) = facts.classes, np.unique(y, return_inverse=True)
    names = [str(value) for value in values]
    if y.dtype.kind != "U" and not (classes is None and _are_numbers(known)):
        listed = known if classes is None else classes  # numbers without names stand for places
        if (largest := int(values[-1])) >= len(listed):
            whose = "the model knows" if classes is None else "it names"
            raise CompatibilityError(
                f"{title} has the label {largest}, and {whose} {counted(len(listed), 'class', 'classes')}; labels must "
                "be numbered from 0. Correct the label or name every class."
            )
        names = [str(listed[value]) for value in values]
    elif y.dtype.kind != "U" and sorted(known, key=int) != list(known):
        raise CompatibilityError(
            f"{title} numbers its classes, and those of the model are called {', '.join(known)}: the label {names[0]} "
            f"may mean the class {names[0]!r} or the class at that place. Add an array `classes`."
        )
    if unknown := sorted({*names} - {*known}):
        raise CompatibilityError(
            f"{title} has the class {unknown[0]!r}, which the model does not know; its classes are "
            f"{', '.join(known)}. Rename the class or leave those examples out."
        )
    return tensor(np.array([known.index(name) for name in names], dtype=np.int64)[places])


def _are_numbers(names: Sequence[str]) -> bool:
    return all(re.fullmatch(r"-?\d+", name) for name in names)


def _expected_of(facts: Facts) -> Expected:
    """Return what a model that was trained on some data expects of other data."""
    return Expected(facts.columns, num_inputs=prod(facts.input_shape), colour=facts.colour, labelled=False)


def _is_table(title: str) -> bool:
    """Whether data has columns with names: a table, or a folder with the tables of clients."""
    return has_tables(Path(os.path.expanduser(title)))


def _notes_on_columns(facts: Facts, title: str, source: DataSource) -> Iterator[str]:
    """Say how the columns were matched, beside what the source itself has to say."""
    yield from source.raw.notices
    if _is_table(title) and facts.columns is None:
        yield f"The run has no names of columns, so the columns of {title} are taken by position."
    if source.raw.columns is None and facts.columns is not None:
        listed = _listed(facts.columns.inputs)
        yield f"{title} has no names of columns, so they are taken in the order of the run's: {listed}."


def _notes_on_labels(facts: Facts, title: str, y: np.ndarray, classes: Sequence[str] | None) -> Iterator[str]:
    """Say how labels that are numbers are taken by a model whose classes have names."""
    if y.dtype.kind != "U" and classes is None and not _are_numbers(facts.classes):
        taken = _listed([f"{place} is taken as {name!r}" for place, name in enumerate(facts.classes)])
        yield f"{title} has numbers as labels, and the model's classes have names: {taken}."


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:MAX_LISTED]) + (", ..." if len(words) > MAX_LISTED else "")


# -- by content --------------------------------------------------------------------------------------------------------


def own_data(facts: Facts, source: DataSource) -> Dataset | None:
    """Return data as a run has it if it is the run's own, by its hash; only data of the same size is hashed."""
    if facts.examples is not None and sum(facts.examples) != source.num_examples:
        return None
    try:
        dataset = source.dataset(by_client=facts.clients is not None)
    except FnrflError:  # no run could have been made of it
        return None
    return dataset if (dataset.checksum, dataset.classes) == (facts.sha256, facts.classes) else None


def _notes_on_site(result: Result, title: str, x: Tensor) -> Iterator[str]:
    """Say how many examples a site has trained on, if this may be its data: its rows are known there alone."""
    site, facts = Path(title).stem, result.data
    if facts.source == AT_SITES and site in result.clients and result.run_dir is not None:
        held = sum(read_origin(result.run_dir).partition["counts"][result.clients.index(site)])
        yield (
            f"The site {site!r} trained on {counted(held, 'example')}. If {title} is its data, they are among these "
            f"{len(x):,}, so the model may know their answers. per_site of the run is its score on the others."
        )


def _notes_on_training(result: Result, title: str, x: Tensor) -> Iterator[str]:
    """Say how many examples have the inputs of one that the model was trained on.

    A run keeps nothing of its examples, not even hashes, by which others could look for somebody's. So its data, and
    its public data, is read again where it was, if that is on this machine, runs no code and takes seconds.
    """
    facts, config = result.data, result.config
    own = config.dataset.name if config.dataset.name in NAMED_DATASETS else facts.source
    for name, part in ((own, "training set"), (config.public.source, "public data")):
        source = _read_again(result, name)
        if source is None:
            continue
        same = own_data(facts, source) if name == own else None
        if name == own and same is None:
            yield f"The run's data, {name}, has changed since: the model may be trained on some of these examples."
            continue
        known = [tensor(part.x) for part in source.raw.parts.values()] if same is None else [same.train.x]
        count = sum(num_shared(x, others) for others in known if others.shape[1:] == x.shape[1:])
        unseen = same is not None and not config.leaks.public_is_test
        instead = f", or evaluate {name}: the model has not seen its test part" if unseen else ""
        if count:
            yield (
                f"{title}: of {counted(len(x), 'example')}, {count:,} {'has' if count == 1 else 'have'} the same "
                f"inputs as one in the {part}, so the model may know the answer. Leave them out{instead}."
            )


def _read_again(result: Result, name: str) -> DataSource | None:
    """Read data of a run once more; None if it is not here, runs code, or cannot be read in seconds."""
    try:
        if name in NAMED_DATASETS:
            here = any(one.name == name and one.found for one in available())
        else:
            path = Path(os.path.expanduser(name))
            sizes = [one.stat().st_size for one in (path, *path.rglob("*")) if one.is_file()]
            here = name not in ("train", "test") and len(sizes) > 0 and sum(sizes) <= MAX_BYTES
        return read_source(name, _expected_of(result.data), reading_of(result.config)) if here else None
    except (FnrflError, OSError):
        return None
