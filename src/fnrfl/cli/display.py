"""Progress of runs, as a bar on a terminal or as lines in a pipe; notes; estimates of a dry run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnrfl.cli.commands import is_terminal, print_answer, print_lines
from fnrfl.cli.common import paragraph, print_json
from fnrfl.core.words import counted, printable
from fnrfl.rundir.interrupt import OutputClosed
from fnrfl.runs.metrics import MIB, of_round

if TYPE_CHECKING:
    from rich.console import Console

    from fnrfl.config import RunConfig
    from fnrfl.results.compare import Notice, PlannedRun
    from fnrfl.rundir.events import Event
    from fnrfl.runs.result import Result


def title(config: RunConfig) -> str:
    """Describe a run in one line."""
    method = config.algorithm.label + ("" if config.fnr is None else " + FNR")
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
                done, rounds = notice.event["round"], notice.event["rounds"]
                early = f"  after {done} of {rounds} rounds" if done < rounds else ""
                screen.print(f"{name}  {_scored(notice.event, metric)}{early}{leak}")
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
def notices(screen: Console, level: int = logging.INFO) -> Iterator[None]:
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


# -- a dry run: what a run or a comparison would take ------------------------------------------------------------------

LONG = 3600.0  # seconds; a note says that a run takes longer
SHORTER = "fewer rounds or client.epochs, a smaller model or less data make it shorter"


def duration(seconds: float) -> str:
    """Return seconds in the unit that people would use."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{max(1, round(seconds))} s"


def print_forecast(config: RunConfig, *, json: bool) -> None:
    """Print what a run would take, as comments above its config, so that the whole is a TOML file that runs."""
    missing = missing_dataset(config)
    if missing is not None:
        lines = [f"{missing} is not on this machine, so nothing can be counted. To get it: fnrfl data get {missing}"]
        summary: dict[str, Any] = {"missing": missing, "leaks": list(config.leaks_on), "config": config.to_toml()}
    else:
        from fnrfl.runs.forecast import forecast

        found = forecast(config)
        config, summary = found.config, found.summary()
        lines = list(_forecast_lines(summary))
        if config.stop != "never":
            lines.append(f'note    this is for all rounds; stop = "{config.stop}" may end the run earlier')
    if json:
        return print_json(summary)
    leaks = [f"leak: {', '.join(config.leaks_on)}"] if config.leaks_on else []
    said = [f"# {line}" for line in (title(config), *leaks, *lines)]
    if is_terminal():
        width = shutil.get_terminal_size().columns
        said = [part for line in said for part in paragraph(line, width, "", "#         ")]
    print_answer("\n".join(said))
    print_answer(f"\n{config.to_toml()}")


def missing_dataset(config: RunConfig) -> str | None:
    """Return the data set of a run if it is one that has to be fetched first."""
    from fnrfl.data.sources import available

    return next((entry.name for entry in available() if entry.name == config.dataset.name and not entry.found), None)


def _forecast_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    phases = ", ".join(f"{count:,} {phase}" for phase, count in summary["steps_by_phase"].items())
    yield f"steps   {summary['steps']:,}: {phases}"
    for way in ("up", "down"):
        each, total = summary[f"bytes_{way}_per_round"], summary[f"bytes_{way}"]
        yield f"{way:6}  {counted(each, 'byte')} a round, {total:,} in all ({total / MIB:.1f} MiB)"
    memory = summary["memory_estimate"]
    yield f"memory  {'unknown' if memory is None else f'about {memory / MIB:.0f} MiB'}"
    yield f"time    about {duration(summary['seconds_estimate'])} here, judging by a few steps that were thrown away"
    threads = counted(summary["threads"], "GPU" if summary["engine"] == "gpu" else "thread")
    at_once, parameters = counted(summary["clients_at_once"], "client"), counted(summary["parameters"], "parameter")
    yield f"engine  {summary['engine']}, {at_once} at once on {threads}, {parameters}"
    yield from (f"note    {notice}" for notice in summary["notices"])
    if summary["seconds_estimate"] > LONG:
        yield f"note    more than an hour; {SHORTER}"


def print_plan(planned: Sequence[PlannedRun], folder: Path, *, json: bool) -> None:
    """Print what a comparison would take: a line for each group, and the sum."""
    known = [run.seconds for run in planned if run.seconds is not None]
    total = sum(known) if len(known) == len(planned) else None
    if json:
        return print_json({"out": str(folder), "runs": [run.summary() for run in planned], "seconds_estimate": total})
    print_answer("\n".join(_group_lines(planned)))
    reused = sum(run.state == "finished" for run in planned)
    kept = f", {reused} of them finished already" if reused else ""
    told = "no time can be told" if total is None else f"about {duration(total)} here" if total else "nothing to do"
    print_lines(f"{counted(len(planned), 'run')} in {folder}{kept}, {told}. Nothing was written.")
    for name in sorted({missing for run in planned if (missing := missing_dataset(run.cell.config)) is not None}):
        print_lines(f"note: {name} is not on this machine. To get it: fnrfl data get {name}")
    if total is not None and total > LONG:
        print_lines(f"note: more than an hour; {SHORTER}, or fewer --seeds.")


def _group_lines(planned: Sequence[PlannedRun]) -> Iterator[str]:
    """Yield a line for each group; on a terminal a long name is folded."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in planned:
        groups.setdefault(run.cell.group.label, []).append(run)
    lines = [_group_line(label, runs) for label, runs in groups.items()]
    times, states = (max(len(line[place]) for line in lines) for place in (0, 1))
    for time, state, label in lines:
        first = f"{time:{times}}  {state:{states}}  "
        folded = paragraph(label, shutil.get_terminal_size().columns, first, " " * min(len(first), 40))
        yield "\n".join(folded) if is_terminal() else first + label


def _group_line(label: str, runs: Sequence[PlannedRun]) -> tuple[str, str, str]:
    """(how long its runs take, how far they are, the group)."""
    left = [run for run in runs if run.state != "finished"]
    begun = [run for run in left if run.state == "begun"]
    states = [f"{len(runs) - len(left)} finished"] if len(left) < len(runs) else []
    states += [
        f"seed {run.cell.seed} goes on after round {run.rounds_done} of {run.cell.config.rounds}" for run in begun
    ]
    states += [f"{len(left) - len(begun)} new"] if len(begun) < len(left) else []
    known = [run.seconds for run in left if run.seconds is not None]
    time = "-" if not left else "unknown" if not known else f"about {duration(sum(known))}"
    return time, ", ".join(states), f"{label}{' leak' if runs[0].cell.config.leaks_on else ''}"
