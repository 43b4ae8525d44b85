"""A node's side: it answers the handshake, and requests of the runs that were agreed on, with its own data alone."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fnrfl.config import RunConfig, loads
from fnrfl.config.resolving import read_keys
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import ShareableError, sentence
from fnrfl.core.messages import MeasureRequest
from fnrfl.core.types import State, Tree
from fnrfl.core.words import printable
from fnrfl.data import scenarios
from fnrfl.data.datasets import Dataset
from fnrfl.data.noise import noise_of_scores
from fnrfl.data.partition.views import Splits
from fnrfl.data.reading import split_names
from fnrfl.data.scaling import InputMoments, Scaling
from fnrfl.data.scenarios import SavedSplit
from fnrfl.engines.rehearsal import Rehearsal
from fnrfl.engines.wire import Parsed
from fnrfl.federation.agreement import (
    Agreement,
    SiteFacts,
    SiteHolding,
    as_plain,
    from_plain,
    public_hash,
    split_hash,
)
from fnrfl.federation.handshake import partition_elsewhere, refuse_what_sites_cannot
from fnrfl.federation.messages import HandshakeRequest, NodeReply, check_run_id
from fnrfl.federation.node import AgreedRequests, Node, Participant, answer_bytes
from fnrfl.federation.node_config import NodeConfig
from fnrfl.federation.site_data import changed_since, describe_site, read_agreed
from fnrfl.process import isolated
from fnrfl.rundir import files
from fnrfl.runs.data import build_pool, divide, load_public, reading_of, with_counted_clients
from fnrfl.runs.passed import NOTHING_PASSED
from fnrfl.runs.run import versions
from fnrfl.runs.scores import score_model
from fnrfl.runs.setup.build import RunParts, fitting_net, gather_parts, on_device
from fnrfl.runs.setup.engine import build_trainer, choose_engine
from fnrfl.runs.setup.method import build_algorithm, cohort_size
from fnrfl.runs.setup.model import check_values

log = logging.getLogger("fnrfl")
MOST_RECIPE = 2**15  # characters: keys of very many parts take the square of their length to read
AGREED_FILE = "agreed.json"  # in a run's folder: its recipe, and what was agreed on
HANDSHAKE = {HandshakeRequest.__name__: HandshakeRequest}


@dataclass
class NodeService:
    """The runs of a node. A run that was agreed on before this process began is read from the node's folder.

    The node's own configuration is read before every handshake.
    """

    read_config: Callable[[], NodeConfig]
    folder: Path
    config: NodeConfig = field(init=False)
    _open: dict[str, Node] = field(default_factory=dict)  # the last run

    def __post_init__(self) -> None:
        self.config = self.read_config()

    def answer(self, message: bytes) -> bytes:
        """Return the reply to a message; what goes wrong is in the reply, and never raised."""
        with isolated():
            return answer_bytes(message, self._answer)

    def _answer(self, message: Parsed) -> NodeReply:
        head = message.head
        if head["class"] in HANDSHAKE:
            request = message.value(HANDSHAKE)
            return NodeReply(request.id, -1, self._handshake(request))
        node = self._node(check_run_id(head.get("run")))  # opening it imports the classes that the message names
        print(f"round {int(str(head['round'])) + 1}  {printable(str(head['phase'])[:40])}", flush=True)  # worker.log
        return node.answer(message)

    def _handshake(self, request: HandshakeRequest) -> dict[str, Any]:
        agreement = None if request.agreement is None else from_plain(Agreement, request.agreement, "the server")
        if request.step == "begin" and agreement is not None:
            self._keep(check_run_id(request.run), str(request.recipe), agreement)
            return {}
        if (config := self.read_config()) != self.config:
            self.config = config
            self._open.clear()  # what was opened by another configuration
        recipe = recipe_at_node(request.recipe, self.config)
        if self.config.partition is None:
            refuse_what_sites_cannot(recipe)
        with kept_at_the_site(self.config):
            if agreement is not None:
                return as_plain(Site.of(recipe, self.config, agreement).holding)
            name, partition = self.config.name.strip(), self.config.partition
            if partition is None:
                return as_plain(SiteFacts(name, versions(), schema=describe_site(self.config, reading_of(recipe))))
            parts = _experiment(recipe, self.config)
            hashes = (parts.dataset.checksum, split_hash(parts))
            return as_plain(SiteFacts(str(partition), versions(), partition, *hashes))

    def _keep(self, run: str, recipe: str, agreement: Agreement) -> None:
        """Write what was agreed on for a run, and later how its inputs are scaled; nothing else of it may change."""
        file = self.folder / run / AGREED_FILE
        if known := file.is_file():
            kept_recipe, kept = self._kept(file)
            if (kept_recipe, kept) != (recipe, agreement):
                raise ShareableError(f"Run {run} was agreed on with another recipe or other data. Begin a new run.")
            if kept.scale == agreement.scale:
                return
            self._open.pop(run, None)
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write(file, json.dumps({"recipe": recipe, "agreement": as_plain(agreement)}))
        if not known:
            self._prune(file)

    def _kept(self, file: Path) -> tuple[str, Agreement]:
        """Return the recipe of a run and what was agreed on."""
        kept = json.loads(files.read(file, "what was agreed on must be there"))
        return kept["recipe"], from_plain(Agreement, kept["agreement"], "the server")

    def _prune(self, new: Path) -> None:
        """Remove the folders of runs that were used longest ago; those of the new run and of the open one stay."""
        agreed = [file for file in self.folder.glob(f"*/{AGREED_FILE}") if not file.parent.is_symlink()]
        old = sorted(agreed, key=lambda file: (file == new or file.parent.name in self._open, file.stat().st_mtime))
        for file in old[: -self.config.keep_runs]:
            if file != new and file.parent.name not in self._open:
                file.unlink()  # a folder that is half gone is no run
                shutil.rmtree(file.parent, ignore_errors=True)

    def _node(self, run: str) -> Node:
        """Return the node of a run, with its data read; that of another run is forgotten."""
        if run not in self._open:
            file = self.folder / run / AGREED_FILE
            if not file.is_file():
                raise ShareableError(f"Run {run} was not agreed on with this node, or its folder was removed.")
            recipe, agreement = self._kept(file)
            file.touch()  # the run was used now
            participant, _ = build_node(recipe_at_node(recipe, self.config), self.config, agreement)
            self._open = {run: Node(participant, self.folder, run)}
        return self._open[run]


# -- the recipe --------------------------------------------------------------------------------------------------------


def recipe_at_node(text: str, node: NodeConfig) -> RunConfig:
    """Return the recipe that a server sent, with this node's own data, paths and engine in place of the server's."""
    if len(text) > MOST_RECIPE:
        raise ShareableError(f"A recipe has {len(text):,} characters; {MOST_RECIPE:,} are the most.")
    told = read_keys(text, origin="The server's recipe")
    public = told.get("public.source", "train") not in ("train", "test")
    split = isinstance(scenarios.parse(str(told.get("scenario", ""))).split, SavedSplit)
    own: dict[str, object] = {
        "dataset.name": node.data,
        "metrics": "none",
        "engine": {"name": node.engine, "threads": 1, "clients_at_once": 1},
    }
    for key, copy, needed, what in (
        ("public.source", "public", public, "the public data"),
        ("scenario", "split", split, "the saved split that the scenario names"),
    ):
        if needed and not getattr(node, copy):
            raise ShareableError(
                f"{node.opened} has no key {copy}, and paths in a recipe are not followed by a node. Copy {what} to "
                f"this machine, and set {copy} to it in the node's configuration."
            )
        own |= {key: getattr(node, copy)} if needed else {}
    allowed = frozenset(split_names(node.code))
    return loads(text, own, origin="The server's recipe", of_run=True, listed_code=allowed)


@contextmanager
def kept_at_the_site(node: NodeConfig) -> Iterator[None]:
    """Keep what is wrong with a site's data in the site's own log: a sentence about it may quote a cell."""
    try:
        yield
    except ShareableError:  # which quotes nothing
        raise
    except Exception as error:
        if node.partition is not None:  # the server has the data too
            raise
        log.error("%s has found something wrong with its data: %s", node.opened, sentence(error))
        raise ShareableError(
            f"{node.opened} has found something wrong with its data. Its own log says what, and the server is not "
            "told, because that may quote the data. Correct the data, or leave the node out."
        ) from None


# -- the node's client -------------------------------------------------------------------------------------------------


def build_node(recipe: RunConfig, node: NodeConfig, agreement: Agreement) -> tuple[Participant, RunParts]:
    """Return a node's client as the simulator would have it, and its parts; `recipe` is the one at this node.

    If inputs are to be scaled, and the agreement does not say how yet, the client tells sums of them and nothing else.
    """
    with kept_at_the_site(node):
        client, parts = _own_client(recipe, node, agreement)
    config, agreed = parts.config, list[object]()
    if config.dataset.asks_for_means and agreement.scale is None:
        parts = replace(parts, pool=parts.pool.in_type(torch.float64))  # as the simulator takes the sums
        agreed.append(MeasureRequest([client], 0, InputMoments(config.dataset.missing == "mean"), "private"))
    elif config.dataset.asks_for_means and agreement.scale is not None:
        parts = parts.scaled_by(Scaling(*agreement.scale, bytes={}))
    rehearsal = Rehearsal(parts.algorithm, parts.net, parts.pool, config.client, seed=config.seed, simulated=False)
    of_method = AgreedRequests(rehearsal, client, cohort=cohort_size(config), rounds=config.rounds)
    participant = Participant(
        client,
        build_trainer(config, parts.net, parts.pool),
        parts.algorithm.client_state(parts.net),
        agreed or of_method,
        shares_memory=node.share_memory and parts.algorithm.personalised,
        max_examples=node.max_examples,
        score=partial(_num_right, parts, client) if _scores(recipe, node) and len(parts.splits.test) else None,
        personalised=parts.algorithm.personalised,
    )
    return participant, parts


def _scores(recipe: RunConfig, node: NodeConfig) -> bool:
    """Whether the server is told how models do on the site's test examples: recipe and node must both allow it."""
    return node.partition is None and recipe.network.site_scores and node.share_scores


def _num_right(parts: RunParts, client: int, model: State, memory: Tree) -> int:
    """Count the site's test examples that a model answers right: its own model, if the method has such."""
    mine, test, config = parts.algorithm.personal(parts.net, model, client, memory), parts.splits.test, parts.config
    noisy = parts.partition.noise is not None and not (config.leaks.clean_test_for_fnr and config.fnr is not None)
    noise = noise_of_scores(parts.partition, config.seed, client, "test", parts.net.device) if noisy else None
    score = score_model(parts.net, mine, test.x, test.y, parts.dataset.num_classes, noise)
    return int((score.predicted == score.labels).sum())


def _own_client(recipe: RunConfig, node: NodeConfig, agreement: Agreement) -> tuple[int, RunParts]:
    """(the client's number, what it trains with); refused if that is not what the node told the server at first."""
    if node.partition is not None:
        parts, client, has = _experiment(recipe, node), node.partition, "other data, or divides it in another way"
        parts = replace(parts, pool=parts.pool.only(client))
        now, told = (parts.dataset.checksum, split_hash(parts)), (agreement.data, agreement.split)
    else:
        site, has = Site.of(recipe, node, agreement), "other data, or other public data"
        client, holding = agreement.sites.index(node.name.strip()), site.holding
        now, told = (holding.data, holding.public), (agreement.hashes[client], agreement.split)
    if now != told:
        raise ShareableError(str(changed_since(node, has)))
    return client, parts if node.partition is not None else site.parts(recipe, agreement, client)


def _experiment(recipe: RunConfig, node: NodeConfig) -> RunParts:
    """Return the parts of a run of which this node takes one client's."""
    parts = gather_parts(recipe)
    if (node.partition or 0) >= parts.config.clients:
        raise ShareableError(
            f"{node.opened} asks for a client that there is not: the recipe has {parts.config.clients}, numbered from "
            "0. Correct the node's partition."
        )
    return parts


@dataclass(frozen=True)
class Site:
    """A site's own examples, read as all sites have agreed, beside its copy of the public data."""

    dataset: Dataset
    splits: Splits
    algorithm: Algorithm
    scores: bool  # whether the server is told how it does on the site's test examples

    @classmethod
    def of(cls, recipe: RunConfig, node: NodeConfig, agreement: Agreement) -> Site:
        """Read what a site has."""
        if agreement.schema is None or node.name.strip() not in agreement.sites:
            raise ShareableError(
                f"{node.opened} is not among those that the server has agreed with. Begin again, with this node there."
            )
        dataset, algorithm = read_agreed(node, reading_of(recipe), agreement.schema), build_algorithm(recipe)
        _, splits = divide(recipe, dataset, load_public(recipe, dataset, NOTHING_PASSED), algorithm)
        return cls(dataset, splits, algorithm, _scores(recipe, node))

    @property
    def holding(self) -> SiteHolding:
        """What it tells the server once columns and classes are agreed on: how much it trains on, and scores with."""
        counts = np.bincount(self.dataset.train.y.numpy(), minlength=self.dataset.num_classes)
        tests = len(self.splits.test) if self.scores else 0
        return SiteHolding(tuple(counts.tolist()), self.dataset.checksum, public_hash(self.splits), tests)

    def parts(self, recipe: RunConfig, agreement: Agreement, client: int) -> RunParts:
        """Return the parts of a run as this site has them; the server has checked what concerns all clients."""
        own = self.holding.counts
        counts = np.zeros((len(agreement.sizes), len(own)), dtype=np.int64)
        counts[:, 0], counts[client] = agreement.sizes, own  # all that others hold counts as of the first class
        partition = partition_elsewhere(agreement, counts, recipe)
        config, net = fitting_net(with_counted_clients(recipe, partition), self.dataset, self.algorithm)
        check_values(config, net, self.splits)
        config, _ = choose_engine(config, net)  # the server says what is to be said about it
        net = on_device(config, net)
        pool = build_pool(config, self.dataset, partition, self.splits, net, client)
        notices = self.dataset.notices
        return RunParts(config, self.dataset, partition, self.splits, self.algorithm, net, pool, notices)
