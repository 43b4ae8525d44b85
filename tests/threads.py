"""Many runs at once in one process, and the same runs one after another: their models must be equal, byte for byte."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fnrfl

DROPOUT, FNR = "threads:dropped", {"epochs": 1}
# Two rounds of a few clients on digits. "recorded" has so many steps that they are recorded.
KINDS: dict[str, dict[str, Any]] = {
    "fedavg loop": {"engine": {"name": "loop", "threads": 1}},
    "fedavg loop 2": {"engine": {"name": "loop", "threads": 2}, "model": "cnn(norm=batch)"},
    "scaffold batched fnr": {
        "algorithm": "scaffold",
        "engine": {"name": "batched", "threads": 2},
        "fnr": FNR,
    },
    "moon loop fnr": {"algorithm": "moon", "engine": {"name": "loop", "threads": 2}, "fnr": FNR},
    "fedgen batched": {"algorithm": "fedgen", "engine": "batched"},
    "fedgen loop": {"algorithm": "fedgen", "engine": {"name": "loop", "threads": 2}, "fnr": FNR},
    "feddf loop": {"algorithm": "feddf", "engine": "loop"},
    "dropout loop": {"engine": {"name": "loop", "threads": 2}, "model": DROPOUT},
    "dropout batched fnr": {"engine": {"name": "batched", "threads": 1}, "model": DROPOUT, "fnr": FNR},
    "batchnorm batched": {"engine": "batched", "model": "cnn(norm=batch)"},
    "recorded loop": {"engine": {"name": "loop", "threads": 2}, "client": {"epochs": 2, "batch": 1}},
    "recorded batched fnr": {"engine": "batched", "client": {"epochs": 2, "batch": 1}, "fnr": FNR},
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
