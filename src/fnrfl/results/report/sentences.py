"""What came out, in plain words: a few sentences for each setting, put together from a table of texts.

The first says who is ahead, the second how far, the third which differences hold; where runs cannot tell, they say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fnrfl.core.words import counted
from fnrfl.results.report.groups import LineGroup, Panel, shared_method
from fnrfl.results.report.numbers import SPACE, in_words, percent, points, signed
from fnrfl.results.report.pairs import VERDICTS, LinePair, against_all, control, is_control_line, line_pairs, ranked
from fnrfl.results.report.tables import best_guess
from fnrfl.results.statistics import mean

NAMES = 5  # in a sentence; of more, the rest is counted
LEAKS = {
    "public_is_test": "models were refined on the test set and its labels",
    "norm_pass_train_mode": "the norm pass overwrote the clients' BatchNorm statistics",
    "constant_penalty": "the penalty had no gradient",
    "clean_test_for_fnr": "under feature noise, FNR alone was scored on clean examples",
}
TEXTS = {
    "what": "{runs}{by} on {data}: {scenario} over {clients}, {rounds}, model {model}, {seeds}.",
    "nothing": "No run is finished, so there is nothing to rank yet.",
    "settings": "There are {count} settings here, and each is ranked by itself.",
    "setting": "{setting}: {said}",
    "only": "{first} reached {reached}.",
    "controls": "All lines here are controls, so none is called best. The first is {first} with {reached}.",
    "leak": "With a leak none is called best. The first is {first} with {reached}.",
    "tied": "{names} are ahead with the same {reached}.",
    "best": "{first} came out best, with {reached}.",
    "ahead": "{first} is ahead with {reached}, but these runs do not show{corrected} that it is better than {than}.",
    "corrected": " after correction for {comparisons}",
    "any": "any other method",
    "some": "{close} of the {others} other methods",
    "one seed": "That is one seed.",
    "seeds": "That is the mean of {seeds} seeds, {low} to {high}.",
    "next": " The next is {second}, {behind} behind: {verdict}{interval}.",
    "interval": " (95{space}% interval {low} to {high}, {seeds} seeds)",
    "above": " Controls that are above it: {names}.",
    "untested": "No difference can be tested: that takes two seeds in common, and differences that vary.",
    "compared": "Corrected for {comparisons}, {parts}.",
    "baseline": "against {other}",
    "plain": "FNR against the same method without it",
    "control": "the penalty against weight 0",
    "ahead of": "ahead {names}",
    "behind": "behind {names}",
    "same": "{count} not to be told apart",
    "no control": "Nothing can be said about the penalty itself in {names}: there is no run of it with weight 0.",
    "guess": "No better than one and the same answer to everything, which reaches {guess}: {names}.",
    "late": "Not finished, so shown as far as it went and not ranked: {names}.",
    "without": "Without a value of {metric}, so not ranked: {names}.",
    "leaks apart": "Lines with a leak are ranked among themselves only: they saw what an honest run does not see.",
}


def say(key: str, **values: Any) -> str:
    """Return a text of the table with its values filled in."""
    return TEXTS[key].format(**values)


def what(panels: Sequence[Panel]) -> str:
    """Say what was run, in one sentence."""
    groups = [group for panel in panels for group in panel.groups]
    seeds = [str(seed) for seed in sorted({run.seed for group in groups for run in group.runs})]
    shared = shared_method([group.config for group in groups])
    each = {
        key: listed(list(dict.fromkeys(str(group.config[key]) for group in groups)))
        for key in ("dataset.name", "scenario", "model.name", "clients", "rounds")
    }
    return say(
        "what",
        runs=counted(sum(len(group.runs) for group in groups), "run"),
        by=f" by {shared}" if shared and len(groups) > 1 else "",
        data=each["dataset.name"],
        scenario=each["scenario"],
        clients=f"{each['clients']} client{'' if each['clients'] == '1' else 's'}",
        rounds=f"{each['rounds']} round{'' if each['rounds'] == '1' else 's'}",
        model=each["model.name"],
        seeds=f"seed{'' if len(seeds) == 1 else 's'} {listed(seeds)}",
    )


def summary(panels: Sequence[Panel]) -> tuple[str, list[str]]:
    """Return the first sentence, and paragraphs: who was best, whether that is more than luck, and what FNR did.

    A line with a leak is never called best, and the page does not open with it unless all lines have leaks.
    """
    settings = [(panel, lines) for panel in panels for lines in ranked(panel.groups)]
    honest = [lines for panel, lines in settings if not panel.first.leaks]
    first = honest if len(honest) == 1 else [lines for _, lines in settings]
    if not settings:
        lead, told = say("nothing"), []
    elif len(first) == 1:
        lead, *told = _about(first[0])
    else:
        lead, told = say("settings", count=len(settings)), []
    for panel, lines in settings:
        if len(first) > 1 or lines is not first[0]:
            told.append(say("setting", setting=panel.named(lines[0]), said=" ".join(_about(lines))))
    return lead, told + _not_ranked(panels)


def _not_ranked(panels: Sequence[Panel]) -> list[str]:
    """Say what is on the page and in no ranking, or in one of its own."""
    groups = [group for panel in panels for group in panel.groups]
    late = [group.label for group in groups if not group.first.finished]
    without = [group.label for group in groups if group.first.finished and not group.values]
    told = [
        (late, say("late", names=listed(late))),
        (without, say("without", metric=groups[0].metric.name, names=listed(without))),
        (len(panels) > 1 and any(panel.first.leaks for panel in panels), say("leaks apart")),
    ]
    return [sentence for holds, sentence in told if holds]


def _about(lines: Sequence[LineGroup]) -> list[str]:
    """Return at most four sentences about the lines of one setting, and one on lines that have learned nothing."""
    order = sorted(lines, key=lambda group: -group.metric.gain(group.mean))
    methods = [group for group in order if not is_control_line(group)]
    first, pairs = (methods or order)[0], line_pairs(lines)
    above = [group for group in order if first.metric.gain(group.mean - first.mean) > 0 and is_control_line(group)]
    told = [_lead(first, methods, lines), _spread(first) + _next(first, methods)]
    if above:
        told[-1] += say("above", names=named([f"{group.label} with {_reached(group)}" for group in above]))
    if len(pairs) > 1:
        told.append(_comparisons(pairs))
    return told + _unproven(lines)


def _unproven(lines: Sequence[LineGroup]) -> list[str]:
    """Name the lines whose penalty was compared with no control, and those that have learned nothing."""
    told, controlled = [], control(lines)
    if alone := [group.label for group in lines if group.config.get("fnr.weight") and group not in controlled]:
        told.append(say("no control", names=named(alone)))
    weak = [group.label for group in lines if group.mean <= mean([best_guess(run) for run in group.runs])]
    if weak and lines[0].metric.name == "accuracy":
        told.append(say("guess", guess=percent(best_guess(lines[0].first)), names=named(weak)))
    return told


def _lead(first: LineGroup, methods: Sequence[LineGroup], lines: Sequence[LineGroup]) -> str:
    """Say who has the highest mean, and whether that is more than luck; nobody is called best who has a leak."""
    said = {"first": first.label, "reached": f"{_reached(first)} after {counted(first.config['rounds'], 'round')}"}
    said["reached"] += "" if first.metric.higher_is_better else f" ({first.metric.better})"
    if len(lines) == 1 or len(methods) == 1:
        return say("only", **said)
    if not methods:
        return say("controls", **said)
    others = methods[1:]
    if tied := [group.label for group in others if _as_good(first, group)]:
        return say("tied", names=named([first.label, *tied]), **said)
    if first.first.leaks:
        return say("leak", **said)
    pairs, compared = against_all(first, others, lines)
    close = [line.label for line, pair in pairs.items() if not pair.holds]
    if not close:
        return say("best", **said)
    than = named(close)
    if len(close) > 2:
        than = say("any" if len(close) == len(others) else "some", close=len(close), others=len(others))
    corrected = say("corrected", comparisons=counted(compared, "comparison")) if compared > 1 else ""
    return say("ahead", corrected=corrected, than=than, **said)


def _next(first: LineGroup, methods: Sequence[LineGroup]) -> str:
    """Say how far the second method is behind, and whether that is more than the spread over seeds."""
    if len(methods) < 2 or _as_good(first, methods[1]):
        return ""
    second, metric = methods[1], first.metric
    pair = against_all(first, [second], [first, second])[0][second]
    found, interval = pair.found, ""
    if found is not None and found.low is not None and found.high is not None:
        low, high = sorted((metric.gain(found.low), metric.gain(found.high)))
        if pair.one is not first:
            low, high = -high, -low
        interval = say("interval", space=SPACE, low=signed(low, metric), high=points(high, metric), seeds=found.n)
    behind = points(abs(first.mean - second.mean), metric).lstrip("+")
    return say("next", second=second.label, behind=behind, verdict=VERDICTS[pair.verdict], interval=interval)


def _comparisons(pairs: Sequence[LinePair]) -> str:
    """Say which differences hold once they are corrected for their number, and how many do not."""
    tested = sum(pair.corrected is not None for pair in pairs)
    if not tested:
        return say("untested")
    parts = []
    for why in ("baseline", "plain", "control"):
        mine = [pair for pair in pairs if pair.why == why]
        lines = {key: [p.one.label for p in mine if p.outcome == key] for key in ("ahead of", "behind", "same")}
        said = [say(key, names=named(labels), count=len(labels)) for key, labels in lines.items() if labels]
        if mine:
            parts.append(f"{say(why, other=mine[0].other.label)}: {', '.join(said)}")
    return say("compared", comparisons=counted(tested, "comparison"), parts="; ".join(parts))


def _as_good(one: LineGroup, other: LineGroup) -> bool:
    return round(one.mean - other.mean, 12) == 0


def _reached(group: LineGroup) -> str:
    name = "test accuracy" if group.metric.name == "accuracy" else group.metric.name
    return f"{in_words(group.mean, group.metric)} {name}{' (leak)' if group.first.leaks else ''}"


def _spread(group: LineGroup) -> str:
    values = list(group.values.values())
    low, high = (in_words(end(values), group.metric) for end in (min, max))
    return say("one seed" if len(values) == 1 else "seeds", seeds=len(values), low=low, high=high)


# -- names in words -------------------------------------------------------------------------------------------------


def named(labels: Sequence[str]) -> str:
    """List lines by name in a sentence; of many, the first ones and how many more there are."""
    more = len(labels) - NAMES
    return listed(labels if more < 2 else [*labels[:NAMES], f"{more} more"])


def listed(words: Sequence[str]) -> str:
    """List words in a sentence; names that have commas of their own are parted by semicolons."""
    if len(words) < 2:
        return "".join(words)
    between = "; " if any(", " in word for word in words) else ", "
    return f"{between.join(words[:-1])}{';' if between == '; ' else ''} and {words[-1]}"
