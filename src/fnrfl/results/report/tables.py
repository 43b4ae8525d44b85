"""Tables as plain values: what stands in a cell, and what sorting compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import choices
from fnrfl.results.report.groups import LineGroup, Panel, setting_names, varying
from fnrfl.results.report.load import Run
from fnrfl.results.report.numbers import CLIENTS, as_percent, in_cell, signed
from fnrfl.results.report.pairs import VERDICTS, LinePair, is_control_line, line_pairs, ranked
from fnrfl.results.statistics import deviation, mean, share_interval
from fnrfl.runs.metrics import MIB
from fnrfl.runs.quality import NUMBER_METRICS, TEST_METRICS, Metric, leading_metric

# A number of a run in a table: its column, its value, and the value as text.
RunMeasure = tuple["Column", Callable[[Run], float | None], Callable[[float], str]]


@dataclass(frozen=True)
class Column:
    """A column's name, what it means, whether it holds numbers, and the metric that it shows, if it shows one."""

    name: str
    help: str = ""
    number: bool = True
    metric: str = ""


@dataclass(frozen=True)
class TableCell:
    """What is shown, what sorting compares, what stands beside it smaller, and the line that it names.

    `ends` are those of an interval.
    """

    text: str
    value: float | str | None = None
    beside: str = ""
    group: LineGroup | None = None
    ends: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """Columns and rows; `sorts` unless the order is the meaning."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    sorts: bool = True


CONFUSION_CLASSES = 40  # more cells than that nobody can read, and a page stays light
GRID_WORDS = {"ahead of": "better", "behind": "worse", "same": ""}  # than the baseline, after correction
METHOD_COLUMN = Column("method", number=False)


def name_cell(group: LineGroup, beside: str = "") -> TableCell:
    """The name of a line, and what stands beside it."""
    return TableCell(group.label, group.label, beside, group)


def text_cell(text: str) -> TableCell:
    """A cell of words, which are what sorting compares."""
    return TableCell(text, text)


def number_cell(value: float | None, text: Callable[[float], str], beside: str = "") -> TableCell:
    """A cell of a number; empty where there is none."""
    return TableCell("") if value is None else TableCell(text(value), value, beside)


def over_seeds(values: Iterable[float | None], text: Callable[[float], str]) -> TableCell:
    """The mean of what is known, and its standard deviation; empty where nothing is."""
    known = [value for value in values if value is not None]
    sd = deviation(known) if known else None
    return number_cell(mean(known) if known else None, text, "" if sd is None else f"\N{PLUS-MINUS SIGN} {text(sd)}")


# -- results: means over seeds, what guesses reach, differences, and every run -----------------------------------------


def _size(value: float) -> str:
    """Three digits that count."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * unit or value >= unit == 1e6:
            return _size(value / unit) + name
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def measure(metric: Metric, name: str = "", value: Callable[[Run], float | None] | None = None) -> RunMeasure:
    """A metric as a column; by default its value after the last round."""
    shown, about = (name or metric.name) + (", %" if metric.share else ""), f"{metric.meaning}; {metric.better}"
    column = Column(shown, about, metric=metric.name)
    return column, value or (lambda run: run.last(metric.name)), lambda number: in_cell(number, metric)


SHARES = [metric for metric in TEST_METRICS.values() if metric.share and not metric.name.startswith("validation")]
COSTS: tuple[RunMeasure, ...] = (
    (Column("MiB up", "from clients, all rounds"), lambda run: run.bytes_up / MIB, _size),
    (Column("MiB down", "to clients, all rounds"), lambda run: run.bytes_down / MIB, _size),
    (Column("seconds", "training, norm pass, refinement and server"), lambda run: run.seconds[-1], _size),
    (Column("kappa", "accuracy * 1e4 per second"), lambda run: run.kappa, _size),
    (Column("rho", "accuracy * 1e4 per MiB"), lambda run: run.rho, _size),
)


def line_table(panel: Panel, measures: Iterable[RunMeasure]) -> Table:
    """One row for each line: means over seeds with standard deviations, of what some run has."""
    kept = [m for m in measures if any(m[1](run) is not None for run in panel.runs)]
    rows = []
    for group in panel.groups:
        name = name_cell(group, "control" if is_control_line(group) else "")
        cells = (over_seeds(map(value, group.runs), text) for _, value, text in kept)
        rows.append((name, TableCell(str(len(group.runs)), len(group.runs)), *cells))
    return Table((METHOD_COLUMN, Column("seeds", "how many"), *(column for column, _, _ in kept)), tuple(rows))


def results(panel: Panel) -> Table:
    """One row for each line, the panel's metric first, and one for each answer that nobody learned."""
    found = line_table(panel, map(measure, dict.fromkeys((panel.metric, *SHARES))))
    guesses = (
        (TableCell(name, name, meaning), *(number_cell(shares.get(c.metric), as_percent) for c in found.columns[1:]))
        for name, meaning, shares in references(panel)
    )
    return Table(found.columns, (*found.rows, *guesses))


def references(panel: Panel) -> list[tuple[str, str, dict[str, float]]]:
    """Answers that nobody learned: a name, its meaning, and its shares of right answers by metric.

    They are guessing, and always the most frequent class, of which nothing is known in runs of older versions.
    """

    def scored(name: str, meaning: str, accuracy: float, balanced: float) -> tuple[str, str, dict[str, float]]:
        return name, meaning, {"accuracy": accuracy, "accuracy_clean": accuracy, "balanced_accuracy": balanced}

    guess = 1 / len(panel.first.counts[0])
    known = [run.test_counts for run in panel.runs if any(run.test_counts)]
    chance = scored("chance", "a class drawn at random", guess, guess)
    if not known:
        return [chance]
    share = mean([max(counts) / sum(counts) for counts in known])
    balanced = mean([1 / sum(map(bool, counts)) for counts in known])
    if math.isclose(share, guess) and math.isclose(balanced, guess):
        return [scored("chance, majority class", "a class drawn at random, or always the same", share, balanced)]
    return [chance, scored("majority class", "always the most frequent class of the test set", share, balanced)]


def best_guess(run: Run) -> float:
    """The accuracy that a model must exceed to have learned anything: that of the best answer without a model."""
    counts = run.test_counts
    return max(counts) / sum(counts) if any(counts) else 1 / len(run.counts[0])


def differences(panel: Panel) -> Table:
    """The metric of one line minus another's, paired by seed: to the baseline, the plain method, the control."""
    points = "points" if panel.metric.share else "difference"
    columns = (
        METHOD_COLUMN,
        Column("compared with", number=False),
        Column(points, f"mean difference of {panel.metric.name}, {panel.metric.meaning}"),
        Column("95 % interval", "of the mean difference, by Student's t"),
        Column("p", "of the paired t test, two-sided"),
        Column("p corrected", "for the number of pairs of this setting, by Holm's method"),
        Column("seeds", "that both have, with the same split"),
        Column("more than luck?", number=False),
    )
    return Table(columns, tuple(_difference_row(pair) for lines in ranked(panel.groups) for pair in line_pairs(lines)))


def _difference_row(pair: LinePair) -> tuple[TableCell, ...]:
    found, metric = pair.found, pair.one.metric
    numbers = [*[TableCell("")] * 4, TableCell("0", 0.0)]
    if found is not None:
        ends = tuple(signed(end, metric) for end in (found.low, found.high) if end is not None)
        numbers = [
            TableCell(signed(found.mean, metric), found.mean),
            TableCell(" to ".join(ends), found.low, ends=ends),
            number_cell(found.p, _probability),
            number_cell(pair.corrected, _probability),
            TableCell(str(found.n), found.n),
        ]
    return (name_cell(pair.one), text_cell(pair.other.label), *numbers, text_cell(VERDICTS[pair.verdict]))


def _probability(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def every_run(panel: Panel) -> Table:
    """One row for each run directory."""
    metric = panel.metric
    measures: tuple[RunMeasure, ...] = (
        (Column("seed"), lambda run: run.seed, str),
        measure(metric),
        measure(metric, "last 3", lambda run: run.last3(metric.name)),
        measure(metric, "best", lambda run: run.best(metric.name)),
        *(measure(TEST_METRICS[name]) for name in ("accuracy", "worst_client", "loss") if name != metric.name),
        *COSTS,
    )
    rows = (
        (name_cell(group, str(run.path)), *(number_cell(value(run), text) for _, value, text in measures))
        for group in panel.groups
        for run in group.runs
    )
    return Table((METHOD_COLUMN, *(column for column, _, _ in measures)), tuple(rows))


def setting_grid(panels: Sequence[Panel]) -> Table | None:
    """Methods and settings: the mean, and whether it differs from the baseline by more than luck; None of one setting.

    Lines with leaks are not in it.
    """
    found = [lines for panel in panels if not panel.first.leaks for lines in ranked(panel.groups)]
    if len(found) < 2 or max(map(len, found)) < 2:
        return None
    metric, first = found[0][0].metric, dict[str, LineGroup]()
    cells: dict[tuple[str, int], TableCell] = {}
    for place, lines in enumerate(found):
        words = {pair.one: GRID_WORDS[pair.outcome] for pair in line_pairs(lines) if pair.why == "baseline"}
        for line in lines:
            first.setdefault(line.label, line)
            cells[line.label, place] = TableCell(in_cell(line.mean, metric), line.mean, words.get(line, ""))
    names = setting_names([lines[0].first for lines in found])
    columns = (Column(name, metric.meaning, metric=metric.name) for name in names)
    empty, places = TableCell(""), range(len(found))
    rows = ((name_cell(line), *(cells.get((label, at), empty) for at in places)) for label, line in first.items())
    return Table((METHOD_COLUMN, *columns), tuple(rows))


def settings(panel: Panel) -> Table | None:
    """The keys that differ between the lines, one row for each line; None if there is nothing to tell."""
    keys = varying([group.config for group in panel.groups])
    columns = (METHOD_COLUMN, *(Column(key, number=False) for key in keys))
    rows = ((name_cell(group), *(text_cell(str(group.config.get(key, ""))) for key in keys)) for group in panel.groups)
    return Table(columns, tuple(rows)) if keys else None


# -- metrics: which one leads, a table of the others, confusion matrices, and each client's accuracy -------------------


def page_metric(runs: Sequence[Run], name: str | None) -> Metric:
    """Choose the metric of a page: the one named, else that of the comparison, else the one that the methods lead with.

    One that no run has after its last round is refused.
    """
    known = metrics_of(runs)
    compared = {run.compared_by for run in runs if run.compared_by is not None}
    leading = leading_metric(run.about.get("personalised", False) for run in runs).name
    chosen = name or (compared.pop() if len(compared) == 1 else leading if leading in known else "accuracy")
    if (found := known.get(chosen.rpartition(":")[2])) is None:
        raise ConfigError(f'These runs have no value of the metric "{chosen}". {choices(chosen, known)} with --metric.')
    return found


def metrics_of(runs: Sequence[Run]) -> dict[str, Metric]:
    """Find every metric that is a number and that some run has, by name; a user's own is described by the log."""
    known = {name: TEST_METRICS[name] for name in NUMBER_METRICS}
    for run in runs:
        for name, said in run.about.get("own_metrics", {}).items():
            known.setdefault(name, Metric(name, said["function"], said["higher_is_better"]))
    return {name: metric for name, metric in known.items() if any(run.last(name) is not None for run in runs)}


def tabled_metrics(panel: Panel) -> list[Metric]:
    """The metrics of their own table: those that are no share, which the table of results has.

    There are none where a version before 0.2.0 made the runs.
    """
    return [metric for metric in metrics_of(panel.runs).values() if not metric.share and metric.name != "loss"]


def confusion_over_seeds(group: LineGroup) -> list[list[int]] | None:
    """Examples by true class and answer after the last round, over all seeds; None where no log has them."""
    found = [counts for run in group.runs if (counts := run.rounds[-1].get("confusion")) is not None]
    if not found or len(found[0]) > CONFUSION_CLASSES:
        return None
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]


def site_table(panel: Panel) -> Table | None:
    """A row for each client and a column for each line; None where no client brought test examples.

    Lines of one data set have the same clients where the scenario takes those of the data.
    """
    scored = [group for group in panel.groups if group.first.rounds[-1].get("per_site")]
    if not scored:
        return None
    first = scored[0].first
    scored = [group for group in scored if group.first.client_names == first.client_names]
    tests = first.about.get("site_test_counts", [])
    columns = (
        Column("client", number=False),
        Column("test examples" if tests else "training examples", "that it brought"),
        *(Column(group.label, "accuracy, % on the test examples that the client brought") for group in scored),
    )

    rows = (
        (
            TableCell(name, client),
            TableCell(f"{(count := (tests or list(map(sum, first.counts)))[client]):,}", count),
            *(_site_score(group, client, tests) for group in scored),
        )
        for client, name in enumerate(first.client_names[:CLIENTS])
    )
    return Table(columns, tuple(rows))


def _site_score(group: LineGroup, client: int, tests: Sequence[int]) -> TableCell:
    """A client's accuracy on its test examples, mean over seeds, and what so many of them leave open."""
    known = [share for run in group.runs if (share := run.rounds[-1]["per_site"][client]) is not None]
    if not known:
        return TableCell("")
    ends = share_interval(mean(known), tests[client]) if tests else ()
    beside = f"[{', '.join(f'{100 * end:.0f}' for end in ends)}]" if ends else ""
    return number_cell(mean(known), as_percent, beside)
