"""Seconds of a phase over a Flower federation on this machine, with TLS and node keys.

    python benchmarks/flower_overhead.py [--nodes 3] [--rounds 5] [--port 22500]

FedAvg on the digits with one epoch: the clients' own work takes about a tenth of a second, the rest is the way there
and back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fnrfl.flower.deployment import Deployment
from fnrfl.flower.supervisor import start_federation, stop


def fnrfl(*words: object) -> None:
    """A command."""
    subprocess.run([sys.executable, "-m", "fnrfl", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def seconds(folder: Path, nodes: int, rounds: int, port: int) -> list[float]:
    """Of every round but the first, in which workers start."""
    fnrfl("deploy", "init", folder, "digits", f"clients={nodes}", "client.epochs=1", "engine.threads=1")
    fnrfl("deploy", "certs", folder)
    made = Deployment.at(folder)
    start_federation(made, nodes, port, secure=True, tell=lambda line: None)
    try:
        fnrfl("deploy", "run", folder, f"rounds={rounds + 1}", "-o", folder / "run")
    finally:
        stop(made)
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()[2:]
    return [json.loads(line)["seconds"]["local"] for line in lines]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in (("nodes", 3), ("rounds", 5), ("port", 22500)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = seconds(Path(folder) / "fed", asked.nodes, asked.rounds, asked.port)
    print(f"median {statistics.median(found):.2f} s, {min(found):.2f} to {max(found):.2f}", flush=True)
