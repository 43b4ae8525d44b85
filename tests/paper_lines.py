"""Lines of results for the tests of the paper's tables."""

from __future__ import annotations

import random
from typing import Any

from reproduction.catalogue import Cell
from reproduction.store import Line, Results

NOTHING = Results([])


def line_of(cell: Cell, **more: Any) -> Line:
    """What a finished cell leaves, with numbers drawn from its id."""
    draw = random.Random(cell.id)
    accuracies = sorted(draw.uniform(0.1, 0.95) for _ in range(10))
    looks = [f"{what}_{when}" for what in ("cosines", "gaps") for when in ("before", "after")]
    pairs = {look: [draw.uniform(0.1, 0.9) for _ in range(45)] for look in looks}
    classes = {
        f"accuracy_{when}": [[draw.random() for _ in range(10)] for _ in range(5)] for when in ("before", "after")
    }
    logged = pairs | classes | {"counts": [[draw.randrange(600) for _ in range(10)] for _ in range(5)], "refined": [4]}
    refined = {f"refined_{when}": [[draw.random() for _ in range(10)]] * 10 for when in ("before", "after")}
    told: dict[str, Any] = {
        "id": cell.id, "recipe": cell.recipe, "overrides": list(cell.overrides), "date": "2026-11-16",
        "leaks": ["public_is_test"] if cell.leaks else [], "device": "a device",
        "engine": {"name": "gpu", "precision": "bf16"}, "accuracy": accuracies[-1], "accuracies": accuracies,
        "clean": accuracies[-1], "noisy": accuracies[-2], "seconds_train": draw.uniform(10, 20), "seconds_wall": 30.0,
        "seconds_of_rounds": [draw.uniform(1, 2) for _ in range(10)], "bytes_up": draw.randrange(10**6, 10**7),
        "bytes_down": 0, "notes": {"watched": [[logged]] * 2} | refined,
    }  # fmt: skip
    return Line(**told | more)
