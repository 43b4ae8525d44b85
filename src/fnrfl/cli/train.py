"""Commands that train: run, compare, resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from fnrfl.cli import common, display
from fnrfl.cli.commands import how_to_go_on, print_answer
from fnrfl.cli.common import Json, Log, Quiet, Trust, console, print_json, print_leaks, print_table, quoted
from fnrfl.core.errors import ConfigError, FnrflError, from_system, out_of_memory, sentence
from fnrfl.core.words import counted, printable
from fnrfl.rundir.events import read_events

if TYPE_CHECKING:
    from rich.console import Console

    from fnrfl.config import RunConfig
    from fnrfl.results.compare import Cell, Comparison
    from fnrfl.runs.result import Result

Recipe = Annotated[str | None, Argument(metavar="RECIPE", show_default=False, help="A packaged recipe or a TOML file.")]
# Options of `run`
RunOut = Annotated[
    Path | None, Option("--out", "-o", help="Where the run is kept.", show_default="runs/NAME-METHOD-SEED")
]
DryRun = Annotated[bool, Option("--dry-run", help="Say what it would take, print the resolved config, and stop.")]
# Options of `compare`
Over = Annotated[
    list[str] | None,
    Option("--over", metavar="KEY=A,B,...", help="A key and the values it takes in turn; may be repeated."),
]
Seeds = Annotated[str, Option("--seeds", metavar="0,1,2 or 0-4", help="Seeds of every combination.")]
GridOut = Annotated[
    Path | None, Option("--out", "-o", help="Where the runs are kept.", show_default="runs/compare-NAME-HASH")
]
Baseline = Annotated[
    str | None, Option("--baseline", metavar="WORDS", show_default="the first", help="What differences are taken to.")
]
Target = Annotated[
    float | None, Option("--target", metavar="VALUE", help="Also say what it takes to get the metric there.")
]
Control = Annotated[bool, Option("--control/--no-control", help="Run FNR without its penalty beside every FNR.")]
Report = Annotated[bool, Option("--report/--no-report", help="Write report.html beside the runs.")]
On = Annotated[
    Literal["here", "processes", "ray"],
    Option(
        "--on", help="here: one run after another; side by side: processes, or ray, a Ray cluster (network.address)."
    ),
]
Workers = Annotated[int, Option("--workers", min=1, max=64, metavar="N", help="Runs side by side with --on processes.")]
StopAfter = Annotated[
    str | None, Option("--stop-after", metavar="TIME", help="Begin no run that would not end by then: 90s, 9m or 2h.")
]
PlanOnly = Annotated[bool, Option("--dry-run", help="Say which runs there would be and how long they take, and stop.")]
MAX_SITES = 20  # clients of a run that are listed one by one
HOW_TO_CONTINUE = "To go on, give the same command again: finished runs are kept."


def run(
    recipe: Recipe = None,
    overrides: common.Overrides = None,
    out: RunOut = None,
    overwrite: common.Overwrite = False,
    dry_run: DryRun = False,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
    log: Log = None,
    checkpoint_every: common.Checkpoints = 30.0,
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
    from fnrfl.config import load
    from fnrfl.rundir.places import choose_run_dir

    config = load(*common.recipe_and_overrides(recipe, overrides), trust=trust)
    if dry_run:
        return display.print_forecast(config, json=json)
    options = {"checkpoint_every": checkpoint_every, "overwrite": overwrite}
    _train(config, choose_run_dir(config, out, overwrite=overwrite), options, log, quiet=quiet, json=json)


def resume(
    run_dir: common.RunDir,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
    log: Log = None,
    checkpoint_every: common.Checkpoints = 30.0,
) -> None:
    """Go on with a run that was stopped, as if it had not been.

    \b
    fnrfl resume runs/label-skew-scaffold-fnr-3
    """
    from fnrfl.config import load
    from fnrfl.rundir import directory

    directory.check_is_run(run_dir)
    options = {"checkpoint_every": checkpoint_every, "trust": trust}
    _train(load(run_dir / "config.toml", trust=trust), run_dir, options, log, resumed=True, quiet=quiet, json=json)


def compare(
    recipe: Recipe = None,
    overrides: common.Overrides = None,
    over: Over = None,
    seeds: Seeds = "0,1,2",
    out: GridOut = None,
    baseline: Baseline = None,
    metric: common.Metric = None,
    target: Target = None,
    control: Control = True,
    report: Report = True,
    on: On = "here",
    workers: Workers = 2,
    stop_after: StopAfter = None,
    dry_run: PlanOnly = False,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
    log: Log = None,
    checkpoint_every: common.Checkpoints = 30.0,
) -> None:
    """Run a grid of values and seeds: means, spreads, differences.

    \b
    fnrfl compare digits --over algorithm=fedavg,scaffold --over fnr=off,on
    fnrfl compare digits --over "scenario=iid,label-dirichlet(0.1)" --seeds 0-4 --baseline iid
    fnrfl compare label-skew --over fnr.weight=0,0.1,1 --seeds 0,1 -o runs/weights --metric log_loss --dry-run

    Differences are paired by seed. Stopped, it goes on when the same command is given again: finished runs are kept.
    """
    from fnrfl.results import compare as comparing
    from fnrfl.runs.loggers import named_loggers

    name, words = common.recipe_and_overrides(recipe, overrides)
    if ":" in (metric or "") and not any(word.startswith("metrics=") for word in words):
        words.append(f"metrics={metric}")  # one of the user's own, which the runs must log
    screen = console(quiet=quiet, stderr=json or dry_run)
    with display.notices(screen):
        cells = _grid(name, words, over or [], comparing.read_seeds(seeds), control=control, trust=trust)
    folder = out or comparing.default_out(cells)
    _note(comparing.about_seeds(seeds), screen)
    metric = comparing.compared_metric(cells, metric).name
    how: dict[str, Any] = {"baseline": baseline, "metric": metric, "target": target}
    if dry_run:
        with display.grid_display(screen, metric) as show:
            planned = comparing.plan_grid(cells, folder, **how, progress=show, missing=display.missing_dataset)
        return display.print_plan(planned, folder, json=json)
    how |= {"on": on, "workers": workers, "stop_after": comparing.read_duration(stop_after)}
    how |= {"checkpoint_every": checkpoint_every, "callbacks": named_loggers(log or ())}
    screen.print(f"{counted(len(cells), 'run')}, kept in {folder}, compared by {metric}")
    with how_to_go_on(HOW_TO_CONTINUE.format), display.notices(screen), display.grid_display(screen, metric) as show:
        found = comparing.compare(cells, folder, progress=show, **how)
    _show_comparison(found, screen, json=json)
    if found.left:
        screen.print(f"{counted(found.left, 'run')} would not have ended within {stop_after}. {HOW_TO_CONTINUE}")
    if report and found.runs:
        _report(folder, screen)
    raise typer.Exit(found.exit_code)


def _grid(
    recipe: str | None, overrides: Sequence[str], over: Sequence[str], seeds: Sequence[int], **how: bool
) -> list[Cell]:
    """The cells of a comparison; where a value with commas is refused, it says how to give several values."""
    from fnrfl.results.compare import grid

    try:
        return grid(recipe, overrides, over, seeds, **how)
    except ConfigError as error:
        words = (word.partition("=") for word in overrides if not word.startswith("metrics="))
        pairs = [(key, values) for key, _, values in words if "," in values]
        several = " ".join(f"--over {quoted(f'{key}={values}')}" for key, values in pairs if key in str(error))
        if not several or any(key == "seed" for key, _ in pairs):
            raise
        raise ConfigError(f"{error} To compare several values, write {several}") from error


def _train(
    config: RunConfig,
    run_dir: Path,
    options: dict[str, Any],
    log: Sequence[str] | None,
    *,
    resumed: bool = False,
    quiet: bool,
    json: bool,
) -> None:
    """Start or resume a run, show how it proceeds and what comes out."""
    from fnrfl.runs.loggers import named_loggers

    options |= {"callbacks": named_loggers(log or ())}
    screen, leak = console(quiet=quiet, stderr=json), "leak" if config.leaks_on else ""
    try:
        with how_to_go_on(lambda: _way_on(run_dir, config) or "Nothing was written."):
            screen.print(display.title(config))
            print_leaks(config.leaks_on, quiet=quiet, stderr=json)
            with display.notices(screen), display.display(screen, leak, config) as shown:
                from fnrfl.runs.run import resume, run  # seconds, with torch: the title is there before

                options |= {"progress": shown.round, "phase": shown.phase}
                result = resume(run_dir, **options) if resumed else run(config, out=run_dir, **options)
    except Exception as error:
        if (out_of_memory(error) or from_system(error) is not None) and (way_on := _way_on(run_dir, config)):
            raise FnrflError(sentence(error, way_on)) from error
        raise
    summary = result.summary()
    screen.print(f"{result.headline}, kept in {result.run_dir}")
    if not json and not quiet:
        _show_sites(result, screen)
    _note(display.note_on_one_answer(result), screen)
    print_leaks(config.leaks_on, quiet=quiet, stderr=json)
    if json:
        print_json(summary)


def _show_sites(result: Result, screen: Console) -> None:
    """Each client's accuracy on the test examples that it brought, if there are not too many of them."""
    shares = result.per_site or {}
    known = {name: share for name, share in shares.items() if share is not None}
    if not known:
        return
    worst = min(known, key=known.__getitem__)
    screen.print(
        f"sites: {result.last('accuracy_site'):.4f} on average, each on the test examples that it brought; "
        f"{result.last('accuracy_site_pooled'):.4f} over all of them; the lowest is {printable(worst)} with "
        f"{known[worst]:.4f}"
    )
    if len(shares) > MAX_SITES:
        return
    assert result.run_dir is not None
    counts = next(read_events(result.run_dir / "events.jsonl")).get("site_test_counts")  # older versions have none
    sizes = [[counted(count, "test example") for count in counts]] if counts else []
    accuracies = ("-" if share is None else f"{share:.4f}" for share in shares.values())
    print_table(list(zip(map(printable, shares), accuracies, *sizes, strict=True)))


def _way_on(run_dir: Path, config: RunConfig) -> str:
    """How to resume what was begun; empty where nothing was, or where the old run is still there."""
    from fnrfl.rundir.places import is_begun

    return f"To go on: fnrfl resume {quoted(run_dir)}" if is_begun(config, run_dir) else ""


def _note(note: str | None, screen: Console) -> None:
    if note is not None:
        screen.print(f"note: {note}")


def _show_comparison(found: Comparison, screen: Console, *, json: bool) -> None:
    from fnrfl.results.compare import notes, table, tasks_table

    if json:
        print_answer(found.to_json())
    if screen.is_terminal:
        screen.print(table(found, screen.width), soft_wrap=False)
        if (tasks := tasks_table(found, screen.width)) is not None:
            screen.print(tasks, soft_wrap=False)
        for note in notes(found, screen.width):
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
