"""Rounds of a method without training: clients that answer at once, and the requests that they were sent.

A forecast counts them. A node compares each letter with them: it does what the agreed method needs and nothing else.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.engine import Engine, Probe, Step
from fnrfl.core.errors import sentence
from fnrfl.core.feed import Feed
from fnrfl.core.fold import FOLD_ROWS
from fnrfl.core.messages import MeasureRequest, TrainRequest
from fnrfl.core.net import Net
from fnrfl.core.rng import generator
from fnrfl.core.training import ClientOptions
from fnrfl.core.trees import Tree
from fnrfl.core.values import SERVER, Batch, Data, LocalTask, Out, Replies, State

T = TypeVar("T")
log = logging.getLogger("fnrfl")
SEARCH_SECONDS = 30.0  # that may be rehearsed for one letter beyond the round of the whole cohort


class Rehearsal(Engine):
    """An engine whose clients answer in the right shapes, at once; it writes down the requests.

    No example of a client is read: probes are answered for zeros.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        net: Net,
        feed: Feed,
        options: ClientOptions,
        *,
        seed: int = 0,
        width: int = FOLD_ROWS,
        simulated: bool = True,
    ) -> None:
        """`width` clients answer at a time."""
        self.algorithm, self.net, self.feed, self.options = algorithm, _for_one_example(net), feed, options
        self.seed, self.width, self.simulated = seed, width, simulated
        self.num_classes, self.examples = feed.num_classes, feed.examples.to(net.device)
        self._model, self._memory = State(*net.flatten()), algorithm.client_state(net)
        self.begin(0)

    def begin(self, t: int) -> None:
        """Start round t; requests of an earlier one are forgotten."""
        self.round, self.training = t, self.options.in_round(t)
        self.tasks: list[tuple[Tensor, LocalTask]] = []
        self.probes: list[tuple[Tensor, Probe, Data, State | None]] = []

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        self.tasks.append((cohort, task))
        for i in range(0, len(cohort), self.width):
            yield self._replies(cohort[i : i + self.width], task.rows(slice(i, i + self.width)))

    def _replies(self, cohort: Tensor, task: LocalTask) -> Replies:
        m, model = len(cohort), self._model
        ones = model.params.new_ones(m)
        extras = rehearsed_extras(task, model, self.examples[cohort[0]], self._memory)
        params = model.params.expand(m, -1)  # the same memory for everybody
        return Replies(
            clients=cohort,
            examples=self.examples[cohort],
            steps=ones.to(torch.int64),
            travel=ones,
            loss=ones,
            trained=params,
            params=params,
            buffers=_expanded(model.buffers, m),
            extras=_expanded(extras, m),
        )

    def fit(self, task: LocalTask) -> State:
        self.tasks.append((torch.tensor([SERVER]), task))
        return self._model if task.start is None else State(task.start.params, task.start.buffers)

    def generator(self, *key: object) -> torch.Generator:
        return generator(self.seed, self.round, "server", *key)

    def repeat(self, key: object, step: Step, carry: Any, fixed: Any, turns: Any) -> Tensor:
        return torch.zeros(len(trees.leaves(turns)[0]))

    def pool(self, data: Data) -> tuple[Tensor, Tensor]:
        return self.feed.all(data)

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public", at: State | None = None) -> Tree:
        self.probes.append((cohort, probe, data, at))
        return _expanded(rehearsed_answer(probe, self.net, self._model), len(cohort))

    def observe(self, cohort: Tensor, probe: Probe, *, data: Data = "public") -> Tree:
        return self.measure(cohort, probe, data=data)

    def observe_models(self, cohort: Tensor, question: Callable[[Tensor], T]) -> T:
        return question(self._model.params.expand(len(cohort), -1))

    def note(self, **facts: object) -> None:
        """A rehearsal leaves no log."""


def _expanded(tree: Tree, m: int) -> Tree:
    return {k: v.expand(m, *v.shape) for k, v in tree.items()}


def rehearsed_extras(task: LocalTask, model: State, examples: Tensor, memory: Tree) -> Tree:
    """Tensors in the shapes of those that a client sends beside the model."""
    one = model.params.new_ones(())
    own = memory | trees.rows(task.own, 0) | {"lr_steps": one}
    return task.objective.finish(model, model, one, examples, task.shared, own)[0]


@torch.no_grad()
def rehearsed_answer(probe: Probe, net: Net, model: State) -> Tree:
    """The answer to a probe about one example, which is nothing but zeros."""
    zero = torch.zeros(1, dtype=torch.int64, device=net.device)
    x = torch.zeros(1, *net.input_shape, dtype=net.input_dtype, device=net.device)
    batch = Batch(net.laid_out(x), zero, zero)
    out = net.eval_forward(model.params, model.buffers, batch.x) if probe.asks_model else Out.empty(batch)
    return probe.finish(probe.add({}, probe(out, batch)))


def _for_one_example(net: Net) -> Net:
    """The net, which says of all examples what it says of the first: the server's own passes over data cost nothing."""
    quick = copy.copy(net)

    def eval_forward(params: Tensor, buffers: Tree, x: Tensor) -> Out:
        out = net.eval_forward(params, buffers, x[:1])
        return Out(*(part.expand(len(x), *part.shape[1:]) for part in (out.features, out.logits, out.projection)))

    quick.eval_forward = eval_forward  # type: ignore[method-assign]
    return quick


# -- what a client may be sent -----------------------------------------------------------------------------------------


def alike(one: Any, agreed: Any) -> bool:
    """Whether a value is the agreed one; of a tensor shape and type count, and not what is in it."""
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
    """The parts of a dict, a sequence or an object, by name or position."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return {field.name: getattr(value, field.name) for field in fields(value)} if is_dataclass(value) else {}


class AgreedRequests:
    """All requests to one client that the agreed method makes in a round, by rehearsing it.

    A round is rehearsed from the state after the rounds before it and from the method's first state, because a client
    may be new, and with all clients of a cohort and with fewer, because some may not answer. One that is not found in
    `SEARCH_SECONDS` is none of them; the next search goes on from there.
    """

    def __init__(
        self, rehearsal: Rehearsal, client: int, *, cohort: int, rounds: int, before: tuple[MeasureRequest, ...] = ()
    ) -> None:
        """`cohort` clients take part in a round; `before` is asked in the first one, before the method begins."""
        self.rehearsal, self.client, self.cohort, self.rounds, self.before = rehearsal, client, cohort, rounds, before
        self._round = -1
        self._known: list[object] = []
        self._more: Iterator[object] = iter(())

    def __contains__(self, request: object) -> bool:
        t = getattr(request, "round", None)
        if type(t) is not int or t not in range(self.rounds):
            return False
        if t != self._round:
            self._enter(t)
        if any(alike(request, one) for one in self._known):
            return True
        until = time.monotonic() + SEARCH_SECONDS
        for one in self._more:
            self._known.append(one)
            if alike(request, one):
                return True
            if time.monotonic() > until:
                break
        return False

    def _enter(self, t: int) -> None:
        if not 0 <= self._round < t:
            self._state = self.rehearsal.algorithm.init(self.rehearsal.net)
            if t:
                self._state = self._played(self._state, 0, self.cohort)
        self._round, self._known, self._more = t, [], self._rehearsed(t)

    def _rehearsed(self, t: int) -> Iterator[object]:
        """Every request of round t; those of the whole cohort come first."""
        yield from self.before if t == 0 else ()
        first = self._state
        for state in (first, self.rehearsal.algorithm.init(self.rehearsal.net)):
            for clients in range(self.cohort, 0, -1):
                after = self._played(state, t, clients)
                if state is first and clients == self.cohort:
                    self._state = after
                yield from list(self._requests())

    def _played(self, state: State, t: int, clients: int) -> State:
        """The state after a round; if the method cannot take part of its cohort, or begin in round t, as it was."""
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
            one, epochs = replace(one, start=_model(one.start), own=own), training.epochs
            slow = rehearsal.options.stragglers > 0 and task.is_private_training
            for each in range(min(1, epochs) if slow else epochs, epochs + 1):
                yield TrainRequest(mine, rehearsal.round, one, training, [each])
        for cohort, probe, data, at in rehearsal.probes:
            asked = MeasureRequest(cohort.tolist(), rehearsal.round, probe, data, at).rows(slice(0, 1))
            yield replace(asked, clients=mine, at=_model(asked.at))


def _model(state: State | None) -> State | None:
    return None if state is None else State(state.params, state.buffers)
