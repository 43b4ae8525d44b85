"""The report page in a real browser: it draws, sorts, answers pointer and keys, and asks nobody for anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fnrfl.results.report import report
from test_report import EVIL, evil_run, fake_run, leaky, payload

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver, both Debian packages"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-sync",
        "--no-first-run",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods bare and refined, three seeds; one run with feature noise, an unfinished one, and two with leaks."""
    folder = tmp_path_factory.mktemp("runs")
    for a, algorithm in enumerate(("fedavg", "scaffold")):
        for f, fnr in enumerate(("off", "on")):
            for seed in range(3):
                accuracy = 0.7 + 0.06 * a - 0.02 * f + 0.01 * seed
                fake_run(
                    folder / f"{algorithm}-{fnr}-{seed}", accuracy=accuracy, algorithm=algorithm, fnr=fnr, seed=seed
                )
    fake_run(folder / "noise", scenario="feature-noise(0.5)", clean=True, fnr="on")
    fake_run(folder / "half", done=1, seed=9)
    leaky(folder / "leak", fnr="on")
    leaky(folder / "leak-bare")
    return report([folder], folder / "page.html", plots=False)


def show(browser: Any, page: Path, *, width: int = 1280, dark: bool = False) -> None:
    """Open the page in a window of this width; what was logged before is forgotten."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in media.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def test_no_error_and_no_request(browser: Any, page: Path) -> None:
    show(browser, page)
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert asked == [page.as_uri()]


def test_every_chart_is_drawn(browser: Any, page: Path) -> None:
    show(browser, page)
    empty = browser.execute_script(
        """return [...document.querySelectorAll(".plot")]
        .filter((p) => !p.closest("[hidden]") && !p.querySelector("svg *")).length"""
    )
    assert empty == 0
    assert browser.execute_script("return document.querySelectorAll('.plot').length") == 19


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_sticks_out(browser: Any, page: Path, width: int) -> None:
    show(browser, page, width=width)
    browser.execute_script("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert (
        browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
        == 0
    )
    outside = browser.execute_script(
        """const main = document.querySelector("main"), frame = main.getBoundingClientRect();
        const pad = parseFloat(getComputedStyle(main).paddingLeft) - 2;
        return [...main.querySelectorAll("svg text, td, th, p, button")].filter((e) => e.getClientRects().length)
        .map((e) => [e, e.getBoundingClientRect()])
        .filter(([, r]) => r.left < frame.left + pad || r.right > frame.right - pad)
        .map(([e]) => e.textContent)"""
    )
    assert outside == []


def test_tables_sort_both_ways(browser: Any, page: Path) -> None:
    show(browser, page)
    table = find(browser, "[data-table=results]")

    def column(index: int) -> list[str]:
        cells = table.find_elements("css selector", f"tbody td:nth-child({index + 1})")
        return [cell.get_attribute("data-value") for cell in cells]

    heads = table.find_elements("css selector", "th button")
    place = [head.text for head in heads].index("accuracy, %")
    heads[place].click()
    values = [float(value) for value in column(place)]
    assert values == sorted(values, reverse=True) and len(set(values)) > 3
    assert table.find_element("css selector", "th[aria-sort]").get_attribute("aria-sort") == "descending"
    heads[place].click()
    assert [float(value) for value in column(place)] == sorted(values)
    heads[0].click()
    assert column(0) == sorted(column(0))
    clean = [head.text for head in heads].index("clean, %")
    heads[clean].click()
    assert column(clean)[0] != "" and column(clean)[-1] == ""  # what has no value stays at the end


def test_hovering_tells_the_values_of_a_round(browser: Any, page: Path) -> None:
    from selenium.webdriver import ActionChains

    show(browser, page)
    chart = find(browser, "[data-chart=rounds] svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    ActionChains(browser).move_to_element(chart).perform()
    tip = find(browser, "#tip")
    assert tip.is_displayed() and tip.find_element("css selector", "b").text == "round 2"
    told = {row.find_element("css selector", "span").text: row.find_element("css selector", "em").text
            for row in tip.find_elements("css selector", "div")}  # fmt: skip
    for group in payload(page.read_text())["panels"][0]["groups"]:
        if len(group["rounds"]) > 1:
            assert told[group["label"]].startswith(f"{100 * group['curves']['accuracy']['mean'][1]:.2f} %")
    ActionChains(browser).move_to_element(find(browser, "h1")).perform()
    assert not tip.is_displayed()


def test_arrow_keys_walk_through_a_chart(browser: Any, page: Path) -> None:
    from selenium.webdriver import Keys

    show(browser, page)
    chart = find(browser, "[data-chart=rounds] svg")
    tip = find(browser, "#tip")
    for key, title in ((Keys.ARROW_RIGHT, "round 1"), (Keys.ARROW_RIGHT, "round 2"), (Keys.END, "round 3")):
        chart.send_keys(key)
        assert tip.find_element("css selector", "b").text == title
    chart.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()


def test_a_legend_hides_a_line(browser: Any, page: Path) -> None:
    show(browser, page)
    count = "return document.querySelectorAll('[data-chart=rounds][data-panel=\"0\"] path.line').length"
    before = browser.execute_script(count)
    find(browser, "[data-legend='0'] button").click()
    assert browser.execute_script(count) == before - 1
    assert find(browser, "[data-legend='0'] button").get_attribute("aria-pressed") == "false"


def test_another_measure_is_one_click_away(browser: Any, page: Path) -> None:
    show(browser, page)
    chosen = find(browser, "[data-choices='0'] button[aria-pressed=true]")
    assert chosen.text == "accuracy"
    loss = browser.find_elements("css selector", "[data-choices='0'] button")[-1]
    loss.click()
    assert loss.get_attribute("aria-pressed") == "true"
    assert "cross-entropy" in find(browser, "[data-said='0']").text


def test_one_run_after_another_is_shown_from_inside(browser: Any, page: Path) -> None:
    from selenium.webdriver.support.select import Select

    show(browser, page)
    picker = Select(find(browser, "#inside-picker"))
    names = [option.text for option in picker.options]
    assert picker.first_selected_option.text == "fedavg + FNR, label-dirichlet(0.1), seed 0"
    assert find(browser, "[data-inside=refined]").is_displayed()
    slider = find(browser, "#inside-round")
    assert find(browser, "#inside-round-name").text == "round 3"
    slider.send_keys(webdriver.Keys.ARROW_LEFT)
    assert find(browser, "#inside-round-name").text == "round 2"
    picker.select_by_visible_text(next(name for name in names if name.startswith("scaffold, ")))
    assert not find(browser, "[data-inside=refined]").is_displayed()
    assert find(browser, "[data-inside=bare]").is_displayed()
    assert any(name.endswith("(leak)") for name in names)
    assert browser.get_log("browser") == []


def test_dark_follows_the_system_and_the_button(browser: Any, page: Path) -> None:
    def paper() -> str:
        return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))

    light, dark = "rgb(255, 255, 255)", "rgb(22, 24, 27)"
    show(browser, page)
    assert paper() == light
    show(browser, page, dark=True)
    assert paper() == dark
    find(browser, "#theme").click()
    assert paper() == light
    browser.refresh()
    assert paper() == light  # it is remembered
    find(browser, "#theme").click()
    assert paper() == dark
    browser.execute_script("localStorage.clear()")


def test_markup_in_names_is_shown_as_text(browser: Any, tmp_path: Path) -> None:
    evil = evil_run(tmp_path)
    show(browser, report([evil], tmp_path / "evil.html", title=EVIL, plots=False))
    assert find(browser, "h1").text == EVIL
    assert browser.title == EVIL
    assert browser.find_elements("css selector", "img") == []
    assert len(browser.find_elements("css selector", "script")) == 2
    assert browser.get_log("browser") == []


def test_no_other_script_may_run(browser: Any, page: Path) -> None:
    """Should anything get in after all, the page's own policy stops it."""
    show(browser, page)
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.got = 1'; document.body.append(s)"
    )
    assert browser.execute_script("return window.got === undefined")


def test_leaks_are_visible(browser: Any, page: Path) -> None:
    show(browser, page)
    assert find(browser, ".banner.leak").is_displayed()
    assert len(browser.find_elements("css selector", "[data-legend='1'] .tag.leak")) == 4
    assert browser.find_elements("css selector", "[data-legend='0'] .tag.leak") == []
    assert browser.execute_script("return document.querySelectorAll('[data-panel=\"1\"] .watermark').length") == 7
