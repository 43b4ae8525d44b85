"""`scenario = "natural"`: the clients that the data names, exactly, whatever their names and the order of the rows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.cli import app
from fnrfl.config import RunConfig
from fnrfl.config import load as load_config
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.core.rng import numpy_generator
from fnrfl.core.words import printable
from fnrfl.data.datasets import Dataset
from fnrfl.data.datasets import load as load_data
from fnrfl.data.partition.by_client import in_natural_order
from fnrfl.data.partition.value import Partition
from fnrfl.data.partition.views import Splits
from fnrfl.results import compare as comparing
from fnrfl.results.report.charts import payload
from fnrfl.results.report.groups import panels_of
from fnrfl.results.report.load import read_run
from fnrfl.results.report.page import render
from fnrfl.results.report.tables import site_table
from fnrfl.results.statistics import share_interval
from fnrfl.runs.data import divide
from fnrfl.runs.predict import evaluate, predict
from fnrfl.runs.run import load as load_run
from fnrfl.runs.run import resume
from fnrfl.runs.run import run as run_config
from fnrfl.runs.setup import build
from settings import with_keys

NATURAL = load_config(None, ["scenario=natural", "dataset=own.npz", "model=mlp"])
ALONE = with_keys(NATURAL, {"public": {"size": 0}, "validation": {"size": 0}})
IDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=5)
ROWS = st.lists(
    st.tuples(st.one_of(IDS, st.sampled_from(["H1", "H2", "H10", " H1 ", "7", "07"])), st.integers(0, 4)),
    min_size=1,
    max_size=40,
)


pytestmark = pytest.mark.usefixtures("tmp_cwd")


def write(ids: Sequence[object], labels: Sequence[int], numbers: Sequence[int] | None = None, **more: object) -> None:
    """A data set whose first column numbers the examples."""
    x = np.zeros((len(ids), 3))
    x[:, 0] = range(len(ids)) if numbers is None else numbers
    np.savez("own.npz", **({"x": x, "y": np.array(labels), "client": np.array(ids)} | more))


def divided(config: RunConfig) -> tuple[Dataset, Partition, Splits]:
    dataset = load_data(config.dataset.name, by_client=True)
    return dataset, *divide(config, dataset, None, FedAvg())


def numbers(part: Any) -> list[int]:
    return [int(number) for number in part.x[:, 0]]


def holdings(dataset: Dataset, partition: Partition, splits: Splits) -> dict[str, list[int]]:
    """The numbers of the examples that each client holds, to train and to test."""
    held = {}
    for client, name in enumerate(partition.names):
        own_test = splits.test.take(splits.site_tests[client])
        held[name] = sorted(numbers(splits.private.take(splits.clients[client])) + numbers(own_test))
    return held


# -- who holds what ----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 9))
def test_a_split_is_the_one_that_the_data_names_or_it_is_refused(rows: list[tuple[str, int]], seed: int) -> None:
    ids, labels = zip(*rows, strict=True)
    config = with_keys(NATURAL, {"seed": seed})
    write(ids, labels)
    try:
        dataset, partition, splits = divided(config)
    except FnrflError as error:
        assert str(error).endswith(".")
        return
    named = [name.strip() for name in np.array(ids).tolist()]
    held = holdings(dataset, partition, splits)
    aside = [*numbers(splits.public), *numbers(splits.ranking), *numbers(splits.distill), *numbers(splits.validation)]
    assert sorted([*aside, *(number for mine in held.values() for number in mine)]) == list(range(len(rows)))
    assert all(named[number] == name for name, mine in held.items() for number in mine)
    assert partition.names == tuple(in_natural_order(named))  # nobody is lost, by the test part or what is set aside
    assert partition.sizes.min() >= 1
    counts = [np.bincount(splits.private.y[mine], minlength=dataset.num_classes) for mine in splits.clients]
    np.testing.assert_array_equal(partition.counts, counts)
    assert Partition.from_manifest(json.loads(json.dumps(partition.manifest()))).ids == partition.ids


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, random=st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter_for_who_has_what(rows: list[tuple[str, int]], random: Any) -> None:
    told = []
    order = list(range(len(rows)))
    for _ in range(2):
        write([rows[at][0] for at in order], [rows[at][1] for at in order], order)
        try:
            told.append(holdings(*divided(ALONE)))
        except FnrflError as error:
            told.append({type(error).__name__: []})
        random.shuffle(order)
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "ids", [np.array([3, 3, 900, 900, -1, -1]), np.array([3.0, 3.0, 900.0, 900.0, -1.0, -1.0]), ["3", " 3"] * 3]
)
def test_numbers_with_gaps_are_names(ids: Any) -> None:
    write(ids, [0, 1] * 3)
    _, partition, _ = divided(ALONE)
    assert partition.names == tuple(in_natural_order(str(one).strip().removesuffix(".0") for one in ids))


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["a", "", "b", "b"], "'' for example 1"),
        ([0.5, 1, 1, 2], "0.5"),
        ([np.nan, 1, 1, 2], "nan"),
        (["a", "b", "b"], "[3] for 4 examples"),
        ([["a"], ["b"], ["b"], ["c"]], "[4, 1]"),
        (None, "client and clients"),
    ],
)
def test_ids_that_name_nobody_are_refused(ids: Any, said: str) -> None:
    arrays = {"client": list("abcd"), "clients": list("abcd")} if ids is None else {"client": ids}
    np.savez("own.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1], **{name: np.array(one) for name, one in arrays.items()})
    with pytest.raises(ConfigError, match="client") as error:
        load_data("own.npz")
    assert said in str(error.value)


def test_names_are_sorted_as_people_sort_them() -> None:
    names = ["H10", "H2", "h1", "H02", "H", "2", "10", "9" * 5000, "H2b", "H2a"]
    assert in_natural_order(names) == ["2", "10", "9" * 5000, "H", "H02", "H2", "H2a", "H2b", "H10", "h1"]


# -- test parts and what is set aside ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), seed=st.integers(0, 9))
def test_a_missing_test_part_is_a_fifth_of_what_each_client_has(sizes: list[int], seed: int) -> None:
    ids = np.repeat([f"H{client}" for client in range(len(sizes))], sizes)
    write(ids, np.arange(len(ids)) % 2)
    try:
        dataset = load_data("own.npz", by_client=True, seed=seed)
    except ConfigError as error:
        assert max(sizes) == 1 or len(ids) < 4, error
        return
    assert dataset.test_clients is not None
    for client, size in enumerate(sizes):
        assert dataset.test_clients.count(f"H{client}") == (0 if size == 1 else max(1, round(0.2 * size)))
    alone = ids == "H0"
    write(ids[alone], (np.arange(len(ids)) % 2)[alone])
    if sizes[0] > 3:  # a client draws its part without the others
        mine = set(numbers(load_data("own.npz", by_client=True, seed=seed).test))
        assert mine == {n for n, of in zip(numbers(dataset.test), dataset.test_clients, strict=True) if of == "H0"}


def test_clients_give_public_data_in_proportion_and_keep_one_example() -> None:
    sizes = {"large": 400, "middle": 200, "small": 5, "one": 1}
    ids = np.repeat(list(sizes), list(sizes.values()))
    y = numpy_generator(0, "labels").integers(0, 3, len(ids))
    x = np.arange(len(ids), dtype=float)[:, None].repeat(2, 1)
    np.savez("own.npz", x_train=x, y_train=y, client_train=ids, x_test=x[:9] + 0.5, y_test=y[:9])
    dataset, partition, splits = divided(with_keys(NATURAL, {"public": {"size": 0.3}, "validation": {"size": 0.1}}))
    left = dict(zip(partition.names, partition.sizes, strict=True))
    assert left["one"] == 1 and left["small"] >= 1
    assert len(splits.public) + len(splits.ranking) == round(0.3 * 606) and len(splits.validation) == round(0.1 * 606)
    assert abs(left["large"] - 240) <= 3 and abs(left["middle"] - 120) <= 3
    given_by_class = np.bincount(torch.cat([splits.public.y, splits.ranking.y]), minlength=3)
    np.testing.assert_allclose(given_by_class, 0.3 * np.bincount(y), atol=1.5)
    with pytest.raises(ConfigError, match="each of 4 clients must keep one"):
        divided(with_keys(NATURAL, {"public": {"size": 600}, "validation": {"size": 5}}))


# -- configs -----------------------------------------------------------------------------------------------------------


def test_the_data_counts_the_clients() -> None:
    write(["a", "b", "b", "c"] * 10, [0, 1] * 20)
    assert NATURAL.clients == 0
    assert build.build(NATURAL).config.clients == 3
    assert build.build(with_keys(NATURAL, {"clients": 3})).config.clients == 3
    with pytest.raises(ConfigError, match="clients is 5, and under scenario = 'natural' there are 3"):
        build.build(with_keys(NATURAL, {"clients": 5}))
    with pytest.raises(ConfigError, match="clients = 0 stands for"):
        load_config(None, ["clients=0"])
    assert with_keys(load_config(None, ["scenario=natural"]), {"scenario": "iid", "clients": 4}).clients == 4
    assert with_keys(NATURAL, {"seed": 3}).clients == 0


def test_data_that_names_nobody_is_refused_and_names_that_nobody_asked_for_are_said() -> None:
    with pytest.raises(ConfigError, match="digits names none"):
        build.build(load_config(None, ["scenario=natural"]))
    write(["a", "b", "b", "c"] * 10, [0, 1] * 20)
    notices = " ".join(build.build(load_config(None, ["scenario=iid", "dataset=own.npz", "clients=2"])).notices)
    assert "own.npz names 3 clients (a, b, c)" in notices and 'scenario = "natural"' in notices
    assert "names" not in " ".join(build.build(NATURAL).notices)


# -- runs --------------------------------------------------------------------------------------------------------------


def hospitals(path: str = "own.npz", *, test: bool = True, rows: int = 240, **more: object) -> None:
    """Four sites with odd names, one of them with a single row; each may bring test rows of its own."""
    dice = numpy_generator(0, "hospitals")
    ids = dice.choice(["H2", "H10", "<b>Ä</b>\x1b[31m"], rows)
    ids[0] = "one"
    y = np.arange(rows) % 3
    x = dice.normal(size=(rows, 4)) + 2 * np.eye(3, 4)[y]
    if not test:
        np.savez(path, x=x, y=y, client=ids, **more)  # type: ignore[arg-type]
        return
    parts = {"train": np.arange(rows) % 4 > 0, "test": np.arange(rows) % 4 == 0}
    parts["train"][0], parts["test"][0] = True, False
    arrays = {f"{kind}_{p}": v[rows_of] for p, rows_of in parts.items() for kind, v in (("x", x), ("y", y))}
    np.savez(path, **arrays, **{f"client_{part}": ids[rows_of] for part, rows_of in parts.items()}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", ["", " + feature-noise(0.2)"])
@pytest.mark.parametrize("algorithm", ["fedavg", "local-only"])
def test_sites_are_scored_on_the_test_data_that_they_brought(algorithm: str, noise: str) -> None:
    hospitals()
    config = load_config(
        None, ["dataset=own.npz", f"scenario=natural{noise}", f"algorithm={algorithm}", "rounds=2", "model=mlp"]
    )
    result = run_config(config, out="run")
    last = result.rounds[-1]
    assert result.clients == ("<b>Ä</b>\x1b[31m", "H2", "H10", "one")
    assert result.per_site is not None and tuple(result.per_site) == result.clients
    data = load_data("own.npz", by_client=True)
    assert data.test_clients is not None
    for client, name in enumerate(result.clients):
        mine = torch.tensor([of == name for of in data.test_clients])
        if not mine.any():
            assert name == "one" and last["per_site"][client] is None
            continue
        if noise and client:
            continue  # the first client is clean
        module = result.client_model(name) if algorithm == "local-only" else result.model
        answers = module(data.test.x[mine].float()).argmax(1)
        assert last["per_site"][client] == pytest.approx(float((answers == data.test.y[mine]).double().mean()))
    aside, judged = divided(config)[2], []
    for name, mine in zip(result.clients, aside.site_validation, strict=True):
        own = aside.validation.take(mine)
        if noise or not len(mine):
            continue
        module = result.client_model(name) if algorithm == "local-only" else result.model
        judged.append(float((module(own.x.float()).argmax(1) == own.y).double().mean()))
    assert sum(map(len, aside.site_validation)) == len(aside.validation) > 0
    assert noise or last["validation_own"] == pytest.approx(np.mean(judged))
    ends, (first, _) = result.per_site_interval, result.rounds
    assert ends is not None and "per_site_interval" not in first and ends == load_run("run").per_site_interval
    for name, value in result.per_site.items():
        found = ends[name]
        assert (found is None) == (value is None) == (name == "one")
        assert found is None or value is None or found[0] <= value <= found[1] != found[0]
    assert json.loads(json.dumps(result.summary()))["per_site_interval"]["H2"] == list(ends["H2"] or ())
    known = [value for value in last["per_site"] if value is not None]
    assert last["accuracy_site"] == pytest.approx(sum(known) / 3)
    assert result.last("worst_site") == min(known) == result.summary()["worst_site"]
    if algorithm == "fedavg" and not noise:
        assert last["accuracy_site_pooled"] == pytest.approx(last["accuracy"])
    again = load_run("run")
    assert again.clients == result.clients and again.per_site == result.per_site
    assert json.loads((Path("run") / "partition.json").read_text())["ids"] == list(result.clients)


def test_a_natural_run_that_was_stopped_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    hospitals(test=False)
    config = with_keys(NATURAL, {"rounds": 3, "algorithm": "local-only"})
    whole = run_config(config, out="whole")

    def stop(event: dict[str, Any]) -> None:
        if event["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_config(config, out="stopped", progress=stop)
    assert resume("stopped").model_sha256 == whole.model_sha256
    hospitals(test=False, rows=241)
    with pytest.raises(KeyboardInterrupt):
        run_config(config, out="changed", progress=stop)
    hospitals(test=False)
    with pytest.raises(ConfigError, match="clients|not the data"):
        resume("changed")


def test_models_of_sites_are_asked_by_name() -> None:
    hospitals()
    run_config(with_keys(NATURAL, {"rounds": 1, "algorithm": "local-only"}), out="run")
    everybody = evaluate("run", "own.npz")
    assert everybody.what == "the test part" and list(everybody.per_client or ()) == list(load_run("run").clients)
    assert evaluate("run", "own.npz", client="H10").per_client == {"H10": (everybody.per_client or {})["H10"]}
    asked = predict("run", "own.npz")
    assert "client_H10" in asked.to_csv().splitlines()[0]
    for wrong in ("H3", 0, "3", "H1\x1b"):
        with pytest.raises(ConfigError, match=r"the run has 4, called .*H2, H10, one") as error:
            evaluate("run", "own.npz", client=wrong)
        assert printable(str(error.value)) == str(error.value)


def test_the_run_knows_its_data_again_with_a_drawn_test_part() -> None:
    hospitals(test=False)
    result = run_config(with_keys(NATURAL, {"rounds": 1}), out="run")
    Path("own.npz").rename("elsewhere.npz")
    found = evaluate("run", "elsewhere.npz")
    assert found.what == "the test part" and found.score.accuracy == pytest.approx(result.accuracy)


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_the_page_has_every_site_by_name_and_no_markup_from_the_data() -> None:
    hospitals()
    config = with_keys(NATURAL, {"rounds": 1, "fnr": {"share": 0.5}})
    for seed in (0, 1):
        run_config(with_keys(config, {"seed": seed}), out=f"run-{seed}")
    runs = [read_run(Path(f"run-{seed}")) for seed in (0, 1)]
    panels = panels_of(runs)
    table = site_table(panels[0])
    assert table is not None
    assert [row[0].text for row in table.rows] == ["<b>Ä</b>\\x1b[31m", "H2", "H10", "one"]
    told = [column.name for column in table.columns]
    assert told[:2] == ["client", "test examples"] and table.rows[3][1].value == 0
    assert table.rows[1][1].value == (tested := runs[0].about["site_test_counts"][1]) > 0
    share = np.mean([run.rounds[-1]["per_site"][1] for run in runs])
    low, high = share_interval(share, tested)
    assert table.rows[3][2].text == "" and table.rows[1][2].value == pytest.approx(share)
    assert table.rows[1][2].beside == f"[{100 * low:.0f}, {100 * high:.0f}]"
    page = render(panels)
    assert "&lt;b&gt;Ä&lt;/b&gt;\\x1b[31m" in page and "<b>Ä" not in page and "\x1b" not in page
    assert payload(panels)["inside"][0]["clients"][2]["name"] == "H10"
    assert 'data-table="sites"' in page
    run_config(load_config(None, ["rounds=1", "clients=2"]), out="plain")
    assert 'data-table="sites"' not in render(panels_of([read_run(Path("plain"))]))


def test_sites_can_be_compared_with_a_draw_of_the_same_data() -> None:
    hospitals()
    cells = comparing.grid(
        None, ["dataset=own.npz", "model=mlp", "rounds=1", "clients=3"], ["scenario=iid"], [0]
    ) + comparing.grid(None, ["dataset=own.npz", "model=mlp", "rounds=1"], ["scenario=natural"], [0])
    assert [cell.config.clients for cell in cells] == [3, 0]
    first = comparing.compare(cells, "grid")
    again = comparing.compare(cells, "grid")  # the runs are known again, although their data has counted the clients
    assert [run["model_sha256"] for run in again.runs] == [run["model_sha256"] for run in first.runs]
    assert first.runs[1]["worst_site"] is not None and first.runs[0]["worst_site"] is None


@pytest.mark.parametrize("answer", ["text", "json"])
def test_a_natural_split_is_drawn(answer: str) -> None:
    hospitals()
    typed = ["scenario", "show", "natural + feature-noise(0.1)", "dataset=own.npz", "--png", "split.png"]
    shown = CliRunner().invoke(app, typed + (["--json"] if answer == "json" else []))
    assert shown.exit_code == 0 and Path("split.png").stat().st_size > 1000
    if answer == "json":
        assert json.loads(shown.stdout)["ids"][1:] == ["H2", "H10", "one"]
    else:
        assert "\x1b" not in shown.stdout and "<b>Ä</b>\\x1b[31m" in shown.stdout and "\nH10 " in shown.stdout


def test_a_run_says_how_each_site_fares() -> None:
    hospitals()
    typed = ["run", "dataset=own.npz", "scenario=natural", "model=mlp", "rounds=1", "-o", "run"]
    shown = CliRunner().invoke(app, typed)
    assert shown.exit_code == 0 and "clients of the data" in shown.stdout and "\x1b" not in shown.stdout
    assert "sites: " in shown.stdout and "\nH10 " in shown.stdout and "\none  " in shown.stdout
    assert re.search(r"\nH10 +[\d.]+ +23 test examples\n", shown.stdout)
