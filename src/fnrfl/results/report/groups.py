"""The lines of a page: runs that differ in their seed alone, and the charts that lines can share."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fnrfl.results.report.load import Run, ambiguous
from fnrfl.results.statistics import mean
from fnrfl.rundir import origin
from fnrfl.rundir.configs import Config, without_keys
from fnrfl.runs.quality import TEST_METRICS, Metric

COLOURS = 8
# Said in every label if it differs; all other keys only where labels would be the same.
TELLING = ("dataset.name", "scenario", "model.name", "clients", "participation", "rounds")
ACCURACY = TEST_METRICS["accuracy"]
# What decides which data a metric is of: only lines that share it are ranked.
SETTING = ("dataset.name", "scenario", "clients")


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

    title: str
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

    def named(self, line: LineGroup) -> str:
        """The title, with the scenario of a line if that is not in it."""
        scenario = f", {line.config['scenario']}"
        return self.title if scenario in self.title else self.title + scenario


def panels_of(runs: Sequence[Run], metric: Metric = ACCURACY) -> list[Panel]:
    """Runs as lines, ranked by a metric, and lines as charts; one with more lines than colours is split by setting."""
    by_data: dict[object, list[tuple[Run, ...]]] = {}
    for line in _lines(runs):
        by_data.setdefault((line[0].config["dataset.name"], line[0].origin.data, line[0].leaks), []).append(line)
    several = ambiguous([run.origin for run in runs])
    found: list[Panel] = []
    for lines in by_data.values():
        charts: dict[object, list[tuple[Run, ...]]] = {}
        for line in lines:
            charts.setdefault(setting(line[0]) if len(lines) > COLOURS else None, []).append(line)
        for chart in charts.values():
            first = chart[0][0]
            title = ", ".join(str(first.config[key]) for key in SETTING[: min(2, len(charts))])
            if first.config["dataset.name"] in several:
                title += f", data {origin.short_hash(first.origin.data)}"
            labels = line_labels([line[0].config for line in chart], [line[0].finished for line in chart])
            groups = (LineGroup(*one, metric) for one in zip(labels, itertools.count(), chart))
            found.append(Panel(f"{title}, with leaks" if first.leaks else title, tuple(groups)))
    return found


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


def method(config: Config) -> str:
    """A method's name, with FNR if it is on; weight 0 is said, because that is the control and not FNR."""
    return _with_or_without_fnr(config) + (", weight 0" if config.get("fnr.weight") == 0 else "")


def shared_method(configs: Sequence[Config]) -> str | None:
    """The method that all lines have in common, whatever its weight; it may be left out of their names."""
    methods = {_with_or_without_fnr(config) for config in configs}
    return methods.pop() if len(methods) == 1 else None


def _with_or_without_fnr(config: Config) -> str:
    return str(config["algorithm.name"]) + (" + FNR" if config["fnr"] == "on" else "")


def line_labels(configs: Sequence[Config], finished: Sequence[bool]) -> list[str]:
    """Short names that differ: the method, the setting if it varies, and as few other keys as it takes.

    What all lines share is left out, the method too where something else tells them apart.
    """
    differing = varying(configs)
    always = [key for key in TELLING if key in differing]
    found = [
        ", ".join([method(config), *(_said(config, key) for key in always), *([] if whole else ["unfinished"])])
        for config, whole in zip(configs, finished, strict=True)
    ]
    for key in differing:
        if key not in TELLING and not key.startswith("leaks."):
            found = _told_apart(found, configs, key)
    shared = f"{_with_or_without_fnr(configs[0])}, "
    if len(set(found)) > 1 and all(label.startswith(shared) for label in found):
        found = [label.removeprefix(shared) for label in found]
    seen = Counter[str]()
    for i, label in enumerate(found):  # the same run twice
        seen[label] += 1
        if seen[label] > 1:
            found[i] = f"{label} ({seen[label]})"
    return found


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
