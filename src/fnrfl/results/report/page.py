"""One HTML file about some runs: everything inside, nothing fetched, no markup from the outside."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted
from fnrfl.results.report import load, sentences, tables
from fnrfl.results.report.charts import DASHES, payload
from fnrfl.results.report.groups import COLOURS, LineGroup, Panel, data_name, method, panels_of, shared_method
from fnrfl.results.report.load import Run
from fnrfl.results.report.pairs import is_control_line
from fnrfl.results.report.privacy_table import learned
from fnrfl.rundir.outputs import check_output, write_output

log = logging.getLogger("fnrfl")

NOTHING_LEFT_OUT = load.Found()
# What follows the summary, by name: each is a link, a part that folds, and the template sections/NAME.html.
PAGE_SECTIONS = {
    "convergence": "Convergence",
    "results": "Results",
    "cost": "Cost",
    "metrics": "Metrics",
    "classes": "Classes",
    "sites": "Sites",
    "inside": "Clients and data",
    "learned": "What the server learned about each client",
    "again": "How to run it again",
}


def report(
    run_dirs: Sequence[Path],
    out: Path | None = None,
    *,
    title: str | None = None,
    metric: str | None = None,
    plots: bool = True,
) -> Path:
    """Write a page about run directories, and folders of them, to `out`; the figures go to plots/ beside it.

    Those of a page NAME.html go to NAME-plots/. `out` is the file, or a folder that gets a report.html: by default the
    run directory if there is one, else the working folder. Runs that differ in their seed alone make one line.
    Lines are ranked by `metric`, by default that of their comparison.
    """
    out = out or (run_dirs[0] if len(run_dirs) == 1 else Path())
    found = load.load_runs(run_dirs)
    begun = [run for run in found.runs if run.rounds]
    for sentence in (*found.damaged, *found.astray):
        log.warning(sentence)
    if not begun:
        first = found.runs[0].path
        raise ConfigError(
            f"{first} has no finished round yet, so there is nothing to report. Go on with `fnrfl resume "
            f"{shlex.quote(str(first))}`."
        )
    out = check_output(Path(out) if Path(out).suffix in (".html", ".htm") else Path(out) / "report.html")
    panels = panels_of(begun, tables.page_metric(begun, metric))
    page = render(panels, title=title, found=found)
    if plots:
        from fnrfl.results.report.plots import draw_figures  # matplotlib is slow to import

        draw_figures(payload(panels), out.parent / ("plots" if out.stem == "report" else f"{out.stem}-plots"))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_output(out, page)
    return out


def render(panels: Sequence[Panel], *, title: str | None = None, found: load.Found = NOTHING_LEFT_OUT) -> str:
    """Return the page as text; `found` has runs without a finished round, and sentences about runs left out."""
    groups = [group for panel in panels for group in panel.groups]
    runs = [run for panel in panels for run in panel.runs]
    said, notes = sentences.summary(panels)
    drawn, shown = payload(panels), [_panel(panel) for panel in panels]
    sites = any(panel["sites"] for panel in shown)
    values = {
        "title": title or _title(groups),
        "dashes": DASHES,
        "sections": {name: text for name, text in PAGE_SECTIONS.items() if name != "sites" or sites},
        "what": sentences.what(panels),
        "said": [(one.text, one.line.first.about["partition"]) for one in said],
        "notes": notes,
        "grid": tables.setting_grid(panels),
        "forests": drawn["forests"],
        "panels": shown,
        "learned": learned(groups),
        "reruns": [_rerun(group) for group in groups],
        "facts": _facts(runs),
    }
    return fill(drawn, values | _banners(runs, found))


def _banners(runs: Sequence[Run], found: load.Found) -> dict[str, Any]:
    """What a reader must know before anything else."""
    return {
        "leaks": {leak: sentences.LEAKS.get(leak, leak) for run in runs for leak in run.leaks},
        "unfinished": [run for run in runs if not run.finished],
        "waiting": [run for run in found.runs if not run.rounds],
        "failed": found.failed,
        "damaged": found.damaged,
        "astray": found.astray,
        "apart": load.kept_apart([run.origin for run in runs]),
        "notices": list(dict.fromkeys(notice for run in runs for notice in run.about["notices"])),
    }


def _panel(panel: Panel) -> dict[str, Any]:
    """The tables of a chart's lines, and what the template says about them."""
    test = panel.first.examples["test"]
    others = tables.tabled_metrics(panel)
    return {
        "title": panel.title,
        "leaks": panel.first.leaks,
        "metric": panel.metric,
        "tested": f"{counted(test, 'test example')} of {data_name(panel.first.config)}",
        "one_example": f"{100 / test:.{1 if test < 100 else 2}f}",
        "noisy": any("accuracy_clean" in run.rounds[0] for run in panel.runs),
        "devices": list(dict.fromkeys(f"{r.about['device']}, {r.config['engine.name']} engine" for r in panel.runs)),
        "several_seeds": any(len(group.runs) > 1 for group in panel.groups),
        "many_lines": len(panel.groups) > COLOURS,
        "results": tables.results(panel),
        "cost": tables.line_table(panel, tables.COSTS),
        "differences": tables.differences(panel),
        "every_run": tables.every_run(panel),
        "settings": tables.settings(panel),
        "sites": tables.site_table(panel),
        "metrics": tables.line_table(panel, map(tables.measure, others)) if others else None,
        "lower_is_better": [one.name for one in others if not one.higher_is_better],
        "confusion": any(tables.confusion_over_seeds(group) for group in panel.groups),
    }


def _title(groups: Sequence[LineGroup]) -> str:
    data = ", ".join(dict.fromkeys(data_name(group.config) for group in groups))
    if len(groups) == 1:
        return f"{groups[0].label} on {data}"
    names = list(dict.fromkeys(group.label for group in groups if not is_control_line(group)))
    methods = {method(group.config) for group in groups if not is_control_line(group)}
    if len(names) == len(methods) > 1:
        return f"{sentences.listed(names) if len(names) <= sentences.NAMES else f'{len(names)} methods'} on {data}"
    shared = shared_method([group.config for group in groups])
    return f"{len(groups)} variants{f' of {shared}' if shared else ''} on {data}"


# -- how to get there again -------------------------------------------------------------------------------------------


def _rerun(group: LineGroup) -> dict[str, Any]:
    run = group.first
    again = run.path.with_name(f"{run.path.name}-again")
    typed = ["fnrfl", "run", str(run.path / "config.toml"), "-o", str(again)]
    named = {"label": group.label, "leaks": run.leaks, "seed": run.seed}
    return named | {"command": shlex.join(typed), "toml": run.origin.toml}


def _facts(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Where the runs come from; what differs between them is listed."""
    facts = [_facts_of(run) for run in runs]
    return {name: list(dict.fromkeys(fact[name] for fact in facts if fact[name])) for name in facts[0]}


def _facts_of(run: Run) -> dict[str, str]:
    about, config = run.about, run.config
    parts = {"with the clients": sum(map(sum, run.counts))} | run.examples
    held = ", ".join(f"{count:,} {name}" for name, count in parts.items() if count and name != "train")
    return {
        "protocol": str(config["protocol"]),
        "leaks": ", ".join(run.leaks) or "none",
        "examples": f"{config['dataset.name']}: {counted(run.examples['train'], 'training example')}; {held}",
        "data source": f"{about['data']['source']} (sha256 {about['data']['sha256'][:16]})",
        "device": str(about["device"]),
        "engine": f"{config['engine.name']}, {config['engine.precision']}",
        "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        "revision": str(about["git"] or ""),
        "parameters": f"{about['parameters']:,}",
    }


# -- the template: style, scripts and data inside, nothing fetched, no markup from the outside ------------------------


def fill(data: object, values: Mapping[str, Any]) -> str:
    """Return page.html with `values`, its style and scripts, and `data` for the scripts.

    The page's own policy lets the browser run these scripts and this style and nothing else, and load nothing.
    """
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ConfigError("A page needs the package jinja2. Install it with `pip install jinja2`.") from error

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(_part)
    )
    # JSON that can stand in a script element: no character of markup is left in it.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    ours = {"style": _part("page.css"), "script": "".join(map(_part, ("drawing.js", "page.js", "exports.js")))}
    hashes = {
        f"{name}_hash": "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        for name, content in ours.items()
    }
    inside = {name: Markup(content) for name, content in (ours | {"data": text}).items()}
    return environment.get_template("page.html").render({**values, **inside, **hashes}).lstrip()


def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
