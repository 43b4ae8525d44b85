"""Many runs at once in one process, and the same runs one after another: their models must be equal, byte for byte.

    python tests/threads.py --runs 200 --threads 8

prints how many runs there were, how many of them differ, and two that overlapped in time.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fnrfl

DROPOUT = "threads:dropped"
# Two rounds of a few clients on digits. "recorded" has so many steps that they are recorded.
KINDS: dict[str, dict[str, Any]] = {
    "fedavg loop": {"engine": {"name": "loop", "threads": 1}},
    "fedavg loop 2": {"engine": {"name": "loop", "threads": 2}, "model": "cnn(norm=batch)"},
    "scaffold batched fnr": {
        "algorithm": "scaffold",
        "engine": {"name": "batched", "threads": 2},
        "fnr": {"epochs": 1},
    },
    "moon loop fnr": {"algorithm": "moon", "engine": {"name": "loop", "threads": 2}, "fnr": {"epochs": 1}},
    "fedgen batched": {"algorithm": "fedgen", "engine": "batched"},
    "fedgen loop": {"algorithm": "fedgen", "engine": {"name": "loop", "threads": 2}, "fnr": {"epochs": 1}},
    "feddf loop": {"algorithm": "feddf", "engine": "loop"},
    "dropout loop": {"engine": {"name": "loop", "threads": 2}, "model": DROPOUT},
    "dropout batched fnr": {"engine": {"name": "batched", "threads": 1}, "model": DROPOUT, "fnr": {"epochs": 1}},
    "batchnorm batched": {"engine": "batched", "model": "cnn(norm=batch)"},
    "recorded loop": {"engine": {"name": "loop", "threads": 2}, "client": {"epochs": 2, "batch": 1}},
    "recorded batched fnr": {"engine": "batched", "client": {"epochs": 2, "batch": 1}, "fnr": {"epochs": 1}},
}


def dropped(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A small net with dropout, whose weights are drawn with pauses: room for another thread to come in between."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = int(torch.tensor(input_shape).prod())
    for _ in range(2):
        layers += [nn.Linear(width, 16), nn.ReLU(), nn.Dropout(0.3)]
        width = 16
        time.sleep(0.001)
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


@dataclass(frozen=True)
class Done:
    """A run that has ended."""

    name: str
    seed: int
    sha256: str
    losses: tuple[float, ...]
    began: float
    ended: float

    @property
    def outcome(self) -> tuple[str, tuple[float, ...]]:
        """What must not depend on who else is at work."""
        return self.sha256, self.losses


def carry_out(name: str, seed: int) -> Done:
    """One run."""
    keys = {"rounds": 2, "clients": 4, "participation": 0.5, "client": {"epochs": 1, "batch": 16}, **KINDS[name]}
    began = time.monotonic()
    result = fnrfl.run("digits", out=None, seed=seed, **keys)
    losses = tuple(event["loss"] for event in result.rounds)
    return Done(name, seed, result.model_sha256, losses, began, time.monotonic())


def overlapping(done: list[Done]) -> tuple[Done, Done] | None:
    """Two runs that were under way at the same time."""
    in_order = sorted(done, key=lambda run: run.began)
    return next(((a, b) for a, b in itertools.pairwise(in_order) if b.began < a.ended), None)


def compared(runs: int, threads: int, names: Sequence[str] = tuple(KINDS)) -> tuple[list[Done], list[Done]]:
    """(at once, one after another): the same runs in the same order, the ones at once before the others."""
    asked = [(names[i % len(names)], i // len(names)) for i in range(runs)]
    with ThreadPoolExecutor(threads) as pool:
        together = list(pool.map(carry_out, *zip(*asked, strict=True)))
    return together, [carry_out(*one) for one in asked]


def main() -> int:
    """0 if all are equal and two of them overlapped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--threads", type=int, default=8)
    asked = parser.parse_args()
    began = time.monotonic()
    together, alone = compared(asked.runs, asked.threads)
    different = [a for a, b in zip(together, alone, strict=True) if a.outcome != b.outcome]
    for run in different:
        print(f"differs: {run.name}, seed {run.seed}")
    print(
        f"{asked.runs} runs on {asked.threads} threads, {len({run.sha256 for run in alone})} distinct models: ", end=""
    )
    print(f"{len(different)} differ from those run one after another ({time.monotonic() - began:.0f} s in all)")
    found = overlapping(together)
    if found is not None:
        a, b = found
        print(f"at the same time: {a.name} (seed {a.seed}) {a.began - began:.3f} to {a.ended - began:.3f} s,")
        print(f"                  {b.name} (seed {b.seed}) {b.began - began:.3f} to {b.ended - began:.3f} s")
        at_once = max(sum(b.began <= a.began < b.ended for b in together) for a in together)
        print(f"at most {at_once} at once")
    return int(bool(different) or found is None)


if __name__ == "__main__":
    sys.exit(main())
