"""A trainer behind messages: what a Ray actor does for some clients of a chunk, and how a request becomes parts.

A message is bytes and plain arrays, which processes of one machine read where they lie in Ray's memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fnrfl.core import trees
from fnrfl.core.errors import out_of_memory, sentence
from fnrfl.core.messages import Failure, MeasureRequest, TrainRequest
from fnrfl.core.trees import Tree
from fnrfl.core.values import State
from fnrfl.engines.trainer import Trainer
from fnrfl.engines.wire import from_parts, to_parts
from fnrfl.process import filters_lock

Message = list[Any]  # the JSON as bytes, then an array for each tensor


def to_message(value: Any) -> Message:
    """A value as a message."""
    text, tensors = to_parts(value)
    return [text, *(tensor.detach().cpu().contiguous().numpy() for tensor in tensors)]


def from_message(message: Message) -> Any:
    """The inverse of `to_message`; its tensors must not be written to."""
    text, *arrays = message
    with filters_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that arrays in Ray's memory cannot be written to
        return from_parts(text, [torch.from_numpy(array) for array in arrays])


class ActorTrainer:
    """Trains the clients of a part. All that it keeps is what the parts of a task have in common, and the data."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._name, self._common = "", (None, {})  # type: str, tuple[State | None, Tree]

    def answer(self, name: str, common: Callable[[], Message], part: Message) -> Message:
        """The answer to a part of a request; `common` fetches what all parts of that name have in common.

        Whoever runs out of memory raises a MemoryError, since another actor may have more. All other errors are the
        client's, wherever it is trained, and are answered as a `Failure`.
        """
        if name != self._name:
            self._common, self._name = from_message(common()), name
        try:
            return to_message(self._answer(*from_message(part)))
        except Exception as error:
            if out_of_memory(error):
                raise MemoryError(sentence(error)) from None
            return to_message(Failure.of(error))

    def _answer(self, request: Any, held: list[State] | None, memory: Tree) -> Any:
        model, shared = self._common
        if isinstance(request, MeasureRequest):
            row = {client: m for m, client in enumerate(request.clients)}
            at = request.at if model is None else model
            return self.trainer.measure(replace(request, at=at), lambda client: (held or [])[row[client]])
        task = replace(request.task, start=request.task.start if model is None else model, shared=shared)
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
