"""The page of the paper's tables: leaks are marked, protocols stay apart, commands run, and nothing gets in."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from chromium import BINARY, Chromium
from fnrfl import cli
from fnrfl.core.errors import ConfigError
from fnrfl.results.reproduce import figures, page_charts
from fnrfl.results.reproduce.carrying import carry_out
from fnrfl.results.reproduce.claims import CLAIMS
from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines, append_line, read_lines
from fnrfl.results.reproduce.page_tables import page_table
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.paper_tables import TABLES
from fnrfl.results.reproduce.reproduction_page import render_page, write_page
from fnrfl.results.reproduce.settings import TRIAL_SETTINGS
from fnrfl.results.reproduce.shown import ShownColumn, ShownPart, ShownTable, ShownValue
from fnrfl.results.reproduce.verdicts import ON_DIGITS, Outcome, find_cells

EVIL = "</script><img src=x onerror=alert(1)>'\"&"
CELLS = list(dict.fromkeys(cell for name in (*TABLES, "claims") for cell in find_cells(name, "tiny")))
NOTHING = KeptLines([], [])


def finished(cell: PaperCell, number: int, **more: Any) -> CellLine:
    """What a finished cell leaves. Its accuracy tells its protocol: 0.8 and more is a leak, less than 0.4 is honest."""
    accuracy = (0.8 if cell.leaks else 0.1) + 0.0002 * number
    about = {"id": cell.id, "recipe": cell.recipe, "overrides": list(cell.overrides), "leaks": list(cell.leaks)}
    engine = {"name": "batched", "precision": "float32", "deterministic": True}
    measured = {
        "accuracy": accuracy, "accuracies": [accuracy] * 3, "clean": accuracy, "noisy": accuracy,
        "seconds_train": 1.25, "seconds_wall": 9.5, "seconds_preparing": 2.0, "bytes_up": 2**20, "bytes_down": 2**20,
    }  # fmt: skip
    machine = {"date": "2026-11-16", "device": "a device", "words": [], "engine": engine}
    return about | measured | machine | {"notes": {}} | more


def all_finished(**more: Any) -> KeptLines:
    return KeptLines([finished(cell, number, **more) for number, cell in enumerate(CELLS)], [])


@dataclass
class Cell:
    """A cell of a table on the page."""

    table: str
    label: str
    value: str
    title: str  # of the table
    text: str = ""
    leak: bool = False

    @property
    def printed(self) -> bool:
        return self.label in ("printed", "published") or ": printed" in self.title

    @property
    def share(self) -> float | None:
        """The accuracy that it shows."""
        match = re.match(r"0\.\d{4}", self.text)
        return float(match[0]) if match and self.table not in ("cost", "claims") else None


@dataclass
class Found(HTMLParser):
    """The cells of every table, each with the number of its table."""

    page: str
    tables: int = 0
    cells: list[tuple[int, Cell]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._inside, self._name, self._title = False, "", ""
        self.feed(self.page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "table":
            self.tables += 1
            self._name, self._title = given["data-table"] or "", given["aria-label"] or ""
        elif tag == "td":
            self._inside = True
            self.cells.append(
                (self.tables, Cell(self._name, given["data-label"] or "", given["data-value"] or "", self._title))
            )
        elif self._inside and given.get("class") == "tag leak":
            self.cells[-1][1].leak = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "td"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.cells[-1][1].text += data


@pytest.fixture(scope="module")
def whole() -> str:
    return render_page(all_finished(), "tiny")


def payload(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return dict(json.loads(match[1]))


# -- leaks and protocols ----------------------------------------------------------------------------------------------


def test_every_value_of_a_run_with_a_leak_has_the_mark_and_no_other_has(whole: str) -> None:
    seen = set()
    for _, cell in Found(whole).cells:
        if cell.share is not None and not cell.printed:
            assert cell.leak == (cell.share >= 0.8), cell
            seen.add(cell.leak)
    assert seen == {True, False}


def test_what_it_cost_to_leak_has_the_mark_too(whole: str) -> None:
    values = [
        cell for _, cell in Found(whole).cells if cell.table == "cost" and cell.label not in ("method", "printed")
    ]
    assert {(cell.label, cell.leak) for cell in values} == {
        ("paper's protocol (leak)", True),
        ("honest protocol", False),
    }
    named = [cell for _, cell in Found(whole).cells if cell.label == "cell"]
    assert {cell.leak == bool(PaperCell.read(cell.value).leaks) for cell in named} == {True}


def test_charts_of_a_run_with_a_leak_say_so() -> None:
    data = payload(render_page(all_finished(), "tiny"))
    for chart in data["curves"]:
        values = [point["y"] for series in chart["series"] for point in series["points"]]
        assert "printed" in chart["title"] or chart["leak"] == (min(values) >= 0.8) == (max(values) >= 0.4)
    for chart in data["waterfalls"]:
        assert chart["leak"] and [bar["leak"] for bar in chart["bars"]] == [False, True, True, True, True]


def test_a_caption_says_what_its_chart_shows_without_the_heads_above_it(whole: str) -> None:
    """It is all that a saved figure has."""
    captions = re.findall(r"<figcaption>(.*?)</figcaption><div[^>]*data-(?:curves|waterfall)", whole)
    assert len(captions) == 7 + 4 and len(set(captions)) == len(captions)
    assert all(" skew" in caption for caption in captions)


def test_a_chart_names_the_lines_that_have_fewer_seeds() -> None:
    runs = [("fedavg", 0), ("fedavg", 1), ("fedavg", 2), ("fedprox", 0)]
    cells = [PaperCell("resnet18", "label", "honest", method, seed, "tiny") for method, seed in runs]
    page = render_page(KeptLines([finished(cell, 1) for cell in cells], []), "tiny")
    assert page.count("Not all seeds have run: FedProx has 0</figcaption>") == 1
    assert page.count("Not all seeds have run") == 1
    some, every = (KeptLines([finished(cell, 1) for cell in cells[:upto]], []) for upto in (None, 3))
    part = TABLES["convergence"].parts[1]
    for lines, names in ((some, ["FedAvg", "FedProx (seed 0 of 3)"]), (every, ["FedAvg"])):
        (drawn,) = figures._convergence(figures._Lookup(lines, "tiny"), part, "honest")
        assert [line.get_label() for line in drawn.figure.axes[0].get_lines()] == names


def test_no_column_has_two_protocols(whole: str) -> None:
    """All but the attribution, which is the paper's protocol with and without its leaks."""
    columns: dict[tuple[int, str], set[str]] = {}
    for table, cell in Found(whole).cells:
        if cell.table == "cells" and cell.label == "cell":
            columns.setdefault((table, "cell"), set()).add(PaperCell.read(cell.value).setting)
        elif cell.share is not None and cell.table not in ("cells", "attribution"):
            kind = "printed" if cell.printed else "paper" if cell.leak else "honest"
            columns.setdefault((table, cell.label), set()).add(kind)
    assert all(len(kinds) == 1 for kinds in columns.values())
    assert {kind for kinds in columns.values() for kind in kinds} == {"printed", "paper", "honest", *TRIAL_SETTINGS}


# -- what is there, and what is not -----------------------------------------------------------------------------------


def test_without_results_everything_is_not_run() -> None:
    page = render_page(NOTHING, "tiny")
    texts = [cell.text for _, cell in Found(page).cells if cell.table == "accuracy" and "protocol" in cell.label]
    assert set(texts) == {"not run"} and len(texts) == 2 * 66
    assert 'class="banner leak"' not in page and payload(page)["waterfalls"] == []
    assert f"0 of {len(CELLS)} cells have run" in page


def test_a_failed_cell_and_one_of_an_older_recipe_are_named() -> None:
    first, second = CELLS[:2]
    older = finished(second, 0, overrides=["rounds=9"])
    page = render_page(KeptLines([finished(first, 0, failed="It did not."), older], []), "tiny")
    told = {cell.text for _, cell in Found(page).cells if cell.table == "waiting" and cell.label == "result"}
    assert told == {"failed: It did not.", "older recipe", "not run"}


def test_every_cell_is_there_once_with_what_it_cost_or_not_run() -> None:
    some = KeptLines([finished(cell, 0) for cell in CELLS[::5]], [finished(cell, 1) for cell in CELLS[1::5]])
    found = Found(render_page(some, "tiny")).cells
    assert sorted(cell.value for _, cell in found if cell.label == "cell") == sorted(cell.id for cell in CELLS)
    devices = [cell.text for _, cell in found if cell.label == "device"]
    assert len(devices) == len(CELLS[::5] + CELLS[1::5])
    assert set(devices) == {"a device (committed)", "a device (computed here)"}


def test_seconds_of_cells_that_ran_beside_others_say_so_and_sort_as_before() -> None:
    def costs(**more: Any) -> tuple[list[Cell], str]:
        page = render_page(all_finished(**more), "tiny")
        return [cell for _, cell in Found(page).cells if cell.label in ("seconds", "all seconds")], page

    alone, page = costs()
    beside, page_beside = costs(processes=3)
    assert len(alone) == 2 * len(CELLS)
    assert [f"{cell.text} beside 2" for cell in alone] == [cell.text for cell in beside]
    assert [cell.value for cell in alone] == [cell.value for cell in beside]
    assert {cell.text.partition(" ")[2] for cell in costs(processes=2)[0]} == {"beside 1"}
    assert {cell.text.partition(" ")[2] for cell in costs(kept_rounds=1)[0]} == {"after a stop"}
    assert {cell.text.partition(" ")[2] for cell in costs(no_measure="fewer programs")[0]} == {"fewer programs"}
    hours, shared = (sum(map(float, re.findall(r"Together ([\d.]+) hours", text))) for text in (page, page_beside))
    assert 0 < shared == pytest.approx(hours / 3, abs=0.03)  # the processes had the time together


def test_spread_over_seeds_is_beside_the_mean(whole: str) -> None:
    cells = [cell for _, cell in Found(whole).cells if cell.table == "accuracy" and cell.label == "honest protocol"]
    assert cells and all(re.fullmatch(r"0\.\d{4} ± 0\.\d{4}\d*", cell.text) for cell in cells)


def test_claims_are_numbers_or_words() -> None:
    """Numbers are columns of numbers, ranges and verdicts are columns of words, and a leak is marked in both."""
    leaks = ("public_is_test",)
    columns = (
        ShownColumn("printed", "printed", (ShownValue("printed", "+66.24%", 0.6624), ShownValue("printed", ""))),
        ShownColumn(
            "range",
            "paper",
            (ShownValue("paper", "+0.1 to +0.2", leaks=leaks), ShownValue("paper", "not run")),
        ),
        ShownColumn("here", "honest", (ShownValue("honest", "0.7 ± 0.1", 0.7, 0.1), ShownValue("honest", "not run"))),
        ShownColumn("verdict", "honest", (ShownValue("honest", "does not hold: 0.1 to 0.2", 0.15),) * 2),
    )
    part = ShownPart("All claims", ("gain: more accuracy", "time: less time"), columns)
    (found,) = page_table(ShownTable("claims", "Claims", "tiny", (part,))).parts
    assert [column.number for column in found.table.columns] == [False, True, False, True, False]
    first = found.table.rows[0][1:]
    assert [(cell.text, cell.beside) for cell in first] == [
        ("+66.24%", ""), ("+0.1 to +0.2", ""), ("0.7", "± 0.1"), ("does not hold: 0.1 to 0.2", "")
    ]  # fmt: skip
    assert [cell.value for cell in first] == [0.6624, "+0.1 to +0.2", 0.7, "does not hold: 0.1 to 0.2"]
    assert [cell.leak for cell in first] == [False, True, False, False] and found.leaks == leaks


def test_every_claim_has_a_verdict_and_a_leak_where_it_leaks(whole: str) -> None:
    cells = [cell for _, cell in Found(whole).cells if cell.table == "claims"]
    verdicts = [cell.text for cell in cells if cell.label == ON_DIGITS]
    assert len(verdicts) == len(CLAIMS) + sum(len(claim.rows) for claim in CLAIMS)
    assert all(verdict.startswith(get_args(Outcome)) for verdict in verdicts)
    for cell in cells:
        computed = re.match(r"[-+]?\d+\.\d", cell.text) is not None and cell.label != "place"
        assert cell.leak == (computed and "leak" in cell.label), cell


def test_digits_stand_in_for_data_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = page_charts.noisy_samples

    def without_cifar10(scale: str) -> Any:
        if scale != "tiny":
            raise ConfigError("There is no cifar10 here.")
        return real(scale)

    monkeypatch.setattr(page_charts, "noisy_samples", without_cifar10)
    chart, words = page_charts.noisy_chart("quick")
    assert "digits" in words and "There is no cifar10 here." in words and chart["shape"] == [6, 3, 8, 8, 1]


def test_the_fifth_client_of_the_label_split_is_the_paper_s() -> None:
    assert page_charts.split_charts("full")[0]["counts"][4] == [504, 2917, 570, 721, 121, 356, 0, 0, 0, 0]


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_page_of_all_cells_is_small_and_loads_nothing(whole: str) -> None:
    assert len(whole.encode()) < 2_000_000
    assert "default-src 'none'" in whole
    assert re.findall(r"(?:src|href)=\"(?!#)", whole) == [] and "http" not in whole.replace("http-equiv", "")


def test_markup_in_a_line_is_text() -> None:
    page = render_page(KeptLines([finished(CELLS[0], 0, device=EVIL)], [finished(CELLS[1], 0, failed=EVIL)]), "tiny")
    assert EVIL not in page and "<img" not in page
    assert any(EVIL in cell.text for _, cell in Found(page).cells)


def test_the_command_of_a_cell_makes_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs as it stands on the page, and what comes out is the model that the page is about."""
    monkeypatch.chdir(tmp_path)
    cell = PaperCell("resnet18", "label", "paper", "fedavg+fnr", 0, "tiny")
    carry_out([cell], Path("lines.jsonl"), lines=NOTHING, words=["engine=loop"])
    page = render_page(KeptLines([], read_lines(Path("lines.jsonl"))), "tiny")
    (command,) = re.findall(r"fnrfl reproduce run \S+ --set engine=loop[^<]*", page)
    assert CliRunner().invoke(cli.app, shlex.split(command)[1:]).exit_code == 0
    (once,), (again,) = read_lines(Path("lines.jsonl")), read_lines(Path("again.jsonl"))
    assert once["model_sha256"] == again["model_sha256"] and once["engine"] == again["engine"]


# -- the command ------------------------------------------------------------------------------------------------------


def typed(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["reproduce", *words])


def test_the_command_writes_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    append_line(Path("other/lines.jsonl"), finished(CELLS[0], 0))
    Path("folder.html").mkdir()
    for words, place in (
        ([], "runs/reproduction/page-tiny.html"),
        (["-o", "deep/mine.html"], "deep/mine.html"),
        (["-o", "folder"], "folder/page-tiny.html"),
        (["-o", "folder.html"], "folder.html/page-tiny.html"),
        (["--lines", "other/lines.jsonl"], "other/page-tiny.html"),
    ):
        answer = typed("page", "--scale", "tiny", *words)
        assert answer.exit_code == 0 and answer.output.split()[-1] == place
        assert Path(place).read_text().startswith("<!doctype html>")
    assert f"1 of {len(CELLS)} cells have run" in Path("other/page-tiny.html").read_text()
    assert "does not exist" in typed("page", "--lines", "none.jsonl").stderr
    Path("notes.txt").write_text("nothing\n")
    answer = typed("page", "--scale", "tiny", "--lines", "notes.txt")
    assert answer.exit_code == 0 and "no line of notes.txt is the result of a cell" in answer.output


def test_the_first_sentence_has_the_control_if_it_has_run() -> None:
    cells = find_cells("accuracy", "quick") + find_cells("controls", "quick")
    for kept in (cells, [cell for cell in cells if cell.method != "fedavg+weight-0"]):
        page = render_page(KeptLines([finished(cell, 0, accuracies=[0.5] * 10) for cell in kept], []), "quick")
        assert ("for FNR without its penalty." in page) == (kept is cells)


def test_other_commands_say_where_the_page_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["rate"], ["run", CELLS[0].id, "--stop-after", "0s"]):
        scale = "quick" if words == ["rate"] else "tiny"
        answer = typed(*words)
        assert f"fnrfl reproduce page --scale {scale} writes" in " ".join(answer.output.split())
    assert "page" not in typed("rate", "--quiet").stderr


def test_results_that_cannot_be_read_are_not_blamed_on_the_page(tmp_path: Path) -> None:
    answer = typed("page", "--lines", str(tmp_path), "--out", str(tmp_path / "page.html"))
    assert answer.exit_code == 2 and "it is not an ordinary file. Choose another file." in answer.stderr


def test_a_page_is_not_written_over_a_file_of_a_run(tmp_path: Path) -> None:
    for name in ("config.toml", "events.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="file of the run"):
        write_page(NOTHING, "tiny", tmp_path / "events.jsonl")
    assert (tmp_path / "events.jsonl").read_text() == ""


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    pytest.importorskip("websocket")
    with Chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most cells have run; some have not, and one has a name that is markup."""
    lines = [finished(cell, number) for number, cell in enumerate(CELLS) if number % 9]
    lines[0]["device"] = EVIL
    return write_page(KeptLines(lines, []), "tiny", tmp_path_factory.mktemp("page") / "page.html")


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="needs chromium, a Debian package")
class TestInABrowser:
    """What only a browser can say."""

    def test_no_error_and_no_request(self, browser: Chromium, file: Path) -> None:
        browser.show(file)
        assert browser.complaints == []
        assert browser.requests == [file.as_uri()]
        assert browser.run("return document.querySelectorAll('img').length") == 0

    def test_every_chart_is_drawn(self, browser: Chromium, file: Path) -> None:
        browser.show(file)
        drawn = "[...document.querySelectorAll('.plot')].map((p) => p.querySelectorAll('svg *, canvas').length)"
        counts = browser.run(drawn)
        assert len(counts) == 7 + 4 + 3 + 1 and min(counts) > 0  # curves, waterfalls, splits, samples

    @pytest.mark.parametrize("width", [1280, 390])
    @pytest.mark.parametrize("dark", [False, True])
    def test_leak_marks_are_seen_and_nothing_sticks_out(
        self, browser: Chromium, file: Path, width: int, dark: bool
    ) -> None:
        browser.show(file, width=width, dark=dark)
        browser.run("document.querySelectorAll('details').forEach((part) => (part.open = true))")
        assert browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        seen = browser.run(
            "return [...document.querySelectorAll('.tag.leak')].every((e) => e.checkVisibility() && e.offsetWidth > 20)"
        )
        assert seen
        red, green, blue = browser.run(
            "return getComputedStyle(document.querySelector('td .tag.leak')).color.match(/\\d+/g).map(Number)"
        )
        assert red > 1.4 * max(green, blue)
        assert browser.run("return document.querySelectorAll('[data-curves] .watermark').length") == 3
        assert browser.run("return document.querySelectorAll('[data-waterfall] tspan.alarm').length") > 0

    def test_tables_sort_both_ways(self, browser: Chromium, file: Path) -> None:
        browser.show(file)
        column = (
            "return [...document.querySelectorAll('[data-table=accuracy]')[0].tBodies[0].rows]"
            ".map((row) => row.cells[3].dataset.value)"
        )
        click = "document.querySelectorAll('[data-table=accuracy]')[0].querySelectorAll('th button')[3].click()"
        before = browser.run(column)
        for reverse in (True, False):
            browser.run(click)
            values = browser.run(column)
            known = [float(value) for value in values if value]
            assert sorted(values) == sorted(before) and len(set(known)) > 3
            assert known == sorted(known, reverse=reverse) and values[len(known) :] == [""] * (len(values) - len(known))
        assert browser.run("return document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "ascending"

    def test_a_saved_table_has_deviations_of_their_own_and_says_which_seeds(
        self, browser: Chromium, tmp_path: Path
    ) -> None:
        runs = [("fedavg+fnr", 0), ("fedavg", 0), ("fedavg", 1), *(("fedprox", seed) for seed in range(3))]
        cells = [PaperCell("resnet18", "feature-0.5", "honest", method, seed, "tiny") for method, seed in runs]
        lines = KeptLines([finished(cell, cell.seed) for cell in cells], [])
        browser.show(write_page(lines, "tiny", tmp_path / "page.html"))
        saved = browser.run(
            "const table = document.querySelector('[data-table=accuracy]');"
            "return { csv: exporting.csv(table), latex: exporting.latex(table) }"
        )
        rows = list(csv.DictReader(saved["csv"].removeprefix("\ufeff").splitlines()))
        heads = [f"honest protocol{what}" for what in ("", ", standard deviation", ", more")]
        assert [[row[head] for head in heads] for row in rows[:3]] == [
            ["0.1000", "", "(seed 0 of 3)"], ["0.1001", "0.0001", "(seeds 0, 1 of 3)"], ["0.1002", "0.0002", ""],
        ]  # fmt: skip
        assert "0.1000 (seed 0 of 3) " in saved["latex"] and r"0.1001 $\pm$ 0.0001 (seeds 0, 1 of 3)" in saved["latex"]

    def test_every_table_has_a_name_and_heads(self, browser: Chromium, file: Path) -> None:
        browser.show(file)
        nameless = (
            "return [...document.querySelectorAll('table')].filter((t) => !t.getAttribute('aria-label')"
            " || [...t.tHead.rows[0].cells].some((c) => c.scope !== 'col' || !c.textContent.trim())).length"
        )
        assert browser.run(nameless) == 0

    def test_on_paper_the_tables_are_open_and_the_lists_of_cells_are_not(self, browser: Chromium, file: Path) -> None:
        browser.show(file)
        count = "return [...document.querySelectorAll('details')].filter((part) => part.open).length"
        before = browser.run(count)
        browser.run("dispatchEvent(new Event('beforeprint'))")
        assert browser.run("return document.querySelectorAll('section:not(#cells) details:not([open])').length") == 0
        browser.run("dispatchEvent(new Event('afterprint'))")
        assert browser.run(count) == before
        assert len(browser.call("Page.printToPDF")["data"]) > 10_000

    def test_markup_is_text(self, browser: Chromium, file: Path) -> None:
        browser.show(file)
        devices = "return [...document.querySelectorAll('td[data-label=device]')].map((cell) => cell.dataset.value)"
        assert EVIL in browser.run(devices)
