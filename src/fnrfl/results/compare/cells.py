"""The grid: every combination of some values with every seed, in groups, with a control for each use of FNR."""

from __future__ import annotations

import itertools
import logging
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import SupportsIndex

from fnrfl.config import RunConfig, load, registry, slug
from fnrfl.config.typed import SHORTHANDS, flatten, read_overrides, toml
from fnrfl.core.errors import ConfigError
from fnrfl.core.options import Value
from fnrfl.core.words import choices, counted
from fnrfl.rundir.configs import WEIGHTED, flat_config, is_control
from fnrfl.rundir.files import numbered_names

logger = logging.getLogger("fnrfl")
Parts = tuple[tuple[str, str], ...]  # what tells a group from the others: key and words

SELF_EXPLAINING = ("algorithm.name", "dataset.name", "model.name", "scenario")  # the value says what it is


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seed alone: one row of the table."""

    parts: Parts
    config: RunConfig  # of the first seed
    control: str | None = None  # the group that is the same without the penalty

    @property
    def label(self) -> str:
        """The name of the group, such as "scaffold, fnr on"."""
        return ", ".join(words for _, words in self.parts)

    def words(self, sections: Sequence[str], others: bool = False) -> str:
        """What tells it from others in some sections of the config, or in all `others`."""
        return ", ".join(words for key, words in self.parts if (key.split(".")[0] in sections) is not others)


@dataclass(frozen=True)
class Cell:
    """One run of the grid; its name is its folder's."""

    name: str
    group: Group
    seed: int
    config: RunConfig
    named: bool = False  # one by one, and not as a combination of values


def named_cells(recipe: str | Path | None, cells: Mapping[str, Sequence[str]], *, trust: bool = False) -> list[Cell]:
    """Return a cell for each name and its keys ("key=value"); each is a group, and none has a control."""
    if not cells:
        raise ConfigError("cells is empty. Name at least one run and its keys.")
    found = []
    for folder, (name, keys) in zip(names(cells), cells.items(), strict=True):
        config = load(recipe, keys, trust=trust)
        found.append(Cell(folder, Group((("run", name),), config), config.seed, config, named=True))
    return found


def grid(
    recipe: str | Path | None,
    overrides: Sequence[str],
    over: Sequence[str],
    seeds: Sequence[int],
    *,
    control: bool = True,
    trust: bool = False,
) -> list[Cell]:
    """Every combination of the values in `over` ("key=a,b,c") with every seed; all of them are checked.

    With `control`, each group with FNR gets a twin with fnr.weight = 0 unless it is there already. The cells are
    ordered by seed, so that what is finished can always be compared. `trust` allows code that the recipe names.
    """
    axes = read_axes(over)
    if not seeds or len(set(seeds)) < len(seeds):
        given = ", ".join(map(str, seeds)) or "none"
        raise ConfigError(f"The seeds are {given}; there must be at least one, and each only once, as in 0,1,2.")
    if any(text.partition("=")[0].strip() == "seed" for text in overrides):
        raise ConfigError("seed cannot be set in a comparison, where each combination has several; use --seeds.")
    groups = _groups(recipe, overrides, axes, seeds[0], trust)
    if control:
        groups = _with_controls(groups)
    named = list(zip(names(group.label for group in groups), groups, strict=True))
    return [
        Cell(f"{name}-seed-{seed}", group, seed, replace(group.config, seed=seed))
        for seed in seeds
        for name, group in named
    ]


def names(labels: Iterable[str]) -> list[str]:
    """Slugs, made different by a number where they are not."""
    taken: list[str] = []
    for label in labels:
        taken.append(next(name for name in numbered_names(slug(label)) if name not in taken))
    return taken


def _groups(
    recipe: str | Path | None, overrides: Sequence[str], axes: Mapping[str, Sequence[str]], seed: int, trust: bool
) -> list[Group]:
    """One group per combination that makes a config of its own; every combination that makes none is told.

    A key that changes nothing is left out of a combination, and of those that are the same then the first stays.
    """
    groups: dict[str, Group] = {}  # by config
    problems: dict[str, list[str]] = {}  # what is wrong, and with which combinations
    void: dict[str, None] = {}  # keys that change nothing, and where
    takes = _options_by_method(axes)
    for choice in itertools.product(*axes.values()):
        values = dict(zip(axes, choice, strict=True))
        without = _void_options(values, takes)
        # A key of [fnr] turns FNR on; the switch comes after it, so that `fnr=off` beside `fnr.weight=0.1,1` is off.
        given = sorted((f"{key}={value}" for key, value in values.items()), key=lambda text: text.startswith("fnr="))
        try:
            config = load(recipe, [*overrides, *given, f"seed={seed}"], trust=trust)
        except ConfigError as error:
            problems.setdefault(str(error), []).append(", ".join(given))
            continue
        if config.fnr is not None and config.algorithm.name in registry.UNREFINED:
            config = replace(config, fnr=None)
            without.append(f"fnr with {config.algorithm.name}")
        elif config.fnr is None:
            without += [f"{key} with fnr = off" for key in values if key.startswith("fnr.")]
        group = Group(_parts(values, config, axes), config)
        void |= dict.fromkeys(without)
        twin = groups.setdefault(replace(config, name="").to_toml(), group)  # the same run under any name
        if twin.parts != group.parts:
            problems.setdefault(f"{', '.join(given)} is the same as {twin.label}; give it once.", [])
    _refuse(problems, everywhere=not groups)
    left = math.prod(map(len, axes.values())) - len(groups)
    if void:
        few = f" {counted(left, 'combination is', 'combinations are')} left out." if left else ""
        logger.warning(f"a key that changes nothing is not set: {'; '.join(void)}.{few}")
    return list(groups.values())


def _refuse(problems: Mapping[str, Sequence[str]], *, everywhere: bool) -> None:
    """Raise if there is a problem: each once, with the combinations that have it unless it is the only one of all."""
    alone = everywhere and len(problems) == 1
    told = (f"{'; '.join(where)}: {what}" if where and not alone else what for what, where in problems.items())
    if problems:
        raise ConfigError(" ".join(told))


def _void_options(values: dict[str, str], takes: Mapping[str, set[str]]) -> list[str]:
    """Leave options out that the method of a combination does not have, and others do; return which."""
    method = values.get("algorithm.name", "")
    void = [key for key in values if key in takes and method not in takes[key]]
    for key in void:
        del values[key]
    return [f"{key} with {method}" for key in void]


def _options_by_method(axes: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """For each varied option of a method the methods among those varied that have it; empty for one that none has."""
    varied = [key for key in axes if key.startswith("algorithm.") and key != "algorithm.name"]
    found: dict[str, set[str]] = {}
    for method in axes.get("algorithm.name", ()) if varied else ():
        if twice := [key for key in read_overrides([f"algorithm.name={method}"], ()) if key in varied]:
            raise ConfigError(f"{twice[0]} is given twice: in {method} and in a list of its own. Give one.")
        try:
            options = load(None, [f"algorithm.name={method}"]).algorithm.options
        except ConfigError:  # its combinations are refused in the same words
            options = {}
        for key in varied:
            if key.removeprefix("algorithm.") in options:
                found.setdefault(key, set[str]()).add(method)
    return found


def _parts(values: Mapping[str, str], config: RunConfig, axes: Mapping[str, Sequence[str]]) -> Parts:
    """What varies, in words, and FNR wherever it is on."""
    parts = [
        (key, _words(key, value, config, axes))
        for key, value in values.items()
        if config.fnr is not None or not key.startswith("fnr.")
    ]
    if not parts:
        parts = [("algorithm.name", config.algorithm.name)]
    if config.fnr is not None and not any(key.split(".")[0] == "fnr" for key, _ in parts):
        parts.append(("fnr", "fnr on"))
    return tuple(parts)


def _words(key: str, value: str, config: RunConfig, axes: Mapping[str, Sequence[str]]) -> str:
    """A key and its value, as the config says it, so that FedAvg and fedavg, yes and on are the same.

    Methods have their options beside them if some were typed so; those that vary by themselves are not repeated.
    """
    section, _, word = key.rpartition(".")
    if key == "fnr":
        value = "off" if config.fnr is None else "on"
    elif key == "algorithm.name" and any("(" in one for one in axes[key]):
        options = {k: v for k, v in config.algorithm.options.items() if f"algorithm.{k}" not in axes}
        value = replace(config.algorithm, options=options).label
    elif section in SHORTHANDS and word == "name":
        value = str(getattr(config, section).name)
    plain = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return plain if key in SELF_EXPLAINING else f"{key.removesuffix('.name')} {plain}"


def _with_controls(groups: list[Group]) -> list[Group]:
    """Each group, followed by its control, which is FNR without the penalty, if no other group is that already."""
    rows: list[Group] = []
    for group in groups:
        config = group.config
        if config.fnr is None or not config.fnr.weight or config.protocol != "honest":
            rows.append(group)
            continue
        flat = flat_config(config)
        known = (other for other in (*groups, *rows) if is_control(flat_config(other.config), flat, "name"))
        control = next(known, None)
        if control is None:
            parts = (part for part in group.parts if part[0] not in ("fnr", *WEIGHTED))
            control = Group((*parts, ("fnr", "fnr weight 0")), replace(config, fnr=replace(config.fnr, weight=0.0)))
            rows += [replace(group, control=control.label), control]
        else:
            rows.append(replace(group, control=control.label))
    return rows


# -- baselines ---------------------------------------------------------------------------------------------------------

METHOD_SECTIONS = ("algorithm", "fnr", "client", "engine")  # sections about how to train; all others are about the task


def find_baseline(groups: Iterable[Group], text: str | None) -> Parts:
    """The parts that a baseline has. By default how the first group trains, so that each task has a baseline."""
    known = {group.label: group for group in groups}
    if text is None:
        first = next(iter(known.values())).parts
        return tuple(part for part in first if part[0].split(".")[0] in METHOD_SECTIONS) or first
    for label, group in known.items():
        if slug(label) == slug(text):
            return group.parts
    pieces = {slug(piece) for piece in split_commas(text)}
    for group in known.values():
        fitting = tuple(
            (key, words)
            for key, words in group.parts
            if pieces & {slug(words), slug(f"{key.removesuffix('.name')} {words}")}
        )
        if len(fitting) == len(pieces):
            return fitting
    labels = [f'"{label}"' for label in known]
    raise ConfigError(f'There is no baseline "{text}" in this comparison. {choices(text, labels)}.')


def counterpart(group: Group, groups: Iterable[Group], baseline: Parts) -> str:
    """The group that this one is compared with: of those with the baseline's parts, the one that is most alike."""
    able = [other for other in groups if set(baseline) <= set(other.parts)]
    return max(able, key=lambda other: len(set(other.parts) & set(group.parts))).label


# -- lists as they are typed: values between commas, seeds, and keys with their values --------------------------------


def split_commas(text: str) -> list[str]:
    """Values between commas; commas inside brackets and quotes do not count."""
    pieces, closing = [""], ""
    for character in text:
        if character == "," and not closing:
            pieces.append("")
            continue
        pieces[-1] += character
        if closing and character == closing[-1]:
            closing = closing[:-1]
        elif closing[-1:] not in ("'", '"'):
            closing += {"(": ")", "[": "]", "{": "}"}.get(character, character if character in "'\"" else "")
    if closing:
        raise ConfigError(f"{text} lacks a closing {closing[-1]}; add it.")
    return [piece.strip() for piece in pieces]


def read_seeds(text: str) -> list[int]:
    """Seeds such as "0,1,2" or "0-4"."""
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", piece, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < first + 1000:
            raise ConfigError(f'"{text}" is not a list of seeds; write whole numbers, as in 0,1,2 or 0-4.')
        found += range(first, last + 1)
    return found


def read_duration(text: str | None) -> float | None:
    """Return the seconds of a time such as 90s, 9m or 1.5h.

    >>> read_duration("9m"), read_duration("90")
    (540.0, 90.0)
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*([smh]?)\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(f'"{text}" is not a time; write it as 90s, 9m or 2h.')
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def about_seeds(text: str) -> str | None:
    """What to tell somebody who may have meant a number of seeds, and gave one seed."""
    number = int(text) if re.fullmatch(r"\s*\d{1,9}\s*", text, re.ASCII) else 0
    return f"--seeds {number} is the one seed {number}; {number} seeds are 0-{number - 1}." if number > 1 else None


def seeds_in_list(seeds: object) -> list[int]:
    """Seeds that were passed in."""
    if isinstance(seeds, Iterable) and not isinstance(seeds, str):
        found = list(seeds)
        if all(isinstance(seed, SupportsIndex) for seed in found):
            return [operator.index(seed) for seed in found]
    raise ConfigError(f"seeds is {seeds!r}; it must be a list of whole numbers, as in [0, 1, 2] or range(3).")


def overrides_in_words(values: Mapping[str, object]) -> list[str]:
    """Keys that were passed in as values, as they would be typed."""
    return [f"{key}={_typed(value)}" for key, value in flatten(values).items() if value != {}]


def axes_in_words(over: Mapping[str, Sequence[object]]) -> list[str]:
    """Keys and the lists of values that each takes in turn, as they would be typed."""
    return [f"{key}={','.join(map(_typed, values))}" for key, values in over.items()]


def _typed(value: object) -> str:
    """A value as it would be typed; text has quotes where it has to."""
    if isinstance(value, str) and "," not in value and not value.startswith(("'", '"')):
        return value
    return toml(value) if isinstance(value, Value) else str(value)


def read_axes(over: Iterable[str]) -> dict[str, list[str]]:
    """Keys and the values that each takes in turn."""
    axes: dict[str, list[str]] = {}
    for text in over:
        key, _, values = (part.strip() for part in text.partition("="))
        key = f"{key}.name" if key in SHORTHANDS else key
        found = split_commas(values)
        if not key or not all(found):
            raise ConfigError(f'"{text}" has no list of values; write key=a,b, as in algorithm=fedavg,scaffold.')
        if key == "seed":
            raise ConfigError(f'"{text}" varies the seed; give the seeds of every combination with --seeds.')
        if key in axes:
            raise ConfigError(f"{key} is varied twice; give all of its values in one list, {key}=a,b,c.")
        if repeated := next((value for value in found if found.count(value) > 1), None):
            raise ConfigError(f'"{text}" has the value {repeated} twice; give it once.')
        axes[key] = found
    return axes
