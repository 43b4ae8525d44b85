"""Bytes and seconds of any engine, counted where messages pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch import Tensor

from fnrfl.core.types import Data, Decorator, Engine, LocalTask, Probe, Replies, Tree


def wire_bytes(tensor: Tensor) -> int:
    """Bytes on the wire: floating numbers travel as float32 whatever they were computed in, integers as they are."""
    return tensor.numel() * (4 if tensor.is_floating_point() else tensor.element_size())


def _tree(tree: Tree) -> int:
    return sum(wire_bytes(v) for v in tree.values())


class Metered(Decorator):
    """An engine that knows what crossed, by phase and direction, and how long each phase took.

    `bytes[phase]["down" | "up" | "headers"]`: models, vectors and answers; headers are ids, counts and step totals.
    A model that was sent to a client in this round is not sent again. `tell` hears the name of each phase as it begins.
    """

    def __init__(self, engine: Engine, tell: Callable[[str], None] = lambda phase: None) -> None:
        super().__init__(engine)
        self.tell = tell
        self.begin()

    def begin(self) -> None:
        """Start counting a round."""
        self.bytes: dict[str, dict[str, int]] = {}
        self.seconds: dict[str, float] = {}
        self._sent: list[tuple[object, set[int]]] = []

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        self.tell(task.purpose)
        count = self.bytes.setdefault(task.purpose, {"down": 0, "up": 0, "headers": 0})
        count["down"] += len(cohort) * _tree(task.shared) + _tree(task.own) + self._model(cohort, task)
        chunks = self.engine.stream(cohort, task)
        while True:
            began = time.perf_counter()
            replies = next(chunks, None)
            self._tick(task.purpose, began)
            if replies is None:
                return
            count["up"] += _tree(replies.extras)
            if task.upload:
                count["up"] += wire_bytes(replies.params) + _tree(replies.buffers)
            facts = (replies.clients, replies.examples, replies.steps, replies.travel, replies.loss)
            count["headers"] += sum(wire_bytes(fact) for fact in facts)
            yield replies

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public") -> Tree:
        self.tell("measure")
        began = time.perf_counter()
        answers = self.engine.measure(cohort, probe, data=data)
        self._tick("measure", began)
        self.bytes.setdefault("measure", {"down": 0, "up": 0, "headers": 0})["up"] += _tree(answers)
        return answers

    def observe(self, cohort: Tensor, probe: Probe, *, data: Data = "public") -> Tree:
        self.tell("observe")
        began = time.perf_counter()
        answers = self.engine.observe(cohort, probe, data=data)
        self._tick("observe", began)
        return answers

    def _model(self, cohort: Tensor, task: LocalTask) -> int:
        """Bytes of the models that go down with a task."""
        if task.start is None:
            return 0
        if task.start.params.ndim == 2:
            return wire_bytes(task.start.params) + _tree(task.start.buffers)
        clients = set(cohort.tolist())
        for model, had in self._sent:
            if model is task.start.params:
                new = clients - had
                had |= clients
                break
        else:
            new = clients
            self._sent.append((task.start.params, clients))
        return len(new) * (wire_bytes(task.start.params) + _tree(task.start.buffers))

    def _tick(self, phase: str, began: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
