"""How far a run over a network has come: the file that its server writes, and the command that shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("psutil")

from fnrfl import cli
from fnrfl.cli import deploy as command
from fnrfl.federation import remote_clients
from fnrfl.flower import supervisor
from fnrfl.flower.progress import FILE, Progress, in_words, read_progress
from fnrfl.flower.supervisor import Recorded
from test_site_scores import SITES, chosen, over, write_all


@pytest.fixture
def home(tmp_cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Flower's state of a deployment whose SuperLink is this process."""
    made = tmp_cwd / "federation"
    for folder in ("app", "flower"):
        (made / folder).mkdir(parents=True)
    (made / "app/pyproject.toml").touch()
    monkeypatch.setenv("FLWR_HOME", str(made / "flower"))
    monkeypatch.setattr(remote_clients, "PAUSE", 0.0)
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    this = Recorded("superlink", os.getpid(), supervisor.psutil.Process().create_time())
    monkeypatch.setattr(supervisor, "recorded", lambda _: [this])
    monkeypatch.setattr(supervisor, "num_online", lambda _: (2, 3))
    return made / "flower"


def status(*words: str, code: int = 0) -> str:
    told = CliRunner().invoke(cli.app, ["deploy", "status", "federation", *words])
    assert told.exit_code == code, told.output
    return told.output


def test_status_shows_rounds_sites_accuracy_and_why_a_run_has_failed(home: Path) -> None:
    assert "no run yet" in status() and json.loads(status("--json"))["run"] is None
    write_all()
    progress, seen = Progress("meeting the nodes"), list[dict[str, Any]]()
    assert "run running\nmeeting the nodes" in status()
    progress.names = SITES

    class Looking:
        def round(self, event: dict[str, Any]) -> None:
            seen.append(json.loads(status("--json"))["run"])

    result = over(chosen(), callbacks=[progress, Looking()])
    assert [one["round"] for one in seen] == [1, 2, 3] and {one["state"] for one in seen} == {"running"}
    assert [one.get("sites_after_round") for one in seen] == [None, 1, 3]
    for one, event in zip(seen[1:], [result.rounds[0], result.rounds[2]], strict=True):
        assert one["accuracy_site"] == event["accuracy_site"] and [*one["per_site"].values()] == event["per_site"]
    last, told = result.rounds[-1], status()
    worst = SITES[last["per_site"].index(min(last["per_site"]))]
    assert f"round 3 of 3  accuracy {last['accuracy']:.4f}" in told and "run finished there" in told
    assert f"mean {last['accuracy_site']:.4f}, worst {min(last['per_site']):.4f} ({worst})" in told
    progress.stop(ValueError("Gent's table\nhas no column 'crp'."))
    assert "has no column 'crp'" in status() and "run failed" in status("--follow", code=1)


def test_who_is_late_or_missing_is_named(home: Path) -> None:
    progress = Progress("meeting the nodes")
    progress.names = SITES
    progress.tell(rounds=5, round=1, phase="local")
    progress.waits_for(SITES)
    progress.waits_for(["Gent\x1b[2J"])
    late = in_words(json.loads((home / FILE).read_text()))[-1]
    assert "Gent" in late and "Aachen" not in late and "\x1b" not in late and late.startswith("local: ")
    progress.round({"round": 2, "accuracy": 0.5, "missing": {"1": "local: it has not answered in time."}})
    told = "\n".join(in_words(json.loads((home / FILE).read_text())))
    assert "Gent: local: it has not answered in time." in told and "no answer after" not in told


def test_follow_ends_with_the_run_and_a_killed_server_is_not_waited_for(home: Path) -> None:
    progress = Progress("meeting the nodes")

    def end() -> None:
        for t in (1, 2):
            time.sleep(1.2)
            progress.tell(rounds=2, round=t, accuracy=0.5)
        progress.tell(state="finished")

    thread = threading.Thread(target=end)
    thread.start()
    lines = status("--follow", "--json").splitlines()
    thread.join()
    states = [json.loads(line)["run"]["state"] for line in lines]
    assert states[0] == "running" and states[-1] == "finished" and len(states) >= 2
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    progress.tell(state="running", pid=int(gone.stdout))
    known = read_progress(home)
    assert known is not None and known["state"] == "failed" and "killed" in known["error"]
    status("--follow", code=1)


def test_a_server_of_somebody_elses_network_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    Progress("meeting the nodes").tell(round=1)
    assert not list(tmp_path.iterdir())
