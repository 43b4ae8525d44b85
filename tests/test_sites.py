"""A file or folder for each client, LEAF's files, and splits from files: read exactly, or refused in a sentence."""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnrfl.config import load as load_config
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.core.rng import numpy_generator
from fnrfl.data.datasets import Dataset, read_source
from fnrfl.data.datasets import load as load_data
from fnrfl.data.partition.views import splits_hash
from fnrfl.data.reading import Reading, split_names
from fnrfl.runs.predict import evaluate, predict
from fnrfl.runs.run import resume
from fnrfl.runs.run import run as run_config
from fnrfl.runs.setup import build
from settings import with_keys

SITES = ("H10", "H2", "Ähre <b>")


pytestmark = pytest.mark.usefixtures("tmp_cwd")


def rows(site: int, count: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Examples that say whose they are in the first number, and who they are in the second."""
    dice = numpy_generator(site, "rows")
    y = np.arange(count) % 2
    x = dice.normal(size=(count, 3)) + 3 * y[:, None]
    x[:, 0], x[:, 1] = site, np.arange(count)
    return x, y


def write_csv(path: Path, site: int, columns: Sequence[str] = ("a", "b", "c", "label"), count: int = 12) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    x, y = rows(site, count)
    named = {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "label": np.array(["no", "yes"])[y]}
    lines = [",".join(columns), *(",".join(str(named[name][row]) for name in columns) for row in range(len(y)))]
    path.write_text("\n".join(lines) + "\n")


def write_images(path: Path, site: int, *, grey: bool = False, count: int = 4) -> None:
    from PIL import Image

    for row in range(count):
        folder = path / ("cat", "dog")[row % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.full((4, 4) if grey else (4, 4, 3), 10 * site + row, np.uint8)
        Image.fromarray(pixels).save(folder / f"{row}.png")


def held_by(dataset: Dataset) -> dict[str, set[tuple[float, ...]]]:
    """The examples of each client, of both parts."""
    held: dict[str, set[tuple[float, ...]]] = {}
    for part, clients in ((dataset.train, dataset.train_clients), (dataset.test, dataset.test_clients)):
        assert clients is not None
        for x, client in zip(part.x, clients, strict=True):
            held.setdefault(client, set()).add(tuple(x.flatten()[:2].tolist()))
    return held


def write_layout(layout: str) -> dict[str, int]:
    """A folder in one of the layouts; how many examples each site has."""
    for number, site in enumerate(SITES):
        at = Path("data") / site
        if layout == "SITE.csv":
            columns = (("label", "c", "a", "b"), ("a", "b", "c", "label"), ("c", "label", "b", "a"))[number]
            write_csv(at.with_name(f"{site}.csv"), number, columns)
        elif layout == "SITE/train.csv":
            write_csv(at / "train.csv", number)
            write_csv(at / "test.csv", number + 10, ("c", "a", "label", "b"), count=4)
        elif layout == "SITE.npz":
            at.parent.mkdir(exist_ok=True)
            x, y = rows(number)
            np.savez(at.with_name(f"{site}.npz"), x=x, y=y)
        elif layout == "SITE/train.npz":
            at.mkdir(parents=True)
            for part, shift, count in (("train", 0, 12), ("test", 10, 4)):
                x, y = rows(number + shift, count)
                np.savez(at / f"{part}.npz", x=x, y=y)
        elif layout == "SITE/CLASS":
            write_images(at, number, grey=number == 1, count=12)
        else:
            write_images(at / "train", number, count=12)
            write_images(at / "test", number + 10, count=4)
    return dict.fromkeys(SITES, 16 if "train" in layout else 12)


LAYOUTS = ["SITE.csv", "SITE/train.csv", "SITE.npz", "SITE/train.npz", "SITE/CLASS", "SITE/train/CLASS"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_sites_names_its_clients(layout: str) -> None:
    sizes = write_layout(layout)
    dataset = load_data("data", by_client=True)
    held = held_by(dataset)
    assert {site: len(mine) for site, mine in held.items()} == sizes
    for number, site in enumerate(SITES):
        values = {value[0] for value in held[site]}
        if "CLASS" in layout:
            assert {round(v) // 10 for v in values} <= {number, number + 1, number + 10, number + 11}
        else:
            assert values <= {number, number + 10}
    if "train" in layout:
        assert len(dataset.train) == 36 and len(dataset.test) == 12
    else:
        assert dataset.test_clients is not None and sorted(dataset.test_clients) == sorted(SITES * 2)
    config = load_config(None, ["dataset=data", "scenario=natural", "model=mlp", "client.augment=none"])
    assert build.build(config).partition.names == ("H2", "H10", "Ähre <b>")
    drawn = build.build(with_keys(config, {"scenario": "iid", "clients": 2}))  # the same data, to compare with
    assert any("names 3 clients (H2, H10, Ähre <b>)" in notice for notice in drawn.notices)


def test_tables_of_sites_are_read_as_one_table_would_be() -> None:
    write_layout("SITE.csv")
    texts = []
    for number, site in enumerate(("H2", "H10", "Ähre <b>")):
        write_csv(Path("other.csv"), SITES.index(site))
        header, *lines = Path("other.csv").read_text().splitlines()
        texts += [f"{header},hospital"] * (number == 0) + [f"{line},{site}" for line in lines]
    Path("whole.csv").write_text("\n".join(texts) + "\n")
    one = load_data("whole.csv", by_client=True, reading=Reading(label="label", client="hospital"))
    many = load_data("data", by_client=True, reading=Reading(label="label"))
    assert one.checksum == many.checksum and one.classes == many.classes and one.columns == many.columns
    assert (one.train_clients, one.test_clients) == (many.train_clients, many.test_clients)


def test_columns_and_kinds_that_differ_are_refused() -> None:
    def refused(words: str, **arrays: Any) -> None:
        for name, held in arrays.items():
            np.savez(f"data/{name}.npz", **held)
        with pytest.raises(FnrflError, match=words):
            load_data("data")

    write_csv(Path("data/A.csv"), 0)
    Path("data/B.csv").write_text("a,b,d,label\n1,2,3,no\n4,5,6,yes\n")
    refused(r"B\.csv.*'c'")
    Path("data/B.csv").unlink()
    x, y = rows(0)
    refused("the same kind", B={"x": x, "y": y})
    Path("data/A.csv").unlink()
    refused(r"x of A has examples of float64\[2\] and x of B of float64\[3\]", A={"x": x[:, :2], "y": y})
    refused("y of A has names as labels and y of B has numbers", A={"x": x, "y": np.array(["no", "yes"])[y]})
    held = {"x": x, "y": y}
    refused("the same array `classes`", A=held | {"classes": ["a", "b"]}, B=held | {"classes": ["b", "a"]})


def test_columns_that_only_some_sites_have_can_be_ignored() -> None:
    write_csv(Path("data/A.csv"), 0, ("a", "b", "label"))
    write_csv(Path("data/B.csv"), 1, ("label", "c", "b"))
    with pytest.raises(FnrflError, match=r"lacks 'a' and has 'c'.*dataset\.ignore = 'a,c' leaves out"):
        load_data("data", by_client=True)
    dataset = load_data("data", by_client=True, reading=Reading(ignore=("a", "c")))
    assert dataset.columns is not None and dataset.columns.inputs == ("b",)
    with pytest.raises(ConfigError, match="dataset.ignore names the column 'd', and .* has 'a', 'b', 'label', 'c'"):
        load_data("data", by_client=True, reading=Reading(ignore=("a", "c", "d")))


@pytest.mark.parametrize("label", ["", "label"])
def test_a_folder_of_tables_with_names_of_their_own_is_told_what_it_must_hold(label: str) -> None:
    write_csv(Path("data/north/2023.csv"), 0)
    write_csv(Path("data/north/2024.csv"), 1)
    write_csv(Path("data/south/2023.csv"), 2)
    with pytest.raises(ConfigError, match=r"such as north/2023\.csv; .* must hold train\.csv.*north\.csv in data"):
        load_data("data", by_client=True, reading=Reading(label=label))


def test_train_and_test_are_parts_and_never_clients() -> None:
    write_csv(Path("data/train.csv"), 0)
    write_csv(Path("data/test.csv"), 1, ("label", "a", "b", "c"), count=4)
    dataset = load_data("data")
    assert (len(dataset.train), len(dataset.test), dataset.train_clients) == (12, 4, None)
    with pytest.raises(ConfigError, match="names none"):
        load_data("data", by_client=True)
    write_images(Path("classes"), 0, count=8)
    assert load_data("classes").classes == ("cat", "dog") and load_data("classes").train_clients is None
    write_images(Path("pictures/train"), 0)
    write_images(Path("pictures/test"), 1)
    assert load_data("pictures").train_clients is None
    write_images(Path("pictures/H1"), 1)
    assert "pictures also has H1, which is not read." in " ".join(load_data("pictures").notices)
    with pytest.raises(ConfigError, match="names none"):
        load_data("pictures", by_client=True)


@pytest.mark.parametrize("names", [("Training", "Testing"), ("train", "Test"), ("TRAIN", "TEST"), ("Train", "Valid")])
def test_parts_under_other_names_are_no_clients(names: tuple[str, str]) -> None:
    for number, name in enumerate(names):
        write_images(Path("pictures") / name, number)
        write_csv(Path(f"tables/{name}.csv"), number)
    for folder in ("pictures", "tables"):
        with pytest.raises(
            ConfigError, match=f"{folder} has .*{names[1]}.*must be called train and test.* Rename them"
        ):
            load_data(folder)


def test_names_that_systems_store_in_two_ways_are_one_name() -> None:
    one, two = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    for number, name in enumerate((one, two)):
        write_images(Path(f"pictures/H{number}"), number)
        Path(f"pictures/H{number}/cat").rename(f"pictures/H{number}/{name}")
        Path("tables").mkdir(exist_ok=True)
        lines = [f"{row},{number},{(name, 'b')[row % 2]},H{name}" for row in range(8)]
        Path(f"tables/H{number}.csv").write_text("\n".join([f"a,{name},label,who", *lines]))
    assert load_data("pictures").classes == ("dog", one)
    keys = Reading(ignore=("who",))
    tables = read_source("tables", reading=keys).dataset(by_client=True)
    assert tables.classes == ("b", one) and tables.columns is not None and tables.columns.inputs == ("a", one)
    for file in (0, 1):
        held = read_source(f"tables/H{file}.csv", reading=Reading(client="who", ignore=split_names(two)))
        assert held.raw.parts[""].clients.tolist() == [f"H{one}"] * 8
        assert held.raw.columns is not None and held.raw.columns.inputs == ("a",)
    np.savez("own.npz", x=np.zeros((8, 2)), y=[one, two] * 4, client=[one, two] * 4)
    assert (load_data("own.npz").classes, set(load_data("own.npz").train_clients or ())) == ((one,), {one})
    Path("tables/H0.csv").rename(f"tables/{one}.csv")
    Path("tables/H1.csv").rename(f"tables/{two}.csv")
    with pytest.raises(ConfigError, match="more than one file or folder for the client"):
        load_data("tables")


def test_one_client_has_one_place() -> None:
    write_csv(Path("data/A.csv"), 0)
    with pytest.raises(ConfigError, match=r"one of them can say who holds a row"):
        load_data("data", reading=Reading(client="a"))
    write_csv(Path("data/A/train.csv"), 1)
    with pytest.raises(ConfigError, match="more than one file or folder for the client A"):
        load_data("data")
    Path("data/A/train.csv").rename("data/A/test.csv")
    with pytest.raises(ConfigError, match=r"test\.csv but no train\.csv"):
        load_data("data")
    Path("parts").mkdir()
    whole = {f"{kind}_{part}": np.ones((4, 1)) for kind in "xy" for part in ("train", "test")}
    for part in ("train", "test"):
        np.savez(f"parts/{part}.npz", **whole)
    with pytest.raises(ConfigError, match=r"train\.npz has parts of its own"):
        load_data("parts")


def test_what_no_client_is_read_from_is_said() -> None:
    write_layout("SITE/train/CLASS")
    Path("data/.hidden").touch()
    assert load_data("data").notices == ()
    Path("data/README.txt").touch()
    Path("data/H7").mkdir()
    assert "data also has H7, README.txt, which is not read." in load_data("data").notices


def test_sites_without_a_test_part_beside_others_are_told_and_not_scored() -> None:
    write_csv(Path("data/A/train.csv"), 0)
    write_csv(Path("data/A/test.csv"), 10, count=4)
    write_csv(Path("data/B.csv"), 1)
    built = build.build(load_config(None, ["dataset=data", "scenario=natural", "model=mlp"]))
    assert [len(mine) for mine in built.splits.site_tests] == [4, 0]
    assert any("(B) has no test examples" in notice for notice in built.notices)


def test_a_function_may_name_the_clients() -> None:
    Path("mine_sites.py").write_text(
        "import numpy as np\n"
        "x, y, who = np.arange(40.0).reshape(20, 2), np.arange(20) % 2, ['b', 'a10', 'a9', 'b'] * 5\n"
        "def one(): return x, y, who\n"
        "def two(): return x, y, who, x + 0.5, y, who\n"
        "def wrong(): return x, y, who, x, y\n"
    )
    for name in ("one", "two"):
        config = load_config(None, [f"dataset=mine_sites:{name}", "scenario=natural", "model=mlp"])
        assert build.build(config).partition.names == ("a9", "a10", "b")
    with pytest.raises(ConfigError, match="tuple of 5"):
        build.build(load_config(None, ["dataset=mine_sites:wrong", "model=mlp"]))


# -- LEAF --------------------------------------------------------------------------------------------------------------


def leaf_tree(users: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    return {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data}


def write_leaf(path: Path, users: dict[str, tuple[Any, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(leaf_tree(users)))


def test_leafs_folders_are_read() -> None:
    users = {f"f{n}": tuple(part.tolist() for part in rows(n)) for n in range(4)}
    write_leaf(Path("data/train/all_0.json"), dict(list(users.items())[:2]))
    write_leaf(Path("data/train/all_1.json"), dict(list(users.items())[2:]))
    tested = {user: tuple(part.tolist() for part in rows(n + 10, 4)) for n, user in enumerate(["f0", "f1", "new"])}
    write_leaf(Path("data/test/all_0.json"), tested)
    built = build.build(load_config(None, ["dataset=data", "scenario=natural", "model=mlp"]))
    assert built.partition.names == ("f0", "f1", "f2", "f3")
    held = held_by(built.dataset)
    assert {user: len(held[user]) for user in held} == {"f0": 16, "f1": 16, "f2": 12, "f3": 12, "new": 4}
    said = " ".join(built.notices)
    assert "1 client without training examples (new)" in said and "(f2, f3) have no test examples" in said
    one = load_data("data/train/all_0.json", by_client=True)
    assert {*(one.train_clients or ())} == {"f0", "f1"}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ([1], "list"),
        ({"a": 1}, "it must have users"),
        ({"users": ["u"], "num_samples": [1], "user_data": {}}, "lists x and y"),
        ({**leaf_tree({"u": ([[1.0]], [0])}), "num_samples": [2]}, "x and y of that length"),
        (leaf_tree({"u": ([[1.0], [2.0, 3.0]], [0, 1])}), "rows must have the same shape"),
        (leaf_tree({"u": (["a tweet"], [0])}), "must be numbers"),
        (leaf_tree({"u": ([[1.0]], [0]), "v": ([[1.0, 2.0]], [1])}), "must be alike"),
        (leaf_tree({"u": ([], [])}), "has no examples"),
        (leaf_tree({"u": ([[1.0]], [0])}) | {"users": ["u", "u"], "num_samples": [1, 1]}, "users, each once"),
        (leaf_tree({"u": ([[float("nan")]], [0])}), "not finite"),
    ],
)
def test_what_leaf_would_not_write_is_refused(tree: Any, said: str) -> None:
    Path("own.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=said):
        load_data("own.json")


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 60))
def test_a_truncated_file_is_refused(cut: int) -> None:
    text = json.dumps(leaf_tree({"u": ([[1.0]], [0])}))
    Path("own.json").write_text(text[: -1 - cut])
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_data("own.json")


def test_pipes_are_not_waited_for() -> None:
    os.mkfifo("own.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_data("own.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        build.build(load_config(None, ["scenario=own.json"]))


# -- splits from files -------------------------------------------------------------------------------------------------


def save(scenario: str, *keys: str, path: str = "split.json") -> build.Built:
    built = build.build(load_config(None, [f"scenario={scenario}", *keys]))
    Path(path).write_text(json.dumps(built.manifest()))
    return built


@pytest.mark.parametrize("scenario", ["label-dirichlet(0.3) + feature-noise(0.2)", "natural"])
def test_a_saved_split_is_taken_as_it_was(scenario: str) -> None:
    write_layout("SITE.npz")
    data = ["dataset=data", "model=mlp"] if scenario == "natural" else ["dataset=digits", "clients=6"]
    before = save(scenario, *data, "seed=3")
    config = load_config(None, ["scenario=split.json", *data[:1], "model=mlp", "seed=5"])
    for algorithm in ("fedavg", "feddf"):  # the second one needs a share of the public data for itself
        after = build.build(with_keys(config, {"algorithm": algorithm}))
        assert after.partition == before.partition and after.config.clients == len(before.partition.positions)
        assert after.partition.noise == before.partition.noise and after.partition.ids == before.partition.ids
        for mine, then in zip(after.splits.clients, before.splits.clients, strict=True):
            assert mine.tolist() == then.tolist()
        taken = [len(s.public) + len(s.ranking) + len(s.distill) for s in (after.splits, before.splits)]
        assert taken[0] == taken[1]
        assert after.splits.manifest()["validation"] == before.splits.manifest()["validation"]
    for name in ("public_positions", "validation_positions"):
        assert after.manifest()["splits"][name] == before.manifest()["splits"][name]


def test_a_saved_split_of_other_data_or_sizes_is_refused() -> None:
    save("iid", "clients=4")
    write_layout("SITE.npz")
    for keys, said in (
        (["dataset=data"], "split.json is a split of other data"),
        (["public.size=0.2"], "public.size = 0.2 asks for 287. Set public.size = 144"),
        (["validation.size=0"], "validation.size = 0 asks for 0"),
        (["clients=7"], "clients is 7, and under scenario = 'split.json' there are 4"),
    ):
        with pytest.raises(ConfigError) as error:
            build.build(load_config(None, ["scenario=split.json", *keys]))
        assert said in str(error.value)
    with pytest.raises(ConfigError, match=r"'gone\.json' does not exist"):
        build.build(load_config(None, ["scenario=gone.json"]))


def test_a_changed_split_is_refused() -> None:
    save("iid", "clients=4")
    manifest = json.loads(Path("split.json").read_text())
    splits = manifest["splits"]
    swapped = {name: splits[name][::-1] for name in ("public_positions", "validation_positions")}
    unknown = {key: value for key, value in splits.items() if not key.endswith("_positions")}
    for change in (
        {"positions": manifest["positions"][:3]},
        {"splits": splits | swapped},
        {"splits": unknown},
        {"splits": unknown | {"sha256": splits_hash(unknown)}},
        {"splits": {}},
        {"splits": None},
        {"format": 0},
    ):
        Path("split.json").write_text(json.dumps(manifest | change))
        with pytest.raises(ConfigError, match="sha256|Save it again|Draw it again"):
            build.build(load_config(None, ["scenario=split.json"]))
    for text in ("[1]", "{}", "", "null", "{", "[" * 100_000):
        Path("split.json").write_text(text)
        with pytest.raises(ConfigError):
            build.build(load_config(None, ["scenario=split.json"]))


@pytest.mark.parametrize("position", [-1, 5000, 10**30])
@pytest.mark.parametrize("where", ["positions", "public_positions", "validation_positions"])
def test_a_split_with_a_position_where_nothing_is_is_refused(where: str, position: int) -> None:
    save("iid", "clients=4")
    manifest = json.loads(Path("split.json").read_text())
    (manifest["positions"][1] if where == "positions" else manifest["splits"][where])[0] = position
    manifest["splits"]["sha256"] = splits_hash(manifest["splits"])
    content = {key: value for key, value in manifest.items() if key not in ("sha256", "splits")}
    packed = json.dumps(content, sort_keys=True, separators=(",", ":"))
    Path("split.json").write_text(json.dumps(manifest | {"sha256": hashlib.sha256(packed.encode()).hexdigest()}))
    with pytest.raises(ConfigError, match="scenario = 'split.json' is no split .*Save it again"):
        build.build(load_config(None, ["scenario=split.json"]))


def test_a_run_of_a_saved_split_is_the_run_of_its_scenario() -> None:
    keys = ["dataset=digits", "rounds=2", "clients=4", "model=mlp"]
    drawn = run_config(load_config(None, ["scenario=label-dirichlet(0.3)", *keys]), out="drawn")
    saved = run_config(load_config(None, ["scenario=drawn/partition.json", *keys]), out="saved")
    assert saved.model_sha256 == drawn.model_sha256
    assert resume("saved").model_sha256 == drawn.model_sha256
    assert evaluate("saved", "digits").score.accuracy == pytest.approx(drawn.accuracy)


def test_the_order_of_columns_is_part_of_the_data_and_not_of_an_answer(tmp_path: Path) -> None:
    """Initial weights are drawn by position: a log says in which order, and other tables follow it by name."""
    header, lines = ("age", "crp", "label"), [(str(n), str(n * n % 7), "ab"[n % 2]) for n in range(60)]
    tables = {}
    for name, order in (("one", (0, 1, 2)), ("other", (2, 1, 0))):
        tables[name] = tmp_path / f"{name}.csv"
        rows = [[row[at] for at in order] for row in (header, *lines)]
        tables[name].write_text("".join(",".join(row) + "\n" for row in rows))
    quick: dict[str, Any] = {"rounds": 1, "clients": 2, "scenario": "iid", "model": "mlp", "dataset.label": "label"}
    made = {
        name: run_config(load_config(None, {**quick, "dataset": str(path)}), out=tmp_path / name)
        for name, path in tables.items()
    }
    assert made["one"].data.columns.inputs == ("age", "crp")
    assert made["other"].data.columns.inputs == ("crp", "age")
    logs = [json.loads((tmp_path / name / "events.jsonl").read_text().splitlines()[0])["data"] for name in tables]
    assert logs[0]["sha256"] != logs[1]["sha256"]
    answers = [predict(made["one"], str(path)).probabilities for path in tables.values()]
    assert torch.equal(*answers)


def test_with_the_same_weights_for_each_column_their_order_decides_nothing(tmp_path: Path) -> None:
    table, width = np.random.default_rng(0).normal(size=(200, 4)), 8

    def trained(order: list[int], first: Any = None) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Which rows each client has, and the weights before and after two rounds."""
        rows = [["abcd"[at] for at in order] + ["label"]]
        rows += [[*map(str, row[order]), "yes" if row.sum() > 0 else "no"] for row in table]
        (tmp_path / "table.csv").write_text("".join(",".join(row) + "\n" for row in rows))
        words = ["clients=2", "scenario=iid", f"model=mlp(hidden={width})", "engine.precision=float64", "engine=loop"]
        built = build.build(load_config(None, [f"dataset={tmp_path / 'table.csv'}", *words]))
        with built.engine as engine:
            begun = built.algorithm.init(built.net)
            state = begun = begun if first is None else replace(begun, params=first)
            for t in range(2):
                engine.begin(t)
                state = built.algorithm.round(state, torch.arange(2), engine)
        return built.splits.clients, begun.params, state.params

    def in_order(params: torch.Tensor, order: list[int]) -> torch.Tensor:
        inputs, rest = params.split([4 * width, len(params) - 4 * width])
        return torch.cat([inputs.view(width, 4)[:, order].flatten(), rest])

    order = [2, 0, 3, 1]
    clients, begun, ended = trained([0, 1, 2, 3])
    others, _, again = trained(order, in_order(begun, order))
    assert all(map(np.array_equal, clients, others))
    assert (again - in_order(ended, order)).abs().max() < 1e-12 < 1e-3 < (ended - begun).abs().max()
