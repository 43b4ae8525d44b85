"""Run directories as `fnrfl run` leaves them, with made-up numbers that are easy to recompute, and pages about them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fnrfl.config import load
from fnrfl.results.report import report
from fnrfl.results.report.groups import LineGroup, Panel, panels_of
from fnrfl.results.report.load import read_run

CLASSES = 4
EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&\"'"


def fake_run(
    path: Path,
    *,
    accuracy: float = 0.8,
    rounds: int = 3,
    done: int | None = None,
    clean: bool = False,
    examples: int = 7,
    data: str = "0",
    split: str = "",
    **keys: object,
) -> Path:
    """A run directory whose accuracy rises in equal steps; `data` and `split` stand for other data, another split."""
    config = load("digits", {"rounds": rounds, "clients": 5, **keys})
    path.mkdir(parents=True)
    (path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    clients, leaks = config.clients, list(config.leaks_on)
    sizes = {"train": 90, "public": 8, "ranking": 2, "distill": 0, "validation": 0, "test": 40}
    parts = {name: {"examples": count, "sha256": f"{name} of {data}"} for name, count in sizes.items()}
    counts = [[examples * (i + 1) if c == i % CLASSES else 1 for c in range(CLASSES)] for i in range(clients)]
    drawn = {"seed": config.seed, "scenario": config.scenario, "counts": counts, "positions": split}
    manifest = {**drawn, "sha256": sha256(drawn, separators=(",", ":"))}
    listed = {"num_classes": CLASSES, **parts}
    (path / "partition.json").write_text(json.dumps({**manifest, "splits": {**listed, "sha256": sha256(listed)}}))
    header = {
        "config": config.as_dict(),
        "config_sha256": config.sha256,
        "leaks": leaks,
        "notices": [],
        "versions": {"fnrfl": "0", "torch": "0"},
        "git": None,
        "device": "test machine",
        "data": {"source": "made up", "sha256": data * 64},
        "partition": manifest["sha256"],
        "parameters": 2**19 // (4 * len(cohort_of(config))),
    }
    done = rounds if done is None else done
    lines = [header, *(_event(config, t, accuracy * (t + 1) / rounds, clean) for t in range(done))]
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done == rounds:
        (path / "model.safetensors").touch()
    return path


def sha256(value: object, separators: tuple[str, str] | None = None) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=separators).encode()).hexdigest()


def cohort_of(config: Any) -> list[int]:
    return list(range(config.clients))[: max(1, round(config.participation * config.clients))]


def _event(config: Any, t: int, accuracy: float, clean: bool) -> dict[str, Any]:
    cohort = cohort_of(config)
    vectors = 2 if config.algorithm.name == "scaffold" else 1
    event = {
        "round": t + 1,
        "rounds": config.rounds,
        "cohort": cohort,
        "accuracy": accuracy,
        **({"accuracy_clean": accuracy + 0.01} if clean else {}),
        "balanced_accuracy": accuracy - 0.02,
        "loss": 1 - accuracy,
        "per_class": [accuracy, None, 1.0, 0.0],
        "per_client": [accuracy / (client + 1) for client in range(config.clients)],
        "validation_accuracy": 0.9 - 0.1 * t,
        "bytes": {"local": {"down": 2**20, "up": vectors * 2**19, "headers": 9}},
        "bytes_up": 2**19,
        "bytes_down": 2**20,
        "seconds": {"local": 1.5, "server": 0.5, "evaluate": 9.0},
        "leaks": list(config.leaks_on),
    }
    if config.fnr is not None:
        norms = [[1.0 + client + t, 2.0, 3.0, 0.0] for client in cohort]
        event["seconds"] |= {"measure": 0.25, "observe": 3.0, "refine": 0.75}
        event["bytes"]["refine"] = {"down": 0, "up": 0, "headers": 0}
        event |= {"refined": cohort[:2], "ranking": [0.1 * client for client in cohort], "norms": norms}
        event |= {"refined_before": [0.2, 0.4, None, 0.5], "refined_after": [0.6, 0.3, None, 0.5]}
    return event


def seeds(folder: Path, name: str, accuracies: list[float], **keys: object) -> list[Path]:
    """One run for each accuracy, which differ in their seed."""
    return [fake_run(folder / f"{name}-{s}", accuracy=a, seed=s, **keys) for s, a in enumerate(accuracies)]


def leaky(path: Path, **keys: object) -> Path:
    """A run under the protocol that leaks."""
    return fake_run(path, protocol="paper", dataset="digits", model="mlp", scenario="label-dirichlet(0.1)", **keys)


def evil_run(folder: Path) -> Path:
    """A run with markup in every name."""
    path = fake_run(folder / EVIL.replace("/", ""), name=EVIL.replace("/", ""), fnr="on")
    for name in ("events.jsonl", "config.toml"):
        text = (path / name).read_text()
        (path / name).write_text(text.replace('"digits"', json.dumps(EVIL)).replace("made up", json.dumps(EVIL)[1:-1]))
    return path


def change_log(path: Path, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> Path:
    """Change every line of a log: each is given with its number, from 0 for the header."""
    lines = (path / "events.jsonl").read_text().splitlines()
    changed = [json.dumps(change(number, json.loads(line))) for number, line in enumerate(lines)]
    (path / "events.jsonl").write_text("\n".join(changed) + "\n")
    return path


def say_test_counts(path: Path, counts: list[Any]) -> Path:
    return change_log(path, lambda number, line: line if number else line | {"test_counts": counts})


# -- what is made of them ---------------------------------------------------------------------------------------------


def panels(*paths: Path) -> list[Panel]:
    return panels_of([read_run(path) for path in paths])


def groups_of(*paths: Path) -> list[LineGroup]:
    return [group for panel in panels(*paths) for group in panel.groups]


def page_of(*paths: Path, title: str | None = None) -> str:
    out = paths[0].parent / "page.html"
    assert report(paths, out, title=title, plots=False) == out
    return out.read_text(encoding="utf-8")


def text_of(*paths: Path) -> str:
    return " ".join(Elements(page_of(*paths)).text.split())


def payload(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


class Elements(HTMLParser):
    """Every tag with its attributes, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._raw = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._raw else data
