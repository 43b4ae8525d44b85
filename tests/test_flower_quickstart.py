"""The quickstart app, before and after four lines: the lines themselves, and both apps on real processes."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from test_docs import BLOCKS

ROOT = Path(__file__).parent.parent
APP = ROOT / "examples" / "flower_quickstart"
PATCH = (APP / "fnr.patch").read_text()
CONFIG = {"num-rounds": 2, "epochs": 1, "lr": 0.05, "fraction-evaluate": 0.0}


def copied(folder: Path, *, patched: bool) -> Path:
    """The app in a folder of its own, before or after the patch."""
    shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if patched:
        no_repository = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        subprocess.run(["git", "apply", "fnr.patch"], cwd=folder, env=no_repository, check=True, timeout=30)
    return folder


def test_the_patch_is_two_lines_on_the_server_and_two_on_the_client(tmp_path: Path) -> None:
    before, after = copied(tmp_path / "before", patched=False), copied(tmp_path / "after", patched=True)
    added: dict[str, list[str]] = {}
    for path in sorted(before.rglob("*.py")):
        old, new = path.read_text().splitlines(), (after / path.relative_to(before)).read_text().splitlines()
        added |= {path.name: lines} if (lines := [line for line in new if line not in old]) else {}
    assert added == {
        "client_app.py": [
            "from fnrfl.flower import FeatureNormMod",
            "app = ClientApp(mods=[FeatureNormMod(task.Net, task.public_loader)])",
        ],
        "server_app.py": [
            "from fnrfl.flower import FeatureNormStrategy",
            "    strategy = FeatureNormStrategy(strategy)",
        ],
    }
    assert re.findall(r"^-(?!--).*", PATCH, re.MULTILINE) == ["-app = ClientApp()"]


def test_the_page_shows_the_patch() -> None:
    shown = [body for page, info, body in BLOCKS if page == "docs/flower-apps.md" and info == ["diff"]]
    assert [body.splitlines() for body in shown] == [PATCH.splitlines()]


# -- the apps themselves ----------------------------------------------------------------------------------------------


@contextmanager
def imported(folder: Path) -> Iterator[tuple[Any, Any]]:
    """The ServerApp and the ClientApp in a folder; both variants have the same module names."""
    sys.path.insert(0, str(folder))
    try:
        yield (
            importlib.import_module("quickstart.server_app").app,
            importlib.import_module("quickstart.client_app").app,
        )
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
            del sys.modules[name]


def played(folder: Path, capsys: pytest.CaptureFixture[str], nodes: int = 2) -> tuple[list[str], Any]:
    """The app in this process: the lines that it prints, and its grid."""
    pytest.importorskip("flwr")
    from flwr.app import Context, RecordDict

    from flower_grid import DirectGrid

    with imported(folder) as (server, client):
        grid = DirectGrid({101 + number: client for number in range(nodes)})
        for context in grid.contexts.values():
            context.run_config = dict(CONFIG)
        server(grid, Context(1, 0, {}, RecordDict(), dict(CONFIG)))
    return accuracies(capsys.readouterr().out), grid


def accuracies(output: str) -> list[str]:
    return re.findall(r"^round \d+: accuracy 0\.\d+", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_the_app_learns_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, grid = played(copied(tmp_path / "before", patched=False), capsys)
    assert len(grid.sent) == 4
    after, grid = played(copied(tmp_path / "after", patched=True), capsys)
    assert len(grid.sent) == 6  # in each of two rounds, one of two clients is refined
    assert before[0] == after[0]
    assert before[1:] != after[1:]
    for lines in (before, after):
        assert len(lines) == 3
        assert float(lines[2].split()[-1]) > float(lines[0].split()[-1])


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A SuperLink and two SuperNodes, which leave no process behind."""
    pytest.importorskip("flwr")
    from deployed import working_in
    from flower_processes import FlowerProcesses

    folder = tmp_path_factory.mktemp("federation")
    with FlowerProcesses(folder / "files", nodes=2) as running:
        yield running
        assert working_in(folder)
    assert not working_in(folder)


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
@pytest.mark.parametrize("patched", [False, True])
def test_the_app_on_real_processes_prints_what_it_prints_in_this_one(
    patched: bool, federation: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = copied(tmp_path / "app", patched=patched)
    output = federation.run(app, CONFIG, seconds=600)
    expected, _ = played(app, capsys)
    assert accuracies(output) == expected, federation.logs()
    assert ("FNR: 1 of 2 clients refined" in output) == patched


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_a_supernode_that_refines_for_too_long_is_not_waited_for(federation: Any, tmp_path: Path) -> None:
    app = copied(tmp_path / "app", patched=True)
    server, client = app / "quickstart" / "server_app.py", app / "quickstart" / "client_app.py"
    server.write_text(server.read_text().replace("NormStrategy(strategy)", "NormStrategy(strategy, timeout=3.0)"))
    slow = """
class Slow(FeatureNormMod):
    def _refined(self, *message):
        import time
        time.sleep(15)
        return super()._refined(*message)


app = ClientApp(mods=[Slow("""
    client.write_text(client.read_text().replace("app = ClientApp(mods=[FeatureNormMod(", slow))
    output = federation.run(app, CONFIG | {"num-rounds": 1}, seconds=600)
    assert "counts with its model before refinement: there was no reply in 3 seconds" in output, federation.logs()
    assert "'fnr-fell-back': 1" in output
    assert len(accuracies(output)) == 2


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_the_app_with_fnr_runs_in_flowers_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    from deployed import working_in
    from flower_processes import FlowerProcesses

    app = copied(tmp_path / "app", patched=True)
    folder = tmp_path / "simulation"
    with FlowerProcesses(folder, nodes=2, simulation=True) as federation:
        output = federation.run(app, CONFIG, seconds=600)
        expected, _ = played(app, capsys)
        assert accuracies(output) == expected, federation.logs()
    assert not working_in(folder)
