"""A dry run: what a run would take, and its config; what a comparison would take."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnrfl.cli.commands import is_terminal, print_answer
from fnrfl.cli.common import paragraph, print_json
from fnrfl.cli.display import title
from fnrfl.core.words import counted
from fnrfl.runs.metrics import MIB

if TYPE_CHECKING:
    from fnrfl.config import RunConfig
    from fnrfl.results.compare import PlannedRun


LONG = 3600.0  # seconds; a note says that a run takes longer
SHORTER = "fewer rounds or client.epochs, a smaller model or less data make it shorter"


def duration(seconds: float) -> str:
    """Return seconds in the unit that people would use."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{max(1, round(seconds))} s"


def print_forecast(config: RunConfig, *, json: bool) -> None:
    """Print what a run would take, as comments above its config, so that the whole is a TOML file that runs."""
    missing = missing_dataset(config)
    if missing is not None:
        lines = [f"{missing} is not on this machine, so nothing can be counted. To get it: fnrfl data get {missing}"]
        summary: dict[str, Any] = {"missing": missing, "leaks": list(config.leaks_on), "config": config.to_toml()}
    else:
        from fnrfl.runs.forecast import forecast

        found = forecast(config)
        config, summary = found.config, found.summary()
        lines = list(_forecast_lines(summary))
    if json:
        return print_json(summary)
    leaks = [f"leak: {', '.join(config.leaks_on)}"] if config.leaks_on else []
    print_answer("\n".join(f"# {line}" for line in (title(config), *leaks, *lines)))
    print_answer(f"\n{config.to_toml()}")


def missing_dataset(config: RunConfig) -> str | None:
    """Return the data set of a run if it is one that has to be fetched first."""
    from fnrfl.data.sources import available

    return next((entry.name for entry in available() if entry.name == config.dataset.name and not entry.found), None)


def _forecast_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    phases = ", ".join(f"{count:,} {phase}" for phase, count in summary["steps_by_phase"].items())
    yield f"steps   {summary['steps']:,}: {phases}"
    for way in ("up", "down"):
        each, total = summary[f"bytes_{way}_per_round"], summary[f"bytes_{way}"]
        yield f"{way:6}  {counted(each, 'byte')} a round, {total:,} in all ({total / MIB:.1f} MiB)"
    memory = summary["memory_estimate"]
    yield f"memory  {'unknown' if memory is None else f'about {memory / MIB:.0f} MiB'}"
    yield f"time    about {duration(summary['seconds_estimate'])} here, judging by a few steps that were thrown away"
    threads = counted(summary["threads"], "GPU" if summary["engine"] == "gpu" else "thread")
    at_once, parameters = counted(summary["clients_at_once"], "client"), counted(summary["parameters"], "parameter")
    yield f"engine  {summary['engine']}, {at_once} at once on {threads}, {parameters}"
    yield from (f"note    {notice}" for notice in summary["notices"])
    if summary["seconds_estimate"] > LONG:
        yield f"note    more than an hour; {SHORTER}"


# -- a comparison ------------------------------------------------------------------------------------------------------


def print_plan(planned: Sequence[PlannedRun], folder: Path, *, json: bool) -> None:
    """Print what a comparison would take: a line for each group, and the sum."""
    known = [run.seconds for run in planned if run.seconds is not None]
    total = sum(known) if len(known) == len(planned) else None
    if json:
        return print_json({"out": str(folder), "runs": [run.summary() for run in planned], "seconds_estimate": total})
    print_answer("\n".join(_group_lines(planned)))
    reused = sum(run.state == "finished" for run in planned)
    kept = f", {reused} of them finished already" if reused else ""
    told = "no time can be told" if total is None else f"about {duration(total)} here" if total else "nothing to do"
    print_answer(f"{counted(len(planned), 'run')} in {folder}{kept}, {told}. Nothing was written.")
    for name in sorted({missing for run in planned if (missing := missing_dataset(run.cell.config)) is not None}):
        print_answer(f"note: {name} is not on this machine. To get it: fnrfl data get {name}")
    if total is not None and total > LONG:
        print_answer(f"note: more than an hour; {SHORTER}, or fewer --seeds.")


def _group_lines(planned: Sequence[PlannedRun]) -> Iterator[str]:
    """Yield a line for each group; on a terminal a long name is folded."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in planned:
        groups.setdefault(run.cell.group.label, []).append(run)
    lines = [_group_line(label, runs) for label, runs in groups.items()]
    times, states = (max(len(line[place]) for line in lines) for place in (0, 1))
    for time, state, label in lines:
        first = f"{time:{times}}  {state:{states}}  "
        folded = paragraph(label, shutil.get_terminal_size().columns, first, " " * min(len(first), 40))
        yield "\n".join(folded) if is_terminal() else first + label


def _group_line(label: str, runs: Sequence[PlannedRun]) -> tuple[str, str, str]:
    """(how long its runs take, how far they are, the group)."""
    left = [run for run in runs if run.state != "finished"]
    begun = [run for run in left if run.state == "begun"]
    states = [f"{len(runs) - len(left)} finished"] if len(left) < len(runs) else []
    states += [
        f"seed {run.cell.seed} goes on after round {run.rounds_done} of {run.cell.config.rounds}" for run in begun
    ]
    states += [f"{len(left) - len(begun)} new"] if len(begun) < len(left) else []
    known = [run.seconds for run in left if run.seconds is not None]
    time = "-" if not left else "unknown" if not known else f"about {duration(sum(known))}"
    return time, ", ".join(states), f"{label}{' leak' if runs[0].cell.config.leaks_on else ''}"
