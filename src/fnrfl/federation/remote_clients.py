"""Clients on other machines, behind a network: the server's letters to them, and what it believes of what they keep."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from fnrfl.core import trees
from fnrfl.core.errors import FnrflError, MissingClients
from fnrfl.core.feed import Feed
from fnrfl.core.fold import FOLD_ROWS
from fnrfl.core.messages import MeasureRequest, MemoryRequest, TrainReply, TrainRequest
from fnrfl.core.net import Net
from fnrfl.core.network import NetworkOptions
from fnrfl.core.trees import Tree
from fnrfl.core.values import Replies, State
from fnrfl.engines.rehearsal import rehearsed_answer, rehearsed_extras
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.federation.messages import REPLIES, NodeReply, NodeRequest, Version, check_run_id, model_alone
from fnrfl.federation.reply_checks import (
    Check,
    fields_like,
    in_short,
    refuse_envelope,
    refuse_reply,
    refuse_tree,
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
        self._versions: dict[int, Version] = {}
        self._at_start: dict[int, Version] = {}  # of the round
        self._fetched: dict[int, tuple[Version, Tree]] = {}

    def __contains__(self, client: int) -> bool:
        return client in self._versions

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._versions))

    def begin_round(self) -> None:
        """Remember what clients have now: a server that is started again may have to go back to it."""
        self._at_start = dict(self._versions)

    def version(self, client: int) -> Version | None:
        """What a client has written last, as far as the server has heard."""
        return self._versions.get(client)

    def version_at_start(self, client: int) -> Version | None:
        """What it had written when the round began."""
        return self._at_start.get(client)

    def heard(self, client: int, version: Version) -> None:
        """A client has written its memory."""
        self._versions[client] = version
        self.changed.add(client)

    def get(self, client: int) -> Tree:
        """The version as tensors, for a checkpoint; with `fetch`, beside the memory itself."""
        version = self._versions.get(client)
        if version is None:
            return self.birth
        return (self._content(client, version) if self.fetch is not None else {}) | {
            "node.version": torch.tensor([version.round, version.number]),
            "node.sha256": torch.tensor(list(bytes.fromhex(version.sha256)), dtype=torch.uint8),
        }

    def put(self, client: int, memory: Tree) -> None:
        """What a checkpoint has: the version that the client must go on from."""
        if "node.version" not in memory:
            raise FnrflError(
                f"The checkpoint holds the memory of client {client} itself, so it is of a run on another engine. "
                "Go on with it there."
            )
        round, number = memory["node.version"].tolist()
        self._versions[client] = Version(round, number, bytes(memory["node.sha256"].tolist()).hex())

    def _content(self, client: int, version: Version) -> Tree:
        if self._fetched.get(client, (None,))[0] != version:
            assert self.fetch is not None
            self._fetched[client] = version, self.fetch(client)
        return self._fetched[client][1]


class RemoteClients:
    """A client side over a network: one letter for each client, asked again or given up as the options say.

    An answer counts if it has the id of the letter that is waited for, so late and repeated ones do not. An answer
    that breaks its schema (`reply_checks`) is refused, and the client counts as missing.
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
    ) -> None:
        """`feed` knows how many examples each client has agreed to have.

        `reads_memory`: the method has personal models, which the server makes of clients' memories to score them.
        """
        self.network, self.run, self.net, self.options = network, check_run_id(run), net, options
        self.initial, self.feed = State(*net.flatten()), feed
        self.memory = RemoteMemory(birth, self._fetch if reads_memory else None)
        self._server = uuid.uuid4().hex  # no two servers send the same letter, not even of one run
        self._letters = count()
        self._round, self._number = -1, 0
        self._held: dict[int, Version] = {}
        self._lengths: dict[str, int] = {}  # how many examples the server has, by the name of the data
        self._bytes = {"down": 0, "up": 0}  # of this round, as they are sent

    # -- requests -----------------------------------------------------------------------------------------------------
    def train(self, request: TrainRequest) -> Iterator[TrainReply]:
        self._enter_round(request.round)
        task, training = request.task, request.training
        seconds, first = self.options.deadline(private=task.data == "private"), request.clients[0]
        extras = rehearsed_extras(task, self.initial, self.feed.examples[first], self.memory.birth)
        if task.data not in self._lengths:
            self._lengths[task.data] = 0 if task.data == "private" else len(self.feed.all(task.data)[1])

        def check(client: int, content: Any) -> str | None:
            examples, epochs = int(self.feed.examples[client]), request.epochs[request.clients.index(client)]
            steps = replace(training, epochs=epochs).steps(self._lengths[task.data] or examples)
            return refuse_reply(content, client, request, self.initial, extras, examples, steps)

        answers, missing = self._ask(request, task.purpose, seconds, check)
        if missing:
            yield TrainReply(Replies.of_nobody(self.initial), missing=missing)
        there = [client for client in request.clients if client in answers]
        for first in range(0, len(there), FOLD_ROWS):  # as many as are summed at once
            yield self._joined([answers.pop(client) for client in there[first : first + FOLD_ROWS]])

    def measure(self, request: MeasureRequest) -> Tree:
        self._enter_round(request.round)
        seconds = self.options.measure_deadline or None
        probe = request.probe
        one = rehearsed_answer(probe, self.net, self.initial)

        def check(client: int, content: Any) -> str | None:
            wrong = refuse_tree(content, fields_like(one))
            right = wrong or probe.accepts(content, one, float(self.feed.examples[client]))
            return wrong if right else f"its answer to {type(probe).__name__} cannot be."

        answers, missing = self._ask(request, "measure", seconds, check)
        if missing:
            raise MissingClients(missing, round=request.round + 1, stage="measure")
        return trees.joined([answers[client].content for client in request.clients])

    def _fetch(self, client: int) -> Tree:
        seconds = self.options.measure_deadline or None
        fields = fields_like(self.memory.birth)
        check = lambda _, content: refuse_tree({k: v[None] for k, v in content.items()}, fields)  # noqa: E731
        answers, missing = self._ask(MemoryRequest(client), "memory", seconds, check)
        if client in answers and answers[client].lost_memory:
            missing = {client: "it no longer has what it remembered."}
        if missing:
            raise MissingClients(missing, round=self._round + 1, stage="memory")
        content: Tree = answers[client].content
        return content

    def _enter_round(self, round: int) -> None:
        if round != self._round:
            self._round, self._number = round, 0
            self._held.clear()
            self._bytes = {"down": 0, "up": 0}
            self.memory.begin_round()

    def _joined(self, answers: list[NodeReply]) -> TrainReply:
        """Some clients' replies as one; from here on the server knows what these clients keep."""
        for answer in answers:
            if answer.memory is not None:
                self.memory.heard(answer.client, answer.memory)
            if answer.held is not None:
                self._held[answer.client] = answer.held
        lost = sorted(answer.client for answer in answers if answer.lost_memory)
        notes = {"wire_bytes": dict(self._bytes)} | ({"lost_memory": lost} if lost else {})
        whole = [answer.content.replies for answer in answers if not answer.content.not_finite]
        replies = trees.joined(whole) if whole else Replies.of_nobody(self.initial)
        not_finite = {k: v for answer in answers for k, v in answer.content.not_finite.items()}
        return TrainReply(replies, not_finite, notes)

    # -- letters ------------------------------------------------------------------------------------------------------
    def _ask(
        self, request: Any, phase: str, seconds: float | None, check: Check
    ) -> tuple[dict[int, NodeReply], dict[int, str]]:
        """The answers that count, and why others have none."""
        self._number += 1
        waiting = {letter.client: letter for letter in self._written(request, phase)}
        answers: dict[int, NodeReply] = {}
        reasons = dict.fromkeys(waiting, "it has not answered in time.")
        refused: dict[int, str] = {}  # whoever answers so would do it again
        for attempt in count():
            sent = {client: to_bytes(letter) for client, letter in waiting.items()}
            self._bytes["down"] += sum(map(len, sent.values()))
            for client, message in self.network.exchange(sent, seconds):
                if isinstance(message, str):
                    reasons[client] = in_short(message)
                    continue
                self._bytes["up"] += len(message)
                self._open(client, message, waiting, answers, refused, check)
            if not waiting or (attempt >= self.options.retries and self.options.on_missing != "wait"):
                return answers, refused | {client: reasons[client] for client in waiting}
            time.sleep(PAUSE)
        raise AssertionError("a count has no end")

    def _open(
        self,
        client: int,
        message: bytes,
        waiting: dict[int, NodeRequest],
        answers: dict[int, NodeReply],
        refused: dict[int, str],
        check: Check,
    ) -> None:
        """Take an answer, if it is one to a letter that waits for it."""
        try:
            answer = from_bytes(message, REPLIES)
            if client not in waiting or (answer.id, answer.client) != (waiting[client].id, client):
                return  # late, or a second time
            wrong = refuse_envelope(answer, waiting[client]) or check(client, answer.content)
        except Exception:  # whatever is in it: the server does not stop for it
            answer, wrong = None, "its answer cannot be read."
        if waiting.pop(client, None) is None:
            return
        if wrong is not None:
            refused[client] = wrong
        else:
            answers[client] = answer

    def _written(self, request: Any, phase: str) -> Iterator[NodeRequest]:
        clients = [request.client] if isinstance(request, MemoryRequest) else request.clients
        for m, client in enumerate(clients):
            yield NodeRequest(
                run=self.run,
                id=f"{self._server}-{next(self._letters)}",
                client=client,
                round=self._round,
                number=self._number,
                phase=phase,
                request=_for_one(request, m),
                memory=self.memory.version(client),
                kept=self.memory.version_at_start(client),
                held=self._held.get(client),
            )


def _for_one(request: Any, m: int) -> Any:
    """The request to the client in row m, with nothing of the server's state but the model."""
    if isinstance(request, MemoryRequest):
        return request
    mine = request.rows(slice(m, m + 1))
    if isinstance(mine, TrainRequest):
        return replace(mine, task=replace(mine.task, start=model_alone(mine.task.start)))
    return replace(mine, at=model_alone(mine.at))
