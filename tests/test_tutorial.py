"""The notebook and the first hour go from top to bottom as they are written, without Jupyter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fnrfl.core.isolation import one_intra_op_thread

DOCS = Path(__file__).parent.parent / "docs"
NOTEBOOK = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


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


def test_the_notebook_runs(space: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for number, source in enumerate(CODE):
        exec(compile(source, f"tutorial.ipynb, code cell {number}", "exec"), space.__dict__)
    results: dict[str, Any] = space.results
    assert all(result.accuracy > 0.5 for result in results.values())
    assert results["weight 0"].model_sha256 != results["FNR"].model_sha256 != results["FedAvg"].model_sha256
    assert space.mine.config.algorithm.name == "tutorial_notebook:ServerMomentum"
    assert space.mine.accuracy > 0.5
    assert not list(Path.cwd().iterdir()), "the notebook says that it writes nothing"
    assert "refined with weight 1.0" in capsys.readouterr().out


def test_the_notebook_is_clean() -> None:
    """Nothing of the machine on which it was written: no outputs, no counts, the plain kernel."""
    assert NOTEBOOK["nbformat"] == 4
    assert NOTEBOOK["metadata"]["kernelspec"]["name"] == "python3"
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


# -- the first hour ---------------------------------------------------------------------------------------------------

PAGE = (DOCS / "getting-started.md").read_text(encoding="utf-8")
SET_UP = ("git clone", "cd fnrfl", "make ", "source ")  # what a reader does once; here it is done


def steps(page: str) -> Iterator[tuple[str, str]]:
    """Files to write (name, text) and commands to type ("$", command), in the order of the page."""
    for info, body in re.findall(r"^```([^\n]*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        match info.split():
            case ["python", "runnable", name]:
                yield name, body
            case ["console"]:
                commands = re.findall(r"^\$ (.*)$", body.replace("\\\n", ""), re.MULTILINE)
                yield from (("$", command) for command in commands if not command.startswith(SET_UP))


@pytest.mark.slow
def test_the_first_hour_can_be_typed(tmp_path: Path) -> None:
    bin = Path(sys.executable).parent
    source = Path(__file__).parent.parent / "src"
    path = {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": os.environ.get("PYTHONPATH", str(source))}
    found = list(steps(PAGE))
    assert sum(what == "$" for what, _ in found) > 8
    for what, text in found:
        if what != "$":
            (tmp_path / what).write_text(text, encoding="utf-8")
            continue
        done = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"$ {text}\n{done.stdout}{done.stderr}"
