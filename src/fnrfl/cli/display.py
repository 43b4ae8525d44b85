"""What is shown while runs go on: a bar on a terminal, lines in a pipe, and notes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from fnrfl.core.words import counted, printable
from fnrfl.rundir.interrupt import OutputClosed
from fnrfl.runs.metrics import of_round

if TYPE_CHECKING:
    from rich.console import Console

    from fnrfl.config import RunConfig
    from fnrfl.results.compare import Notice
    from fnrfl.rundir.events import Event
    from fnrfl.runs.result import Result


def title(config: RunConfig) -> str:
    """Describe a run in one line."""
    method = config.algorithm.name + ("" if config.fnr is None else " + FNR")
    clients = counted(config.clients, "client") if config.clients else "clients of the data"  # which is not read yet
    return (
        f"{config.name}: {method}, {config.dataset.name}, {config.model.name}, {config.scenario}, "
        f"{clients}, {counted(config.rounds, 'round')}, seed {config.seed}"
    )


@dataclass(frozen=True)
class Display:
    """Who is told about a run while it goes on."""

    round: Callable[[Event], None]  # at the end of each
    phase: Callable[[str], None]  # its name, at the start of each


def _scored(event: Event, metric: str) -> str:
    """Return the metric of a round in words."""
    value = of_round(event, metric)
    return f"{metric} {'-' if value is None else f'{value:.4f}'}"


@contextmanager
def display(screen: Console, leak: str, config: RunConfig) -> Iterator[Display]:
    """Rounds as they come: a bar with the phase under way on a terminal, one line each in a pipe."""

    @cache
    def metric() -> str:  # the method can be built once there is a round
        from fnrfl.runs.quality import leading_metric
        from fnrfl.runs.setup.method import build_algorithm

        return leading_metric([build_algorithm(config).personalised]).name

    def words(event: Event, *more: str) -> str:
        absent = [f"{counted(len(event['missing']), 'client')} missing"] if event.get("missing") else []
        return "  ".join(filter(None, (_scored(event, metric()), *more, *absent, leak)))

    if screen.quiet or not screen.is_terminal:

        def line(event: Event) -> None:
            said = words(event, f"loss {event['loss']:.4f}", f"{event['seconds']:.1f} s")
            screen.print(f"round {event['round']}/{event['rounds']}  {said}")

        yield Display(line, lambda name: None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    told, phase = TextColumn("{task.description}"), TextColumn("{task.fields[phase]:<8}", style="dim")
    with Progress(told, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), phase, console=screen) as bar:
        task = bar.add_task("getting ready", total=None, phase="")

        def show(event: Event) -> None:
            if bar.tasks[task].total is None:  # a resumed run starts in the middle, which must not count as speed
                bar.reset(task, total=event["rounds"], completed=event["round"], description=words(event))
            else:
                bar.update(task, completed=event["round"], description=words(event))

        yield Display(show, lambda name: bar.update(task, phase=name))


@contextmanager
def grid_display(screen: Console, metric: str) -> Iterator[Callable[[Notice], None]]:
    """Runs as they come: a bar with the run under way on a terminal, one line for each in a pipe."""

    def tell(notice: Notice) -> None:
        """Print the line of a run that is done, kept or failed."""
        name = f"{notice.number}/{notice.total}  {notice.cell.name}"
        leak = "  leak" if notice.cell.config.leaks_on else ""
        match notice.what:
            case "done" if notice.event is not None:
                screen.print(f"{name}  {_scored(notice.event, metric)}{leak}")
            case "kept":
                screen.print(f"{name}  is finished already{leak}")
            case "failed":
                screen.print(f"{name}  failed: {notice.error}")

    if screen.quiet or not screen.is_terminal:
        yield tell
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen) as bar:
        task = bar.add_task("checking", total=None)

        def show(notice: Notice) -> None:
            tell(notice)
            text = f"{notice.what} {notice.cell.name}"
            if notice.what == "round" and notice.event is not None:
                text = f"{notice.cell.name} round {notice.event['round']}/{notice.event['rounds']}"
            done = notice.number if notice.what in ("done", "kept", "failed") else notice.number - 1
            bar.update(task, total=notice.total, completed=0 if notice.what == "check" else done, description=text)

        yield show


# -- notes -------------------------------------------------------------------------------------------------------------


@contextmanager
def notices(screen: Console, level: int = logging.WARNING) -> Iterator[None]:
    """Show every notice of this level that is logged inside as a line on a screen."""

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
    """Return a note if every test example has the same answer although their classes differ, else None.

    It follows from the confusion matrix, which logs of older versions and of more than 200 classes have not.
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
