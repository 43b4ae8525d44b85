"""What the package logs for its user, shown where everything else is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from fnrfl.rundir.interrupt import OutputClosed

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def notices(screen: Console) -> Iterator[None]:
    """Inside, every notice is a line on this screen."""

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with suppress(OutputClosed):  # the next round hears of it too, and can be saved
                screen.print(f"note: {record.getMessage()}")

    log, said = logging.getLogger("fnrfl"), Said(logging.WARNING)
    before, log.propagate = log.propagate, False
    log.addHandler(said)
    try:
        yield
    finally:
        log.removeHandler(said)
        log.propagate = before
