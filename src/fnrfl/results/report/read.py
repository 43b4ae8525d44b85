"""Run directories as plain values: runs, the lines they make together, and which lines can be compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.results.report import mixed, valid
from fnrfl.results.report.labels import labels
from fnrfl.results.statistics import Difference, paired
from fnrfl.rundir import directory, events, files, origin
from fnrfl.rundir.events import Event
from fnrfl.rundir.origin import Config, Origin
from fnrfl.runs.metrics import RunMetrics

COLOURS = 8
# What decides which data an accuracy is of: only lines that share it are ranked.
SETTING = ("dataset", "scenario", "clients")


@dataclass(frozen=True)
class Run(RunMetrics):
    """One run directory."""

    origin: Origin
    rounds: list[Event]
    counts: list[list[int]]  # [clients][classes], from partition.json
    examples: dict[str, int]  # of each part of the data: test, validation, public, ...
    finished: bool
    baseline: tuple[str, ...]  # run directories that its comparison takes for the baseline, by name

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.origin.folder

    @property
    def config(self) -> Config:
        """By dotted key."""
        return self.origin.config

    @property
    def about(self) -> Event:
        """The first line of the log."""
        return self.origin.header

    @property
    def seed(self) -> int:
        """The seed of all its randomness."""
        return int(self.config["seed"])

    @property
    def refines(self) -> bool:
        """Whether it was an FNR run."""
        return bool(self.config["fnr"] == "on")

    @property
    def leaks(self) -> tuple[str, ...]:
        """The leaks that were on, by name."""
        return tuple(self.about["leaks"])


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone: one line of a chart, one row of a table."""

    label: str
    colour: int
    runs: tuple[Run, ...]

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
        """In ascending order."""
        return tuple(run.seed for run in self.runs)

    @property
    def num_rounds(self) -> int:
        """Rounds that every run has."""
        return min(len(run.rounds) for run in self.runs)

    @property
    def accuracy(self) -> dict[int, float]:
        """Test accuracy after the last round, by seed."""
        return {run.seed: run.accuracy for run in self.runs}


@dataclass(frozen=True)
class Panel:
    """Lines that can share a chart: one data set, one set of leaks."""

    title: str
    groups: tuple[Group, ...]

    @property
    def leaks(self) -> tuple[str, ...]:
        """The leaks that were on, by name."""
        return self.groups[0].leaks


def find(paths: Sequence[Path]) -> list[Path]:
    """The run directories among and below some folders, each once."""
    if not paths:
        raise ConfigError("A report needs at least one run directory. Give a folder that `fnrfl run` has made.")
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        directory.recover(path)
        below = [path] if (path / "events.jsonl").is_file() else _below(path)
        if not below:
            raise ConfigError(
                f"{path} is not a run directory and has none below it: there is no events.jsonl. Give a folder that "
                "`fnrfl run` or `fnrfl compare` has made."
            )
        found |= {run.resolve(): run for run in below if run.resolve() not in found}
    return list(found.values())


def _below(path: Path) -> list[Path]:
    directory.recover_inside(path)
    logs = sorted(path.rglob("events.jsonl")) if path.is_dir() else []
    # A folder with a dot is one that a run is still preparing.
    return [log.parent for log in logs if not any(part.startswith(".") for part in log.relative_to(path).parts)]


@dataclass(frozen=True)
class Found:
    """What there is to report: runs, and sentences about those that are left out."""

    runs: list[Run]
    failed: list[str]  # runs that a comparison gave up
    damaged: list[str]  # runs that cannot be read


def load(paths: Sequence[Path]) -> Found:
    """All runs among and below some folders; one that cannot be read is named and left out, unless all are so."""
    found = find(paths)
    comparisons = {folder: _comparison(folder) for folder in dict.fromkeys(path.parent for path in found)}
    runs: list[Run] = []
    damaged: list[ConfigError] = []
    for path in found:
        try:
            runs.append(read(path, comparisons[path.parent][0].get(path.name, ())))
        except ConfigError as error:
            damaged.append(error)
    if not runs:
        raise damaged[0]
    for folder in comparisons:
        mixed.check_folder(folder, [run.origin for run in runs if run.path.parent == folder])
    failed = [sentence for _, failures in comparisons.values() for sentence in failures]
    return Found(runs, failed, [f"{error} It is left out." for error in damaged])


def _comparison(folder: Path) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """What `fnrfl compare` wrote beside its runs: the baseline's run directories for each, and what failed."""
    path = folder / "comparison.json"
    if not path.is_file():
        return {}, []
    try:
        tree = json.loads(files.read(path, "a comparison has a comparison.json"))
        cells: dict[str, list[str]] = {}
        for run in tree["runs"]:
            cells.setdefault(run["group"], []).append(run["cell"])
        base = {row["group"]: row["baseline"] for row in tree["rows"]}
        baselines = {cell: tuple(cells.get(base[group], ())) for group, mine in cells.items() for cell in mine}
        return baselines, [f"{failure['cell']}: {failure['error']}" for failure in tree["failed"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}). Repeat the comparison, or remove the file.") from error


def read(path: Path, baseline: tuple[str, ...] = ()) -> Run:
    """One run directory, finished or not."""
    about = origin.read(path)
    rounds = events.read(path / "events.jsonl")[1:]
    valid.check(str(path), about.config, about.header, rounds, about.partition)
    return Run(
        origin=about,
        rounds=rounds,
        counts=about.partition["counts"],
        examples={k: v["examples"] for k, v in about.partition["splits"].items() if isinstance(v, dict)},
        finished=(path / "model.safetensors").exists(),
        baseline=baseline,
    )


def panels(runs: Sequence[Run]) -> list[Panel]:
    """Runs as lines, and lines as charts; a chart with more lines than colours is split by setting."""
    by_data: dict[object, list[tuple[Run, ...]]] = {}
    for line in _lines(runs):
        by_data.setdefault((line[0].config["dataset"], line[0].origin.data, line[0].leaks), []).append(line)
    several = mixed.ambiguous([run.origin for run in runs])
    found: list[Panel] = []
    for lines in by_data.values():
        charts: dict[object, list[tuple[Run, ...]]] = {}
        for line in lines:
            charts.setdefault(setting(line[0]) if len(lines) > COLOURS else None, []).append(line)
        found += [_panel(chart, len(charts) > 1, several) for chart in charts.values()]
    return found


def setting(run: Run) -> tuple[object, ...]:
    """What two runs must share for their accuracies to be of the same data."""
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


def _panel(lines: Sequence[tuple[Run, ...]], split: bool, ambiguous: Container[str]) -> Panel:
    first = lines[0][0]
    title = ", ".join(str(first.config[key]) for key in (SETTING[:2] if split else SETTING[:1]))
    if first.config["dataset"] in ambiguous:
        title += f", data {origin.short(first.origin.data)}"
    named = labels([line[0].config for line in lines], [line[0].finished for line in lines])
    groups = [Group(label, i, line) for i, (label, line) in enumerate(zip(named, lines, strict=True))]
    return Panel(f"{title}, with leaks" if first.leaks else title, tuple(groups))


# -- relatives --------------------------------------------------------------------------------------------------------


def ranked(groups: Sequence[Group]) -> list[list[Group]]:
    """The finished lines of each setting: those whose accuracies may be put in order."""
    settings: dict[object, list[Group]] = {}
    for group in groups:
        if group.finished:
            settings.setdefault(setting(group.runs[0]), []).append(group)
    return list(settings.values())


def difference(one: Group, other: Group) -> Difference | None:
    """Accuracy of one line minus another's over the seeds that both have with the same split; None without any."""
    splits = {run.seed: run.origin.split for run in other.runs}
    seeds = [run.seed for run in one.runs if splits.get(run.seed) == run.origin.split]
    return paired({seed: one.accuracy[seed] for seed in seeds}, {seed: other.accuracy[seed] for seed in seeds})


def baseline(groups: Sequence[Group]) -> Group:
    """What the lines of a setting are compared with: as the comparison says, else the first one without FNR."""
    said = {name for group in groups for run in group.runs for name in run.baseline}
    named = [group for group in groups if said & {run.path.name for run in group.runs}]
    bare = [group for group in groups if not group.runs[0].refines]
    return (named or bare or list(groups))[0]


def plain(group: Group, groups: Sequence[Group]) -> Group | None:
    """The same runs without FNR."""
    return _relative(group, groups, refines=False, ignored=lambda key: key == "fnr" or key.startswith("fnr."))


def control(group: Group, groups: Sequence[Group]) -> Group | None:
    """The same refinement with weight 0; its penalty and targets then do not matter."""
    if group.config.get("fnr.weight", 0) == 0:
        return None
    weightless = [other for other in groups if other.config.get("fnr.weight") == 0]
    return _relative(
        group, weightless, refines=True, ignored=lambda key: key in ("fnr.weight", "fnr.penalty", "fnr.target")
    )


def _relative(group: Group, groups: Sequence[Group], *, refines: bool, ignored: Callable[[str], bool]) -> Group | None:
    def kept(config: Config) -> Config:
        """What both must share; an engine changes the time and not the result."""
        aside = ("seed", "name", "leaks", "engine")
        return {k: v for k, v in config.items() if not ignored(k) and k.partition(".")[0] not in aside}

    for other in groups:
        able = other is not group and other.finished and other.runs[0].refines == refines
        if able and kept(other.config) == kept(group.config):
            return other
    return None


# -- numbers ----------------------------------------------------------------------------------------------------------


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the numbers that are there."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
