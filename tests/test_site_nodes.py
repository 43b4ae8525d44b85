"""Sites that bring data of their own: what nodes read one by one is what the simulator reads from a folder of sites."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnrfl.config import RunConfig
from fnrfl.config import load as load_config
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.core.rng import numpy_generator
from fnrfl.data.agreement import SiteFacts
from fnrfl.data.datasets import load as load_data
from fnrfl.data.natural import in_natural_order
from fnrfl.data.node_config import NodeConfig
from fnrfl.data.own_site import describe_site, read_agreed
from fnrfl.data.reading import Reading
from fnrfl.data.site_agreement import agree_on_sites
from fnrfl.runs.build import Built, build
from fnrfl.runs.meeting import Meeting, meet
from test_nodes import asking, assert_same_client, clients_of, same, sent
from test_sites import SITES, write_csv, write_images, write_layout

WORDS = (
    "scenario=natural",
    "dataset=data",
    "public.source=public",
    "validation.size=0",
    "model=mlp(hidden=4)",
    "engine=loop",
    "engine.threads=1",
    "client.augment=none",
    "client.batch=4",
    "clients=0",
    "rounds=2",
)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FNRFL_STATE", str(tmp_path / "state"))


def recipe(*words: str) -> RunConfig:
    return load_config(None, [*WORDS, *words])


def met_and_simulated(
    config: RunConfig, nodes: Sequence[NodeConfig], test: str = "test"
) -> tuple[Built, Meeting, list[Any]]:
    simulated = build(config)
    met = meet(config, asking(nodes), test)
    return simulated, met, clients_of(met, nodes, simulated.scaling)


def assert_same_run(config: RunConfig, nodes: Sequence[NodeConfig], test: str = "test") -> tuple[Built, Meeting]:
    """Every node's client is the simulator's, and the server knows as much as it may."""
    simulated, met, clients = met_and_simulated(config, nodes, test)
    assert met.agreement.sites == simulated.partition.ids
    for client, node in enumerate(clients):
        assert node.client == client
        assert_same_client(simulated, node)
        mine = simulated.splits.test.take(simulated.splits.site_tests[client])
        x, y = node.parts.pool.all("test")
        assert torch.equal(y, mine.y) and len(x) == len(mine.x)
        assert torch.equal(node.parts.splits.test.x, mine.x)
    assert np.array_equal(met.parts.partition.counts, simulated.partition.counts)
    assert torch.equal(met.parts.pool.examples, simulated.pool.examples)
    assert met.parts.dataset.classes == simulated.dataset.classes
    assert met.parts.dataset.columns == simulated.dataset.columns
    assert met.parts.config.dataset == simulated.config.dataset
    for part in ("public", "ranking", "distill"):
        assert torch.equal(getattr(met.parts.splits, part).x, getattr(simulated.splits, part).x)
    return simulated, met


def site_nodes(kind: str, public: str = "public") -> list[NodeConfig]:
    """Nodes in another order than the clients'."""
    at = {site: next(path for path in Path("data").iterdir() if path.stem == site) for site in SITES}
    return [NodeConfig(data=str(at[site]), name=f" {site} ", public=f"{public}{kind}") for site in SITES]


LAYOUTS = {
    "SITE.csv": ".csv",
    "SITE/train.csv": ".csv",
    "SITE.npz": ".npz",
    "SITE/train.npz": ".npz",
    "SITE/CLASS": "",
    "SITE/train/CLASS": "",
}


def write_shared(kind: str) -> None:
    """Public data and the server's test set, in the form that the sites have."""
    for number, name in ((50, "public"), (60, "test")):
        if kind == ".csv":
            write_csv(Path(f"{name}.csv"), number, ("c", "label", "b", "a"), count=20)
        elif kind == ".npz":
            x, y = numpy_generator(number, "rows").normal(size=(20, 3)), np.arange(20) % 2
            np.savez(f"{name}.npz", x=x, y=y)
        else:
            write_images(Path(name), number // 3, count=20)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("words", [(), ("algorithm=public-share", "fnr=on", "scenario=natural + feature-noise(0.2)")])
def test_what_sites_read_one_by_one_is_what_the_simulator_reads(layout: str, words: tuple[str, ...]) -> None:
    kind = LAYOUTS[layout]
    write_layout(layout)
    write_shared(kind)
    assert_same_run(recipe(f"public.source=public{kind}", *words), site_nodes(kind), f"test{kind}")


# -- tables of any kind ------------------------------------------------------------------------------------------------

NAMES = ["Aachen", "H2", "H10", "Ähre <b>", "ü\u2028x"]
CELLS = {
    "number": st.one_of(st.integers(-5, 5).map(str), st.floats(-9, 9, width=32).map(str), st.sampled_from(["", "NA"])),
    "word": st.sampled_from(["rot", "grün", "", "?", "blau,hell", "東"]),
    "whole": st.integers(0, 3).map(str),
}
LABELS = st.one_of(
    st.just(["yes", "no"]), st.just(["1", "2", "10"]), st.just(["-1", "1"]), st.just(["9", "10", "none"])
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, list[dict[str, str]]], str]:
    """Rows for each site, and what becomes of missing values."""
    labels, missing = draw(LABELS), draw(st.sampled_from(["mean", "drop"]))
    sites = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    row = st.fixed_dictionaries({**CELLS, "label": st.sampled_from(labels)})
    rows = {site: draw(st.lists(row, min_size=1, max_size=9)) for site in sites}
    return rows, missing


def write_table(path: Path, rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([row[name] for name in columns] for row in rows)


def assert_read_alike(folder: Path, reading: Reading, sites: Sequence[str]) -> None:
    """What nodes read by themselves, once they have agreed, is what the simulator reads from the folder."""
    whole = load_data(str(folder), by_client=True, reading=reading)
    nodes = {site: NodeConfig(data=str(folder / f"{site}.csv"), name=site) for site in sites}
    facts = [SiteFacts(site, {}, schema=describe_site(node, reading)) for site, node in nodes.items()]
    agreement = sent(agree_on_sites([sent(one) for one in facts], reading))
    schema = agreement.schema
    assert agreement.sites == tuple(in_natural_order(sites))
    assert (schema.classes, schema.columns, schema.input_shape) == (whole.classes, whole.columns, whole.input_shape)
    for site, node in nodes.items():
        mine = read_agreed(node, reading, schema)
        for part, clients in (("train", whole.train_clients), ("test", whole.test_clients)):
            at = torch.tensor([position for position, client in enumerate(clients or ()) if client == site]).long()
            theirs, ours = getattr(whole, part).take(at), getattr(mine, part)
            assert same(theirs.x, ours.x) and same(theirs.y, ours.y)


@settings(max_examples=80, deadline=None)
@given(made=tables(), dice=st.randoms(use_true_random=False))
def test_tables_of_sites_are_read_alike(made: Any, dice: Any) -> None:
    rows, missing = made
    with TemporaryDirectory() as folder:
        for site, mine in rows.items():
            columns = [*CELLS, "label"]
            dice.shuffle(columns)
            write_table(Path(folder) / f"{site}.csv", mine, columns)
        try:
            load_data(folder, by_client=True, reading=Reading(missing=missing))
        except FnrflError:  # the simulator must set a test part aside, and needs as many examples as classes
            return
        try:
            assert_read_alike(Path(folder), Reading(missing=missing), list(rows))
        except ConfigError as error:  # of a site nothing is left, which the simulator leaves out
            assert missing == "drop" and "no example without a missing value" in str(error)
