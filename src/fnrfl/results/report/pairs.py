"""Lines that are compared with each other: in the same setting, with the baseline, without FNR, without its penalty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fnrfl.config.registry import CONTROLS
from fnrfl.results.report.groups import LineGroup, setting
from fnrfl.results.statistics import LEVEL, Difference, holm, paired
from fnrfl.rundir.configs import WEIGHTED, without_keys

FREE = ("seed", "name", "leaks", "engine")  # in which relatives may differ: an engine changes the time, not the result


def ranked(groups: Sequence[LineGroup]) -> list[list[LineGroup]]:
    """The finished lines of each setting that have the metric: those that may be put in order."""
    settings: dict[object, list[LineGroup]] = {}
    for group in groups:
        if group.finished and group.values:
            settings.setdefault(setting(group.runs[0]), []).append(group)
    return list(settings.values())


def difference(one: LineGroup, other: LineGroup) -> Difference | None:
    """The metric of one line minus another's over the seeds that both have with the same split; None without any."""
    splits = {run.seed: run.origin.split for run in other.runs}
    seeds = {run.seed for run in one.runs if splits.get(run.seed) == run.origin.split}
    return paired({seed: value for seed, value in one.values.items() if seed in seeds}, other.values)


def is_control_line(group: LineGroup) -> bool:
    """Whether a line is there to be compared with: one of the controls, or refinement without its penalty."""
    return group.config["algorithm.name"] in CONTROLS or group.config.get("fnr.weight") == 0


@dataclass(frozen=True)
class LinePair:
    """A line, one that it is compared with, and why; p is corrected for all pairs of the setting that have one."""

    one: LineGroup
    other: LineGroup
    why: str  # "baseline", "plain" or "control"
    found: Difference | None
    corrected: float | None

    @property
    def holds(self) -> bool:
        """Whether the difference is more than luck, also after correction."""
        return self.verdict == "holds"

    @property
    def outcome(self) -> str:
        """Tell whether the one is "ahead of" the other or "behind" it, or the "same" as far as runs can show."""
        if self.found is None or not self.holds:
            return "same"
        return "ahead of" if self.one.metric.gain(self.found.mean) > 0 else "behind"

    def partner(self, line: LineGroup) -> LineGroup:
        """Return the line with which one of the two is compared."""
        return self.one if self.other is line else self.other

    @property
    def verdict(self) -> str:
        """Whether the difference is more than luck: a key of `VERDICTS`."""
        found = self.found
        if found is None:
            return "apart"
        if found.n == 1:
            return "one seed"
        if found.low is None or found.high is None:
            return "equal" if found.mean == 0 else "same everywhere"
        if found.low <= 0 <= found.high:
            return "same"
        return "holds" if self.corrected is not None and self.corrected < 1 - LEVEL else "alone"


VERDICTS = {
    "holds": "it holds after correction",
    "alone": "by its interval alone",
    "same": "cannot be told apart",
    "equal": "no difference",
    "same everywhere": "the same with every seed: cannot be told",
    "one seed": "one seed: cannot be told",
    "apart": "no seed and split in common",
}


def line_pairs(lines: Sequence[LineGroup]) -> list[LinePair]:
    """Each line of a setting with the baseline, with its method without FNR and with its control, each pair once."""
    chosen = list(_relatives(lines))
    return judged([(one, other, why, difference(one, other)) for one, other, why in chosen])


def judged(pairs: Sequence[tuple[LineGroup, LineGroup, str, Difference | None]]) -> list[LinePair]:
    """Pairs with p corrected for their number."""
    ps = [found.p for _, _, _, found in pairs if found is not None and found.p is not None]
    corrected = iter(holm(ps))
    return [
        LinePair(one, other, why, found, None if found is None or found.p is None else next(corrected))
        for one, other, why, found in pairs
    ]


def against_all(
    first: LineGroup, others: Sequence[LineGroup], lines: Sequence[LineGroup]
) -> tuple[list[LinePair], int]:
    """One line's pairs with some others, and how many comparisons p is corrected for: these and all of the setting.

    So no difference holds here that does not hold among the pairs of the setting.
    """
    known = [(pair.one, pair.other, pair.why, pair.found) for pair in line_pairs(lines)]
    met = {frozenset((id(one), id(other))) for one, other, _, _ in known}
    new = [other for other in others if frozenset((id(first), id(other))) not in met]
    pairs = judged([*known, *((first, other, "", difference(first, other)) for other in new)])
    wanted = {frozenset((id(first), id(other))) for other in others}
    mine = [pair for pair in pairs if frozenset((id(pair.one), id(pair.other))) in wanted]
    return mine, sum(pair.corrected is not None for pair in pairs)


def _relatives(lines: Sequence[LineGroup]) -> Iterable[tuple[LineGroup, LineGroup, str]]:
    base, without, controls = baseline(lines), plain(lines), control(lines)
    for group in lines:
        seen, mine = [group], id(group)
        for other, why in ((base, "baseline"), (without.get(mine), "plain"), (controls.get(mine), "control")):
            if other is not None and not any(other is met for met in seen):
                seen.append(other)
                yield group, other, why


def baseline(groups: Sequence[LineGroup]) -> LineGroup:
    """What the lines of a setting are compared with: as the comparison says, else the first one without FNR."""
    said = {run.path.parent / name for group in groups for run in group.runs for name in run.baseline}
    named = [group for group in groups if said & {run.path for run in group.runs}]
    bare = [group for group in groups if not group.runs[0].refines]
    return (named or bare or list(groups))[0]


def plain(lines: Sequence[LineGroup]) -> dict[int, LineGroup]:
    """Find the line of the same runs without FNR for each line that has one, by its id."""
    refining = [line for line in lines if line.runs[0].refines]
    return _partners(refining, [line for line in lines if line.config["fnr"] == "off"], "fnr", *FREE)


def control(lines: Sequence[LineGroup]) -> dict[int, LineGroup]:
    """Find the line of the same refinement with weight 0 for each line that has one, by its id."""
    weighted = [line for line in lines if line.config.get("fnr.weight")]
    return _partners(weighted, [line for line in lines if line.config.get("fnr.weight") == 0], *WEIGHTED, *FREE)


def _partners(lines: Sequence[LineGroup], others: Sequence[LineGroup], *free: str) -> dict[int, LineGroup]:
    """For each line the first finished one of the others whose config differs in free keys alone."""
    by_config = {without_keys(other.config, *free): other for other in reversed(others) if other.finished}
    found = ((line, by_config.get(without_keys(line.config, *free))) for line in lines)
    return {id(line): other for line, other in found if other is not None}
