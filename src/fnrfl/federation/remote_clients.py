"""Clients on other machines, behind a network: the server's requests to them, and which versions they keep."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from fnrfl.core import trees
from fnrfl.core.errors import FnrflError, MissingClients
from fnrfl.core.feed import Feed
from fnrfl.core.fold import FOLD_ROWS
from fnrfl.core.messages import RIGHT, MeasureRequest, MemoryRequest, TrainReply, TrainRequest
from fnrfl.core.net import Net
from fnrfl.core.options import NetworkOptions
from fnrfl.core.trees import Tree
from fnrfl.core.values import Replies, State
from fnrfl.engines.rehearsal import rehearsed_answer, rehearsed_extras
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.federation.messages import (
    REPLIES,
    Check,
    NodeReply,
    NodeRequest,
    ScoreRequest,
    Version,
    check_run_id,
    fields_like,
    in_short,
    model_alone,
    refuse_envelope,
    refuse_reply,
    refuse_score,
    refuse_tree,
    scores_model,
)

PAUSE = 1.0  # seconds before a client that could not be reached is asked again


class Network:
    """Clients on other machines: a subclass carries bytes, and knows nothing about their content."""

    def exchange(self, requests: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        """Send each client its request, and give (client, reply) as replies come; a text says why there is none.

        It ends when everybody has answered or `seconds` have passed; who has not answered by then is left out.
        Replies that come later, or twice, may turn up in a later exchange: requests have numbers.
        """
        raise NotImplementedError

    def begin(self, run: str, scale: Tree | None) -> None:
        """Tell the nodes that a run begins or goes on, and how inputs are scaled, if that is known."""

    def connect(self, run: str, *arguments: Any, scale: Tree | None = None, **options: Any) -> RemoteClients:
        """Return the clients' side of a run."""
        self.begin(run, scale)
        return RemoteClients(self, run, *arguments, **options)


class RemoteMemory:
    """What the server knows of the clients' memories: which version each has, not what is in it.

    Checkpoints keep the versions, so that a server that goes on asks its clients to go on from the same. With `fetch`,
    for methods with personal models, the content is asked for as well.
    """

    def __init__(self, birth: Tree, fetch: Callable[[int], Tree] | None = None) -> None:
        self.birth, self.fetch = birth, fetch
        self.changed: set[int] = set()
        self.versions: dict[int, Version] = {}  # what clients have written last, as far as the server has heard
        self.at_start: dict[int, Version] = {}  # of the round: a server that is started again may have to go back to it
        self._fetched: dict[int, tuple[Version, Tree]] = {}

    def __contains__(self, client: int) -> bool:
        return client in self.versions

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.versions))

    def get(self, client: int) -> Tree:
        """Return the version as tensors, for a checkpoint; with `fetch`, beside the memory itself."""
        if (version := self.versions.get(client)) is None:
            return self.birth
        if self.fetch is not None and self._fetched.get(client, (None,))[0] != version:
            self._fetched[client] = version, self.fetch(client)
        return (self._fetched[client][1] if self.fetch is not None else {}) | {
            "node.version": torch.tensor([version.round, version.number]),
            "node.sha256": torch.tensor(list(bytes.fromhex(version.sha256)), dtype=torch.uint8),
        }

    def put(self, client: int, memory: Tree) -> None:
        """Take from a checkpoint the version that the client must go on from."""
        if "node.version" not in memory:
            raise FnrflError(
                f"The checkpoint holds the memory of client {client} itself, so it is of a run on another engine. "
                "Go on with it there."
            )
        round, number = memory["node.version"].tolist()
        self.versions[client] = Version(round, number, bytes(memory["node.sha256"].tolist()).hex())


class RemoteClients:
    """A client side over a network: one request for each client, asked again or given up as the options say.

    A reply counts if it has the id of the request that waits for it, so late and repeated ones do not. One that breaks
    its schema (`messages.py`) is refused, and the client counts as missing.
    """

    def __init__(
        self,
        network: Network,
        run: str,
        net: Net,
        birth: Tree,
        feed: Feed,
        options: NetworkOptions,
        *,
        reads_memory: bool = False,
        tests: Sequence[int] = (),
    ) -> None:
        """`feed` knows how many examples each client has agreed to have, `tests` on how many it scores models.

        `reads_memory`: the method has personal models, which the server makes of clients' memories to score them.
        """
        self.network, self.run, self.net, self.options = network, check_run_id(run), net, options
        self.initial, self.feed = State(*net.flatten()), feed
        self.personalised, self.tests = reads_memory, tests
        self.memory = RemoteMemory(birth, self._fetch if reads_memory else None)
        server = uuid.uuid4().hex  # no two servers send the same request, not even of one run
        self._ids = (f"{server}-{number}" for number in count())
        self._round, self._number = -1, 0
        self._held: dict[int, Version] = {}
        self._right: dict[int, int] = {}  # test examples that sites have answered right by the model of the last round
        self._bytes = {"down": 0, "up": 0}  # of this round, as they are sent

    def train(self, request: TrainRequest) -> Iterator[TrainReply]:
        self._enter_round(request.round)
        task, training, clients = request.task, request.training, request.clients
        private, scored = task.data == "private", scores_model(request, personalised=self.personalised)
        extras = rehearsed_extras(task, self.initial, self.feed.examples[clients[0]], self.memory.birth)
        length = 0 if private else len(self.feed.all(task.data)[1])

        def check(client: int, content: Any) -> str | None:
            examples, epochs = int(self.feed.examples[client]), request.epochs[clients.index(client)]
            steps = replace(training, epochs=epochs).steps(length or examples)
            wrong = refuse_reply(content, client, request, self.initial, extras, examples, steps)
            return wrong or refuse_score(content.right, self.tests[client] if self.tests and scored else 0)

        sent = replace(request, task=replace(task, start=model_alone(task.start)))
        replies, missing = self._ask(_each(sent), task.purpose, self.options.deadline(private=private), check)
        if missing:
            yield TrainReply(Replies.of_nobody(self.initial), missing=missing)
        there = [client for client in clients if client in replies]
        for first in range(0, len(there), FOLD_ROWS):  # as many as are summed at once
            yield self._joined([replies.pop(client) for client in there[first : first + FOLD_ROWS]])

    def measure(self, request: MeasureRequest) -> Tree:
        self._enter_round(request.round)
        probe, one = request.probe, rehearsed_answer(request.probe, self.net, self.initial)

        def check(client: int, content: Any) -> str | None:
            wrong = refuse_tree(content, fields_like(one))
            right = wrong or probe.accepts(content, one, float(self.feed.examples[client]))
            return wrong if right else f"its answer to {type(probe).__name__} cannot be."

        sent = _each(replace(request, at=model_alone(request.at)))
        return trees.joined([reply.content for reply in self._ask_all(sent, "measure", check)])

    def score(self, round: int, model: Callable[[int], State]) -> tuple[dict[int, int], dict[int, str]]:
        """Ask each site how many of its test examples a model answers right; return that, and who has not said it."""
        self._enter_round(round)
        models = {client: model(client) for client, tests in enumerate(self.tests) if tests}
        asked = {client: ScoreRequest(State(one.params, one.buffers)) for client, one in models.items()}
        check = lambda client, content: refuse_score(content, self.tests[client])  # noqa: E731
        replies, missing = self._ask(asked, "score", self.options.measure_deadline or None, check)
        return {client: int(reply.content) for client, reply in replies.items()}, missing

    def _fetch(self, client: int) -> Tree:
        """Read the memory of a client."""
        fields = fields_like(self.memory.birth)
        check = lambda _, content: refuse_tree({k: v[None] for k, v in content.items()}, fields)  # noqa: E731
        (reply,) = self._ask_all({client: MemoryRequest(client)}, "memory", check)
        if reply.lost_memory:
            lost = {client: "it no longer has what it remembered."}
            raise MissingClients(lost, round=self._round + 1, stage="memory")
        content: Tree = reply.content
        return content

    def _enter_round(self, round: int) -> None:
        if round != self._round:
            self._round, self._number = round, 0
            self._held.clear()
            self._right = {}
            self._bytes = {"down": 0, "up": 0}
            self.memory.at_start = dict(self.memory.versions)

    def _joined(self, replies: list[NodeReply]) -> TrainReply:
        """Join some clients' replies; from here on the server knows what these clients keep."""
        memories = {reply.client: reply.memory for reply in replies if reply.memory is not None}
        self.memory.versions |= memories
        self.memory.changed |= memories.keys()
        self._held |= {reply.client: reply.held for reply in replies if reply.held is not None}
        lost = sorted(reply.client for reply in replies if reply.lost_memory)
        notes: dict[str, Any] = {"wire_bytes": dict(self._bytes)} | ({"lost_memory": lost} if lost else {})
        notes |= self._heard(replies)
        whole = [reply.content.replies for reply in replies if not reply.content.not_finite]
        joined = trees.joined(whole) if whole else Replies.of_nobody(self.initial)
        not_finite = {k: v for reply in replies for k, v in reply.content.not_finite.items()}
        return TrainReply(joined, not_finite, notes)

    def _heard(self, replies: list[NodeReply]) -> dict[str, Any]:
        """Take the scores of sites; the first one that a site sends in a round counts."""
        told = {reply.client: reply.content.right for reply in replies}
        self._right = {client: int(right) for client, right in told.items() if right is not None} | self._right
        return {RIGHT: self._right} if self._right else {}

    def _ask_all(self, requests: Mapping[int, Any], phase: str, check: Check) -> list[NodeReply]:
        """Return the replies of all clients, in the order of the requests; refuse to go on without one."""
        replies, missing = self._ask(requests, phase, self.options.measure_deadline or None, check)
        if missing:
            raise MissingClients(missing, round=self._round + 1, stage=phase)
        return [replies[client] for client in requests]

    def _ask(
        self, requests: Mapping[int, Any], phase: str, seconds: float | None, check: Check
    ) -> tuple[dict[int, NodeReply], dict[int, str]]:
        """Return the replies that count, and why other clients have none."""
        self._number += 1
        waiting = {}
        for client, request in requests.items():
            where = (self.run, next(self._ids), client, self._round, self._number, phase)
            memory, kept = self.memory.versions.get(client), self.memory.at_start.get(client)
            waiting[client] = NodeRequest(*where, request, memory, kept, self._held.get(client))
        missing, replies = dict.fromkeys(waiting, "it has not answered in time."), dict[int, NodeReply]()
        for attempt in count():
            sent = {client: to_bytes(one) for client, one in waiting.items()}
            self._bytes["down"] += sum(map(len, sent.values()))
            for client, message in self.network.exchange(sent, seconds):
                self._bytes["up"] += 0 if isinstance(message, str) else len(message)
                if client not in waiting:
                    continue
                if isinstance(message, str):
                    missing[client] = in_short(message)
                elif told := _judged(message, waiting[client], check):
                    del waiting[client], missing[client]  # who is refused would answer the same again
                    replies |= {} if isinstance(told, str) else {client: told}
                    missing |= {client: told} if isinstance(told, str) else {}
            if not waiting or (attempt >= self.options.retries and self.options.on_missing != "wait"):
                break
            time.sleep(PAUSE)
        return replies, missing


def _each(request: TrainRequest | MeasureRequest) -> dict[int, Any]:
    """Return the request to each client alone."""
    return {client: request.rows(slice(m, m + 1)) for m, client in enumerate(request.clients)}


def _judged(message: bytes, request: NodeRequest, check: Check) -> NodeReply | str:
    """Return a reply that counts, or why it is refused; "" if it is late, or there a second time."""
    try:
        reply = from_bytes(message, REPLIES)
        if (reply.id, reply.client) != (request.id, request.client):
            return ""
        return refuse_envelope(reply, request) or check(request.client, reply.content) or reply
    except Exception:  # whatever is in it: the server does not stop for it
        return "its answer cannot be read."
