"""What the charts of a page are drawn from: curves, traffic and time of every line, and one run from inside."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from fnrfl.results.report.groups import LineGroup, Panel
from fnrfl.results.report.load import Run
from fnrfl.results.report.numbers import CLIENTS, POINTS, chart_number, least_span, shown_mean, thinned
from fnrfl.results.report.pairs import VERDICTS, line_pairs, ranked
from fnrfl.results.report.tables import confusion_over_seeds, references, setting_grid
from fnrfl.rundir.events import Event
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
    numbers = NUMBERS // max(1, sum(group.first.refines for group in groups))
    splits: dict[str, list[list[int]]] = {}  # methods share them
    for group in groups:
        splits.setdefault(group.first.about["partition"], group.first.counts[:CLIENTS])
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
        "grids": _grids(panels),
        "panels": [_panel(panel) for panel in panels],
        "splits": splits,
        "inside": [
            inside(group, numbers) | {"panel": number} for number, panel in enumerate(panels) for group in panel.groups
        ],
        "first": max(range(len(groups)), key=lambda i: (bool(groups[i].config.get("fnr.weight")), -i)),
    }


def _grids(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """The heat-map of methods and settings, if there are any."""
    if (found := setting_grid(panels)) is None:
        return []
    values = [[chart_number(cell.value) for cell in row[1:]] for row in found.rows]  # type: ignore[arg-type]
    settings = [column.name for column in found.columns[1:]]
    return [{"rows": [row[0].text for row in found.rows], "columns": settings, "values": values}]


def charted(first: Metric) -> list[Metric]:
    """The metrics that curves can show, `first` before the others."""
    return list(dict.fromkeys([first, *(one for one in TEST_METRICS.values() if one.share), TEST_METRICS["loss"]]))


def _panel(panel: Panel) -> dict[str, Any]:
    def phases(kind: str) -> dict[str, dict[str, Any]]:
        met = {_phase(name) for run in panel.runs for event in run.rounds for name in event[kind]}
        names = [name for name in PHASES if name in met] + sorted(met - PHASES.keys())
        return {name: dict(zip(("label", "tone"), PHASES.get(name, (name, "c4")), strict=True)) for name in names}

    traffic, time = phases("bytes"), phases("seconds")
    test, classes = panel.first.examples["test"], panel.first.classes
    return {
        "leaks": panel.first.leaks,
        "classes": classes,
        "least": {"shares": least_span(test), "classes": least_span(test / len(classes))},
        "references": [
            {"name": name} | {metric: chart_number(share) for metric, share in shares.items()}
            for name, _, shares in references(panel)
        ],
        "phases": {"bytes": list(traffic.values()), "time": list(time.values())},
        "groups": [_group(group, list(traffic), list(time)) for group in panel.groups],
    }


def _phase(name: str) -> str:
    """A phase of the log as the page shows it: all looking at models is one."""
    return "look" if name in LOOKING else name


def _group(group: LineGroup, traffic: Sequence[str], time: Sequence[str]) -> dict[str, Any]:
    """The curves of a line, and its numbers after the last round; times and traffic are means over its runs."""
    runs = group.runs
    rounds = thinned(range(min(len(run.rounds) for run in runs)), POINTS)
    curves = {metric.name: _over_seeds(group, metric.name, rounds) for metric in charted(group.metric)}

    return {
        "label": group.label,
        "mark": group.colour,
        "seeds": list(group.values),
        "final": list(map(chart_number, group.values.values())),
        "rounds": [group.first.rounds[t]["round"] for t in rounds],
        "curves": {metric: curve for metric, curve in curves.items() if curve is not None},
        "mib": [shown_mean(run.mib[t] for run in runs) for t in rounds],
        "seconds": [shown_mean(run.seconds[t] for run in runs) for t in rounds],
        "classes": [shown_mean(values) for values in zip(*(run.per_class for run in runs), strict=True)],
        "confusion": confusion_over_seeds(group),
        "bytes": [{"name": way, "parts": [_mib(runs, phase, way) for phase in traffic]} for way in ("down", "up")],
        "time": [{"name": "", "parts": [_seconds(runs, phase) for phase in time]}],
    }


def _mib(runs: Sequence[Run], phase: str, way: str) -> float | None:
    return shown_mean(sum(event["bytes"].get(phase, {}).get(way, 0) for event in run.rounds) / MIB for run in runs)


def _seconds(runs: Sequence[Run], phase: str) -> float | None:
    return shown_mean(
        sum(spent for event in run.rounds for name, spent in event["seconds"].items() if _phase(name) == phase)
        for run in runs
    )


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


# -- paired differences: each line minus the one it is compared with, with its interval --------------------------------


def forests(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """One figure of all honest lines that can be paired, and one of those with leaks, as far as there are any."""
    both = (_forest([panel for panel in panels if bool(panel.first.leaks) == leak], leak) for leak in (False, True))
    return [forest for forest in both if forest is not None]


def _forest(panels: Sequence[Panel], leak: bool) -> dict[str, Any] | None:
    blocks = [block for panel in panels for lines in ranked(panel.groups) for block in _blocks(panel, lines)]
    if not blocks:
        return None
    if len({block["where"] for block in blocks}) > 1:
        blocks = [block | {"title": f"{block['where']}: {block['title']}"} for block in blocks]
    rows = [row for block in blocks for row in block["rows"]]
    return {
        "leak": leak,  # of a metric that is no share nothing is known about how much of an axis is to be shown
        "least": min(least_span(panel.first.examples["test"]) if panel.metric.share else 0.0 for panel in panels),
        "blocks": blocks,
        "most_seeds": max(row["seeds"] for row in rows),
        "open": len(rows) <= OPEN_ROWS,
    }


def _blocks(panel: Panel, lines: Sequence[LineGroup]) -> Iterator[dict[str, Any]]:
    """Yield the differences of one setting: to the baseline, to the method without FNR, to the control."""
    titles = {
        "baseline": "minus {other}",
        "plain": "with FNR minus the same method without it",
        "control": "with FNR minus its control, without penalty",
    }
    pairs = line_pairs(lines)
    for why, title in titles.items():
        if mine := [(pair, pair.found) for pair in pairs if pair.found is not None and pair.why == why]:
            rows = [
                {
                    "label": pair.one.label,
                    "other": pair.other.label,
                    "mark": pair.one.colour,
                    "mean": chart_number(found.mean),
                    "low": chart_number(found.low),
                    "high": chart_number(found.high),
                    "seeds": found.n,
                    "holds": pair.holds,
                    "verdict": VERDICTS[pair.verdict],
                }
                for pair, found in mine
            ]
            yield {"where": panel.title, "title": title.format(other=rows[0]["other"]), "rows": rows}


# -- a run from inside, client by client: who was refined when, class norms, and what refinement changed ---------------


def inside(group: LineGroup, numbers: int) -> dict[str, Any]:
    """One line's first run, client by client."""
    run = group.first
    shown = range(min(CLIENTS, len(run.counts)))
    return {
        "label": group.label,
        "seed": run.seed,
        "leaks": run.leaks,
        "split": run.about["partition"],
        "all": len(run.counts),
        "clients": [_client(run, client) for client in shown],
        "refined": _refined(run, shown, numbers // 2),
        "change": _change(run),
        "norms": _norms(run, numbers // 2),
        "gap": _gap(run),
    }


def _client(run: Run, client: int) -> dict[str, Any]:
    """What the server knows about a client in the end."""
    active = [event for event in run.rounds if client in event["cohort"]]

    def last(what: str) -> Any:
        found = (_of_client(event, what, client) for event in reversed(active))
        return next((value for value in found if value is not None), None)

    known = [value for value in last("norms") or () if value]  # 0: public data has none of this class
    return {
        "client": client,
        "name": run.client_names[client],
        "examples": sum(run.counts[client]),
        "active": len(active),
        "ranking": chart_number(last("ranking")),
        "norm": shown_mean(known),
        "norm_low": chart_number(min(known, default=None)),
        "norm_high": chart_number(max(known, default=None)),
        "refined": sum(client in event["refined"] for event in active if "refined" in event) if run.refines else None,
    }


def _of_client(event: Event, what: str, client: int) -> Any:
    """What a round's line says of a client; None if nothing."""
    return event[what][event["cohort"].index(client)] if what in event and client in event["cohort"] else None


def _refined(run: Run, shown: range, numbers: int) -> dict[str, Any] | None:
    """Who was refined when: 0 not active, 1 active, 2 refined."""
    if not any("refined" in event for event in run.rounds):
        return None
    kept = thinned(run.rounds, numbers // (2 * len(shown)))

    def state(event: Event, client: int) -> int:
        return 0 if client not in event["cohort"] else 2 if client in event.get("refined", ()) else 1

    return {
        "rounds": [event["round"] for event in kept],
        "grid": [[state(event, client) for event in kept] for client in shown],
        "ranking": [[chart_number(_of_client(event, "ranking", client)) for event in kept] for client in shown],
    }


def _change(run: Run) -> dict[str, Any] | None:
    """Accuracy of refined clients before and after, class by class, mean over the rounds."""
    told = [event for event in run.rounds if event.get("refined_before") and event.get("refined_after")]
    means = {
        when: [shown_mean(values) for values in zip(*(event[f"refined_{when}"] for event in told), strict=True)]
        for when in ("before", "after")
    }
    return means if told else None


def _norms(run: Run, numbers: int) -> dict[str, Any] | None:
    """Class norms of the clients in each round; None where there is none. Colours have one range for all rounds."""
    told = [event for event in run.rounds if "norms" in event]
    if not told:
        return None
    kept = thinned(told, numbers // max(1, *map(_num_norms, told)))
    classes = max(len(row or ()) for event in kept for row in event["norms"])
    values = [_norm_rows(event, classes) for event in kept]
    return {
        "rounds": [event["round"] for event in kept],
        "cohorts": [[run.client_names[client] for client in event["cohort"][:CLIENTS]] for event in kept],
        "values": values,
        "range": _range([v for rows in values for row in rows for v in row if v is not None]),
    }


def _range(known: Sequence[float]) -> tuple[float, float] | None:
    return (min(known), max(known)) if known else None


def _num_norms(event: Event) -> int:
    return sum(len(row or ()) for row in event["norms"][:CLIENTS])


def _norm_rows(event: Event, classes: int) -> list[list[float | None]]:
    """A round's class norms, one row for each client; None where there is none."""
    return [[chart_number(v) or None for v in row or [None] * classes] for row in event["norms"][:CLIENTS]]


def _gap(run: Run) -> list[dict[str, Any]] | None:
    """Mean class norm of refined clients, before their refinement, and of the others, by round."""
    told = thinned([event for event in run.rounds if "norms" in event and "refined" in event], POINTS)
    points: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for event, refined in itertools.product(told, points):
        known = [
            [value for value in row or () if value]
            for client, row in zip(event["cohort"], event["norms"], strict=True)
            if (client in event["refined"]) == refined
        ]
        if means := [sum(row) / len(row) for row in known if row]:
            ends = {"low": chart_number(min(means)), "high": chart_number(max(means))}
            points[refined].append({"x": event["round"], "y": shown_mean(means)} | ends)
    names = {False: "the others", True: "refined in this round, before it"}
    return [{"label": names[refined], "points": found} for refined, found in points.items()] if told else None
