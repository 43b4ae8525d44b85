"""What came out, in plain words: two sentences for each setting, put together from a table of texts.

The first says what each method reached, the second whether the first one's lead is more than luck. What all settings
share is said once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fnrfl.core.words import counted
from fnrfl.results.report.groups import LineGroup, Panel, data_name, method, setting_names, shared_method
from fnrfl.results.report.numbers import SPACE, in_words, percent, points, signed
from fnrfl.results.report.pairs import LinePair, against_all, baseline, control, is_control_line, line_pairs, ranked
from fnrfl.results.report.tables import best_guess
from fnrfl.results.statistics import mean

NAMES = 5  # in a sentence; of more, the rest is counted
LEAKS = {
    "public_is_test": "models were refined on the test set and its labels",
    "norm_pass_train_mode": "the norm pass overwrote the clients' BatchNorm statistics",
    "constant_penalty": "the penalty had no gradient",
    "clean_test_for_fnr": "under feature noise, FNR alone was scored on clean examples",
}
NUMERALS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
TEXTS = {
    "what": "{runs}{by} on {data}: {scenario} over {clients}, {rounds}, model {model}, {seeds}.",
    "nothing": "No run is finished, so there is nothing to rank yet.",
    "with": "With {setting} {said}",
    "right": "{first} gets {value} right",
    "reaches": "{first} reaches {value} {metric}",
    "lower": " (lower is better)",
    "next": "{name} {value}",
    "leak mark": " (leak)",
    "more": "{count} more follow",
    "control": "; the control {names}",
    "several controls": "; the controls {names}",
    "only controls": "All of these are controls, so none is called best.",
    "leak": "With a leak none is called best.",
    "tied": "{names} are equal.",
    "spread": "{seeds} seeds lie between {low} and {high}.",
    "one seed": "One seed cannot tell this from luck.",
    "apart": "They share no seed with the same split, so nothing can be told.",
    "flat": "Their difference is the same with every seed, so nothing can be told from luck.",
    "luck": "{seeds} seeds cannot tell this from luck{corrected}{interval}.",
    "some luck": "{seeds} seeds cannot tell {first} from {than}{corrected}{interval}.",
    "best": "{first} is ahead by more than luck{corrected}{interval}.",
    "any": "any of the others",
    "some": "{close} of the {others} others",
    "interval": ": {low} to {high}",
    "over": " over {second}",
    "corrected": " after correction for {comparisons}",
    "penalty": "The penalty alone cannot be told from luck in {same} of {comparisons} with refinement without it.",
    "no control": "Nothing can be said about the penalty of {names}: there is no run of it with weight 0.",
    "guess": "No better than one and the same answer to everything, which reaches {guess}{where}: {names}.",
    "where": " with {setting}",
    "late": "Not finished, so shown as far as it went and not ranked: {names}.",
    "without": "Without a value of {metric}, so not ranked: {names}.",
    "leaks apart": "Lines with a leak are ranked among themselves only: they saw what an honest run does not see.",
    "metric": "{metric}: {meaning}.",
    "intervals": "Intervals are of the paired difference over seeds, 95{space}%.",
}


class Said(NamedTuple):
    """What is said of a setting, and the line whose split is shown beside it."""

    text: str
    line: LineGroup


def say(key: str, **values: Any) -> str:
    """Return a text of the table with its values filled in."""
    return TEXTS[key].format(**values)


def what(panels: Sequence[Panel]) -> str:
    """Say what was run, in one sentence."""
    lines = [line for panel in panels for line in panel.groups]
    runs = [run for line in lines for run in line.runs]
    seeds, shared = list(map(str, sorted({run.seed for run in runs}))), shared_method([line.config for line in lines])
    keys = ("scenario", "model.name", "clients", "rounds")
    each = {key: listed(list(dict.fromkeys(str(run.config[key]) for run in runs))) for key in keys}
    return say(
        "what",
        runs=counted(len(runs), "run"),
        by=f" by {shared}" if shared and len(lines) > 1 else "",
        data=listed(list(dict.fromkeys(data_name(run.config) for run in runs))),
        scenario=each["scenario"],
        clients=_several(each["clients"], "client"),
        rounds=_several(each["rounds"], "round"),
        model=each["model.name"],
        seeds=f"seed{'' if len(seeds) == 1 else 's'} {listed(seeds)}",
    )


def _several(numbers: str, what: str) -> str:
    return f"{numbers} {what}{'' if numbers == '1' else 's'}"


def summary(panels: Sequence[Panel]) -> tuple[list[Said], list[str]]:
    """Return two sentences for each setting, and what must be known about all of them.

    A line with a leak is never called best, and the page does not open with it unless all lines have leaks.
    """
    settings = [lines for panel in panels for lines in ranked(panel.groups)]
    settings.sort(key=lambda lines: bool(lines[0].first.leaks))
    names = setting_names([lines[0].first for lines in settings])
    told = []
    for name, lines in zip(names, settings, strict=True):
        text = " ".join(_about(lines))
        told.append(Said(say("with", setting=name, said=text) if len(settings) > 1 else text, lines[0]))
    shared = (
        [*_of_metric(dict(zip(names, settings, strict=True))), *_of_pairs(settings)] if settings else [say("nothing")]
    )
    return told, [*shared, *_not_ranked(panels)]


def _about(lines: Sequence[LineGroup]) -> list[str]:
    """Say what the lines of one setting reached, and whether the first is ahead by more than luck."""
    order = sorted(lines, key=lambda group: -group.metric.gain(group.mean))
    methods, controls = ([line for line in order if is_control_line(line) == c] for c in (False, True))
    if not methods:
        return [_reached(controls, []) + ".", *([say("only controls")] if len(controls) > 1 else [])]
    return [
        _reached(methods, controls) + ".",
        *(_spread(methods[0]) if len(methods) == 1 else [_verdict(methods, lines)]),
    ]


def _reached(lines: Sequence[LineGroup], controls: Sequence[LineGroup]) -> str:
    """Say what lines reached, the best first; of many, those that matter: the first ones and the baseline."""
    first, metric = lines[0], lines[0].metric
    most = NAMES if len(lines) <= NAMES else NAMES // 2 + 1
    shown = [line for place, line in enumerate(lines) if place < most or line is baseline(lines)]
    key = "right" if metric.name == "accuracy" else "reaches"
    better = "" if metric.higher_is_better else say("lower")
    told = [say(key, first=_name(first, lines), value=_value(first), metric=metric.name + better)]
    told += [say("next", name=line.label, value=_value(line)) for line in shown[1:]]
    told += [say("more", count=len(lines) - len(shown))] if len(lines) > len(shown) else []
    key = "control" if len(controls) == 1 else "several controls"
    beside = [say("next", name=line.label, value=_value(line)) for line in controls]
    return listed(told) + (say(key, names=named(beside)) if controls else "")


def _name(line: LineGroup, lines: Sequence[LineGroup]) -> str:
    """The name of a line; if it is alone in its setting, its method, since its label may be that of the setting."""
    return line.label if len(lines) > 1 else method(line.config)


def _value(line: LineGroup) -> str:
    return in_words(line.mean, line.metric) + (say("leak mark") if line.first.leaks else "")


def _spread(line: LineGroup) -> list[str]:
    """Say how far the seeds of a line that is alone are apart."""
    low, high = (in_words(end(line.values.values()), line.metric) for end in (min, max))
    return [say("spread", seeds=_numeral(len(line.values)), low=low, high=high)] if len(line.values) > 1 else []


def _verdict(methods: Sequence[LineGroup], lines: Sequence[LineGroup]) -> str:
    """Say whether the first method is ahead by more than luck; nobody is called best who has a leak."""
    first, second, *_ = methods
    tied = [line.label for line in methods if round(line.mean - first.mean, 12) == 0]
    if first.first.leaks:
        return say("leak")
    if len(tied) > 1:
        return say("tied", names=named(tied))
    pairs, compared = against_all(first, methods[1:], lines)
    found = pairs[second].found
    if found is None or found.low is None:
        return say("apart" if found is None else "one seed" if found.n == 1 else "flat")
    close = [line.label for line, pair in pairs.items() if not pair.holds]
    key = "best" if not close else "luck" if len(pairs) == 1 else "some luck"
    return say(
        key,
        first=first.label,
        seeds=_numeral(found.n),
        than=_than(close, len(pairs)),
        interval=_interval(pairs[second], first) + (say("over", second=second.label) if len(pairs) > 1 else ""),
        corrected=_corrected(compared if pairs[second].verdict != "same" else 1),
    )


def _corrected(compared: int) -> str:
    """Say for how many comparisons something is corrected; nothing if there is no need."""
    return say("corrected", comparisons=counted(compared, "comparison")) if compared > 1 else ""


def _than(close: Sequence[str], others: int) -> str:
    """Name the lines that are no worse as far as runs can show; of many, their number."""
    if len(close) < 3:
        return named(close)
    return say("any" if len(close) == others else "some", close=len(close), others=others)


def _interval(pair: LinePair, first: LineGroup) -> str:
    """By how much the first is ahead of the other of a pair."""
    assert pair.found is not None and pair.found.low is not None and pair.found.high is not None
    metric = first.metric
    low, high = sorted((metric.gain(pair.found.low), metric.gain(pair.found.high)))
    low, high = (low, high) if pair.one is first else (-high, -low)
    return say("interval", low=signed(low, metric), high=points(high, metric))


def _of_metric(settings: Mapping[str, Sequence[LineGroup]]) -> Iterator[str]:
    """Say what the metric is, and by accuracy which lines have learned nothing; settings are given by their names."""
    metric = next(iter(settings.values()))[0].metric
    if metric.name != "accuracy":
        yield say("metric", metric=metric.name, meaning=metric.meaning)
        return
    for name, lines in settings.items():
        weak = [line.label for line in lines if line.mean <= mean([best_guess(run) for run in line.runs])]
        if weak:
            where = say("where", setting=name) if len(settings) > 1 else ""
            yield say("guess", guess=percent(best_guess(lines[0].first)), names=named(weak), where=where)


def _of_pairs(settings: Sequence[Sequence[LineGroup]]) -> Iterator[str]:
    """Say what the penalty did, and what intervals are of."""
    lines = [(line, control(lines)) for lines in settings for line in lines]
    pairs = [pair for lines in settings for pair in line_pairs(lines)]
    judged = [pair for pair in pairs if pair.why == "control"]
    alone = dict.fromkeys(line.label for line, known in lines if line.config.get("fnr.weight") and line not in known)
    if judged:
        same = sum(not pair.holds for pair in judged)
        yield say("penalty", same=same, comparisons=counted(len(judged), "comparison"))
    if alone:
        yield say("no control", names=named(list(alone)))
    if any(pair.verdict in ("holds", "alone", "same") for pair in pairs):
        yield say("intervals", space=SPACE)


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


# -- names in words -------------------------------------------------------------------------------------------------


def _numeral(number: int) -> str:
    """A number as a sentence begins with it."""
    return NUMERALS[number] if number < len(NUMERALS) else str(number)


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
