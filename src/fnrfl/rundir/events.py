"""The event log: one JSON object a line, the first about the run, then one per round."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.rundir import files

Event = dict[str, Any]
BEFORE = "site_scores_before"  # in a round: what sites on a network have told of the model of the round before


def line(event: Event) -> bytes:
    """An event as the log has it; there is no NaN in JSON, so there is none in an event."""
    return json.dumps(event, allow_nan=False).encode() + b"\n"


def in_their_round(rounds: Iterable[Event]) -> Iterator[Event]:
    """Give what sites have told of a round's model, which the log has in the next round, to the round itself."""
    for event, later in pairwise(chain(rounds, [{}])):
        told = later.get(BEFORE)  # in a file, it may be anything
        own = {key: value for key, value in event.items() if key != BEFORE or not isinstance(value, dict)}
        yield own | told if isinstance(told, dict) else own


def append_event(path: Path, event: Event) -> None:
    """Add a line to a log that is there."""
    try:
        files.append(path, line(event))
    except FileNotFoundError as error:
        raise FnrflError(
            f"{path} has been removed while the run was going on, and the rounds before are lost with it. Run again "
            "into another directory."
        ) from error


def read_log(path: Path) -> Iterator[bytes]:
    """Read all whole lines of a log: a kill may have left half of one at the end."""
    try:
        with files.open_plain(path) as file:
            yield from (line for line in file if line.endswith(b"\n"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}); a run directory has an events.jsonl.") from error


def read_events(path: Path, lines: Iterable[bytes] | None = None) -> Iterator[Event]:
    """Read the events of a log, one after another; or parse some of its lines, which have been read."""
    for number, text in enumerate(read_log(path) if lines is None else lines, 1):
        try:
            event = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise files.damaged(path, f"line {number}: {error}") from error
        if not isinstance(event, dict):
            raise files.damaged(path, f"line {number} is no JSON object")
        yield event
