"""The embedded example, side by side: even data, then label skew without and with refinement."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fnrfl.config import load
from fnrfl.core.words import counted
from fnrfl.results.report import report
from fnrfl.results.statistics import mean
from fnrfl.runs.metrics import MIB
from fnrfl.runs.result import Result
from fnrfl.runs.run import run

OUT = Path("runs") / "demo"
SEEDS = (0, 1, 2)
RUNS: dict[str, dict[str, Any]] = {
    "FedAvg, even data": {"scenario": "iid"},
    "FedAvg": {},
    "refinement, weight 0": {"fnr": {"weight": 0.0}},
    "FNR": {"fnr": "on"},
}


def run_demo() -> None:
    """Run everything and print a table."""
    console = Console(highlight=False)
    began = time.perf_counter()
    example = load()
    console.print(
        f"{example.dataset.name}, {counted(example.clients, 'client')}, {counted(example.rounds, 'round')}, "
        f"{example.model.name}, seeds {', '.join(map(str, SEEDS))}; skew: {example.scenario}"
    )
    found: dict[str, list[Result]] = {}
    for name, keys in RUNS.items():
        for seed in SEEDS:
            folder = OUT / f"{name.replace(', ', '-').replace(' ', '-').lower()}-{seed}"
            result = run(load(None, {"seed": seed, **keys}), out=folder, overwrite=True)
            found.setdefault(name, []).append(result)
        console.print(f"  {name}: {mean([r.accuracy for r in found[name]]):.3f}")
    console.print(_table(found))
    runs = [result.run_dir for results in found.values() for result in results if result.run_dir is not None]
    page = report(runs, OUT / "report.html", title="The embedded example", plots=False)
    console.print(
        "Accuracy on the test set after the last round, mean and range over the seeds.\n"
        "Refinement with weight 0 is FNR without its penalty: what the two share is the public data.\n"
        f"{time.perf_counter() - began:.0f} s. Everything about these runs, in a browser: {page}"
    )


def _table(found: dict[str, list[Result]]) -> Table:
    table = Table("run", "accuracy", "worst client", "MiB up", "MiB down", "seconds")
    for name, results in found.items():
        totals = [r.summary() for r in results]
        table.add_row(
            name,
            _spread([t["accuracy"] for t in totals]),
            _spread([t["worst_client"] for t in totals]),
            f"{mean([t['bytes_up'] for t in totals]) / MIB:.2f}",
            f"{mean([t['bytes_down'] for t in totals]) / MIB:.2f}",
            f"{mean([t['seconds_train'] for t in totals]):.1f}",
        )
    return table


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    run_demo()
