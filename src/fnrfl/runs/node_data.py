"""From a recipe and a node's own configuration to all that the node's client needs to train."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fnrfl.config import RunConfig, loads
from fnrfl.config.resolving import read_keys
from fnrfl.core import own_code, trust
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.trees import Tree
from fnrfl.data import scenarios
from fnrfl.data.agreement import Agreement, SiteFacts, agree_on_experiment
from fnrfl.data.node_config import NodeConfig
from fnrfl.data.terms import SavedSplit
from fnrfl.engines.trainer import Trainer
from fnrfl.runs.build_engine import build_trainer
from fnrfl.runs.given import words_in
from fnrfl.runs.parts import RunParts, gather_parts
from fnrfl.runs.run_files import versions

# -- the recipe on its way ---------------------------------------------------------------------------------------------


def recipe_for_nodes(config: RunConfig) -> str:
    """A recipe as it is sent to nodes; objects that were given in Python cannot be sent."""
    for argument, words in words_in(config).items():
        if argument not in ("dataset", "public"):  # nodes have their own
            raise CompatibilityError(
                f"{argument} = {words!r} was given in Python, and nodes cannot be sent it. Put it into a module that "
                "every node has, name it as module:name, and list that name as code in each node's configuration."
            )
    return config.to_toml()


def recipe_at_node(text: str, node: NodeConfig) -> RunConfig:
    """The recipe that a server sent, with this node's own data, paths and engine in the place of the server's."""
    told = read_keys(text, origin="The server's recipe")
    own: dict[str, object] = {
        "dataset.name": node.data,
        "metrics": "none",
        "engine": {"name": node.engine, "threads": 1, "clients_at_once": 1},
    }
    if told.get("public.source", "train") not in ("train", "test"):
        own["public.source"] = _copy_here(node, "public", "the public data")
    if isinstance(scenarios.parse(str(told.get("scenario", ""))).split, SavedSplit):
        own["scenario"] = _copy_here(node, "split", "the saved split that the scenario names")
    for key in ("model.name", "algorithm.name"):
        if str(own_code.target(key, words := told.get(key))) in node.allowed_code:
            trust.given(key, str(words))
    return loads(text, own, origin="The server's recipe", of_run=True)


def _copy_here(node: NodeConfig, key: str, what: str) -> str:
    """The path of this node's copy of something that the server has."""
    if not (path := getattr(node, key)):
        raise ConfigError(
            f"{node.opened} has no key {key}, and paths in a recipe are not followed by a node. Copy {what} to this "
            f"machine, and set {key} to it in the node's configuration."
        )
    return str(path)


# -- the first message -------------------------------------------------------------------------------------------------


def describe_node(recipe: RunConfig, node: NodeConfig) -> SiteFacts:
    """What a node tells the server first; `recipe` is the one at this node."""
    parts = _experiment(recipe, node)
    return SiteFacts(str(node.partition), versions(), node.partition, parts.dataset.checksum, split_hash(parts))


def split_hash(parts: RunParts) -> str:
    """The sha256 of who holds what, and of all parts that are set aside."""
    both = f"{parts.partition.sha256} {parts.splits.manifest()['sha256']}"
    return hashlib.sha256(both.encode()).hexdigest()


def agree_as_server(parts: RunParts, facts: Sequence[SiteFacts]) -> Agreement:
    """What the server of an experiment, who has all data, agrees on with the nodes."""
    return agree_on_experiment(facts, parts.config.clients, parts.dataset.checksum, split_hash(parts))


# -- the node's client -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuiltNode:
    """All that a node's one client needs; its pool refuses other clients."""

    client: int  # its number among all clients
    parts: RunParts
    trainer: Trainer
    client_memory: Tree  # what it remembers before its first round
    answers_tasks: bool  # False: inputs are to be scaled and nobody has said how, so it can only be asked for sums


def build_node(recipe: RunConfig, node: NodeConfig, agreement: Agreement) -> BuiltNode:
    """The client of a node, as the simulator would have it; `recipe` is the one at this node."""
    parts, client = _experiment(recipe, node), node.partition
    assert client is not None
    if (parts.dataset.checksum, split_hash(parts)) != (agreement.data, agreement.split):
        raise CompatibilityError(
            f"{node.opened} has other data, or divides it in another way, than it told the server at first. Put the "
            "data back as it was, or run again."
        )
    return _built(client, replace(parts, pool=parts.pool.only(client)), agreement)


def _experiment(recipe: RunConfig, node: NodeConfig) -> RunParts:
    """The parts of a run of which this node takes one client's."""
    if node.partition is None:
        raise CompatibilityError(
            f"{node.opened} brings data of its own, and the recipe's scenario = {recipe.scenario!r} draws clients from "
            'one data set. Set scenario = "natural" in the recipe, or give the node a partition.'
        )
    parts = gather_parts(recipe)
    if node.partition >= parts.config.clients:
        raise CompatibilityError(
            f"{node.opened} asks for a client that there is not: the recipe has {parts.config.clients}, numbered from "
            "0. Correct the node's partition."
        )
    return parts


def _built(client: int, parts: RunParts, agreement: Agreement) -> BuiltNode:
    waiting = parts.config.dataset.asks_for_means and agreement.scaling is None
    if waiting:  # sums of inputs are taken in float64, as the simulator takes them
        parts = replace(parts, pool=parts.pool.in_type(torch.float64))
    elif agreement.scaling is not None:
        parts = parts.scaled_by(agreement.scaling)
    trainer = build_trainer(parts.config, parts.net, parts.pool)
    return BuiltNode(client, parts, trainer, parts.algorithm.client_state(parts.net), not waiting)
