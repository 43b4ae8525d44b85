"""How far the run of a deployment has come: the server app writes it to a file, and `fnrfl deploy status` reads it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fnrfl.core.errors import sentence
from fnrfl.core.words import printable
from fnrfl.rundir import files
from fnrfl.rundir.events import BEFORE, Event
from fnrfl.runs.metrics import of_round

FILE = "progress.json"  # in the folder `flower` of a deployment


class Progress:
    """Hear of a run what `status` shows: rounds, scores, and who has not answered. A callback of the run."""

    def __init__(self, phase: str, home: Path | None = None) -> None:
        home = home or Path(os.environ.get("FLWR_HOME", "nowhere"))  # which `fnrfl deploy` sets
        self.file = home / FILE if (home.parent / "app" / "pyproject.toml").is_file() else None
        self.names: Sequence[str] = ()  # of the clients, by number
        self.known: dict[str, Any] = {"pid": os.getpid(), "started": psutil.Process().create_time(), "missing": {}}
        self.tell(state="running", phase=phase, waiting=[])

    def tell(self, **facts: Any) -> None:
        """Write what is known now."""
        self.known |= facts
        if self.file is not None:
            files.write(self.file, json.dumps(self.known))

    def waits_for(self, nodes: Sequence[str]) -> None:
        """Take which nodes have not answered a letter yet."""
        since = self.known["since"] if self.known["waiting"] else time.time()  # when the letters went
        self.tell(waiting=list(nodes), since=since)

    def begin(self, config: Any, facts: Mapping[str, Any]) -> None:
        """Take where the run goes, and how many of its rounds are done."""
        self.tell(run_dir=facts["run_dir"] and str(facts["run_dir"]), rounds=config.rounds, round=facts["rounds_done"])

    def round(self, event: Event) -> None:
        """Take the scores of a round; those of sites are of the model before, but after the last round."""
        facts = {"round": event["round"], "accuracy": event["accuracy"], "waiting": []}
        facts["missing"] = {self.names[int(client)]: why for client, why in event.get("missing", {}).items()}
        if scores := event if "accuracy_site" in event else event.get(BEFORE):
            facts["sites_after_round"] = event["round"] - (scores is not event)
            facts["per_site"] = dict(zip(self.names, scores.get("per_site", ()), strict=False))
            facts |= {name: of_round(scores, name) for name in ("accuracy_site", "worst_site")}
        self.tell(**facts)
        print("\n".join(in_words(self.known)), flush=True)

    def end(self, result: Any) -> None:
        """Take that the run has ended well."""
        self.tell(state="finished", run_dir=result.run_dir and str(result.run_dir))

    def stop(self, error: BaseException) -> None:
        """Take why the run was stopped."""
        self.tell(state="failed", error=printable(sentence(error)) if isinstance(error, Exception) else "was stopped.")


def read_progress(home: Path) -> dict[str, Any] | None:
    """Return how far the last run of a deployment has come, as plain values; None if there was none."""
    if not (home / FILE).is_file():
        return None
    known: dict[str, Any] = json.loads((home / FILE).read_text(encoding="utf-8"))
    if known["state"] == "running":
        with suppress(psutil.NoSuchProcess):
            if abs(psutil.Process(known["pid"]).create_time() - known["started"]) < 5.0:  # seconds: clocks may be set
                return known
        known |= {"state": "failed", "error": "its process has ended without a word, as if it had been killed."}
    return known


def in_words(known: Mapping[str, Any]) -> list[str]:
    """Return lines about a run: its round, its scores, who is missing and who is late."""
    score = f"  accuracy {known['accuracy']:.4f}" if "accuracy" in known else ""
    begun, running = "rounds" in known, known["state"] == "running"
    lines = [f"round {known['round']} of {known['rounds']}{score}"] if begun else [known["phase"]] * running
    if known.get("accuracy_site") is not None:
        told = {name: one for name, one in known["per_site"].items() if one is not None}
        whose = f" ({printable(min(told, key=told.__getitem__))})" if told else ""
        means = f"mean {known['accuracy_site']:.4f}, worst {known['worst_site']:.4f}{whose}"
        lines.append(f"sites after round {known['sites_after_round']}: {means}")
    lines += [f"missing in that round: {printable(name)}: {why}" for name, why in known["missing"].items()]
    if known["waiting"] and running:
        late = f"no answer after {time.time() - known['since']:.0f} s from"
        lines.append(f"{known['phase']}: {late} {', '.join(map(printable, known['waiting']))}")
    return lines
