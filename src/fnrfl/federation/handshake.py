"""Before the first round of a network: the server asks the nodes about their data, and all agree.

Questions and answers are JSON. A node keeps what was agreed on in its folder, by the run's id, so that it goes on after
a restart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fnrfl.config import RunConfig
from fnrfl.core.errors import CompatibilityError, FnrflError
from fnrfl.core.words import printable
from fnrfl.data import scenarios
from fnrfl.engines.wire import MOST_JSON
from fnrfl.federation.agreement import Agreement, SiteFacts, SiteHolding, agree_on_experiment, as_plain, from_plain
from fnrfl.federation.node_config import NodeConfig
from fnrfl.federation.node_data import (
    describe_node,
    kept_at_the_site,
    public_hash,
    recipe_at_node,
    recipe_for_nodes,
    refuse_what_sites_cannot,
    split_hash,
    tell_holding,
)
from fnrfl.federation.remote_clients import Network, RemoteClients
from fnrfl.federation.reply_checks import in_short
from fnrfl.federation.site_agreement import agree_on_sites, refuse_other_public, with_counts
from fnrfl.federation.stand_in import load_test_set, partition_elsewhere, stand_in
from fnrfl.runs.data import reading_of
from fnrfl.runs.setup.inputs import RunParts, gather_parts, parts_with

Plain = dict[str, Any]
Ask = Callable[[Plain], Sequence[Plain]]  # a question to every node -> their answers, always in one order


@dataclass(frozen=True)
class Handshake:
    """The result of a handshake: the server's parts of the run, and what every node needs to build its client."""

    parts: RunParts  # its pool has no private examples
    agreement: Agreement
    node_of_client: tuple[int, ...]  # for each client, which of the answers was its node's
    recipe: str  # for nodes, with nothing left to choose


def handshake(config: RunConfig, ask: Ask, test: str = "") -> Handshake:
    """Ask every node about its data, and agree; `test` is the server's own test set, where nodes are sites.

    Nodes of an experiment take a part each of a data set that the server has as well.
    """
    answers = ask({"recipe": recipe_for_nodes(config)})
    facts = [from_plain(SiteFacts, answer, f"node {seat}") for seat, answer in enumerate(answers)]
    if not facts:
        raise CompatibilityError("No node has answered, so there is nobody to train. Start the nodes first.")
    if any(one.partition is None for one in facts) and any(one.schema is not None for one in facts):
        return _with_sites(config, ask, facts, test)
    parts = gather_parts(config)
    agreement = agree_on_experiment(facts, parts.config.clients, parts.dataset.checksum, split_hash(parts))
    seat_of = {one.partition: seat for seat, one in enumerate(facts)}
    seats = tuple(seat_of[client] for client in range(parts.config.clients))
    parts = replace(parts, pool=parts.pool.only(None))  # a server does without, also where it could look
    return Handshake(parts, agreement, seats, recipe_for_nodes(parts.config))


def _with_sites(config: RunConfig, ask: Ask, facts: Sequence[SiteFacts], test: str) -> Handshake:
    """Nodes that bring data of their own agree on columns, categories and classes, and tell what they hold."""
    refuse_what_sites_cannot(config, test)
    agreement = agree_on_sites(facts, reading_of(config))
    seat_of = {one.name.strip(): seat for seat, one in enumerate(facts)}
    seats = tuple(seat_of[name] for name in agreement.sites)
    answers = ask({"recipe": recipe_for_nodes(config), "agreement": as_plain(agreement)})
    named = zip(seats, agreement.sites, strict=True)
    holdings = [from_plain(SiteHolding, answers[seat], f"the node {printable(name)!r}") for seat, name in named]
    agreement = with_counts(agreement, holdings, config.network.max_share)
    data = stand_in(agreement, load_test_set(test, agreement, reading_of(config)))
    counts = np.array([one.counts for one in holdings], dtype=np.int64)
    partition = partition_elsewhere(agreement, counts, scenarios.parse(config.scenario), config.seed)
    parts = parts_with(config, data, agreement.notices, partition=partition)
    refuse_other_public(agreement, holdings, public_hash(parts.splits))
    return Handshake(parts, agreement, seats, recipe_for_nodes(parts.config))


def answer_question(question: Plain, node: NodeConfig) -> Plain:
    """What a node answers before the first round: facts about its data, or what it holds of what was agreed on."""
    recipe = recipe_at_node(str(question.get("recipe", "")), node)
    if node.partition is None:
        refuse_what_sites_cannot(recipe)
    with kept_at_the_site(node):
        if "agreement" not in question:
            return as_plain(describe_node(recipe, node))
        return as_plain(tell_holding(recipe, node, from_plain(Agreement, question["agreement"], "the server")))


# -- over a network ----------------------------------------------------------------------------------------------------


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
class HandshakeNetwork(Network):
    """A network whose nodes are told what was agreed on before a run begins."""

    network: Network
    labels: Sequence[str]  # of each client
    recipe: str
    agreement: Agreement
    _told: str = ""

    def connect(self, run: str, *arguments: Any, **options: Any) -> RemoteClients:
        """Tell the nodes of the run, once."""
        if self._told != run:
            question = {"run": run, "recipe": self.recipe, "agreement": as_plain(self.agreement)}
            ask_all(self.network, self.labels, question)
            self._told = run
        return self.network.connect(run, *arguments, **options)


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
