"""Commands that use what runs left behind: report, evaluate, predict."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from fnrfl.cli.common import Debug, Json, Quiet, RunDir, console, errors_in_words, print_leaks, print_table
from fnrfl.cli.notices import notices

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA", show_default=False, help="A data set, file.npz, file.csv, folder/ or module:function."
    ),
]


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", show_default=False, help="Runs, or folders with runs in them."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", show_default="report.html in the folder, if there is one folder"),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="What it says on top.")] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Also draw figures as files, in plots/.")] = True,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write one self-contained HTML page about one or several runs.

    \b
    fnrfl report runs/digits-fedavg-0
    fnrfl report runs/digits-fedavg-0 runs/digits-scaffold-0 -o both.html --title "Two methods"
    fnrfl report runs/compare-digits-1a2b3c
    """
    with errors_in_words(debug):
        from fnrfl.report.page import report as write

        place = out or (run_dirs[0] if len(run_dirs) == 1 else Path()) / "report.html"
        with notices(console(stderr=True)):
            written = write(run_dirs, place, title=title, plots=plots)
        console(quiet=quiet).print(str(written))


def evaluate(run_dir: RunDir, data: Data, json: Json = False, debug: Debug = False) -> None:
    """Score the model of a finished run on any data.

    \b
    fnrfl evaluate runs/digits-fedavg-0 digits
    fnrfl evaluate runs/mine-fedavg-0 new-patients.csv --json

    Data with a test part is judged by that part, other data by all of it.
    """
    with errors_in_words(debug):
        from fnrfl.predict import evaluate as score

        found = score(run_dir, data).summary()
        print_leaks(found["leaks"], stderr=json)
        if json:
            typer.echo(json_format.dumps(found))
            return
        typer.echo(
            f"accuracy {found['accuracy']:.4f}  balanced {found['balanced_accuracy']:.4f}  loss {found['loss']:.4f}  "
            f"on {found['examples']:,} examples ({found['part']} of {data})"
        )
        shares = ("-" if share is None else f"{share:.4f}" for share in found["per_class"])
        counts = (f"{count:,} examples" for count in found["examples_per_class"])
        print_table(list(zip(("class", *found["classes"]), ("accuracy", *shares), ("", *counts), strict=True)))


def predict(
    run_dir: RunDir,
    data: Data,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.csv", show_default="print", help="Where it goes.")
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Ask the model of a finished run for labels and probabilities.

    \b
    fnrfl predict runs/digits-fedavg-0 new.npz -o predictions.csv
    fnrfl predict runs/mine-fedavg-0 new-patients.csv | head
    fnrfl predict runs/photos-fedavg-0 a-folder-of-images/ -o predictions.csv

    Without labels: a .csv with just the model's inputs as columns, a .npz with x alone, a folder of images.
    """
    with errors_in_words(debug):
        from fnrfl.outputs import check_output, write
        from fnrfl.predict import predict as ask

        if out is not None:
            check_output(out)
        found = ask(run_dir, data)
        print_leaks(found.trained.config.leaks_on, quiet=quiet, stderr=True)
        if out is None:
            typer.echo(found.to_csv(), nl=False)
            return
        write(out, found.to_csv())
        console(quiet=quiet).print(f"{len(found.labels):,} predictions in {out}")
