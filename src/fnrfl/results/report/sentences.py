"""What came out, in plain words; where the runs cannot tell, that is what is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fnrfl.core.quality import Metric
from fnrfl.core.words import counted
from fnrfl.results.report.groups import LineGroup, Panel
from fnrfl.results.report.labels import shared_method
from fnrfl.results.report.numbers import SPACE, in_words, percent, points, signed
from fnrfl.results.report.pairs import (
    HOLDS,
    LinePair,
    against_all,
    control,
    difference,
    is_control_line,
    judged,
    line_pairs,
    plain,
    ranked,
)
from fnrfl.results.report.references import best_guess
from fnrfl.results.statistics import Difference, mean

MOST = 2  # methods whose FNR gets a sentence each
NAMES = 5  # in a sentence; of more, the rest is counted
LEAKS = {
    "public_is_test": "models were refined on the test set and its labels",
    "norm_pass_train_mode": "the norm pass overwrote the clients' BatchNorm statistics",
    "constant_penalty": "the penalty had no gradient",
    "clean_test_for_fnr": "under feature noise, FNR alone was scored on clean examples",
}


def what(panels: Sequence[Panel]) -> str:
    """What was run, in one sentence."""
    groups = [group for panel in panels for group in panel.groups]
    runs = sum(len(group.runs) for group in groups)
    seeds = sorted({seed for group in groups for seed in group.seeds})

    def each(key: str) -> str:
        return listed(list(dict.fromkeys(str(group.config[key]) for group in groups)))

    def many(key: str, what: str) -> str:
        return f"{each(key)} {what if each(key) == '1' else what + 's'}"

    shared = shared_method([group.config for group in groups])
    by = f" by {shared}" if shared and len(groups) > 1 else ""
    return (
        f"{counted(runs, 'run')}{by} on {each('dataset.name')}: {each('scenario')} over {many('clients', 'client')}, "
        f"{many('rounds', 'round')}, model {each('model.name')}, {'seed' if len(seeds) == 1 else 'seeds'} "
        f"{listed([str(seed) for seed in seeds])}."
    )


def summary(panels: Sequence[Panel]) -> tuple[str, list[str]]:
    """The first sentence and paragraphs: who was best, whether that is more than luck, and what FNR did.

    A line with a leak is never called best, and the page does not open with it unless all lines have leaks.
    """
    settings = [(panel, lines) for panel in panels for lines in ranked(panel.groups)]
    honest = [lines for panel, lines in settings if not panel.leaks]
    first = honest if len(honest) == 1 else [lines for _, lines in settings]
    if not settings:
        lead, told = "No run is finished, so there is nothing to rank yet.", []
    elif len(first) == 1:
        lead, *told = _about(first[0])
    else:
        lead, told = f"There are {len(settings)} settings here, and each is ranked by itself.", []
    for panel, lines in settings:
        if len(first) > 1 or lines is not first[0]:
            told.append(f"{panel.named(lines[0])}: {' '.join(_about(lines))}")
    return lead, told + _not_ranked(panels)


def _not_ranked(panels: Sequence[Panel]) -> list[str]:
    """What is on the page and in no ranking, or in one of its own."""
    told, groups = [], [group for panel in panels for group in panel.groups]
    if late := [group.label for group in groups if not group.finished]:
        told.append(f"Not finished, so shown as far as it went and not ranked: {listed(late)}.")
    if without := [group.label for group in groups if group.finished and not group.values]:
        told.append(f"Without a value of {groups[0].metric.name}, so not ranked: {listed(without)}.")
    if len(panels) > 1 and any(panel.leaks for panel in panels):
        told.append("Lines with a leak are ranked among themselves only: they saw what an honest run does not see.")
    return told


def _about(lines: Sequence[LineGroup]) -> list[str]:
    """All sentences about the lines of one setting."""
    return [*_best(lines), *_what_holds(lines), *_about_fnr(lines), *_no_better_than_a_guess(lines)]


def _best(lines: Sequence[LineGroup]) -> list[str]:
    metric = lines[0].metric
    order = sorted(lines, key=lambda group: -metric.gain(_mean(group)))
    methods = [group for group in order if not is_control_line(group)]
    first = (methods or order)[0]
    after = f"{_reached(first)} after {counted(first.config['rounds'], 'round')}"
    after += "" if metric.higher_is_better else f" ({metric.better})"
    if len(order) == 1:
        return [f"{first.label} reached {after}.", f"{_spread(first)} There is nothing here to compare it with."]
    if not methods:
        return [f"All lines here are controls, so none is called best. The first is {first.label} with {after}."]
    above = _controls_above(first, order)
    if len(methods) == 1:
        return [f"{first.label} reached {after}.", _spread(first) + (above or " All other lines are controls.")]
    second = methods[1]
    ahead = _mean(first) - _mean(second)
    if tied := [group.label for group in methods[1:] if round(_mean(first) - _mean(group), 12) == 0]:
        return [f"{named([first.label, *tied])} are ahead with the same {after}.", _spread(first) + above]
    luck, behind = _luck(difference(first, second), metric), points(abs(ahead), metric).lstrip("+")
    next_one = f"The next is {second.label}, {behind} behind: {luck}."
    return [_lead(first, methods[1:], lines, after), f"{_spread(first)} {next_one}{above}"]


def _controls_above(first: LineGroup, order: Sequence[LineGroup]) -> str:
    ahead = [group for group in order if first.metric.gain(_mean(group) - _mean(first)) > 0]
    said = named([f"{group.label} with {_reached(group)}" for group in ahead if is_control_line(group)])
    return f" Controls that are above it: {said}." if said else ""


def _lead(first: LineGroup, others: Sequence[LineGroup], lines: Sequence[LineGroup], after: str) -> str:
    """Who has the highest mean, and whether that is more than luck; nobody is called best who has a leak."""
    if first.leaks:
        return f"With a leak none is called best. The first is {first.label} with {after}."
    pairs, compared = against_all(first, others, lines)
    if all(pair.verdict == HOLDS for pair in pairs):
        return f"{first.label} came out best, with {after}."
    close = [(pair.one if pair.other is first else pair.other).label for pair in pairs if pair.verdict != HOLDS]
    than = named(close)
    if len(close) > 2:
        than = "any other method" if len(close) == len(others) else f"{len(close)} of the {len(others)} other methods"
    corrected = f" after correction for {counted(compared, 'comparison')}" if compared > 1 else ""
    return f"{first.label} is ahead with {after}, but these runs do not show{corrected} that it is better than {than}."


def _reached(group: LineGroup) -> str:
    name = "test accuracy" if group.metric.name == "accuracy" else group.metric.name
    return f"{in_words(_mean(group), group.metric)} {name}{' (leak)' if group.leaks else ''}"


def _mean(group: LineGroup) -> float:
    return mean(list(group.values.values()))


def _spread(group: LineGroup) -> str:
    values = list(group.values.values())
    if len(values) == 1:
        return "That is one seed."
    low, high = (in_words(end(values), group.metric) for end in (min, max))
    return f"That is the mean of {len(values)} seeds, {low} to {high}."


def _what_holds(lines: Sequence[LineGroup]) -> list[str]:
    """Which differences to the baseline remain once they are corrected for their number."""
    pairs = line_pairs(lines)
    against = [pair for pair in pairs if pair.why == "baseline"]
    if len(against) < 2:
        return []
    tested = sum(pair.corrected is not None for pair in pairs)
    base = against[0].other.label
    if not tested:
        return [f"No difference to {base} can be tested: that takes two seeds in common, and differences that vary."]

    text = f"Against {base}, seed by seed and corrected for {counted(tested, 'comparison')}, "
    hold = _both_ways(against)
    text += f"these differences hold: {hold}." if hold else "no difference holds."
    rest = [pair.one.label for pair in against if pair.verdict != HOLDS]
    return [text + (f" Not to be told apart from it: {named(rest)}." if rest else "")]


def _both_ways(pairs: Sequence[LinePair]) -> str:
    """The lines whose difference holds, those ahead and then those behind."""
    judged_so = [pair for pair in pairs if pair.verdict == HOLDS]
    met = [(pair.one.label, pair.one.metric.gain(pair.found.mean)) for pair in judged_so if pair.found is not None]
    ahead, behind = named([label for label, by in met if by > 0]), named([label for label, by in met if by < 0])
    return "; ".join(part for part in (ahead and f"ahead {ahead}", behind and f"behind {behind}") if part)


def _no_better_than_a_guess(lines: Sequence[LineGroup]) -> list[str]:
    weak = [group.label for group in lines if _mean(group) <= mean([best_guess(run) for run in group.runs])]
    if not weak or lines[0].metric.name != "accuracy":
        return []
    guess = percent(best_guess(lines[0].runs[0]))
    return [f"No better than one and the same answer to everything, which reaches {guess}: {named(weak)}."]


def _luck(found: Difference | None, metric: Metric) -> str:
    """Whether a difference is more than the spread over seeds, as the end of a sentence."""
    if found is None:
        return "they share no seed with the same split, so it cannot be told whether that is more than luck"
    if found.n == 1:
        return "with one seed in common it cannot be told whether that is more than luck"
    if found.low is None or found.high is None:
        known = "the same with every seed, which is too little to tell from luck"
        return known if found.mean else f"the same {metric.name} with every seed"
    interval = f"(95{SPACE}% interval {signed(found.low, metric)} to {points(found.high, metric)}, {found.n} seeds)"
    if round(found.mean, 3 if metric.share else 4) == 0:
        return f"no difference to be seen {interval}"
    if found.low <= 0 <= found.high:
        return f"within the spread over seeds, so it may be luck {interval}"
    return f"more than the spread over seeds {interval}"


def _about_fnr(lines: Sequence[LineGroup]) -> list[str]:
    """What refinement did to each method, and what of that is the penalty's."""
    penalised = [group for group in lines if group.runs[0].refines and group.config["fnr.weight"] != 0]
    against_plain = _against(penalised, lines, plain)
    against_control = _against(penalised, lines, control)
    judged = [group for group, _, _ in against_control]
    told = []
    if len(penalised) > MOST:
        told += [_in_sum("FNR against the plain method", against_plain)] if against_plain else []
        told += [_in_sum("The penalty's own part, against weight 0", against_control)] if against_control else []
    else:
        for said, found in (("", against_plain), ("The penalty's own part in ", against_control)):
            told += [
                f"{said}{a.label} against {b.label}: {points(d.mean, a.metric)}, {_luck(d, a.metric)}."
                for a, b, d in found
            ]
    if alone := [group.label for group in penalised if group not in judged]:
        told.append(
            f"Nothing can be said about the penalty itself in {listed(alone)}: there is no run with the same "
            "refinement and fnr.weight = 0."
        )
    return told


def _against(
    groups: Sequence[LineGroup],
    lines: Sequence[LineGroup],
    relatives: Callable[[Sequence[LineGroup]], dict[int, LineGroup]],
) -> list[tuple[LineGroup, LineGroup, Difference]]:
    """Lines, their relatives, and the paired differences, where there are any."""
    known = relatives(lines)
    pairs = [(group, known[id(group)]) for group in groups if id(group) in known]
    return [(a, b, found) for a, b in pairs if (found := difference(a, b))]


def _in_sum(what: str, found: Sequence[tuple[LineGroup, LineGroup, Difference]]) -> str:
    clear = [pair for pair in judged([(a, b, "", d) for a, b, d in found]) if pair.verdict == HOLDS]
    gains = [(pair.one.label, pair.one.metric.gain(pair.found.mean)) for pair in clear if pair.found is not None]
    better, worse = [label for label, by in gains if by > 0], [label for label, by in gains if by < 0]
    text = f"{what}, {counted(len(found), 'pair')} of lines: "
    for names, word in ((better, "ahead"), (worse, "behind")):
        text += f"{len(names)} {word} after correction for their number{f' ({named(names)})' if names else ''}, "
    return f"{text}{len(found) - len(better) - len(worse)} not to be told apart."


def measured_on(panel: Panel) -> str:
    """What the metric of a panel is, and which data its numbers are of."""
    run, metric = panel.groups[0].runs[0], panel.metric
    test, dataset = run.examples["test"], run.config["dataset.name"]
    text = "Accuracy is the share of right answers on"
    if metric.name != "accuracy":
        text = f"{metric.name}: {metric.meaning}; {metric.better}. Accuracy and other numbers are of"
    text += f" the {counted(test, 'test example')} of {dataset}"
    if any("accuracy_clean" in group.runs[0].rounds[0] for group in panel.groups):
        text += ", scored once under each client's noise where a scenario has feature noise; clean: without noise"
    text += f", after the last round; one of them is {100 / test:.{1 if test < 100 else 2}f} points."
    if "public_is_test" in panel.leaks:
        text += " FNR refined its models on these very examples, labels included: a leak."
    if "clean_test_for_fnr" in panel.leaks:
        text += " Under feature noise FNR was scored on clean examples and the others on noisy ones: a leak."
    return text


def seconds_of(panel: Panel) -> str:
    """Where the seconds were taken, and what they can be compared with."""
    devices = list(dict.fromkeys(f"{run.about['device']}, {run.config['engine.name']} engine" for run in panel.runs))
    text = "Seconds are of training, norm pass, refinement and server, without evaluation; they"
    if len(devices) == 1:
        return f"{text} compare only within one device, here {devices[0]}."
    return f"{text} come from different places here and must not be compared across them: {'; '.join(devices)}."


# -- names in words -------------------------------------------------------------------------------------------------


def named(labels: Sequence[str]) -> str:
    """Lines by name, as a list in a sentence; of many, the first ones and how many more there are."""
    more = len(labels) - NAMES
    return listed(labels if more < 2 else [*labels[:NAMES], f"{more} more"])


def listed(words: Sequence[str]) -> str:
    """Words as a list in a sentence; names that have commas of their own are parted by semicolons."""
    if len(words) < 2:
        return "".join(words)
    between = "; " if any(", " in word for word in words) else ", "
    return f"{between.join(words[:-1])}{';' if between == '; ' else ''} and {words[-1]}"
