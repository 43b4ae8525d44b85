"""Seconds of a phase over a Flower federation on this machine: with Flower's own SuperNodes, and with ours.

    python benchmarks/flower_overhead.py [--nodes 3] [--rounds 5] [--port 22500]

FedAvg on the digits with one epoch: the clients' own work takes about a tenth of a second, the rest is the way there
and back. The server polls as fnrfl does in both cases.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fnrfl.flower import federating
from fnrfl.flower.deployment import Address, Deployment


def fnrfl(*words: object) -> None:
    """A command."""
    subprocess.run([sys.executable, "-m", "fnrfl", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def flowers_own(deployment: Deployment, address: Address, client: int) -> list[str]:
    """The command of Flower's SuperNode, which starts a program for every message."""
    words = OURS(deployment, address, client)
    start = words.index("--superlink")
    isolation = words.index("--isolation")
    kept = words[start:isolation] + words[isolation + 4 :]
    return [str(Path(sys.executable).with_name("flower-supernode")), *kept]


OURS = federating._supernode


def seconds(folder: Path, nodes: int, rounds: int, port: int) -> list[float]:
    """Of every round but the first, in which workers start."""
    fnrfl("deploy", "init", folder, "digits", f"clients={nodes}", "client.epochs=1", "engine.threads=1")
    fnrfl("deploy", "certs", folder)
    made = Deployment.at(folder)
    federating.start_federation(made, nodes, port, secure=True, tell=lambda line: None)
    try:
        fnrfl("deploy", "run", folder, f"rounds={rounds + 1}", "-o", folder / "run")
    finally:
        federating.end_federation(made)
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()[2:]
    return [json.loads(line)["seconds"]["local"] for line in lines]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in (("nodes", 3), ("rounds", 5), ("port", 22500)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    for what, command in (("Flower's own SuperNodes", flowers_own), ("ours", OURS)):
        federating._supernode = command
        with tempfile.TemporaryDirectory() as folder:
            found = seconds(Path(folder) / "fed", asked.nodes, asked.rounds, asked.port)
        print(f"{what}: median {statistics.median(found):.2f} s, {min(found):.2f} to {max(found):.2f}", flush=True)
        time.sleep(2)
