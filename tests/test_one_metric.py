"""A comparison has one metric: table, page, first sentence, figures, CSV, JSON and progress name the same winner."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from html import escape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import fnrfl
from fake_runs import Elements, change_log, fake_run, page_of, payload, seeds
from fnrfl import cli
from fnrfl.config.registry import display_name
from fnrfl.core.errors import ConfigError
from fnrfl.results.compare import Comparison, grid, summarise, table, tasks_table
from fnrfl.results.compare.cells import find_baseline
from fnrfl.results.compare.folder import write_tables
from fnrfl.results.report import load, page, sentences
from fnrfl.results.report.groups import panels_of
from fnrfl.results.report.numbers import in_words, points, signed
from fnrfl.results.report.tables import page_metric
from fnrfl.runs.metrics import LOWEST, of_round
from fnrfl.runs.quality import NUMBER_METRICS, TEST_METRICS, Metric, leading_metric

METHODS = ("fedavg", "scaffold", "fedbn")  # the last one is personalised
CALLED = {method: display_name(method) for method in METHODS}
# In each metric another method is best, the lowest where lower is better, and each seed differs a little.
BEST = {name: METHODS[place % 3] for place, name in enumerate((*NUMBER_METRICS, "mine"))}
MINE = Metric("mine", "mine:mine", False)  # a user's own, where lower is better


def metric_of(name: str) -> Metric:
    return TEST_METRICS.get(name, MINE)


def value(name: str, method: str, seed: int) -> float:
    metric = metric_of(name)
    behind = (METHODS.index(method) - METHODS.index(BEST[name])) % 3
    return 0.6 - metric.gain(0.1 * behind) + 0.003 * seed + 0.001 * ((seed * 7 + behind) % 3)


def comparison(folder: Path, name: str) -> Comparison:
    """A finished comparison by a metric, with logs that have all of them."""
    keys = ["rounds=3", "clients=5", "model=mlp(norm=batch)"]
    cells = grid("digits", keys, [f"algorithm={','.join(METHODS)}"], [0, 1, 2])
    for cell in cells:
        scores: dict[str, Any] = {metric: value(metric, cell.group.label, cell.seed) for metric in BEST}
        scores |= {"own_metrics": {"mine": scores.pop("mine")}}
        scores |= {each: [scores.pop(lowest), *[0.99] * 4] for lowest, each in LOWEST.items()}
        said: dict[str, Any] = {"own_metrics": {"mine": {"function": "mine:mine", "higher_is_better": False}}}
        said |= {"personalised": cell.group.label == "fedbn"}
        same = {"algorithm": cell.group.label, "model": "mlp(norm=batch)"}
        path = fake_run(folder / cell.name, seed=cell.seed, **same)  # type: ignore[arg-type]
        change_log(path, lambda number, line, more=(said, scores): line | more[number > 0])  # type: ignore[misc]
    runs = {cell.name: load.read_run(folder / cell.name) for cell in cells}
    asked = [*NUMBER_METRICS, "accuracy_last3", "accuracy_best"]
    summaries: dict[str, dict[str, Any]] = {
        place: {one: getattr(run, one) if hasattr(run, one) else run.last(one) for one in asked}
        | {
            f"{name}_last3": run.last3(name),
            f"{name}_best": run.best(name),
            "own_metrics": run.own_metrics,
            "personalised": place.startswith("fedbn"),
        }
        for place, run in runs.items()
    }
    same = dict.fromkeys(("bytes_up", "bytes_down", "seconds_train", "kappa", "rho"), 1.0)
    baseline = find_baseline([cell.group for cell in cells], None)
    found = summarise(cells, {place: same | known for place, known in summaries.items()}, {}, baseline, metric_of(name))
    write_tables(folder, found)
    return found


def best(rows: dict[str, float], metric: Metric) -> str:
    return max(rows, key=lambda label: metric.gain(rows[label]))


def terminal(found: Comparison) -> str:
    screen = io.StringIO()
    Console(width=200, file=screen).print(table(found, 200))
    return screen.getvalue()


@pytest.mark.parametrize("name", BEST)
def test_every_form_of_a_comparison_is_about_one_metric(name: str, tmp_path: Path) -> None:
    folder, metric = tmp_path / "grid", metric_of(name)
    found, winner = comparison(folder, name), BEST[name]
    means = {method: sum(value(name, method, seed) for seed in range(3)) / 3 for method in METHODS}
    assert best(means, metric) == winner
    # JSON, CSV, Markdown and terminal
    tree = json.loads((folder / "comparison.json").read_text())
    assert (tree["metric"], tree["higher_is_better"]) == (name, metric.higher_is_better)
    assert {row["group"]: row[name]["mean"] for row in tree["rows"]} == pytest.approx(means)
    rows = list(csv.DictReader(io.StringIO((folder / "comparison.csv").read_text())))
    assert {row["group"]: float(row[name]) for row in rows} == pytest.approx(means)
    assert {row["metric"] for row in rows} == {name} and next(
        k for k in rows[0] if k in NUMBER_METRICS or k == name
    ) == name
    assert table(found, 200).columns[2].header == name
    lines = [line.split() for line in terminal(found).splitlines() if line.strip()]
    shown = {line[0]: float(line[2]) for line in lines if line[0] in METHODS}
    assert shown == pytest.approx(means, abs=6e-4) and best(shown, metric) == winner
    # the page, that is not told which metric it is
    text = page_of(folder)
    data, words = payload(text), Elements(text).text.replace(sentences.SPACE, " ")
    assert (data["metrics"][0]["name"], data["metrics"][0]["higher"]) == (name, metric.higher_is_better)
    lines = [group for panel in data["panels"] for group in panel["groups"]]
    groups = {method: next(line for line in lines if line["label"] == CALLED[method]) for method in METHODS}
    finals = {label: sum(group["final"]) / 3 for label, group in groups.items()}
    assert finals == pytest.approx(means, rel=1e-4) and best(finals, metric) == winner
    for label, group in groups.items():
        assert group["curves"][name]["mean"][-1] == pytest.approx(means[label], rel=1e-4)
    reached = in_words(means[winner], metric).replace(sentences.SPACE, " ")
    called = f"gets {reached} right" if name == "accuracy" else f"reaches {reached} {name}"
    assert f'class="lead">{CALLED[winner]} {called}' in text.replace(sentences.SPACE, " ")
    (forest,) = data["forests"]
    differences = {row["label"]: row["mean"] for block in forest["blocks"] for row in block["rows"]}
    for row in tree["rows"]:
        if row["difference"]:
            assert differences[CALLED[row["group"]]] == pytest.approx(row["difference"]["mean"], rel=1e-4)
            assert signed(row["difference"]["mean"], metric) in words
    heads = re.findall(r'data-table="results"[^>]*>(.*?)</thead>', text, re.DOTALL)[0]
    assert re.sub(r"<.*?>", "", heads).split()[2].removesuffix(",") == name
    assert set(re.findall(r"(\w+) is ahead", words)) <= {CALLED[winner]}


def test_methods_and_tasks_make_a_table_where_it_fits() -> None:
    axes = ["algorithm=fedavg,scaffold", "scenario=iid,label-classes(2)"]
    cells = grid("digits", ["rounds=1"], axes, [0, 1])
    same = dict.fromkeys(("bytes_up", "bytes_down", "seconds_train", "kappa", "rho"), 1.0)
    summaries = {cell.name: same | {"accuracy": 0.5 + 0.1 * (cell.config.scenario == "iid")} for cell in cells[:-1]}
    found = summarise(cells, summaries, {}, find_baseline([cell.group for cell in cells], None))
    screen = io.StringIO()
    Console(width=60, file=screen).print(tasks_table(found, 60))
    lines = [line.split() for line in screen.getvalue().splitlines() if line.strip()]
    assert lines[0] == ["iid", "label-classes(2)"]
    assert lines[2:] == [["fedavg", "0.600", "0.500"], ["scaffold", "0.600", "0.500"]]
    assert tasks_table(found, 20) is None
    half = summarise(cells[:1], summaries, {}, find_baseline([cells[0].group], None))
    assert tasks_table(half, 200) is None


def test_a_page_can_be_asked_for_another_metric(tmp_path: Path) -> None:
    comparison(tmp_path / "grid", "accuracy")
    out = page.report([tmp_path / "grid"], tmp_path / "own.html", metric="accuracy_own", plots=True)
    assert payload(out.read_text())["metrics"][0]["name"] == "accuracy_own"
    assert f'class="lead">{CALLED[BEST["accuracy_own"]]} reaches' in out.read_text()
    drawn = "".join(path.read_text() for path in (tmp_path / "own-plots").glob("*.svg"))
    assert "accuracy_own" in drawn and "test accuracy;" not in drawn
    mine = page.report([tmp_path / "grid"], tmp_path / "own.html", metric="mine:mine", plots=True)
    assert payload(mine.read_text())["metrics"][0]["higher"] is False


def test_a_page_says_what_its_metric_is_in_the_words_of_the_docs(tmp_path: Path) -> None:
    run = load.read_run(fake_run(tmp_path / "run"))
    for metric in (TEST_METRICS[name] for name in NUMBER_METRICS if name != "accuracy"):
        said = f"{metric.name}: {escape(metric.meaning).replace('&#x27;', '&#39;')}; {metric.better}. Accuracy and"
        assert said in page.render(panels_of([run], metric))


def test_a_metric_that_no_run_has_is_refused_with_those_that_they_have(tmp_path: Path) -> None:
    fake_run(tmp_path / "run")
    for wrong in ("acuracy", "auc", "confusion"):
        meant = ".*Did you mean accuracy" if wrong == "acuracy" else ""
        with pytest.raises(ConfigError, match=f'"{wrong}"{meant}.*accuracy, balanced_accuracy'):
            page.report([tmp_path / "run"], tmp_path / "p.html", metric=wrong, plots=False)
    assert not (tmp_path / "p.html").exists()


def test_lines_without_the_metric_are_named_and_not_ranked(tmp_path: Path) -> None:
    folder = tmp_path / "grid"
    comparison(folder, "auc")
    for path in folder.glob("fedbn*/events.jsonl"):
        path.write_text(path.read_text().replace('"auc"', '"unknown"'))
    text = page_of(folder)
    assert re.search(r'class="lead">(FedAvg|SCAFFOLD) reaches', text)
    assert "FedBN" in next(line for line in text.splitlines() if "Without a value of auc" in line)
    assert [bool(group["final"]) for group in payload(text)["panels"][0]["groups"]].count(False) == 1


def said_personalised(path: Path) -> Path:
    return change_log(path, lambda number, line: line | ({"accuracy_own": 0.95} if number else {"personalised": True}))


def test_personalised_methods_lead_with_their_clients_own(tmp_path: Path) -> None:
    own = [said_personalised(path) for path in seeds(tmp_path, "own", [0.4, 0.42], algorithm="fedbn")]
    plain = seeds(tmp_path, "plain", [0.5, 0.52])
    assert page_metric([load.read_run(path) for path in own], None).name == "accuracy_own"
    assert "95.0" in (lead := page_of(*own)) and payload(lead)["metrics"][0]["name"] == "accuracy_own"
    assert page_metric([load.read_run(path) for path in (*own, *plain)], None).name == "accuracy"
    assert page_metric([load.read_run(path) for path in plain], None).name == "accuracy"


@given(st.lists(st.booleans(), min_size=1))
def test_the_rule_is_all_or_none(kinds: list[bool]) -> None:
    assert leading_metric(kinds).name == ("accuracy_own" if False not in kinds else "accuracy")


@given(st.floats(-2, 2), st.floats(-2, 2))
def test_what_gains_is_better(one: float, other: float) -> None:
    for metric in TEST_METRICS.values():
        better = max if metric.higher_is_better is not False else min
        assert metric.gain(better(one, other) - one) >= 0


def test_differences_have_a_unit_only_where_they_are_points() -> None:
    share = dataclasses.replace(MINE, share=True)
    assert points(0.0561, MINE) == "+0.0561" and points(0.0561, share) == "+5.6 points"
    assert points(-0.00001, MINE) == "+0.0000" and points(-0.2, share) == "\N{MINUS SIGN}20.0 points"


# -- real runs --------------------------------------------------------------------------------------------------------

SMALL = ["digits", "rounds=2", "clients=3", "client.epochs=1", "client.batch=256", "scenario=label-classes(4)"]


@pytest.mark.parametrize(
    ("methods", "asked", "expected"),
    [
        ("fedbn,local-only", (), "accuracy_own"),
        ("fedavg,fedbn", (), "accuracy"),
        ("fedavg,moon", ("--metric", "log_loss"), "log_loss"),
    ],
)
def test_the_commands_choose_one_metric(
    methods: str, asked: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    grid = ["--over", f"algorithm={methods}", "--seeds", "0,1", "-o", "out"]
    done = CliRunner().invoke(cli.app, ["compare", *SMALL, "model=mlp(norm=batch)", *grid, *asked])
    assert done.exit_code == 0, done.output
    tree = json.loads(Path("out/comparison.json").read_text())
    assert tree["metric"] == expected
    lines = [line for line in done.output.splitlines() if re.match(r"\d/4 ", line)]
    assert len(lines) == 4 and all(f"  {expected} " in line for line in lines)
    for line in lines:
        run = load.read_run(Path("out") / line.split()[1])
        assert f"{expected} {run.last(expected):.4f}" in line
    mixed = len({run["personalised"] for run in tree["runs"]}) == 2
    assert ("--metric accuracy_own compares it" in done.output) is mixed
    assert payload(Path("out/report.html").read_text())["metrics"][0]["name"] == expected
    words = ["report", "out", "--metric", "balanced_accuracy", "-o", "p.html", "--no-plots"]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    assert payload(Path("p.html").read_text())["metrics"][0]["name"] == "balanced_accuracy"


@pytest.mark.parametrize(("algorithm", "name"), [("fedbn", "accuracy_own"), ("fedavg", "accuracy")])
def test_a_run_leads_with_the_metric_of_its_method(
    algorithm: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", *SMALL, "model=mlp(norm=batch)", f"algorithm={algorithm}", "-o", "run"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    result = fnrfl.load("run")
    headline = f"{name} {result.last(name):.4f}"
    assert headline in repr(result)
    assert [f"  {name} {of_round(event, name):.4f}  loss" in done.output for event in result.rounds] == [True, True]
    assert f"{headline} after 2 rounds" in done.output
    assert result.summary()["personalised"] is (algorithm == "fedbn")
    assert load.read_run(Path("run")).last(name) == result.last(name)
    assert payload(page_of(Path("run")))["metrics"][0]["name"] == name
