"""The command line: it parses and delegates, and decides nothing."""

from __future__ import annotations

import json as json_format
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fnrfl.errors import ConfigError, FnrflError

if TYPE_CHECKING:
    from fnrfl.config import RunConfig
    from fnrfl.runs import Result

app = typer.Typer(
    help="Federated learning for skewed data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # brackets in the help mean optional arguments, not markup
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Event = Mapping[str, Any]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object; the rest goes to stderr.")]
SUBJECTS = ("algorithms", "models", "datasets", "scenarios", "penalties", "engines", "recipes", "keys")
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main() -> None:
    """The `fnrfl` command."""
    app()


def _version(asked: bool) -> None:
    if asked:
        from fnrfl import __version__

        typer.echo(f"fnrfl {__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def run(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", show_default=False, help="A packaged recipe or a TOML file.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False, help="Changes to it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where the run is kept.", show_default="runs/NAME-SEED")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is already there.")] = False,
    quiet: Quiet = False,
    json: Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
    checkpoint_every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How often to save what `fnrfl resume` needs.")
    ] = 30.0,
    debug: Debug = False,
) -> None:
    """Run one experiment: a packaged recipe, a TOML file, or the embedded example.

    \b
    fnrfl run
    fnrfl run label-skew algorithm=scaffold fnr=on seed=3
    fnrfl run digits "scenario=label-dirichlet(0.1)" client.lr=0.1 -o runs/try
    fnrfl run my.toml --json

    `fnrfl list recipes` and `fnrfl list keys` say what there is.
    """
    changes = overrides or []
    if recipe is not None and "=" in recipe:
        changes, recipe = [recipe, *changes], None
    with _errors_in_words(debug):
        from fnrfl.config import load

        config = load(recipe, changes)
        if dry_run:
            typer.echo(config.to_toml(), nl=False)
            return

        run_dir = out or config.run_dir

        def start(progress: Callable[[Event], None]) -> Result:
            from fnrfl.runs import run

            return run(config, out=run_dir, overwrite=overwrite, progress=progress, checkpoint_every=checkpoint_every)

        _carry_out(start, config, run_dir, quiet=quiet, json=json)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)],
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Go on with a run that was stopped; the result is the same as without the stop.

    \b
    fnrfl resume runs/label-skew-3
    """
    with _errors_in_words(debug):
        from fnrfl.config import load

        if not (run_dir / "config.toml").is_file():
            raise ConfigError(
                f"{run_dir} is not a run: it has no config.toml. Give a folder that `fnrfl run` has made."
            )
        config = load(run_dir / "config.toml")

        def start(progress: Callable[[Event], None]) -> Result:
            from fnrfl.runs import resume

            return resume(run_dir, progress=progress)

        _carry_out(start, config, run_dir, quiet=quiet, json=json)


@app.command("list")
def list_(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", show_default=False, help=", ".join(SUBJECTS))],
) -> None:
    """Say what there is, by name.

    \b
    fnrfl list algorithms
    fnrfl list keys
    """
    with _errors_in_words(debug=False):
        _print_table(_rows(subject))


def _rows(subject: str) -> list[tuple[str, ...]]:
    from fnrfl import registry
    from fnrfl.config import describe_keys

    tables: dict[str, Callable[[], Mapping[str, str]]] = {
        "algorithms": registry.algorithms,
        "models": lambda: registry.MODELS,
        "datasets": lambda: registry.DATASETS | registry.DATASET_FORMS,
        "scenarios": registry.scenarios,
        "penalties": lambda: registry.PENALTIES,
        "engines": lambda: registry.ENGINES,
        "recipes": registry.recipes,
    }
    if subject == "keys":
        return [(key.name, key.type, str(key.default), key.range, key.meaning) for key in describe_keys()]
    if subject not in tables:
        raise ConfigError(f'There is no list of "{subject}". {registry.hint(subject, SUBJECTS)}.')
    return list(tables[subject]().items())


def _carry_out(
    start: Callable[[Callable[[Event], None]], Result], config: RunConfig, run_dir: Path, *, quiet: bool, json: bool
) -> None:
    """Start a run or go on with one, show how it proceeds and what comes out."""
    console = Console(stderr=json, quiet=quiet, highlight=False, markup=False, soft_wrap=True)
    leak = f"leak: {', '.join(config.leaks_on)}" if config.leaks_on else ""
    console.print(_title(config))
    if leak:
        console.print(leak)
    try:
        with _display(console, "leak" if leak else "") as show:
            result = start(show)
    except KeyboardInterrupt:
        begun = (run_dir / "config.toml").is_file()
        way_on = f"To go on: fnrfl resume {shlex.quote(str(run_dir))}" if begun else "Nothing was written."
        typer.echo(f"fnrfl: stopped. {way_on}", err=True)
        raise typer.Exit(130) from None
    summary = result.summary()
    console.print(f"accuracy {summary['accuracy']:.4f} after {summary['rounds']} rounds, kept in {result.run_dir}")
    if leak:
        console.print(leak)
    if json:
        typer.echo(json_format.dumps(summary))


def _title(config: RunConfig) -> str:
    method = config.algorithm.name + ("" if config.fnr is None else " + FNR")
    return (
        f"{config.name}: {method}, {config.dataset}, {config.model.name}, {config.scenario}, "
        f"{config.clients} clients, {config.rounds} rounds, seed {config.seed}"
    )


@contextmanager
def _display(console: Console, leak: str) -> Iterator[Callable[[Event], None]]:
    """Rounds as they come: a bar on a terminal, one line each in a pipe."""
    if console.quiet or not console.is_terminal:
        yield lambda event: console.print(
            f"round {event['round']}/{event['rounds']}  accuracy {event['accuracy']:.4f}  loss {event['loss']:.4f}  "
            f"{event['seconds']:.1f} s  {leak}".rstrip()
        )
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("round", total=None)

        def show(event: Event) -> None:
            text = f"accuracy {event['accuracy']:.4f} {leak}".rstrip()
            if bar.tasks[task].total is None:  # a resumed run starts in the middle, which must not count as speed
                bar.reset(task, total=event["rounds"], completed=event["round"], description=text)
            else:
                bar.update(task, completed=event["round"], description=text)

        yield show


@contextmanager
def _errors_in_words(debug: bool) -> Iterator[None]:
    """One line on stderr and an exit code for whatever is the user's to mend."""
    try:
        yield
    except FnrflError as error:
        if debug:
            raise
        typer.echo(f"fnrfl: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(error.exit_code) from None


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns, folded to fit a terminal; in a pipe one row is one line."""
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
