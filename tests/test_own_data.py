"""docs/own-data.md: from five hospitals' tables to a page with the accuracy at each of them."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fnrfl.config import load
from test_tutorial import ROOT, steps

PAGE = "docs/own-data.md"
STEPS = list(steps(PAGE))
FILES = {name: text for name, text in STEPS if name != "$"}
COMMANDS = [text for name, text in STEPS if name == "$"]
RUN = Path("runs/hospitals-fedavg-0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files of the page."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    return tmp_path


def typed(command: str) -> str:
    """What a command prints."""
    there = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    there["PYTHONPATH"] = os.environ.get("PYTHONPATH", str(ROOT / "src"))
    done = subprocess.run(["bash", "-c", command], env=os.environ | there, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_it_is_as_short_as_it_says(folder: Path) -> None:
    assert len(COMMANDS) <= 6
    assert len(FILES["from_pandas.py"].splitlines()) <= 15
    assert load("hospitals.toml").run_dir == RUN


def test_the_tables_are_as_awkward_as_the_page_says(folder: Path) -> None:
    exec(FILES["make_hospitals.py"], {"__name__": "__main__"})
    tables = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path("hospitals").iterdir())}
    heads = [text.splitlines()[0].split(",") for text in tables.values()]
    assert len(tables) == len({tuple(head) for head in heads}) == 5 and len({frozenset(head) for head in heads}) == 1
    assert ",," in tables["Évora"] and "day clinic" in tables["Aachen"]


@pytest.mark.slow
def test_the_walk_ends_with_a_page_that_has_each_hospitals_accuracy(folder: Path) -> None:
    printed = [typed(command) for command in COMMANDS]
    sites = json.loads((RUN / "partition.json").read_text(encoding="utf-8"))["ids"]
    assert sites == ["Aachen", "Bergen", "Cádiz", "Delft", "Évora"]
    last = json.loads((RUN / "events.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    for site, accuracy in zip(sites, last["per_site"], strict=True):
        run = printed[COMMANDS.index("fnrfl run hospitals.toml")]
        assert re.search(rf"^{site} +{accuracy:.4f}  \d+ test examples$", run, re.MULTILINE)
        shown = html.unescape(re.sub(r"<[^>]*>", " ", (RUN / "report.html").read_text(encoding="utf-8")))
        assert re.search(rf"{site}\s+\d+\s+{100 * accuracy:.2f}\s", shown), site
    assert Path("runs/together/report.html").is_file()
    with open("guesses.csv", encoding="utf-8") as file:
        assert {row["label"] for row in csv.DictReader(file)} == {"healthy", "heart", "diabetes"}


@pytest.mark.slow
def test_the_same_from_a_data_frame(folder: Path) -> None:
    pytest.importorskip("pandas")
    typed("python make_hospitals.py")
    printed = typed("python from_pandas.py")
    assert "'Cádiz': 0." in printed
    assert Path("runs/frame-fedavg-0/report.html").is_file()
