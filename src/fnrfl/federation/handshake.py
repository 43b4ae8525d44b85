"""The server's side of the handshake: before the first round it asks the nodes about their data, and all agree."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fnrfl.config import RunConfig
from fnrfl.core.errors import CompatibilityError, ShareableError
from fnrfl.core.messages import Failure
from fnrfl.core.ndarrays import Ints
from fnrfl.core.trees import Tree
from fnrfl.core.words import printable
from fnrfl.data import scenarios
from fnrfl.data.datasets import AT_SITES, Dataset, Part, read_source
from fnrfl.data.partition.value import Partition
from fnrfl.data.partition.views import both_parts
from fnrfl.data.reading import Expected, Reading
from fnrfl.data.scenarios import Natural
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.federation.agreement import (
    Agreement,
    SiteFacts,
    SiteHolding,
    agree_on_experiment,
    agree_on_sites,
    as_plain,
    from_plain,
    public_hash,
    refuse_other_public,
    split_hash,
    with_counts,
)
from fnrfl.federation.messages import REPLIES, HandshakeRequest, NodeReply, in_short, reason_of
from fnrfl.federation.remote_clients import Network
from fnrfl.runs.data import learns_from_public, reading_of
from fnrfl.runs.passed import labels_in
from fnrfl.runs.setup.build import RunParts, gather_parts, parts_with
from fnrfl.runs.setup.method import build_algorithm


@dataclass
class HandshakeNetwork(Network):
    """The network of a run, by the numbers of its clients; nodes are told what was agreed on before it begins."""

    network: Network  # by the numbers of nodes
    nodes: Sequence[str]  # how each is called
    client_of_node: Sequence[int] = ()
    recipe: str = ""
    agreement: Agreement = Agreement(())

    def exchange(self, requests: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        node_of_client = {client: node for node, client in enumerate(self.client_of_node)}
        sent = {node_of_client[client]: message for client, message in requests.items()}
        for node, reply in self.network.exchange(sent, seconds):
            yield self.client_of_node[node], reply

    def begin(self, run: str, scale: Tree | None) -> None:
        scales = None if scale is None else (tuple(scale["mean"].tolist()), tuple(scale["std"].tolist()))
        self.ask("begin", self.recipe, replace(self.agreement, scale=scales), run)

    def ask(self, step: str, recipe: str, agreement: Agreement | None = None, run: str = "") -> list[Any]:
        """Return every node's answer to a question, in their order; an error of one node is an error here."""
        plain = None if agreement is None else as_plain(agreement)
        request, answers = HandshakeRequest(uuid.uuid4().hex, step, recipe, plain, run), dict[int, Any]()
        for node, told in self.network.exchange(dict.fromkeys(range(len(self.nodes)), to_bytes(request)), None):
            reason, reply = told if isinstance(told, str) else "", None
            with suppress(Exception):  # whatever is in it
                reply = from_bytes(told, REPLIES) if isinstance(told, bytes) else None
            if not isinstance(reply, NodeReply):
                reason = reason or "its answer cannot be read. Install the same version of fnrfl."
            elif isinstance(reply.content, Failure):
                reason = reason_of(reply.content)
            elif reply.id == request.id:
                answers[node] = reply.content
            if reason:
                raise CompatibilityError(f"Node {printable(self.nodes[node])}: {in_short(reason)}")
        return [answers[node] for node in range(len(self.nodes))]


@dataclass(frozen=True)
class Handshake:
    """The result of a handshake: the server's parts of the run, and the network of its clients."""

    parts: RunParts  # its pool has no private examples
    agreement: Agreement
    network: HandshakeNetwork


def handshake(config: RunConfig, network: Network, nodes: Sequence[str], test: str = "") -> Handshake:
    """Ask every node about its data, and agree; `test` is the server's own test set, where nodes are sites.

    Nodes of an experiment take a part each of a data set that the server has as well. `nodes` is how the nodes of the
    network are called, by their numbers there.
    """
    if not nodes:
        raise CompatibilityError("No node has answered, so there is nobody to train. Start the nodes first.")
    asking, recipe = HandshakeNetwork(network, nodes), recipe_for_nodes(config)
    told = zip(nodes, asking.ask("describe", recipe), strict=True)
    facts = [from_plain(SiteFacts, answer, f"node {printable(name)}") for name, answer in told]
    if any(one.partition is None for one in facts) and any(one.schema is not None for one in facts):
        parts, agreement = _agree_with_sites(config, asking, recipe, facts, test)
    else:
        parts = gather_parts(config)
        agreement = agree_on_experiment(facts, parts.config.clients, parts.dataset.checksum, split_hash(parts))
        parts = replace(parts, pool=parts.pool.only(None))  # a server does without, also where it could look
    clients = [agreement.sites.index(one.client) for one in facts]
    recipe = recipe_for_nodes(parts.config)  # with nothing left to choose
    return Handshake(parts, agreement, HandshakeNetwork(network, nodes, clients, recipe, agreement))


def _agree_with_sites(
    config: RunConfig, asking: HandshakeNetwork, recipe: str, facts: Sequence[SiteFacts], test: str
) -> tuple[RunParts, Agreement]:
    """Agree on columns, categories and classes with nodes that bring data of their own, and hear what they hold."""
    refuse_what_sites_cannot(config, test)
    agreement = agree_on_sites(facts, reading_of(config))
    answers = {one.client: answer for one, answer in zip(facts, asking.ask("count", recipe, agreement), strict=True)}
    holdings = [from_plain(SiteHolding, answers[site], f"the node {site!r}") for site in agreement.sites]
    agreement = with_counts(agreement, holdings, config.network.max_share)
    data = stand_in(agreement, test, reading_of(config))
    counts = np.array([one.counts for one in holdings], dtype=np.int64)
    partition = partition_elsewhere(agreement, counts, config)
    parts = parts_with(config, data, agreement.notices, partition=partition)
    refuse_other_public(agreement, holdings, public_hash(parts.splits))
    tests = [torch.empty(one.tests, dtype=torch.int64, device="meta") for one in holdings]  # each site scores its own
    return replace(parts, splits=replace(parts.splits, site_tests=tests if any(map(len, tests)) else ())), agreement


# -- the recipe --------------------------------------------------------------------------------------------------------


def recipe_for_nodes(config: RunConfig) -> str:
    """Return a recipe as it is sent to nodes; objects that were passed in Python cannot be sent."""
    for argument, label in labels_in(config).items():
        if argument not in ("dataset", "public"):  # nodes have their own
            raise CompatibilityError(
                f"{argument} = {label!r} was given in Python, and nodes cannot be sent it. Put it into a module that "
                "every node has, name it as module:name, and list that name as code in each node's configuration."
            )
    return config.to_toml()


def refuse_what_sites_cannot(recipe: RunConfig, test: str | None = None) -> None:
    """Refuse a recipe that nodes with data of their own cannot run, and name all that is wrong at once.

    `test` is the server's test set, "" if it has none, None where that is not known yet.
    """
    scenario, public, column, held_out = recipe.scenario, recipe.public, recipe.dataset.client, recipe.validation.size
    natural, learns = isinstance(scenarios.parse(scenario).split, Natural), learns_from_public(build_algorithm(recipe))
    taken = public.source == "test" or (public.source == "train" and (public.size or learns))
    way = "." if learns else ", or set public.size = 0."
    rules = [
        (not natural, f'scenario = {scenario!r} draws from one data set; set "natural", or partition in node.toml.'),
        (taken, f'public.source = "{public.source}" is of sites or the test set; name a file that all nodes have{way}'),
        (column, f"dataset.client = {column!r} says who holds a row, and a node holds all of its rows; leave it out."),
        (held_out, f"validation.size = {held_out} sets examples aside that do not leave the sites; set it to 0."),
        (test == "", "the server has no test set to score the model with; name one with --test (in Python: test)."),
    ]
    if wrong := [sentence for applies, sentence in rules if applies]:
        numbered = " ".join(f"({at}) {sentence}" for at, sentence in enumerate(wrong, 1))
        raise ShareableError(f"Nodes that bring data of their own cannot run this recipe: {numbered}")


# -- what the server has in place of the sites' data -------------------------------------------------------------------


def stand_in(agreement: Agreement, test: str, reading: Reading) -> Dataset:
    """Return the sites' data as the server knows it: how many examples there are of each class, and no example.

    Inputs and labels are tensors without values (torch's "meta" device): they have a shape and a type, and take no
    memory, however many examples a site claims. Reading one fails, so that nothing can use them by mistake. `test` is
    the server's own test set, with the columns and class numbers that the sites have agreed on.
    """
    assert (schema := agreement.schema) is not None
    count, dtype = sum(agreement.sizes), getattr(torch, schema.dtype)
    source = read_source(test, Expected(schema.columns, colour=schema.colour, whose="the sites"), reading)
    if len(read := list(source.raw.parts.values())) == 1:  # of which nothing is set aside
        source = replace(source, raw=replace(source.raw, parts={"train": read[0], "test": read[0]}))
    data = source.dataset()
    whole = data if len(read) == 2 else replace(data, test=data.test.take(torch.arange(0)))
    part = both_parts(whole, schema.classes, f"The server's test set {test}")
    if tuple(part.x.shape[1:]) != schema.input_shape or (part.x.dtype == torch.uint8) != (dtype == torch.uint8):
        raise CompatibilityError(
            f"The server's test set {test} has examples of {str(part.x.dtype).removeprefix('torch.')}"
            f"{list(part.x.shape[1:])}, and the sites have {schema.dtype}{list(schema.input_shape)}; they must be "
            "alike. Prepare it in the same way."
        )
    if dtype.is_floating_point or not part.x.is_floating_point():  # fractions stay what they are
        part = Part(part.x.to(dtype), part.y)
    x = torch.empty(count, *schema.input_shape, dtype=dtype, device="meta")
    train = Part(x, torch.empty(count, dtype=torch.int64, device="meta"))
    columns = schema.columns
    return Dataset("the sites' data", train, part, schema.classes, AT_SITES, agreement.data, columns=columns)


def partition_elsewhere(agreement: Agreement, counts: Ints, config: RunConfig) -> Partition:
    """Return who holds how many examples of each class, [clients, classes], and no position of any."""
    scenario = scenarios.parse(config.scenario)
    return Partition((np.arange(0),) * len(counts), counts, scenario, config.seed, agreement.sites)
