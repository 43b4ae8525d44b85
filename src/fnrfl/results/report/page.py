"""One HTML file about some runs: everything inside, nothing fetched, no markup from the outside."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import shlex
from collections.abc import Iterable, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, TypeVar

from fnrfl.config.spelling import counted
from fnrfl.core.errors import ConfigError
from fnrfl.results.report import mixed, read, tables, words
from fnrfl.results.report.labels import method
from fnrfl.results.report.read import Group, Panel, Run
from fnrfl.rundir.events import Event
from fnrfl.rundir.outputs import check_output, write
from fnrfl.runs.metrics import LOOKING, MIB

T = TypeVar("T")
log = logging.getLogger("fnrfl")
# Seven, so that with eight colours fifty-six lines differ.
DASHES = ("none", "7 4", "2 4", "10 4 2 4", "14 5", "5 3 1 3 1 3", "4 2")
METRICS = (
    ("accuracy", "accuracy", "Share of right answers on the test set."),
    ("accuracy_clean", "clean", "Accuracy on the test set without feature noise."),
    ("accuracy_own", "own", "Mean over clients of the accuracy on each one's own test distribution."),
    ("balanced_accuracy", "balanced", "Accuracy on the test set, every class counted alike."),
    ("worst_client", "worst client", "The lowest accuracy on a client's own mixture of classes, from the test set."),
    ("validation_accuracy", "validation", "Accuracy on validation data, which is there to choose by."),
    ("loss", "loss", "Mean cross-entropy on the test set."),
)
PHASES = {
    "local": "local training",
    "norm-pass": "norm pass in train mode",
    "measure": "norms and ranking",
    "refine": "refinement",
    "deliver": "delivery of unrefined models",
    "server": "server",
    "look": "evaluation, not counted",
}
TONES = {
    "local": "c0",
    "norm-pass": "c7",
    "measure": "c2",
    "refine": "c3",
    "deliver": "c5",
    "server": "c1",
    "look": "mute",
}
# What keeps a page light, whatever it is about.
POINTS = 200  # of a curve
CLIENTS = 100  # of a run that is shown from inside
NUMBERS = 100_000  # of class norms and rankings, over all runs that are shown from inside


def report(run_dirs: Sequence[Path], out: Path, *, title: str | None = None, plots: bool = True) -> Path:
    """Write a page about run directories, and folders of them, to `out`; the figures go to plots/ beside it.

    `out` is the file, or a folder that gets a report.html. Runs that differ in their seed alone make one line.
    """
    found = read.load(run_dirs)
    runs, begun = found.runs, [run for run in found.runs if run.rounds]
    for sentence in found.damaged:
        log.warning(sentence)
    if not begun:
        raise ConfigError(
            f"{runs[0].path} has no finished round yet, so there is nothing to report. Go on with `fnrfl resume "
            f"{shlex.quote(str(runs[0].path))}`."
        )
    out = check_output(Path(out) if Path(out).suffix in (".html", ".htm") else Path(out) / "report.html")
    panels = read.panels(begun)
    page = render(
        panels,
        title=title,
        waiting=[run for run in runs if not run.rounds],
        failed=found.failed,
        damaged=found.damaged,
    )
    if plots:
        from fnrfl.results.report.plots import draw  # matplotlib is slow to import

        draw(panels, out.parent / "plots")
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, page)
    return out


def render(
    panels: Sequence[Panel],
    *,
    title: str | None = None,
    waiting: Sequence[Run] = (),
    failed: Sequence[str] = (),
    damaged: Sequence[str] = (),
) -> str:
    """The page as text; `waiting` are runs without a finished round, the rest are sentences about runs left out."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ConfigError("A report needs the package jinja2. Install it with `pip install jinja2`.") from error

    def part(name: str) -> str:
        return resources("fnrfl.results.report").joinpath(name).read_text(encoding="utf-8")

    groups = [group for panel in panels for group in panel.groups]
    runs = [run for group in groups for run in group.runs]
    style, script = part("page.css"), part("page.js")
    lead, told = words.summary(panels)
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return (
        template.from_string(part("page.html"))
        .render(
            title=title or _title(panels),
            style=Markup(style),
            script=Markup(script),
            style_hash=_hash(style),
            script_hash=_hash(script),
            data=Markup(_json(_payload(panels))),
            dashes=DASHES,
            what=words.what(panels),
            lead=lead,
            summary=told,
            leaks={leak: words.LEAKS.get(leak, leak) for group in groups for leak in group.leaks},
            unfinished=[run for run in runs if not run.finished],
            waiting=waiting,
            notices=list(dict.fromkeys(notice for run in runs for notice in run.about["notices"])),
            failed=failed,
            damaged=damaged,
            apart=mixed.sentences([run.origin for run in runs]),
            panels=[
                {
                    "title": panel.title,
                    "leaks": panel.leaks,
                    "measured_on": words.measured_on(panel),
                    "seconds_of": words.seconds_of(panel),
                    "several_seeds": any(len(group.runs) > 1 for group in panel.groups),
                    "results": tables.results(panel),
                    "differences": tables.differences(panel),
                    "every_run": tables.every_run(panel),
                    "settings": tables.settings(panel),
                }
                for panel in panels
            ],
            learned=tables.learned(groups),
            groups=groups,
            reruns=[_rerun(group) for group in groups],
            facts=_facts(runs),
        )
        .lstrip()
    )


def _title(panels: Sequence[Panel]) -> str:
    groups = [group for panel in panels for group in panel.groups]
    data = ", ".join(dict.fromkeys(str(group.config["dataset"]) for group in groups))
    methods = {method(group.config) for group in groups}
    if len(groups) == 1:
        return f"{groups[0].label} on {data}"
    return f"{len(groups)} {'methods' if len(methods) == len(groups) else 'variants'} on {data}"


def _hash(text: str) -> str:
    """What the page's own policy calls this text, so that the browser runs it and nothing else."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: object) -> str:
    """JSON that can stand in a script element: no character of markup is left in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# -- what the charts are drawn from -----------------------------------------------------------------------------------


def _payload(panels: Sequence[Panel]) -> dict[str, Any]:
    groups = [group for panel in panels for group in panel.groups]
    refining = max(1, sum(group.runs[0].refines for group in groups))
    splits: dict[str, list[list[int]]] = {}  # methods share them
    for group in groups:
        splits.setdefault(group.runs[0].about["partition"], group.runs[0].counts[:CLIENTS])
    return {
        "dashes": DASHES,
        "metrics": [{"key": key, "name": name, "help": text} for key, name, text in METRICS],
        "panels": [_panel(panel) for panel in panels],
        "splits": splits,
        "inside": [_inside(group, NUMBERS // refining) for group in groups],
        "first": max(range(len(groups)), key=lambda i: (bool(groups[i].config.get("fnr.weight")), -i)),
    }


def _panel(panel: Panel) -> dict[str, Any]:
    def phases(kind: str) -> dict[str, dict[str, Any]]:
        met = {_phase(name) for group in panel.groups for run in group.runs for e in run.rounds for name in e[kind]}
        names = [name for name in PHASES if name in met] + sorted(met - PHASES.keys())
        return {name: {"label": PHASES.get(name, name), "tone": TONES.get(name, "c4")} for name in names}

    traffic, time = phases("bytes"), phases("seconds")
    return {
        "leaks": panel.leaks,
        "classes": [str(c) for c in range(len(panel.groups[0].runs[0].counts[0]))],
        "phases": {"bytes": list(traffic.values()), "time": list(time.values())},
        "groups": [_group(group, list(traffic), list(time)) for group in panel.groups],
    }


def _phase(name: str) -> str:
    """A phase of the log as the page shows it: all looking at models is one."""
    return "look" if name in LOOKING else name


def _group(group: Group, traffic: Sequence[str], time: Sequence[str]) -> dict[str, Any]:
    rounds = _thinned(range(group.num_rounds), POINTS)

    def over_seeds(metric: str) -> dict[str, list[float | None]] | None:
        curves = [run.curve(metric) for run in group.runs]
        at = [[value for curve in curves if (value := curve[t]) is not None] for t in rounds]
        if not any(at):
            return None
        return {
            "mean": [_mean(values) for values in at],
            "low": [short(min(values, default=None)) for values in at],
            "high": [short(max(values, default=None)) for values in at],
        }

    def sent(direction: str) -> list[float | None]:
        """MiB by phase, mean over the runs."""
        return [
            _mean(sum(e["bytes"].get(phase, {}).get(direction, 0) for e in run.rounds) / MIB for run in group.runs)
            for phase in traffic
        ]

    def spent() -> list[float | None]:
        """Seconds by phase, mean over the runs."""
        return [
            _mean(
                sum(v for e in run.rounds for k, v in e["seconds"].items() if _phase(k) == phase) for run in group.runs
            )
            for phase in time
        ]

    curves = {metric: over_seeds(metric) for metric, _, _ in METRICS}
    per_class = [run.rounds[-1]["per_class"] for run in group.runs]
    return {
        "label": group.label,
        "mark": group.colour,
        "seeds": group.seeds,
        "final": [short(run.accuracy) for run in group.runs],
        "rounds": [group.runs[0].rounds[t]["round"] for t in rounds],
        "curves": {metric: curve for metric, curve in curves.items() if curve is not None},
        "mib": [_mean(run.mib[t] for run in group.runs) for t in rounds],
        "seconds": [_mean(run.seconds[t] for run in group.runs) for t in rounds],
        "classes": [_mean(values) for values in zip(*per_class, strict=True)],
        "bytes": [{"name": "down", "parts": sent("down")}, {"name": "up", "parts": sent("up")}],
        "time": [{"name": "", "parts": spent()}],
    }


def _inside(group: Group, numbers: int) -> dict[str, Any]:
    """One line's first run, client by client."""
    run = group.runs[0]
    shown = range(min(CLIENTS, len(run.counts)))
    return {
        "label": group.label,
        "seed": run.seed,
        "leaks": group.leaks,
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
    ranked = [value for event in active if (value := _of_client(event, "ranking", client)) is not None]
    normed = [value for event in active if (value := _of_client(event, "norms", client)) is not None]
    norms = normed[-1] if normed else []
    known = [value for value in norms if value]  # 0: public data has none of this class
    return {
        "client": client,
        "examples": sum(run.counts[client]),
        "active": len(active),
        "ranking": short(ranked[-1]) if ranked else None,
        "norm": _mean(known),
        "norm_low": short(min(known, default=None)),
        "norm_high": short(max(known, default=None)),
        "refined": sum(client in event["refined"] for event in active if "refined" in event) if run.refines else None,
    }


def _of_client(event: Event, what: str, client: int) -> Any:
    """What a round's line says of a client; None if nothing."""
    return event[what][event["cohort"].index(client)] if what in event and client in event["cohort"] else None


def _refined(run: Run, shown: range, numbers: int) -> dict[str, Any] | None:
    """Who was refined when: 0 not active, 1 active, 2 refined."""
    if not any("refined" in event for event in run.rounds):
        return None
    kept = _thinned(run.rounds, numbers // (2 * len(shown)))

    def state(event: Event, client: int) -> int:
        return 0 if client not in event["cohort"] else 2 if client in event.get("refined", ()) else 1

    def ranking(event: Event, client: int) -> float | None:
        return short(_of_client(event, "ranking", client))

    return {
        "rounds": [event["round"] for event in kept],
        "grid": [[state(event, client) for event in kept] for client in shown],
        "ranking": [[ranking(event, client) for event in kept] for client in shown],
    }


def _change(run: Run) -> dict[str, Any] | None:
    """Accuracy of refined clients before and after, class by class, mean over the rounds."""
    told = [event for event in run.rounds if event.get("refined_before") and event.get("refined_after")]
    if not told:
        return None
    before, after = ([event[key] for event in told] for key in ("refined_before", "refined_after"))
    return {
        "before": [_mean(values) for values in zip(*before, strict=True)],
        "after": [_mean(values) for values in zip(*after, strict=True)],
    }


def _norms(run: Run, numbers: int) -> dict[str, Any] | None:
    """Class norms of the clients in each round."""
    told = [event for event in run.rounds if "norms" in event]
    if not told:
        return None
    size = max(sum(len(row or ()) for row in event["norms"][:CLIENTS]) for event in told)
    kept = _thinned(told, numbers // max(1, size))
    classes = max(len(row or ()) for event in kept for row in event["norms"])
    unknown: list[float | None] = [None] * classes
    values = [[[short(v) or None for v in row or unknown] for row in event["norms"][:CLIENTS]] for event in kept]
    return {
        "rounds": [event["round"] for event in kept],
        "cohorts": [event["cohort"][:CLIENTS] for event in kept],
        "values": values,
        "max": max((v for rows in values for row in rows for v in row if v is not None), default=None),
    }


def _gap(run: Run) -> list[dict[str, Any]] | None:
    """Mean class norm of refined clients, before their refinement, and of the others, by round."""
    told = _thinned([event for event in run.rounds if "norms" in event and "refined" in event], POINTS)
    if not told:
        return None

    def points(refined: bool) -> list[dict[str, Any]]:
        found = []
        for event in told:
            rows = [
                row
                for client, row in zip(event["cohort"], event["norms"], strict=True)
                if row is not None and (client in event["refined"]) == refined
            ]
            means = [mean for row in rows if (mean := read.mean([v for v in row if v])) is not None]
            if means:
                found.append(
                    {
                        "x": event["round"],
                        "y": _mean(means),
                        "low": short(min(means)),
                        "high": short(max(means)),
                    }
                )
        return found

    return [
        {"label": "the others", "points": points(refined=False)},
        {"label": "refined in this round, before it", "points": points(refined=True)},
    ]


def _thinned(values: Sequence[T], most: int) -> Sequence[T]:
    """Evenly spaced values, `most` of them or fewer; the last one is always there."""
    every = math.ceil(len(values) / max(1, most)) or 1
    return values[::-1][::every][::-1]


def _mean(values: Iterable[float | None]) -> float | None:
    return short(read.mean(list(values)))


def short(value: float | None) -> float | None:
    """A number with as many digits as a chart can show."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


# -- how to get there again -------------------------------------------------------------------------------------------


def _rerun(group: Group) -> dict[str, Any]:
    run = group.runs[0]
    again = run.path.with_name(f"{run.path.name}-again")
    typed = ["fnrfl", "run", str(run.path / "config.toml"), "-o", str(again)]
    return {"group": group, "seed": run.seed, "command": shlex.join(typed), "toml": run.origin.toml}


def _facts(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Where the runs come from; what differs between them is listed."""

    def each(values: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(values))

    def parts(run: Run) -> str:
        held = {name: count for name, count in run.examples.items() if count and name != "train"}
        clients = sum(map(sum, run.counts))
        told = ", ".join(f"{count:,} {name}" for name, count in ({"with the clients": clients} | held).items())
        return f"{run.config['dataset']}: {counted(run.examples['train'], 'training example')}; {told}"

    about = [run.about for run in runs]
    return {
        "protocol": each([str(run.config["protocol"]) for run in runs]),
        "leaks": each([", ".join(run.leaks) or "none" for run in runs]),
        "examples": each([parts(run) for run in runs]),
        "data source": each([f"{a['data']['source']} (sha256 {a['data']['sha256'][:16]})" for a in about]),
        "device": each([str(a["device"]) for a in about]),
        "engine": each([f"{run.config['engine.name']}, {run.config['engine.precision']}" for run in runs]),
        "versions": each([", ".join(f"{k} {v}" for k, v in a["versions"].items()) for a in about]),
        "revision": each([str(a["git"]) for a in about if a["git"]]),
        "parameters": each([f"{a['parameters']:,}" for a in about]),
    }
