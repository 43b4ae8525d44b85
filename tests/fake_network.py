"""A network inside one process: nodes with folders of their own, and faults that are drawn beforehand.

Time is counted, not waited for: an answer that takes longer than the deadline comes late, into a later exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fnrfl.core.messages import TrainReply
from fnrfl.engines.assemble import assemble
from fnrfl.engines.rehearsal import Rehearsal
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.federation.messages import NodeReply, Version
from fnrfl.federation.node import AgreedRequests, Node, Participant, answer_bytes
from fnrfl.federation.remote_clients import Network
from fnrfl.runs.setup.build import build
from fnrfl.runs.setup.method import cohort_size
from settings import with_keys

# What a node may do with a letter, beside answering it.
SPOILT = ("nan", "shape", "somebody-else", "version")  # replies that can be read; test_hostile_nodes.py has many more
FAULTS = ("dies-before", "dies-after", "hangs", "twice", "garbage", "forgets", *SPOILT)


class ServerKilled(BaseException):
    """The server dies in the middle of an exchange."""


@dataclass
class FakeNetwork(Network):
    """Carries letters to nodes; `faults` names what happens at the n-th letter, counted over all clients."""

    open_node: Callable[[int, str], Node]  # client, run id -> a node that has only its folder
    faults: dict[int, str] = field(default_factory=dict)
    kills_server_at: set[int] = field(default_factory=set)
    letters: int = 0
    late: list[tuple[int, bytes]] = field(default_factory=list)
    met: list[tuple[int, str, str, str]] = field(default_factory=list)  # faults that have happened

    def exchange(self, letters: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        yield from self.late
        self.late = []
        for client, message in letters.items():
            number, self.letters = self.letters, self.letters + 1
            letter = from_bytes(message)
            if number in self.kills_server_at:
                self.kills_server_at.discard(number)
                answer_bytes(message, self.open_node(client, letter.run).answer)  # and nobody hears of it
                raise ServerKilled
            if fault := self.faults.get(number, ""):
                self.met.append((client, letter.run, f"{letter.round + 1}", f"{letter.phase}: {fault}"))
            yield from self._answers(client, letter, message, fault, seconds)

    def _answers(
        self, client: int, letter: Any, message: bytes, fault: str, seconds: float | None
    ) -> Iterator[tuple[int, bytes | str]]:
        node = self.open_node(client, letter.run)
        if fault == "dies-before":
            yield client, "its node is gone."
            return
        if fault == "forgets":
            for folder in (node.memories, node.models):
                folder.remove_all_but([])
        answer = answer_bytes(message, node.answer)
        if fault == "dies-after":
            yield client, "its node is gone."
        elif fault == "hangs":
            self.late.append((client, answer))
            if seconds is None:
                yield client, "its connection was lost."
        elif fault == "garbage":
            yield client, answer[: len(answer) // 2]
        elif fault in SPOILT:
            yield client, to_bytes(_spoilt(from_bytes(answer), fault))
        else:
            yield client, answer
            if fault == "twice":
                yield client, answer
                self.late.append((client, answer))


def _spoilt(answer: NodeReply, how: str) -> NodeReply:
    if how == "somebody-else":
        return replace(answer, client=answer.client + 1)
    content = answer.content
    if how == "version" or not isinstance(content, dict | TrainReply):
        return replace(answer, memory=Version(0, 0, "../../etc"))
    spoil = (lambda t: t * torch.nan) if how == "nan" else (lambda t: torch.cat([t, t], -1))
    if isinstance(content, dict):
        name = next(iter(content))
        return replace(answer, content=content | {name: spoil(content[name].double())})
    name = "trained" if content.replies.trained.shape[1] else "loss"
    replies = replace(content.replies, **{name: spoil(getattr(content.replies, name))})
    return replace(answer, content=replace(content, replies=replies))


def nodes_of(config: Any, folder: Path) -> Callable[[int, str], Node]:
    """Nodes that have read the data of an experiment, each with a folder of its own."""
    built = build(with_keys(config, {"engine": {"name": "loop", "threads": 1}}))
    birth = built.algorithm.client_state(built.net)

    @cache
    def agreed(client: int) -> AgreedRequests:
        rehearsal = Rehearsal(built.algorithm, built.net, built.pool, config.client, seed=config.seed, simulated=False)
        return AgreedRequests(rehearsal, client, cohort=cohort_size(built.config), rounds=config.rounds)

    def open_node(client: int, run: str) -> Node:
        trainer = assemble("loop", built.net, built.pool, config.client, seed=config.seed).server
        shares = built.algorithm.personalised
        participant = Participant(client, trainer, birth, agreed(client), shares_memory=shares)
        return Node(participant, folder / f"node-{client}", run)

    return open_node
