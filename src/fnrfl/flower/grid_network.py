"""The network of a Flower deployment: requests to clients, by the nodes on which they are.

Flower's Grid knows nodes by numbers that may change when a SuperNode starts again. Which client is on a node is asked
of the node. Replies are looked for every few hundredths of a second; Flower's `send_and_receive` sleeps 3 seconds.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.core.words import printable
from fnrfl.federation.remote_clients import Network
from fnrfl.flower.client_app import ASK, RECORD, WHO, packed, unpacked, weight

log = logging.getLogger("fnrfl")

POLL_SECONDS = 0.05  # between two looks for replies, at first; the wait grows to a twentieth of the time waited
SLOWEST_POLL = 1.0
NODE_POLL_SECONDS = 0.5  # between two looks for nodes, while some are sought
ASK_AGAIN = 30.0  # seconds without a reply after which a node is asked whether it is there, which starts a process

Key = tuple[str, bytes]  # the label of a client and a request's SHA-256: the same request to the same client


@dataclass(frozen=True)
class Sending:
    """Where a message went, and when; a request's has its key."""

    node: int
    key: Key = ("", b"")
    when: float = field(default_factory=time.monotonic)


@dataclass
class GridNetwork(Network):
    """A `Network` over Flower's Grid; `labels` say which client a node is: a partition's number, or a site's name."""

    grid: Grid
    labels: Sequence[str] = ()  # of each client, by its number
    carried: Counter[str] = field(default_factory=Counter)  # bytes of letters, and of Flower's messages around them
    nodes: dict[str, int] = field(default_factory=dict)  # label -> node
    owing: Callable[[list[str]], None] = lambda labels: None  # hears of clients whose replies are waited for
    _asked: dict[str, Sending] = field(default_factory=dict)  # questions that are under way, by message
    _under_way: dict[str, Sending] = field(default_factory=dict)  # requests without a reply, by message
    _replaced: dict[int, str] = field(default_factory=dict)  # nodes in whose place another was found, and their label
    _doubled: str = ""  # the sentence about two nodes with one label
    _silent: dict[int, float] = field(default_factory=dict)  # nodes that could not say, and when they were asked
    _next_look: float = 0.0
    _waited: list[str] = field(default_factory=list)  # whom `owing` has heard of last

    def wait_for(self, count: int) -> list[str]:
        """Wait until so many nodes have said who they are; return their labels, in order.

        Of nodes with partitions, those from 0 to count - 1 take part. Of nodes with names, no others may be there.
        """
        logged = time.monotonic()
        while (labels := self._complete(count)) is None:
            self._heard_from()
            if self._doubled:
                raise ConfigError(self._doubled)
            self._ask_who([None])
            if time.monotonic() > logged + 30:
                logged = time.monotonic()
                log.warning("%s; %d must be there", self._there(), count)
            time.sleep(POLL_SECONDS)
        return labels

    def _complete(self, count: int) -> list[str] | None:
        """Return the labels of the nodes that take part, or None while some have not said who they are."""
        if len(self.nodes) < count or any(time.monotonic() - one.when < ASK_AGAIN for one in self._asked.values()):
            return None
        partitions = [str(number) for number in range(count)]
        if self.nodes.keys() >= set(partitions):
            return partitions
        if len(self.nodes) == count:
            return sorted(self.nodes)
        if all(label.isdecimal() for label in self.nodes):
            return None  # some are of a larger experiment; those that are missing may still come
        raise ConfigError(
            f"{self._there()}, and the run has {count}. Set clients in the recipe, or nodes in the app's "
            "pyproject.toml, to their number, or stop those that shall not take part."
        )

    def _there(self) -> str:
        return f"{len(self.nodes)} nodes are there ({', '.join(map(printable, sorted(self.nodes)))})"

    def _ask_who(self, owing: Sequence[Sending | None]) -> None:
        """Ask nodes which client they are: those that are new, if clients are sought, and those that owe a reply."""
        now = time.monotonic()
        late = {one.node for one in owing if one is not None and now - one.when > ASK_AGAIN}
        if now < self._next_look or not (late or None in owing):
            return
        self._next_look = now + NODE_POLL_SECONDS
        online = set(self.grid.get_node_ids())
        asked = {one.node for one in self._asked.values()}
        asked |= {node for node, when in self._silent.items() if now - when < ASK_AGAIN}
        if nodes := sorted((online - set(self.nodes.values()) | (online & late)) - asked):
            messages = [Message(RecordDict(), dst_node_id=node, message_type=WHO) for node in nodes]
            ids = self.grid.push_messages(messages)
            self._asked |= {one: Sending(node) for one, node in zip(ids, nodes, strict=True) if one}

    def _heard_from(self) -> dict[int, float]:
        """Take the answers to questions; return the nodes that are alive, and when they had been asked."""
        alive = {}
        for message in self._pulled(self._asked):
            asked = self._asked.pop(message.metadata.reply_to_message_id)
            self.nodes = {label: node for label, node in self.nodes.items() if node != asked.node}
            failed = message.error.reason if message.has_error() else ""
            record = {} if message.has_error() else message.content.config_records.get(RECORD, {})
            if not (label := str(record.get("label", ""))[:1000]):
                self._silent[asked.node] = asked.when
                log.warning("Node %d does not say which client it is: %s", asked.node, printable(failed[:500]))
                continue
            alive[asked.node] = asked.when
            known: Iterable[Any] = getattr(self.grid, "get_nodes", list)()  # where nodes have keys, under these names
            registered = next((str(one.name) for one in known if one.node_id == asked.node), "")
            before = self.nodes.get(label)
            if registered not in ("", label):
                self._silent[asked.node] = asked.when
                log.warning("The node registered as %s says that it is %s", *map(printable, (registered, label)))
            elif before is None or self._replaced.get(asked.node) != label:
                self.nodes[label] = asked.node
                if before is not None:  # which was stopped, unless it says so once more
                    self._replaced[before] = label
                    self._next_look = 0.0  # ask it now
            else:
                self._silent[asked.node] = asked.when
                way_out = "correct the partition or the name in the node.toml of one of them, or stop it."
                doubled = f"Two nodes say that they are {printable(label)}. Each client has one node: {way_out}"
                if doubled != self._doubled:
                    log.warning(doubled)
                self._doubled = doubled
        return alive

    def exchange(self, requests: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        """Send each client its request; yield replies as they come, until all are in or the seconds have passed.

        A client that still has the same request from an earlier exchange does not get it again: its reply is awaited.
        Messages live as long as Flower lets them. With a deadline as their `ttl`, the SuperLink would refuse a reply
        that comes after it, and that is the reply to the request for which the next exchange waits.
        """
        begun = time.monotonic()
        owed = {client: (self.labels[client], hashlib.sha256(one).digest()) for client, one in requests.items()}
        sent = {one.key: one for one in self._under_way.values()}  # where a request went last
        while owed and (seconds is None or time.monotonic() < begun + seconds):
            alive = self._heard_from()
            replies = self._replies()
            self._tell_owing(owed, replies)
            for client in [client for client, key in owed.items() if key in replies]:
                yield client, replies[owed.pop(client)]
            to = {c: node for c, key in owed.items() if (node := self._target(c, sent.get(key), alive)) is not None}
            if to:
                sent |= self._send([(node, owed[client], requests[client]) for client, node in to.items()])
            self._ask_who([sent.get(key) for key in owed.values()])
            if owed:
                time.sleep(min(SLOWEST_POLL, max(POLL_SECONDS, (time.monotonic() - begun) / 20)))

    def _tell_owing(self, owed: Mapping[int, Key], replies: Mapping[Key, object]) -> None:
        left = [self.labels[client] for client, key in owed.items() if key not in replies]
        if left != self._waited:
            self._waited = left
            self.owing(left)

    def _target(self, client: int, last: Sending | None, alive: Mapping[int, float]) -> int | None:
        """Return the node to (re)send to, or None while the request is in flight there.

        A SuperNode takes one message after the other: one that has answered a question asked after the request went has
        lost the request, because it was started again.
        """
        node = self.nodes.get(self.labels[client])
        if node is None or last is None or last.node != node:
            return node
        return node if alive.get(node, 0.0) > last.when else None

    def _send(self, letters: Sequence[tuple[int, Key, bytes]]) -> dict[Key, Sending]:
        """Send requests to nodes; return where each went, by its key, also if Flower did not take it."""
        messages = [Message(packed(letter), dst_node_id=node, message_type=ASK) for node, _, letter in letters]
        self.carried["letters_down"] += sum(len(letter) for _, _, letter in letters)
        self.carried["flower_down"] += sum(map(weight, messages))
        ids = self.grid.push_messages(messages)
        sendings = [Sending(node, key) for node, key, _ in letters]
        self._under_way |= {one: sending for one, sending in zip(ids, sendings, strict=True) if one}
        return {sending.key: sending for sending in sendings}

    def _replies(self) -> dict[Key, bytes | str]:
        """Return replies that have come, by the request's key; of copies of a request, one that was answered counts.

        A node that has answered a request will not answer those that it got before: they are forgotten.
        """
        replies: dict[Key, bytes | str] = {}
        for message in self._pulled(self._under_way):
            request = self._under_way.pop(message.metadata.reply_to_message_id, None)
            if request is None:
                continue
            reply = self._opened(message)
            if isinstance(reply, bytes) or request.key not in replies:
                replies[request.key] = reply
            for one, earlier in [*self._under_way.items()]:
                if earlier.node == request.node and earlier.when < request.when:
                    del self._under_way[one]
        return replies

    def _opened(self, message: Message) -> bytes | str:
        """Return the reply in a message; an error of Flower's or of the app becomes the reason why there is none."""
        if message.has_error():
            return f"{message.error.reason or 'no reason given'} (Flower's error {message.error.code})"
        try:
            reply = unpacked(message)
        except FnrflError as error:
            return str(error)
        self.carried["letters_up"] += len(reply)
        self.carried["flower_up"] += weight(message)
        return reply

    def _pulled(self, ids: Iterable[str]) -> list[Message]:
        wanted = list(ids)
        return list(self.grid.pull_messages(wanted)) if wanted else []
