"""A small federation on loopback, without TLS, and the commands of docs/deploy.md. `make test-deploy` has more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployed import federation, fnrfl, free_ports, loop, same_run, wait_until, working_in
from fnrfl.flower.deployment import Deployment
from fnrfl.flower.supervisor import stop
from test_own_data import typed
from test_tutorial import steps

COMMANDS = [text for name, text in steps("docs/deploy.md") if name == "$" and text.startswith(("fnrfl", "cmp"))]

pytestmark = pytest.mark.xdist_group("deploy")  # one federation at a time


@pytest.mark.slow
def test_two_nodes_without_tls_equal_the_simulator(tmp_path: Path) -> None:
    words = ("rounds=2", "fnr=on")
    with federation(tmp_path / "fed", nodes=2, secure=False) as made:
        assert "nodes online: 2 of 2" in fnrfl("deploy", "status", made.root)
        assert "is running already" in fnrfl("deploy", "up", made.root, "--insecure", fails=True)
        fnrfl("deploy", "run", made.root, *words, "-o", tmp_path / "run")
        assert "rounds" in fnrfl("deploy", "run", made.root, "rounds=0", fails=True)
    same_run(tmp_path / "run", loop(tmp_path / "loop", *words, nodes=2))
    assert 0 < json.loads((tmp_path / "run" / "flower.json").read_text())["overhead_percent"] < 40
    assert "does not answer" in fnrfl("deploy", "run", made.root, fails=True)
    assert "no server is running" in fnrfl("deploy", "status", made.root, fails=True)


def test_the_page_is_as_short_as_it_says() -> None:
    assert len([command for command in COMMANDS if "deploy" in command or "report" in command]) < 10


@pytest.mark.slow
def test_the_page_ends_with_a_model_of_three_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
