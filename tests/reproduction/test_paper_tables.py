"""Tables, page and figures: protocols apart, leaks marked, and no word that anything depends on."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fnrfl import statistics
from fnrfl.config import load
from fnrfl.data import scenarios
from fnrfl.data.partition.draw import draw
from fnrfl.runs.setup.build import build
from paper_lines import NOTHING, line_of
from reproduction import __main__ as command
from reproduction import catalogue
from reproduction.catalogue import DATA, SETTINGS, TABLES, TEXTS, Cell
from reproduction.claims import CLAIMS, named_cells, named_table
from reproduction.figures import LEAKS_KEY, draw_all
from reproduction.page import render_page
from reproduction.render import as_json, as_markdown, as_text, value_words
from reproduction.store import Line, Results
from reproduction.tables import Column, Table, Value, make_table

QUICK = Results([line_of(cell) for name in TABLES for cell in named_cells(name, "quick")])
FEDAVG = [Cell("resnet18", "label", "honest", "fedavg", seed, "quick") for seed in range(3)]
COMMITTED = Results.read(Path("none.jsonl"))
FOLDER = DATA.parent
INTERNAL = {"convex_problem.py", "theory.py"}  # which put a problem in float64 together, with steps that no key has


def test_it_is_a_client_of_the_public_api_alone() -> None:
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert path.name in INTERNAL or all(name in ("fnrfl", "fnrfl.method") for name in names if "fnrfl" in name)


MARK = "\N{SECTION SIGN}"


def marked(tree: Any) -> Any:
    """Every text of a tree with a mark at its end."""
    if isinstance(tree, dict):
        return {key: marked(value) for key, value in tree.items()}
    return [marked(one) for one in tree] if isinstance(tree, list) else f"{tree}{MARK}"


def everything(results: Results, scale: str) -> list[str]:
    tables = [named_table(name, results, scale) for name in TABLES]
    return [*map(as_markdown, tables), *map(as_text, tables), render_page(results, scale, {})]


def plain(text: str) -> str:
    """Without marks, images and the widths that go with marks."""
    return " ".join(re.sub(r"data:image/png;base64,[\w+/=]+", "", text.replace(MARK, "")).split())


@pytest.mark.parametrize("scale", ["quick", "tiny"])
def test_a_mark_on_every_word_changes_nothing_else(scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [plain(text) for text in everything(COMMITTED, scale)]
    for section, words in TEXTS.items():
        monkeypatch.setitem(TEXTS, section, marked(words))
    for name, claim in CLAIMS.items():
        rows = [row | {"label": row.get("label", "{skew}") + MARK} for row in claim["rows"]]
        words = {key: claim[key] + MARK for key in ("sentence", "place", "about")}
        monkeypatch.setitem(CLAIMS, name, claim | words | {"rows": rows})
    for key, printed in catalogue.PRINTED.items():
        noted = printed.note + MARK if printed.note else ""
        monkeypatch.setitem(catalogue.PRINTED, key, printed._replace(place=printed.place + MARK, note=noted))
    after = everything(COMMITTED, scale)
    assert sum(text.count(MARK) for text in after) > 1000
    assert [plain(text) for text in after] == before
    assert len(draw_all(COMMITTED, scale)) == (16 if scale == "quick" else 4)


@pytest.mark.parametrize("name", TABLES)
def test_no_column_mixes_protocols_and_every_leak_is_marked_in_every_form(name: str) -> None:
    table = named_table(name, QUICK, "quick")
    values = [value for part in table.parts for value in part.values]
    ran = [value for value in values if value.protocol == "paper" and value.cells]
    assert all(bool(value.leaks) == any(Cell.read(cell).leaks for cell in value.cells) for value in ran)
    assert not any(value.leaks for value in values if value.protocol != "paper")
    leaking = sum(bool(value.leaks) for value in values)
    for text in (as_text(table), as_markdown(table)):
        assert len(re.findall(r" leak( \[| \||$|  )", text, re.MULTILINE)) >= leaking
    tree = json.loads(as_json([table]))["tables"][name]
    assert tree["leaks"] == list(table.leaks) and bool(leaking) == bool(table.leaks)


def test_a_column_refuses_a_value_of_another_protocol() -> None:
    with pytest.raises(ValueError, match="is honest and has values that are"):
        Column("honest", "honest", "honest", (Value("paper"),))


def test_values_say_spread_seeds_and_where_they_are_from() -> None:
    def shown(*known: Line) -> Value:
        return value_in("accuracy", Results(known), "accuracy")

    a, b, c = (line_of(cell, accuracy=0.5 + cell.seed / 10) for cell in FEDAVG)
    assert value_words(shown(a, b, c)) == "0.6000 ± 0.1000"
    assert shown(a, b, c).sources == ("committed 2026-11-16 a device",)
    assert value_words(shown(a, c)) == "0.6000 ± 0.1414 (seeds 0, 2 of 3)" and shown(a, c).missing == (1,)
    assert shown().words == "not run" and shown(replace(a, overrides=["rounds=4"])).words == "older recipe"
    assert shown(replace(a, failed="It diverged.")).sources == (f"{a.id} failed: It diverged.",)


def value_in(table: str, results: Results, metric: str) -> Value:
    part = next(p for p in make_table(table, results, "quick").parts if p.key == ("resnet18", "label", metric))
    value = part.value("fedavg", "honest")
    assert value is not None
    return value


def test_seconds_are_shown_only_where_they_are_a_measure_on_one_device() -> None:
    def cost(lines: list[Line], metric: str) -> Value:
        return value_in("cost", Results(lines), metric)

    alike = [line_of(cell, seconds_train=10.0, accuracy=0.5, bytes_up=2**20) for cell in FEDAVG]
    for metric, words in (("seconds", "10.0 ± 0.0"), ("kappa", "500 ± 0"), ("rho", "5000.0000 ± 0.0000")):
        assert value_words(cost(alike, metric)) == words
    apart = [alike[0], *(replace(line, device="CPU") for line in alike[1:])]
    assert cost(apart, "seconds").words == "several devices" and cost(apart, "mib").number
    beside = [replace(line, processes=3) for line in alike]
    assert cost(beside, "seconds").words == "-" and "no measure" in cost(beside, "kappa").sources[0]


def test_a_table_that_is_wider_than_the_terminal_has_a_line_for_each_value() -> None:
    table = make_table("accuracy", QUICK, "quick")
    narrow = as_text(table, 60)
    assert "\n  printed: 0.9976 [" in narrow and "\n  printed: " not in as_text(table)


def test_no_tiny_run_is_shown_under_the_name_of_the_papers_net() -> None:
    for name in TABLES[:-1]:
        for part in make_table(name, NOTHING, "tiny").parts:
            assert "printed" in part.key or part.title.startswith("a small net in place of")


def test_every_row_of_a_control_is_explained() -> None:
    notes = " ".join(make_table("controls", NOTHING, "quick").notes)
    assert all(f"{name}:" in notes for name in SETTINGS["groups"]["publics"]) and "FNR with weight 0 is" in notes


def test_the_page_opens_offline_has_every_table_and_marks_every_leak() -> None:
    page = render_page(QUICK, "quick", {"split-label": b"image"})
    assert not re.search(r"<script|src=\"(?!data:)|href=\"(?!#)|url\(|@import", page)
    tables: list[Table] = [named_table(name, QUICK, "quick") for name in TABLES]
    assert all(f"<h4>{part.title.replace(chr(39), '&#39;')}" in page for table in tables for part in table.parts)
    rows = re.findall(r"<tr><td>(\S+/seed\d@quick)(.*?)</tr>", page)
    assert len(rows) == len({name for name, _ in rows}) == len(QUICK.committed)
    assert all(("leak</span>" in row) == Cell.read(name).leaks for name, row in rows)
    assert "Content-Security-Policy" in page and len(page) < 4_000_000


def test_without_results_everything_is_not_run_and_markup_is_text() -> None:
    assert all(words in render_page(NOTHING, "full", {}) for words in (" 0 of ", "have not both run"))
    assert "<b>x" not in render_page(Results([line_of(FEDAVG[0], device="<b>x")]), "quick", {})


def test_the_first_sentence_has_the_control_if_it_has_run() -> None:
    page = " ".join(render_page(COMMITTED, "quick", {}).split())
    assert "0.7049 ± 0.0467 for FNR and 0.6286 ± 0.0598 for FedAvg, and 0.7012 ± 0.0503 for FNR without" in page


def test_a_figure_with_a_leak_says_so_and_one_without_does_not() -> None:
    drawn = draw_all(QUICK, "quick")
    assert {name.split("-")[0] for name in drawn} == {"split", "noisy", "convergence", "attribution", "refinement"}
    for name, png in drawn.items():
        assert png.startswith(b"\x89PNG")
        honest = name.endswith("honest") or name.startswith(("split", "noisy"))
        assert ((LEAKS_KEY.encode() + b"\x00none" in png) or name == "noisy-samples") == honest, name
    assert {name.split("-")[0] for name in draw_all(NOTHING, "tiny")} == {"split", "noisy"}


def test_the_split_is_the_one_of_the_papers_figures() -> None:
    known = json.loads((DATA / "splits.json").read_text())
    assert known["quick"]["label"][4] == [504, 2917, 570, 721, 121, 356, 0, 0, 0, 0]
    for skew in ("label", "quantity", "label+quantity"):
        tiny, quick = (Cell("resnet18", skew, "paper", "fedavg", 0, scale) for scale in ("tiny", "quick"))
        assert build(load(tiny.recipe, tiny.overrides)).partition.counts.tolist() == known["tiny"][skew]
        config = load(quick.recipe, quick.overrides)
        labels = np.repeat(np.arange(10), 5_000)  # the draw depends on nothing else of the data
        drawn = draw(scenarios.parse(config.scenario), labels, config.clients, config.seed, num_classes=10)
        assert drawn.counts.tolist() == known["quick"][skew]


def typed(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command.main(words)
    return code, out.getvalue(), err.getvalue()


def test_a_table_runs_what_is_missing_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, ran = ["-o", str(tmp_path / "lines.jsonl")], list[str]()

    def run(cells: list[Cell], path: Path, *, say: Callable[[str], object], **how: Any) -> int:
        ran.extend(cell.id for cell in cells)
        assert how == {"stop_after": 540.0, "on": "here", "workers": 2}
        return 1

    monkeypatch.setattr(command, "run_cells", run)
    code, shown, said = typed("accuracy", "--seeds", "0-1", "--stop-after", "9m", *out)
    assert code == 3 and shown.startswith("Test accuracy under single skews") and "--show computes nothing" in said
    assert ran and all(not COMMITTED.find(Cell.read(name)).usable for name in ran)
    ran.clear()
    assert typed("accuracy", "--show", "--markdown", *out)[1] == as_markdown(make_table("accuracy", COMMITTED, "quick"))
    assert ran == [] and [*json.loads(typed("claims", "--show", "--json", *out)[1])["tables"]] == ["claims"]
    typed("resnet18/label/honest/fedavg/seed7@tiny", "--stop-after", "9m", *out)
    assert ran == ["resnet18/label/honest/fedavg/seed7@tiny"]


@pytest.mark.parametrize("words", [["acuracy", "--show"], ["a/b@tiny", "--show"]])
def test_what_cannot_be_meant_is_answered_in_a_sentence(words: list[str]) -> None:
    with pytest.raises(catalogue.UsageError, match=r"\.$"):
        command.main(words)


def test_the_page_and_the_figures_are_written_beside_the_lines(tmp_path: Path) -> None:
    out = ["--scale", "tiny", "-o", str(tmp_path / "lines.jsonl")]
    assert typed("page", *out)[0] == typed("figures", *out)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"page-tiny.html", "figures-tiny"}
    assert "claims" in typed("list", *out)[1] and "@full" in typed("missing", *out)[1]


@pytest.mark.slow
def test_every_table_at_the_tiny_scale(tmp_path: Path) -> None:
    code, shown, _ = typed("all", "--scale", "tiny", "--seeds", "0", "-o", str(tmp_path / "lines.jsonl"))
    assert code == 0 and "not run" not in shown and "failed" not in shown
    assert statistics.mean([line.accuracy for line in Results.read(tmp_path / "lines.jsonl").here.values()]) > 0.6
    assert (tmp_path / "page-tiny.html").exists()
