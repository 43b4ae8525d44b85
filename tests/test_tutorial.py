"""The notebook and the first hour go from top to bottom as they are written, without Jupyter."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fnrfl.config import load, registry
from fnrfl.process import one_intra_op_thread

DOCS = Path(__file__).parent.parent / "docs"
NOTEBOOK = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]

STORED = [
    "".join(line for output in cell["outputs"] for line in output.get("text", []))
    for cell in NOTEBOOK["cells"]
    if cell["cell_type"] == "code"
]


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that stands for the notebook's __main__, in an empty folder; figures go nowhere."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    monkeypatch.chdir(tmp_path)
    module = ModuleType("tutorial_notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with one_intra_op_thread():
        yield module
    pyplot.close("all")


@pytest.mark.parametrize(("rounds", "least"), [(4, 0.3), pytest.param(15, 0.5, marks=pytest.mark.slow)])
def test_the_notebook_runs(rounds: int, least: float, space: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is, and with fewer rounds."""
    assert sum(source.count("rounds=15,") for source in CODE) == 3
    printed = []
    for number, source in enumerate(CODE):
        source = source.replace("rounds=15,", f"rounds={rounds},")
        exec(compile(source, f"tutorial.ipynb, code cell {number}", "exec"), space.__dict__)
        printed.append(capsys.readouterr().out)
    if rounds == 15:
        assert_alike(printed[1:], STORED[1:])  # the first has the versions of torch and fnrfl
    results: dict[str, Any] = space.results
    assert all(result.accuracy > least for result in results.values())
    assert results["weight 0"].model_sha256 != results["FNR"].model_sha256 != results["FedAvg"].model_sha256
    assert space.mine.config.algorithm.name == "tutorial_notebook:ServerMomentum"
    assert space.mine.accuracy > least
    assert not list(Path.cwd().iterdir()), "the notebook says that it writes nothing"
    assert any("refined with weight 1.0" in text for text in printed)


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def assert_alike(printed: list[str], stored: list[str]) -> None:
    """The same words, and numbers that differ by no more than another processor's rounding can make of them."""
    for mine, theirs in zip(printed, stored, strict=True):
        assert NUMBER.sub("#", mine) == NUMBER.sub("#", theirs)
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in (mine, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.2, abs=0.06)


def test_the_notebook_has_its_outputs_and_nothing_of_a_machine() -> None:
    """What `docs/site/notebook.py` stores: text and pictures; no path, no error, the plain kernel."""
    assert NOTEBOOK["nbformat"] == 4
    assert NOTEBOOK["metadata"]["kernelspec"]["name"] == "python3"
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    assert all(bool(text) == ("print(" in source) for text, source in zip(STORED, CODE, strict=True))
    pictures = [one for cell in cells for one in cell["outputs"] if one["output_type"] == "display_data"]
    assert len(pictures) == sum("plt.show()" in source for source in CODE)
    assert not [text for text in STORED if re.search(r"/(home|tmp|root|work|Users)/|Traceback|Warning", text)]
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


# -- pages that can be typed ------------------------------------------------------------------------------------------

ROOT = DOCS.parent
TYPED = ("README.md", "docs/getting-started.md")
SET_UP = ("git clone", "cd fnrfl", "make ", "source ", "pip ")  # what a reader does once; here it is done
SILENT = ("#", "")  # what a shell passes over


def steps(page: str) -> Iterator[tuple[str, str]]:
    """Files to write (name, text) and commands to type ("$", command), in the order of the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for info, body in re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        match info.split():
            case ["python", "runnable"]:
                yield "typed.py", body
                yield "$", "python typed.py"
            case ["python", "runnable", name] | ["toml", name]:
                yield name, body
            case ["console"] | []:
                dollar = r"\$ " if info else ""
                commands = re.findall(rf"^{dollar}(.*)$", body.replace("\\\n", ""), re.MULTILINE)
                commands = [command for command in commands if command.strip()[:1] not in SILENT]
                yield from (("$", command) for command in commands if not command.startswith(SET_UP))


def runs_of(page: str) -> dict[str, list[str]]:
    """The words of every `fnrfl run` of a page, by the folder that the run is kept in."""
    found: dict[str, list[str]] = {}
    for what, text in steps(page):
        words = shlex.split(text)
        if what != "$" or words[:2] != ["fnrfl", "run"] or "--dry-run" in words:
            continue
        named = words[words.index("-o") + 1] if "-o" in words else None
        keys = [word for word in words[2:] if "=" in word]
        recipe = words[2] if len(words) > 2 and words[2] in registry.recipes() else None
        config = load(recipe, keys)
        assert config.dataset.name in ("digits", "fruit.csv"), "data that is not there"
        folder = named or str(config.run_dir)
        assert folder not in found, f"{folder} would get a number on {page}: the commands no longer say what is printed"
        found[folder] = words
    return found


@pytest.mark.parametrize("page", TYPED)
def test_folders_on_a_page_are_those_that_its_commands_make(page: str, tmp_path: Path) -> None:
    (tmp_path / "nets.py").touch()
    made = set(runs_of(page))
    assert len(made) > 3
    text = (ROOT / page).read_text(encoding="utf-8")
    told = re.findall(r"kept in (runs/\S+)$", text, re.MULTILINE)
    used = re.findall(r"^\$ (?:ls|fnrfl (?:evaluate|predict|report|resume)) (.*)$", text, re.MULTILINE)
    folders = {*told, *(word for line in used for word in line.split() if word.startswith("runs/"))}
    assert folders - made <= {"runs/methods"}


@pytest.mark.slow
@pytest.mark.parametrize("page", TYPED)
def test_a_page_can_be_typed_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    bin = Path(sys.executable).parent
    source = ROOT / "src"
    path = {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": os.environ.get("PYTHONPATH", str(source))}
    found = list(steps(page))
    assert sum(what == "$" for what, _ in found) > 5
    for what, text in found:
        if what != "$":
            (tmp_path / what).write_text(text, encoding="utf-8")
            continue
        done = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"$ {text}\n{done.stdout}{done.stderr}"
    for folder in runs_of(page):
        assert (tmp_path / folder / "model.safetensors").is_file(), folder
