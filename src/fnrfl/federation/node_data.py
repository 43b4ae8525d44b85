"""From a recipe and a node's own configuration to all that the node's client needs to train."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from fnrfl.config import RunConfig, loads
from fnrfl.config.resolving import read_keys
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError, ShareableError, sentence
from fnrfl.core.messages import MeasureRequest
from fnrfl.core.trees import Tree
from fnrfl.data import scenarios
from fnrfl.data.datasets import Dataset
from fnrfl.data.partition.views import Splits
from fnrfl.data.scaling import InputMoments, Scaling
from fnrfl.data.scenarios import Natural, SavedSplit
from fnrfl.data.sources.entry import checksum
from fnrfl.engines.rehearsal import Rehearsal
from fnrfl.engines.trainer import Trainer
from fnrfl.federation.agreed_requests import AgreedRequests
from fnrfl.federation.agreement import Agreement, SiteFacts, SiteHolding
from fnrfl.federation.node import Participant
from fnrfl.federation.node_config import NodeConfig
from fnrfl.federation.site_data import changed_since, describe_site, read_agreed
from fnrfl.federation.stand_in import stand_in_partition
from fnrfl.runs.data import build_pool, divide, learns_from_public, load_public, reading_of, with_counted_clients
from fnrfl.runs.passed import NOTHING_PASSED, labels_in
from fnrfl.runs.run_files import versions
from fnrfl.runs.setup.engine import build_trainer, choose_engine
from fnrfl.runs.setup.inputs import RunParts, fitting_net, gather_parts, on_device
from fnrfl.runs.setup.method import build_algorithm, cohort_size
from fnrfl.runs.setup.model import check_values

log = logging.getLogger("fnrfl")
MOST_RECIPE = 2**15  # characters: keys of very many parts take the square of their length to read

# -- the recipe on its way ---------------------------------------------------------------------------------------------


def recipe_for_nodes(config: RunConfig) -> str:
    """A recipe as it is sent to nodes; objects that were given in Python cannot be sent."""
    for argument, words in labels_in(config).items():
        if argument not in ("dataset", "public"):  # nodes have their own
            raise CompatibilityError(
                f"{argument} = {words!r} was given in Python, and nodes cannot be sent it. Put it into a module that "
                "every node has, name it as module:name, and list that name as code in each node's configuration."
            )
    return config.to_toml()


def recipe_at_node(text: str, node: NodeConfig) -> RunConfig:
    """The recipe that a server sent, with this node's own data, paths and engine in the place of the server's."""
    if len(text) > MOST_RECIPE:
        raise ShareableError(f"A recipe has {len(text):,} characters; {MOST_RECIPE:,} are the most. It was refused.")
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
    return loads(text, own, origin="The server's recipe", of_run=True, listed_code=node.allowed_code)


def _copy_here(node: NodeConfig, key: str, what: str) -> str:
    """The path of this node's copy of something that the server has."""
    if not (path := getattr(node, key)):
        raise ShareableError(
            f"{node.opened} has no key {key}, and paths in a recipe are not followed by a node. Copy {what} to this "
            f"machine, and set {key} to it in the node's configuration."
        )
    return str(path)


# -- what a node tells -------------------------------------------------------------------------------------------------


def describe_node(recipe: RunConfig, node: NodeConfig) -> SiteFacts:
    """What a node tells the server first; `recipe` is the one at this node."""
    if node.partition is not None:
        parts = _experiment(recipe, node)
        return SiteFacts(str(node.partition), versions(), node.partition, parts.dataset.checksum, split_hash(parts))
    return SiteFacts(node.name.strip(), versions(), schema=describe_site(node, reading_of(recipe)))


def tell_holding(recipe: RunConfig, node: NodeConfig, agreement: Agreement) -> SiteHolding:
    """What a site tells the server once columns and classes are agreed on: what it trains on, and its public data."""
    site = _site_splits(recipe, node, agreement)
    counts = np.bincount(site.dataset.train.y.numpy(), minlength=site.dataset.num_classes)
    return SiteHolding(node.name.strip(), tuple(counts.tolist()), site.dataset.checksum, public_hash(site.splits))


@contextmanager
def kept_at_the_site(node: NodeConfig) -> Iterator[None]:
    """What is wrong with a site's data stays in the site's own log: a sentence about it may quote a cell."""
    try:
        yield
    except Exception as error:
        if node.partition is not None:  # the server has the data too
            raise
        log.error("%s has found something wrong with its data: %s", node.opened, sentence(error))
        raise ShareableError(
            f"{node.opened} has found something wrong with its data. Its own log says what, and the server is not "
            "told, because that may quote the data. Correct the data, or leave the node out."
        ) from None


def split_hash(parts: RunParts) -> str:
    """The sha256 of who holds what, and of all parts that are set aside."""
    both = f"{parts.partition.sha256} {parts.splits.manifest()['sha256']}"
    return hashlib.sha256(both.encode()).hexdigest()


def public_hash(splits: Splits) -> str:
    """The sha256 of all public data, in the shares that it is used in."""
    shares = [(part.x.numpy(), part.y.numpy()) for part in (splits.public, splits.ranking, splits.distill)]
    return checksum(*(array for share in shares for array in share))


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


# -- the node's client -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuiltNode:
    """All that a node's one client needs; its pool refuses other clients."""

    participant: Participant
    parts: RunParts

    @property
    def client(self) -> int:
        """The number of the node's client among all clients."""
        return self.participant.client


def build_node(recipe: RunConfig, node: NodeConfig, agreement: Agreement) -> BuiltNode:
    """The client of a node, as the simulator would have it; `recipe` is the one at this node."""
    client, parts = _own_client(recipe, node, agreement)
    scales, config = parts.config.dataset.asks_for_means, parts.config
    # Until somebody has said how inputs are scaled, sums of them are taken in float64, as the simulator does.
    trainer = _trainer(replace(parts, pool=parts.pool.in_type(torch.float64)) if scales else parts)
    rehearsal = Rehearsal(parts.algorithm, parts.net, parts.pool, config.client, seed=config.seed, simulated=False)
    moments = MeasureRequest([client], 0, InputMoments(config.dataset.missing == "mean"), "private")
    agreed = AgreedRequests(
        rehearsal, client, cohort=cohort_size(config), rounds=config.rounds, before=(moments,) if scales else ()
    )
    participant = Participant(
        client,
        trainer,
        parts.algorithm.client_state(parts.net),
        agreed,
        shares_memory=node.share_memory and parts.algorithm.personalised,
        scaled=_scaled_trainers(parts) if scales else None,
        max_examples=node.max_examples,
    )
    return BuiltNode(participant, parts)


def _trainer(parts: RunParts) -> Trainer:
    return build_trainer(parts.config, parts.net, parts.pool)


def _scaled_trainers(parts: RunParts) -> Callable[[Tree], Trainer]:
    """From means and spreads to the trainer that scales with them; the last one is kept: all letters say the same."""
    made = lru_cache(maxsize=1)(lambda mean, std: _trainer(parts.scaled_by(Scaling(mean, std, {}))))
    return lambda told: made(tuple(told["mean"].tolist()), tuple(told["std"].tolist()))


def _own_client(recipe: RunConfig, node: NodeConfig, agreement: Agreement) -> tuple[int, RunParts]:
    """(the client's number, what it trains with); refused if that is not what the node told the server at first."""
    if node.partition is not None:
        parts, client = _experiment(recipe, node), node.partition
        if (parts.dataset.checksum, split_hash(parts)) != (agreement.data, agreement.split):
            raise ShareableError(str(changed_since(node, "other data, or divides it in another way")))
        return client, replace(parts, pool=parts.pool.only(client))
    with kept_at_the_site(node):
        site = _site_splits(recipe, node, agreement)
    client = agreement.sites.index(node.name.strip())
    if (site.dataset.checksum, public_hash(site.splits)) != (agreement.hashes[client], agreement.split):
        raise ShareableError(str(changed_since(node, "other data, or other public data")))
    with kept_at_the_site(node):
        return client, _site_parts(recipe, site, agreement, client)


def _experiment(recipe: RunConfig, node: NodeConfig) -> RunParts:
    """The parts of a run of which this node takes one client's."""
    if node.partition is None:
        raise ShareableError(
            f"{node.opened} brings data of its own, and the recipe's scenario = {recipe.scenario!r} draws clients from "
            'one data set. Set scenario = "natural" in the recipe, or give the node a partition.'
        )
    parts = gather_parts(recipe)
    if node.partition >= parts.config.clients:
        raise ShareableError(
            f"{node.opened} asks for a client that there is not: the recipe has {parts.config.clients}, numbered from "
            "0. Correct the node's partition."
        )
    return parts


@dataclass(frozen=True)
class SiteSplits:
    """A site's own examples, beside its copy of the public data."""

    dataset: Dataset
    splits: Splits
    algorithm: Algorithm


def _site_splits(recipe: RunConfig, node: NodeConfig, agreement: Agreement) -> SiteSplits:
    """What a site has, read as all sites have agreed."""
    if agreement.schema is None or node.name.strip() not in agreement.sites:
        raise ShareableError(
            f"{node.opened} is not among those that the server has agreed with. Begin again, with this node there."
        )
    dataset = read_agreed(node, reading_of(recipe), agreement.schema)
    algorithm = build_algorithm(recipe)
    _, splits = divide(recipe, dataset, load_public(recipe, dataset, NOTHING_PASSED), algorithm)
    return SiteSplits(dataset, splits, algorithm)


def _site_parts(recipe: RunConfig, site: SiteSplits, agreement: Agreement, client: int) -> RunParts:
    """The parts of a run as one site has them; the server has checked what concerns all clients."""
    dataset, own = site.dataset, np.bincount(site.dataset.train.y.numpy(), minlength=site.dataset.num_classes)
    partition = stand_in_partition(agreement, client, own, scenarios.parse(recipe.scenario), recipe.seed)
    config, net = fitting_net(with_counted_clients(recipe, partition), dataset, site.algorithm)
    check_values(config, net, site.splits)
    config, _ = choose_engine(config, net)  # the server says what is to be said about it
    net = on_device(config, net)
    pool = build_pool(config, dataset, partition, site.splits, net, client)
    return RunParts(config, dataset, partition, site.splits, site.algorithm, net, pool, dataset.notices)
