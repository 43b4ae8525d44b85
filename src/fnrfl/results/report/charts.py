"""What the charts of a page are drawn from: curves, traffic and time of every line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fnrfl.results.report.client_view import CLIENTS, inside
from fnrfl.results.report.groups import LineGroup, Panel
from fnrfl.results.report.metric_tables import confusion_over_seeds
from fnrfl.results.report.numbers import POINTS, chart_number, shown_mean, thinned
from fnrfl.results.report.pairs import VERDICTS, LinePair, line_pairs, ranked
from fnrfl.results.report.references import axis_span, least_span, references
from fnrfl.runs.metrics import LOOKING, MIB
from fnrfl.runs.quality import TEST_METRICS, Metric

# Seven, so that with eight colours fifty-six lines differ.
DASHES = ("none", "7 4", "2 4", "10 4 2 4", "14 5", "5 3 1 3 1 3", "4 2")
PHASES = {  # of a round: what the page calls it, and its colour
    "scale": ("sums of inputs", "c6"),
    "local": ("local training", "c0"),
    "norm-pass": ("norm pass in train mode", "c7"),
    "measure": ("norms and ranking", "c2"),
    "refine": ("refinement", "c3"),
    "deliver": ("delivery of unrefined models", "c5"),
    "server": ("server", "c1"),
    "look": ("evaluation, not counted", "mute"),
}
OPEN_ROWS = 40  # of a figure of differences that is not folded away at first
NUMBERS = 100_000  # of class norms and rankings, over all runs that are shown from inside, so that a page stays light


def payload(panels: Sequence[Panel]) -> dict[str, Any]:
    """Everything that the page's script draws."""
    groups = [group for panel in panels for group in panel.groups]
    refining = max(1, sum(group.runs[0].refines for group in groups))
    splits: dict[str, list[list[int]]] = {}  # methods share them
    for group in groups:
        splits.setdefault(group.runs[0].about["partition"], group.runs[0].counts[:CLIENTS])
    return {
        "dashes": DASHES,
        "metrics": [
            {
                "name": one.name,
                "help": f"{one.meaning}; {one.better}",
                "share": one.share,
                "higher": one.higher_is_better,
            }
            for one in charted(panels[0].metric)
        ],
        "forests": forests(panels),
        "panels": [_panel(panel) for panel in panels],
        "splits": splits,
        "inside": [
            inside(group, NUMBERS // refining) | {"panel": number}
            for number, panel in enumerate(panels)
            for group in panel.groups
        ],
        "first": max(range(len(groups)), key=lambda i: (bool(groups[i].config.get("fnr.weight")), -i)),
    }


def charted(first: Metric) -> list[Metric]:
    """The metrics that curves can show, `first` before the others."""
    return list(dict.fromkeys([first, *(one for one in TEST_METRICS.values() if one.share), TEST_METRICS["loss"]]))


def _panel(panel: Panel) -> dict[str, Any]:
    def phases(kind: str) -> dict[str, dict[str, Any]]:
        met = {_phase(name) for group in panel.groups for run in group.runs for e in run.rounds for name in e[kind]}
        names = [name for name in PHASES if name in met] + sorted(met - PHASES.keys())
        return {name: dict(zip(("label", "tone"), PHASES.get(name, (name, "c4")), strict=True)) for name in names}

    traffic, time = phases("bytes"), phases("seconds")
    run = panel.groups[0].runs[0]
    test, classes = run.examples["test"], len(run.counts[0])
    return {
        "leaks": panel.leaks,
        "classes": run.classes,
        "least": {"shares": least_span(test), "classes": least_span(test / classes)},
        "references": [
            {"name": one.name} | {metric: chart_number(share) for metric, share in one.shares.items()}
            for one in references(panel)
        ],
        "phases": {"bytes": list(traffic.values()), "time": list(time.values())},
        "groups": [_group(group, list(traffic), list(time)) for group in panel.groups],
    }


def _phase(name: str) -> str:
    """A phase of the log as the page shows it: all looking at models is one."""
    return "look" if name in LOOKING else name


def _group(group: LineGroup, traffic: Sequence[str], time: Sequence[str]) -> dict[str, Any]:
    rounds = thinned(range(group.num_rounds), POINTS)
    curves = {metric.name: _over_seeds(group, metric.name, rounds) for metric in charted(group.metric)}
    per_class = [run.rounds[-1]["per_class"] for run in group.runs]
    return {
        "label": group.label,
        "mark": group.colour,
        "seeds": list(group.values),
        "final": list(map(chart_number, group.values.values())),
        "rounds": [group.runs[0].rounds[t]["round"] for t in rounds],
        "curves": {metric: curve for metric, curve in curves.items() if curve is not None},
        "mib": [shown_mean(run.mib[t] for run in group.runs) for t in rounds],
        "seconds": [shown_mean(run.seconds[t] for run in group.runs) for t in rounds],
        "classes": [shown_mean(values) for values in zip(*per_class, strict=True)],
        "confusion": confusion_over_seeds(group),
        "bytes": [{"name": way, "parts": [_mib(group, phase, way) for phase in traffic]} for way in ("down", "up")],
        "time": [{"name": "", "parts": [_seconds(group, phase) for phase in time]}],
    }


def _over_seeds(group: LineGroup, metric: str, rounds: Sequence[int]) -> dict[str, list[float | None]] | None:
    """Mean and range of a number over the seeds; None if no run has it."""
    curves = [run.series(metric) for run in group.runs]
    at = [[value for curve in curves if (value := curve[t]) is not None] for t in rounds]
    if not any(at):
        return None
    return {
        "mean": [shown_mean(values) for values in at],
        "low": [chart_number(min(values, default=None)) for values in at],
        "high": [chart_number(max(values, default=None)) for values in at],
    }


def _mib(group: LineGroup, phase: str, way: str) -> float | None:
    """MiB of a phase in one direction, mean over the runs."""
    return shown_mean(
        sum(event["bytes"].get(phase, {}).get(way, 0) for event in run.rounds) / MIB for run in group.runs
    )


def _seconds(group: LineGroup, phase: str) -> float | None:
    """Seconds of a phase, mean over the runs."""
    return shown_mean(
        sum(spent for event in run.rounds for name, spent in event["seconds"].items() if _phase(name) == phase)
        for run in group.runs
    )


# -- paired differences: each line minus the one it is compared with, with its interval --------------------------------


def forests(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """One figure of all honest lines that can be paired, and one of those with leaks, as far as there are any."""
    honest = [panel for panel in panels if not panel.leaks]
    leaky = [panel for panel in panels if panel.leaks]
    return [found for mine, leak in ((honest, False), (leaky, True)) if (found := _forest(mine, leak))]


def _forest(panels: Sequence[Panel], leak: bool) -> dict[str, Any] | None:
    blocks = [block for panel in panels for lines in ranked(panel.groups) for block in _blocks(panel, lines)]
    if not blocks:
        return None
    if len({block["where"] for block in blocks}) > 1:
        blocks = [block | {"title": f"{block['where']}: {block['title']}"} for block in blocks]
    rows = [row for block in blocks for row in block["rows"]]
    return {
        "leak": leak,
        "least": min(axis_span(panel) for panel in panels),
        "blocks": blocks,
        "most_seeds": max(row["seeds"] for row in rows),
        "compared": sum(row["tested"] for row in rows),
        "open": len(rows) <= OPEN_ROWS,
    }


def _blocks(panel: Panel, lines: Sequence[LineGroup]) -> list[dict[str, Any]]:
    """The differences of one setting: to the baseline, to the method without FNR, to the control."""
    pairs = [pair for pair in line_pairs(lines) if pair.found is not None]
    titles = {
        "baseline": "",
        "plain": "with FNR minus the same method without it",
        "control": "with FNR minus its control, weight 0",
    }
    found = []
    for why, title in titles.items():
        mine = [pair for pair in pairs if pair.why == why]
        if mine:
            named = title or f"minus {mine[0].other.label}"
            found.append({"where": panel.named(lines[0]), "title": named, "rows": [_row(pair) for pair in mine]})
    return found


def _row(pair: LinePair) -> dict[str, Any]:
    found = pair.found
    assert found is not None
    return {
        "label": pair.one.label,
        "other": pair.other.label,
        "mark": pair.one.colour,
        "mean": chart_number(found.mean),
        "low": chart_number(found.low),
        "high": chart_number(found.high),
        "seeds": found.n,
        "tested": pair.corrected is not None,
        "holds": pair.holds,
        "verdict": VERDICTS[pair.verdict],
    }
