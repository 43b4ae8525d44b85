"""A trainer behind bytes: what a Ray actor does for some clients of a chunk, and how a request becomes parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fnrfl.core import trees
from fnrfl.core.errors import out_of_memory, sentence
from fnrfl.core.messages import Failure, MeasureRequest, TrainRequest
from fnrfl.core.trees import Tree
from fnrfl.core.values import State
from fnrfl.engines.trainer import Trainer
from fnrfl.engines.wire import from_bytes, to_bytes


class ActorTrainer:
    """Trains the clients of a part. All that it keeps is what the parts of a task have in common, and the data."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._name, self._common = "", (None, {})  # type: str, tuple[State | None, Tree]

    def answer(self, name: str, common: Callable[[], bytes], part: bytes) -> bytes:
        """The answer to a part of a request; `common` fetches what all parts of that name have in common.

        Whoever runs out of memory raises a MemoryError, since another actor may have more. All other errors are the
        client's, wherever it is trained, and are answered as a `Failure`.
        """
        if name != self._name:
            self._common, self._name = from_bytes(common()), name
        try:
            return to_bytes(self._answer(*from_bytes(part)))
        except Exception as error:
            if out_of_memory(error):
                raise MemoryError(sentence(error)) from None
            return to_bytes(Failure.of(error))

    def _answer(self, request: Any, held: list[State] | None, memory: Tree, together: int) -> Any:
        model, shared = self._common
        if isinstance(request, MeasureRequest):
            row = {client: m for m, client in enumerate(request.clients)}
            at = request.at if model is None else model
            return self.trainer.measure(replace(request, at=at), lambda client: (held or [])[row[client]])
        task = replace(request.task, start=request.task.start if model is None else model, shared=shared)
        runner = self.trainer.runner
        runner.expected = replace(runner.expected, together=together)
        models = None if held is None else trees.stacked(held)
        trained = self.trainer.train(replace(request, task=task), models, memory)
        return trained.replies, trained.memory, trained.not_finite


def common_and_part(
    request: TrainRequest | MeasureRequest,
) -> tuple[State | None, Tree, TrainRequest | MeasureRequest]:
    """(the model that all clients are sent, the tensors that all of them are sent, the request without either)."""
    model = request.at if isinstance(request, MeasureRequest) else request.task.start
    if model is not None and model.params.ndim == 2:
        model = None  # each client has a row of its own
    if isinstance(request, MeasureRequest):
        return model, {}, request if model is None else replace(request, at=None)
    start = request.task.start if model is None else None
    return model, request.task.shared, replace(request, task=replace(request.task, start=start, shared={}))
