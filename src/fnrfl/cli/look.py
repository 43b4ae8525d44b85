"""Commands that look at what there is: scenario, data, doctor."""

from __future__ import annotations

import json as json_format
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fnrfl.cli.common import (
    Debug,
    Json,
    OverridesArgument,
    Quiet,
    Trust,
    command_group,
    console,
    errors_in_words,
    print_answer,
    print_table,
)
from fnrfl.cli.keywords import KeyValueCommand
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted, printable

if TYPE_CHECKING:
    from fnrfl.config import RunConfig
    from fnrfl.results.skew import Skew
    from fnrfl.runs.setup.build import Built

ROWS = 40  # clients shown of a split

scenario = command_group("Draw a split before training: who gets what, how skewed.")
data = command_group("Fetch and verify data sets; say what is on disk.")

Text = Annotated[
    str,
    typer.Argument(metavar="SCENARIO", show_default=False, help="As in a config, or the name of a recipe."),
]


# -- scenarios ---------------------------------------------------------------------------------------------------------


@scenario.command("show", cls=KeyValueCommand)
def show(
    text: Text,
    overrides: OverridesArgument = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw it as a figure, too.")] = None,
    trust: Trust = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw a split: heat-map, sizes, scores of the skew.

    \b
    fnrfl scenario show "label-dirichlet(0.1)"
    fnrfl scenario show "label-classes(2) + feature-noise(0.3)" dataset=cifar10 clients=20 seed=1
    fnrfl scenario show label-skew --png split.png

    The split is the one that `fnrfl run` would draw with the same keys. Unless a recipe is named, they are those of
    the embedded example.
    """
    with errors_in_words(debug, answers=json):
        from fnrfl.results.skew import figure, skew
        from fnrfl.rundir.outputs import check_output

        if png is not None:
            check_output(png)
        built = _built(text, overrides, trust)
        counts, config = built.partition.counts, built.config
        scores = skew(counts, built.partition.levels)
        title = f"{config.scenario}, {config.dataset.name}, {counted(config.clients, 'client')}, seed {config.seed}"
        if png is not None:
            figure(counts, built.dataset.classes, scores, title, png, built.partition.ids)
        if json:
            named = {"scenario": config.scenario, "dataset": config.dataset.name, "seed": config.seed}
            split = {
                "sha256": built.partition.sha256,
                "counts": counts.tolist(),
                **({} if built.partition.ids is None else {"ids": list(built.partition.ids)}),
            }
            print_answer(json_format.dumps(named | scores.summary() | split))
            return
        _show_split(title, built, scores)
        if png is not None:
            typer.echo(f"drawn in {png}")


@scenario.command("save", cls=KeyValueCommand)
def save(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", show_default=False, help="Where it goes.")],
    text: Text,
    overrides: OverridesArgument = None,
    trust: Trust = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Draw a split and write down which example goes to whom.

    \b
    fnrfl scenario save split.json "label-dirichlet(0.1)" dataset=digits clients=10 seed=0

    The file has hashes, and the format of a run's partition.json.
    """
    with errors_in_words(debug):
        from fnrfl.rundir.outputs import check_output, write_output

        check_output(file)
        if file.suffix != ".json":
            raise ConfigError(f"{file} does not end in .json; give the file first and then the scenario.")
        built = _built(text, overrides, trust)
        manifest = built.manifest()
        write_output(file, json_format.dumps(manifest) + "\n")
        console(quiet=quiet).print(f"{built.config.scenario} in {file}, sha256 {built.partition.sha256}")


def _built(text: str, overrides: Sequence[str] | None, trust: bool) -> Built:
    from fnrfl.runs.setup.build import build

    return build(_config(text, overrides or (), trust))


def _config(text: str, overrides: Sequence[str], trust: bool) -> RunConfig:
    """The config of a recipe, or the embedded example's with another scenario."""
    from fnrfl.config import load, registry

    if text in registry.recipes() or text.endswith(".toml"):
        return load(text, overrides, trust=trust)
    if re.match(r"[\w.]+=", text):  # no scenario was given, only keys
        return load(None, [text, *overrides])
    return load(None, [*overrides, f"scenario={text}"])


def _show_split(title: str, built: Built, scores: Skew) -> None:
    from fnrfl.results.skew import SHADES, binned, heat_map

    counts = built.partition.counts
    classes = counted(counts.shape[1], "class", "classes")
    typer.echo(f"{title}: {counted(int(scores.sizes.sum()), 'example')}, {classes}")
    noisy = built.partition.noise is not None
    labels = _class_labels(counts.shape[1], binned(counts).shape[1])
    rows = [("client", labels, "examples", "classes", "distance", *(["noise"] if noisy else []))]
    for client, shades in enumerate(heat_map(counts)[:ROWS]):
        cells = (f"{scores.sizes[client]:,}", f"{scores.classes[client]:.1f}", f"{scores.distance[client]:.2f}")
        name, noise = printable(built.partition.names[client]), [f"{scores.noise[client]:.3g}"] if noisy else []
        rows.append((name, shades, *cells, *noise))
    print_table(rows)
    if len(counts) > ROWS:
        typer.echo(f"and {counted(len(counts) - ROWS, 'client')} more")
    largest = int(binned(counts).max())
    typer.echo(
        f"\nshades      {' '.join(SHADES[1:])} up to {counted(largest, 'example')} of a class\n"
        f"labels      Jensen-Shannon distance to all data {scores.distance.mean():.3f} on average (0 even, 1 most)\n"
        f"classes     {scores.classes.mean():.1f} effective ones per client on average, of {counts.shape[1]}\n"
        f"sizes       {scores.sizes.min():,} to {scores.sizes.max():,}, Gini {scores.gini:.3f} (0 even)\n"
        f"noise       {_noise(built)}\n"
        f"sha256      {built.partition.sha256}"
    )


def _noise(built: Built) -> str:
    if built.partition.noise is None:
        return "none"
    levels = built.partition.levels
    return f"standard deviation {levels.min():.3g} to {levels.max():.3g}"


def _class_labels(classes: int, columns: int) -> str:
    """Numbers above the heat-map's columns, as far as they fit."""
    if classes > columns:
        return f"classes 0 to {classes - 1}"
    width = 2 if columns <= 30 else 1
    return "".join(str(number % 10**width).ljust(width) for number in range(columns))


# -- data --------------------------------------------------------------------------------------------------------------


@data.command("list")
def data_list(json: Json = False, debug: Debug = False) -> None:
    """Say what is on this machine and how to get the rest.

    \b
    fnrfl data list
    """
    with errors_in_words(debug):
        from fnrfl.data.sources import available

        found = available()
        if json:
            rows = [{**vars(entry), "where": entry.where and str(entry.where)} for entry in found]
            typer.echo(json_format.dumps(rows))
            return
        print_table(
            [
                (
                    entry.name,
                    str(entry.where) if entry.found else f"missing; fnrfl data get {entry.name}",
                    entry.licence,
                    entry.provenance,
                )
                for entry in found
            ]
        )


@data.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="From `fnrfl data list`.")],
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fetch a data set and verify it.

    \b
    fnrfl data get fashion-mnist
    FNRFL_DATA=/big/disk fnrfl data get cifar10

    What is there already is only verified.
    """
    with errors_in_words(debug):
        from fnrfl.data.sources import fetch

        path = fetch(name)
        console(quiet=quiet).print(f"{name} is verified: {path}")


# -- doctor ------------------------------------------------------------------------------------------------------------


def doctor(json: Json = False) -> None:
    """Say what this machine has and lacks.

    \b
    fnrfl doctor

    Versions, devices, data, optional packages, and whatever would reach out to the network.
    """
    with errors_in_words():
        from fnrfl.cli.doctor import examine

        found = examine()
        if json:
            rows: list[dict[str, Any]] = [vars(finding) for finding in found]
            typer.echo(json_format.dumps(rows))
            return
        print_table([(f.topic, f.name, f.found + ("" if f.well else f"  ->  {f.help}")) for f in found])
