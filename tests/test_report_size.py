"""A report of a long log, or of many runs: memory and work grow no faster than what is read."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fnrfl.core.errors import ConfigError
from fnrfl.results.report import consistency, groups, load, pairs
from fnrfl.rundir import origin
from test_report import fake_run

ROUNDS = 1500


def long_run(path: Path, rounds: int) -> Path:
    """A run whose every line has the numbers that a run of ten classes writes."""
    made = fake_run(path, rounds=rounds)
    header, *events = map(json.loads, (made / "events.jsonl").read_text().splitlines())
    for event in events:
        shares = [event["round"] / (7.0 * place) for place in range(3, 40)]
        event |= {"confusion": [[event["round"] + 300] * 4] * 4, "precision": shares, "recall": shares}
    (made / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (header, *events)))
    return made


def test_a_long_log_takes_less_memory_than_its_file(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", ROUNDS)
    load.read_run(long_run(tmp_path / "first", 3))  # imports, and what libraries keep
    tracemalloc.start()
    run = load.read_run(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(run.rounds) == ROUNDS
    assert peak < (path / "events.jsonl").stat().st_size


def test_what_is_kept_of_a_log_gives_the_same_numbers(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", 6)
    whole = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()[1:]]
    run = load.read_run(path)
    assert run.series("worst_client") == [min(event["per_client"]) for event in whole]
    assert run.series("accuracy") == [event["accuracy"] for event in whole]
    assert run.rounds[-1] == {key: value for key, value in whole[-1].items() if key in run.rounds[-1]}
    assert {"confusion", "per_class", "per_client"} <= run.rounds[-1].keys()
    assert [event["bytes"] for event in run.rounds] == [event["bytes"] for event in whole]


def calls_of(folder: Path, runs: list[Path], *given: Path) -> int:
    """How many functions are called to read some runs and to compare their lines."""
    (folder / "grid.json").write_text(json.dumps({"format": 2, "cells": {run.name: "" for run in runs}}))
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = load.load_runs(given or [folder]).runs
        for panel in groups.panels_of(found):
            for setting in pairs.ranked(panel.groups):
                pairs.line_pairs(setting)
    finally:
        sys.setprofile(None)
    assert len(found) == len(runs)
    return calls


@pytest.mark.parametrize("one_by_one", [False, True], ids=["their folder", "one by one"])
def test_the_work_for_runs_grows_with_their_number(tmp_path: Path, one_by_one: bool) -> None:
    made = []
    for number in range(60):
        fnr: dict[str, object] = {"fnr": "on", "fnr.weight": 0.1 * (number % 3 == 1)} if number % 3 else {}
        made.append(fake_run(tmp_path / "all" / f"run-{number}", rounds=1, **fnr, **{"client.lr": 0.1 + number // 3}))
    few, many = (calls_of(tmp_path / "all", made[:n], *(made[:n] if one_by_one else [])) for n in (15, 60))
    assert many < 4.8 * few


@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_run_that_does_not_belong_is_found_wherever_it_stands(tmp_path: Path, place: int) -> None:
    made = [fake_run(tmp_path / str(n), seed=n, data="f" if n == place else "0") for n in range(5)]
    (tmp_path / "grid.json").write_text(json.dumps({"format": 2, "cells": {path.name: "" for path in made}}))
    with pytest.raises(ConfigError, match="different data"):
        consistency.check_grid_folder(tmp_path, [origin.read_origin(path) for path in made])
