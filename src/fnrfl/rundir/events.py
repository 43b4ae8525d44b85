"""The event log: one JSON object a line, the first about the run, then one per round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fnrfl.core.errors import FnrflError
from fnrfl.rundir import files

Event = dict[str, Any]


def line(event: Event) -> bytes:
    """An event as the log has it; there is no NaN in JSON, so there is none in an event."""
    return json.dumps(event, allow_nan=False).encode() + b"\n"


def append_event(path: Path, event: Event) -> None:
    """Add a line to a log that is there."""
    try:
        files.append(path, line(event))
    except FileNotFoundError as error:
        raise FnrflError(
            f"{path} has been removed while the run was going on, and the rounds before are lost with it. Run again "
            "into another directory."
        ) from error


def read_events(path: Path) -> list[Event]:
    """All whole lines: a kill may have left half of one at the end."""
    return parse_events(path, files.read(path, "a run directory has an events.jsonl").encode())


def parse_events(path: Path, content: bytes) -> list[Event]:
    """The events of a log's content; `path` is for the sentence about a line that is none."""
    found = []
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        try:
            event = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise files.damaged(path, f"line {number}: {error}") from error
        if not isinstance(event, dict):
            raise files.damaged(path, f"line {number} is no JSON object")
        found.append(event)
    return found
