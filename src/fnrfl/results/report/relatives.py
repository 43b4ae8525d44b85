"""Lines that are compared with each other: in the same setting, with the baseline, without FNR, without its penalty."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fnrfl.results.report.lines import LineGroup, setting
from fnrfl.results.statistics import Difference, paired
from fnrfl.rundir.configs import Config, is_control, is_without_fnr

FREE = ("seed", "name", "leaks", "engine")  # in which relatives may differ: an engine changes the time, not the result


def ranked(groups: Sequence[LineGroup]) -> list[list[LineGroup]]:
    """The finished lines of each setting: those whose accuracies may be put in order."""
    settings: dict[object, list[LineGroup]] = {}
    for group in groups:
        if group.finished:
            settings.setdefault(setting(group.runs[0]), []).append(group)
    return list(settings.values())


def difference(one: LineGroup, other: LineGroup) -> Difference | None:
    """Accuracy of one line minus another's over the seeds that both have with the same split; None without any."""
    splits = {run.seed: run.origin.split for run in other.runs}
    seeds = [run.seed for run in one.runs if splits.get(run.seed) == run.origin.split]
    return paired({seed: one.accuracy[seed] for seed in seeds}, {seed: other.accuracy[seed] for seed in seeds})


def baseline(groups: Sequence[LineGroup]) -> LineGroup:
    """What the lines of a setting are compared with: as the comparison says, else the first one without FNR."""
    said = {name for group in groups for run in group.runs for name in run.baseline}
    named = [group for group in groups if said & {run.path.name for run in group.runs}]
    bare = [group for group in groups if not group.runs[0].refines]
    return (named or bare or list(groups))[0]


def plain(group: LineGroup, groups: Sequence[LineGroup]) -> LineGroup | None:
    """The same runs without FNR."""
    return _relative(group, groups, lambda other: is_without_fnr(other, group.config, *FREE))


def control(group: LineGroup, groups: Sequence[LineGroup]) -> LineGroup | None:
    """The same refinement with weight 0."""
    return _relative(group, groups, lambda other: is_control(other, group.config, *FREE))


def _relative(group: LineGroup, groups: Sequence[LineGroup], fits: Callable[[Config], bool]) -> LineGroup | None:
    """The first finished line with a config that fits."""
    return next((other for other in groups if other is not group and other.finished and fits(other.config)), None)
