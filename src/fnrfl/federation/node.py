"""A client on its own machine: it answers requests of the agreed method, and keeps its memory in a folder."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.errors import ShareableError, from_system, out_of_memory, sentence
from fnrfl.core.messages import Failure, MeasureRequest, MemoryRequest, TrainReply, TrainRequest
from fnrfl.core.net import Net
from fnrfl.core.store import ClientStore
from fnrfl.core.trees import Tree, aligned
from fnrfl.core.values import SERVER, LocalTask, State
from fnrfl.core.words import printable
from fnrfl.engines.kept_clients import KeptClients
from fnrfl.engines.rehearsal import Rehearsal
from fnrfl.engines.trainer import Trainer
from fnrfl.engines.wire import Parsed, to_bytes
from fnrfl.federation.messages import (
    NodeReply,
    NodeRequest,
    ScoreRequest,
    Version,
    check_run_id,
    model_alone,
    scores_model,
)
from fnrfl.rundir import files

log = logging.getLogger("fnrfl")
LOGGED = 2000  # characters of an error: a server may have written most of it


@dataclass(frozen=True)
class Participant:
    """All that the work of one client needs."""

    client: int
    trainer: Trainer
    birth: Tree  # what the client remembers before its first round
    agreed: Container[object]  # the requests that the agreed method makes; no other is answered
    shares_memory: bool = False  # whether the server may read what the client remembers
    max_examples: int = 10**9  # that one request may train on, passes times examples
    score: Callable[[State, Tree], int] | None = None  # a model, what the client remembers -> right test examples
    personalised: bool = False  # whether clients have models of their own


class VersionedFolder:
    """Trees of tensors in files, by version; a file is written whole or not at all, and read if its hash is right."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def read(self, version: Version) -> Tree | None:
        """Return what was kept; None if it is not there, or damaged."""
        try:
            content = files.read_bytes(self.folder / version.file)
        except FileNotFoundError:
            return None
        return aligned(load(content)) if hashlib.sha256(content).hexdigest() == version.sha256 else None

    def write(self, version: Version, tree: Tree) -> Version:
        """Keep a tree; the version that is given back has its hash."""
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tree.items()})
        files.write(self.folder / version.file, content)
        return replace(version, sha256=hashlib.sha256(content).hexdigest())

    def remove_all_but(self, versions: Iterable[Version | None]) -> None:
        """Remove every other version, and what an interrupted write has left."""
        names = {version.file for version in versions if version is not None}
        for path in self.folder.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)


class Node:
    """Answers requests to one client of one run. All that it must know from one to the next is in its folder."""

    def __init__(self, participant: Participant, folder: Path, run: str) -> None:
        self.participant, self.run = participant, check_run_id(run)
        place = folder / self.run / f"client-{participant.client}"
        self.memories, self.models = VersionedFolder(place / "memory"), VersionedFolder(place / "held")

    def answer(self, message: Parsed) -> NodeReply:
        """Return the reply to a request; raise what goes wrong."""
        request = message.value()
        if reason := next((reason for applies, reason in self._refusals(request) if applies), None):
            raise ShareableError(reason)
        return self._answer(request)

    def _refusals(self, node_request: Any) -> Iterator[tuple[bool, str]]:
        """What is no request to this client, not of the agreed method, or not allowed by the node's configuration."""
        mine, shares = self.participant.client, self.participant.shares_memory
        yield not isinstance(node_request, NodeRequest), "A message is no request of fnrfl's."
        versions = [one for one in (node_request.memory, node_request.kept, node_request.held) if one is not None]
        numbers = [node_request.round, node_request.number, *(n for one in versions for n in (one.round, one.number))]
        plain = all(type(number) is int for number in numbers) and isinstance(node_request.id, str)  # they name files
        yield not plain, f"A request to client {mine} is not in the right form."
        right = (node_request.run, node_request.client) == (self.run, mine)
        yield not right, f"A request is for another client or another run than client {mine}'s."
        request = node_request.request
        if isinstance(request, MemoryRequest):
            yield (
                request != MemoryRequest(mine) or not shares,
                f"Client {mine} does not show its memory to the server. Methods with personal models are scored by the "
                "server: set share_memory = true in the node's own configuration to allow it.",
            )
            return
        if isinstance(request, ScoreRequest):
            scores = self.participant.score is not None and alike(request.model, self.participant.trainer.initial)
            yield not scores, f"Client {mine} does not score this model for the server."
            return
        agreed = request in self.participant.agreed and node_request.round == request.round
        yield not agreed, f"Client {mine} is asked for something that the agreed method does not ask for."
        yield (
            isinstance(request, TrainRequest) and self._examples(request) > self.participant.max_examples,
            f"A task is longer than client {mine} accepts. Set a larger max_examples in the node's own configuration, "
            "or client.epochs or fnr.epochs lower in the recipe.",
        )

    def _examples(self, request: TrainRequest) -> int:
        """How many examples an agreed task goes through, those that fill its last batch included."""
        feed, data, passes = self.participant.trainer.feed, request.task.data, request.epochs[0]
        private = data == "private"
        size = int(feed.examples[self.participant.client]) if private else len(feed.all(data)[1])
        return passes * size + min(passes, 1) * request.training.batch

    def _answer(self, node_request: NodeRequest) -> NodeReply:
        request, client, trainer = node_request.request, node_request.client, self.participant.trainer
        kept = None if node_request.memory is None else self.memories.read(node_request.memory)
        lost = node_request.memory is not None and kept is None
        reply = NodeReply(node_request.id, client, self.participant.birth if kept is None else kept, lost_memory=lost)
        if isinstance(request, MemoryRequest):
            return reply
        if isinstance(request, ScoreRequest):
            return replace(reply, content=self._score(request.model, reply.content))
        memories = ClientStore(self.participant.birth, None, trainer.net.device)
        models = ClientStore({}, None, trainer.net.device)
        if kept is not None:
            memories.put(client, kept)
            memories.changed.clear()
        if node_request.held is not None:
            held = self.models.read(node_request.held)
            if held is None:
                raise ShareableError(
                    f"Client {client} no longer has the model that it held in round {node_request.round + 1}."
                )
            models.put(client, held)
        clients = KeptClients(trainer, memories, models, round=node_request.round)
        if isinstance(request, MeasureRequest):
            return replace(reply, content=clients.measure(request))
        (trained,) = clients.train(request)
        trained = self._scored(trained, request, reply.content)
        new = Version(node_request.round, node_request.number)
        if client in memories.changed:
            reply = replace(reply, memory=self.memories.write(new, memories.get(client)))
            self.memories.remove_all_but([node_request.kept, node_request.memory, reply.memory])
        if request.task.hold_model and client in models:
            reply = replace(reply, held=self.models.write(new, models.get(client)))
            self.models.remove_all_but([node_request.held, reply.held])
        return replace(reply, content=uploaded(trained, request.task, trainer.net, trainer.initial))

    def _scored(self, trained: TrainReply, request: TrainRequest, memory: Tree) -> TrainReply:
        """Return a reply with the score of the model that the client was sent, if it is to have one."""
        mine = self.participant
        if mine.score is None or not scores_model(request, personalised=mine.personalised):
            return trained
        return replace(trained, right=self._score(request.task.start or mine.trainer.initial, memory))

    def _score(self, model: State, memory: Tree) -> Tensor:
        """Return how many of the site's test examples a model answers right, [1]."""
        assert self.participant.score is not None
        return torch.tensor([self.participant.score(model, memory)])


def answer_bytes(message: bytes, answer: Callable[[Parsed], NodeReply]) -> bytes:
    """Return the bytes of the reply to a message; what goes wrong is in the reply, and never raised."""
    head: dict[str, Any] = {}
    try:
        parsed = Parsed.of(message)
        head = parsed.head
        return to_bytes(answer(parsed))
    except Exception as error:
        client = head.get("client")
        reply = NodeReply(str(head.get("id", "")), client if type(client) is int else -1, failure_at_node(error))
        return to_bytes(reply)


def failure_at_node(error: Exception) -> Failure:
    """Log an error at the node, and give the server a sentence that cannot quote data, code or a path."""
    log.error(printable(sentence(error)[:LOGGED]))
    if isinstance(error, ShareableError):
        return Failure(str(error))
    if out_of_memory(error):
        return Failure("there is not enough memory at the node.")
    if (system := from_system(error)) is not None:
        return Failure(f"a file at the node cannot be used: {os.strerror(system.errno or 0)}.")
    return Failure("this was refused at the node, or failed there. The node's own log says why.")


def uploaded(reply: TrainReply, task: LocalTask, net: Net, initial: State) -> TrainReply:
    """Return what of a reply leaves the client: no model if it is to stay, never what belongs to the client alone.

    In the place of that stands what everybody knows from the start.
    """
    reply, replies = replace(reply, notes={}), reply.replies  # notes are of the node's machine
    if not task.send_model:
        gone = replies.params.new_zeros(len(replies.clients), 0)
        return replace(reply, replies=replace(replies, trained=gone, buffers={}))
    if not task.never_sent:
        return reply
    params = torch.where(net.mask(task.never_sent), initial.params, replies.params)
    buffers = {k: initial.buffers[k].expand_as(v) if k in task.never_sent else v for k, v in replies.buffers.items()}
    return replace(reply, replies=replace(replies, trained=params, buffers=buffers))


# -- the requests of the agreed method ---------------------------------------------------------------------------------

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
    if isinstance(one, list | tuple):
        return len(one) == len(agreed) and all(map(alike, one, agreed))
    mine, theirs = (value if isinstance(value, dict) else vars(value) for value in (one, agreed))
    return mine.keys() == theirs.keys() and all(alike(value, theirs[name]) for name, value in mine.items())


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
            if not 0 <= self._round < t:
                self._state = self.rehearsal.algorithm.init(self.rehearsal.net)
                self._state = self._played(self._state, 0, self.cohort) if t else self._state
            self._round, self._known, self._more = t, [], self._rehearsed(t)
        if any(alike(request, one) for one in self._known):
            return True
        for more in islice(self._more, MOST_REHEARSALS):
            self._known += more
            if any(alike(request, one) for one in more):
                return True
        return False

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
