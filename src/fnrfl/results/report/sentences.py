"""What came out, in plain words; where the runs cannot tell, that is what is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fnrfl.config.spelling import counted
from fnrfl.results.report.lines import LineGroup, Panel
from fnrfl.results.report.relatives import control, difference, plain, ranked
from fnrfl.results.statistics import Difference, mean

MOST = 2  # methods whose FNR gets a sentence each
CLEAR = "more than the spread"
SPACE = "\N{NO-BREAK SPACE}"
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

    return (
        f"{counted(runs, 'run')} on {each('dataset.name')}: {each('scenario')} over {many('clients', 'client')}, "
        f"{many('rounds', 'round')}, model {each('model.name')}, {'seed' if len(seeds) == 1 else 'seeds'} "
        f"{listed([str(seed) for seed in seeds])}."
    )


def summary(panels: Sequence[Panel]) -> tuple[str, list[str]]:
    """The first sentence and paragraphs: who was best, whether that is more than luck, and what FNR did."""
    settings = [(panel, lines) for panel in panels for lines in ranked(panel.groups)]
    lead, told = f"There are {len(settings)} settings here, and each is ranked by itself.", []
    if not settings:
        lead = "No run is finished, so there is nothing to rank yet."
    if len(settings) == 1:
        lines = settings[0][1]
        lead, *told = [*_best(lines), *_about_fnr(lines)]
    else:
        for panel, lines in settings:
            where = f"{panel.title}, {lines[0].config['scenario']}"
            told += [f"{where}: {' '.join(_best(lines))}", *([" ".join(about)] if (about := _about_fnr(lines)) else [])]
    if late := [group.label for panel in panels for group in panel.groups if not group.finished]:
        told.append(f"Not finished, so shown as far as it went and not ranked: {listed(late)}.")
    if len(panels) > 1 and any(panel.leaks for panel in panels):
        told.append("Lines with a leak are ranked among themselves only: they saw what an honest run does not see.")
    return lead, told


def _best(lines: Sequence[LineGroup]) -> list[str]:
    order = sorted(lines, key=lambda group: -mean(list(group.accuracy.values())))
    first = order[0]
    values = list(first.accuracy.values())
    leak = " (leak)" if first.leaks else ""
    after = f"{percent(mean(values))} test accuracy{leak} after {counted(first.config['rounds'], 'round')}"
    spread = f"That is the mean of {len(values)} seeds, {percent(min(values))} to {percent(max(values))}. "
    if len(values) == 1:
        spread = "That is one seed. "
    if len(order) == 1:
        return [f"{first.label} reached {after}.", spread + "There is nothing here to compare it with."]
    second = order[1]
    ahead = mean(values) - mean(list(second.accuracy.values()))
    if round(ahead, 12) == 0:
        return [f"{first.label} and {second.label} came out best, with the same {after}.", spread.strip()]
    luck = _luck(difference(first, second))
    return [
        f"{first.label} came out best, with {after}.",
        f"{spread}The next is {second.label}, {100 * ahead:.1f} points behind: {luck}.",
    ]


def _luck(found: Difference | None) -> str:
    """Whether a difference is more than the spread over seeds, as the end of a sentence."""
    if found is None:
        return "they share no seed with the same split, so it cannot be told whether that is more than luck"
    if found.n == 1:
        return "with one seed in common it cannot be told whether that is more than luck"
    if found.low is None or found.high is None:
        return (
            "the same with every seed, which is too little to tell from luck" if found.mean else "with no seed at all"
        )
    interval = f"(95{SPACE}% interval {signed(found.low)} to {signed(found.high)} points, {found.n} seeds)"
    if round(found.mean, 3) == 0:
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
            told += [f"{said}{a.label} against {b.label}: {signed(d.mean)} points, {_luck(d)}." for a, b, d in found]
    if alone := [group.label for group in penalised if group not in judged]:
        told.append(
            f"Nothing can be said about the penalty itself in {listed(alone)}: there is no run with the same "
            "refinement and fnr.weight = 0."
        )
    return told


def _against(
    groups: Sequence[LineGroup],
    lines: Sequence[LineGroup],
    relative: Callable[[LineGroup, Sequence[LineGroup]], LineGroup | None],
) -> list[tuple[LineGroup, LineGroup, Difference]]:
    """Lines, their relatives, and the paired differences, where there are any."""
    pairs = [(group, other) for group in groups if (other := relative(group, lines))]
    return [(a, b, found) for a, b in pairs if (found := difference(a, b))]


def _in_sum(what: str, found: Sequence[tuple[LineGroup, LineGroup, Difference]]) -> str:
    better = [a.label for a, _, d in found if difference_in_words(d) == CLEAR and d.mean > 0]
    worse = [a.label for a, _, d in found if difference_in_words(d) == CLEAR and d.mean < 0]
    text = f"{what}, {counted(len(found), 'pair')} of lines: "
    for names, word in ((better, "ahead"), (worse, "behind")):
        text += f"{len(names)} {word} by more than the spread over seeds{f' ({listed(names)})' if names else ''}, "
    return f"{text}{len(found) - len(better) - len(worse)} not to be told apart."


def difference_in_words(found: Difference | None) -> str:
    """A difference in a few words."""
    if found is None:
        return "no seed and split in common"
    if found.n == 1:
        return "one seed: cannot be told"
    if found.low is None or found.high is None:
        return "no difference" if found.mean == 0 else "the same with every seed: cannot be told"
    return "cannot be told apart" if found.low <= 0 <= found.high else CLEAR


def measured_on(panel: Panel) -> str:
    """Which data the accuracies of a panel are of."""
    run = panel.groups[0].runs[0]
    test, dataset = run.examples["test"], run.config["dataset.name"]
    text = f"Accuracy is the share of right answers on the {counted(test, 'test example')} of {dataset}"
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
    return f"{100 * share:.1f}{SPACE}%"


def signed(share: float) -> str:
    """Percentage points with their sign, a proper minus included."""
    return f"{round(100 * share, 1) + 0.0:+.1f}".replace("-", "\N{MINUS SIGN}")


def listed(words: Sequence[str]) -> str:
    """Words as a list in a sentence."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
