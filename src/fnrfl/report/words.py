"""What came out, in plain words; where the runs cannot tell, that is what is said."""

from __future__ import annotations

from collections.abc import Sequence

from fnrfl.metrics.statistics import Difference, mean, paired
from fnrfl.report.read import Group, Panel, control, plain, ranked

MOST = 6  # sentences about FNR; a longer list is what the table is for
LEAKS = {
    "public_is_test": "models were refined on the test set and its labels",
    "norm_pass_train_mode": "the norm pass overwrote the clients' BatchNorm statistics",
    "constant_penalty": "the penalty had no gradient",
    "clean_test_for_fnr": "under feature noise, FNR alone was scored on clean examples",
}


def summary(panels: Sequence[Panel]) -> list[str]:
    """Paragraphs: what was run, who was best and whether that is more than luck, and what FNR did."""
    groups = [group for panel in panels for group in panel.groups]
    told = [_what(groups)]
    settings = [(panel, lines) for panel in panels for lines in ranked(panel.groups)]
    for panel, lines in settings:
        where = f"Under {lines[0].config['scenario']} on {panel.title}: " if len(settings) > 1 else ""
        told.append(where + _best(lines))
        told += _about_fnr(lines, where)
    late = [group for group in groups if not group.finished]
    if late:
        told.append(f"{_list([g.label for g in late]).capitalize()}: shown as far as it went, and not ranked.")
    if any(len(lines) > 1 for _, lines in settings) and any(panel.leaks for panel in panels):
        told.append("Lines with a leak are ranked among themselves only: they saw what an honest run does not see.")
    return told


def _what(groups: Sequence[Group]) -> str:
    runs = sum(len(group.runs) for group in groups)
    seeds = sorted({seed for group in groups for seed in group.seeds})
    methods = list(dict.fromkeys(group.label for group in groups))
    named = _list(methods) if len(methods) <= 5 else f"{len(methods)} methods and settings"

    def one(key: str) -> str:
        return _list(list(dict.fromkeys(str(group.config[key]) for group in groups)))

    return (
        f"{_count(runs, 'run')} on {one('dataset')}: {named}; {'seed' if len(seeds) == 1 else 'seeds'} "
        f"{_list([str(seed) for seed in seeds])}; {one('clients')} clients, {one('scenario')}, {one('rounds')} rounds, "
        f"model {one('model.name')}."
    )


def _best(lines: Sequence[Group]) -> str:
    order = sorted(lines, key=lambda group: -mean(list(group.accuracy.values())))
    first = order[0]
    values = list(first.accuracy.values())
    over = (
        f", mean of {len(values)} seeds, {100 * min(values):.1f} to {percent(max(values))}" if len(values) > 1 else ""
    )
    reached = f"{percent(mean(values))} test accuracy after {first.config['rounds']} rounds{over}"
    if len(order) == 1:
        return f"{first.label} reached {reached}." + ("" if over else " One seed says nothing about the spread.")
    second = order[1]
    ahead = mean(values) - mean(list(second.accuracy.values()))
    if round(ahead, 12) == 0:
        return f"{first.label} and {second.label} are equal: {reached}."
    found = paired(first.accuracy, second.accuracy)
    text = f"{first.label} came out best: {reached}. The next is {second.label}, {points(ahead)} behind. "
    return text + _luck(found, "the two")


def _luck(found: Difference | None, these: str) -> str:
    """Whether a difference is more than the spread over seeds."""
    if found is None:
        return f"They have no seed in common, so it cannot be told whether {these} really differ."
    if found.n == 1:
        return "With one seed in common it cannot be told whether that is more than luck."
    if found.low is None or found.high is None:
        return f"It is the same with every seed, which is too little to tell whether {these} really differ."
    span = f"Seed by seed the 95 % interval is {signed(found.low)} to {signed(found.high)} points"
    if found.low <= 0 <= found.high:
        return f"{span}: within the spread over seeds, so {these} cannot be told apart."
    return f"{span}: more than the spread over seeds."


def _about_fnr(lines: Sequence[Group], where: str) -> list[str]:
    """What refinement did to each method, and what of that is the penalty's."""
    told = []
    for group in lines:
        if not group.runs[0].refines or group.config["fnr.weight"] == 0:
            continue
        bare, without = plain(group, lines), control(group, lines)
        name = group.config["algorithm.name"]
        found = bare and paired(group.accuracy, bare.accuracy)
        text = ""
        if bare and found:
            text = f"FNR changed {bare.label} by {points(found.mean, sign=True)}. {_luck(found, 'they')} "
        penalty = without and paired(group.accuracy, without.accuracy)
        if without and penalty:
            text += f"The penalty's own part, against refinement with weight 0, is {points(penalty.mean, sign=True)}. "
            text += _luck(penalty, "with and without penalty")
        else:
            text += (
                f"There is no run of {name} with the same refinement and fnr.weight = 0, so nothing can be said about "
                "the penalty itself."
            )
        told.append(where + text)
    if len(told) > MOST:
        return [f"{where}{len(told)} lines have FNR; the table of differences says what it changed in each."]
    alike = f"{where}There is no run"  # said once, if it is all that there is to say
    return told if not all(text.startswith(alike) for text in told) else told[:1]


def verdict(found: Difference | None) -> str:
    """A difference in a few words."""
    if found is None:
        return "no seed in common"
    if found.n == 1:
        return "one seed: cannot be told"
    if found.low is None or found.high is None:
        return "no difference" if found.mean == 0 else "the same with every seed: cannot be told"
    return "cannot be told apart" if found.low <= 0 <= found.high else "more than the spread"


def measured_on(panel: Panel) -> str:
    """Which data the accuracies of a panel are of."""
    run = panel.groups[0].runs[0]
    test, dataset = run.examples["test"], run.config["dataset"]
    text = f"Accuracy is the share of right answers on the {test:,} test examples of {dataset}"
    if any("accuracy_clean" in group.runs[0].rounds[0] for group in panel.groups):
        text += ", scored once under each client's noise where a scenario has feature noise; clean: without noise"
    text += ", after the last round."
    if "public_is_test" in panel.leaks:
        text += " FNR refined its models on these very examples, labels included: a leak."
    if "clean_test_for_fnr" in panel.leaks:
        text += " Under feature noise FNR was scored on clean examples and the others on noisy ones: a leak."
    return text


def seconds_of(panel: Panel) -> str:
    """Where the seconds were taken, and what they can be compared with."""
    runs = [run for group in panel.groups for run in group.runs]
    devices = list(dict.fromkeys(f"{run.about['device']}, {run.config['engine.name']} engine" for run in runs))
    text = "Seconds are of training, norm pass, refinement and server, without evaluation; they"
    if len(devices) == 1:
        return f"{text} compare only within one device, here {devices[0]}."
    return f"{text} come from different places here and must not be compared across them: {'; '.join(devices)}."


# -- numbers in words -------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """A share for a sentence."""
    return f"{100 * share:.1f} %"


def signed(share: float) -> str:
    """Percentage points with their sign, a proper minus included."""
    return f"{100 * share:+.1f}".replace("-", "\N{MINUS SIGN}")


def points(share: float, sign: bool = False) -> str:
    """Percentage points for a sentence."""
    return f"{signed(share) if sign else f'{100 * share:.1f}'} points"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
