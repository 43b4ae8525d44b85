"""Clients trained elsewhere: a chunk goes to Ray actors in parts and comes back in the order of the request.

It is handed all that a client remembers and holds, and keeps nothing: `KeptClients` is around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fnrfl.core import trees
from fnrfl.core.errors import MissingClients
from fnrfl.core.messages import Failure, MeasureRequest, TrainRequest
from fnrfl.core.options import NetworkOptions
from fnrfl.core.trees import Tree
from fnrfl.core.values import Replies, State
from fnrfl.engines.ray.actors import Message, RayActors, from_message, to_message
from fnrfl.engines.trainer import Trained, Trainer

PARTS_PER_ACTOR = 16  # of a chunk, about: actors that are done early take another, and crowds share messages


class RayTrainer:
    """A `ClientTrainer` whose clients train in actors; the server's own work is done by `here`."""

    def __init__(self, here: Trainer, actors: RayActors, network: NetworkOptions, *, in_groups: bool = False) -> None:
        """With `in_groups` the clients of a part step together, so that an actor gets as many as it can."""
        self.initial, self.pool, self.runner = here.initial, here.pool, here.runner
        self._actors, self._network, self._in_groups = actors, network, in_groups
        self._examples = [int(n) for n in here.feed.examples.tolist()]
        self._sent: tuple[State | None, Tree, object] | None = None  # what the actors were sent last

    def train(self, request: TrainRequest, held: State | None, memory: Tree) -> Trained:
        task, seconds = request.task, self._network.deadline(private=request.task.data == "private")
        model = _for_all(task.start)
        rest = replace(request, task=replace(task, start=task.start if model is None else None, shared={}))
        models = None if held is None else [trees.rows(held, m) for m in range(len(request.clients))]
        answers, missing = self._ask(rest, self._put(model, task.shared), models, memory, seconds)
        answers = answers or [(Replies.of_nobody(self.initial), {}, {})]
        replies, memories, not_finite = zip(*answers, strict=True)
        went_wrong = {client: step for part in not_finite for client, step in part.items()}
        return Trained(trees.joined(replies), trees.joined(memories), went_wrong, missing)

    def measure(self, request: MeasureRequest, held: Callable[[int], State]) -> Tree:
        asked, model = request.at is None and request.probe.asks_model, _for_all(request.at)
        models = [held(client) for client in request.clients] if asked else None
        rest = request if model is None else replace(request, at=None)
        answers, missing = self._ask(rest, self._put(model, {}), models, {}, self._network.measure_deadline or None)
        if missing:
            raise MissingClients(missing, round=request.round + 1, stage="measure")
        return trees.joined(answers)

    def _ask(
        self,
        request: TrainRequest | MeasureRequest,
        common: object,
        held: list[State] | None,
        memory: Tree,
        seconds: float | None,
    ) -> tuple[list[Any], dict[int, str]]:
        """(the answers of all parts in the order of the request, why other clients have none)."""

        def message(where: slice) -> Message:
            return to_message((request.rows(where), held and held[where], trees.rows(memory, where)))

        answers, missing, clients = dict[int, Any](), dict[int, str](), request.clients
        for where, got in self._actors.ask(common, message, self._parts(clients, seconds), seconds):
            if isinstance(got, str):
                missing |= dict.fromkeys(clients[where], got)
            elif isinstance(answer := from_message(got), Failure):
                raise answer.error()
            else:
                answers[where.start] = answer
        return [answers[first] for first in sorted(answers)], missing

    def _put(self, model: State | None, shared: Tree) -> object:
        """What all clients of a task are sent; chunks of one task have the same objects, which travel once."""
        if self._sent is None or self._sent[0] is not model or self._sent[1] is not shared:
            bare = None if model is None else State(model.params, model.buffers)
            self._sent = (model, shared, self._actors.put(to_message((bare, shared))))
        return self._sent[2]

    def _parts(self, clients: list[int], seconds: float | None) -> list[slice]:
        """The rows of each part: one client, if each has its own time, unless clients step together.

        Those with most examples begin.
        """
        rows, count = len(clients), self._actors.count
        width = 1 if seconds is not None else max(1, rows // (PARTS_PER_ACTOR * count))
        width = -(-rows // count) if self._in_groups else width
        parts = [slice(first, min(first + width, rows)) for first in range(0, rows, width)]
        examples = [self._examples[client] for client in clients]
        return sorted(parts, key=lambda part: -sum(examples[part.start : part.stop]))


def _for_all(model: State | None) -> State | None:
    """The model, unless each client has a row of its own."""
    return None if model is None or model.params.ndim == 2 else model
