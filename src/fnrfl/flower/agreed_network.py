"""Before the first letter of a run: the server's questions to nodes, and what was agreed on, as JSON over a network.

A node keeps what was agreed on in its folder, by the run's id, so that it goes on after a restart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fnrfl.core.errors import CompatibilityError, FnrflError
from fnrfl.core.words import printable
from fnrfl.data.agreement import Agreement, as_plain
from fnrfl.engines.letters import Network
from fnrfl.engines.reply_checks import in_short
from fnrfl.engines.wire import MOST_JSON, plain_fields


def ask_all(network: Network, labels: Sequence[str], question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every node's answer to a question, by the number of its label; an error of one node is an error here."""
    answers: dict[int, dict[str, Any]] = {}
    message = json.dumps(question).encode()
    for number, told in network.exchange(dict.fromkeys(range(len(labels)), message), None):
        try:
            answer = {"error": told} if isinstance(told, str) else read_question(told)
        except FnrflError as error:
            answer = {"error": str(error)}
        if "error" in answer:
            raise CompatibilityError(f"Node {printable(labels[number])}: {in_short(str(answer['error']))}")
        answers[number] = answer
    return [answers[number] for number in range(len(labels))]


@dataclass
class AgreedNetwork:
    """A network whose nodes are told what was agreed on before they get the first letter of a run."""

    network: Network
    labels: Sequence[str]  # of each client
    recipe: str
    agreement: Agreement
    _told: bool = False

    def exchange(self, letters: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        """As the network does; the first letter's run is the one that the nodes are told about."""
        if letters and not self._told:
            run = plain_fields(next(iter(letters.values())))["run"]
            ask_all(
                self.network, self.labels, {"run": run, "recipe": self.recipe, "agreement": as_plain(self.agreement)}
            )
            self._told = True
        yield from self.network.exchange(letters, seconds)


def read_question(told: bytes) -> dict[str, Any]:
    """A question or an answer to one."""
    if len(told) > MOST_JSON:
        raise FnrflError(f"A message has {len(told):,} bytes; {MOST_JSON:,} are the most. It was refused.")
    try:
        read = json.loads(told)
    except (ValueError, RecursionError) as error:
        raise FnrflError(f"A message is neither a letter nor JSON ({error}). It was refused.") from None
    if not isinstance(read, dict):
        raise FnrflError("A message is JSON, and no question. It was refused.")
    return read
