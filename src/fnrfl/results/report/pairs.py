"""Lines that are compared with each other: in the same setting, with the baseline, without FNR, without its penalty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fnrfl.config.registry import CONTROLS
from fnrfl.results.report.groups import LineGroup, setting
from fnrfl.results.statistics import LEVEL, Difference, holm, paired
from fnrfl.rundir.configs import WEIGHTED, without_keys

FREE = ("seed", "name", "leaks", "engine")  # in which relatives may differ: an engine changes the time, not the result
VERDICTS = {
    "holds": "it holds after correction",
    "alone": "by its interval alone",
    "same": "cannot be told apart",
    "equal": "no difference",
    "same everywhere": "the same with every seed: cannot be told",
    "one seed": "one seed: cannot be told",
    "apart": "no seed and split in common",
}


@dataclass(frozen=True)
class LinePair:
    """A line, one that it is compared with, and why; p is corrected for all pairs of the setting that have one."""

    one: LineGroup
    other: LineGroup
    why: str  # "baseline", "plain" or "control"
    found: Difference | None
    corrected: float | None = None

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


def ranked(groups: Sequence[LineGroup]) -> list[list[LineGroup]]:
    """The finished lines of each setting that have the metric: those that may be put in order."""
    settings: dict[object, list[LineGroup]] = {}
    for group in groups:
        if group.first.finished and group.values:
            settings.setdefault(setting(group.first), []).append(group)
    return list(settings.values())


def is_control_line(group: LineGroup) -> bool:
    """Whether a line is there to be compared with: one of the controls, or refinement without its penalty."""
    return group.config["algorithm.name"] in CONTROLS or group.config.get("fnr.weight") == 0


def difference(one: LineGroup, other: LineGroup) -> Difference | None:
    """The metric of one line minus another's over the seeds that both have with the same split; None without any."""
    splits = {run.seed: run.origin.split for run in other.runs}
    seeds = {run.seed for run in one.runs if splits.get(run.seed) == run.origin.split}
    return paired({seed: value for seed, value in one.values.items() if seed in seeds}, other.values)


def line_pairs(lines: Sequence[LineGroup]) -> list[LinePair]:
    """Each line of a setting with the baseline, with its method without FNR and with its control, each pair once."""
    return _corrected([LinePair(one, other, why, difference(one, other)) for one, other, why in _relatives(lines)])


def against_all(
    first: LineGroup, others: Sequence[LineGroup], lines: Sequence[LineGroup]
) -> tuple[dict[LineGroup, LinePair], int]:
    """The pairs of one line with some others, and how many comparisons the new ones among them are corrected for.

    A pair of the setting stays as it is there, so that a page says one thing about it; others add to their number.
    """
    known = line_pairs(lines)
    met = {line for pair in known if first in (pair.one, pair.other) for line in (pair.one, pair.other)}
    new = [LinePair(first, other, "", difference(first, other)) for other in others if other not in met]
    pairs = [*known, *_corrected([*known, *new])[len(known) :]]
    tested = sum(pair.corrected is not None for pair in pairs)
    mine = {pair.other if pair.one is first else pair.one: pair for pair in pairs if first in (pair.one, pair.other)}
    return {line: pair for line, pair in mine.items() if line in others}, tested


def _corrected(pairs: Sequence[LinePair]) -> list[LinePair]:
    """Return pairs with p corrected for their number."""
    corrected = iter(holm([pair.found.p for pair in pairs if pair.found is not None and pair.found.p is not None]))
    return [
        pair if pair.found is None or pair.found.p is None else replace(pair, corrected=next(corrected))
        for pair in pairs
    ]


def _relatives(lines: Sequence[LineGroup]) -> Iterator[tuple[LineGroup, LineGroup, str]]:
    base, without, controls = baseline(lines), plain(lines), control(lines)
    for group in lines:
        seen = [group]
        for other, why in ((base, "baseline"), (without.get(group), "plain"), (controls.get(group), "control")):
            if other is not None and other not in seen:
                seen.append(other)
                yield group, other, why


def baseline(groups: Sequence[LineGroup]) -> LineGroup:
    """What the lines of a setting are compared with: as the comparison says, else the first one without FNR."""
    said = {run.path.parent / name for group in groups for run in group.runs for name in run.baseline}
    named = [group for group in groups if said & {run.path for run in group.runs}]
    bare = [group for group in groups if not group.first.refines]
    return (named or bare or list(groups))[0]


def plain(lines: Sequence[LineGroup]) -> dict[LineGroup, LineGroup]:
    """Find the line of the same runs without FNR for each line that has one."""
    refining = [line for line in lines if line.first.refines]
    return _partners(refining, [line for line in lines if not line.first.refines], "fnr", *FREE)


def control(lines: Sequence[LineGroup]) -> dict[LineGroup, LineGroup]:
    """Find the line of the same refinement with weight 0 for each line that has one."""
    weighted = [line for line in lines if line.config.get("fnr.weight")]
    return _partners(weighted, [line for line in lines if line.config.get("fnr.weight") == 0], *WEIGHTED, *FREE)


def _partners(lines: Sequence[LineGroup], others: Sequence[LineGroup], *free: str) -> dict[LineGroup, LineGroup]:
    """For each line the first finished one of the others whose config differs in free keys alone."""
    by_config = {without_keys(other.config, *free): other for other in reversed(others) if other.first.finished}
    found = ((line, by_config.get(without_keys(line.config, *free))) for line in lines)
    return {line: other for line, other in found if other is not None}
