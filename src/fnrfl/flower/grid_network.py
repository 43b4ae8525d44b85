"""The network of a Flower deployment: letters to clients, by the nodes on which they are.

Flower's Grid knows nodes by numbers that may change when a SuperNode starts again. Which client is on a node is asked
of the node. Replies are asked for every few hundredths of a second; Flower's own `send_and_receive` sleeps 3 seconds.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.core.words import printable
from fnrfl.federation.remote_clients import Network
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


@dataclass(frozen=True)
class SentLetter(Sending):
    """Where a letter went, and which it is: the same letter to the same client has the same key."""

    key: tuple[str, bytes] = ("", b"")  # the label of its client, and its SHA-256


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
class GridNetwork(Network):
    """A `Network` over Flower's Grid; `labels` say which client a node is: a partition's number, or a site's name."""

    grid: Grid
    labels: Sequence[str] = ()  # of each client, by its number
    carried: Carried = field(default_factory=Carried)
    nodes: dict[str, int] = field(default_factory=dict)  # label -> node
    _asked: dict[str, Sending] = field(default_factory=dict)  # questions that are under way
    _under_way: dict[str, SentLetter] = field(default_factory=dict)  # letters without a reply, by message
    _replaced: dict[int, str] = field(default_factory=dict)  # nodes in whose place another was found, and their label
    _doubled: str = ""  # the sentence about two nodes with one label
    _silent: dict[int, float] = field(default_factory=dict)  # nodes that could not say, and when they were asked
    _next_look: float = 0.0

    def wait_for(self, count: int) -> list[str]:
        """Wait until so many nodes have said who they are; their labels, in order.

        Of nodes with partitions, those from 0 to count - 1 take part. Of nodes with names, no others may be there.
        """
        begun = told = time.monotonic()
        while (labels := self._complete(count)) is None:
            self._heard_from()
            if self._doubled:
                raise ConfigError(self._doubled)
            self._ask_who([None])
            if time.monotonic() > told + 30:
                told = time.monotonic()
                there = f" ({self._names()})" if self.nodes else ""
                log.warning(
                    "%d nodes are there%s after %.0f s; %d must be", len(self.nodes), there, told - begun, count
                )
            time.sleep(REPLY_SECONDS)
        return labels

    def _complete(self, count: int) -> list[str] | None:
        """The labels of the nodes that take part; None while some are missing, or have not yet said who they are."""
        young = any(time.monotonic() - one.when < ASK_AGAIN for one in self._asked.values())
        if len(self.nodes) < count or young:
            return None
        partitions = [str(number) for number in range(count)]
        if self.nodes.keys() >= set(partitions):
            return partitions
        if len(self.nodes) == count:
            return sorted(self.nodes)
        if all(label.isdecimal() for label in self.nodes):
            return None  # some are of a larger experiment; those that are missing may still come
        raise ConfigError(
            f"{len(self.nodes)} nodes are there ({self._names()}), and the run has {count}. Set clients in the "
            "recipe, or nodes in the app's pyproject.toml, to their number, or stop those that shall not take part."
        )

    def _names(self) -> str:
        return ", ".join(map(printable, sorted(self.nodes)))

    def exchange(self, letters: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        """Send each client its letter; yield replies as they come, until all are in or the seconds have passed.

        A client that still has the same letter from an earlier exchange does not get it again: its reply is waited for.
        """
        begun = time.monotonic()
        owed = dict(letters)
        keys = {client: (self.labels[client], hashlib.sha256(letter).digest()) for client, letter in letters.items()}
        sent = {one.key: one for one in self._under_way.values()}  # where a letter went last
        while owed and (seconds is None or time.monotonic() < begun + seconds):
            alive = self._heard_from()
            replies = self._replies()
            for client in [client for client in owed if keys[client] in replies]:
                del owed[client]
                yield client, replies[keys[client]]
            again = {c: node for c in owed if (node := self._must_send(c, sent.get(keys[c]), alive)) is not None}
            sent |= self._send({client: owed[client] for client in again}, again, keys)
            self._ask_who([sent.get(keys[client]) for client in owed])
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

    def _send(
        self, letters: Mapping[int, bytes], nodes: Mapping[int, int], keys: Mapping[int, tuple[str, bytes]]
    ) -> dict[tuple[str, bytes], SentLetter]:
        """Push letters; where each went.

        Messages live as long as Flower lets them. With a deadline as their `ttl`, the SuperLink would refuse a reply
        that comes after it, and that is the reply to the letter for which the next exchange waits.
        """
        messages = [self._message(packed(letter), nodes[c], ASK) for c, letter in letters.items()]
        if not messages:
            return {}
        for message, letter in zip(messages, letters.values(), strict=True):
            self.carried.letters_down += len(letter)
            self.carried.flower_down += weight(message)
        ids = list(self.grid.push_messages(messages))
        sent = {keys[client]: SentLetter(nodes[client], key=keys[client]) for client in letters}
        self._under_way |= {one: letter for one, letter in zip(ids, sent.values(), strict=True) if one}
        return sent

    def _replies(self) -> dict[tuple[str, bytes], bytes | str]:
        """Replies that have come, by the letter's key; of copies of a letter, one that was answered counts.

        A node that has answered a letter will not answer those that it got before: they are forgotten.
        """
        replies: dict[tuple[str, bytes], bytes | str] = {}
        for message in self._pulled(self._under_way):
            letter = self._under_way.pop(message.metadata.reply_to_message_id, None)
            if letter is None:
                continue
            reply = self._opened(message)
            if isinstance(reply, bytes) or letter.key not in replies:
                replies[letter.key] = reply
            for one, earlier in [*self._under_way.items()]:
                if earlier.node == letter.node and earlier.when < letter.when:
                    del self._under_way[one]
        return replies

    def _opened(self, message: Message) -> bytes | str:
        """The letter in a message; an error of Flower's or of the app becomes the reason for which there is none."""
        if message.has_error():
            return f"{message.error.reason or 'no reason given'} (Flower's error {message.error.code})"
        try:
            letter = unpacked(message)
        except FnrflError as error:
            return str(error)
        self.carried.letters_up += len(letter)
        self.carried.flower_up += weight(message)
        return letter

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
            failed = message.error.reason if message.has_error() else ""
            record = {} if message.has_error() else message.content.config_records.get(RECORD, {})
            if not (label := str(record.get("label", ""))[:1000]):
                self._silent[asked.node] = asked.when
                log.warning("Node %d does not say which client it is: %s", asked.node, printable(failed[:500]))
                continue
            alive[asked.node] = asked.when
            registered = self._registered(asked.node)
            if registered and registered != label:
                self._silent[asked.node] = asked.when
                log.warning("The node registered as %s says that it is %s", *map(printable, (registered, label)))
            else:
                self._found(label, asked)
        return alive

    def _found(self, label: str, asked: Sending) -> None:
        """A node says that it is a client; another that said so was stopped, unless it says so once more."""
        before = self.nodes.get(label)
        if before is None or self._replaced.get(asked.node) != label:
            self.nodes[label] = asked.node
            if before is not None:
                self._replaced[before] = label
                self._next_look = 0.0  # ask it now
            return
        self._silent[asked.node] = asked.when
        if not self._doubled:
            self._doubled = (
                f"Two nodes say that they are {printable(label)}. Each client has one node: correct the partition or "
                "the name in the node.toml of one of them, or stop it."
            )
            log.warning(self._doubled)

    def _registered(self, node: int) -> str:
        """The name under which a node's key was registered; empty where nodes have no keys."""
        nodes: Iterable[Any] = getattr(self.grid, "get_nodes", list)()
        return next((str(one.name) for one in nodes if one.node_id == node), "")

    def _message(self, content: RecordDict, node: int, kind: str) -> Message:
        from flwr.app import Message

        return Message(content, dst_node_id=node, message_type=kind)
