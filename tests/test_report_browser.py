"""The report page in a real browser: it draws, sorts, folds, saves, answers pointer and keys, and asks nobody."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from chromium import BINARY, Chromium
from fake_runs import EVIL, evil_run, fake_run, leaky, payload, say_test_counts, seeds
from fnrfl.results.report import report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="needs chromium, a Debian package"),
]
SVG = "{http://www.w3.org/2000/svg}"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(22, 24, 27)"  # paper


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods bare and refined, three seeds; one run with feature noise, an unfinished one, and two with leaks."""
    folder = tmp_path_factory.mktemp("runs")
    for a, algorithm in enumerate(("fedavg", "scaffold")):
        for f, fnr in enumerate(("off", "on")):
            accuracies = [0.7 + 0.06 * a - 0.02 * f + 0.01 * seed * (1 + f) for seed in range(3)]
            for run in seeds(folder, f"{algorithm}-{fnr}", accuracies, algorithm=algorithm, fnr=fnr):
                say_test_counts(run, [16, 12, 8, 4])
    fake_run(folder / "noise", scenario="feature-noise(0.5)", clean=True, fnr="on")
    fake_run(folder / "half", done=1, seed=9)
    leaky(folder / "leak", fnr="on")
    leaky(folder / "leak-bare")
    return report([folder], folder / "page.html", plots=False)


def count(browser: Chromium, selector: str) -> int:
    return int(browser.run(f"document.querySelectorAll({json.dumps(selector)}).length"))


def unfold(browser: Chromium) -> None:
    """Open all that is folded, and wait until its figures are drawn."""
    browser.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")


def test_every_chart_is_drawn_without_error_or_request(browser: Chromium, page: Path) -> None:
    browser.show(page)
    unfold(browser)
    assert browser.complaints == [] and browser.requests == [page.as_uri()]
    empty = """[...document.querySelectorAll(".plot")]
        .filter((p) => !p.closest("[hidden]") && !p.querySelector("svg *")).length"""
    assert browser.run(empty) == 0
    assert count(browser, ".plot") == 29 and count(browser, "[data-forest]") == 2


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_sticks_out(browser: Chromium, page: Path, width: int) -> None:
    """Tables of numbers scroll inside their frame; all else stays within the page."""
    browser.show(page, width=width)
    unfold(browser)
    assert browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    outside = """const main = document.querySelector("main"), frame = main.getBoundingClientRect();
        const pad = parseFloat(getComputedStyle(main).paddingLeft) - 2;
        return [...main.querySelectorAll("svg text, td, th, p, button")]
        .filter((e) => e.getClientRects().length && !e.closest(".scroll table:not(.still)"))
        .map((e) => [e, e.getBoundingClientRect()])
        .filter(([, r]) => r.left < frame.left + pad || r.right > frame.right - pad)
        .map(([e]) => e.textContent)"""
    assert browser.run(outside) == []


def test_tables_sort_both_ways(browser: Chromium, page: Path) -> None:
    browser.show(page)
    heads = browser.run("[...document.querySelectorAll('[data-table=results] th')].map((h) => h.textContent)")

    def sorted_by(name: str) -> list[str]:
        place = heads.index(name)
        browser.click(f"[data-table=results] th:nth-child({place + 1}) button")
        rows = "[...document.querySelector('[data-table=results]').tBodies[0].rows]"
        return list(browser.run(f"{rows}.map((r) => r.cells[{place}].dataset.value)"))

    values = [float(value) for value in sorted_by("accuracy, %")]
    assert values == sorted(values, reverse=True) and len(set(values)) > 3
    assert browser.run("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
    assert [float(value) for value in sorted_by("accuracy, %")] == sorted(values)
    names = sorted_by("method")
    assert names == sorted(names, key=str.lower)
    worst = sorted_by("worst_client, %")
    assert worst[0] != "" and worst[-1] == ""  # what has no value stays at the end


def test_hovering_tells_the_values_of_a_round(browser: Chromium, page: Path) -> None:
    browser.show(page)
    browser.hover("[data-chart=rounds] svg")
    assert browser.seen("#tip") and browser.text("#tip b") == "round 2"
    texts = "[r.querySelector('.label'), r.querySelector('em')].map((e) => e.textContent)"
    told = dict(browser.run(f"[...document.querySelectorAll('#tip div')].map((r) => {texts})"))
    for group in payload(page.read_text())["panels"][0]["groups"]:
        if len(group["rounds"]) > 1:
            assert told[group["label"]].startswith(f"{100 * group['curves']['accuracy']['mean'][1]:.2f} %")
    browser.hover("h1")
    assert not browser.seen("#tip")


def test_arrow_keys_walk_through_a_chart(browser: Chromium, page: Path) -> None:
    browser.show(page)
    chart = "[data-chart=rounds] svg"
    for key, title in (("ArrowRight", "round 1"), ("ArrowRight", "round 2"), ("End", "round 3")):
        browser.press(chart, key)
        assert browser.text("#tip b") == title
    browser.press(chart, "Escape")
    assert not browser.seen("#tip")


def test_a_legend_hides_a_line_and_another_measure_is_one_click_away(browser: Chromium, page: Path) -> None:
    browser.show(page)
    lines = "[data-chart=rounds][data-panel='0'] path.line"
    before = count(browser, lines)
    browser.click("[data-legend='0'] button")
    assert count(browser, lines) == before - 1
    assert browser.seen("[data-legend='0'] button[aria-pressed=false]")
    chosen = "#choices button[aria-pressed=true]"
    assert browser.text(chosen) == "accuracy"
    browser.click("#choices button:last-child")
    assert browser.text(chosen) == "loss" and "cross-entropy" in browser.text("#said")


def test_one_run_after_another_is_shown_from_inside(browser: Chromium, page: Path) -> None:
    browser.show(page)
    names = browser.run("[...document.querySelectorAll('#inside-picker option')].map((o) => o.textContent)")
    assert browser.run("document.getElementById('inside-picker').selectedOptions[0].textContent") == (
        "FedAvg + FNR, seed 0"
    )
    assert browser.seen("[data-inside=refined]") and browser.text("#inside-round-name") == "round 3"
    browser.press("#inside-round", "ArrowLeft")
    assert browser.text("#inside-round-name") == "round 2"
    plain = next(place for place, name in enumerate(names) if name.startswith("SCAFFOLD, "))
    browser.run(
        f"""const picker = document.getElementById("inside-picker");
        picker.value = {plain}; picker.dispatchEvent(new Event("change")); return 1"""
    )
    assert not browser.seen("[data-inside=refined]") and browser.seen("[data-inside=bare]")
    assert any(name.endswith("(leak)") for name in names)
    assert browser.complaints == []


def test_markup_in_names_is_shown_as_text(browser: Chromium, tmp_path: Path) -> None:
    evil = evil_run(tmp_path)
    browser.show(report([evil], tmp_path / "evil.html", title=EVIL, plots=False))
    assert browser.text("h1") == EVIL and browser.run("document.title") == EVIL
    assert count(browser, "img") == 0 and count(browser, "script") == 2
    assert browser.complaints == []
    # should anything get in after all, the page's own policy stops it
    browser.run("const s = document.createElement('script'); s.textContent = 'window.got = 1'; document.body.append(s)")
    assert browser.run("window.got === undefined")


def test_leaks_are_visible(browser: Chromium, page: Path) -> None:
    browser.show(page)
    assert browser.seen(".banner.leak")
    assert count(browser, "[data-legend='2'] .tag.leak") == 4 and count(browser, "[data-legend='0'] .tag.leak") == 0
    assert count(browser, "[data-panel='2'] .watermark") == 7
    assert count(browser, "[data-forest='0'] .watermark") == 0 and count(browser, "[data-forest='1'] .watermark") == 1


# -- light and dark ---------------------------------------------------------------------------------------------------


def test_dark_follows_the_system_and_the_button(browser: Chromium, page: Path) -> None:
    def paper() -> str:
        return str(browser.run("getComputedStyle(document.body).backgroundColor"))

    browser.show(page)
    assert paper() == LIGHT
    browser.show(page, dark=True)
    assert paper() == DARK
    browser.click("#theme")
    assert paper() == LIGHT
    browser.show(page, dark=True)
    assert paper() == LIGHT  # it is remembered
    browser.click("#theme")
    assert paper() == DARK
    browser.run("localStorage.clear()")


CONTRAST = """
const parts = (c) => c.match(/[\\d.]+/g).map(Number);
const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const light = (colour) => colour.slice(0, 3).map((v) => linear(v / 255))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const over = (top, under, a) => top.slice(0, 3).map((v, i) => a * v + (1 - a) * under[i]);
const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
const paper = parts(getComputedStyle(document.body).backgroundColor);
function behind(e) {
  for (; e; e = e.parentElement) {
    const c = parts(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  }
  return paper;
}
const found = [];
const texts = "p, td span, th button, summary, figcaption, a, label, dd, .exports button, .tag, text:not(.watermark)";
for (const e of document.querySelectorAll(texts)) {
  if (!e.getClientRects().length || !e.textContent.trim() || e.closest("[aria-pressed=false]")) continue;
  const looks = getComputedStyle(e);
  let under = behind(e);
  if (e.classList.contains("in-cell")) {
    const cell = e.previousElementSibling, opacity = parseFloat(getComputedStyle(cell).fillOpacity);
    const empty = cell.classList.contains("cell") ? cell.previousElementSibling : cell;
    under = over(parts(getComputedStyle(cell).fill), parts(getComputedStyle(empty).fill), opacity);
  }
  const own = parts(e.namespaceURI.endsWith("svg") ? looks.fill : looks.color);
  found.push([ratio(own, under), e.textContent.trim().slice(0, 40)]);
}
return found.sort((a, b) => a[0] - b[0]).slice(0, 5).concat([[found.length, ""]]);
"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_can_be_read(browser: Chromium, page: Path, dark: bool) -> None:
    """4.5 is what the WCAG ask of text; that includes numbers in the cells of heat-maps."""
    browser.show(page, dark=dark)
    unfold(browser)
    *worst, (number, _) = browser.run(CONTRAST)
    assert number > 300
    assert min(ratio for ratio, _ in worst) >= 4.4, worst


# -- a phone ----------------------------------------------------------------------------------------------------------


def test_on_a_phone_curves_come_first_and_the_rest_is_folded(browser: Chromium, page: Path) -> None:
    browser.show(page, width=390)
    assert browser.seen(".skew svg") and browser.seen("[data-chart=rounds] svg path.line")
    assert not browser.seen("[data-chart=seeds]") and not browser.seen("[data-forest]")
    assert browser.run("document.querySelectorAll('details.fold[open]').length") == 1
    browser.click("#cost summary")
    assert browser.seen("[data-chart=mib]")
    browser.run("document.querySelector('nav a[href=\"#results\"]').click()")
    unfold(browser)
    assert browser.seen("[data-table=results]") and browser.seen("[data-chart=seeds] svg")


# -- axes and colours -------------------------------------------------------------------------------------------------


def test_an_axis_shows_no_less_than_the_test_set_can_measure(browser: Chromium, tmp_path: Path) -> None:
    """40 test examples and accuracies that differ by a thousandth: ticks cover what 40 examples leave open."""
    runs = [fake_run(tmp_path / f"r{s}", seed=s, accuracy=0.8 + 0.001 * s) for s in range(2)]
    browser.show(report(runs, tmp_path / "p.html", plots=False))
    ticks = browser.run("[...document.querySelectorAll('[data-chart=seeds] text')].map((t) => t.textContent)")
    shown = [float(match[1]) for tick in ticks if (match := re.fullmatch(r"([\d.]+) %", tick))]
    assert max(shown) - min(shown) >= 20


def test_what_a_guess_reaches_is_drawn(browser: Chromium, page: Path) -> None:
    browser.show(page)
    names = browser.run("[...document.querySelectorAll('[data-panel=\"0\"] .rule-name')].map((t) => t.textContent)")
    assert any("majority class 40.0 %" in name for name in names) and any("chance 25.0 %" in name for name in names)
    assert count(browser, "[data-chart=rounds][data-panel='0'] .rule") == 2


# -- what can be saved ------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_is_saved_with_numbers_that_a_program_reads(browser: Chromium, page: Path, tmp_path: Path) -> None:
    browser.show(page)
    grid = rows_of(browser.save("#results .scroll + .exports button", tmp_path / "saved"))
    assert [row["method"] for row in grid] == ["FedAvg", "FedAvg + FNR", "SCAFFOLD", "SCAFFOLD + FNR"]
    assert grid[0]["skewed classes"] and not grid[0]["noise on the inputs"]
    browser.run("document.querySelector('[data-table=results]').closest('.scroll').nextElementSibling.id = 'first'")
    saved = browser.save("#first button", tmp_path / "saved")
    assert saved.name == "results.csv"
    rows = {row["method"]: row for row in rows_of(saved)}
    cells = browser.run(
        "[...document.querySelector('[data-table=results]').tBodies[0].rows]"
        ".map((r) => [r.cells[0].querySelector('.named') ? r.cells[0].dataset.value : '', r.cells[2].dataset.value])"
    )
    for name, value in cells:
        if name:
            assert float(rows[name]["accuracy, %"]) == pytest.approx(100 * float(value), abs=0.005)
    assert rows["FedAvg"]["accuracy, %, standard deviation"] == "1.00"
    assert rows["majority class"]["accuracy, %"] == "40.00"
    assert browser.complaints == [] and browser.requests == [page.as_uri()]
    unfold(browser)  # an interval is saved as two numbers
    browser.run("document.querySelector('[data-table=differences]').closest('.scroll').nextElementSibling.id = 'here'")
    row = rows_of(browser.save("#here button", tmp_path / "saved"))[0]
    low, mean, high = (float(row[name]) for name in ("95 % interval, low", "points", "95 % interval, high"))
    assert low < mean < high


def test_leaks_are_in_everything_that_is_saved(browser: Chromium, page: Path, tmp_path: Path) -> None:
    browser.show(page)
    unfold(browser)
    browser.run(
        """const table = [...document.querySelectorAll("[data-table=results]")].at(-1);
        table.closest(".scroll").nextElementSibling.id = "table";
        document.querySelector("[data-chart=seeds][data-panel='2'] + .exports").id = "figure"; return 1"""
    )
    saved = browser.save("#table button:first-child", tmp_path / "saved")
    assert saved.name == "results-3-leak.csv"
    assert {row["method"]: row["leak"] for row in rows_of(saved)} == {
        "FedAvg": "leak", "FedAvg + FNR": "leak", "chance": "",
    }  # fmt: skip
    tex = browser.save("#table button:last-child", tmp_path / "saved").read_text()
    assert tex.count(r"\textsuperscript{leak}") == 2 and "% leak:" in tex
    figure = browser.save("#figure button", tmp_path / "saved")
    assert figure.name.endswith("-leak.svg")
    assert "leak: not what an honest run would reach" in "".join(ElementTree.parse(figure).getroot().itertext())


@pytest.mark.parametrize("dark", [False, True])
def test_a_figure_is_saved_whole_and_light(browser: Chromium, page: Path, tmp_path: Path, dark: bool) -> None:
    browser.show(page, dark=dark)
    root = ElementTree.parse(browser.save("[data-chart=rounds] + .exports button", tmp_path / "saved")).getroot()
    assert root.tag == f"{SVG}svg"
    text = "".join(root.itertext())
    assert "SCAFFOLD + FNR" in text and "round" in text and "leak:" not in text
    assert "var(" not in ElementTree.tostring(root, encoding="unicode")
    assert root.find(f"{SVG}rect").get("fill") == LIGHT  # type: ignore[union-attr]
    strokes = {path.get("stroke") for path in root.iter(f"{SVG}path")}
    assert "rgb(0, 114, 178)" in strokes  # the first colour of the light page
    assert browser.run("getComputedStyle(document.body).backgroundColor") == (DARK if dark else LIGHT)


def test_every_table_and_figure_can_be_saved(browser: Chromium, page: Path) -> None:
    browser.show(page)
    unfold(browser)
    kinds = browser.run(
        """const all = [...document.querySelectorAll(".exports button")].map((b) => b.textContent);
        return ["CSV", "LaTeX", "SVG"].map((kind) => all.filter((one) => one === kind).length)"""
    )
    assert kinds == [count(browser, "table"), count(browser, "table"), count(browser, ".plot")]
    saved = browser.run(
        """return [...document.querySelectorAll(".plot > svg")].filter((one) => one.children.length)
        .map((one) => exporting.svg(one, "a figure"))"""
    )
    assert all(ElementTree.fromstring(one).tag == f"{SVG}svg" for one in saved) and len(saved) >= 15


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "＝1+1", " =1+1", 'say "x", =2', "50 % & $x_1^2$ #~{}\\"]


def test_text_that_a_spreadsheet_would_run_is_saved_as_text_and_tex_is_escaped(browser: Chromium, page: Path) -> None:
    browser.show(page)
    saved: dict[str, Any] = browser.run(
        f"""const names = {json.dumps(FORMULAS)};
        const table = document.createElement("table");
        table.dataset.table = "made";
        const [head, body] = [table.createTHead().insertRow(), table.createTBody()];
        for (const name of ["=name", "number"]) {{
          const th = document.createElement("th");
          th.textContent = name;
          head.append(th);
        }}
        head.cells[1].className = "number";
        for (const name of names) {{
          const row = body.insertRow();
          row.insertCell().textContent = name;
          row.insertCell().textContent = "\\u22121,234.5";
        }}
        return {{ csv: exporting.csv(table), latex: exporting.latex(table) }}"""
    )
    head, *rows = csv.reader(saved["csv"].removeprefix("\ufeff").splitlines())
    assert head == ["'=name", "number"]
    assert [row[1] for row in rows] == ["-1234.5"] * len(FORMULAS)
    told = [row[0] for row in rows]
    assert told[:6] == [f"'{name.strip()}" for name in FORMULAS[:6]] and told[6:] == FORMULAS[6:]
    escaped = r"50 \% \& \$x\_1\textasciicircum{}2\$ \#\textasciitilde{}\{\}\textbackslash{}"
    assert rf"{escaped} & $-$1,234.5 \\" in saved["latex"]
