"""Sites that bring data of their own: what nodes read one by one is what the simulator reads from a folder of sites."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnrfl.algorithms.parts.norms import Accuracy
from fnrfl.config import RunConfig
from fnrfl.config import load as load_config
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.core.messages import Failure, MeasureRequest
from fnrfl.core.rng import numpy_generator
from fnrfl.data.datasets import load as load_data
from fnrfl.data.partition.by_client import in_natural_order
from fnrfl.data.reading import Columns, Reading
from fnrfl.data.scaling import InputMoments
from fnrfl.data.table_summary import ColumnSummary
from fnrfl.engines.wire import to_bytes
from fnrfl.federation.agreement import SiteFacts, SiteHolding, SiteSchema, agree_on_sites, with_counts
from fnrfl.federation.handshake import Handshake, refuse_what_sites_cannot
from fnrfl.federation.messages import HandshakeRequest, NodeRequest
from fnrfl.federation.node import Node, answer_bytes
from fnrfl.federation.node_config import NodeConfig
from fnrfl.federation.site_data import describe_site, read_agreed
from fnrfl.runs.predict import evaluate
from fnrfl.runs.run import resume, run, verify
from fnrfl.runs.setup.build import Built, build
from node_services import ServiceNetwork, agree, clients_of, content, describe, over_network, sent
from settings import with_keys
from test_nodes import assert_same_client, same
from test_sites import SITES, write_csv, write_images, write_layout

WORDS = (
    "scenario=natural", "dataset=data", "public.source=public", "validation.size=0", "model=mlp(hidden=4)",
    "engine=loop", "engine.threads=1", "engine.accelerate=false", "client.augment=none", "client.batch=4",
    "clients=0", "rounds=2",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("tmp_cwd")


def recipe(*words: str) -> RunConfig:
    return load_config(None, [*WORDS, *words])


def assert_same_run(config: RunConfig, nodes: Sequence[NodeConfig], test: str = "test") -> tuple[Built, Handshake]:
    """Every node's client is the simulator's, and the server knows as much as it may."""
    simulated, met = build(config), agree(config, nodes, test)
    clients = clients_of(met, nodes, simulated.scaling)
    assert met.agreement.sites == simulated.partition.ids
    for client, node in enumerate(clients):
        assert node.client == client
        assert_same_client(simulated, node)
        mine = simulated.splits.test.take(simulated.splits.site_tests[client])
        assert same(node.parts.splits.test.x, mine.x) and torch.equal(node.parts.splits.test.y, mine.y)
        with pytest.raises(KeyError):  # the score at the site needs them, and no task or question reaches them
            node.parts.pool.all("test")
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


LAYOUTS = {f"SITE{part}{kind}": kind for kind in (".csv", ".npz") for part in ("", "/train")}
LAYOUTS |= {"SITE/CLASS": "", "SITE/train/CLASS": ""}


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


def assert_read_alike(folder: Path, reading: Reading, kind: str = ".csv") -> None:
    """What nodes read by themselves, once they have agreed, is what the simulator reads from the folder."""
    whole = load_data(str(folder), by_client=True, reading=reading)
    sites = [path.stem for path in folder.iterdir()]
    nodes = {site: NodeConfig(data=str(folder / f"{site}{kind}"), name=site) for site in sites}
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
            assert_read_alike(Path(folder), Reading(missing=missing))
        except ConfigError as error:  # of a site nothing is left, which the simulator leaves out
            assert missing == "drop" and "no example without a missing value" in str(error)


def write_arrays(folder: Path, dice: np.random.Generator, *, named: bool, listed: bool, gaps: bool) -> None:
    """An .npz for each site: whole numbers at some, fractions at others, some with a test part."""
    shape = (3,) if dice.random() < 0.5 else (2, 2)
    for site in range(int(dice.integers(1, 4))):
        held: dict[str, np.ndarray] = {"classes": np.array(["ä", "a", "b"])} if listed else {}
        for part in ("_train", "_test") if dice.random() < 0.3 else ("",):
            count = int(dice.integers(12, 18))
            x = dice.normal(size=(count, *shape)).astype(np.float32)
            x[(dice.random(x.shape) < 0.03) & gaps] = np.nan
            labels = dice.integers(0, 3, count)
            held[f"x{part}"] = dice.integers(0, 5, size=x.shape) if dice.random() < 0.3 else x
            held[f"y{part}"] = np.array(["a", "b", "ä"])[labels] if named else labels
        np.savez(folder / f"site {site}.npz", **held)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32), named=st.booleans(), listed=st.booleans(), missing=st.sampled_from(["refuse", "drop"])
)
def test_arrays_of_sites_are_read_alike(seed: int, named: bool, listed: bool, missing: str) -> None:
    with TemporaryDirectory() as folder:
        dice = np.random.default_rng(seed)
        write_arrays(Path(folder), dice, named=named, listed=listed, gaps=missing == "drop")
        assert_read_alike(Path(folder), Reading(missing=missing), ".npz")


def test_labels_that_are_no_classes_are_not_told() -> None:
    rows = [{"age": f"{number}", "patient": f"P{number}"} for number in range(30)]
    write_table(Path("site.csv"), rows, ["age", "patient"])
    np.savez("site.npz", x=np.ones((30, 2)), y=np.arange(30))
    for data, where in (("site.csv", "Column 'patient'"), ("site.npz", "y")):
        with pytest.raises(ConfigError, match=f"{where} of {data} has 30 different labels in 30 examples"):
            describe_site(NodeConfig(data=data, name="A"), Reading())
    agreement = agree_on_sites([SiteFacts("A", {}, schema=schema(labels=("a", "b", "c")))], Reading())
    with pytest.raises(CompatibilityError, match="The sites have 3 classes for 2 training examples"):
        with_counts(agreement, [SiteHolding((1, 1, 0), "", "")])


def test_columns_that_a_node_keeps_to_itself_are_as_if_they_were_not_there() -> None:
    write_gaps()
    reading = Reading(missing="mean", label="ill")
    plain = NodeConfig(data="data/H2.csv", name="H2")
    lines = Path("data/H2.csv").read_text().splitlines()
    names = ['"name, first"', *(f"Meyer {number}" for number in range(len(lines) - 1))]
    Path("with.csv").write_text("\n".join(f"{name},{line}" for name, line in zip(names, lines, strict=True)) + "\n")
    node = replace(plain, data="with.csv", ignore='"name, first"')
    assert describe_site(node, reading) == describe_site(plain, reading)
    schema = agree_on_sites([SiteFacts("H2", {}, schema=describe_site(node, reading))], reading).schema
    assert schema is not None
    one, other = (read_agreed(each, reading, schema) for each in (node, plain))
    assert one.checksum == other.checksum
    assert schema.columns is not None
    inputs, types = ("name, first", *schema.columns.inputs), ("number", *schema.columns.types)
    forged = [replace(schema.columns, inputs=inputs, types=types), replace(schema.columns, label="name, first")]
    for columns in forged:  # a server that says something else was agreed on
        with pytest.raises(ConfigError, match="which this node keeps to itself"):
            read_agreed(node, reading, replace(schema, columns=columns))
    for asks in (Reading(missing="mean", label="ill", categories=("name, first",)), Reading(label="name, first")):
        with pytest.raises(ConfigError, match="dataset.categories names|both name the column"):
            describe_site(node, asks)
    with pytest.raises(ConfigError, match="dataset.ignore names the column 'nome', and"):
        describe_site(replace(plain, ignore="nome"), Reading(label="ill", ignore=("age",)))


def test_a_server_gets_no_list_of_the_values_of_a_column_and_no_count_of_them() -> None:
    """Whatever it calls a category or a class, and whatever it says was agreed on."""
    rows = [f"{1000 + 7 * n},{'ab'[n % 2]},{'yn'[n % 3 == 0]}" for n in range(60)]
    Path("a.csv").write_text("\n".join(["pin,ward,ill", *rows]) + "\n")
    node, reading = NodeConfig(data="a.csv", name="a"), Reading(label="ill")
    told = describe_site(node, reading)
    assert not any(str(1000 + 7 * n) in repr(told) for n in range(60))
    for asks in (Reading(label="ill", categories=("pin",)), Reading(label="pin")):
        with pytest.raises(ConfigError, match="60 different"):
            describe_site(node, asks)
    schema = agree_on_sites([SiteFacts("a", {}, schema=told)], reading).schema
    assert schema is not None and schema.columns is not None
    pins = tuple(str(pin) for pin in range(1000, 2000))
    of_pins = Columns(("ill", "ward"), ("category",) * 2, "pin", {"ill": ("n", "y"), "ward": ("a", "b")})
    as_words = replace(schema.columns, categories=schema.columns.categories | {"pin": pins})
    for forged in (replace(schema, columns=of_pins, classes=pins), replace(schema, columns=as_words)):
        with pytest.raises(ConfigError, match="column 'pin' in another way"):
            read_agreed(node, reading, forged)


def test_a_site_tells_no_numbers_of_its_test_rows() -> None:
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
    told = []
    for name, tests in (("a", [0, 0, 0, 1]), ("b", [0, 1, 1, 1])):
        np.savez(f"{name}.npz", x_train=x, y_train=y, x_test=x[:4] * len(told), y_test=np.array(tests))
        told.append(describe_site(NodeConfig(data=f"{name}.npz", name="a"), Reading()))
    assert told[0] == told[1]


# -- a whole run -------------------------------------------------------------------------------------------------------


def write_gaps() -> None:
    """Tables with categories, missing values and columns in other orders, at each site and at the server."""
    dice = numpy_generator(0, "gaps")
    for place, count in (("data/Aachen", 30), ("data/H2", 25), ("data/H10", 20), ("public", 24), ("test", 24)):
        rows = [
            {
                "age": "" if dice.random() < 0.2 and "/" in place else f"{dice.normal(60, 9):.3f}",
                "ward": str(dice.choice(["a", "b"] if place.endswith("H2") else ["b", "c", "\u00e4"])),
                "ill": str(dice.choice(["no", "yes"])),
            }
            for _ in range(count)
        ]
        columns = ["ward", "ill", "age"] if place.endswith("H2") else ["age", "ward", "ill"]
        write_table(Path(f"{place}.csv"), rows, columns)


def with_gaps(*words: str) -> tuple[RunConfig, list[NodeConfig]]:
    """A recipe over these tables, and the nodes in another order than the clients."""
    write_gaps()
    nodes = [NodeConfig(data=f"data/{site}.csv", name=site, public="public.csv") for site in ("H10", "Aachen", "H2")]
    return recipe("public.source=public.csv", "dataset.missing=mean", "dataset.label=ill", *words), nodes


@pytest.mark.parametrize("words", [(), ("fnr=on", "algorithm=scaffold", "dataset.scale=none")])
def test_a_run_over_sites_is_the_simulators_and_asks_them_for_means(words: tuple[str, ...]) -> None:
    config, nodes = with_gaps(*words)
    result, network = over_network(config, nodes, "test.csv", forgetful=True)
    simulated = run(config, out="here")
    assert result.rounds[0]["bytes"] == simulated.rounds[0]["bytes"] and "scale" in result.rounds[0]["bytes"]
    for name, tensor in simulated.weights.items():
        assert torch.equal(tensor, result.weights[name])
    steps = [one.step if isinstance(one, HandshakeRequest) else one.phase for one in network.seen]
    told = [step for step in ("describe", "count", "begin", "measure", "begin") for _ in range(3)]
    assert steps[: len(told)] == told and "begin" not in steps[len(told) :]
    assert [type(one.request.probe).__name__ for one in network.seen[9:12]] == ["InputMoments"] * 3
    manifest = json.loads(Path("there/partition.json").read_text())
    assert manifest["ids"] == ["Aachen", "H2", "H10"] and manifest["splits"]["train"]["sha256"] == ""
    assert result.rounds[-1]["accuracy"] == evaluate("there", "test.csv").accuracy


def test_the_simulators_batched_engine_is_the_nodes_up_to_rounding_and_its_loop_engine_to_the_bit() -> None:
    """Five rounds of three sites with missing values; `engine=auto` chooses batched for so small a net."""
    config, nodes = with_gaps("model=mlp", "rounds=5")
    network, _ = over_network(config, nodes, "test.csv")
    for engine, farthest in (("loop", 0.0), ("auto", 1e-5)):
        simulated = run(with_keys(config, {"engine.name": engine}), out=None)
        assert simulated.config.engine.name == {"auto": "batched"}.get(engine, engine)
        apart = [(simulated.weights[name] - tensor).abs().max() for name, tensor in network.weights.items()]
        assert max(apart) <= farthest


def test_a_run_over_sites_goes_on_to_the_same_end_and_not_with_other_data() -> None:
    config, nodes = with_gaps("dataset.missing=drop", "engine.name=flower")

    class Stop(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        raise Stop

    met = agree(config, nodes, "test.csv", forgetful=True)
    whole = run(config, out="whole", network=met.network, parts=met.parts)
    with pytest.raises(Stop):
        run(config, out="part", network=met.network, parts=met.parts, progress=stop)
    again = agree(verify(Path("part"), trust=False).config, nodes, "test.csv", forgetful=True)
    resumed = resume("part", network=again.network, parts=again.parts)
    assert resumed.model_sha256 == whole.model_sha256
    Path("data/H2.csv").write_text(Path("data/H2.csv").read_text().replace("yes", "no", 1))
    changed = agree(config, nodes, "test.csv")
    with pytest.raises(Stop):
        run(config, out="other", network=changed.network, parts=changed.parts, progress=stop)
    with pytest.raises(CompatibilityError, match="was agreed on with another recipe or other data"):
        resume("other", network=again.network, parts=again.parts)
    with pytest.raises(CompatibilityError, match="The node 'H2' has other data"):
        clients_of(again, nodes)


# -- what is refused ---------------------------------------------------------------------------------------------------


def schema(**changed: Any) -> SiteSchema:
    columns = (ColumnSummary("age", "number", 9), ColumnSummary("ward", "category", 9, ("a", "b")))
    table = SiteSchema("table", ("yes", "no"), True, False, columns=columns, label="ill")
    return replace(table, **changed)


def pictures(**changed: Any) -> SiteSchema:
    return replace(SiteSchema("pictures", ("cat",), True, False, input_shape=(1, 4, 4), dtype="uint8"), **changed)


AGE, WARD = schema().columns


def many(letter: str) -> dict[str, Any]:
    """A column of words that do not repeat, and are others at each site."""
    return {"columns": (AGE, replace(WARD, categories=tuple(f"{letter}{i}" for i in range(15)), known=20))}


UNLIKE_TABLES = [
    ({}, {"label": "sick"}, "dataset.label"),
    ({}, {"columns": (AGE,)}, "'B' has other columns than the node 'A': it lacks 'ward'"),
    ({"columns": (AGE,)}, {}, "'B' has other columns than the node 'A': it has 'ward'"),
    ({}, {"columns": (AGE, ColumnSummary("ward", "integer", 3))}, "text at the node 'A' and numbers at the node 'B'"),
    (many("a"), many("b"), "'ward' of all tables together holds 30 different texts in 40 rows"),
    ({"labels": ("1",)}, {"labels": ("1.0",)}, "Write a class in one way"),
]
UNLIKE_PICTURES = [
    ({}, {"kind": "arrays"}, "'A' brings pictures and the node 'B' brings arrays"),
    ({}, {"input_shape": (1, 4, 5)}, r"uint8\[1, 4, 5\].*dataset.image_size"),
    ({"kind": "arrays"}, {"kind": "arrays", "dtype": "float64"}, "'B' has examples of float64"),
    ({}, {"named": False}, "'A' has names as labels and the node 'B' has numbers"),
    ({"classes": ("cat",)}, {"classes": ("dog", "cat")}, "the node 'B' has the classes 'dog', 'cat'"),
    ({"classes": ("dog",)}, {"classes": ("dog",)}, "'A' has the label 'cat', which is not among"),
]


@pytest.mark.parametrize(
    ("make", "one", "other", "words"),
    [*((schema, *row) for row in UNLIKE_TABLES), *((pictures, *row) for row in UNLIKE_PICTURES)],
)
def test_sites_that_do_not_fit_are_refused_by_name(make: Any, one: Any, other: Any, words: str) -> None:
    facts = [SiteFacts("B", {}, schema=make(**other)), SiteFacts("A", {}, schema=make(**one))]
    with pytest.raises(FnrflError, match=words):
        agree_on_sites(facts, Reading())


def test_what_is_wrong_with_a_sites_data_stays_in_its_own_log(caplog: pytest.LogCaptureFixture) -> None:
    config, nodes = with_gaps()
    Path("data/H2.csv").write_text("age,ward,ill\n61,a,no\nMeyer,b,yes\n")
    with pytest.raises(CompatibilityError, match="The node 'H2' has found something wrong") as refused:
        agree(config, nodes, "test.csv")
    assert "Meyer" not in str(refused.value) and "data/H2.csv" not in str(refused.value)
    assert "'Meyer' in column 'age'" in caplog.text


def test_a_site_with_one_row_and_a_test_set_of_two_are_enough() -> None:
    config, nodes = with_gaps()
    Path("data/H2.csv").write_text("age,ward,ill\n61,a,no\n")
    Path("test.csv").write_text("age,ward,ill\n61,a,no\n62,b,yes\n")
    _, met = assert_same_run(config, nodes, "test.csv")
    assert met.agreement.sizes[1] == 1 and len(met.parts.splits.test) == 2


def facts(*names: str) -> list[SiteFacts]:
    return [SiteFacts(name, {}, schema=schema()) for name in names]


@pytest.mark.parametrize("counts", [(0, 0), (3, -1), (1, 2, 3), (2**40, 1)])
def test_counts_that_cannot_be_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(CompatibilityError, match="'A' says that it trains on"):
        with_counts(agree_on_sites(facts("A"), Reading()), [SiteHolding(counts, "", "")])


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        (facts("A", " A "), "Two nodes say that they are the node 'A'"),
        ([*facts("A"), SiteFacts("1", {}, 1)], "partition = 1 takes a part of a whole data set"),
        (facts(" "), "no name"),
    ],
)
def test_sites_that_cannot_be_told_apart_are_refused(sites: list[SiteFacts], words: str) -> None:
    with pytest.raises(CompatibilityError, match=words):
        agree_on_sites(sites, Reading())


def test_all_that_sites_cannot_follow_is_named_at_once() -> None:
    _, (node, *_) = with_gaps()
    words = ["public.source=train", "public.size=0.1", "validation.size=0.1", "scenario=iid", "clients=2"]
    with pytest.raises(CompatibilityError) as refused:
        refuse_what_sites_cannot(recipe(*words, "dataset.client=ward"), "")
    said = str(refused.value)
    assert all(word in said for word in ("scenario", "public.source", "dataset.client", "validation.size", "--test"))
    refuse_what_sites_cannot(recipe("public.source=public.csv"), "test.csv")
    for word in ("public.source=test", "validation.size=0.1"):  # a node refuses it, too
        text = recipe("public.source=public.csv", "protocol=paper", word).to_toml()
        answer = content(ServiceNetwork([node]).carry(0, describe(text)))
        assert word.partition("=")[0] in answer.reason
    with pytest.raises(CompatibilityError) as refused:  # public.size = 0 is no way out for a method that learns from it
        refuse_what_sites_cannot(recipe("public.source=train", "public.size=0.1", "fnr=on"))
    assert "public.source" in str(refused.value) and "public.size = 0" not in str(refused.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [("data", "folder without"), ("nowhere", "no such"), ("nowhere.csv", "not exist"), ("data/Aachen.json", "no such")],
)
def test_data_that_is_not_one_sites_own_is_refused(data: str, said: str) -> None:
    write_gaps()
    with pytest.raises(ConfigError, match=said):
        describe_site(NodeConfig(data=data, name="Aachen"), Reading(missing="mean"))


def test_other_public_data_no_test_set_and_server_work_on_private_data_are_refused() -> None:
    config, nodes = with_gaps("algorithm=centralised")
    with pytest.raises(CompatibilityError, match="the server has no test set.*--test"):
        agree(config, nodes)
    Path("old.csv").write_text("\n".join(Path("public.csv").read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(CompatibilityError, match="The node 'Aachen' has other public data than the server"):
        agree(config, [nodes[0], replace(nodes[1], public="old.csv"), nodes[2]], "test.csv")
    with pytest.raises(CompatibilityError, match="private examples of the clients are not on this machine"):
        over_network(config, nodes, "test.csv")


def test_functions_of_the_nodes_own_configuration_bring_tokens() -> None:
    """Whole numbers for a model of the user's own, which each node allows; one site has a part of the classes."""
    whole = {"left": (np.arange(40).reshape(10, 4) % 9, np.arange(10) % 2)}
    whole["right"] = (np.arange(60).reshape(15, 4) % 7, np.arange(15) % 3)
    Path("data").mkdir()
    for name, (x, y) in whole.items():
        np.savez(f"data/{name}.npz", x=x, y=y)
    Path("mine.py").write_text(
        "import numpy as np\nfrom torch import nn\n\n\n"
        "def left():\n    d = np.load('data/left.npz')\n    return d['x'], d['y']\n\n\n"
        "def right():\n    d = np.load('data/right.npz')\n    return d['x'], d['y']\n\n\n"
        "def net(num_classes):\n"
        "    return nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(12, num_classes))\n"
    )
    np.savez("test.npz", x=np.arange(80).reshape(20, 4) % 5, y=np.arange(20) % 3)
    config = recipe("public.source=train", "public.size=0", "model=mine:net")
    nodes = [NodeConfig(data=f"mine:{name}", name=name, code="mine:net") for name in whole]
    simulated, met = assert_same_run(config, nodes, "test.npz")
    assert met.parts.net.input_dtype == simulated.net.input_dtype == torch.int64
    np.savez("data/left.npz", x=whole["left"][0] + 1, y=whole["left"][1])
    with pytest.raises(CompatibilityError, match="'left' has found something wrong"):  # a token that has no row
        clients_of(agree(config, nodes, "test.npz"), nodes)


def test_a_node_answers_scaled_tasks_alone_and_nothing_about_its_test_examples() -> None:
    config, nodes = with_gaps("fnr=on")
    scaling, met = build(config).scaling, agree(config, nodes, "test.csv")
    node = Node(clients_of(met, nodes, scaling)[1].participant, Path("state"), "run")
    ask = MeasureRequest([1], 0, Accuracy(), "ranking")
    letter = NodeRequest("run", "1", 1, 0, 1, "measure", ask)
    answer = lambda there, asked: content(answer_bytes(to_bytes(asked), there.answer))  # noqa: E731
    assert 0 <= float(answer(node, letter)["accuracy"]) <= 1
    sums = replace(letter, request=MeasureRequest([1], 0, InputMoments(True), "private"))
    assert isinstance(answer(node, sums), Failure)
    unscaled = Node(clients_of(met, nodes)[1].participant, Path("state"), "run")
    assert isinstance(answer(unscaled, letter), Failure) and "m2" in answer(unscaled, sums)
    assert isinstance(answer(node, replace(letter, request=replace(ask, data="test"))), Failure)


def test_without_a_network_a_run_over_sites_says_so_before_it_looks_for_data() -> None:
    with pytest.raises(CompatibilityError, match="needs clients on a network.*fnrfl deploy init"):
        run(recipe("engine.name=flower", "dataset=nowhere/", "public.source=nowhere.csv"), out=None)
