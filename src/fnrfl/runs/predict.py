"""Use the models that came out of a run: score them on data, or ask them about examples without labels.

The run's own data is known by its content, whatever it is called; other data is matched by columns' and classes' names.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnrfl.config import RunConfig
from fnrfl.core import trust as trusted
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.isolation import isolated
from fnrfl.core.net import Net
from fnrfl.core.types import State
from fnrfl.data.arrays import tensor
from fnrfl.data.batches import WHOLE, check_fits, scaled
from fnrfl.data.datasets import Facts, Source, read
from fnrfl.data.reading import ALL, Examples, Expected
from fnrfl.runs import run as runs
from fnrfl.runs.evaluate import Score, pooled
from fnrfl.runs.evaluate import evaluate as score
from fnrfl.runs.net import check_tokens
from fnrfl.runs.personal import ClientModels

TEST = "the test part"  # of the run's own data, which the model has not seen
OTHER_TEST = "the test part of other data"
EVERYTHING = "all examples"


@dataclass(frozen=True, eq=False)
class Trained:
    """A model from a run directory, and what it can be asked."""

    run_dir: Path
    config: RunConfig
    net: Net
    server: State
    clients: ClientModels | None  # where the method gives each client a model of its own
    data: Facts  # about what it was trained on

    @property
    def classes(self) -> tuple[str, ...]:
        """What it can answer."""
        return self.data.classes

    def models(self, client: int | None) -> Iterator[tuple[int | None, State]]:
        """(client, its model) of everybody or of one client, one at a time; (None, model) if all use the same."""
        if self.clients is None:
            if client is not None:
                raise ConfigError(
                    f"{self.run_dir} has one model for all clients, because {self.config.algorithm.name} trains one, "
                    f"so client {client} has none of its own. Leave --client out."
                )
            yield None, self.server
            return
        for one in range(len(self.clients)) if client is None else (client,):
            yield one, self.clients[one]


@dataclass(frozen=True, eq=False)
class Asked:
    """Examples in the form that a model takes them; y is None where nobody knows."""

    x: Tensor
    y: Tensor | None
    rows: Sequence[str]  # where each example is in its part: a position from 0, or an image's path
    carried: Sequence[str] | None = None  # what the table has in the column of ids


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How good a model is on some data."""

    trained: Trained
    data: str
    what: str  # which examples of the data
    score: Score  # of the clients' models taken together, where each has its own
    per_client: dict[int, float] | None  # accuracy of each client's model that was asked; None if all use the same
    notes: tuple[str, ...] = ()  # what one should know beside the numbers

    @property
    def models(self) -> int:
        """How many models were asked about each example."""
        return 1 if self.per_client is None else len(self.per_client)

    @property
    def examples(self) -> int:
        """How many examples there were."""
        return int(self.score.count.sum()) // self.models

    @property
    def where(self) -> str:
        """Which examples of which data, and whose models were asked, in words."""
        said = f"{self.what} of {self.data}"
        if self.what == OTHER_TEST:
            said = f"the test part of {self.data}, which is not the run's data"
        if self.per_client is None:
            return said
        clients = list(self.per_client)
        whose = f"model of client {clients[0]}" if len(clients) == 1 else f"mean over {len(clients)} clients' models"
        return f"{said}; {whose}"

    def summary(self) -> dict[str, Any]:
        """The scores as one JSON object."""
        return {
            "run_dir": str(self.trained.run_dir),
            "data": self.data,
            "part": self.what,
            "notes": list(self.notes),
            "examples": self.examples,
            "accuracy": self.score.accuracy,
            "per_client": self.per_client,
            "balanced_accuracy": self.score.balanced,
            "loss": self.score.loss,
            "classes": list(self.trained.classes),
            "per_class": [None if share != share else share for share in self.score.per_class.tolist()],
            "examples_per_class": [int(count) // self.models for count in self.score.count],
            "leaks": list(self.trained.config.leaks_on),
        }


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says about each example, in the order of the data."""

    trained: Trained
    rows: Sequence[str]  # where each example is in its part: a position from 0, or an image's path
    labels: list[str]
    probabilities: Tensor  # [n, C]; the mean over clients, where each has a model of its own
    per_client: dict[int, list[str]]  # the label that each client's own model gives, where several were asked
    parts: Sequence[str] | None = None  # train or test, where the data has parts of its own
    ids: tuple[str, Sequence[str]] | None = None  # a column of the table that was carried along: its name and cells
    notes: tuple[str, ...] = ()  # what one should know beside the answers

    def to_csv(self) -> str:
        """A line per example: where it is, the likeliest class, the probability of each, and what each client says."""
        answers = [
            "label",
            *(f"p_{name}" for name in self.trained.classes),
            *(f"client_{one}" for one in self.per_client),
        ]
        places: dict[str, Sequence[str]] = {"row": self.rows}
        if self.parts is not None:
            places["part"] = self.parts
        if self.ids is not None:
            name, cells = self.ids
            places[f"id_{name}" if name in (*places, *answers) else name] = cells
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*places, *answers])
        for at, shares in enumerate(self.probabilities.tolist()):
            said = (labels[at] for labels in self.per_client.values())
            where = (column[at] for column in places.values())
            writer.writerow([*where, self.labels[at], *(f"{share:.6g}" for share in shares), *said])
        return text.getvalue()


@isolated()
def evaluate(run_dir: str | Path, data: str, *, client: int | None = None, trust: bool = False) -> Evaluation:
    """Score the model of a finished run on a data set, a file, a folder of images or what a function returns.

    Where clients have models of their own, all of those are scored, or one client's. The run's own data, known by its
    content, is judged by its test part; other data by the test part that it has of its own, or else by all of it. No
    feature noise is laid over it.
    """
    trained = open_run(run_dir, trust=trust)
    trusted.given("dataset", data)
    source = read(data, _expected(trained))
    asked = _own_test(trained, source)
    notes: tuple[str, ...] = ()
    if asked is not None:
        what = TEST
    else:
        part = "test" if len(source.read.parts) > 1 else next(iter(source.read.parts))
        asked = _asked(trained, data, source.read.parts[part], source.read.classes)
        what = OTHER_TEST if part == "test" else EVERYTHING
        notes = (*_notes(trained, data, source), *_changed(trained, data, what))
    if asked.y is None:
        columns = trained.data.columns
        lacking = f", which would be in the column {columns.label!r}" if columns and _is_table(data) else ""
        raise ConfigError(
            f"{data} has no labels{lacking}, so nothing can be scored. Use `fnrfl predict`, or add the labels."
        )
    scores = {
        one: score(trained.net, model, asked.x, asked.y, len(trained.classes)) for one, model in trained.models(client)
    }
    per_client = {one: found.accuracy for one, found in scores.items() if one is not None}
    return Evaluation(trained, data, what, pooled(list(scores.values())), per_client or None, notes)


@isolated()
def predict(
    run_dir: str | Path, data: str, *, client: int | None = None, id_column: str | None = None, trust: bool = False
) -> Prediction:
    """What the model of a finished run says about every example, in their order; the data may have no labels.

    Where clients have models of their own, it is the mean of their probabilities, or what one client's model says.
    `id_column` is carried along from a table.
    """
    trained = open_run(run_dir, trust=trust)
    trusted.given("dataset", data)
    if id_column is not None and not _is_table(data):
        raise ConfigError(
            f"{data} is no table, so it has no column {id_column!r}. Leave --id out, or give a .csv file."
        )
    source = read(data, replace(_expected(trained), carried=id_column))
    asked = {name: _asked(trained, data, part, source.read.classes) for name, part in source.read.parts.items()}
    x = torch.cat([one.x for one in asked.values()]) if len(asked) > 1 else next(iter(asked.values())).x
    per_client: dict[int, list[str]] = {}
    total, count = torch.zeros(len(x), len(trained.classes), dtype=trained.net.dtype), 0
    for one, model in trained.models(client):
        shares = probabilities(trained, model, x)
        total, count = total.add_(shares), count + 1
        if one is not None and client is None:
            per_client[one] = _labels_of(trained, shares)
    mean = total / count
    carried = next(iter(asked.values())).carried
    return Prediction(
        trained,
        [row for one in asked.values() for row in one.rows],
        _labels_of(trained, mean),
        mean,
        per_client,
        parts=None if ALL in asked else [name for name, one in asked.items() for _ in one.rows],
        ids=None if id_column is None or carried is None else (id_column, carried),
        notes=(*_notes(trained, data, source), *_other_data(trained, data, source)),
    )


@torch.no_grad()
def probabilities(trained: Trained, model: State, x: Tensor) -> Tensor:
    """The probability of each class for each example, [n, C]."""
    shares = []
    for xs in x.split(WHOLE):
        xs = trained.net.laid_out(scaled(xs, trained.net.input_dtype))
        logits = trained.net.look(model.params, model.buffers, xs).logits
        shares.append(logits[:, : len(trained.classes)].softmax(1))  # outputs beyond the classes mean nothing
    return torch.cat(shares)


def _labels_of(trained: Trained, shares: Tensor) -> list[str]:
    return [trained.classes[index] for index in shares.argmax(1).tolist()]


def open_run(run_dir: str | Path, *, trust: bool = False) -> Trained:
    """The model of a finished run; `trust` allows code that its config.toml names and that was never allowed before."""
    result = runs.load(run_dir, trust=trust)
    server = State(*result.net.pack(result.weights))
    return Trained(Path(run_dir), result.config, result.net, server, result.client_models, result.data)


# -- the run's data, and other data ------------------------------------------------------------------------------------


def _expected(trained: Trained) -> Expected:
    return Expected(trained.data.columns, num_inputs=prod(trained.data.input_shape), labelled=False)


def _own_test(trained: Trained, source: Source) -> Asked | None:
    """The test part of the run's own data, if that is what was given; only data of the same size is hashed."""
    facts = trained.data
    if facts.examples is not None and facts.examples != source.num_examples:
        return None
    try:
        dataset = source.dataset()
    except ConfigError:  # no run could have been made of it
        return None
    if (dataset.checksum, dataset.classes) != (facts.sha256, facts.classes):
        return None
    return Asked(dataset.test.x, dataset.test.y, rows=())


def _changed(trained: Trained, data: str, what: str) -> tuple[str, ...]:
    """What to say of data that has the name of the run's own and is not the same."""
    path, own = Path(data).expanduser(), Path(trained.config.dataset).expanduser()
    named_alike = data == trained.config.dataset or (path.exists() and path.name == own.name)
    if not named_alike and not (path.exists() and str(path.resolve()) == trained.data.source):
        return ()
    return (
        f"{data} has changed since the run, or is another file of that name: it is not the data that the run was made "
        f"with. It is judged by {'its own test part' if what == OTHER_TEST else 'all of its examples'}, which may hold "
        "examples that the model was trained on.",
    )


def _other_data(trained: Trained, data: str, source: Source) -> tuple[str, ...]:
    """A note if data has the name of the run's own and is not the same."""
    said = _changed(trained, data, EVERYTHING)
    if not said or _own_test(trained, source) is not None:
        return ()
    return (f"{data} has changed since the run, or is another file of that name.",)


def _is_table(data: str) -> bool:
    return Path(data).suffix.lower() == ".csv"


def _notes(trained: Trained, data: str, source: Source) -> tuple[str, ...]:
    """What one should know about how the data was taken."""
    said = list(source.read.notices)
    columns = trained.data.columns
    if _is_table(data) and columns is None:
        said.append(f"The run has no names of columns, so the columns of {data} are taken by position.")
    if not _is_table(data) and columns is not None:
        listed = ", ".join(columns.inputs[:6]) + (", ..." if len(columns.inputs) > 6 else "")
        said.append(f"{data} has no names of columns, so they are taken in the order of the run's: {listed}.")
    return tuple(said)


def _asked(trained: Trained, data: str, part: Examples, classes: Sequence[str] | None) -> Asked:
    """Examples held against what the model was trained on."""
    x = _alike(tensor(part.x), trained, data)
    check_fits(x, trained.net.input_dtype, data)
    check_tokens(trained.net, x, data)
    y = None if part.y is None else _numbered(part.y, classes, trained, data)
    return Asked(x, y, part.names or [str(row) for row in range(len(x))], part.carried)


def _alike(x: Tensor, trained: Trained, data: str) -> Tensor:
    """Examples of the kind that the model was trained on; a table's columns are put into its shape."""
    shape = trained.data.input_shape
    pixels = x.dtype == torch.uint8
    if not pixels and x.ndim == 2 and not trained.data.pixels and x.shape[1] == prod(shape):
        x = x.reshape(-1, *shape)
    if tuple(x.shape[1:]) != shape or pixels != trained.data.pixels:
        kinds = ["pixels" if bytes_ else "numbers" for bytes_ in (pixels, trained.data.pixels)]
        raise CompatibilityError(
            f"{data} has examples of {kinds[0]} {list(x.shape[1:])}, and the model was trained on {kinds[1]} "
            f"{list(shape)}; they must be alike. Prepare the data in the same way."
        )
    return x


def _numbered(y: np.ndarray, classes: Sequence[str] | None, trained: Trained, data: str) -> Tensor:
    """Labels as numbers of the model's classes, matched by name where there are names."""
    values, places = np.unique(y, return_inverse=True)
    known = trained.classes
    if y.dtype.kind == "U":
        names = [str(value) for value in values]
    elif classes is not None:
        if int(values[-1]) >= len(classes):
            raise ConfigError(
                f"{data} has the label {int(values[-1])}, but names {len(classes)} classes; labels must be below that. "
                "Name every class or correct the label."
            )
        names = [str(classes[value]) for value in values]
    elif all(re.fullmatch(r"-?\d+", name) for name in known):
        if sorted(known, key=int) != list(known):
            raise CompatibilityError(
                f"{data} numbers its classes, and those of the model are called {', '.join(known)}: the label "
                f"{int(values[0])} may mean the class {str(values[0])!r} or the class at that place. Add an array "
                "`classes`."
            )
        names = [str(value) for value in values]
    elif int(values[-1]) < len(known):
        names = [known[value] for value in values]  # numbers without names stand for places
    else:
        raise CompatibilityError(
            f"{data} has the label {int(values[-1])}, and the model knows {len(known)} classes, numbered from 0."
            " Correct the labels."
        )
    number = {name: index for index, name in enumerate(known)}
    if unknown := [name for name in names if name not in number]:
        raise CompatibilityError(
            f"{data} has the class {unknown[0]!r}, which the model does not know; its classes are "
            f"{', '.join(known)}. Rename the class or leave those examples out."
        )
    return tensor(np.array([number[name] for name in names], dtype=np.int64)[places])
