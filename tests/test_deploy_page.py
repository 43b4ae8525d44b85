"""docs/deploy.md: its commands, typed one after the other in an empty folder, end with a model of three nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployed import free_ports, wait_until, working_in
from fnrfl.flower.deployment import Deployment
from fnrfl.flower.supervisor import stop
from test_own_data import typed
from test_tutorial import steps

COMMANDS = [text for name, text in steps("docs/deploy.md") if name == "$" and text.startswith(("fnrfl", "cmp"))]

pytestmark = pytest.mark.xdist_group("deploy")  # one federation at a time


def test_it_is_as_short_as_it_says() -> None:
    assert len([command for command in COMMANDS if "deploy" in command or "report" in command]) < 10


@pytest.mark.slow
def test_the_walk_ends_with_a_model_of_three_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = Deployment(tmp_path / "federation")
    port = f" --port {free_ports(4)}"  # 8000 may be somebody else's
    try:
        for command in COMMANDS:
            typed(command + (port if " up " in command else ""))
    finally:
        stop(made)
    assert (tmp_path / "runs/network/report.html").is_file()
    wait_until(lambda: not working_in(made.root), 10)
