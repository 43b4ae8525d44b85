"""Bytes and seconds of any engine, counted where messages pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from fnrfl.core.types import Data, Decorator, Engine, LocalTask, Probe, Replies, State, Tree

T = TypeVar("T")


def wire_bytes(tensor: Tensor) -> int:
    """Bytes on the wire: floating numbers travel as float32 whatever they were computed in, integers as they are."""
    return tensor.numel() * (4 if tensor.is_floating_point() else tensor.element_size())


def _tree(tree: Tree) -> int:
    return sum(wire_bytes(v) for v in tree.values())


def _vectors(tree: Tree, axes: int) -> Tree:
    """Without what is a single number for a client: that is a header."""
    return {k: v for k, v in tree.items() if v.ndim > axes}


class Metered(Decorator):
    """An engine that knows what crossed, by phase and direction, and how long each phase took.

    `bytes[phase]["down" | "up" | "headers"]`: models, vectors and answers; headers are ids, counts, step totals and
    single numbers.
    A model that was sent to a client in this round is not sent again. `tell` hears the name of each phase as it begins.
    """

    def __init__(
        self,
        engine: Engine,
        tell: Callable[[str], None] = lambda phase: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(engine)
        self.tell, self.clock = tell, clock
        self.begin()

    def begin(self) -> None:
        """Start counting a round."""
        self.bytes: dict[str, dict[str, int]] = {}
        self.seconds: dict[str, float] = {}
        self._sent: list[tuple[State, set[int]]] = []  # models, and the clients that have each

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        self.tell(task.purpose)
        count = self.bytes.setdefault(task.purpose, {"down": 0, "up": 0, "headers": 0})
        count["down"] += len(cohort) * _tree(_vectors(task.shared, 0)) + _tree(_vectors(task.own, 1))
        count["down"] += self._model(cohort, task.start, task.never_sent)
        scalars = sum(v.ndim == 0 for v in task.shared.values()) + sum(v.ndim == 1 for v in task.own.values())
        count["headers"] += len(cohort) * 4 * scalars
        chunks = self.engine.stream(cohort, task)
        while True:
            with self._timed(task.purpose):
                replies = next(chunks, None)
            if replies is None:
                return
            count["up"] += _tree(replies.extras)
            if task.send_model:
                whole = wire_bytes(replies.params) + _tree(replies.buffers)
                count["up"] += whole - len(replies.clients) * self._staying(task.never_sent)
            facts = (replies.clients, replies.examples, replies.steps, replies.travel, replies.loss)
            count["headers"] += sum(wire_bytes(fact) for fact in facts)
            yield replies
            del replies

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public", at: State | None = None) -> Tree:
        self.tell("measure")
        with self._timed("measure"):
            answers = self.engine.measure(cohort, probe, data=data, at=at)
        count = self.bytes.setdefault("measure", {"down": 0, "up": 0, "headers": 0})
        count["up"] += _tree(answers)
        if probe.asks_model:
            count["down"] += self._model(cohort, at)
        return answers

    def observe(self, cohort: Tensor, probe: Probe, *, data: Data = "public") -> Tree:
        self.tell("observe")
        with self._timed("observe"):
            return self.engine.observe(cohort, probe, data=data)

    def observe_models(self, cohort: Tensor, question: Callable[[Tensor], T]) -> T:
        self.tell("observe")
        with self._timed("observe"):
            return self.engine.observe_models(cohort, question)

    def _model(self, cohort: Tensor, start: State | None, stays: frozenset[str] = frozenset()) -> int:
        """Bytes of the models that go down with a task or a probe."""
        if start is None:
            return 0
        if start.params.ndim == 2:
            return wire_bytes(start.params) + _tree(start.buffers) - len(cohort) * self._staying(stays)
        clients = set(cohort.tolist())
        for model, had in self._sent:
            if start.is_same_model(model):
                new = clients - had
                had |= clients
                break
        else:
            new = clients
            self._sent.append((start, clients))
        return len(new) * (wire_bytes(start.params) + _tree(start.buffers) - self._staying(stays))

    def _staying(self, names: frozenset[str]) -> int:
        """Bytes of a model's parameters and buffers that never travel."""
        if not names:
            return 0
        params, buffers = self.engine.net.flatten()
        mine = self.engine.net.mask(names)
        return wire_bytes(params[mine]) + _tree({k: v for k, v in buffers.items() if k in names})

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = self.clock()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self.clock() - began
