"""The network of a Flower deployment: letters to clients, by the nodes on which they are.

Flower's Grid knows nodes by numbers that may change when a SuperNode starts again. Which client is on a node is asked
of the node. Replies are asked for every few hundredths of a second; Flower's own `send_and_receive` sleeps 3 seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fnrfl.core.errors import FnrflError
from fnrfl.core.words import printable
from fnrfl.flower.envelopes import ASK, RECORD, WHO, packed, unpacked, weight

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

log = logging.getLogger("fnrfl")

REPLY_SECONDS = 0.05  # between two looks for replies, at first; the wait grows to a twentieth of the time waited
SLOWEST = 1.0
LOOK_SECONDS = 0.5  # seconds between two looks for nodes, while some are sought
ASK_AGAIN = 5.0  # seconds without a reply after which a node is asked whether it is still there


@dataclass(frozen=True)
class Sending:
    """Where a message went, and when."""

    node: int
    when: float = field(default_factory=time.monotonic)


@dataclass
class Carried:
    """What Flower has carried, in bytes with its own headers, beside the letters themselves."""

    letters_down: int = 0
    letters_up: int = 0
    flower_down: int = 0
    flower_up: int = 0

    @property
    def overhead(self) -> float:
        """Bytes that Flower has added, in percent of the letters."""
        letters = self.letters_down + self.letters_up
        return 100.0 * (self.flower_down + self.flower_up - letters) / letters if letters else 0.0


@dataclass
class GridNetwork:
    """A `Network` over Flower's Grid; `labels` say which client a node is: a partition's number, or a site's name."""

    grid: Grid
    labels: Sequence[str] = ()  # of each client, by its number
    carried: Carried = field(default_factory=Carried)
    nodes: dict[str, int] = field(default_factory=dict)  # label -> node
    _asked: dict[str, Sending] = field(default_factory=dict)  # questions that are under way
    _silent: dict[int, float] = field(default_factory=dict)  # nodes that could not say, and when they were asked
    _next_look: float = 0.0

    def wait_for(self, count: int) -> list[str]:
        """Wait until so many nodes have said who they are; their labels, in order."""
        begun = told = time.monotonic()
        while len(self.nodes) < count:
            self._heard_from()
            self._ask_who([None])
            if time.monotonic() > told + 30:
                told = time.monotonic()
                log.warning("%d of %d nodes are there after %.0f seconds", len(self.nodes), count, told - begun)
            time.sleep(REPLY_SECONDS)
        return sorted(self.nodes)

    def exchange(self, letters: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        """Send each client its letter; yield replies as they come, until all are in or the seconds have passed."""
        begun = time.monotonic()
        owed = dict(letters)
        waiting: dict[str, int] = {}  # message -> client
        sent: dict[int, Sending] = {}  # client -> where its letter went last
        while owed and (seconds is None or time.monotonic() < begun + seconds):
            alive = self._heard_from()
            for client, reply in self._replies(waiting):
                if owed.pop(client, None) is not None:
                    yield client, reply
            again = {c: node for c in owed if (node := self._must_send(c, sent.get(c), alive)) is not None}
            waiting |= self._sent({client: owed[client] for client in again}, again)
            sent |= {client: Sending(node) for client, node in again.items()}
            self._ask_who([sent.get(client) for client in owed])
            if owed:
                time.sleep(min(SLOWEST, max(REPLY_SECONDS, (time.monotonic() - begun) / 20)))

    def _must_send(self, client: int, last: Sending | None, alive: Mapping[int, float]) -> int | None:
        """The node to which a letter must go: it has not gone there yet, or the node has lost it.

        A SuperNode takes one message after the other: one that has answered a question asked after the letter went has
        lost the letter, because it was started again.
        """
        node = self.nodes.get(self.labels[client])
        if node is None or last is None or last.node != node:
            return node
        return node if alive.get(node, 0.0) > last.when else None

    def _sent(self, letters: Mapping[int, bytes], nodes: Mapping[int, int]) -> dict[str, int]:
        """Push letters; message -> client."""
        messages = [self._message(packed(letter), nodes[c], ASK) for c, letter in letters.items()]
        if not messages:
            return {}
        for message, letter in zip(messages, letters.values(), strict=True):
            self.carried.letters_down += len(letter)
            self.carried.flower_down += weight(message)
        ids = list(self.grid.push_messages(messages))
        return {one: client for one, client in zip(ids, letters, strict=True) if one}

    def _replies(self, waiting: dict[str, int]) -> Iterator[tuple[int, bytes | str]]:
        """Replies that have come; an error of Flower's or of the app becomes the reason for which there is none."""
        for message in self._pulled(waiting):
            client = waiting.pop(message.metadata.reply_to_message_id)
            if message.has_error():
                yield client, f"{message.error.reason or 'no reason given'} (Flower's error {message.error.code})"
                continue
            try:
                letter = unpacked(message)
            except FnrflError as error:
                yield client, str(error)
                continue
            self.carried.letters_up += len(letter)
            self.carried.flower_up += weight(message)
            yield client, letter

    def _pulled(self, ids: Iterable[str]) -> list[Message]:
        wanted = list(ids)
        return list(self.grid.pull_messages(wanted)) if wanted else []

    def _ask_who(self, owing: Sequence[Sending | None]) -> None:
        """Ask nodes which client they are: those that are new, if clients are sought, and those that owe a reply."""
        now = time.monotonic()
        late = {one.node for one in owing if one is not None and now - one.when > ASK_AGAIN}
        if now < self._next_look or not (late or None in owing):
            return
        self._next_look = now + LOOK_SECONDS
        online = set(self.grid.get_node_ids())
        asked = {one.node for one in self._asked.values()}
        asked |= {node for node, when in self._silent.items() if now - when < ASK_AGAIN}
        nodes = sorted((online - set(self.nodes.values()) | (online & late)) - asked)
        if nodes:
            from flwr.app import RecordDict

            ids = self.grid.push_messages([self._message(RecordDict(), node, WHO) for node in nodes])
            self._asked |= {one: Sending(node) for one, node in zip(ids, nodes, strict=True) if one}

    def _heard_from(self) -> dict[int, float]:
        """Take the answers to questions: nodes that are alive, and when they had been asked."""
        alive = {}
        for message in self._pulled(self._asked):
            asked = self._asked.pop(message.metadata.reply_to_message_id)
            self.nodes = {label: node for label, node in self.nodes.items() if node != asked.node}
            if message.has_error():
                self._silent[asked.node] = asked.when
                log.warning("Node %d does not say which client it is: %s", asked.node, message.error.reason)
                continue
            alive[asked.node] = asked.when
            label = str(message.content.config_records[RECORD]["label"])
            registered = self._registered(asked.node)
            if registered and registered != label:
                self._silent[asked.node] = asked.when
                log.warning("The node registered as %s says that it is %s", *map(printable, (registered, label)))
            else:
                self.nodes[label] = asked.node
        return alive

    def _registered(self, node: int) -> str:
        """The name under which a node's key was registered; empty where nodes have no keys."""
        nodes: Iterable[Any] = getattr(self.grid, "get_nodes", list)()
        return next((str(one.name) for one in nodes if one.node_id == node), "")

    def _message(self, content: RecordDict, node: int, kind: str) -> Message:
        from flwr.app import Message

        return Message(content, dst_node_id=node, message_type=kind)
