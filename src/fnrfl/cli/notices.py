"""What the package tells its user beside the numbers, shown where everything else is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from fnrfl.core.words import printable
from fnrfl.rundir.interrupt import OutputClosed

if TYPE_CHECKING:
    from rich.console import Console

    from fnrfl.runs.result import Result


@contextmanager
def notices(screen: Console, level: int = logging.WARNING) -> Iterator[None]:
    """Inside, every notice of this level is a line on this screen."""

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with suppress(OutputClosed):  # the next round hears of it too, and can be saved
                screen.print(f"note: {record.getMessage()}")

    log, said = logging.getLogger("fnrfl"), Said(level)
    before, log.propagate = (log.propagate, log.level), False
    log.setLevel(min(level, log.getEffectiveLevel()))
    log.addHandler(said)
    try:
        yield
    finally:
        log.removeHandler(said)
        log.propagate = before[0]
        log.setLevel(before[1])


def note_on_one_answer(result: Result) -> str | None:
    """What to say if every test example has the same answer although their classes differ; else None.

    It is told by the confusion matrix, which logs of older versions and of more than 200 classes have not.
    """
    counts: list[list[int]] = result.rounds[-1].get("confusion") or []
    given = [at for at, answers in enumerate(zip(*counts, strict=True)) if any(answers)]
    if len(given) != 1 or sum(map(any, counts)) < 2:
        return None
    tried = f"more rounds than {result.config.rounds}, another client.lr than {result.config.client.lr:g}"
    return (
        f"every test example is answered with class {printable(result.classes[given[0]])}: nothing is learned yet. "
        f"Try {tried}, or begin with a recipe of `fnrfl list recipes`."
    )
