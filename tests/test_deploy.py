"""A small federation on loopback, without TLS: FNR over two nodes equals the simulator. `make test-deploy` has more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployed import federation, fnrfl, loop, same_run

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
    assert "nothing is running" in fnrfl("deploy", "status", made.root, fails=True)
