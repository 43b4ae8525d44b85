"""A node of an experiment: it reads data by its own configuration, and its client is the simulator's to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fnrfl.config import RunConfig, loads
from fnrfl.config import load as load_config
from fnrfl.core.algorithm import Objective
from fnrfl.core.errors import CompatibilityError, ConfigError, ShareableError
from fnrfl.core.messages import TrainRequest
from fnrfl.core.rng import generator
from fnrfl.core.store import ClientStore
from fnrfl.core.training import Training
from fnrfl.core.trees import leaves
from fnrfl.core.types import Data, LocalTask
from fnrfl.data.batches import Pool
from fnrfl.engines.kept_clients import KeptClients
from fnrfl.engines.trainer import Trainer
from fnrfl.federation.agreement import Agreement, SiteFacts, agree_on_experiment
from fnrfl.federation.handshake import recipe_for_nodes
from fnrfl.federation.node_config import NodeConfig, paths_beside
from fnrfl.federation.node_service import recipe_at_node
from fnrfl.runs.setup.build import Built, build, gather_parts
from fnrfl.runs.setup.engine import build_engine
from node_services import BuiltNode, agree, clients_of
from settings import with_keys

SKEWED = "label-dirichlet(0.5, min=5) + feature-noise(0.3)"
DIGITS = (
    "clients=4", "model=mlp(hidden=8)", "engine=loop", "engine.threads=1", "engine.accelerate=false", "rounds=2",
    "client.epochs=1",
)  # fmt: skip
PARTS: tuple[Data, ...] = ("public", "ranking", "distill", "validation")


pytestmark = pytest.mark.usefixtures("tmp_cwd")


def digits(*words: str) -> RunConfig:
    return load_config("digits", [*DIGITS, *words])


def four(*order: int) -> list[NodeConfig]:
    return [NodeConfig(data="digits", partition=k) for k in order or range(4)]


def both(config: RunConfig, nodes: Sequence[NodeConfig]) -> tuple[Built, list[BuiltNode]]:
    """The simulator's run, and the clients that nodes make of what is sent to them."""
    simulated = build(config)
    return simulated, clients_of(agree(config, nodes), nodes, simulated.scaling)


def trained(trainer: Trainer, client: int, training: Training, memory: Any) -> list[torch.Tensor]:
    """All tensors of what a client replies, and of what it then remembers and holds."""
    clients = KeptClients(trainer, ClientStore(memory), ClientStore({}))
    task = LocalTask(Objective(), "local", trainer.initial, hold_model=True)
    (reply,) = clients.train(TrainRequest([client], 1, task, training, [training.epochs]))
    return leaves([vars(reply.replies), clients.memory.get(client), clients.held_model(client)])


def batches(pool: Pool, client: int, data: Data, training: Training) -> list[torch.Tensor]:
    """The examples of a task and of a probe, with crops and noise."""
    made = pool.plan(client, data, training, lambda name: generator(1, client, name))
    seen = [pool.take(data, made.order, made.crops)]
    seen += [(x if made.noise is None else made.noise(x), y) for x, y in seen]
    probed = pool.probe_batches(client, data, lambda name: generator(2, client, name))
    return [tensor for pair in seen for tensor in pair] + [t for batch in probed for t in (batch.x, batch.y)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit; what is missing in one is missing in the other."""
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.is_floating_point())


def assert_same_client(simulated: Built, node: BuiltNode) -> None:
    training, client = simulated.engine.training, node.client
    for data in ("private", *(part for part in PARTS if len(simulated.pool.all(part)[1]))):
        ours, theirs = (batches(pool, client, data, training) for pool in (simulated.pool, node.parts.pool))
        assert all(map(same, ours, theirs)) and len(ours) == len(theirs) > 0
    assert torch.equal(simulated.pool.examples, node.parts.pool.examples)
    assert torch.equal(simulated.pool.class_counts(client), node.parts.pool.class_counts(client))
    memory = simulated.algorithm.client_state(simulated.net)
    assert all(map(torch.equal, leaves(memory), leaves(node.participant.birth)))
    one = trained(simulated.engine.server, client, training, memory)
    other = trained(node.participant.trainer, client, training, node.participant.birth)
    assert len(one) == len(other) and all(map(torch.equal, one, other))


RECIPES = [
    (f"scenario={SKEWED}",),
    (f"scenario={SKEWED[:-1]}, redraw=false)", "algorithm=scaffold", "dataset.scale=standard"),
    ("scenario=quantity-dirichlet(0.5, min=5)", "algorithm=public-share", "fnr=on", "client.augment=none"),
    ("scenario=iid", "algorithm=feddf", "public.ranking=0.3", "engine.precision=float64"),
]


@pytest.mark.parametrize("words", RECIPES)
def test_a_node_has_the_client_of_the_simulator_to_the_bit(words: tuple[str, ...]) -> None:
    simulated, nodes = both(digits(*words), four(2, 0, 3, 1))
    assert [node.client for node in nodes] == [0, 1, 2, 3]
    for node in nodes:
        assert_same_client(simulated, node)


def test_a_node_takes_its_own_copies_of_data_split_and_public_data() -> None:
    whole = gather_parts(digits()).dataset
    np.savez("server.npz", x=whole.train.x, y=whole.train.y)
    np.savez("public.npz", x=whole.test.x, y=whole.test.y)
    own = digits("dataset=server.npz", "public.source=public.npz", "clients=3")
    parts = gather_parts(own)
    Path("split.json").write_text(json.dumps(parts.partition.manifest() | {"splits": parts.splits.manifest()}))
    Path("there").mkdir()
    for name in ("server.npz", "public.npz", "split.json"):
        shutil.copy(name, "there")
    here = {"data": "there/server.npz", "public": "there/public.npz", "split": "there/split.json"}
    saved = with_keys(own, {"scenario": "split.json", "clients": 0})
    simulated, nodes = both(saved, [NodeConfig.from_values(here | {"partition": k}) for k in range(3)])
    for node in nodes:
        assert_same_client(simulated, node)
        assert node.parts.config.dataset.name.startswith("there/")


def test_a_pool_answers_for_its_own_client_alone() -> None:
    simulated, (node, *_) = both(digits(), four())
    pool, stream = node.parts.pool, lambda name: generator(0, name)
    assert len(pool.take("private", torch.arange(int(pool.examples[0])))[1]) == len(pool._parts["private"][1])
    for client, who in ((1, "client 1"), (-1, "the clients")):
        for ask in (
            lambda client=client: pool.plan(client, "private", simulated.engine.training, stream),
            lambda client=client: next(iter(pool.probe_batches(client, "private", stream))),
            lambda client=client: pool.class_counts(client) if client >= 0 else pool.all("private"),
        ):
            with pytest.raises(CompatibilityError, match=f"private examples of {who} are not on this machine"):
                ask()
    pool.plan(-1, "public", simulated.engine.training, stream)  # public data is everybody's


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dato": "digits"}, "'dato'.* Did you mean 'data'"),
        ({"partition-id": 1}, "'partition_id'.* Did you mean 'partition'"),
        ({"data": " "}, "no key data"),
        ({"partition": None}, "neither of the keys partition and name"),
        ({"name": "Aachen"}, "both of the keys partition and name"),
        ({"partition": -1}, "partition = -1"),
        ({"partition": "0"}, "partition = '0'; .* whole number"),
        ({"partition": True}, "partition = True; .* whole number"),
        ({"data": 3}, "data = 3; .* text"),
        ({"share-memory": "yes"}, "share_memory = 'yes'; .* true or false"),
        ({"ignore": "age"}, "ignore = 'age'"),
        ({"engine": "loup"}, "Did you mean 'loop'"),
        ({"keep_runs": 0}, "keep_runs = 0"),
    ],
)
def test_a_configuration_that_cannot_be_right_is_refused(values: dict[str, object], words: str) -> None:
    given = {"data": "digits", "partition": 0} | values
    with pytest.raises(ConfigError, match=words):
        NodeConfig.from_values({key: value for key, value in given.items() if value is not None})


def test_a_node_file_names_paths_beside_it() -> None:
    values = {"data": "näher.csv", "name": "Ähre", "public": "/srv/public.csv", "folder": "state"}
    node = NodeConfig.from_values(paths_beside(Path("etc"), values))
    assert node.data == str(Path("etc/näher.csv").absolute()) and node.public == "/srv/public.csv"
    assert (node.name, node.folder) == ("Ähre", str(Path("etc/state").absolute()))
    for words in ("digits", "mine:rows"):
        assert paths_beside(Path("etc"), {"data": words, "partition": 0}) == {"data": words, "partition": 0}


NODE = NodeConfig(data="digits", partition=0)


def test_no_path_of_a_recipe_is_followed() -> None:
    for word, key in (("public.source=/etc/passwd", "public"), ("scenario=/etc/split.json", "split")):
        with pytest.raises(ShareableError, match=f"partition = 0 has no key {key}"):
            recipe_at_node(digits(word).to_toml(), NODE)
    assert recipe_at_node(digits("dataset=/etc/passwd.csv").to_toml(), NODE).dataset.name == "digits"


def with_code() -> str:
    """A recipe that names code of somebody's own."""
    Path("nets.py").write_text("def make(input_shape, num_classes, hidden):\n    raise RuntimeError('ran')\n")
    return digits().to_toml().replace('"mlp(hidden=8)"', '"nets:make(hidden=3)"')


def test_code_that_a_recipe_names_runs_only_if_the_node_lists_it() -> None:
    with pytest.raises(ShareableError, match="code"):
        recipe_at_node(with_code(), NODE)
    allowed = recipe_at_node(with_code(), replace(NODE, code="other:thing, nets:make"))
    assert allowed.model.name == "nets:make(hidden=3)"


def test_what_was_allowed_elsewhere_does_not_count_at_a_node(tmp_path: Path) -> None:
    text = with_code()
    assert loads(text, trust=True) == loads(text)  # typed once, and remembered from then on
    with pytest.raises(ShareableError, match="code"):
        recipe_at_node(text, NODE)
    shutil.rmtree(tmp_path / "state")
    recipe_at_node(text, replace(NODE, code="nets:make"))
    assert not list((tmp_path / "state").rglob("*.json"))  # nor is what a node allows remembered elsewhere


VERSIONS = {"fnrfl": "1", "torch": "2"}


def told(partition: int | None, **changed: Any) -> SiteFacts:
    return replace(SiteFacts(str(partition), VERSIONS, partition, "data", "split"), **changed)


def agreed(*facts: SiteFacts) -> Agreement:
    return agree_on_experiment(facts, 2, "data", "split")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([told(0), told(0)], "Two nodes .* partition = 0"),
        ([told(0), told(2)], "partition = 2, and the recipe has 2 clients"),
        ([told(1)], "No node has partition = 0"),
        ([told(0), told(1, data="0ther")], "partition = 1 has another data set.*0ther"),
        ([told(0), told(1, split="0ther")], "partition = 1 divides the data.*0ther"),
        ([told(0), told(1, versions={"fnrfl": "2"})], "partition = 0 has fnrfl 1 and .* partition = 1 has 2"),
        ([told(0), told(None, name="Aachen")], "The node 'Aachen' brings data of its own"),
    ],
)
def test_nodes_that_do_not_fit_are_refused_by_name(facts: list[SiteFacts], words: str) -> None:
    with pytest.raises(CompatibilityError, match=words):
        agreed(*facts)


def test_another_torch_is_a_notice_and_no_refusal() -> None:
    made = agreed(told(0), told(1, versions=VERSIONS | {"torch": "3"}))
    assert ["partition = 1 has 3" in notice for notice in made.notices] == [True]
    assert made == agreed(told(1), told(0)) and made.sites == ("0", "1")


def test_data_that_changed_after_the_first_message_is_refused() -> None:
    met = agree(digits(), four())
    with pytest.raises(CompatibilityError, match="partition = 0 has other data"):
        clients_of(replace(met, agreement=replace(met.agreement, data="other")), four())


def test_the_server_of_a_network_uses_no_private_example() -> None:
    """Also where it could, as in an experiment."""
    met = agree(digits("algorithm=centralised", "engine=loop"), four())
    engine = build_engine(met.parts, None)
    with pytest.raises(CompatibilityError, match="private examples of the clients are not on this machine"):
        met.parts.algorithm.round(met.parts.algorithm.init(met.parts.net), torch.arange(4), engine)


def test_nobody_there_and_objects_of_python_are_refused() -> None:
    with pytest.raises(CompatibilityError, match="No node has answered"):
        agree(digits(), [])
    given = digits().to_toml().replace('"mlp(hidden=8)"', '"Sequential (given in Python, 0123abcd)"')
    with pytest.raises(CompatibilityError, match="model = .* was given in Python, and nodes cannot be sent it"):
        recipe_for_nodes(loads(given))
