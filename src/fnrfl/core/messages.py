"""What crosses between the server and the side where the clients are: requests down, replies up, all plain values.

ARCHITECTURE.md says where memory, randomness and errors live when a client is in this thread, in another process or on
another machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.engine import Probe
from fnrfl.core.errors import ClientError, FnrflError, sentence
from fnrfl.core.store import ClientMemory
from fnrfl.core.training import Training
from fnrfl.core.trees import Tree
from fnrfl.core.values import Data, LocalTask, Replies, State

RIGHT = "right_at_sites"  # the note in which replies bring what sites have answered right, by client


@dataclass(frozen=True)
class TrainRequest:
    """A task for some clients, with everything about the round that they cannot know."""

    clients: list[int]
    round: int
    task: LocalTask  # its rows are those of `clients`
    training: Training  # at this round's learning rate
    epochs: list[int]  # of each client: a straggler has fewer
    max_steps: int | None = None  # no client takes more; for forecasts

    def rows(self, where: slice) -> TrainRequest:
        """The same request to some of the clients."""
        return replace(self, clients=self.clients[where], epochs=self.epochs[where], task=self.task.rows(where))


@dataclass(frozen=True)
class TrainReply:
    """Answers of a chunk of the clients, in the order of the request."""

    replies: Replies  # of the clients whose numbers are finite
    not_finite: dict[int, int] = field(default_factory=dict)  # every other client -> the step at which it went wrong
    notes: dict[str, Any] = field(default_factory=dict)  # facts for the event log
    missing: dict[int, str] = field(default_factory=dict)  # clients that have not answered, and why
    right: Tensor | None = None  # [1], from a site: how many of its test examples the model that it was sent gets right


@dataclass(frozen=True)
class MeasureRequest:
    """A probe for some clients, about the model that each holds or about `at`."""

    clients: list[int]
    round: int
    probe: Probe
    data: Data
    at: State | None = None  # [P], or [M, P]

    def rows(self, where: slice) -> MeasureRequest:
        """The same request to some of the clients."""
        stacked = self.at is not None and self.at.params.ndim == 2
        return replace(self, clients=self.clients[where], at=trees.rows(self.at, where) if stacked else self.at)

    def model(self, m: int, held: State | None) -> State:
        """The model that client m is asked about."""
        if self.at is None:
            assert held is not None
            return held
        return self.at if self.at.params.ndim == 1 else trees.rows(self.at, m)


@dataclass(frozen=True)
class MemoryRequest:
    """Read a client's memory, or replace it."""

    client: int
    memory: Tree | None = None  # None: read it


@dataclass(frozen=True)
class Failure:
    """What went wrong while a request was answered: an error as a plain value."""

    reason: str
    client: int | None = None
    round: int = 0
    stage: str = ""
    step: int | None = None

    @staticmethod
    def of(error: Exception) -> Failure:
        """The failure that stands for an error."""
        if isinstance(error, ClientError):
            return Failure(error.reason, error.client, error.round, error.stage, error.step)
        return Failure(sentence(error))

    def error(self) -> FnrflError:
        """The error that it stands for."""
        if self.client is None:
            return FnrflError(self.reason)
        return ClientError(self.reason, client=self.client, round=self.round, stage=self.stage, step=self.step)


class ClientSide(Protocol):
    """Where the clients are. The server sends requests and folds replies, and knows nothing else about them."""

    @property
    def memory(self) -> ClientMemory:
        """What clients remember between rounds, for checkpoints and personal models."""
        ...

    def train(self, request: TrainRequest) -> Iterator[TrainReply]:
        """Replies, a chunk of the clients at a time, in the order of the request. Lazy: consume once, to the end."""
        ...

    def measure(self, request: MeasureRequest) -> Tree:
        """Every client's answer, [M, ...]; `MissingClients` where some have not answered."""
        ...


def rows_without(lost: set[int], clients: Tensor) -> Tensor | None:
    """Rows of the clients that are not lost; None if these are all of them."""
    kept = torch.tensor([m for m, client in enumerate(clients.tolist()) if client not in lost], dtype=torch.int64)
    return None if len(kept) == len(clients) else kept
