"""Metrics equal scikit-learn's; what cannot be computed is None."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve
from typer.testing import CliRunner

import fnrfl
from fnrfl import cli
from fnrfl.config import load
from fnrfl.core.errors import ConfigError
from fnrfl.data.datasets import load as load_data
from fnrfl.results.compare import Comparison, compare, grid, summarise, table
from fnrfl.results.compare.tables import METRICS
from fnrfl.results.report import tables
from fnrfl.results.report.groups import panels_of
from fnrfl.results.report.load import load_runs, read_run
from fnrfl.results.report.page import report
from fnrfl.runs import quality, scores
from fnrfl.runs.predict import evaluate
from fnrfl.runs.quality import NAMES_OF_RESULTS, NUMBER_METRICS, TEST_METRICS, Answers

CASES = 200
EQUAL = dict(rel=1e-9, abs=1e-9)


def case(seed: int) -> Answers:
    """Random answers; by turns with ties, certain, all alike, of few classes, of one class, of one example."""
    rng = np.random.default_rng(seed)
    classes, n = int(rng.integers(2, 9)), int(rng.integers(1, 150))
    present = np.arange(classes)
    if seed % 3 == 0:
        present = rng.choice(classes, int(rng.integers(1, classes + 1)), replace=False)
    labels = rng.choice(present[:1] if seed % 10 == 1 else present, n)
    raw = rng.gamma(0.3, size=(n, classes)) + 1e-12
    raw[np.arange(n), labels] += rng.random() * 2
    kind = seed % 5
    if kind == 1:  # ties
        raw = np.round(raw * 2) + 1
    elif kind == 2:  # certain: the probabilities are 0 and 1
        raw = np.eye(classes)[raw.argmax(1)]
    elif kind == 3 and seed % 2:  # the same for every example
        raw = np.ones_like(raw)
    return Answers.of_probabilities(raw / raw.sum(1, keepdims=True), labels.astype(np.int64))


def sensitivity(labels: np.ndarray, shares: np.ndarray) -> float:
    """The largest true positive rate with a specificity of at least 0.95."""
    false, true, _ = sk.roc_curve(labels, shares, drop_intermediate=False)
    return float(true[1 - false >= 0.95 - 1e-12].max())


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # scikit-learn warns of what it cannot compute


@pytest.mark.parametrize("seed", range(CASES))
def test_metrics_are_scikit_learns(seed: int) -> None:
    answers = case(seed)
    shares, labels, said = answers.probabilities, answers.labels, answers.predicted
    classes = list(range(answers.num_classes))
    assert quality.confusion_counts(answers) == sk.confusion_matrix(labels, said, labels=classes).tolist()
    for ours, theirs in ((quality.precision_by_class, sk.precision_score), (quality.recall_by_class, sk.recall_score)):
        expected = theirs(labels, said, labels=classes, average=None, zero_division=np.nan)
        assert ours(answers) == [None if math.isnan(v) else pytest.approx(v, **EQUAL) for v in expected]
    assert quality.f1_macro(answers) == pytest.approx(sk.f1_score(labels, said, average="macro"), **EQUAL)
    assert quality.f1_weighted(answers) == pytest.approx(sk.f1_score(labels, said, average="weighted"), **EQUAL)
    assert quality.log_loss(answers) == pytest.approx(sk.log_loss(labels, shares, labels=classes), **EQUAL)

    areas = [sk.roc_auc_score(labels == c, shares[:, c]) for c in classes]
    known = [area for area in areas if not math.isnan(area)]
    assert quality.auc(answers) == (pytest.approx(sum(known) / len(known), **EQUAL) if known else None)
    if len(known) == len(classes) > 2:
        whole = sk.roc_auc_score(labels, shares, multi_class="ovr", average="macro")
        assert quality.auc(answers) == pytest.approx(whole, **EQUAL)

    both = [c for c in classes if 0 < np.sum(labels == c) < len(labels)]
    looked_for = both[-1:] if len(classes) == 2 else both  # of two classes, the second
    for ours, theirs in ((quality.pr_auc, sk.average_precision_score), (quality.sensitivity, sensitivity)):
        each = [theirs(labels == c, shares[:, c]) for c in looked_for]
        assert ours(answers) == (pytest.approx(np.mean(each), **EQUAL) if each else None)
    brier = sk.brier_score_loss(labels, shares, labels=classes)
    assert quality.brier_score(answers) == pytest.approx(brier, **EQUAL)

    sure, right = shares.max(1), said == labels
    often, expected = calibration_curve(right, sure, n_bins=15, strategy="uniform")
    edges = np.linspace(0, 1, 16)
    held = [np.sum((low < sure) & (sure <= high)) for low, high in zip(edges, edges[1:], strict=False)]
    weights = np.array([count for count in held if count]) / len(sure)
    assert quality.calibration_error(answers) == pytest.approx(weights @ np.abs(often - expected), **EQUAL)


def test_an_output_beyond_the_classes_is_wrong() -> None:
    """resnet18(head=1000) on ten classes may answer 700."""
    answers = Answers(np.array([0, 700, 1, 1]), np.array([0, 0, 1, 0]), 2)
    assert quality.confusion_counts(answers) == [[1, 1], [0, 1]]
    assert quality.recall_by_class(answers) == [1 / 3, 1.0]
    assert quality.precision_by_class(answers) == [1.0, 0.5]
    assert quality.f1_weighted(answers) == pytest.approx((3 * 2 / 4 + 1 * 2 / 3) / 4)


@pytest.mark.parametrize("name", [name for name, metric in TEST_METRICS.items() if metric.compute])
def test_what_cannot_be_computed_is_none(name: str) -> None:
    nobody = Answers(np.empty(0, np.int64), np.empty(0, np.int64), 3, np.empty((0, 3)))
    broken = Answers(np.array([0]), np.array([0]), 2, np.array([[np.nan, np.nan]]))
    unkept = Answers(np.array([0, 1]), np.array([0, 1]), 2)
    for answers in (nobody, broken, unkept):
        found = np.array(TEST_METRICS[name].compute(answers), dtype=object).ravel()
        assert all(value is None or math.isfinite(value) for value in found)
    needs_probabilities = name in (
        *("auc", "pr_auc", "sensitivity_at_95", "brier_score", "log_loss", "calibration_error"),
    )
    assert (TEST_METRICS[name].compute(unkept) is None) == needs_probabilities


@pytest.mark.parametrize(("right", "examples"), [(0, 7), (7, 7), (30, 40), (1, 2), (190, 200)])
def test_intervals_are_those_of_drawing_the_examples_again(right: int, examples: int) -> None:
    answers = np.arange(examples) < right
    drawn = np.random.default_rng(1).choice(answers, (20_000, examples)).mean(1)
    sites = quality.bootstrap_intervals(np.array([right / examples, np.nan]), np.array([examples, 0]), seed=0)
    assert sites[0] == pytest.approx(
        np.quantile(drawn, (0.025, 0.975)), abs=1.01 / examples if 0 < right < examples else 0
    )
    assert sites[1] is None
    assert sites == quality.bootstrap_intervals(np.array([right / examples, np.nan]), np.array([examples, 0]), seed=0)


# -- in a run ---------------------------------------------------------------------------------------------------------


def test_the_page_about_metrics_has_every_metric() -> None:
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    rows = [[cell.strip().strip("`") for cell in line] for line in lines]
    direction = {True: "higher", False: "lower", None: ""}
    assert rows == [[m.name, m.meaning, direction[m.higher_is_better]] for m in TEST_METRICS.values()]
    for words in (
        f"into {quality.NUM_BINS} bins", f"{scores.NUMBERS_LAST_ROUND:,} in the last round", "Up to 1 million numbers",
        f"with up to {scores.CLASSES_EVERY_ROUND} classes", f"than {scores.CLASSES_OF_CONFUSION} classes",
    ):  # fmt: skip
        assert words in " ".join(text.split())


SMALL = dict(rounds=2, clients=3, client=dict(epochs=1), model="mlp(hidden=16)", out=None)


@pytest.mark.parametrize(
    "settings",
    [{}, {"scenario": "label-dirichlet(0.5) + feature-noise(0.5)"}, {"algorithm": "local-only"}, {"engine": "batched"}],
    ids=["one model", "copies of the test set", "a model for each client", "batched"],
)
def test_metrics_of_a_round_are_of_the_answers_of_its_accuracy(settings: dict[str, str]) -> None:
    """What is independent of the metrics, accuracy, recall and loss, agrees with them."""
    found = fnrfl.run("digits", **SMALL, **settings)
    for event in found.rounds:
        counts = np.array(event["confusion"])
        support = counts.sum(1)
        f1 = 2 * counts.diagonal() / (support + counts.sum(0))
        assert event["accuracy"] == counts.trace() / counts.sum()
        assert event["recall"] == event["per_class"] == (counts.diagonal() / support).tolist()
        assert event["log_loss"] == pytest.approx(event["loss"], rel=1e-5)
        assert 0 < event["calibration_error"] < 1 and 0 < event["auc"] <= 1
        assert event["f1_macro"] == pytest.approx(f1.mean())
        assert event["f1_weighted"] == pytest.approx(f1 @ support / support.sum())
    summary = found.summary()
    assert all(summary[name] == found.rounds[-1][name] for name in ("auc", "f1_macro", "log_loss"))


def test_metrics_of_a_run_are_scikit_learns_of_its_model() -> None:
    found, test = fnrfl.run("digits", **SMALL), load_data("digits").test
    with torch.no_grad():
        shares = found.model(test.x).double().softmax(1).numpy()
    event, labels = found.rounds[-1], test.y.numpy()
    assert event["confusion"] == sk.confusion_matrix(labels, shares.argmax(1)).tolist()
    assert event["auc"] == pytest.approx(sk.roc_auc_score(labels, shares, multi_class="ovr"), rel=1e-6)
    assert event["log_loss"] == pytest.approx(sk.log_loss(labels, shares), rel=1e-6)
    assert event["f1_macro"] == pytest.approx(sk.f1_score(labels, shares.argmax(1), average="macro"))


def test_what_costs_much_is_in_the_last_round_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "NUMBERS_EVERY_ROUND", 100)
    monkeypatch.setattr(scores, "CLASSES_EVERY_ROUND", 5)
    first, last = fnrfl.run("digits", **SMALL).rounds
    assert first["auc"] is first["log_loss"] is first["calibration_error"] is None
    assert not first.keys() & {"confusion", "precision", "recall"} and first["f1_macro"] is not None
    assert last["auc"] is not None and len(last["confusion"]) == len(last["precision"]) == 10
    monkeypatch.setattr(scores, "NUMBERS_LAST_ROUND", 100)
    monkeypatch.setattr(scores, "CLASSES_OF_CONFUSION", 5)
    last = fnrfl.run("digits", **SMALL).rounds[-1]
    assert last["auc"] is None and "confusion" not in last and last["precision"] is not None


# -- metrics of one's own ---------------------------------------------------------------------------------------------

MINE = """
import numpy as np
def brier(probabilities, labels):
    probabilities[np.arange(len(labels)), labels] -= 1  # its own copy
    return (probabilities ** 2).sum(1).mean()
brier.higher_is_better = False
def right(probabilities, labels):
    assert probabilities.dtype == np.float64 and labels.dtype == np.int64
    return float((probabilities.argmax(1) == labels).mean())
def undecided(probabilities, labels):
    return float("inf")
def text(probabilities, labels):
    return "0.5"
def yes(probabilities, labels):
    return True
def fails(probabilities, labels):
    return probabilities[0, 99]
number = 3
"""


@pytest.fixture
def mine(tmp_cwd: Path) -> Path:
    (tmp_cwd / "mine.py").write_text(MINE)
    return tmp_cwd


def test_own_metrics_are_in_every_round(mine: Path) -> None:
    found = fnrfl.run("digits", **SMALL, metrics="mine:right, mine:brier,mine:undecided")
    assert found.series("right") == found.series("accuracy")
    assert found.own_metrics == found.rounds[-1]["own_metrics"] == found.summary()["own_metrics"]
    assert list(found.own_metrics) == ["right", "brier", "undecided"] and found.own_metrics["undecided"] is None
    last = found.rounds[-1]
    assert last["log_loss"] == pytest.approx(last["loss"], rel=1e-5)  # nothing was changed by brier
    assert found.model_sha256 == fnrfl.run("digits", **SMALL).model_sha256


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("mine:text", "a str; it must return a number"),
        ("mine:yes", "a bool; it must return a number"),
        ("mine:fails", r"IndexError: .*; mine.py, line 17, in fails"),
        ("mine:number", "is a int; it must be a function"),
        ("mine:brier, mine", 'not "mine"'),
        ("auc", 'not "auc".* --metric NAME'),
        ("mine:brier, mine:brier", "two functions brier"),
        ("mine:brier, other:brier", "two functions brier"),
        ("other:auc", "auc is the name of a metric"),
        ("other:kappa", "kappa is something else"),
    ],
)
def test_wrong_metrics_are_refused_at_once(words: str, says: str, mine: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        fnrfl.run("digits", **SMALL | {"out": "here"}, metrics=words)
    assert not Path("here").exists()


def test_every_name_in_the_results_is_refused_for_a_metric(mine: Path) -> None:
    found = compare(grid("digits", ["rounds=1", "clients=2"], ["fnr=off"], [0]), "compared", target=0.5)
    names = {*found.runs[0], *METRICS, *(column.removesuffix("_sd") for column in found.table())}
    ends = {
        f"{name}_{end}" for name in ("accuracy", "difference", "penalty") for end in ["to", "low", "high", "p", "n"]
    }
    assert names - ends - {*TEST_METRICS, "cell"} <= NAMES_OF_RESULTS


def test_a_file_that_names_a_metric_needs_trust(mine: Path) -> None:
    (mine / "mine.py").write_text(MINE + "# nobody has allowed this file\n")
    (mine / "my.toml").write_text('metrics = "mine:right, mine:brier"\nrounds = 1\n')
    with pytest.raises(ConfigError) as caught:
        load("my.toml")
    assert str(caught.value).count("would run code") == 2 and "--trust" in str(caught.value)
    assert load("my.toml", trust=True).metrics == "mine:right, mine:brier" == load("my.toml").metrics


# -- evaluate ---------------------------------------------------------------------------------------------------------


def test_evaluate_has_the_metrics_of_the_last_round(mine: Path) -> None:
    run = fnrfl.run("digits", **SMALL | {"out": "here"}, metrics="mine:right")
    found = evaluate("here", "digits", metrics=["mine:brier", "auc"])
    last, summary = run.rounds[-1], found.summary()
    names = [name for name, metric in TEST_METRICS.items() if not metric.in_runs_only]
    assert {name: summary[name] for name in names} == {name: last[name] for name in names}
    assert list(summary["own_metrics"]) == ["right", "brier"] and found.shown == ("brier", "auc")
    assert evaluate("here", "digits", metrics=["all"]).shown == (*names, "right")
    words = ["evaluate", "here", "digits", "--metric"]
    said = CliRunner().invoke(cli.app, [*words, "auc,confusion", "--metric", "recall"])
    assert f"auc     {last['auc']:.4f}" in said.output and "class, answer" in said.output and "recall" in said.output
    for wrong, says in (("aux", "Did you mean auc"), ("worst_client", "There is no metric"), ("mine:auc", "Rename")):
        got = CliRunner().invoke(cli.app, [*words, wrong])
        assert got.exit_code == 2 and says in got.stderr


def test_list_metrics_prints_every_metric() -> None:
    got = CliRunner().invoke(cli.app, ["list", "metrics"])
    assert [line.split()[0] for line in got.output.splitlines()] == list(TEST_METRICS)


def test_metrics_of_clients_models_are_of_all_their_answers(mine: Path) -> None:
    run = fnrfl.run("digits", **SMALL | {"out": "here"}, algorithm="local-only")
    summary = evaluate("here", "digits").summary()
    assert summary["confusion"] == run.rounds[-1]["confusion"] and np.sum(summary["confusion"]) == 3 * 360
    assert summary["auc"] == run.rounds[-1]["auc"]
    one = evaluate("here", "digits", client=1).summary()
    assert np.sum(one["confusion"]) == 360 and one["auc"] != summary["auc"]


# -- compare ----------------------------------------------------------------------------------------------------------


def compared(metric: str, values: dict[str, list[float | None]]) -> Comparison:
    """A comparison of two methods with these values of a metric, one for each seed."""
    cells = grid("digits", [], ["algorithm=fedavg,scaffold"], range(len(values["fedavg"])))
    summaries = {c.name: {"accuracy": 0.5, metric: values[c.group.label][c.seed], "own_metrics": {}} for c in cells}
    return summarise(cells, summaries, {}, cells[0].group.parts, TEST_METRICS[metric])


def test_differences_are_of_the_metric_and_their_direction_is_said() -> None:
    ours, theirs = [0.5, 0.7, 0.2], [0.4, 0.65, 0.3]
    for metric, better in (("log_loss", False), ("f1_macro", True)):
        found = compared(metric, {"fedavg": ours, "scaffold": theirs})
        assert found.rows[1].difference.mean == pytest.approx(np.mean(theirs) - np.mean(ours))
        assert found.rows[0].metrics[metric].mean == pytest.approx(np.mean(ours))
        text, tree = found.to_markdown(), json.loads(found.to_json())
        assert ("Lower is better: a negative difference is an improvement." in text) != better
        assert tree["metric"] == metric and tree["higher_is_better"] is better
        assert text.startswith(f"| run | n | {metric} | difference | p | accuracy |")
        assert table(found, 60).columns[2].header == metric


def test_runs_without_the_metric_are_in_no_pair_and_counted() -> None:
    found = compared("auc", {"fedavg": [None, 0.8, 0.9], "scaffold": [0.9, 0.9, None]})
    assert found.rows[1].difference.n == 1 and found.rows[1].difference.mean == pytest.approx(0.1)
    assert found.rows[0].metrics["auc"].n == 2 and found.rows[0].seeds == (0, 1, 2)
    assert "2 finished runs without a value of auc: left out here." in found.to_markdown()


def test_compare_takes_a_metric_of_ones_own_and_another_one_later(mine: Path) -> None:
    small = ["digits", "rounds=1", "clients=3", "client.epochs=1", "--over", "algorithm=fedavg,fedavgm", "--seeds", "0"]
    keep = ["--no-report", "-o", "here", "--json"]
    first = CliRunner().invoke(cli.app, ["compare", *small, *keep, "--metric", "mine:brier"])
    assert first.exit_code == 0, first.output
    tree = json.loads(first.stdout)
    assert tree["metric"] == "brier" and tree["higher_is_better"] is False
    assert tree["rows"][0]["brier"]["mean"] == tree["runs"][0]["own_metrics"]["brier"]
    models = {path: path.stat().st_mtime_ns for path in mine.rglob("model.safetensors")}
    again = CliRunner().invoke(cli.app, ["compare", *small, *keep, "metrics=mine:brier", "--metric", "auc"])
    assert json.loads(again.stdout)["rows"][1]["auc"]["mean"] == tree["runs"][1]["auc"]
    assert models == {path: path.stat().st_mtime_ns for path in mine.rglob("model.safetensors")}
    for wrong, says in (("confusion", "is not one number"), ("all", "is not one number"), ("brier", "no metric")):
        got = CliRunner().invoke(cli.app, ["compare", *small, "-o", "there", "--metric", wrong])
        assert got.exit_code == 2 and says in got.stderr and not Path("there").exists()


# -- the page ---------------------------------------------------------------------------------------------------------


NOT_SHARES = [name for name in NUMBER_METRICS if not TEST_METRICS[name].share and name != "loss"]


def test_the_page_has_a_table_of_metrics_and_the_confusion_matrix(mine: Path) -> None:
    own = "mine:brier, mine:right"
    runs = [fnrfl.run("digits", **SMALL | {"out": f"runs/{seed}"}, seed=seed, metrics=own) for seed in (0, 1)]
    (panel,) = panels_of(load_runs([Path("runs")]).runs)
    told = tables.line_table(panel, map(tables.measure, tables.tabled_metrics(panel)))
    assert [column.name for column in told.columns] == ["method", "seeds", *NOT_SHARES, "brier", "right"]
    lower = [metric.name for metric in tables.tabled_metrics(panel) if not metric.higher_is_better]
    assert lower == ["brier_score", "log_loss", "calibration_error", "brier"]
    for column, cell in zip(told.columns[2:], told.rows[0][2:], strict=True):
        assert cell.value == pytest.approx(np.mean([run.last(column.name) for run in runs]))
    counts = tables.confusion_over_seeds(panel.groups[0])
    assert counts == np.sum([run.rounds[-1]["confusion"] for run in runs], 0).tolist()
    text = report([Path("runs")], Path("page.html"), plots=False).read_text()
    assert 'id="confusion-0"' in text and json.dumps(counts, separators=(",", ":")) in text
    log = Path("runs/0/events.jsonl")
    for good, bad in (('"confusion": [[', '"confusion": [[1], ['), ('"function": "mine:brier"', '"function": 3')):
        before = log.read_text()
        assert good in before
        log.write_text(before.replace(good, bad))
        with pytest.raises(ConfigError, match="is damaged"):
            read_run(Path("runs/0"))
        log.write_text(before)


def test_the_page_of_a_run_without_metrics(tmp_path: Path) -> None:
    old = Path(__file__).parent / "fixtures" / "0.1.0" / "finished"
    text = report([old], tmp_path / "page.html", plots=False).read_text()
    assert "have no metrics" in text and 'id="confusion-0"' not in text
