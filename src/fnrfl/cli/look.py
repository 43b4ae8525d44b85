"""Commands that look at what there is: scenario, data, doctor."""

from __future__ import annotations

import json as json_format
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fnrfl.cli.commands import KeyValueCommand
from fnrfl.cli.common import Json, Overrides, Quiet, Trust, command_group, console, print_json, print_table
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted, printable

if TYPE_CHECKING:
    from fnrfl.results.skew import Skew
    from fnrfl.runs.setup.build import Built

ROWS = 40  # clients shown of a split

scenario = command_group("Draw a split before training: who gets what, how skewed.")
data = command_group("Fetch and verify data sets; say what is on disk.")

Text = Annotated[str, Argument(metavar="SCENARIO", show_default=False, help="As in a config, or the name of a recipe.")]


# -- scenarios ---------------------------------------------------------------------------------------------------------


@scenario.command("show", cls=KeyValueCommand)
def show(
    text: Text,
    overrides: Overrides = None,
    png: Annotated[Path | None, Option("--png", metavar="FILE", help="Draw it as a figure, too.")] = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Draw a split: heat-map, sizes, scores of the skew.

    \b
    fnrfl scenario show "label-dirichlet(0.1)"
    fnrfl scenario show "label-classes(2) + feature-noise(0.3)" dataset=cifar10 clients=20 seed=1
    fnrfl scenario show label-skew --png split.png

    The split is the one that `fnrfl run` would draw with the same keys. Unless a recipe is named, they are those of
    the embedded example.
    """
    from fnrfl.results.skew import figure, skew
    from fnrfl.rundir.outputs import check_output

    if png is not None:
        check_output(png)
    built = _built(text, overrides, trust)
    config, split = built.config, built.partition
    scores = skew(split.counts, split.levels)
    title = f"{config.scenario}, {config.dataset.name}, {counted(config.clients, 'client')}, seed {config.seed}"
    if png is not None:
        figure(split.counts, built.dataset.classes, scores, title, png, split.ids)
    if json:
        named = {"scenario": config.scenario, "dataset": config.dataset.name, "seed": config.seed}
        drawn = {"sha256": split.sha256, "counts": split.counts.tolist()}
        return print_json(named | scores.summary() | drawn | ({"ids": list(split.ids)} if split.ids else {}))
    _show_split(title, built, scores)
    if png is not None:
        typer.echo(f"drawn in {png}")


@scenario.command("save", cls=KeyValueCommand)
def save(
    file: Annotated[Path, Argument(metavar="FILE.json", show_default=False, help="Where it goes.")],
    text: Text,
    overrides: Overrides = None,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Draw a split and write down which example goes to whom.

    \b
    fnrfl scenario save split.json "label-dirichlet(0.1)" dataset=digits clients=10 seed=0

    The file has hashes, and the format of a run's partition.json.
    """
    from fnrfl.rundir.outputs import check_output, write_output

    check_output(file)
    if file.suffix != ".json":
        raise ConfigError(f"{file} does not end in .json; give the file first and then the scenario.")
    built = _built(text, overrides, trust)
    write_output(file, json_format.dumps(built.manifest()) + "\n")
    console(quiet=quiet).print(f"{built.config.scenario} in {file}, sha256 {built.partition.sha256}")


def _built(text: str, overrides: Sequence[str] | None, trust: bool) -> Built:
    """The run of a recipe, or of the embedded example with another scenario, as far as its data."""
    from fnrfl.config import load, registry
    from fnrfl.runs.setup.build import build

    words = list(overrides or ())
    if text in registry.recipes() or text.endswith(".toml"):
        return build(load(text, words, trust=trust))
    only_keys = re.match(r"[\w.]+=", text)
    return build(load(None, [text, *words] if only_keys else [*words, f"scenario={text}"]))


def _show_split(title: str, built: Built, scores: Skew) -> None:
    from fnrfl.results.skew import SHADES, binned, heat_map

    split, counts = built.partition, built.partition.counts
    noisy, (clients, classes), bins = split.noise is not None, counts.shape, binned(counts)
    width = 2 if bins.shape[1] <= 30 else 1  # of a column: the last digits of its class
    labels = "".join(str(number % 10**width).ljust(width) for number in range(classes))
    labels = f"classes 0 to {classes - 1}" if classes > bins.shape[1] else labels
    rows = [("client", labels, "examples", "classes", "distance", "noise")]
    for client, shades in enumerate(heat_map(counts)[:ROWS]):
        sizes = f"{scores.sizes[client]:,}", f"{scores.classes[client]:.1f}"
        skewed = f"{scores.distance[client]:.2f}", f"{scores.noise[client]:.3g}"
        rows.append((printable(split.names[client]), shades, *sizes, *skewed))
    console().print(f"{title}: {counted(int(scores.sizes.sum()), 'example')}, {counted(classes, 'class', 'classes')}")
    print_table(rows if noisy else [row[:-1] for row in rows])
    if clients > ROWS:
        typer.echo(f"and {counted(clients - ROWS, 'client')} more")
    noise = f"standard deviation {split.levels.min():.3g} to {split.levels.max():.3g}" if noisy else "none"
    console().print(
        f"\nshades      {' '.join(SHADES[1:])} up to {counted(int(bins.max()), 'example')} of a class\n"
        f"labels      Jensen-Shannon distance to all data {scores.distance.mean():.3f} on average (0 even, 1 most)\n"
        f"classes     {scores.classes.mean():.1f} effective ones per client on average, of {classes}\n"
        f"sizes       {scores.sizes.min():,} to {scores.sizes.max():,}, Gini {scores.gini:.3f} (0 even)\n"
        f"noise       {noise}\n"
        f"sha256      {split.sha256}"
    )


# -- data and the machine ----------------------------------------------------------------------------------------------


@data.command("list")
def data_list(json: Json = False) -> None:
    """Say what is on this machine and how to get the rest.

    \b
    fnrfl data list
    """
    from fnrfl.data.sources import available

    if json:
        return print_json([{**vars(one), "where": one.where and str(one.where)} for one in available()])
    places = [(e, str(e.where) if e.found else f"missing; fnrfl data get {e.name}") for e in available()]
    print_table([(entry.name, place, entry.licence, entry.provenance) for entry, place in places])


@data.command("get")
def data_get(
    name: Annotated[str, Argument(metavar="NAME", show_default=False, help="From `fnrfl data list`.")],
    quiet: Quiet = False,
) -> None:
    """Fetch a data set and verify it.

    \b
    fnrfl data get fashion-mnist
    FNRFL_DATA=/big/disk fnrfl data get cifar10

    What is there already is only verified.
    """
    from fnrfl.data.sources import fetch

    console(quiet=quiet).print(f"{name} is verified: {fetch(name)}")


def doctor(json: Json = False) -> None:
    """Say what this machine has and lacks.

    \b
    fnrfl doctor

    Versions, devices, data, optional packages, and whatever would reach out to the network.
    """
    from fnrfl.cli.doctor import examine

    found = examine()
    if json:
        return print_json([vars(finding) for finding in found])
    print_table([(f.topic, f.name, f.found + (f"  ->  {f.help}" if f.help else "")) for f in found])
