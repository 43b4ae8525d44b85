"""Nodes as the workers of Flower's nodes have them, in one process, behind a network that carries bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fnrfl.config import RunConfig
from fnrfl.data.scaling import Scaling
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.federation.agreement import Agreement, as_plain, from_plain
from fnrfl.federation.handshake import Handshake, handshake
from fnrfl.federation.messages import HandshakeRequest
from fnrfl.federation.node import Participant
from fnrfl.federation.node_config import NodeConfig
from fnrfl.federation.node_service import NodeService, build_node, recipe_at_node
from fnrfl.federation.remote_clients import Network
from fnrfl.runs.result import Result
from fnrfl.runs.run import run
from fnrfl.runs.setup.build import RunParts
from settings import with_keys


class ServiceNetwork(Network):
    """A network of node services; `forgetful` ones begin again for every message, and know what their folder has."""

    def __init__(
        self, nodes: Sequence[NodeConfig], folder: Path = Path("services"), *, forgetful: bool = False
    ) -> None:
        self.nodes, self.folder, self.forgetful = list(nodes), folder.absolute(), forgetful
        self.services = [self.open(node) for node in range(len(nodes))]
        self.seen: list[Any] = []  # the requests, as values

    def open(self, node: int) -> NodeService:
        return NodeService(lambda: self.nodes[node], self.folder / str(node))

    def exchange(self, requests: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        for node, message in requests.items():
            if self.forgetful:
                self.services[node] = self.open(node)
            yield node, self.carry(node, message)

    def carry(self, node: int, message: bytes) -> bytes:
        """The reply of a node."""
        answer = self.services[node].answer(message)
        self.seen.append(from_bytes(message))
        return answer


def agree(config: RunConfig, nodes: Sequence[NodeConfig] | Network, test: str = "", **options: Any) -> Handshake:
    """A handshake with nodes."""
    network = nodes if isinstance(nodes, Network) else ServiceNetwork(nodes, **options)
    return handshake(config, network, [node.label for node in network.nodes], test)


def over_network(config: RunConfig, nodes: Sequence[NodeConfig], test: str = "", **options: Any) -> tuple[Result, Any]:
    """A whole run over nodes, and their network."""
    met = agree(with_keys(config, {"engine.name": "flower"}), nodes, test, **options)
    return run(met.parts.config, out="there", network=met.network, parts=met.parts), met.network.network


@dataclass(frozen=True)
class BuiltNode:
    """The client of a node, built by hand."""

    participant: Participant
    parts: RunParts

    @property
    def client(self) -> int:
        return self.participant.client


def sent(message: Any) -> Any:
    """A message of the handshake after it has crossed a network."""
    return from_plain(type(message), from_bytes(to_bytes(as_plain(message))), "somebody")


def clients_of(met: Handshake, nodes: Sequence[NodeConfig], scaling: Scaling | None = None) -> list[BuiltNode]:
    """The client of every node, by its number."""
    agreement: Agreement = sent(replace(met.agreement, scale=scaling and (scaling.mean, scaling.std)))
    built = [BuiltNode(*build_node(recipe_at_node(met.network.recipe, node), node, agreement)) for node in nodes]
    return sorted(built, key=lambda one: one.client)


def describe(recipe: str) -> bytes:
    """The first question to a node."""
    return to_bytes(HandshakeRequest("1", "describe", recipe))


def begin(run: str, recipe: str, agreement: Agreement) -> bytes:
    """What a node is told when a run begins."""
    return to_bytes(HandshakeRequest("1", "begin", recipe, as_plain(agreement), run))


def content(answer: bytes) -> Any:
    """What a node answers."""
    return from_bytes(answer).content
