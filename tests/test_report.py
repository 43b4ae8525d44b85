"""The report says what the logs say, about any runs, without torch, network or foreign markup."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fnrfl
from fake_runs import (
    EVIL,
    Elements,
    change_log,
    evil_run,
    fake_run,
    groups_of,
    leaky,
    page_of,
    panels,
    payload,
    say_test_counts,
    seeds,
    text_of,
)
from fnrfl.config import registry
from fnrfl.core.errors import ConfigError
from fnrfl.data.datasets import load as load_data
from fnrfl.results.report import charts, load, page, plots, privacy_table, report, sentences, tables
from fnrfl.results.report import groups as report_lines
from fnrfl.results.report import pairs as report_pairs
from fnrfl.results.report.numbers import least_span, share_range
from fnrfl.runs.quality import TEST_METRICS


@pytest.fixture
def four(tmp_path: Path) -> list[Path]:
    """Two methods, bare and refined, with three seeds each."""
    return [
        path
        for a, algorithm in enumerate(("fedavg", "scaffold"))
        for f, fnr in enumerate(("off", "on"))
        for path in seeds(
            tmp_path,
            f"{algorithm}-{fnr}",
            [0.7 + 0.06 * a + 0.02 * f + 0.001 * seed * (1 + a + f) for seed in range(3)],
            algorithm=algorithm,
            fnr=fnr,
        )
    ]


# -- what is on the page ----------------------------------------------------------------------------------------------


def test_every_section_has_a_link(four: list[Path]) -> None:
    made = page_of(*four)
    assert made == page_of(*four)
    assert 'class="tag leak"' not in made and "banner leak" not in made
    tags = Elements(made).tags
    ids = {attributes.get("id") for _, attributes in tags}
    sections = [name for name in page.PAGE_SECTIONS if name != "sites"]  # no client has brought test data of its own
    assert {"summary", *sections} <= ids and "sites" not in ids
    assert [attributes["href"] for tag, attributes in tags if tag == "a"] == [f"#{name}" for name in sections]


def test_curves_are_means_and_ranges_over_seeds_of_the_events(four: list[Path]) -> None:
    groups = payload(page_of(*four))["panels"][0]["groups"]
    assert [group["label"] for group in groups] == ["FedAvg", "FedAvg + FNR", "SCAFFOLD", "SCAFFOLD + FNR"]
    runs = [load.read_run(path) for path in four[:3]]
    for metric in ("accuracy", "worst_client", "loss", "balanced_accuracy", "validation_accuracy"):
        values = np.array([run.series(metric) for run in runs], dtype=float)  # [3, rounds]
        for name, of_seeds in {"mean": values.mean(0), "low": values.min(0), "high": values.max(0)}.items():
            assert groups[0]["curves"][metric][name] == pytest.approx(of_seeds, rel=1e-4)
    assert groups[0]["mib"] == [1.5, 3.0, 4.5]
    assert groups[0]["seconds"] == [2.0, 4.0, 6.0]
    assert groups[1]["seconds"] == [3.0, 6.0, 9.0]  # looking at models is no training
    assert groups[1]["classes"] == [pytest.approx(0.722, rel=1e-4), None, 1.0, 0.0]


def test_tables_have_the_numbers_of_the_runs(four: list[Path]) -> None:
    (panel,) = panels(*four)
    found = (tables.results(panel), tables.line_table(panel, tables.COSTS))
    row = {column.name: cell for one in found for column, cell in zip(one.columns, one.rows[0], strict=True)}
    assert row["accuracy, %"].text == "70.10" and row["accuracy, %"].value == pytest.approx(0.701)
    assert row["accuracy, %"].beside == "± 0.10"
    assert row["worst_client, %"].value == pytest.approx(0.701 / 5)
    assert row["MiB up"].value + row["MiB down"].value == 4.5 and row["seconds"].value == 6.0
    assert row["kappa"].value == pytest.approx(0.701e4 / 6) and row["rho"].value == pytest.approx(0.701e4 / 4.5)
    assert "accuracy_clean, %" not in row


def test_inside_shows_split_refined_clients_norms_and_change(four: list[Path]) -> None:
    data = payload(page_of(*four))
    bare, refined = data["inside"][0], data["inside"][1]
    assert data["first"] == 1
    assert data["splits"][bare["split"]][1] == [1, 14, 1, 1] and bare["split"] == refined["split"]
    assert [client["examples"] for client in bare["clients"]] == [10, 17, 24, 31, 38]
    assert [bare[key] for key in ("refined", "norms", "change", "gap")] == [None] * 4
    assert refined["refined"]["grid"] == [[2] * 3, [2] * 3, [1] * 3, [1] * 3, [1] * 3]
    assert refined["norms"]["values"][2][0] == [3.0, 2.0, 3.0, None]  # no public example of the last class
    assert refined["norms"]["range"] == [1.0, 7.0]
    assert refined["change"] == {"before": [0.2, 0.4, None, 0.5], "after": [0.6, 0.3, None, 0.5]}
    others, weak = refined["gap"]
    mean = pytest.approx(6.5 / 3, rel=1e-4)
    assert weak["points"][0] == {"x": 1, "y": mean, "low": 2.0, "high": pytest.approx(7 / 3, rel=1e-4)}
    assert others["points"][0]["low"] == pytest.approx(8 / 3, rel=1e-4)
    assert refined["clients"][4]["ranking"] == 0.4 and refined["clients"][0]["refined"] == 3


def test_what_the_server_learned_is_told_by_kind(four: list[Path]) -> None:
    def kinds(*paths: Path) -> list[str]:
        return [row[0].text for row in privacy_table.learned(groups_of(*paths)).rows]

    common, fnr = ["the model", "example count"], ["class norms", "ranking accuracy"]
    assert kinds(four[0]) == common
    assert kinds(*four) == [*common, "scaffold's own", *fnr]
    assert "measured on public examples: a hint at the classes" in text_of(*four)


def test_a_result_and_a_report_agree_even_of_clients_that_cannot_be_scored(tmp_path: Path) -> None:
    """The test set lacks all classes of a client: its accuracy is null in the log, and counts nowhere."""
    digits = load_data("digits")
    known = digits.test.y > 0
    data = {"x_test": digits.test.x[known], "y_test": digits.test.y[known]}
    path = tmp_path / "nobody-knows-zero.npz"
    np.savez(path, x_train=digits.train.x, y_train=digits.train.y, **data)
    keys = {"scenario": "label-classes(1)", "clients": 10, "rounds": 2, "validation": {"size": 0.1}}
    result = fnrfl.run("digits", out=tmp_path / "run", dataset=str(path), **keys)
    run, summary = load.read_run(tmp_path / "run"), result.summary()
    for name in ("accuracy", "accuracy_last3", "accuracy_best", "bytes_up", "bytes_down", "kappa", "rho"):
        assert getattr(run, name) == getattr(result, name) == summary[name], name
    per_client = result.rounds[-1]["per_client"]
    assert None in per_client
    assert run.last("worst_client") == summary["worst_client"] == min(one for one in per_client if one is not None)
    assert "worst_client" in text_of(tmp_path / "run")


MARK = "§"
TEXTS = (sentences.TEXTS, sentences.LEAKS, report_pairs.VERDICTS, privacy_table.SAYS, page.PAGE_SECTIONS)


def mark_all(patch: pytest.MonkeyPatch) -> None:
    """Append a mark to every text that the page shows, in tables, columns, templates and phases."""
    for table in TEXTS:
        for key, text in table.items():
            patch.setitem(table, key, text + MARK)
    for phase, (label, tone) in charts.PHASES.items():
        patch.setitem(charts.PHASES, phase, (label + MARK, tone))
    columns = [tables.METHOD_COLUMN, *privacy_table.LEARNED_COLUMNS, *(column for column, _, _ in tables.COSTS)]
    named = [(one, "meaning") for one in TEST_METRICS.values()] + [(one, "name") for one in columns]
    for one, name in named + [(one, name) for one in privacy_table.MESSAGES for name in ("what", "says")]:
        patch.setitem(vars(one), name, getattr(one, name) + MARK)
    made, part = tables.Column.__init__, page._part

    def marked(self: tables.Column, name: str, *more: Any, **named: Any) -> None:
        made(self, name + MARK, *more, **named)

    def marked_part(name: str) -> str:
        words = re.compile(r"(?<=[>}])([^<>{}]*[a-z][^<>{}]*)(?=<)")
        return words.sub(rf"\1{MARK}", part(name)) if name.endswith(".html") else part(name)

    patch.setattr(tables.Column, "__init__", marked)
    patch.setattr(page, "_part", marked_part)


@pytest.mark.parametrize("make", [fake_run, leaky])
def test_text_is_never_data(tmp_path: Path, make: Any) -> None:
    """Every label, title and sentence of the page can be changed, and nothing else changes with it."""
    for algorithm, fnr, seed in itertools.product(("fedavg", "scaffold"), ("off", "on"), range(2)):
        make(tmp_path / "runs" / f"{algorithm}-{fnr}-{seed}", algorithm=algorithm, fnr=fnr, seed=seed)
    plain = page_of(tmp_path / "runs")
    with pytest.MonkeyPatch.context() as patch:
        mark_all(patch)
        marked = page_of(tmp_path / "runs")
    assert marked.count(MARK) > 150 and MARK not in plain.replace("\\u00a7", MARK)
    assert marked.replace("\\u00a7", "").replace(MARK, "") == plain


# -- any kind of run --------------------------------------------------------------------------------------------------


def test_a_run_without_the_answer_of_a_client_makes_a_page(tmp_path: Path) -> None:
    missing = {"missing": {3: "local: it has not answered in time."}}
    path = change_log(fake_run(tmp_path / "a"), lambda number, line: line | missing if number else line)
    assert "damaged" not in page_of(path)


def test_feature_noise_has_the_clean_accuracy_beside(tmp_path: Path) -> None:
    made = page_of(fake_run(tmp_path / "noisy", clean=True, scenario="feature-noise(0.5)"))
    assert ">clean, %<" in made and "scored once under each client's noise" in Elements(made).text
    curve = payload(made)["panels"][0]["groups"][0]["curves"]["accuracy_clean"]["mean"]
    assert curve[-1] == pytest.approx(0.81)


def test_runs_that_are_not_done(tmp_path: Path) -> None:
    """An unfinished one is labelled and not ranked; one without a round is named and left out."""
    whole, new = fake_run(tmp_path / "whole", accuracy=0.5), fake_run(tmp_path / "new", done=0, seed=1)
    made = page_of(whole, fake_run(tmp_path / "half", accuracy=0.9, done=2, seed=1), new)
    text = Elements(made).text
    assert [g["label"] for g in payload(made)["panels"][0]["groups"]] == ["FedAvg", "FedAvg, unfinished"]
    assert "(2 of 3 rounds)" in text and "not ranked: FedAvg, unfinished" in text
    assert "FedAvg gets 50.0" in text and f"left out: {new}." in text
    with pytest.raises(ConfigError, match="no finished round yet.*fnrfl resume"):
        report([new], tmp_path / "p.html", plots=False)
    assert not (tmp_path / "p.html").exists()


def test_partial_participation(tmp_path: Path) -> None:
    inside = payload(page_of(fake_run(tmp_path / "some", participation=0.6, fnr="on")))["inside"][0]
    assert inside["refined"]["grid"][4] == [0, 0, 0] and inside["clients"][4]["active"] == 0
    assert inside["clients"][4]["ranking"] is None


def test_numbers_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    path = change_log(fake_run(tmp_path / "run"), lambda number, line: line | ({"loss": np.nan} if number == 3 else {}))
    assert "NaN" in (path / "events.jsonl").read_text()
    assert payload(page_of(path))["panels"][0]["groups"][0]["curves"]["loss"]["mean"][2] is None


def test_a_folder_stands_for_the_runs_below_it(four: list[Path]) -> None:
    folder = four[0].parent
    (folder / ".scaffold-part").mkdir()
    (folder / ".scaffold-part" / "events.jsonl").touch()
    assert load.find_run_dirs([folder]) == sorted(four)
    assert load.find_run_dirs([four[3], folder]) == [four[3], *sorted({*four} - {four[3]})]
    out = folder / "some.where"
    assert report([folder], out, plots=False) == out / "report.html"
    pages = [fnrfl.report(four, out=folder / "list.html"), fnrfl.report(*four, out=folder / "words.html")]
    assert pages[0].read_text() == pages[1].read_text()


def test_a_pipe_in_the_model_s_place_is_not_waited_for(four: list[Path]) -> None:
    for run in four:
        (run / "model.safetensors").unlink(missing_ok=True)
        os.mkfifo(run / "model.safetensors")
    made = subprocess.run(
        [sys.executable, "-m", "fnrfl", "report", *map(str, four), "--no-plots", "-o", "page.html"],
        cwd=four[0].parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert made.returncode in (0, 2), made.stderr


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    path = fake_run(tmp_path / "run")
    (path / "partition.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for runs, said in (([], "at least one run"), ([tmp_path / "empty"], "not a run dir"), ([path], "run is damaged")):
        with pytest.raises(ConfigError, match=said):
            report(runs, tmp_path / "p.html")
    with pytest.raises(ConfigError, match="no run directory"):
        fnrfl.report([])
    assert not (tmp_path / "p.html").exists()


# -- lines and labels -------------------------------------------------------------------------------------------------


def labels(*paths: Path) -> list[str]:
    return [group.label for group in groups_of(*paths)]


def test_seeds_make_a_line_and_the_same_run_twice_is_two_lines(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a", seed=2, name="a"), fake_run(tmp_path / "b", seed=0, name="b")
    lines = groups_of(a, b, fake_run(tmp_path / "c", seed=2, name="c"))
    assert [(line.label, [run.seed for run in line.runs]) for line in lines] == [
        ("FedAvg", [0, 2]),
        ("FedAvg (2)", [2]),
    ]


def test_labels_say_what_differs_and_no_more(tmp_path: Path) -> None:
    weights = [fake_run(tmp_path / f"w{weight}", fnr={"weight": weight}) for weight in (0.0, 0.1, 1.0)]
    slow, fast = fake_run(tmp_path / "slow"), fake_run(tmp_path / "fast", client={"lr": 0.5})
    expected = ["FedAvg, client.lr 0.05", "FedAvg, client.lr 0.5"]
    expected += ["FedAvg + FNR without penalty", "FedAvg + FNR, weight 0.1", "FedAvg + FNR, weight 1"]
    assert labels(*weights, slow, fast, fake_run(tmp_path / "f", algorithm="fedprox")) == [*expected, "FedProx"]
    # around one method FNR is a name of its own
    assert labels(*weights[:2], slow) == ["FedAvg", "FNR without penalty", "FNR"]
    assert labels(slow, fake_run(tmp_path / "g", scenario="iid")) == ["label-dirichlet(0.1)", "iid"]
    # what all lines share is left out of their names, and said once
    assert labels(slow, fast) == ["client.lr 0.05", "client.lr 0.5"]
    assert labels(*weights) == ["without penalty", "weight 0.1", "weight 1"]
    assert labels(slow) == ["FedAvg"]
    text = text_of(slow, fast)
    assert "2 variants of FedAvg on digits" in text and "2 runs by FedAvg on digits" in text
    assert "by FedAvg" not in text_of(slow)


def test_a_method_is_called_as_its_file_begins() -> None:
    for name in registry.method_names():
        assert registry.display_name(name).lower().startswith(name.replace("ktpfl", "kt-pfl"))
    assert registry.display_name("steady:Steady") == "Steady"


def test_settings_with_several_lines_have_charts_of_their_own(tmp_path: Path) -> None:
    scenarios = {"iid": "evenly spread data", "label-classes(2)": "few classes a client"}
    made = [fake_run(tmp_path / s / m, algorithm=m, scenario=s) for s in scenarios for m in ("fedavg", "moon")]
    found = {panel.title: [group.label for group in panel.groups] for panel in panels(*made)}
    assert found == {words: ["FedAvg", "MOON"] for words in scenarios.values()}
    (alone,) = panels(*made[::2])  # one method in each setting: they share a chart, and are not ranked together
    assert [group.label for group in alone.groups] == ["iid", "label-classes(2)"]
    text = told(*made[::2])
    assert "With evenly spread data FedAvg gets 80.0 % right." in text
    assert "With few classes a client FedAvg gets 80.0 % right." in text


@pytest.mark.parametrize(
    ("scenarios", "names"),
    [
        (["iid"], ["evenly spread data"]),
        (["label-dirichlet(0.1)", "iid"], ["skewed classes", "evenly spread data"]),
        (
            ["label-dirichlet(0.1)", "label-dirichlet(0.5)", "iid"],
            ["skewed classes (0.1)", "skewed classes (0.5)", "evenly spread data"],
        ),
        (
            ["niid(label-dirichlet(0.1))", "label-dirichlet(0.1)"],
            ["niid(label-dirichlet(0.1))", "label-dirichlet(0.1)"],
        ),
        (["label-classes(2) + quantity-dirichlet(1)"], ["few classes a client and clients of unequal size"]),
        (["mine.json", "iid"], ["mine.json", "evenly spread data"]),
    ],
)
def test_settings_are_named_by_what_differs(scenarios: list[str], names: list[str], tmp_path: Path) -> None:
    run = load.read_run(fake_run(tmp_path / "run"))
    runs = [dataclasses.replace(run, config=run.config | {"scenario": one}) for one in scenarios]
    assert report_lines.setting_names(runs) == names
    far = dataclasses.replace(run, config=run.config | {"clients": 9, "dataset.name": "/data/wards/"})
    assert report_lines.setting_names([run, far]) == ["5 clients, digits", "9 clients, wards"]


def test_methods_and_settings_make_a_grid(tmp_path: Path) -> None:
    made = []
    for scenario, gain in (("iid", 0.0), ("label-classes(2)", 0.2)):
        made += seeds(tmp_path / scenario, "a", [0.5, 0.52, 0.51], scenario=scenario)
        made += seeds(tmp_path / scenario, "b", [0.5 + gain, 0.521 + gain, 0.51 + gain], scenario=scenario, fnr="on")
    only = fake_run(tmp_path / "one", scenario="iid", algorithm="moon")
    table = tables.setting_grid(panels(*made, only))
    assert table is not None
    assert [column.name for column in table.columns[1:]] == ["evenly spread data", "few classes a client"]
    rows = {row[0].text: [(cell.text, cell.beside) for cell in row[1:]] for row in table.rows}
    assert rows["FedAvg"] == [("51.00", "")] * 2 and rows["FedAvg + FNR"][1] == ("71.03", "better")
    assert rows["FedAvg + FNR"][0][1] == "" and rows["MOON"] == [("80.00", ""), ("", "")]
    (grid,) = payload(page_of(*made, only))["grids"]
    assert grid["rows"] == list(rows) and grid["values"][0] == [0.51, 0.51] and grid["values"][2] == [0.8, None]
    drawn = {one.name: one for one in plots.draw_figures(charts.payload(panels(*made)), tmp_path / "p")}
    assert drawn["grid.png"].read_bytes().startswith(b"\x89PNG") and "grid.svg" in drawn
    assert drawn["grid.csv"].read_text().splitlines()[0] == "method,evenly spread data,few classes a client"
    assert tables.setting_grid(panels(*made[:6])) is None and tables.setting_grid(panels(made[0], made[6])) is None


# -- words ------------------------------------------------------------------------------------------------------------


def told(*paths: Path) -> str:
    said, notes = sentences.summary(panels(*paths))
    return " ".join([*(one.text for one in said), *notes]).replace(sentences.SPACE, " ")


def test_two_sentences_say_that_nothing_can_be_told_apart(tmp_path: Path) -> None:
    paths = [
        path
        for n, method in enumerate(("fedavg", "scaffold", "moon", "fednova"))
        for path in seeds(tmp_path, method, [0.5 + 0.001 * n, 0.6, 0.55], algorithm=method)
    ]
    (said,), notes = sentences.summary(panels(*paths))
    assert len(re.findall(r"\.(?: |$)", said.text)) == 2 and len(notes) == 1
    assert "cannot tell FedNova from any of the others: " in said.text and said.text.endswith("points over MOON.")
    assert [text for text in told(*paths).split() if text in ("digits", "label-dirichlet(0.1)")] == []


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([0.70, 0.72, 0.71], [0.50, 0.51, 0.52], "SCAFFOLD gets 71.0 % right and FedAvg 51.0 %. SCAFFOLD is ahead by"),
        ([0.70, 0.72, 0.71], [0.50, 0.51, 0.52], "is ahead by more than luck: +17.5 to +22.5 points."),
        ([0.62, 0.52, 0.57], [0.50, 0.60, 0.55], "Three seeds cannot tell this from luck: −22.8 to +26.8 points."),
        ([0.9], [0.5], "One seed cannot tell this from luck."),
        ([0.5, 0.6], [0.4, 0.5], "Their difference is the same with every seed"),
        ([0.5, 0.6], [0.5, 0.6], "FedAvg and SCAFFOLD are equal."),
    ],
)
def test_what_is_said_of_two_lines(tmp_path: Path, first: list[float], second: list[float], said: str) -> None:
    assert said in told(*seeds(tmp_path, "a", second), *seeds(tmp_path, "b", first, algorithm="scaffold"))


def test_a_pair_that_is_compared_both_ways_is_told_once(tmp_path: Path) -> None:
    """The comparison has FNR as its baseline, and FNR is compared with the method without it."""
    made = {"off": seeds(tmp_path, "off", [0.5, 0.6, 0.7]), "on": seeds(tmp_path, "on", [0.51, 0.69, 0.62], fnr="on")}
    runs = [{"cell": path.name, "group": name} for name, paths in made.items() for path in paths]
    said = {"runs": runs, "rows": [{"group": name, "baseline": "on"} for name in made], "failed": []}
    (tmp_path / "comparison.json").write_text(json.dumps(said))
    (panel,) = report_lines.panels_of(load.load_runs([tmp_path]).runs)
    assert {(pair.one.label, pair.why) for pair in report_pairs.line_pairs(panel.groups)} == {
        ("FedAvg", "baseline"), ("FNR", "plain"),
    }  # fmt: skip
    assert "cannot tell this from luck" in sentences.summary([panel])[0][0].text


def test_the_penalty_is_judged_against_its_control(tmp_path: Path) -> None:
    bare = seeds(tmp_path, "bare", [0.50, 0.51, 0.52])
    fnr = seeds(tmp_path, "fnr", [0.60, 0.62, 0.61], fnr="on")
    assert "Nothing can be said about the penalty of FNR: " in told(*bare, *fnr)
    control = seeds(tmp_path, "control", [0.60, 0.61, 0.62], fnr={"weight": 0.0})
    text = told(*bare, *fnr, *control)
    assert (
        "The penalty alone cannot be told from luck in 1 of 1 comparison with refine" in text
        and "Nothing can be said" not in text
    )
    assert "Nothing can be said" not in told(*control, *fnr)  # where the control comes first


def test_a_control_is_never_called_best(tmp_path: Path) -> None:
    bare = seeds(tmp_path, "bare", [0.50, 0.51, 0.52])
    fnr = seeds(tmp_path, "fnr", [0.60, 0.62, 0.61], fnr="on")
    control = seeds(tmp_path, "control", [0.90, 0.91, 0.92], fnr={"weight": 0.0})
    text = told(*bare, *fnr, *control)
    assert text.startswith(
        "FNR gets 61.0 % right and FedAvg 51.0 %; the control FNR without penalty 91.0 %. FNR is ahead"
    )
    assert told(*bare, *control).startswith("FedAvg gets 51.0 %")
    centralised = seeds(tmp_path, "centralised", [0.97, 0.98, 0.99], algorithm="centralised")
    text = told(*bare, *fnr, *centralised)
    assert text.startswith("FedAvg + FNR gets 61.0 % right and FedAvg 51.0 %; the control Centralised 98.0 %. ")
    other = seeds(tmp_path, "other", [0.1, 0.2], fnr={"weight": 0.0}, algorithm="moon")
    assert "All of these are controls, so none is called best." in told(*control, *other)


def test_what_holds_after_correction_is_told_apart_from_what_does_not(tmp_path: Path) -> None:
    paths = seeds(tmp_path, "fedavg", [0.50, 0.51, 0.52])
    gains = {"scaffold": (0.20, 0.2001, 0.1999), "moon": (0.02, 0.035, 0.024), "fednova": (0.01, -0.01, 0.0)}
    for method, gain in gains.items():
        paths += seeds(tmp_path, method, [0.5 + 0.01 * s + one for s, one in enumerate(gain)], algorithm=method)
    pairs = report_pairs.line_pairs(groups_of(*paths))
    verdicts = {"SCAFFOLD": "holds", "MOON": "alone", "FedNova": "same"}
    assert {pair.one.label: pair.verdict for pair in pairs} == verdicts
    assert "SCAFFOLD is ahead by more than luck after correction for 5 comparisons: +" in told(*paths)


def test_who_is_called_best_is_ahead_in_every_comparison_of_the_page(tmp_path: Path) -> None:
    """The sentence and the figure below it say the same of a pair that both have; other pairs add to their number."""
    paths = seeds(tmp_path, "fedavg", [0.50, 0.51, 0.52])
    paths += seeds(tmp_path, "fnr", [0.60, 0.62, 0.61], fnr="on")
    paths += seeds(tmp_path, "control", [0.60, 0.615, 0.62], fnr={"weight": 0.0})
    paths += seeds(tmp_path, "scaffold", [0.80, 0.83, 0.81], algorithm="scaffold")
    lines = groups_of(*paths)
    first = next(group for group in lines if group.label == "SCAFFOLD")
    others = [group for group in lines if group is not first]
    pairs, compared = report_pairs.against_all(first, others, lines)
    known = report_pairs.line_pairs(lines)
    assert set(pairs) == set(others) and compared == len(known) + 2  # fedavg is the baseline, and already there
    (same,) = [pair for pair in known if pair.one is first]
    mine = pairs[same.other]
    assert mine == same and all((pair.corrected or 0) > (pair.found and pair.found.p or 1) for pair in pairs.values())


# -- what a guess reaches ---------------------------------------------------------------------------------------------


def test_chance_and_the_most_frequent_class_are_in_table_and_charts(tmp_path: Path) -> None:
    def rows(path: Path) -> dict[str, dict[str, Any]]:
        table = tables.results(panels(path)[0])
        names = [column.name for column in table.columns]
        return {row[0].text: dict(zip(names, (cell.value for cell in row), strict=True)) for row in table.rows}

    assert list(rows(fake_run(tmp_path / "old", accuracy=0.25))) == ["FedAvg", "chance"]
    new = say_test_counts(fake_run(tmp_path / "new", accuracy=0.6), [24, 0, 8, 8])
    found = rows(new)
    assert found["chance"]["accuracy, %"] == 0.25 and found["majority class"]["accuracy, %"] == 0.6
    assert found["majority class"]["balanced_accuracy, %"] == pytest.approx(1 / 3)
    assert found["chance"]["worst_client, %"] is None
    assert payload(page_of(new))["panels"][0]["references"][1] == {
        "name": "majority class", "accuracy": 0.6, "accuracy_clean": 0.6, "balanced_accuracy": 0.33333,
    }  # fmt: skip
    assert "No better than one and the same answer to everything, which reaches 60.0 %: FedAvg." in told(new)
    even = say_test_counts(fake_run(tmp_path / "even"), [10, 10, 10, 10])
    assert list(rows(even)) == ["FedAvg", "chance, majority class"]
    assert "No better" not in told(even)


@pytest.mark.parametrize("counts", [[1, 2], [-1, 1, 0, 0], ["a", 1, 2, 3]])
def test_test_counts_that_cannot_be_are_damage(tmp_path: Path, counts: list[int]) -> None:
    with pytest.raises(ConfigError, match="is damaged .events.jsonl, line 1"):
        load.read_run(say_test_counts(fake_run(tmp_path / "run"), counts))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0, 1))
@example([0.0, 0.9375], 1.0)  # the margin would have made up for what is missing, and was cut off
def test_an_axis_holds_its_values_and_is_wide_enough(values: list[float], least: float) -> None:
    low, high = share_range(values, least)
    assert 0 <= low <= min(values) + 1e-9 and max(values) - 1e-9 <= high <= 1
    assert high - low >= least - 1e-9


@pytest.mark.parametrize("examples", [1, 6, 360, 10_000])
def test_no_axis_is_closer_than_a_test_set_can_measure(examples: int) -> None:
    span = least_span(examples)
    assert span == pytest.approx(min(1.0, 4 * (0.5 * 0.5 / examples) ** 0.5)) and span >= min(1.0, 2 / examples)


def test_controls_are_the_methods_that_call_themselves_so() -> None:
    said = {name for name, text in registry.algorithms().items() if "a control" in text}
    assert set(registry.CONTROLS) == said | {"public-returned"}  # "what setting it aside costs"


# -- differences ------------------------------------------------------------------------------------------------------


def test_the_forest_has_the_paired_differences_of_every_line(four: list[Path]) -> None:
    (forest,) = payload(page_of(*four))["forests"]
    groups = {group.label: group for group in groups_of(*four)}
    titles = ["minus FedAvg", "with FNR minus the same method without it"]
    assert [block["title"] for block in forest["blocks"]] == titles
    rows = [row for block in forest["blocks"] for row in block["rows"]]
    assert [row["label"] for row in rows] == ["FedAvg + FNR", "SCAFFOLD", "SCAFFOLD + FNR", "SCAFFOLD + FNR"]
    for row in rows:
        found = report_pairs.difference(groups[row["label"]], groups[row["other"]])
        assert found is not None and row["seeds"] == found.n == 3
        numbers = [found.mean, found.low, found.high]
        assert [row[key] for key in ("mean", "low", "high")] == pytest.approx(numbers, rel=1e-4)
    assert not forest["leak"]


def test_the_forest_is_there_only_where_there_are_pairs(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a"), fake_run(tmp_path / "b", algorithm="moon", accuracy=0.9)
    assert payload(page_of(a))["forests"] == [] and 'class="forest"' not in page_of(a)
    (forest,) = payload(page_of(a, b))["forests"]
    (row,) = forest["blocks"][0]["rows"]
    assert (row["low"], row["seeds"], row["holds"]) == (None, 1, False)
    assert "There is one seed, so there are no intervals" in text_of(a, b)
    assert payload(page_of(a, fake_run(tmp_path / "c", algorithm="moon", split="other")))["forests"] == []
    leaks = [leaky(tmp_path / "l"), leaky(tmp_path / "m", fnr="on")]
    assert [forest["leak"] for forest in payload(page_of(a, b, *leaks))["forests"]] == [False, True]


def test_differences_are_paired_and_compared_within_a_setting(four: list[Path], tmp_path: Path) -> None:
    elsewhere = fake_run(tmp_path / "iid", scenario="iid", algorithm="scaffold")
    rows = [[cell.text for cell in row] for row in tables.differences(panels(*four, elsewhere)[0]).rows]
    assert [row[:2] for row in rows] == [
        ["FedAvg + FNR", "FedAvg"],
        ["SCAFFOLD", "FedAvg"],
        ["SCAFFOLD + FNR", "FedAvg"],
        ["SCAFFOLD + FNR", "SCAFFOLD"],
    ]
    assert rows[1][2] == "+6.1" and rows[1][6:] == ["3", "it holds after correction"]


# -- leaks ------------------------------------------------------------------------------------------------------------


def test_leaks_are_marked_everywhere_and_ranked_apart(tmp_path: Path) -> None:
    made = page_of(fake_run(tmp_path / "honest"), leaky(tmp_path / "a", fnr="on", accuracy=0.99), leaky(tmp_path / "b"))
    assert [(len(panel["groups"]), len(panel["leaks"])) for panel in payload(made)["panels"]] == [(1, 0), (2, 4)]
    assert 'class="banner leak"' in made and "refined on the test set and its labels" in made
    for row in re.findall(r"<tr>.*?</tr>", made, re.DOTALL):
        assert (">FNR" in row and "named" in row) <= ('class="tag leak"' in row)
    text = Elements(made).text
    assert "leaks" in text and "99.0\N{NO-BREAK SPACE}% (leak) right" in text
    assert "these very examples, labels included: a leak" in text


def test_a_leak_is_never_called_best_and_does_not_open_the_page(tmp_path: Path) -> None:
    leaks = [leaky(tmp_path / f"l{s}", seed=s, accuracy=0.99, fnr="on") for s in range(3)]
    leaks += [leaky(tmp_path / f"b{s}", seed=s, accuracy=0.4 + 0.01 * s) for s in range(3)]
    text = told(*leaks)
    assert text.startswith("FNR gets 99.0 % (leak) right and FedAvg 41.0 % (leak). With a leak none is called best.")
    text = told(*leaks, *seeds(tmp_path, "honest", [0.5, 0.51]))
    assert text.startswith("With no leaks FedAvg gets 50.5 %") and "is ahead" not in text
    assert "With a leak none is called best." in text


# -- nothing gets in, nothing gets out --------------------------------------------------------------------------------


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    made = page_of(evil_run(tmp_path), title=EVIL)
    found = Elements(made)
    assert not [tag for tag, _ in found.tags if tag in ("img", "iframe", "object", "link")]
    assert [a.get("type") for tag, a in found.tags if tag == "script"] == ["application/json", None]
    assert found.text.count(EVIL) > 3
    assert payload(made)["inside"][0]["label"] == "FedAvg + FNR"


def test_the_page_refers_to_nothing_outside(four: list[Path]) -> None:
    made = page_of(*four)
    assert not [word for word in ("http:", "https:", "@import", "url(") if word in made]
    for _, attributes in Elements(made).tags:
        assert "src" not in attributes and str(attributes.get("href", "#")).startswith("#")
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    policy = next(a["content"] for tag, a in Elements(made).tags if a.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'; script-src 'sha256-")


def test_a_report_needs_no_torch(four: list[Path]) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
from fnrfl.results.report import report
report([Path({str(four[0].parent)!r})], Path({str(four[0].parent / "out.html")!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (four[0].parent / "out-plots" / "convergence.png").exists()


# -- sizes: memory, work and pages grow no faster than what is read ---------------------------------------------------


def test_forty_runs_make_a_light_page(tmp_path: Path) -> None:
    keys = itertools.product(("fedavg", "fedprox", "scaffold", "moon"), ("off", "on"), range(5))
    paths = [fake_run(tmp_path / f"{a}{f}{s}", rounds=20, clients=10, algorithm=a, fnr=f, seed=s) for a, f, s in keys]
    assert len(page_of(*paths)) < 600_000


def test_long_and_wide_runs_are_thinned(tmp_path: Path) -> None:
    made = page_of(fake_run(tmp_path / "long", rounds=300, clients=150, fnr="on"))
    inside, group = payload(made)["inside"][0], payload(made)["panels"][0]["groups"][0]
    assert len(made) < 2_000_000
    assert len(inside["clients"]) == 100 and inside["all"] == 150
    assert inside["norms"]["rounds"][-1] == inside["refined"]["rounds"][-1] == group["rounds"][-1] == 300
    assert len(group["rounds"]) <= 200


def long_run(path: Path, rounds: int) -> Path:
    """A run whose every line has the numbers that a run of ten classes writes."""

    def longer(number: int, event: dict[str, Any]) -> dict[str, Any]:
        if not number:
            return event
        shares = [number / (7.0 * place) for place in range(3, 40)]
        return event | {"confusion": [[number + 300] * 4] * 4, "precision": shares, "recall": shares}

    return change_log(fake_run(path, rounds=rounds), longer)


def test_a_long_log_takes_less_memory_than_its_file(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", 1500)
    load.read_run(long_run(tmp_path / "first", 3))  # imports, and what libraries keep
    tracemalloc.start()
    run = load.read_run(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(run.rounds) == 1500
    assert peak < (path / "events.jsonl").stat().st_size


def test_what_is_kept_of_a_log_gives_the_same_numbers(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", 6)
    whole = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()[1:]]
    run = load.read_run(path)
    assert run.series("worst_client") == [min(event["per_client"]) for event in whole]
    assert run.series("accuracy") == [event["accuracy"] for event in whole]
    assert run.rounds[-1] == {key: value for key, value in whole[-1].items() if key in run.rounds[-1]}
    assert {"confusion", "per_class", "per_client"} <= run.rounds[-1].keys()
    assert [event["bytes"] for event in run.rounds] == [event["bytes"] for event in whole]


def calls_of(folder: Path, runs: list[Path], *given: Path) -> int:
    """How many functions are called to read some runs and to compare their lines."""
    (folder / "grid.json").write_text(json.dumps({"format": 2, "cells": {run.name: "" for run in runs}}))
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = load.load_runs(given or [folder]).runs
        for panel in report_lines.panels_of(found):
            for setting in report_pairs.ranked(panel.groups):
                report_pairs.line_pairs(setting)
    finally:
        sys.setprofile(None)
    assert len(found) == len(runs)
    return calls


@pytest.mark.parametrize("one_by_one", [False, True], ids=["their folder", "one by one"])
def test_the_work_for_runs_grows_with_their_number(tmp_path: Path, one_by_one: bool) -> None:
    made = []
    for number in range(60):
        fnr: dict[str, object] = {"fnr": "on", "fnr.weight": 0.1 * (number % 3 == 1)} if number % 3 else {}
        made.append(fake_run(tmp_path / "all" / f"run-{number}", rounds=1, **fnr, **{"client.lr": 0.1 + number // 3}))
    few, many = (calls_of(tmp_path / "all", made[:n], *(made[:n] if one_by_one else [])) for n in (15, 60))
    assert many < 4.8 * few


# -- figures ----------------------------------------------------------------------------------------------------------


def svg_text(path: Path) -> str:
    return "".join(ElementTree.parse(path).getroot().itertext())


def test_figures_are_pictures_of_every_panel_and_none_is_left_of_the_page_before(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    honest = [
        *seeds(runs, "a", [0.5, 0.6]),
        fake_run(runs / "b", algorithm="moon"),
        fake_run(runs / "c", done=1, seed=7),
    ]
    leaky(runs / "leak", fnr="on")
    folder = tmp_path / "page-plots"
    with plots.mpl.rc_context({"text.usetex": True}):  # as a matplotlibrc in the working folder may ask for
        report([runs], tmp_path / "page.html")
    paired = {f"differences.{suffix}" for suffix in ("png", "svg")}  # the leak is alone
    drawn = {f"{n}{p}.{s}" for n in plots.FIGURES for p in ("", "-2") for s in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == drawn | paired
    assert (folder / "seeds.png").read_bytes().startswith(b"\x89PNG")
    for path in folder.glob("*.svg"):
        assert ("leak" in svg_text(path)) == path.stem.endswith("-2")
    (folder / "mine-2.png").write_text("not fnrfl's")
    report(honest[:1], tmp_path / "page.html")
    assert {path.name for path in folder.iterdir()} == {name for name in drawn if "-2" not in name} | {"mine-2.png"}


def test_figures_take_names_as_they_are(tmp_path: Path) -> None:
    label = "_a $x_1^2$ <b>"
    line = report_lines.LineGroup(label, 0, (load.read_run(evil_run(tmp_path)),))
    data = charts.payload([report_lines.Panel("x", (line,))])
    first, again = (plots.draw_figures(data, tmp_path / name) for name in ("first", "again"))
    for path, other in zip(first, again, strict=True):
        assert path.read_bytes() == other.read_bytes()
    for name in ("convergence", "seeds"):
        assert label in svg_text(tmp_path / "first" / f"{name}.svg")


CSS = (Path(page.__file__).parent / "page.css").read_text()
COLOURS = {"light": re.findall(r"--c\d: light-dark\((#\w+),", CSS)}
COLOURS["dark"] = re.findall(r"--c\d: light-dark\(#\w+, (#\w+)\)", CSS)


def test_figures_have_the_colours_of_the_page() -> None:
    assert tuple(COLOURS["light"]) == plots.PALETTE
    assert len(plots.PALETTE) == report_lines.COLOURS
    looks = {(i % report_lines.COLOURS, charts.DASHES[i % len(charts.DASHES)]) for i in range(50)}
    assert len(looks) == 50


# How colours look without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1), on linear RGB.
SIGHT = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deutan": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritan": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def seen(colour: str, sight: str) -> np.ndarray:
    """A colour in CIE Lab, as somebody sees it."""
    s = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.clip(np.array(SIGHT[sight]) @ np.where(s <= 0.04045, s / 12.92, ((s + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(xyz / (0.9505, 1.0, 1.089))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", COLOURS)
def test_colours_differ_for_everybody(sight: str, theme: str) -> None:
    """A distance of 2 can be noticed; 10 can be told at a glance."""
    colours = [seen(colour, sight) for colour in COLOURS[theme]]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colours, 2)) > 10
