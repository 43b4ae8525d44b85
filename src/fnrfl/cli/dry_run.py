"""A dry run: what a run would take, and its config."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fnrfl.cli.common import print_answer
from fnrfl.cli.display import title
from fnrfl.config.spelling import counted
from fnrfl.runs.metrics import MIB

if TYPE_CHECKING:
    from fnrfl.config import RunConfig


def print_forecast(config: RunConfig, *, json: bool) -> None:
    """What a run would take, as comments above its config, so that the whole is a TOML file that runs."""
    from fnrfl.data.sources import available

    missing = next((entry.name for entry in available() if entry.name == config.dataset.name and not entry.found), None)
    if missing is not None:
        lines = [f"{missing} is not on this machine, so nothing can be counted. To get it: fnrfl data get {missing}"]
        summary: dict[str, Any] = {"missing": missing, "leaks": list(config.leaks_on), "config": config.to_toml()}
    else:
        from fnrfl.runs.forecast import forecast

        found = forecast(config)
        config, summary = found.config, found.summary()
        lines = list(_forecast_lines(summary))
    if json:
        print_answer(json_format.dumps(summary, allow_nan=False))
        return
    leaks = [f"leak: {', '.join(config.leaks_on)}"] if config.leaks_on else []
    for line in (title(config), *leaks, *lines):
        print_answer(f"# {line}")
    print_answer(f"\n{config.to_toml()}")


def _forecast_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    phases = ", ".join(f"{count:,} {phase}" for phase, count in summary["steps_by_phase"].items())
    yield f"steps   {summary['steps']:,}: {phases}"
    for way in ("up", "down"):
        each, total = summary[f"bytes_{way}_per_round"], summary[f"bytes_{way}"]
        yield f"{way:6}  {counted(each, 'byte')} a round, {total:,} in all ({total / MIB:.1f} MiB)"
    memory = summary["memory_estimate"]
    yield f"memory  {'unknown' if memory is None else f'about {memory / MIB:.0f} MiB'}"
    yield f"time    about {_duration(summary['seconds_estimate'])} here, judging by a few steps that were thrown away"
    place = "GPU" if summary["engine"] == "gpu" else "thread"
    yield (
        f"engine  {summary['engine']}, {counted(summary['clients_at_once'], 'client')} at once on "
        f"{counted(summary['threads'], place)}, {counted(summary['parameters'], 'parameter')}"
    )
    yield from (f"note    {notice}" for notice in summary["notices"])


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{max(1, round(seconds))} s"
