"""The report says what the logs say, about any runs, without torch, network or foreign markup."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fnrfl
from fnrfl import run as run_for_real
from fnrfl.config import load, registry
from fnrfl.core.errors import ConfigError
from fnrfl.data.datasets import load as load_data
from fnrfl.results.report import charts, report, sentences, tables
from fnrfl.results.report import groups as report_lines
from fnrfl.results.report import load as reader
from fnrfl.results.report import pairs as report_pairs
from fnrfl.results.report.page import PAGE_SECTIONS
from fnrfl.results.report.privacy_table import learned
from fnrfl.results.report.references import least_span, share_range

CLASSES = 4
Make = Callable[..., Path]


# -- run directories without a run ------------------------------------------------------------------------------------


def fake_run(
    path: Path,
    *,
    accuracy: float = 0.8,
    rounds: int = 3,
    done: int | None = None,
    clean: bool = False,
    examples: int = 7,
    data: str = "0",
    split: str = "",
    **keys: object,
) -> Path:
    """A run directory as `fnrfl run` leaves it, with numbers that are easy to recompute."""
    config = load("digits", {"rounds": rounds, "clients": 5, **keys})
    path.mkdir(parents=True)
    (path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    clients, leaks = config.clients, list(config.leaks_on)
    sizes = {"train": 90, "public": 8, "ranking": 2, "distill": 0, "validation": 0, "test": 40}
    parts = {name: {"examples": count, "sha256": f"{name} of {data}"} for name, count in sizes.items()}
    counts = [
        [examples * (client + 1) if c == client % CLASSES else 1 for c in range(CLASSES)] for client in range(clients)
    ]
    drawn = {"seed": config.seed, "scenario": config.scenario, "counts": counts, "positions": split}
    manifest = {**drawn, "sha256": sha256(drawn, separators=(",", ":"))}
    listed = {"num_classes": CLASSES, **parts}
    (path / "partition.json").write_text(json.dumps({**manifest, "splits": {**listed, "sha256": sha256(listed)}}))
    header = {
        "config": config.as_dict(),
        "config_sha256": config.sha256,
        "leaks": leaks,
        "notices": [],
        "versions": {"fnrfl": "0", "torch": "0"},
        "git": None,
        "device": "test machine",
        "data": {"source": "made up", "sha256": data * 64},
        "partition": manifest["sha256"],
        "parameters": 2**19 // (4 * len(cohort_of(config))),
    }
    done = rounds if done is None else done
    lines = [header, *(_event(config, t, accuracy * (t + 1) / rounds, clean) for t in range(done))]
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done == rounds:
        (path / "model.safetensors").touch()
    return path


def sha256(value: object, separators: tuple[str, str] | None = None) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=separators).encode()).hexdigest()


def cohort_of(config: Any) -> list[int]:
    return list(range(config.clients))[: max(1, round(config.participation * config.clients))]


def _event(config: Any, t: int, accuracy: float, clean: bool) -> dict[str, Any]:
    cohort = cohort_of(config)
    vectors = 2 if config.algorithm.name == "scaffold" else 1
    event = {
        "round": t + 1,
        "rounds": config.rounds,
        "cohort": cohort,
        "accuracy": accuracy,
        **({"accuracy_clean": accuracy + 0.01} if clean else {}),
        "balanced_accuracy": accuracy - 0.02,
        "loss": 1 - accuracy,
        "per_class": [accuracy, None, 1.0, 0.0],
        "per_client": [accuracy / (client + 1) for client in range(config.clients)],
        "validation_accuracy": 0.9 - 0.1 * t,
        "bytes": {"local": {"down": 2**20, "up": vectors * 2**19, "headers": 9}},
        "bytes_up": 2**19,
        "bytes_down": 2**20,
        "seconds": {"local": 1.5, "server": 0.5, "evaluate": 9.0},
        "leaks": list(config.leaks_on),
    }
    if config.fnr is not None:
        norms = [[1.0 + client + t, 2.0, 3.0, 0.0] for client in cohort]
        event["seconds"] |= {"measure": 0.25, "observe": 3.0, "refine": 0.75}
        event["bytes"]["refine"] = {"down": 0, "up": 0, "headers": 0}
        event |= {"refined": cohort[:2], "ranking": [0.1 * client for client in cohort], "norms": norms}
        event |= {"refined_before": [0.2, 0.4, None, 0.5], "refined_after": [0.6, 0.3, None, 0.5]}
    return event


def page_of(*paths: Path, title: str | None = None) -> str:
    out = paths[0].parent / "page.html"
    assert report(paths, out, title=title, plots=False) == out
    return out.read_text(encoding="utf-8")


def groups_of(*paths: Path) -> list[report_lines.LineGroup]:
    return [
        group for panel in report_lines.panels_of([reader.read_run(path) for path in paths]) for group in panel.groups
    ]


def panel_of(*paths: Path) -> report_lines.Panel:
    (panel,) = report_lines.panels_of([reader.read_run(path) for path in paths])
    return panel


def payload(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


class Elements(HTMLParser):
    """Every tag with its attributes, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._raw = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._raw else data


@pytest.fixture
def four(tmp_path: Path) -> list[Path]:
    """Two methods, bare and refined, with three seeds each."""
    made = []
    for a, algorithm in enumerate(("fedavg", "scaffold")):
        for f, fnr in enumerate(("off", "on")):
            for seed in range(3):
                accuracy = 0.7 + 0.06 * a + 0.02 * f + 0.001 * seed * (1 + a + f)
                path = tmp_path / f"{algorithm}-{fnr}-{seed}"
                made.append(fake_run(path, accuracy=accuracy, algorithm=algorithm, fnr=fnr, seed=seed))
    return made


# -- what is on the page ----------------------------------------------------------------------------------------------


def test_a_page_has_every_section_and_a_link_to_each(four: list[Path]) -> None:
    page = page_of(*four)
    assert 'class="tag leak"' not in page and "banner leak" not in page
    tags = Elements(page).tags
    ids = {attributes.get("id") for _, attributes in tags}
    sections = [name for name in PAGE_SECTIONS if name != "sites"]  # no client has brought test data of its own
    assert {"summary", *sections} <= ids and "sites" not in ids
    assert [attributes["href"] for tag, attributes in tags if tag == "a"] == [f"#{name}" for name in sections]


def test_curves_are_means_and_ranges_over_seeds_of_the_events(four: list[Path]) -> None:
    groups = payload(page_of(*four))["panels"][0]["groups"]
    assert [group["label"] for group in groups] == ["fedavg", "fedavg + FNR", "scaffold", "scaffold + FNR"]
    runs = [reader.read_run(path) for path in four[:3]]
    for metric in ("accuracy", "worst_client", "loss", "balanced_accuracy", "validation_accuracy"):
        for t in range(3):
            values = [run.series(metric)[t] for run in runs]
            curve = groups[0]["curves"][metric]
            assert curve["mean"][t] == pytest.approx(sum(v or 0 for v in values) / 3, rel=1e-4)
            assert curve["low"][t] == pytest.approx(min(v or 0 for v in values), rel=1e-4)
            assert curve["high"][t] == pytest.approx(max(v or 0 for v in values), rel=1e-4)
    assert groups[0]["mib"] == [1.5, 3.0, 4.5]
    assert groups[0]["seconds"] == [2.0, 4.0, 6.0]
    assert groups[1]["seconds"] == [3.0, 6.0, 9.0]  # looking at models is no training
    assert groups[1]["classes"] == [pytest.approx(0.722, rel=1e-4), None, 1.0, 0.0]


def test_tables_have_the_numbers_of_the_runs(four: list[Path]) -> None:
    panel = report_lines.panels_of([reader.read_run(path) for path in four])[0]
    found = (tables.results(panel), tables.line_table(panel, tables.COSTS))
    names = [column.name for column in found[0].columns]
    row = {column.name: cell for one in found for column, cell in zip(one.columns, one.rows[0], strict=True)}
    assert row["accuracy, %"].text == "70.10" and row["accuracy, %"].value == pytest.approx(0.701)
    assert row["accuracy, %"].beside == "± 0.10"
    assert row["worst_client, %"].value == pytest.approx(0.701 / 5)
    assert row["MiB up"].value + row["MiB down"].value == 4.5 and row["seconds"].value == 6.0
    assert row["kappa"].value == pytest.approx(0.701e4 / 6) and row["rho"].value == pytest.approx(0.701e4 / 4.5)
    assert "accuracy_clean, %" not in names


def test_inside_shows_split_refined_clients_norms_and_change(four: list[Path]) -> None:
    data = payload(page_of(*four))
    bare, refined = data["inside"][0], data["inside"][1]
    assert data["first"] == 1
    assert data["splits"][bare["split"]][1] == [1, 14, 1, 1] and bare["split"] == refined["split"]
    assert [client["examples"] for client in bare["clients"]] == [10, 17, 24, 31, 38]
    assert [bare[key] for key in ("refined", "norms", "change", "gap")] == [None] * 4
    assert refined["refined"]["grid"] == [[2] * 3, [2] * 3, [1] * 3, [1] * 3, [1] * 3]
    assert refined["norms"]["values"][2][0] == [3.0, 2.0, 3.0, None]  # no public example of the last class
    assert refined["change"] == {"before": [0.2, 0.4, None, 0.5], "after": [0.6, 0.3, None, 0.5]}
    others, weak = refined["gap"]
    assert weak["points"][0] == {
        "x": 1,
        "y": pytest.approx(6.5 / 3, rel=1e-4),
        "low": 2.0,
        "high": pytest.approx(7 / 3, rel=1e-4),
    }
    assert others["points"][0]["low"] == pytest.approx(8 / 3, rel=1e-4)
    assert refined["clients"][4]["ranking"] == 0.4 and refined["clients"][0]["refined"] == 3


def test_what_the_server_learned_is_told_by_kind(four: list[Path]) -> None:
    def kinds(*paths: Path) -> list[str]:
        return [row[0].text for row in learned(groups_of(*paths)).rows]

    common, fnr = ["the model", "example count"], ["class norms", "ranking accuracy"]
    assert kinds(four[0]) == common
    assert kinds(*four) == [*common, "scaffold's own", *fnr]
    assert "measured on public examples: a hint at the classes" in Elements(page_of(*four)).text


def test_a_result_and_a_report_have_the_same_numbers_even_of_clients_that_cannot_be_scored(tmp_path: Path) -> None:
    """The test set lacks all classes of a client: its accuracy is null in the log, and counts nowhere."""
    digits = load_data("digits")
    known = digits.test.y > 0
    path = tmp_path / "nobody-knows-zero.npz"
    np.savez(
        path, x_train=digits.train.x, y_train=digits.train.y, x_test=digits.test.x[known], y_test=digits.test.y[known]
    )
    keys = {"scenario": "label-classes(1)", "clients": 10, "rounds": 2, "validation": {"size": 0.1}}
    result = run_for_real("digits", out=tmp_path / "run", dataset=str(path), **keys)
    assert None in result.rounds[-1]["per_client"]
    run = reader.read_run(tmp_path / "run")
    summary = result.summary()
    for name in ("accuracy", "accuracy_last3", "accuracy_best", "bytes_up", "bytes_down", "kappa", "rho"):
        assert getattr(run, name) == getattr(result, name) == summary[name], name
    known_clients = [value for value in run.rounds[-1]["per_client"] if value is not None]
    assert run.last("worst_client") == summary["worst_client"] == min(known_clients)
    assert "worst_client" in Elements(page_of(tmp_path / "run")).text


def test_the_command_runs_it_again(tmp_path: Path) -> None:
    path = fake_run(tmp_path / "a folder")
    text = Elements(page_of(path)).text
    assert f"fnrfl run '{path}/config.toml' -o '{path}-again'" in text
    assert (path / "config.toml").read_text() in text
    assert "made up" in text and "test machine" in text


# -- any kind of run --------------------------------------------------------------------------------------------------


def test_a_run_without_the_answer_of_a_client_makes_a_page(tmp_path: Path) -> None:
    path = fake_run(tmp_path / "a")
    header, *events = (path / "events.jsonl").read_text().splitlines()
    told = [json.dumps(json.loads(event) | {"missing": {3: "local: it has not answered in time."}}) for event in events]
    (path / "events.jsonl").write_text("\n".join([header, *told]) + "\n")
    assert "damaged" not in page_of(path)


def test_feature_noise_has_the_clean_accuracy_beside(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path / "noisy", clean=True, scenario="feature-noise(0.5)"))
    assert ">clean, %<" in page and "scored once under each client's noise" in Elements(page).text
    curve = payload(page)["panels"][0]["groups"][0]["curves"]["accuracy_clean"]["mean"]
    assert curve[-1] == pytest.approx(0.81)


def test_an_unfinished_run_is_labelled_and_not_ranked(tmp_path: Path) -> None:
    whole = fake_run(tmp_path / "whole", accuracy=0.5)
    half = fake_run(tmp_path / "half", accuracy=0.9, done=2, seed=1)
    page = page_of(whole, half)
    text = Elements(page).text
    assert [g["label"] for g in payload(page)["panels"][0]["groups"]] == ["fedavg", "fedavg, unfinished"]
    assert "(2 of 3 rounds)" in text and "not ranked: fedavg, unfinished" in text
    assert "fedavg reached 50.0" in text


def test_a_run_without_a_round_is_named_and_left_out(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path / "whole"), fake_run(tmp_path / "new", done=0, seed=1))
    assert f"left out: {tmp_path / 'new'}." in Elements(page).text
    assert len(payload(page)["inside"]) == 1
    with pytest.raises(ConfigError, match="no finished round yet.*fnrfl resume"):
        report([tmp_path / "new"], tmp_path / "p.html", plots=False)
    assert not (tmp_path / "p.html").exists()


def test_partial_participation(tmp_path: Path) -> None:
    inside = payload(page_of(fake_run(tmp_path / "some", participation=0.6, fnr="on")))["inside"][0]
    assert inside["refined"]["grid"][4] == [0, 0, 0] and inside["clients"][4]["active"] == 0
    assert inside["clients"][4]["ranking"] is None


def test_numbers_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    path = fake_run(tmp_path / "run")
    log = path / "events.jsonl"
    log.write_text(log.read_text().replace('"loss": 0.1999', '"loss": NaN, "x": 0.1999'))
    assert "NaN" in log.read_text()
    assert payload(page_of(path))["panels"][0]["groups"][0]["curves"]["loss"]["mean"][2] is None


def test_a_folder_stands_for_the_runs_below_it(four: list[Path]) -> None:
    folder = four[0].parent
    (folder / ".scaffold-part").mkdir()
    (folder / ".scaffold-part" / "events.jsonl").touch()
    assert sorted(reader.find_run_dirs([folder])) == sorted(four)
    assert reader.find_run_dirs([four[0], folder])[0] == four[0] and len(
        reader.find_run_dirs([four[0], folder])
    ) == len(four)
    out = folder / "some.where"
    assert report([folder], out, plots=False) == out / "report.html"


def test_a_pipe_in_the_model_s_place_is_not_waited_for(four: list[Path]) -> None:
    for run in four:
        (run / "model.safetensors").unlink(missing_ok=True)
        os.mkfifo(run / "model.safetensors")
    page = subprocess.run(
        [sys.executable, "-m", "fnrfl", "report", *map(str, four), "--no-plots", "-o", "page.html"],
        cwd=four[0].parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert page.returncode in (0, 2), page.stderr


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one run directory"):
        report([], tmp_path / "p.html")
    with pytest.raises(ConfigError, match="is not a run directory"):
        report([tmp_path], tmp_path / "p.html")
    path = fake_run(tmp_path / "run")
    (path / "partition.json").write_text("{")
    with pytest.raises(ConfigError, match="run is damaged"):
        report([path], tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()


# -- lines and labels -------------------------------------------------------------------------------------------------


def lines(*paths: Path) -> list[tuple[str, tuple[int, ...]]]:
    return [(group.label, group.seeds) for group in groups_of(*paths)]


def test_seeds_make_a_line_whatever_the_runs_are_called(tmp_path: Path) -> None:
    a = fake_run(tmp_path / "a", seed=2, name="a")
    b = fake_run(tmp_path / "b", seed=0, name="b")
    assert lines(a, b) == [("fedavg", (0, 2))]


def test_the_same_run_twice_is_two_lines(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a"), fake_run(tmp_path / "b")
    assert lines(a, b) == [("fedavg", (0,)), ("fedavg (2)", (0,))]


def test_labels_say_what_differs_and_no_more(tmp_path: Path) -> None:
    paths = [
        fake_run(tmp_path / "a", fnr={"weight": 0.1}),
        fake_run(tmp_path / "b", fnr={"weight": 1.0}),
        fake_run(tmp_path / "c", fnr={"weight": 0.0}),
        fake_run(tmp_path / "d", client={"lr": 0.5}),
        fake_run(tmp_path / "e"),
        fake_run(tmp_path / "f", algorithm="fedprox"),
    ]
    assert [label for label, _ in lines(*paths)] == [
        "fedavg, client.lr 0.5",
        "fedavg, client.lr 0.05",
        "fedavg + FNR, weight 0",
        "fedavg + FNR, weight 0.1",
        "fedavg + FNR, weight 1",
        "fedprox",
    ]
    assert [label for label, _ in lines(paths[4], fake_run(tmp_path / "g", scenario="iid"))] == [
        "label-dirichlet(0.1)",
        "iid",
    ]


def test_what_all_lines_share_is_left_out_of_their_names_and_said_once(tmp_path: Path) -> None:
    slow = fake_run(tmp_path / "slow", client={"lr": 0.01})
    fast = fake_run(tmp_path / "fast", client={"lr": 0.5})
    weights = [fake_run(tmp_path / f"w{weight}", fnr={"weight": weight}) for weight in (0.0, 0.1, 1.0)]
    assert [label for label, _ in lines(slow, fast)] == ["client.lr 0.01", "client.lr 0.5"]
    assert [label for label, _ in lines(*weights)] == ["weight 0", "weight 0.1", "weight 1"]
    assert [label for label, _ in lines(slow)] == ["fedavg"]
    text = Elements(page_of(slow, fast)).text
    assert "2 variants of fedavg on digits" in text and "2 runs by fedavg on digits" in text
    assert "by fedavg" not in Elements(page_of(slow)).text


def test_more_lines_than_colours_are_split_by_setting(tmp_path: Path) -> None:
    methods = ("fedavg", "fedprox", "scaffold", "moon", "fednova")
    paths = [
        fake_run(tmp_path / f"{method}-{scenario}", algorithm=method, scenario=scenario)
        for scenario in ("iid", "label-classes(2)")
        for method in methods
    ]
    panels = report_lines.panels_of([reader.read_run(path) for path in paths])
    assert [(panel.title, len(panel.groups)) for panel in panels] == [
        ("digits, iid", 5),
        ("digits, label-classes(2)", 5),
    ]
    assert [group.label for group in panels[1].groups] == list(methods)


# -- words ------------------------------------------------------------------------------------------------------------


def told(*paths: Path) -> str:
    lead, rest = sentences.summary(report_lines.panels_of([reader.read_run(path) for path in paths]))
    return " ".join([lead, *rest]).replace(sentences.SPACE, " ")


def seeds(folder: Path, name: str, accuracies: list[float], **keys: object) -> list[Path]:
    return [fake_run(folder / f"{name}-{s}", accuracy=a, seed=s, **keys) for s, a in enumerate(accuracies)]


def test_at_most_four_sentences_say_that_nothing_can_be_told_apart(tmp_path: Path) -> None:
    paths = [
        path
        for n, method in enumerate(("fedavg", "scaffold", "moon", "fednova"))
        for path in seeds(tmp_path, method, [0.5 + 0.001 * n, 0.6, 0.55], algorithm=method)
    ]
    lead, rest = sentences.summary(report_lines.panels_of([reader.read_run(path) for path in paths]))
    assert "do not show after correction for" in lead and "any other method" in lead and len(rest) <= 3
    assert "against fedavg: 3 not to be told apart." in " ".join(rest)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([0.70, 0.72, 0.71], [0.50, 0.51, 0.52], "scaffold came out best, with 71.0 % test accuracy after 3 rounds."),
        ([0.70, 0.72, 0.71], [0.50, 0.51, 0.52], "20.0 points behind: it holds after correction (95 % interval +"),
        ([0.62, 0.52, 0.57], [0.50, 0.60, 0.55], "do not show that it is better than fedavg."),
        ([0.62, 0.52, 0.57], [0.50, 0.60, 0.55], "cannot be told apart (95 % interval −"),
        ([0.9], [0.5], "40.0 points behind: one seed: cannot be told."),
        ([0.5, 0.6], [0.5, 0.6], "fedavg and scaffold are ahead with the same 55.0 % test accuracy"),
    ],
)
def test_what_is_said_of_two_lines(tmp_path: Path, first: list[float], second: list[float], said: str) -> None:
    assert said in told(*seeds(tmp_path, "a", second), *seeds(tmp_path, "b", first, algorithm="scaffold"))


def test_the_penalty_is_judged_against_its_control(tmp_path: Path) -> None:
    bare = seeds(tmp_path, "bare", [0.50, 0.51, 0.52])
    fnr = seeds(tmp_path, "fnr", [0.60, 0.62, 0.61], fnr="on")
    assert "Nothing can be said about the penalty itself in fedavg + FNR" in told(*bare, *fnr)
    text = told(*bare, *fnr, *seeds(tmp_path, "control", [0.60, 0.61, 0.62], fnr={"weight": 0.0}))
    assert "the penalty against weight 0: 1 not to be told apart" in text and "Nothing can be said" not in text
    control = seeds(tmp_path, "alone", [0.60, 0.61, 0.62], fnr={"weight": 0.0})
    assert "Nothing can be said" not in told(*control, *fnr)  # where the control comes first


def test_fnr_around_many_methods_is_summed_up(tmp_path: Path) -> None:
    paths = []
    for algorithm, gain in (("fedavg", 0.0), ("scaffold", -0.1), ("moon", 0.0)):
        paths += seeds(tmp_path, f"{algorithm}-bare", [0.50, 0.51, 0.52], algorithm=algorithm)
        refined = [0.50 + gain, 0.52 + gain, 0.51 + gain]
        paths += seeds(tmp_path, f"{algorithm}-fnr", refined, algorithm=algorithm, fnr="on")
    assert "FNR against the same method without it: behind scaffold + FNR, 1 not to be told apart" in told(*paths)


def test_a_control_is_never_called_best(tmp_path: Path) -> None:
    bare = seeds(tmp_path, "bare", [0.50, 0.51, 0.52])
    fnr = seeds(tmp_path, "fnr", [0.60, 0.62, 0.61], fnr="on")
    control = seeds(tmp_path, "control", [0.90, 0.91, 0.92], fnr={"weight": 0.0})
    text = told(*bare, *fnr, *control)
    assert text.startswith("fedavg + FNR came out best, with 61.0 %")
    assert "Controls that are above it: fedavg + FNR, weight 0 with 91.0 % test accuracy." in text
    assert told(*bare, *control).startswith("fedavg reached 51.0 %")
    centralised = seeds(tmp_path, "centralised", [0.97, 0.98, 0.99], algorithm="centralised")
    assert told(*bare, *fnr, *centralised).startswith("fedavg + FNR came out best, with 61.0 %")
    other = seeds(tmp_path, "other", [0.1, 0.2], fnr={"weight": 0.0}, algorithm="moon")
    assert told(*control, *other).startswith("All lines here are controls, so none is called best.")


def test_a_leak_is_never_called_best_and_does_not_open_the_page(tmp_path: Path) -> None:
    leaks = [leaky(tmp_path / f"l{s}", seed=s, accuracy=0.99, fnr="on") for s in range(3)]
    leaks += [leaky(tmp_path / f"b{s}", seed=s, accuracy=0.4 + 0.01 * s) for s in range(3)]
    text = told(*leaks)
    assert text.startswith("With a leak none is called best. The first is fedavg + FNR with 99.0 % test accuracy (le")
    text = told(*leaks, *seeds(tmp_path, "honest", [0.5, 0.51]))
    assert text.startswith("fedavg reached 50.5 %") and "came out best" not in text
    assert "With a leak none is called best." in text


def test_what_holds_after_correction_is_told_apart_from_what_does_not(tmp_path: Path) -> None:
    paths = seeds(tmp_path, "fedavg", [0.50, 0.51, 0.52])
    gains = {"scaffold": (0.20, 0.2001, 0.1999), "moon": (0.02, 0.035, 0.024), "fednova": (0.01, -0.01, 0.0)}
    for method, gain in gains.items():
        paths += seeds(tmp_path, method, [0.5 + 0.01 * s + one for s, one in enumerate(gain)], algorithm=method)
    pairs = report_pairs.line_pairs(groups_of(*paths))
    assert {pair.one.label: pair.verdict for pair in pairs} == {
        "scaffold": "holds", "moon": "alone", "fednova": "same",
    }  # fmt: skip
    assert "Corrected for 3 comparisons, against fedavg: ahead scaffold, 2 not to be told apart." in told(*paths)


def test_who_is_called_best_is_ahead_in_every_comparison_of_the_page(tmp_path: Path) -> None:
    """What is told first is corrected for no fewer comparisons than the figure below it."""
    paths = seeds(tmp_path, "fedavg", [0.50, 0.51, 0.52])
    paths += seeds(tmp_path, "fnr", [0.60, 0.62, 0.61], fnr="on")
    paths += seeds(tmp_path, "control", [0.60, 0.615, 0.62], fnr={"weight": 0.0})
    paths += seeds(tmp_path, "scaffold", [0.80, 0.83, 0.81], algorithm="scaffold")
    lines = groups_of(*paths)
    first = next(group for group in lines if group.label == "scaffold")
    others = [group for group in lines if group is not first]
    pairs, compared = report_pairs.against_all(first, others, lines)
    known = report_pairs.line_pairs(lines)
    assert len(pairs) == 3 and compared == len(known) + 2  # fedavg is the baseline, and already there
    (same,) = [pair for pair in known if pair.one is first]
    (mine,) = [pair for pair in pairs if pair.other is same.other]
    assert mine.found == same.found and (mine.corrected or 0) >= (same.corrected or 1)


# -- what a guess reaches ---------------------------------------------------------------------------------------------


def say_test_counts(path: Path, counts: list[int]) -> Path:
    head, _, rest = (path / "events.jsonl").read_text().partition("\n")
    (path / "events.jsonl").write_text(json.dumps(json.loads(head) | {"test_counts": counts}) + "\n" + rest)
    return path


def test_chance_and_the_most_frequent_class_are_in_table_and_charts(tmp_path: Path) -> None:
    old = fake_run(tmp_path / "old", accuracy=0.25)
    assert [row[0].text for row in tables.results(panel_of(old)).rows] == ["fedavg", "chance"]
    new = say_test_counts(fake_run(tmp_path / "new", accuracy=0.6), [24, 0, 8, 8])
    table = tables.results(panel_of(new))
    names = [column.name for column in table.columns]
    rows = {row[0].text: dict(zip(names, (cell.value for cell in row), strict=True)) for row in table.rows}
    assert rows["chance"]["accuracy, %"] == 0.25 and rows["majority class"]["accuracy, %"] == 0.6
    assert rows["majority class"]["balanced_accuracy, %"] == pytest.approx(1 / 3)
    assert rows["chance"]["worst_client, %"] is None
    assert payload(page_of(new))["panels"][0]["references"][1] == {
        "name": "majority class", "accuracy": 0.6, "accuracy_clean": 0.6, "balanced_accuracy": 0.33333,
    }  # fmt: skip
    assert "No better than one and the same answer to everything, which reaches 60.0 %: fedavg." in told(new)
    even = say_test_counts(fake_run(tmp_path / "even"), [10, 10, 10, 10])
    assert [row[0].text for row in tables.results(panel_of(even)).rows] == ["fedavg", "chance, majority class"]
    assert "No better" not in told(even)


@pytest.mark.parametrize("counts", [[1, 2], [-1, 1, 0, 0], ["a", 1, 2, 3]])
def test_test_counts_that_cannot_be_are_damage(tmp_path: Path, counts: list[int]) -> None:
    with pytest.raises(ConfigError, match="is damaged .events.jsonl, line 1"):
        reader.read_run(say_test_counts(fake_run(tmp_path / "run"), counts))


def test_a_real_run_counts_its_test_set(compared: Path) -> None:
    run = reader.load_runs([compared]).runs[0]
    labels = load_data("digits").test.y
    assert run.test_counts == np.bincount(labels).tolist() and run.classes == [str(c) for c in range(10)]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0, 1))
@example([0.0, 0.9375], 1.0)  # the margin would have made up for what is missing, and was cut off
def test_an_axis_holds_its_values_and_is_wide_enough(values: list[float], least: float) -> None:
    low, high = share_range(values, least)
    assert 0 <= low <= min(values) + 1e-9 and max(values) - 1e-9 <= high <= 1
    assert high - low >= least - 1e-9


def test_controls_are_the_methods_that_call_themselves_so() -> None:
    said = {name for name, text in registry.algorithms().items() if "a control" in text}
    assert set(registry.CONTROLS) == said | {"public-returned"}  # "what setting it aside costs"


@pytest.mark.parametrize("examples", [1, 6, 360, 10_000])
def test_no_axis_is_closer_than_a_test_set_can_measure(examples: int) -> None:
    span = least_span(examples)
    assert span == pytest.approx(min(1.0, 4 * (0.5 * 0.5 / examples) ** 0.5)) and span >= min(1.0, 2 / examples)


# -- the figure of differences ----------------------------------------------------------------------------------------


def test_the_forest_has_the_paired_differences_of_every_line(four: list[Path]) -> None:
    (forest,) = payload(page_of(*four))["forests"]
    groups = {group.label: group for group in groups_of(*four)}
    titles = ["minus fedavg", "with FNR minus the same method without it"]
    assert [block["title"] for block in forest["blocks"]] == titles
    rows = [row for block in forest["blocks"] for row in block["rows"]]
    assert [row["label"] for row in rows] == ["fedavg + FNR", "scaffold", "scaffold + FNR", "scaffold + FNR"]
    for row in rows:
        found = report_pairs.difference(groups[row["label"]], groups[row["other"]])
        assert found is not None and row["seeds"] == found.n == 3
        numbers = [found.mean, found.low, found.high]
        assert [row[key] for key in ("mean", "low", "high")] == pytest.approx(numbers, rel=1e-4)
    assert not forest["leak"] and forest["compared"] == 4


def test_the_forest_is_there_only_where_there_are_pairs(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a"), fake_run(tmp_path / "b", algorithm="moon", accuracy=0.9)
    assert payload(page_of(a))["forests"] == [] and 'class="forest"' not in page_of(a)
    (forest,) = payload(page_of(a, b))["forests"]
    (row,) = forest["blocks"][0]["rows"]
    assert (row["low"], row["seeds"], row["holds"]) == (None, 1, False)
    assert "There is one seed, so there are no intervals" in Elements(page_of(a, b)).text
    other = fake_run(tmp_path / "c", algorithm="moon", split="other")
    assert payload(page_of(a, other))["forests"] == []


def test_lines_with_leaks_have_a_forest_of_their_own(tmp_path: Path) -> None:
    honest = [fake_run(tmp_path / "a"), fake_run(tmp_path / "b", algorithm="moon")]
    leaks = [leaky(tmp_path / "c"), leaky(tmp_path / "d", fnr="on")]
    assert [forest["leak"] for forest in payload(page_of(*honest, *leaks))["forests"]] == [False, True]


def test_differences_are_paired_and_compared_within_a_setting(four: list[Path], tmp_path: Path) -> None:
    elsewhere = fake_run(tmp_path / "iid", scenario="iid", algorithm="scaffold")
    panel = report_lines.panels_of([reader.read_run(path) for path in [*four, elsewhere]])[0]
    rows = [[cell.text for cell in row] for row in tables.differences(panel).rows]
    short = [[text.removesuffix(", label-dirichlet(0.1)") for text in row[:2]] for row in rows]
    assert short == [
        ["fedavg + FNR", "fedavg"],
        ["scaffold", "fedavg"],
        ["scaffold + FNR", "fedavg"],
        ["scaffold + FNR", "scaffold"],
    ]
    assert rows[1][2] == "+6.1" and rows[1][6:] == ["3", "it holds after correction"]


# -- leaks ------------------------------------------------------------------------------------------------------------


def leaky(path: Path, **keys: object) -> Path:
    return fake_run(path, protocol="paper", dataset="digits", model="mlp", scenario="label-dirichlet(0.1)", **keys)


def test_leaks_are_marked_everywhere_and_ranked_apart(tmp_path: Path) -> None:
    paths = [fake_run(tmp_path / "honest"), leaky(tmp_path / "a", fnr="on", accuracy=0.99), leaky(tmp_path / "b")]
    page = page_of(*paths)
    data = payload(page)
    assert [(len(panel["groups"]), len(panel["leaks"])) for panel in data["panels"]] == [(1, 0), (2, 4)]
    assert 'class="banner leak"' in page and "refined on the test set and its labels" in page
    for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL):
        assert ("fedavg + FNR" in row and "named" in row) <= ('class="tag leak"' in row)
    text = Elements(page).text
    assert "with leaks" in text and "99.0\N{NO-BREAK SPACE}% test accuracy (leak)" in text
    assert "these very examples, labels included: a leak" in text


# -- nothing gets in, nothing gets out --------------------------------------------------------------------------------

EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&\"'"


def evil_run(folder: Path) -> Path:
    path = fake_run(folder / EVIL.replace("/", ""), name=EVIL.replace("/", ""), fnr="on")
    for name in ("events.jsonl", "config.toml"):
        text = (path / name).read_text()
        (path / name).write_text(text.replace('"digits"', json.dumps(EVIL)).replace("made up", json.dumps(EVIL)[1:-1]))
    return path


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    page = page_of(evil_run(tmp_path), title=EVIL)
    found = Elements(page)
    assert not [tag for tag, _ in found.tags if tag in ("img", "iframe", "object", "link")]
    assert [a.get("type") for tag, a in found.tags if tag == "script"] == ["application/json", None]
    assert found.text.count(EVIL) > 3
    assert payload(page)["inside"][0]["label"] == "fedavg + FNR"


def test_the_page_refers_to_nothing_outside(four: list[Path]) -> None:
    page = page_of(*four)
    assert "http:" not in page and "https:" not in page and "@import" not in page and "url(" not in page
    for _, attributes in Elements(page).tags:
        assert "src" not in attributes and str(attributes.get("href", "#")).startswith("#")
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    policy = next(a["content"] for tag, a in Elements(page).tags if a.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'; script-src 'sha256-")


def test_the_page_is_the_same_every_time(four: list[Path]) -> None:
    assert page_of(*four) == page_of(*four)


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


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_forty_runs_make_a_light_page(tmp_path: Path) -> None:
    paths = [
        fake_run(tmp_path / f"{method}-{fnr}-{seed}", rounds=20, clients=10, algorithm=method, fnr=fnr, seed=seed)
        for method in ("fedavg", "fedprox", "scaffold", "moon")
        for fnr in ("off", "on")
        for seed in range(5)
    ]
    assert len(page_of(*paths)) < 600_000


def test_long_and_wide_runs_are_thinned(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path / "long", rounds=300, clients=150, fnr="on"))
    inside, group = payload(page)["inside"][0], payload(page)["panels"][0]["groups"][0]
    assert len(page) < 2_000_000
    assert len(inside["clients"]) == 100 and inside["all"] == 150
    assert inside["norms"]["rounds"][-1] == inside["refined"]["rounds"][-1] == group["rounds"][-1] == 300
    assert len(group["rounds"]) <= 200


# -- figures ----------------------------------------------------------------------------------------------------------


def test_figures_are_pictures_of_every_panel(tmp_path: Path) -> None:
    from fnrfl.results.report import plots

    paths = [
        *seeds(tmp_path, "a", [0.5, 0.6]),
        fake_run(tmp_path / "b", algorithm="moon"),
        leaky(tmp_path / "leak", fnr="on"),
        fake_run(tmp_path / "half", done=1, seed=7),
    ]
    with plots.mpl.rc_context({"text.usetex": True}):  # as a matplotlibrc in the working folder may ask for
        report([tmp_path], tmp_path / "page.html")
    names = {path.name for path in (tmp_path / "page-plots").iterdir()}
    paired = {f"differences.{suffix}" for suffix in ("png", "svg")}  # the leak is alone
    drawn = {f"{n}{p}.{s}" for n in plots.FIGURES for p in ("", "-2") for s in ("png", "svg")}
    assert names == drawn | paired
    assert (tmp_path / "page-plots" / "seeds.png").read_bytes().startswith(b"\x89PNG")
    for path in (tmp_path / "page-plots").glob("*.svg"):
        text = "".join(ElementTree.parse(path).getroot().itertext())
        assert ("leak" in text) == path.stem.endswith("-2")
    assert len(paths) == 5


def test_a_page_that_is_made_again_leaves_no_figures_of_the_one_before(tmp_path: Path) -> None:
    both = [fake_run(tmp_path / "a"), fake_run(tmp_path / "b", data="f")]
    report(both, tmp_path)
    (tmp_path / "plots/mine-2.png").write_text("not fnrfl's")
    assert (tmp_path / "plots/seeds-2.png").exists()
    report(both[:1], tmp_path)
    assert [path.name for path in (tmp_path / "plots").glob("*-2.*")] == ["mine-2.png"]
    assert (tmp_path / "plots/seeds.png").exists()


def test_figures_take_names_as_they_are(tmp_path: Path) -> None:
    from fnrfl.results.report import plots

    label = "_a $x_1^2$ <b>"
    data = charts.payload(
        [report_lines.Panel("x", (report_lines.LineGroup(label, 0, (reader.read_run(evil_run(tmp_path)),)),))]
    )
    first, again = (plots.draw_figures(data, tmp_path / name) for name in ("first", "again"))
    for path, other in zip(first, again, strict=True):
        assert path.read_bytes() == other.read_bytes()
    for name in ("convergence", "seeds"):
        assert label in "".join(ElementTree.parse(tmp_path / "first" / f"{name}.svg").getroot().itertext())


def test_figures_have_the_colours_of_the_page() -> None:
    from fnrfl.results.report import page, plots

    css = (Path(page.__file__).parent / "page.css").read_text()
    assert tuple(re.findall(r"--c\d: light-dark\((#\w+),", css)) == plots.PALETTE
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
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_differ_for_everybody(sight: str, theme: str) -> None:
    """A distance of 2 can be noticed; 10 can be told at a glance."""
    from fnrfl.results.report import page

    css = (Path(page.__file__).parent / "page.css").read_text()
    pairs = re.findall(r"--c\d: light-dark\((#\w+), (#\w+)\)", css)
    colours = [seen(pair[theme == "dark"], sight) for pair in pairs]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colours, 2)) > 10


# -- real runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `fnrfl compare` really leaves behind."""
    from fnrfl.results.compare import compare, grid

    out = tmp_path_factory.mktemp("real") / "grid"
    compare(grid("digits", ["rounds=2", "clients=4"], ["fnr=off,on"], [0, 1], control=False), out, baseline="fnr on")
    return out


def test_a_comparison_says_nothing_about_the_runs_of_another(tmp_path: Path) -> None:
    """Their folders are called alike."""
    for folder, base, rounds in (("a", "scaffold", 2), ("b", "fedprox", 3)):
        runs = [{"cell": name, "group": name} for name in ("fedavg", "scaffold", "fedprox")]
        rows = [{"group": run["group"], "baseline": base} for run in runs]
        for run in runs:
            fake_run(tmp_path / folder / run["cell"], algorithm=run["cell"], rounds=rounds)
        said = {"runs": runs, "rows": rows, "failed": []}
        (tmp_path / folder / "comparison.json").write_text(json.dumps(said))
    runs = reader.load_runs([tmp_path / "a", tmp_path / "b"]).runs
    groups = [group for panel in report_lines.panels_of(runs) for group in panel.groups]
    named = report_pairs.baseline(groups).runs[0].path
    assert named in (tmp_path / "a" / "scaffold", tmp_path / "b" / "fedprox")


def test_a_comparison_decides_its_baseline(compared: Path) -> None:
    found = reader.load_runs([compared])
    panel = report_lines.panels_of(found.runs)[0]
    assert [group.label for group in panel.groups] == ["fedavg", "fedavg + FNR"] and not found.failed
    assert report_pairs.baseline(panel.groups).label == "fedavg + FNR"
    page = page_of(compared)
    assert payload(page)["inside"][1]["change"] is not None
    assert "clients, 115 public, 29 ranking" in page


def test_what_failed_in_a_comparison_is_told(compared: Path, tmp_path: Path) -> None:
    fake_run(tmp_path / "run")
    failure = {"cell": "moon-seed-0", "group": "moon", "seed": 0, "error": "client 3: loss is <nan>"}
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": [], "rows": [], "failed": [failure]}))
    assert "moon-seed-0: client 3: loss is <nan>" in Elements(page_of(tmp_path / "run")).text
    (tmp_path / "comparison.json").write_text("[]")
    with pytest.raises(ConfigError, match="comparison.json is damaged"):
        report([tmp_path / "run"], tmp_path / "p.html")


def test_a_list_of_runs_is_as_good_as_its_runs_one_after_another(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / "a"), fake_run(tmp_path / "b", algorithm="moon")]
    pages = [fnrfl.report(runs, out=tmp_path / "list.html"), fnrfl.report(*runs, out=tmp_path / "words.html")]
    assert pages[0].read_text() == pages[1].read_text()
    with pytest.raises(ConfigError, match="There is no run directory to report on"):
        fnrfl.report([])
