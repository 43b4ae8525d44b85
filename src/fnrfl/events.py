"""The event log: one JSON object a line, the first about the run, then one per round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fnrfl import files
from fnrfl.errors import ConfigError

Event = dict[str, Any]


def append(path: Path, event: Event) -> None:
    """Add a line."""
    with path.open("a", encoding="utf-8") as log:
        log.write(json.dumps(event, allow_nan=False) + "\n")


def read(path: Path) -> list[Event]:
    """All whole lines: a kill may have left half of one at the end."""
    lines = files.read(path, "a run directory has an events.jsonl").split("\n")
    try:
        return [json.loads(line) for line in lines[:-1]]
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is damaged ({error}). Run again into another directory.") from error


def truncate(path: Path, rounds: int) -> list[Event]:
    """Keep the header and that many rounds; returns them."""
    kept = read(path)[: rounds + 1]
    if len(kept) <= rounds:
        raise ConfigError(
            f"{path} has {len(kept)} lines, and the checkpoint beside it comes after round {rounds}. Run again into "
            "another directory."
        )
    files.write(path, "".join(json.dumps(event) + "\n" for event in kept))
    return kept
