"""The requests of the agreed method: a node answers these and no others."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.errors import sentence
from fnrfl.core.messages import MeasureRequest, TrainRequest
from fnrfl.core.values import SERVER, State
from fnrfl.engines.rehearsal import Rehearsal
from fnrfl.federation.messages import model_alone

log = logging.getLogger("fnrfl")
MOST_REHEARSALS = 100  # rounds that may be played to find one request; the next search goes on from there


def alike(one: Any, agreed: Any) -> bool:
    """Say whether a value is the agreed one; of a tensor shape and type count, and not what is in it."""
    if isinstance(one, float | int) and isinstance(agreed, float) and not isinstance(one, bool):
        return math.isclose(one, agreed, rel_tol=1e-9)  # two machines may round a power differently
    if type(one) is not type(agreed):
        return False
    if isinstance(one, Tensor):
        return bool(one.shape == agreed.shape and one.dtype == agreed.dtype)
    if one is None or isinstance(one, bool | int | str | frozenset):
        return bool(one == agreed)
    mine, theirs = _parts(one), _parts(agreed)
    return mine.keys() == theirs.keys() and all(alike(value, theirs[name]) for name, value in mine.items())


def _parts(value: Any) -> dict[Any, Any]:
    """Return the parts of a dict, a sequence or an object, by name or position."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return {field.name: getattr(value, field.name) for field in fields(value)} if is_dataclass(value) else {}


class AgreedRequests:
    """All requests to one client that the agreed method makes in a round, by rehearsing it.

    A round is rehearsed from the state after the rounds before it and from the method's first state, because a client
    may be new, and with all clients of a cohort and with fewer, because some may not answer.
    """

    def __init__(self, rehearsal: Rehearsal, client: int, *, cohort: int, rounds: int) -> None:
        """`cohort` clients take part in a round."""
        self.rehearsal, self.client, self.cohort, self.rounds = rehearsal, client, cohort, rounds
        self._round = -1
        self._known: list[object] = []
        self._more: Iterator[list[object]] = iter(())  # what each rehearsal adds

    def __contains__(self, request: object) -> bool:
        t = getattr(request, "round", None)
        if type(t) is not int or t not in range(self.rounds):
            return False
        if t != self._round:
            self._enter(t)
        new = self._known
        for _ in range(MOST_REHEARSALS):
            if any(alike(request, one) for one in new):
                return True
            if (more := next(self._more, None)) is None:
                return False
            new = more
            self._known += more
        return any(alike(request, one) for one in new)

    def _enter(self, t: int) -> None:
        if not 0 <= self._round < t:
            self._state = self.rehearsal.algorithm.init(self.rehearsal.net)
            if t:
                self._state = self._played(self._state, 0, self.cohort)
        self._round, self._known, self._more = t, [], self._rehearsed(t)

    def _rehearsed(self, t: int) -> Iterator[list[object]]:
        """The requests of round t, a rehearsal at a time; that of the whole cohort comes first."""
        first = self._state
        for state in (first, self.rehearsal.algorithm.init(self.rehearsal.net)):
            for clients in range(self.cohort, 0, -1):
                after = self._played(state, t, clients)
                if state is first and clients == self.cohort:
                    self._state = after
                yield list(self._requests())

    def _played(self, state: State, t: int, clients: int) -> State:
        """Return the state after a round; as it was if the method cannot take so few clients, or begin in round t."""
        self.rehearsal.begin(t)
        try:
            return self.rehearsal.algorithm.round(state, torch.arange(clients), self.rehearsal)
        except Exception as error:
            log.info("round %d was not rehearsed with %d clients: %s", t + 1, clients, sentence(error))
            return state

    def _requests(self) -> Iterator[object]:
        """The requests that were written down, as this client would be sent them."""
        rehearsal, mine = self.rehearsal, [self.client]
        for cohort, task in rehearsal.tasks:
            if int(cohort[0]) == SERVER:
                continue
            one, training = task.rows(slice(0, 1)), task.training or rehearsal.training
            own = trees.mapped(torch.clone, one.own)  # without the rows of the others
            one, epochs = replace(one, start=model_alone(one.start), own=own), training.epochs
            slow = rehearsal.options.stragglers > 0 and task.is_private_training
            for each in range(min(1, epochs) if slow else epochs, epochs + 1):
                yield TrainRequest(mine, rehearsal.round, one, training, [each])
        for cohort, probe, data, at in rehearsal.probes:
            asked = MeasureRequest(cohort.tolist(), rehearsal.round, probe, data, at).rows(slice(0, 1))
            yield replace(asked, clients=mine, at=model_alone(asked.at))
