"""The lines of a page: runs that differ in their seed alone, and the charts that lines can share."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from fnrfl.config.registry import display_name
from fnrfl.results.report.load import Run, ambiguous
from fnrfl.results.statistics import mean
from fnrfl.rundir import origin
from fnrfl.rundir.configs import Config, without_keys
from fnrfl.runs.quality import TEST_METRICS, Metric

COLOURS = 8
NO_PENALTY = " without penalty"
# Said in every label if it differs; all other keys only where labels would be the same.
TELLING = ("dataset.name", "scenario", "model.name", "clients", "participation", "rounds")
ACCURACY = TEST_METRICS["accuracy"]
# What decides which data a metric is of: only lines that share it are ranked.
SETTING = ("dataset.name", "scenario", "clients")
# How the data of clients differs, by the parts of a scenario.
SKEWS = {
    "iid": "evenly spread data",
    "label-dirichlet": "skewed classes",
    "label-classes": "few classes a client",
    "quantity-dirichlet": "clients of unequal size",
    "niid-mixed": "skewed classes and sizes",
    "feature-noise": "noise on the inputs",
    "natural": "each client's own data",
}


@dataclass(frozen=True, eq=False)
class LineGroup:
    """Runs that differ in their seed alone: one line of a chart, one row of a table."""

    label: str
    colour: int
    runs: tuple[Run, ...]  # by seed
    metric: Metric = ACCURACY  # that the page leads with

    @property
    def first(self) -> Run:
        """The run with the lowest seed, for what all of them share."""
        return self.runs[0]

    @property
    def config(self) -> Config:
        """What the runs share, and the first one's seed."""
        return self.first.config

    @cached_property
    def values(self) -> dict[int, float]:
        """The metric after the last round, by seed, of the runs that have it."""
        return {run.seed: value for run in self.runs if (value := run.last(self.metric.name)) is not None}

    @property
    def mean(self) -> float:
        """The mean of the metric; some run must have it."""
        return mean(list(self.values.values()))


@dataclass(frozen=True)
class Panel:
    """Lines that can share a chart: one data set, one set of leaks."""

    title: str  # what tells its setting from the others of the page
    groups: tuple[LineGroup, ...]

    @property
    def first(self) -> Run:
        """The first run, for what all of them share: the data and the leaks."""
        return self.groups[0].first

    @property
    def runs(self) -> list[Run]:
        """The runs of all lines."""
        return [run for group in self.groups for run in group.runs]

    @property
    def metric(self) -> Metric:
        """What its lines are ranked by."""
        return self.groups[0].metric


def panels_of(runs: Sequence[Run], metric: Metric = ACCURACY) -> list[Panel]:
    """Runs as lines, ranked by a metric, and lines as charts: one for each setting, if some have several lines."""
    by_data: dict[object, list[tuple[Run, ...]]] = {}
    for line in _lines(runs):
        by_data.setdefault((line[0].config["dataset.name"], line[0].origin.data, line[0].leaks), []).append(line)
    found: list[list[tuple[Run, ...]]] = []
    for lines in by_data.values():
        charts: dict[object, list[tuple[Run, ...]]] = {}
        for line in lines:
            charts.setdefault(setting(line[0]), []).append(line)
        found += charts.values() if len(charts) < len(lines) else [lines]
    panels, methods = [], {run.config["algorithm.name"] for run in runs}
    for title, chart in zip(setting_names([chart[0][0] for chart in found]), found, strict=True):
        labels = line_labels([line[0].config for line in chart], [line[0].finished for line in chart], len(methods) > 1)
        groups = (LineGroup(*one, metric) for one in zip(labels, itertools.count(), chart))
        alone = len({setting(line[0]) for line in chart}) == 1
        panels.append(Panel(title if alone else data_name(chart[0][0].config), tuple(groups)))
    return panels


def data_name(config: Config) -> str:
    """A data set in words: of a path, what it ends with."""
    return PurePath(str(config["dataset.name"])).name or str(config["dataset.name"])


def _skew(scenario: str) -> str:
    """A scenario in words; as it is typed, if there are none for it."""
    words = [SKEWS[part] for part in re.findall(r"[a-z-]+", scenario) if part in SKEWS]
    return " and ".join(dict.fromkeys(words)) or scenario


def _skews(runs: Sequence[Run]) -> dict[str, str]:
    """The scenarios of some runs in words that differ, and as few as it takes, by how they are typed."""
    names: dict[str, str] = {}
    typed_once = dict.fromkeys(str(run.config["scenario"]) for run in runs)
    for told in (_skew, lambda typed: f"{_skew(typed)} ({', '.join(re.findall(r'[(]([^()]+)[)]', typed))})", str):
        found = {typed: told(typed) for typed in typed_once if typed not in names}
        seen = Counter(found.values())
        names |= {typed: words for typed, words in found.items() if seen[words] == 1}
    return names


def setting_names(runs: Sequence[Run]) -> list[str]:
    """Name the settings of some runs by what differs between them: the skew in words, clients, data, leaks."""
    scenarios = _skews(runs)
    several = ambiguous([run.origin for run in runs])
    tellings = (
        lambda run: scenarios[str(run.config["scenario"])],
        lambda run: f"{run.config['clients']} clients",
        lambda run: data_name(run.config),
        lambda run: f"data {origin.short_hash(run.origin.data)}" if run.config["dataset.name"] in several else "",
        lambda run: "leaks" if run.leaks else "no leaks",
    )
    said = [[tell(run) for run in runs] for tell in tellings]
    kept = [words for words in said if len(set(words)) > 1] or said[:1]
    return [", ".join(filter(None, words)) for words in zip(*kept, strict=True)]


def setting(run: Run) -> tuple[object, ...]:
    """What two runs must share for their metrics to be of the same data."""
    return (*(run.config[key] for key in SETTING), run.origin.data, run.leaks)


def _lines(runs: Sequence[Run]) -> list[tuple[Run, ...]]:
    """Runs of one config, one data and different seeds; one config and seed a second time makes another line.

    An unfinished run is never averaged with finished ones.
    """
    lines: dict[object, list[dict[int, Run]]] = {}
    for run in runs:
        alike = lines.setdefault((without_keys(run.config, "seed", "name"), run.origin.data, run.finished), [])
        line = next((line for line in alike if run.seed not in line), None)
        if line is None:
            alike.append(line := {})
        line[run.seed] = run
    found = [tuple(line[seed] for seed in sorted(line)) for alike in lines.values() for line in alike]
    names = list(dict.fromkeys(line[0].config["algorithm.name"] for line in found))

    def place(line: tuple[Run, ...]) -> tuple[object, ...]:
        """A method's lines stand together: without FNR, then the control, then FNR."""
        config = line[0].config
        return names.index(config["algorithm.name"]), line[0].refines, config.get("fnr.weight", 0) != 0

    return sorted(found, key=place)


# -- names of lines: the method, what differs between them, and no more ------------------------------------------------


def varying(configs: Sequence[Config]) -> list[str]:
    """Keys that are not the same in all configs that have them, seed and name aside."""
    keys = dict.fromkeys(key for config in configs for key in config)
    values = {key: {str(config[key]) for config in configs if key in config} for key in keys}
    return [key for key in keys if len(values[key]) > 1 and key not in ("seed", "name")]


def method(config: Config, short: bool = False) -> str:
    """A method's name, with FNR if it is on, in `short` FNR alone; without penalty it is the control, and called so."""
    name = _with_or_without_fnr(config) + (NO_PENALTY if config.get("fnr.weight") == 0 else "")
    return name.rpartition(" + ")[2] if short else name


def shared_method(configs: Sequence[Config]) -> str | None:
    """The method that all lines have in common, whatever its weight; it may be left out of their names."""
    methods = {_with_or_without_fnr(config) for config in configs}
    return methods.pop() if len(methods) == 1 else None


def _with_or_without_fnr(config: Config) -> str:
    return display_name(str(config["algorithm.name"])) + (" + FNR" if config["fnr"] == "on" else "")


def line_labels(configs: Sequence[Config], finished: Sequence[bool], several_methods: bool) -> list[str]:
    """Short names that differ: the method, the setting if it varies, and as few other keys as it takes.

    What all lines share is left out, the method too where something else tells them apart. FNR around the one method
    of a page is called FNR.
    """
    differing = varying(configs)
    short = "fnr" in differing and not several_methods
    always = [key for key in TELLING if key in differing]
    found = [
        ", ".join([method(config, short), *(_said(config, key) for key in always), *([] if whole else ["unfinished"])])
        for config, whole in zip(configs, finished, strict=True)
    ]
    for key in differing:
        if key not in TELLING and not key.startswith("leaks."):
            found = _told_apart(found, configs, key)
    found = _without_shared(found, _with_or_without_fnr(configs[0]))
    seen = Counter[str]()
    for i, label in enumerate(found):  # the same run twice
        seen[label] += 1
        if seen[label] > 1:
            found[i] = f"{label} ({seen[label]})"
    return found


def _without_shared(labels: list[str], shared: str) -> list[str]:
    """Labels without the method that all of them begin with, where something else tells them apart."""
    if len(set(labels)) < 2 or not all(label.startswith((f"{shared}, ", shared + NO_PENALTY)) for label in labels):
        return labels
    return [label.removeprefix(shared).removeprefix(",").lstrip() for label in labels]


def _told_apart(labels: Sequence[str], configs: Sequence[Config], key: str) -> list[str]:
    """Labels that differ more: a key is added to those that are equal, where its values differ among them."""
    values: dict[str, set[str]] = {}
    for label, config in zip(labels, configs, strict=True):
        values.setdefault(label, set()).add(str(config.get(key)))
    return [
        f"{label}, {_said(config, key)}" if len(values[label]) > 1 else label
        for label, config in zip(labels, configs, strict=True)
    ]


def _said(config: Config, key: str) -> str:
    """A key and its value; of a method's own keys the last word, and no key where the value speaks for itself."""
    value = config.get(key, "none")
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if key in ("dataset.name", "scenario", "model.name"):
        return text
    if key in ("clients", "rounds"):
        return f"{text} {key.removesuffix('s') if value == 1 else key}"
    section, _, word = key.rpartition(".")
    return f"{word if section in ('fnr', 'algorithm') else key} {text}"
