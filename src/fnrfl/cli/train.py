"""Commands that train: run, compare, resume."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from logging import INFO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fnrfl.cli.common import (
    Checkpoints,
    Debug,
    Json,
    Log,
    MetricOption,
    OverridesArgument,
    Quiet,
    RunDirArgument,
    Trust,
    console,
    errors_in_words,
    how_to_go_on,
    print_answer,
    print_leaks,
    print_table,
    quoted,
    recipe_and_overrides,
)
from fnrfl.cli.display import display, grid_display, note_on_one_answer, notices, title
from fnrfl.cli.dry_run import missing_dataset, print_forecast, print_plan
from fnrfl.core.errors import ConfigError, FnrflError, from_system, out_of_memory, sentence
from fnrfl.core.words import counted, printable
from fnrfl.rundir.events import read_events

if TYPE_CHECKING:
    from rich.console import Console

    from fnrfl.config import RunConfig
    from fnrfl.results.compare import Cell, Comparison
    from fnrfl.runs.result import Result

Recipe = Annotated[
    str | None, typer.Argument(metavar="RECIPE", show_default=False, help="A packaged recipe or a TOML file.")
]
# Options of `run`
RunOut = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where the run is kept.", show_default="runs/NAME-METHOD-SEED")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run that is already there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would take, print the resolved config, and stop.")]
# Options of `compare`
Over = Annotated[
    list[str] | None,
    typer.Option("--over", metavar="KEY=A,B,...", help="A key and the values it takes in turn; may be repeated."),
]
Seeds = Annotated[str, typer.Option("--seeds", metavar="0,1,2 or 0-4", help="Seeds of every combination.")]
GridOut = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where the runs are kept.", show_default="runs/compare-NAME-HASH")
]
Baseline = Annotated[
    str | None,
    typer.Option("--baseline", metavar="WORDS", show_default="the first", help="What differences are taken to."),
]
TargetOption = Annotated[
    float | None, typer.Option("--target", metavar="VALUE", help="Also say what it takes to get the metric there.")
]
Control = Annotated[bool, typer.Option("--control/--no-control", help="Run FNR without its penalty beside every FNR.")]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html beside the runs.")]
On = Annotated[
    Literal["here", "processes", "ray"],
    typer.Option(
        "--on",
        help="here: one run after another; side by side: processes, or ray, a Ray cluster (network.address).",
    ),
]
WorkerCount = Annotated[
    int, typer.Option("--workers", min=1, max=64, metavar="N", help="Runs side by side with --on processes.")
]
StopAfter = Annotated[
    str | None,
    typer.Option("--stop-after", metavar="TIME", help="Begin no run that would not end by then: 90s, 9m or 2h."),
]
PlanOnly = Annotated[
    bool, typer.Option("--dry-run", help="Say which runs there would be and how long they take, and stop.")
]
MAX_SITES = 20  # clients of a run that are listed one by one
HOW_TO_CONTINUE = "To go on, give the same command again: finished runs are kept."


def run(
    recipe: Recipe = None,
    overrides: OverridesArgument = None,
    out: RunOut = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
    log: Log = None,
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
        from fnrfl.runs.loggers import named_loggers

        config = load(*recipe_and_overrides(recipe, overrides), trust=trust)
        if dry_run:
            print_forecast(config, json=json)
            return
        options = {"callbacks": named_loggers(log or ()), "checkpoint_every": checkpoint_every, "overwrite": overwrite}
        _train(config, choose_run_dir(config, out, overwrite=overwrite), options, quiet=quiet, json=json)


def resume(
    run_dir: RunDirArgument,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
    log: Log = None,
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
        from fnrfl.runs.loggers import named_loggers

        options = {"callbacks": named_loggers(log or ()), "checkpoint_every": checkpoint_every, "trust": trust}
        directory.check_is_run(run_dir)
        config = load(run_dir / "config.toml", trust=trust)
        _train(config, run_dir, options, resumed=True, quiet=quiet, json=json)


def compare(
    recipe: Recipe = None,
    overrides: OverridesArgument = None,
    over: Over = None,
    seeds: Seeds = "0,1,2",
    out: GridOut = None,
    baseline: Baseline = None,
    metric: MetricOption = None,
    target: TargetOption = None,
    control: Control = True,
    report: Report = True,
    on: On = "here",
    workers: WorkerCount = 2,
    stop_after: StopAfter = None,
    dry_run: PlanOnly = False,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
    log: Log = None,
    checkpoint_every: Checkpoints = 30.0,
    debug: Debug = False,
) -> None:
    """Run a grid of values and seeds: means, spreads, differences.

    \b
    fnrfl compare digits --over algorithm=fedavg,scaffold --over fnr=off,on
    fnrfl compare digits --over "scenario=iid,label-dirichlet(0.1)" --seeds 0-4 --baseline iid
    fnrfl compare label-skew --over fnr.weight=0,0.1,1 --seeds 0,1 -o runs/weights --metric log_loss --dry-run

    Differences are paired by seed. Stopped, it goes on when the same command is given again: finished runs are kept.
    """
    from fnrfl.results import compare as comparing

    with errors_in_words(debug, answers=json or dry_run):
        words = _with_own_metric(metric, *recipe_and_overrides(recipe, overrides))
        cells = _grid(*words, over or [], comparing.read_seeds(seeds), control=control, trust=trust)
        folder = out or comparing.default_out(cells)
        screen = console(quiet=quiet, stderr=json or dry_run)
        _note(comparing.about_seeds(seeds), screen)
        judged = {"baseline": baseline, "metric": comparing.compared_metric(cells, metric).name, "target": target}
        if dry_run:
            return _plan(cells, folder, judged, screen, json=json)
        placed = {"on": on, "workers": workers, "stop_after": comparing.read_duration(stop_after)}
        options = judged | placed | {"checkpoint_every": checkpoint_every}
        found = _run_grid(cells, folder, screen, log or (), options)
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


# -- a run -------------------------------------------------------------------------------------------------------------


def _train(
    config: RunConfig, run_dir: Path, options: dict[str, Any], *, resumed: bool = False, quiet: bool, json: bool
) -> None:
    """Start or resume a run, show how it proceeds and what comes out."""
    screen = console(quiet=quiet, stderr=json)
    leak = "leak" if config.leaks_on else ""
    try:
        with how_to_go_on(lambda: _way_on(run_dir, config) or "Nothing was written."):
            screen.print(title(config))
            print_leaks(config.leaks_on, quiet=quiet, stderr=json)
            with notices(screen, INFO), display(screen, leak, config) as shown:
                from fnrfl.runs.run import resume, run  # seconds, with torch: the title is there before

                options |= {"progress": shown.round, "phase": shown.phase}
                result = resume(run_dir, **options) if resumed else run(config, out=run_dir, **options)
    except Exception as error:
        if (out_of_memory(error) or from_system(error) is not None) and _way_on(run_dir, config):
            raise FnrflError(sentence(error, _way_on(run_dir, config))) from error
        raise
    summary = result.summary()
    screen.print(f"{result.headline}, kept in {result.run_dir}")
    if not json and not quiet:
        _show_sites(result, screen)
    _note(note_on_one_answer(result), screen)
    print_leaks(config.leaks_on, quiet=quiet, stderr=json)
    if json:
        print_answer(json_format.dumps(summary, allow_nan=False))


def _show_sites(result: Result, screen: Console) -> None:
    """Each client's accuracy on the test examples that it brought, if there are not too many of them."""
    known = {name: share for name, share in (result.per_site or {}).items() if share is not None}
    if not known:
        return
    worst = min(known, key=lambda name: known[name])
    screen.print(
        f"sites: {result.last('accuracy_site'):.4f} on average, each on the test examples that it brought; "
        f"{result.last('accuracy_site_pooled'):.4f} over all of them; the lowest is {printable(worst)} with "
        f"{known[worst]:.4f}"
    )
    if result.per_site and len(result.per_site) <= MAX_SITES:
        shares = ("-" if share is None else f"{share:.4f}" for share in result.per_site.values())
        columns = [map(printable, result.per_site), shares, *_site_test_sizes(result)]
        print_table(list(zip(*columns, strict=True)))


def _site_test_sizes(result: Result) -> list[list[str]]:
    """How many test examples each client brought, in words: a column, or none for runs of versions that did not say."""
    assert result.run_dir is not None
    counts = next(read_events(result.run_dir / "events.jsonl")).get("site_test_counts", [])
    return [[counted(count, "test example") for count in counts]] if counts else []


def _way_on(run_dir: Path, config: RunConfig) -> str:
    """How to resume what was begun; empty where nothing was, or where the old run is still there."""
    from fnrfl.rundir.places import is_begun

    return f"To go on: fnrfl resume {quoted(run_dir)}" if is_begun(config, run_dir) else ""


# -- a comparison ------------------------------------------------------------------------------------------------------


def _run_grid(
    cells: list[Cell], folder: Path, screen: Console, log: Sequence[str], options: dict[str, Any]
) -> Comparison:
    """Run the cells, and show how they proceed; `log` names the loggers that hear of it."""
    from fnrfl.results.compare import compare
    from fnrfl.runs.loggers import named_loggers

    options |= {"callbacks": named_loggers(log)}
    screen.print(f"{counted(len(cells), 'run')}, kept in {folder}, compared by {options['metric']}")
    with (
        how_to_go_on(lambda: HOW_TO_CONTINUE),
        notices(screen, INFO),
        grid_display(screen, options["metric"]) as show,
    ):
        return compare(cells, folder, progress=show, **options)


def _note(note: str | None, screen: Console) -> None:
    if note is not None:
        screen.print(f"note: {note}")


def _plan(cells: list[Cell], folder: Path, judged: dict[str, Any], screen: Console, *, json: bool) -> None:
    """Print which runs a comparison would have, and how long they take."""
    from fnrfl.results.compare import plan_grid

    with grid_display(screen, judged["metric"]) as show:
        planned = plan_grid(cells, folder, **judged, progress=show, missing=missing_dataset)
    print_plan(planned, folder, json=json)


def _with_own_metric(metric: str | None, recipe: str | None, overrides: list[str]) -> tuple[str | None, list[str]]:
    """The recipe and the changes to it; a metric module:function is one that the runs must log."""
    logged = any(word.startswith("metrics=") for word in overrides)
    return recipe, overrides if logged or ":" not in (metric or "") else [*overrides, f"metrics={metric}"]


def _show_comparison(found: Comparison, screen: Console, *, json: bool) -> None:
    from fnrfl.results.compare import notes, table

    if json:
        print_answer(found.to_json())
    if screen.is_terminal:
        screen.print(table(found, screen.width), soft_wrap=False)
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
