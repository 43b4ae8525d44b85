"""Commands that use what runs left behind: report, evaluate, predict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from logging import WARNING
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fnrfl.cli import common
from fnrfl.cli.commands import print_answer, say, stdout_for_the_answer
from fnrfl.cli.common import Json, Quiet, Trust, console, print_json, print_leaks, print_notes, print_table
from fnrfl.cli.display import notices
from fnrfl.core.words import counted, printable
from fnrfl.runs.metrics import OWN

Data = Annotated[
    str,
    Argument(metavar="DATA", show_default=False, help="A data set, file.npz, file.csv, folder/ or module:function."),
]
Client = Annotated[
    str | None,
    Option("--client", metavar="ID", show_default="all of them", help="One client's own model, if it has one."),
]
Metrics = Annotated[
    list[str] | None,
    Option("--metric", metavar="NAME", help="Also show this one: `fnrfl list metrics`, all or module:function."),
]


def report(
    run_dirs: Annotated[
        list[Path], Argument(metavar="RUN_DIR...", show_default=False, help="Runs, or folders with runs in them.")
    ],
    out: Annotated[
        Path | None,
        Option("--out", "-o", metavar="FILE", show_default="report.html in the folder, if there is one folder"),
    ] = None,
    title: Annotated[str | None, Option("--title", help="What it says on top.")] = None,
    metric: common.Metric = None,
    plots: Annotated[
        bool, Option("--plots/--no-plots", help="Also draw figures as files, in plots/; of NAME.html in NAME-plots/.")
    ] = True,
    quiet: Quiet = False,
) -> None:
    """Write one self-contained HTML page about one or several runs.

    \b
    fnrfl report runs/digits-fedavg-0
    fnrfl report runs/digits-fedavg-0 runs/digits-scaffold-0 -o both.html --title "Two methods"
    fnrfl report runs/compare-digits-1a2b3c --metric accuracy_own
    """
    from fnrfl.results.report.page import report as write

    with notices(console(stderr=True), WARNING):
        written = write(run_dirs, out, title=title, metric=metric, plots=plots)
    console(quiet=quiet).print(str(written))


def evaluate(
    run_dir: common.RunDir,
    data: Data,
    client: Client = None,
    metric: Metrics = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Score the model of a finished run on any data.

    \b
    fnrfl evaluate runs/digits-fedavg-0 digits
    fnrfl evaluate runs/mine-fedavg-0 new-patients.csv --json
    fnrfl evaluate runs/mine-fedavg-0 new-patients.csv --metric auc --metric confusion
    fnrfl evaluate runs/mine-fedavg-0 new-patients.csv --metric all

    The run's own data, wherever it lies now, is judged by the test part; other data by the test part that it has of its
    own, or by all of it. Methods that give every client a model of its own are judged by those: the mean, and each.
    """
    from fnrfl.runs.predict import evaluate as score

    names = [name.strip() for words in metric or () for name in words.split(",")]
    scored = score(run_dir, data, client=client, metrics=names, trust=trust)
    found, shown = scored.summary(), scored.shown
    print_leaks(found["leaks"], stderr=json)
    print_notes(scored.notes)
    if json:
        return print_json(found)
    console().print(
        f"accuracy {found['accuracy']:.4f}  balanced {found['balanced_accuracy']:.4f}  loss {found['loss']:.4f}  "
        f"on {counted(found['examples'], 'example')} ({scored.where})"
    )
    counts = (counted(count, "example") for count in found["examples_per_class"])
    by_class = [("class", *found["classes"]), ("accuracy", *map(_shown, found["per_class"])), ("", *counts)]
    by_class += [(name, *map(_shown, found[name])) for name in ("precision", "recall") if name in shown]
    print_table(list(zip(*by_class, strict=True)))
    _print_metrics(found, shown)
    if own := found["per_client"]:
        print_table([("client", "accuracy"), *((printable(str(one)), f"{share:.4f}") for one, share in own.items())])


def _print_metrics(found: dict[str, Any], shown: Sequence[str]) -> None:
    """Print the metrics that are one number, and the confusion matrix, where they were asked for."""
    from fnrfl.runs.quality import TEST_METRICS

    values = {name: (found | found[OWN])[name] for name in shown}
    meanings = {name: TEST_METRICS[name].meaning if name in TEST_METRICS else "yours" for name in shown}
    rows = [(name, _shown(one), meanings[name]) for name, one in values.items() if not isinstance(one, list)]
    if rows:
        print_table([("metric", "value", "meaning"), *rows])
    if "confusion" in shown:
        answers = zip(found["classes"], found["confusion"], strict=True)
        print_table([("class, answer", *found["classes"]), *((name, *map(str, row)) for name, row in answers)])


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def predict(
    run_dir: common.RunDir,
    data: Data,
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="FILE.csv", show_default="print", help="Where it goes.")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a file that is already there.")] = False,
    client: Client = None,
    carried: Annotated[
        list[str] | None,
        Option("--id", metavar="COLUMN", help="A column of the table to carry along; no input. May be given again."),
    ] = None,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Ask the model of a finished run for labels and probabilities.

    \b
    fnrfl predict runs/digits-fedavg-0 new.npz -o predictions.csv
    fnrfl predict runs/mine-fedavg-0 new-patients.csv --id patient --id visit | head
    fnrfl predict runs/photos-fedavg-0 a-folder-of-images/ -o predictions.csv

    Every example gets a line, in the order of the data. Labels may be missing: a .csv with just the model's inputs as
    columns, in any order, a .npz with x alone, a folder of images. Where every client has a model of its own, the
    answer is the mean of theirs, and a column client_ID has what each one says.
    """
    from fnrfl.rundir.outputs import check_new, check_not_read, check_output, write_named
    from fnrfl.runs.predict import predict as ask

    if out is not None:
        check_not_read(check_output(out), data)
        if not overwrite:
            check_new(out)
    with stdout_for_the_answer() if out is None else nullcontext():
        found = ask(run_dir, data, client=client, id_column=carried or (), trust=trust)
        print_leaks(found.trained.config.leaks_on, quiet=quiet, stderr=True)
        print_notes(found.notes, quiet=quiet)
        if out is None:
            return print_answer(found.to_csv())
    write_named(out, found.to_csv())
    console(quiet=quiet).print(f"{counted(len(found.labels), 'prediction')} in {out}")


def reproduce() -> None:
    """Say where the paper's tables are.

    \b
    fnrfl reproduce
    """
    say(
        "fnrfl reproduce is no longer part of the package: the paper's tables, their results and their page are in the "
        "folder reproduction/ of the repository, and `python -m reproduction TABLE` shows and computes them. "
        "`fnrfl run label-skew protocol=paper` still makes a run by the paper's protocol."
    )
    raise typer.Exit(2)
