"""What the commands do: dry runs, splits, data, models in use, reports, comparisons, and a doctor."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.spatial.distance import jensenshannon

from command_line import fnrfl
from fnrfl.cli import doctor
from fnrfl.config import load, loads, registry
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.data import sources
from fnrfl.data.datasets import load as load_data
from fnrfl.data.partition.value import Partition
from fnrfl.engines import job
from fnrfl.flower.deployment import FLOWER_QUIET
from fnrfl.results import skew
from fnrfl.rundir.interrupt import interruptible
from fnrfl.runs import forecast as plan
from fnrfl.runs import run as runs
from fnrfl.runs.predict import evaluate, predict
from settings import with_keys

command = partial(fnrfl, code=0)


@pytest.fixture(autouse=True)
def folder(tmp_cwd: Path) -> Path:
    return tmp_cwd


# -- run --dry-run -----------------------------------------------------------------------------------------------------

BASE = (
    *("rounds=3", "clients=6", "client.epochs=1", "model=cnn(norm=batch)", "scenario=label-dirichlet(1)"),
    *("public.size=100", "validation.size=1000", "fnr.epochs=1", "fnr=off"),  # which leaves little to train on
)
# What cfedfn's and fedftg's clients are asked in a round depends on earlier rounds: a forecast of theirs is no more
# than near.
FORESEEN = [name for name in registry.algorithms() if name not in ("cfedfn", "fedftg")]
VARIANTS = [
    *((f"algorithm={name}",) for name in FORESEEN),
    *((f"algorithm={name}", "fnr=on", "fnr.share=0.4", "participation=0.5") for name in FORESEEN),
    ("algorithm=scaffold", "algorithm.variates=I"),
    ("algorithm=moon", "algorithm.head=16"),
    ("fnr.upload=twice", "fnr=on"),
    ("fnr.when=local", "fnr=on"),
    ("fnr.when=both", "fnr.epochs=2", "fnr=on"),
    ("fnr.share=0.1", "fnr=on"),
    ("engine.clients_at_once=2", "fnr=on"),
    ("client.last_batch=keep", "participation=0.34"),
    ("rounds=1", "fnr.when=both", "fnr=on"),
    ("protocol=paper", "dataset=digits", "fnr=on", "rounds=2"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_a_forecast_is_what_a_run_meters(variant: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of every round, and every single optimiser step."""
    config = load(None, [*BASE, *variant, "engine=loop", "engine.threads=1"])
    monkeypatch.setattr(plan, "_seconds", lambda *_: 1.0)
    forecast = plan.forecast(config)
    taken = {"steps": 0}
    real = job.local_step

    def counted(*arguments: Any) -> torch.Tensor:
        taken["steps"] += 1
        return real(*arguments)

    monkeypatch.setattr(job, "local_step", counted)
    result = runs.run(config, out=None)
    for way in ("up", "down"):
        told = [forecast.sent[min(t, 1)][way] for t in range(len(result.rounds))]
        assert told == [event[f"bytes_{way}"] for event in result.rounds]
        assert forecast.bytes_in_all(way) == sum(told)
    assert sum(forecast.steps.values()) == taken["steps"]
    assert forecast.config == result.config


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_dry_run_estimates_time_and_memory_within_reason(engine: str) -> None:
    got = json.loads(command("run", "fnr=on", f"engine={engine}", "--dry-run", "--json").stdout)
    assert got["engine"] == engine
    assert set(got["steps_by_phase"]) == {"local", "refine"}
    assert got["steps"] == sum(got["steps_by_phase"].values())
    assert 0.05 < got["seconds_estimate"] < 600
    assert 100 * 2**20 < got["memory_estimate"] < 100 * 2**30


def test_a_moment_in_which_others_have_the_core_is_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step that is timed seems to take a minute, and all others ten milliseconds."""
    looks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 60.0 * ((look := next(looks)) > 0) + 0.01 * look)
    monkeypatch.setattr(plan, "time", clock)
    got = json.loads(command("run", "fnr=on", "engine=loop", "--dry-run", "--json").stdout)
    assert got["seconds_estimate"] < 600


def test_a_dry_run_prints_a_config_that_runs_and_writes_nothing(folder: Path) -> None:
    got = command("run", "fnr=on", "rounds=2", "--dry-run")
    resolved = loads(got.stdout)
    assert resolved.engine.name == "batched"
    assert with_keys(resolved, {"engine": asdict(load().engine), "dataset.scale": "auto"}) == load(
        None, ["fnr=on", "rounds=2"]
    )
    assert all(f"\n# {word} " in got.stdout for word in ("steps", "up", "down", "memory", "time", "engine"))
    assert not list(folder.iterdir())


def aside(text: str) -> list[str]:
    """Lines about data that is set aside."""
    return [line for line in text.splitlines() if "set aside" in line]


@pytest.mark.parametrize(
    ("words", "counts", "keys"),
    [
        ((), (144, 72, 1221), {"public.size=0", "validation.size=0"}),
        (("fnr=on",), (144, 72, 1221), {"validation.size=0"}),
        (("algorithm=public-returned",), (144, 72, 1221), {"validation.size=0"}),
        (("algorithm=feddf",), (144, 72, 1221), set[str]()),
        (("public.size=0", "validation.size=10"), (10, 1427), {"validation.size=0"}),
    ],
)
def test_a_run_says_once_how_much_is_set_aside_and_how_to_train_on_it(
    words: tuple[str, ...], counts: tuple[int, ...], keys: set[str], folder: Path
) -> None:
    got = command("run", "rounds=1", "client.epochs=1", *words)
    (line,) = aside(got.output)
    for count in counts:
        assert f"{count:,}" in line
    assert {key for key in ("public.size=0", "validation.size=0") if key in line} == keys
    assert aside(command("run", *words, "--dry-run").stdout) == [f"# {line.replace('note: ', 'note    ')}"]
    printed = json.loads(command("run", "rounds=1", *words, "--json").stdout)  # nothing but the answer
    assert printed["rounds"] == 1
    assert not aside(command("run", "rounds=1", *words, "-q").output)
    if keys:
        said = command("run", "rounds=1", *words, *keys).output
        assert all(key not in "".join(aside(said)) for key in keys)


def test_a_comparison_says_once_how_much_is_set_aside_for_all_methods(folder: Path) -> None:
    got = command("compare", "rounds=1", "client.epochs=1", "--over", "fnr=off,on", "--seeds", "0,1", "--no-report")
    assert len(aside(got.stdout)) == 1
    unlike = ("--over", "algorithm=fedavg,feddf", "--seeds", "0", "--no-report")  # one learns from it
    assert len(aside(command("compare", "rounds=1", "client.epochs=1", *unlike).stdout)) == 1
    several = ("--over", "public.size=0,0.1,0.2", "--seeds", "0", "--no-report")
    assert len(aside(command("compare", "rounds=1", "client.epochs=1", *several).stdout)) == 3


def test_a_run_over_a_table_says_which_column_is_the_label(folder: Path) -> None:
    rows = [f"{age},{age % 2},{'yes' if age % 3 else 'no'}" for age in range(40)]
    (folder / "own.csv").write_text("\n".join(["age,sex,ill", *rows]) + "\n")
    words = ("dataset=own.csv", "model=mlp", "clients=2", "rounds=1", "scenario=iid")
    assert "'ill'" in aside(command("run", *words).output)[0]
    lines = command("run", *words, "public.size=0", "validation.size=0").stdout.splitlines()
    (line,) = [line for line in lines if "'ill'" in line]
    assert "32" in line and "set aside" not in line


def test_a_dry_run_trains_nothing_that_a_run_would_notice() -> None:
    config = load(None, ["rounds=1", "algorithm=scaffold", "fnr=on"])
    before = runs.run(config, out=None).model_sha256
    plan.forecast(config)
    assert runs.run(config, out=None).model_sha256 == before


def test_a_dry_run_without_the_data_fetches_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FNRFL_DATA", str(folder / "data"))
    got = command("run", "label-skew", "--dry-run")
    assert loads(got.stdout) == load("label-skew")
    assert "fnrfl data get cifar10" in got.stdout
    assert json.loads(command("run", "label-skew", "--dry-run", "--json").stdout)["missing"] == "cifar10"
    assert not list(folder.iterdir())


def test_a_dry_run_says_leak() -> None:
    got = command("run", "protocol=paper", "dataset=digits", "model=mlp", "fnr=on", "rounds=1", "--dry-run")
    assert "\n# leak: public_is_test" in got.stdout


# -- scenario ----------------------------------------------------------------------------------------------------------

COUNTS = st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=6).filter(
    lambda rows: all(map(sum, rows))
)


@given(COUNTS)
def test_label_distance_is_scipys_jensen_shannon_distance(rows: list[list[int]]) -> None:
    counts = np.array(rows)
    expected = [jensenshannon(row / row.sum(), counts.sum(0) / counts.sum(), base=2) for row in counts]
    np.testing.assert_allclose(skew.skew(counts, np.zeros(len(counts))).distance, np.nan_to_num(expected), atol=1e-7)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_gini_is_the_mean_difference_over_twice_the_mean(sizes: list[int]) -> None:
    values = np.array(sizes, dtype=float)
    assert skew.gini(sizes) == pytest.approx(np.abs(values[:, None] - values).mean() / (2 * values.mean()), abs=1e-12)


def test_scores_of_plain_cases() -> None:
    even = skew.skew([[5, 5], [5, 5]], [0, 0])
    assert even.distance.tolist() == [0, 0]
    assert even.classes.tolist() == pytest.approx([2, 2])
    assert even.gini == 0
    apart = skew.skew([[8, 0], [0, 8]], [0.0, 0.5])
    assert apart.classes.tolist() == [1, 1]
    assert apart.distance[0] == pytest.approx(jensenshannon([1, 0], [0.5, 0.5], base=2))
    assert apart.summary()["noise"] == [0.0, 0.5]
    assert skew.skew([[0, 0], [0, 4]], [0, 0]).gini == 0.5


def test_more_skew_has_higher_scores() -> None:
    def scores(scenario: str) -> dict[str, Any]:
        got: dict[str, Any] = json.loads(command("scenario", "show", scenario, "--json").stdout)
        return got

    found = [scores(f"label-dirichlet({alpha})") for alpha in (100, 1, 0.1)]
    assert found[0]["label_distance"] < found[1]["label_distance"] < found[2]["label_distance"]
    assert found[0]["effective_classes"] > found[1]["effective_classes"] > found[2]["effective_classes"]
    assert scores("quantity-dirichlet(0.5)")["size_gini"] > scores("iid")["size_gini"]


def test_a_heat_map_shows_every_example_and_groups_many_classes() -> None:
    assert skew.heat_map([[0, 1], [100, 25]]) == ["  ░░", "██▒▒"]
    wide = np.arange(1, 1001).reshape(1, -1)
    assert skew.binned(wide).shape == (1, skew.COLUMNS)
    assert skew.binned(wide).sum() == wide.sum()
    assert len(skew.heat_map(wide)[0]) == skew.COLUMNS


def test_a_split_is_the_one_of_a_run(folder: Path) -> None:
    keys = ("clients=5", "seed=4", "public.size=0.2")
    shown = command("scenario", "show", "label-dirichlet(0.3) + feature-noise(0.2)", *keys).stdout
    command("scenario", "save", "split.json", "label-dirichlet(0.3) + feature-noise(0.2)", *keys)
    runs.run(load(None, [*keys, "scenario=label-dirichlet(0.3) + feature-noise(0.2)", "rounds=1"]), out="run")
    saved = json.loads((folder / "split.json").read_text())
    assert saved == json.loads((folder / "run" / "partition.json").read_text())
    assert saved["sha256"] in shown
    partition = Partition.from_manifest({key: value for key, value in saved.items() if key != "splits"})
    sizes = [line.split() for line in shown.splitlines() if line[:1].isdigit()]
    assert [row[-4] for row in sizes] == [str(size) for size in partition.sizes]
    assert [row[-1] for row in sizes] == ["0", "0.05", "0.1", "0.15", "0.2"]


def test_a_recipe_can_be_shown_and_drawn(folder: Path) -> None:
    (folder / "mine.toml").write_text('dataset = "digits"\nmodel = "mlp"\nclients = 50\nscenario = "iid"\n')
    got = command("scenario", "show", "mine.toml", "--png", "split.png")
    assert "and 10 clients more" in got.stdout
    with Image.open("split.png") as image:
        assert image.width > 600
    assert "seed 3" in command("scenario", "show", "seed=3").stdout


# -- data --------------------------------------------------------------------------------------------------------------


def test_data_list_says_where_and_how(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FNRFL_DATA", str(folder / "data"))
    lines = command("data", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(sources.NAMED_DATASETS)
    assert str(sources.EMBEDDED_FILE) in lines[0]
    assert "fnrfl data get cifar10" in lines[2]
    rows = json.loads(command("data", "list", "--json").stdout)
    assert rows[2]["where"] is None
    assert rows[0]["licence"] == "CC BY 4.0"


def test_data_get_verifies_what_is_there() -> None:
    assert str(sources.EMBEDDED_FILE) in command("data", "get", "digits").stdout
    assert command("data", "get", "digits", "--quiet").output == ""


# -- evaluate and predict ----------------------------------------------------------------------------------------------


def pixels(count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Digits as pictures: bytes [n, 1, 8, 8] and labels."""
    test = load_data("digits").test
    return (test.x[:count] / test.x.max() * 255).round().to(torch.uint8).numpy(), test.y[:count].numpy()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> runs.Result:
    folder = tmp_path_factory.mktemp("runs")
    train = load_data("digits").train
    x = (train.x / train.x.max() * 255).round().to(torch.uint8).numpy()
    x_test, y_test = pixels()
    np.savez(folder / "mine.npz", x_train=x, y_train=train.y.numpy(), x_test=x_test, y_test=y_test)
    keys = [f"dataset={folder / 'mine.npz'}", "rounds=4", "scenario=iid", "model=cnn(norm=batch)", "client.epochs=1"]
    return runs.run(load(None, keys), out=folder / "one")


def test_the_runs_own_data_gives_the_runs_own_numbers(finished: runs.Result) -> None:
    got = json.loads(command("evaluate", str(finished.run_dir), finished.config.dataset.name, "--json").stdout)
    last = finished.rounds[-1]
    assert got["accuracy"] == last["accuracy"] > 0.3
    assert got["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert got["per_class"] == last["per_class"]
    assert got["examples"] == 360
    text = command("evaluate", str(finished.run_dir), finished.config.dataset.name).stdout
    assert f"accuracy {last['accuracy']:.4f}" in text
    assert text.splitlines()[-1].split() == ["9", f"{last['per_class'][9]:.4f}", "36", "examples"]


def test_predictions_are_the_models(finished: runs.Result) -> None:
    (x, y), train = pixels(), load_data(finished.config.dataset.name).train
    with torch.no_grad():
        expected = finished.model.eval()(torch.cat([train.x, torch.from_numpy(x)]) / 255).softmax(1)
    command("predict", str(finished.run_dir), finished.config.dataset.name, "-o", "p.csv")
    with open("p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["row", "part", "label", *(f"p_{digit}" for digit in range(10))]
    places = [("train", str(row)) for row in range(len(train))] + [("test", str(row)) for row in range(len(y))]
    assert [(row["part"], row["row"]) for row in rows] == places
    assert [row["label"] for row in rows] == [str(index) for index in expected.argmax(1).tolist()]
    found = np.array([[float(row[f"p_{digit}"]) for digit in range(10)] for row in rows])
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    right = np.mean([row["label"] == str(label) for row, label in zip(rows[len(train) :], y.tolist(), strict=True)])
    assert right == pytest.approx(finished.accuracy)
    assert command("predict", str(finished.run_dir), finished.config.dataset.name).stdout == Path("p.csv").read_text()


def npz(**arrays: np.ndarray) -> str:
    np.savez("data.npz", **arrays)
    return "data.npz"


def images(flat: bool) -> str:
    x, y = pixels(20)
    for index, (picture, label) in enumerate(zip(x, y, strict=True)):
        place = Path("pictures") if flat else Path("pictures") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture[0]).save(place / f"{index:03d}.png")
    return "pictures"


FORMS: dict[str, Callable[[], str]] = {
    "x and y": lambda: npz(x=pixels(20)[0], y=pixels(20)[1]),
    "names of classes": lambda: npz(x=pixels(20)[0], y=pixels(20)[1].astype(str)),
    "a test part": lambda: npz(x_train=pixels(5)[0], y_train=pixels(5)[1], x_test=pixels(20)[0], y_test=pixels(20)[1]),
    "images in folders": lambda: images(flat=False),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_can_be_judged(form: str, finished: runs.Result) -> None:
    x, y = pixels(20)
    found = evaluate(finished.run_dir or "", FORMS[form]())
    with torch.no_grad():
        right = finished.model.eval()(torch.from_numpy(x) / 255).argmax(1).numpy() == y
    assert found.score.accuracy == pytest.approx(right.mean())
    assert found.score.answers.count.tolist() == np.bincount(y, minlength=10).tolist()
    assert found.what == ("the test part of other data" if form == "a test part" else "all examples")


def test_examples_without_labels(finished: runs.Result) -> None:
    run_dir = finished.run_dir or ""
    known = predict(run_dir, npz(x=pixels(20)[0], y=pixels(20)[1])).labels
    assert predict(run_dir, npz(x=pixels(20)[0])).labels == known
    pictures = predict(run_dir, images(flat=True))
    assert pictures.labels == known
    assert list(pictures.rows)[:2] == ["000.png", "001.png"]
    with pytest.raises(ConfigError, match="no labels.*fnrfl predict"):
        evaluate(run_dir, "pictures")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on a table with named classes, and the table."""
    folder = tmp_path_factory.mktemp("table")
    dice = np.random.default_rng(0)
    kinds = np.array(["cat", "dog", "eel"])
    y = dice.integers(3, size=300)
    x = dice.normal(size=(300, 4)) + 3 * np.eye(3, 4)[y]
    lines = [[*(f"{v:.5f}" for v in row), kinds[label]] for row, label in zip(x, y, strict=True)]
    path = folder / "animals.csv"
    path.write_text("\n".join(",".join(line) for line in [["a", "b", "c", "d", "label"], *lines]) + "\n")
    config = load(None, [f"dataset={path}", "rounds=4", "scenario=iid", "clients=3"])
    runs.run(config, out=folder / "run")
    return folder / "run", path


def test_a_table_needs_no_label_column(table: tuple[Path, Path], folder: Path) -> None:
    run_dir, path = table
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    Path("new.csv").write_text("\n".join(",".join(row[:-1]) for row in rows) + "\n")
    got = predict(run_dir, "new.csv")
    share = np.mean([label == row[-1] for label, row in zip(got.labels, rows[1:], strict=True)])
    assert share > 0.8
    lines = path.read_text().splitlines(keepends=True)
    Path("turned.csv").write_text("".join([lines[0], *reversed(lines[1:])]))  # other data, by its content
    assert evaluate(run_dir, "turned.csv").score.accuracy == pytest.approx(share)
    assert evaluate(run_dir, "turned.csv").what == "all examples"
    own = evaluate(run_dir, str(path))
    assert own.what == "the test part"
    assert own.score.accuracy == runs.load(run_dir).accuracy
    header = next(csv.reader(io.StringIO(got.to_csv())))
    assert header == ["row", "label", "p_cat", "p_dog", "p_eel"]


def three(kind: str, labels: object = None, name: str = "new") -> str:
    """Three examples in a file, with these labels if there are any; of users, those of the second."""
    rows, path = [[at, 2, 3, at] for at in range(3)], Path(f"{name}.{kind}")
    if kind == "npz":
        np.savez(path, x=np.array(rows, np.float32), **({} if labels is None else {"y": np.array(labels)}))
    elif kind == "csv":
        cells = [["a", "b", "c", "d"], *rows]
        cells = [[*row, word] for row, word in zip(cells, ["label", *labels], strict=True)] if labels else cells
        path.write_text("\n".join(",".join(map(str, row)) for row in cells))
    else:
        users = {user: {"x": rows, "y": y} for user, y in (("a", [0, 1, 2]), ("b", labels or [0, 1, 2]))}
        path.write_text(json.dumps({"users": [*users], "num_samples": [3, 3], "user_data": users}))
    return str(path)


NEEDLESS: list[tuple[str, Any]] = [
    ("npz", [0, np.nan, 2]), ("npz", [np.nan] * 3), ("npz", [0, 0.5, 1]), ("npz", [-1, 0, 1]), ("npz", [[0, 0]] * 3),
    ("csv", ("cat", "", "?")), ("csv", ("cat", "cow", "dog")), ("csv", ("1", "1.5", "1.0")),
    ("json", [0, None, 2]), ("json", [0, float("nan"), 2]), ("json", ["cat", "dog", "eel"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "labels"), NEEDLESS, ids=str)
def test_labels_that_nobody_needs_stop_no_prediction(table: tuple[Path, Path], kind: str, labels: Any) -> None:
    plain = predict(table[0], three(kind))
    given: list[Any] = [three(kind, labels, "labelled")]
    if kind == "npz":
        arrays = dict(np.load(given[0]))
        given.append((arrays["x"], arrays["y"]))
    for data in given:
        assert predict(table[0], data).to_csv() == plain.to_csv()
        with pytest.raises((ConfigError, CompatibilityError), match="label|class"):
            evaluate(table[0], data)
    for clients in itertools.permutations([three(kind), given[0]]) if kind != "json" else ():  # one has no labels
        sites = Path(f"{Path(clients[0]).stem}-first")
        sites.mkdir()
        for name, file in zip("AB", clients, strict=True):
            shutil.copy(file, sites / f"{name}.{kind}")
        assert predict(table[0], str(sites)).labels == 2 * plain.labels


def test_labels_of_the_training_part_stop_no_prediction(table: tuple[Path, Path]) -> None:
    x = np.load(three("npz"))["x"]
    np.savez("parts.npz", x_train=x, y_train=[0, 1, 2], x_test=x, y_test=[0, np.nan, 2])
    assert predict(table[0], "parts.npz").labels == 2 * predict(table[0], "new.npz").labels
    with pytest.raises(ConfigError, match="label"):
        evaluate(table[0], "parts.npz")


def test_examples_without_a_label_are_counted_where_labels_are_needed(table: tuple[Path, Path]) -> None:
    np.savez("new.npz", x=np.zeros((4, 4), np.float32), y=[0, np.nan, 1, np.nan])
    with pytest.raises(ConfigError, match=r"^y of new.npz holds the label nan \(example 1, 2 in all\)"):
        evaluate(table[0], "new.npz")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b,label\n1,2,cat\n", "lacks 'c', 'd'"),
        ("a,b,c,d,label\n1,2,3,4,cow\n", "'cow'.*cat, dog, eel"),
        ("a,b,c,d\n1,2,3,x\n", "'x' in column 'd'"),
        ("a,b,c,d\n1,2,3,4\n", "no labels.*column 'label'"),
    ],
)
def test_data_that_the_model_does_not_fit(table: tuple[Path, Path], text: str, said: str) -> None:
    Path("new.csv").write_text(text)
    with pytest.raises((ConfigError, CompatibilityError), match=said):
        evaluate(table[0], "new.csv")


def test_pictures_do_not_fit_a_model_of_tables(table: tuple[Path, Path]) -> None:
    np.savez("pictures.npz", x=pixels(5)[0])
    with pytest.raises(CompatibilityError, match="pixels.*numbers"):
        predict(table[0], "pictures.npz")
    with pytest.raises(ConfigError, match="neither a known data set"):
        predict(table[0], "nowhere")


def test_what_comes_from_a_leak_says_so() -> None:
    config = load(None, ["protocol=paper", "dataset=digits", "model=mlp", "fnr=on", "rounds=1", "client.epochs=1"])
    runs.run(config, out="run")
    assert command("evaluate", "run", "digits").stdout.startswith("leak: public_is_test")
    assert json.loads(command("evaluate", "run", "digits", "--json").stdout)["leaks"]
    assert "leak: public_is_test" in command("predict", "run", "digits").stderr


# -- report and compare ------------------------------------------------------------------------------------------------


def test_report_writes_beside_the_run_or_where_it_is_told(finished: runs.Result) -> None:
    command("report", str(finished.run_dir), "--no-plots")
    assert "<html" in (Path(str(finished.run_dir)) / "report.html").read_text()
    got = command("report", str(finished.run_dir), "--no-plots", "-o", "page.html", "--title", "A <title>")
    assert got.stdout == "page.html\n"
    assert "A &lt;title&gt;" in Path("page.html").read_text()


GRID = ("compare", "rounds=1", "client.epochs=1", "--over", "algorithm=fedavg,fedprox", "--seeds", "0,1", "-o", "grid")


def test_compare_prints_a_table_and_goes_on_where_it_was(folder: Path) -> None:
    first = command(*GRID)
    assert "4 runs, kept in grid" in first.stdout
    assert "2/4  fedprox-seed-0  accuracy 0." in first.stdout
    assert "| fedavg | 2 |" in first.stdout
    assert (folder / "grid" / "comparison.json").is_file()
    assert (folder / "grid" / "report.html").is_file()
    again = command(*GRID, "--json", "--no-report")
    assert "2/4  fedprox-seed-0  is finished already" in again.stderr
    assert [row["group"] for row in json.loads(again.stdout)["rows"]] == ["fedavg", "fedprox"]
    assert command(*GRID, "--quiet").output == ""


def test_a_comparison_with_a_failed_run_ends_with_3(folder: Path) -> None:
    got = command("compare", "rounds=1", "--over", "client.lr=0.1,1e30", "--seeds", "0", "-o", "grid", code=3)
    assert "failed: client 0, round 1" in got.stdout
    assert "| client.lr 0.1 | 1 |" in got.stdout


def test_compare_says_how_to_go_on_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run", interrupted)
    assert "give the same command again" in command(*GRID, code=130).stderr


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_says_what_there_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FNRFL_DATA", str(folder / "data"))
    found = {(f.topic, f.name): f for f in doctor.examine()}
    assert found["software", "torch"].found.startswith(torch.__version__.split("+")[0])
    assert not found["data", "digits"].help
    assert found["data", "cifar10"].help == "fnrfl data get cifar10"
    assert sources.cifar10.URL in found["network", "cifar10"].found
    assert not found["optional", "matplotlib"].help
    text = command("doctor").stdout
    assert "fnrfl data get cifar10" in text
    assert len(json.loads(command("doctor", "--json").stdout)) == len(found)


def test_doctor_lists_what_each_extra_would_reach() -> None:
    found = {f.name: f.found for f in doctor.examine() if f.topic == "network"}
    extras = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    reaching = {"tensorboard", "mlflow", "wandb", "flower", "ray"}
    assert reaching <= set(extras["optional-dependencies"]) == reaching | {"images", "report", "tables", "docs", "dev"}
    assert {name.split(":")[0] for name in found if ":" in name} == reaching
    for setting in FLOWER_QUIET:  # everything that `fnrfl deploy` switches off is told
        if "POLL" not in setting and setting != "FLWR_SUPERGRID_ADDRESS":
            assert any(setting in words for words in found.values()), setting
    assert "cannot be switched off" in found["flower: flwr login, flwr new, flwr app, flwr chat"]


def test_doctor_works_on_a_bare_machine() -> None:
    """Where little more than typer is installed, each thing that is missing is a line, with the command that helps."""
    script = """
import sys
HIDDEN = {"torch", "numpy", "safetensors", "matplotlib", "jinja2", "PIL", "pillow"}
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from importlib import metadata
real = metadata.version
def version(name):
    if name in HIDDEN:
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
from fnrfl.cli import main
main()
"""
    got = subprocess.run([sys.executable, "-c", script, "doctor"], capture_output=True, text=True, timeout=60)
    assert got.returncode == 0, got.stderr
    assert got.stderr == ""
    assert "-m pip install torch" in got.stdout
    assert "-m pip install matplotlib" in got.stdout
    assert "unknown (ModuleNotFoundError" in got.stdout


# -- signals (more in test_ends.py) ------------------------------------------------------------------------------------


class Going:
    """Calls something in a moment in which Python ignores errors: while an object goes."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __del__(self) -> None:
        self.call()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_python_ignores_comes_once_more(number: signal.Signals) -> None:
    hook, before = sys.unraisablehook, signal.getsignal(number)

    def work() -> None:
        Going(lambda: os.kill(os.getpid(), number))
        time.sleep(30)

    with interruptible():
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            work()
    assert sys.unraisablehook is hook and signal.getsignal(number) is before


def test_other_errors_that_python_ignores_are_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: told.append(ignored.exc_type))
    with interruptible():
        Going(lambda: 1 / 0)
    assert told == [ZeroDivisionError]


def test_a_run_in_a_thread_leaves_signals_alone() -> None:
    before, elsewhere = signal.getsignal(signal.SIGINT), list[object]()

    def inside() -> None:
        with interruptible() as stop:
            elsewhere.extend([stop(), signal.getsignal(signal.SIGINT) is before])

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert elsewhere == [None, True]
