"""The lines of a page: runs that differ in their seed alone, and the charts that lines can share."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass

from fnrfl.results.report import consistency
from fnrfl.results.report.labels import line_labels
from fnrfl.results.report.load import Run
from fnrfl.rundir import origin
from fnrfl.rundir.configs import Config
from fnrfl.runs.quality import TEST_METRICS, Metric

COLOURS = 8
ACCURACY = TEST_METRICS["accuracy"]
# What decides which data a metric is of: only lines that share it are ranked.
SETTING = ("dataset.name", "scenario", "clients")


@dataclass(frozen=True)
class LineGroup:
    """Runs that differ in their seed alone: one line of a chart, one row of a table."""

    label: str
    colour: int
    runs: tuple[Run, ...]
    metric: Metric = ACCURACY  # that the page leads with

    @property
    def config(self) -> Config:
        """What the runs share, and the first one's seed."""
        return self.runs[0].config

    @property
    def leaks(self) -> tuple[str, ...]:
        """The leaks that were on, by name."""
        return self.runs[0].leaks

    @property
    def finished(self) -> bool:
        """Whether all rounds are there."""
        return self.runs[0].finished

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the runs, in ascending order."""
        return tuple(run.seed for run in self.runs)

    @property
    def num_rounds(self) -> int:
        """Rounds that every run has."""
        return min(len(run.rounds) for run in self.runs)

    @property
    def values(self) -> dict[int, float]:
        """The metric after the last round, by seed, of the runs that have it."""
        return {run.seed: value for run in self.runs if (value := run.last(self.metric.name)) is not None}


@dataclass(frozen=True)
class Panel:
    """Lines that can share a chart: one data set, one set of leaks."""

    title: str
    groups: tuple[LineGroup, ...]

    @property
    def runs(self) -> list[Run]:
        """The runs of all lines."""
        return [run for group in self.groups for run in group.runs]

    @property
    def leaks(self) -> tuple[str, ...]:
        """The leaks that were on, by name."""
        return self.groups[0].leaks

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
    several = consistency.ambiguous([run.origin for run in runs])
    found: list[Panel] = []
    for lines in by_data.values():
        charts: dict[object, list[tuple[Run, ...]]] = {}
        for line in lines:
            charts.setdefault(setting(line[0]) if len(lines) > COLOURS else None, []).append(line)
        found += [_panel(chart, metric, len(charts) > 1, several) for chart in charts.values()]
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
        same = json.dumps(
            {k: v for k, v in run.config.items() if k not in ("seed", "name")}, sort_keys=True, default=str
        )
        alike = lines.setdefault((same, run.origin.data, run.finished), [])
        for line in alike:
            if run.seed not in line:
                line[run.seed] = run
                break
        else:
            alike.append({run.seed: run})
    found = [tuple(line[seed] for seed in sorted(line)) for alike in lines.values() for line in alike]
    # A method's lines stand together: without FNR, then the control, then FNR.
    names = list(dict.fromkeys(line[0].config["algorithm.name"] for line in found))
    return sorted(
        found,
        key=lambda line: (
            names.index(line[0].config["algorithm.name"]),
            line[0].refines,
            line[0].config.get("fnr.weight", 0) != 0,
        ),
    )


def _panel(lines: Sequence[tuple[Run, ...]], metric: Metric, split: bool, ambiguous: Container[str]) -> Panel:
    first = lines[0][0]
    title = ", ".join(str(first.config[key]) for key in (SETTING[:2] if split else SETTING[:1]))
    if first.config["dataset.name"] in ambiguous:
        title += f", data {origin.short_hash(first.origin.data)}"
    named = line_labels([line[0].config for line in lines], [line[0].finished for line in lines])
    groups = [LineGroup(label, i, line, metric) for i, (label, line) in enumerate(zip(named, lines, strict=True))]
    return Panel(f"{title}, with leaks" if first.leaks else title, tuple(groups))
