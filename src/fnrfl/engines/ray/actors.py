"""Ray actors that train clients: asked side by side, replaced when they die or hang, let go when the run ends."""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch

from fnrfl.core import trees
from fnrfl.core.errors import FnrflError, out_of_memory, sentence
from fnrfl.core.messages import Failure, MeasureRequest
from fnrfl.core.options import NetworkOptions
from fnrfl.engines.ray.session import LOOK, Need, check_room, connected, last_line, why_not_answered
from fnrfl.engines.trainer import Trainer
from fnrfl.engines.wire import from_bytes, from_parts, to_bytes, to_parts
from fnrfl.process import filters_lock, isolated

log = logging.getLogger("fnrfl")
Message = list[Any]  # the JSON as bytes, then an array for each tensor
STARTS = 3  # of actors that die before they have their data, one after another
SECONDS_FOR_ROOM = 60.0  # seconds until it is said that Ray has no room for an actor


class Actor:
    """What runs in a Ray actor: a trainer that is made there, with its data. No client's state stays in it."""

    def __init__(self) -> None:
        self._settings = ExitStack()
        self._trainer: Trainer | None = None

    def get_ready(self, make: Callable[[bytes], Trainer], described: bytes) -> bytes:
        """Make the trainer, and load its data; the answer is None, or a `Failure`."""
        self._settings.close()
        self._settings.enter_context(isolated())  # until another trainer is made
        try:
            self._trainer = make(described)
        except Exception as error:
            return to_bytes(Failure.of(error))
        return to_bytes(None)

    def answer(self, common: Message, part: Message) -> Message:
        """The answer to a part; `common` is what all parts of a task are sent, in memory that the actors share."""
        assert self._trainer is not None
        return answer_part(self._trainer, common, part)


def answer_part(trainer: Trainer, common: Message, part: Message) -> Message:
    """The answer to a part of a request.

    Whoever runs out of memory raises a MemoryError, since another actor may have more. All other errors are the
    client's, wherever it is trained, and are answered as a `Failure`.
    """
    try:
        (model, shared), (request, held, memory) = from_message(common), from_message(part)
        if isinstance(request, MeasureRequest):
            models = dict(zip(request.clients, held or [], strict=False))  # what each client holds
            return to_message(trainer.measure(replace(request, at=model or request.at), models.__getitem__))
        task = replace(request.task, start=model or request.task.start, shared=shared)
        trained = trainer.train(replace(request, task=task), None if held is None else trees.stacked(held), memory)
        return to_message((trained.replies, trained.memory, trained.not_finite))
    except Exception as error:
        if out_of_memory(error):
            raise MemoryError(sentence(error)) from None
        return to_message(Failure.of(error))


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


@dataclass(frozen=True)
class _SentRows:
    """Some rows of a request on their way."""

    rows: slice
    tried: int = 0
    actor: Any = None
    until: float = inf


class RayActors:
    """`count` actors, each with a trainer that `make(described)` builds in it; `make` is a function of a module.

    A context: inside, the actors are there. Outside, the first request starts them, and `close` lets them go.
    """

    def __init__(
        self, count: int, network: NetworkOptions, make: Callable[[bytes], Trainer], described: Callable[[], bytes]
    ) -> None:
        self.count, self._network, self._make, self._described = count, network, make, described
        self._open = ExitStack()
        self._ray: Any = None
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}  # what `get_ready` will answer -> the actor
        self._failed_starts, self._since, self._told = 0, 0.0, False  # `_since`: when an actor was there last

    # -- beginning and end --------------------------------------------------------------------------------------------
    def __enter__(self) -> RayActors:
        """Start the actors, and wait until each has its data."""
        if self._ray is None:
            try:
                self._ray = self._open.enter_context(connected(self._network.address, self.count * self._network.cpus))
                check_room(self._ray, f"engine.threads = {self.count} Ray actors need", self._needs(self.count))
                self._prepare([self._new_actor() for _ in range(self.count)])
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the actors go, and Ray too, if it was started for this run."""
        self._open.close()
        self._ray, self._idle, self._starting = None, [], {}

    def _new_actor(self) -> Any:
        # Not started again by Ray: that counts a call that comes meanwhile as one of its tries.
        kind = self._ray.remote(Actor).options(
            num_cpus=self._network.cpus, num_gpus=self._network.gpus, max_restarts=0, max_task_retries=0
        )
        actor = kind.remote()
        self._open.callback(self._end, actor)
        return actor

    def _end(self, actor: Any) -> None:
        if self._ray.is_initialized():  # else it would start anew to do this
            with suppress(Exception):  # it may be gone already
                self._ray.kill(actor, no_restart=True)

    def _prepare(self, actors: Sequence[Any]) -> None:
        """Have actors load this run's data, and wait until all have."""
        self._described_there = self._ray.put(self._described())
        self._idle, self._failed_starts, self._since, self._told = [], 0, time.monotonic(), False
        for actor in actors:
            self._start(actor)
        while self._starting:
            self._next_answers({}, LOOK)

    def _start(self, actor: Any) -> None:
        self._starting[actor.get_ready.remote(self._make, self._described_there)] = actor

    def _replace(self, actor: Any) -> None:
        self._end(actor)
        self._start(self._new_actor())

    def _needs(self, actors: int) -> list[Need]:
        smaller = "Set a smaller engine.threads or" if actors > 1 else "Set a smaller"
        each = (("CPU", "network.cpus", self._network.cpus), ("GPU", "network.gpus", self._network.gpus))
        return [Need(what, actors * count, f"{key} each", f"{smaller} {key}") for what, key, count in each]

    def _greet(self, answer: Any) -> None:
        """An actor has its data, or has failed to get it."""
        actor = self._starting.pop(answer)
        try:
            failure = from_bytes(self._ray.get(answer))
        except self._ray.exceptions.RayTaskError as error:
            raise FnrflError(
                f"A Ray actor could not begin: {last_line(error)} Install the same version of fnrfl on every machine."
            ) from None
        except self._ray.exceptions.RayError as error:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                raise FnrflError(
                    f"Ray actors die while they load the run's data, {STARTS} times one after another: "
                    f"{why_not_answered(error)} Set a smaller engine.threads, or give each machine more memory."
                ) from None
            self._replace(actor)
            return
        if failure is not None:
            raise failure.error()
        self._failed_starts = 0
        self._idle.append(actor)

    # -- work ---------------------------------------------------------------------------------------------------------
    def put(self, message: Message) -> object:
        """Send what many parts have in common to where every actor can read it."""
        self.__enter__()
        return self._ray.put(message)

    def ask(
        self, common: object, message: Callable[[slice], Message], parts: Sequence[slice], seconds: float | None
    ) -> Iterator[tuple[slice, Message | str]]:
        """(rows, answer) for parts of the rows, begun in their order, as they come; a text says why there is none.

        A part that has no answer after `seconds`, or whose actor died, is tried again, row by row: who has killed an
        actor does not take the others with it once more.
        """
        waiting, running = deque(_SentRows(part) for part in parts), dict[Any, _SentRows]()
        self._since, self._told = time.monotonic(), False
        try:
            while waiting or running:
                while waiting and self._idle:
                    part, actor = waiting.popleft(), self._idle.pop()
                    sent = actor.answer.remote(common, message(part.rows))
                    running[sent] = replace(part, actor=actor, until=time.monotonic() + (seconds or inf))
                for part, answer, reason in self._answers(running, seconds):
                    if answer is not None:
                        yield part.rows, answer
                    elif part.tried < self._network.retries or self._network.on_missing == "wait":
                        log.info(f"A part of {part.rows.stop - part.rows.start} clients is sent again: {reason}")
                        each = range(part.rows.start, part.rows.stop)
                        waiting.extend(_SentRows(slice(row, row + 1), part.tried + 1) for row in each)
                    else:
                        yield part.rows, reason
        finally:
            for part in running.values():  # nobody wants their answers any more
                self._replace(part.actor)

    def _answers(
        self, running: dict[Any, _SentRows], seconds: float | None
    ) -> Iterator[tuple[_SentRows, Message | None, str]]:
        """(part, answer, why there is none) for the next parts that come back, or are late."""
        first = min((part.until for part in running.values()), default=inf)
        for answer in self._next_answers(running, min(LOOK, max(0.0, first - time.monotonic()))):
            part = running.pop(answer)
            try:
                got = self._ray.get(answer)
            except self._ray.exceptions.RayError as error:
                self._replace(part.actor)
                yield part, None, why_not_answered(error)
            else:
                self._idle.append(part.actor)
                yield part, got, ""
        for answer, part in [*running.items()]:
            if part.until <= time.monotonic():
                del running[answer]
                self._replace(part.actor)
                yield part, None, f"it did not answer within {seconds:g} seconds."

    def _next_answers(self, running: dict[Any, _SentRows], timeout: float) -> list[Any]:
        """The next answers to parts; actors that have their data meanwhile are idle.

        Say it if no actor has been there for long, and stop if none can be: machines of the cluster may be gone.
        """
        done, _ = self._ray.wait([*running, *self._starting], num_returns=1, timeout=timeout)
        now = time.monotonic()
        if done or running:
            self._since, self._told = now, False
        elif now - self._since > SECONDS_FOR_ROOM:
            if not self._told:
                log.warning(f"No Ray actor is there: {len(self._starting)} wait for room, or for their data.")
            self._since, self._told = now, True
            if self._network.on_missing != "wait":
                check_room(self._ray, "Ray actors need", self._needs(1))
        for answer in done:
            if answer in self._starting:
                self._greet(answer)
        return [answer for answer in done if answer in running]
