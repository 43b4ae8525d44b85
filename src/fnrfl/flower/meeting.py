"""Before the first letter: the server sends nodes the recipe, they tell what they have, and all agree.

Messages are JSON. A node keeps what was agreed in its folder, by the run's id, so that it goes on after a restart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fnrfl.core.errors import CompatibilityError, FnrflError
from fnrfl.data.agreement import Agreement, SiteFacts, as_plain, from_plain
from fnrfl.engines.letters import Letter, Network
from fnrfl.engines.wire import from_bytes

HELLO, AGREED = "hello", "agreed"


def message(kind: str, **content: Any) -> bytes:
    """A message of the meeting."""
    return json.dumps({"fnrfl": kind, **content}).encode()


def ask_nodes(network: Network, messages: Mapping[int, bytes]) -> dict[int, Any]:
    """Every node's answer; an error of one node is an error here."""
    answers = {}
    for client, told in network.exchange(messages, None):
        answer = {"error": told} if isinstance(told, str) else json.loads(told)
        if "error" in answer:
            raise CompatibilityError(f"The node of client {client} cannot take part: {answer['error']}")
        answers[client] = answer
    return answers


def hear_facts(network: Network, clients: int, recipe: str) -> list[SiteFacts]:
    """What the nodes tell about themselves, by the number of their client."""
    hello = message(HELLO, recipe=recipe)
    answers = ask_nodes(network, dict.fromkeys(range(clients), hello))
    return [from_plain(SiteFacts, answers[client], f"the node of client {client}") for client in range(clients)]


@dataclass
class AgreedNetwork:
    """A network whose nodes are told what was agreed on before they get the first letter of a run."""

    network: Network
    recipe: str
    agreement: Agreement
    clients: int
    _told: set[str] = field(default_factory=set)  # runs

    def exchange(self, letters: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        """As the network does; the first letter's run is the one that the nodes are told about."""
        first = from_bytes(next(iter(letters.values()))) if not self._told and letters else None
        if isinstance(first, Letter):
            self._told.add(first.run)
            agreed = message(AGREED, run=first.run, recipe=self.recipe, agreement=as_plain(self.agreement))
            ask_nodes(self.network, dict.fromkeys(range(self.clients), agreed))
        return self.network.exchange(letters, seconds)


def read_message(told: bytes) -> dict[str, Any]:
    """A message of the meeting, at a node."""
    try:
        read = json.loads(told)
    except ValueError as error:
        raise FnrflError(f"A message is neither a letter nor JSON ({error}). It was refused.") from None
    known = isinstance(read, dict) and read.get("fnrfl") in (HELLO, AGREED)
    if not known or not isinstance(read.get("recipe"), str):
        raise FnrflError("A message is no part of a meeting. It was refused.")
    return read
