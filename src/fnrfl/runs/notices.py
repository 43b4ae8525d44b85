"""Notices about how a run is carried out, such as the engine that `auto` chose: told once in a series of runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

log = logging.getLogger("fnrfl")
_told_in_series: ContextVar[set[str] | None] = ContextVar("told_in_series", default=None)


@contextmanager
def series_of_runs() -> Iterator[None]:
    """Inside, a notice of one run is not told again of the next."""
    token = _told_in_series.set(set())
    try:
        yield
    finally:
        _told_in_series.reset(token)


def log_once(notices: Sequence[str], level: int = logging.WARNING) -> None:
    """Log the notices of a run, those that this series has not had: two that begin with one sentence are one."""
    told = _told_in_series.get()
    for notice in notices:
        first = notice.partition(". ")[0].rstrip(".")
        if told is None or first not in told:
            log.log(level, notice)
        if told is not None:
            told.add(first)
