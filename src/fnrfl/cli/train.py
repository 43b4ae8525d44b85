"""Commands that train: run, compare, resume."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fnrfl.cli.common import (
    Checkpoints,
    Debug,
    Json,
    Overrides,
    Quiet,
    RunDir,
    Trust,
    answer,
    console,
    errors_in_words,
    print_leaks,
    quoted,
    recipe_and_overrides,
    say,
)
from fnrfl.cli.notices import notices
from fnrfl.config.spelling import counted
from fnrfl.core.errors import FnrflError, from_system, out_of_memory, sentence
from fnrfl.rundir.interrupt import OutputClosed, exit_code
from fnrfl.runs.metrics import MIB

if TYPE_CHECKING:
    from rich.console import Console

    from fnrfl.config import RunConfig
    from fnrfl.results.compare import Comparison, Notice
    from fnrfl.runs.result import Result

Event = Mapping[str, Any]
Recipe = Annotated[
    str | None, typer.Argument(metavar="RECIPE", show_default=False, help="A packaged recipe or a TOML file.")
]


def run(
    recipe: Recipe = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where the run is kept.", show_default="runs/NAME-METHOD-SEED")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is already there.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take, print the resolved config, and stop.")
    ] = False,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
    checkpoint_every: Checkpoints = 30.0,
    debug: Debug = False,
) -> None:
    """Run one experiment; without a recipe, the embedded example.

    \b
    fnrfl run
    fnrfl run label-skew algorithm=scaffold fnr=on seed=3
    fnrfl run digits "scenario=label-dirichlet(0.1)" client.lr=0.1 -o runs/try
    fnrfl run my.toml --json
    fnrfl run label-skew --dry-run          steps, bytes, memory and time; then the config, as a TOML file
    fnrfl run label-skew --dry-run > my.toml

    `fnrfl list recipes` and `fnrfl list keys` say what there is.
    """
    with errors_in_words(debug, answers=json or dry_run):
        from fnrfl.config import load
        from fnrfl.rundir.places import choose_run_dir

        config = load(*recipe_and_overrides(recipe, overrides), trust=trust)
        if dry_run:
            _forecast(config, json=json)
            return
        run_dir = choose_run_dir(config, out, overwrite=overwrite)

        def start(shown: Display) -> Result:
            from fnrfl.runs.run import run

            return run(
                config,
                out=run_dir,
                overwrite=overwrite,
                progress=shown.round,
                phase=shown.phase,
                checkpoint_every=checkpoint_every,
            )

        _carry_out(start, config, run_dir, quiet=quiet, json=json)


def resume(
    run_dir: RunDir,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
    checkpoint_every: Checkpoints = 30.0,
    debug: Debug = False,
) -> None:
    """Go on with a run that was stopped, as if it had not been.

    \b
    fnrfl resume runs/label-skew-scaffold-fnr-3
    """
    with errors_in_words(debug, answers=json):
        from fnrfl.config import load
        from fnrfl.rundir import directory

        directory.check(run_dir)
        config = load(run_dir / "config.toml", trust=trust)

        def start(shown: Display) -> Result:
            from fnrfl.runs.run import resume

            return resume(
                run_dir, trust=trust, progress=shown.round, phase=shown.phase, checkpoint_every=checkpoint_every
            )

        _carry_out(start, config, run_dir, quiet=quiet, json=json)


def compare(
    recipe: Recipe = None,
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None,
        typer.Option("--over", metavar="KEY=A,B,...", help="A key and the values it takes in turn; may be repeated."),
    ] = None,
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="0,1,2 or 0-4", help="Seeds of every combination.")
    ] = "0,1,2",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where the runs are kept.", show_default="runs/compare-NAME-HASH"),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="WORDS", show_default="the first", help="What differences are taken to."),
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", metavar="ACCURACY", help="Also say what it takes to get there.")
    ] = None,
    control: Annotated[
        bool, typer.Option("--control/--no-control", help="Run FNR without its penalty beside every FNR.")
    ] = True,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html beside the runs.")] = True,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
    checkpoint_every: Checkpoints = 30.0,
    debug: Debug = False,
) -> None:
    """Run a grid of values and seeds: means, spreads, differences.

    \b
    fnrfl compare digits --over algorithm=fedavg,scaffold --over fnr=off,on
    fnrfl compare digits rounds=5 --over "scenario=iid,label-dirichlet(0.1)" --seeds 0-4 --baseline iid
    fnrfl compare label-skew --over fnr.weight=0,0.1,1 --seeds 0,1 -o runs/weights --json

    Differences are paired by seed. Stopped, it goes on when the same command is given again: finished runs are kept.
    """
    with errors_in_words(debug, answers=json):
        from fnrfl.results import compare as comparing

        words = recipe_and_overrides(recipe, overrides)
        cells = comparing.grid(*words, over or [], comparing.read_seeds(seeds), control=control, trust=trust)
        folder = out or comparing.default_out(cells)
        screen = console(quiet=quiet, stderr=json)
        if (note := comparing.about_seeds(seeds)) is not None:
            screen.print(f"note: {note}")
        screen.print(f"{counted(len(cells), 'run')}, kept in {folder}")
        try:
            with _grid_display(screen) as show:
                found = comparing.compare(
                    cells, folder, baseline=baseline, target=target, progress=show, checkpoint_every=checkpoint_every
                )
        except KeyboardInterrupt as stop:
            say(f"fnrfl: {_why(stop)} To go on, give the same command again: finished runs are kept.")
            raise typer.Exit(exit_code(stop)) from None
        _show_comparison(found, screen, json=json)
        if report and found.runs:
            _report(folder, screen)
        raise typer.Exit(found.exit_code)


# -- a run -------------------------------------------------------------------------------------------------------------


def _carry_out(
    start: Callable[[Display], Result], config: RunConfig, run_dir: Path, *, quiet: bool, json: bool
) -> None:
    """Start a run or go on with one, show how it proceeds and what comes out."""
    screen = console(quiet=quiet, stderr=json)
    leak = "leak" if config.leaks_on else ""
    try:
        screen.print(title(config))
        print_leaks(config.leaks_on, quiet=quiet, stderr=json)
        with notices(screen), display(screen, leak) as shown:
            result = start(shown)
    except KeyboardInterrupt as stop:
        say(f"fnrfl: {_why(stop)} {_way_on(run_dir, config) or 'Nothing was written.'}")
        raise typer.Exit(exit_code(stop)) from None
    except Exception as error:
        if (out_of_memory(error) or from_system(error) is not None) and _way_on(run_dir, config):
            raise FnrflError(sentence(error, _way_on(run_dir, config))) from error
        raise
    summary = result.summary()
    screen.print(
        f"accuracy {summary['accuracy']:.4f} after {counted(summary['rounds'], 'round')}, kept in {result.run_dir}"
    )
    print_leaks(config.leaks_on, quiet=quiet, stderr=json)
    if json:
        answer(json_format.dumps(summary, allow_nan=False))


def _why(stop: KeyboardInterrupt) -> str:
    return "the output was closed." if isinstance(stop, OutputClosed) else "stopped."


def _way_on(run_dir: Path, config: RunConfig) -> str:
    """How to resume what was begun; empty where nothing was, or where the old run is still there."""
    from fnrfl.rundir.places import is_begun

    return f"To go on: fnrfl resume {quoted(run_dir)}" if is_begun(config, run_dir) else ""


def title(config: RunConfig) -> str:
    """A run in one line."""
    method = config.algorithm.name + ("" if config.fnr is None else " + FNR")
    return (
        f"{config.name}: {method}, {config.dataset}, {config.model.name}, {config.scenario}, "
        f"{counted(config.clients, 'client')}, {counted(config.rounds, 'round')}, seed {config.seed}"
    )


@dataclass(frozen=True)
class Display:
    """Who is told about a run while it goes on."""

    round: Callable[[Event], None]  # at the end of each
    phase: Callable[[str], None]  # its name, at the start of each


@contextmanager
def display(screen: Console, leak: str) -> Iterator[Display]:
    """Rounds as they come: a bar with the phase under way on a terminal, one line each in a pipe."""
    if screen.quiet or not screen.is_terminal:

        def line(event: Event) -> None:
            screen.print(
                f"round {event['round']}/{event['rounds']}  accuracy {event['accuracy']:.4f}  "
                f"loss {event['loss']:.4f}  {event['seconds']:.1f} s  {leak}".rstrip()
            )

        yield Display(line, lambda name: None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    words = TextColumn("{task.description}"), TextColumn("{task.fields[phase]:<8}", style="dim")
    with Progress(words[0], BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), words[1], console=screen) as bar:
        task = bar.add_task("getting ready", total=None, phase="")

        def show(event: Event) -> None:
            text = f"accuracy {event['accuracy']:.4f} {leak}".rstrip()
            if bar.tasks[task].total is None:  # a resumed run starts in the middle, which must not count as speed
                bar.reset(task, total=event["rounds"], completed=event["round"], description=text)
            else:
                bar.update(task, completed=event["round"], description=text)

        yield Display(show, lambda name: bar.update(task, phase=name))


# -- a dry run ---------------------------------------------------------------------------------------------------------


def _forecast(config: RunConfig, *, json: bool) -> None:
    """What a run would take, as comments above its config, so that the whole is a TOML file that runs."""
    from fnrfl.data.sources import available

    missing = next((entry.name for entry in available() if entry.name == config.dataset and not entry.found), None)
    if missing is not None:
        lines = [f"{missing} is not on this machine, so nothing can be counted. To get it: fnrfl data get {missing}"]
        summary: dict[str, Any] = {"missing": missing, "leaks": list(config.leaks_on), "config": config.to_toml()}
    else:
        from fnrfl.runs.forecast import forecast

        found = forecast(config)
        config, summary = found.config, found.summary()
        lines = list(_forecast_lines(summary))
    if json:
        answer(json_format.dumps(summary, allow_nan=False))
        return
    leaks = [f"leak: {', '.join(config.leaks_on)}"] if config.leaks_on else []
    for line in (title(config), *leaks, *lines):
        answer(f"# {line}")
    answer(f"\n{config.to_toml()}")


def _forecast_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    phases = ", ".join(f"{count:,} {phase}" for phase, count in summary["steps_by_phase"].items())
    yield f"steps   {summary['steps']:,}: {phases}"
    for way in ("up", "down"):
        each, total = summary[f"bytes_{way}_per_round"], summary[f"bytes_{way}"]
        yield f"{way:6}  {counted(each, 'byte')} a round, {total:,} in all ({total / MIB:.1f} MiB)"
    memory = summary["memory_estimate"]
    yield f"memory  {'unknown' if memory is None else f'about {memory / MIB:.0f} MiB'}"
    yield f"time    about {_duration(summary['seconds_estimate'])} here, judging by a few steps that were thrown away"
    place = "GPU" if summary["engine"] == "gpu" else "thread"
    yield (
        f"engine  {summary['engine']}, {counted(summary['clients_at_once'], 'client')} at once on "
        f"{counted(summary['threads'], place)}, {counted(summary['parameters'], 'parameter')}"
    )
    yield from (f"note    {notice}" for notice in summary["notices"])


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{max(1, round(seconds))} s"


# -- a comparison ------------------------------------------------------------------------------------------------------


@contextmanager
def _grid_display(screen: Console) -> Iterator[Callable[[Notice], None]]:
    """Runs as they come: a bar with the run under way on a terminal, one line for each in a pipe."""

    def line(notice: Notice) -> str | None:
        name = f"{notice.number}/{notice.total}  {notice.cell.name}"
        leak = "  leak" if notice.cell.config.leaks_on else ""
        match notice.what:
            case "done" if notice.event is not None:
                return f"{name}  accuracy {notice.event['accuracy']:.4f}{leak}"
            case "kept":
                return f"{name}  is finished already{leak}"
            case "failed":
                return f"{name}  failed: {notice.error}"
        return None

    if screen.quiet or not screen.is_terminal:

        def tell(notice: Notice) -> None:
            if (said := line(notice)) is not None:
                screen.print(said)

        yield tell
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen) as bar:
        task = bar.add_task("checking", total=None)

        def show(notice: Notice) -> None:
            if (said := line(notice)) is not None:
                screen.print(said)
            text = f"{notice.what} {notice.cell.name}"
            if notice.what == "round" and notice.event is not None:
                text = f"{notice.cell.name} round {notice.event['round']}/{notice.event['rounds']}"
            done = notice.number if notice.what in ("done", "kept", "failed") else notice.number - 1
            bar.update(task, total=notice.total, completed=0 if notice.what == "check" else done, description=text)

        yield show


def _show_comparison(found: Comparison, screen: Console, *, json: bool) -> None:
    from fnrfl.results.compare import notes, table

    if json:
        answer(found.to_json())
    if screen.is_terminal:
        screen.print(table(found, screen.width), soft_wrap=False)
        for note in notes(found):
            screen.print(note)
    elif not json:
        screen.print(found.to_markdown(), end="")


def _report(folder: Path, screen: Console) -> None:
    """A page is an extra: whatever it lacks must not spoil the comparison."""
    from fnrfl.results.report.page import report

    try:
        screen.print(f"report: {report([folder], folder / 'report.html', plots=False)}")
    except FnrflError as error:
        screen.print(f"note: no report was written. {error}")
