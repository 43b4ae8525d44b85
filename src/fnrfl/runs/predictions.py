"""The answers of evaluate and predict: how good a run's models are on some data, or a label for each example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnrfl.core.words import counted
from fnrfl.rundir.outputs import csv_text
from fnrfl.runs.metrics import OWN
from fnrfl.runs.model_score import Score
from fnrfl.runs.quality import TEST_METRICS, recall_by_class
from fnrfl.runs.result import Result

TEST = "the test part"  # of the run's own data, which the model has not seen
OTHER_TEST = "the test part of other data"
EVERYTHING = "all examples"
WITHOUT_NAME = "The data"  # what sentences that begin with data call what was passed in


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
        """How many models were asked about each example."""
        return 1 if self.per_client is None else len(self.per_client)

    @property
    def examples(self) -> int:
        """How many examples there were."""
        return len(self.score.labels) // self.models

    @property
    def where(self) -> str:
        """Which examples of which data, and whose models were asked, in words."""
        data = "the data" if self.data == WITHOUT_NAME else self.data
        other = self.what == OTHER_TEST
        said = f"the test part of {data}, which is not the run's data" if other else f"{self.what} of {data}"
        if self.per_client is None:
            return said
        clients = list(self.per_client)
        whose = f"model of client {clients[0]}" if len(clients) == 1 else f"mean over {len(clients)} clients' models"
        return f"{said}; {whose}"

    def summary(self) -> dict[str, Any]:
        """The scores as one JSON object."""
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
        """A line per example: where it is, the likeliest class, the probability of each, and what each client says."""
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
