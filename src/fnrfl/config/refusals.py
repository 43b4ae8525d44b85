"""What a config refuses: a table of rules, each a sentence with the value, the rule and the way out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fnrfl.config import registry
from fnrfl.config.keys import Key
from fnrfl.config.schema import TWINS, RunConfig, counts_clients
from fnrfl.config.typed import FlatValues, PassedLabel, same_key, shortened, show_value
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import choices, nearest
from fnrfl.data.reading import DATA_ENDINGS, parse_image_size

LONGEST_NAME = 150  # bytes: a folder's name has the method and the seed as well, and at most 255


def is_own_data(text: str) -> bool:
    """Return whether a text looks like a file, a folder or a function of the user's."""
    return Path(text).suffix.lower() in DATA_ENDINGS or ":" in text or "/" in text or os.path.isdir(text)


@dataclass(frozen=True)
class Rule:
    """What a key must obey beside others; `sentence` may use {value}, {choices}, {forms} and {c}, the config."""

    key: str
    broken: Callable[[RunConfig], bool]
    sentence: str
    known: Iterable[str] = ()  # names that the value may be, for {choices}


def _unknown(name: str, known: Iterable[str]) -> bool:
    return name not in known and not is_own_data(name) and not _passed(name)


def _passed(name: str) -> bool:
    return isinstance(name, PassedLabel)


RULES = (
    Rule(
        "name",
        lambda c: c.name.startswith(".") or not c.name.strip() or bool(set(c.name) & set("/\\\0\n")),
        "name = {value} is not allowed: it must be the name of one folder, such as my-run.",
    ),
    Rule(
        "name",
        lambda c: len(c.name.encode(errors="surrogateescape")) > LONGEST_NAME,
        f"name = {{value}} is too long: it names a folder and must have at most {LONGEST_NAME} bytes.",
    ),
    Rule(
        "dataset.name",
        lambda c: _unknown(c.dataset.name, registry.DATASETS),
        "dataset = {value} is not known. {choices}, or give {forms}.",
        registry.DATASETS,
    ),
    Rule(
        "public.source",
        lambda c: _unknown(c.public.source, ("train", "test")),
        'public.source = {value} is not known. Choose "train", or give {forms}.',
    ),
    Rule(
        "model.name",
        lambda c: registry.is_own_model(c.model.name) and ":" not in c.model.name and not _passed(c.model.name),
        "model = {value} is not known. {choices}, or give module:function.",
        registry.MODELS,
    ),
    Rule(
        "model.init",
        lambda c: c.model.init != "seed" and not _passed(c.model.init),
        'model.init = {value} is not known: it must be "seed". In Python, give init=.',
    ),
    Rule(
        "engine.name",
        lambda c: c.engine.name not in registry.ENGINES,
        "engine = {value} is not known. {choices}.",
        registry.ENGINES,
    ),
    Rule(
        "clients",
        lambda c: c.clients == 0 and not counts_clients(c.scenario),
        'clients = 0 stands for the clients that the data names, and scenario = "{c.scenario}" draws others. Set '
        "clients to 1 or more, or scenario = natural.",
    ),
    Rule(
        "public.ranking",
        lambda c: isinstance(c.public.distill, float) and c.public.ranking + c.public.distill >= 1,
        "public.ranking = {value} and public.distill = {c.public.distill} leave nothing to refine on; their sum must "
        "be below 1.",
    ),
    Rule(
        "public.size",
        lambda c: c.fnr is not None and c.public.source == "train" and c.public.size == 0,
        "FNR needs labelled public data; public.size is 0. Set public.size = 0.1, give public.source, or set fnr = "
        "off.",
    ),
    Rule(
        "fnr.share",
        lambda c: c.fnr is not None and c.fnr.share == 1 and c.fnr.target == "others",
        'fnr.share = 1 leaves nobody unrefined to take targets from, so fnr.target = "others" cannot be used. Set '
        'fnr.target = "all" or a smaller share.',
    ),
)


def refuse_config(config: RunConfig, known: Mapping[str, Key]) -> Iterator[str]:
    """Yield what is wrong although every value has the right type: the rules that are broken, and leaks."""
    try:
        parse_image_size(config.dataset.image_size)
    except ConfigError as error:
        yield str(error)
    values, forms = config.flat(), ", ".join(registry.DATASET_FORMS)
    for rule in RULES:
        if rule.broken(config):
            value = values[rule.key]
            name = value.partition("(")[0].strip() if rule.key == "model.name" else str(value)
            among = choices(name, rule.known) if rule.known else ""
            yield rule.sentence.format(value=show_value(value), choices=among, forms=forms, c=config)
    yield from _leaks_refused(config, values, known)


def _leaks_refused(config: RunConfig, values: FlatValues, known: Mapping[str, Key]) -> Iterator[str]:
    """Yield leaks under the honest protocol, and leaks that a second key denies."""
    if config.protocol == "honest":
        leaking = [f"leaks.{name}" for name in config.leaks_on]
        leaking += ["public.source"] if config.public.source == "test" else []
        for key in leaking:
            honest = f"{key} = {show_value(known[key].default)}"
            yield f'{key} = {show_value(values[key])} is a leak; set protocol = "paper", which labels it, or {honest}.'
        return
    for leak, twin, telling in TWINS:
        if twin in values and values[leak] != (values[twin] == telling):
            ours, theirs = show_value(values[leak]), show_value(values[twin])
            yield f"{leak} = {ours} contradicts {twin} = {theirs}; give only one of them."


# -- before there is a config ------------------------------------------------------------------------------------------


def refuse_keys(given: FlatValues, known: Mapping[str, Key], algorithm: str) -> Iterator[str]:
    """Yield keys that there are not, and text that is empty or that no file could hold."""
    for name, value in given.items():
        key = known.get(name)
        empty_section = value == {} and any(one.startswith(f"{name}.") for one in known)
        if key is None and not empty_section:
            yield _unknown_key(name, known, algorithm)
        if key is None or not isinstance(value, str):
            continue
        if not value.strip() and key.type is str and key.default and name != "name":
            yield f'{name} = "{value}" is not allowed: it must not be empty (default {show_value(key.default)}).'
        elif value != value.encode(errors="ignore").decode():
            yield f"{name} = {show_value(value)} is not valid UTF-8 text; write it in UTF-8."


def _unknown_key(key: str, known: Mapping[str, Key], algorithm: str) -> str:
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        return f"{key} is a section and cannot be given a value; set its keys, such as {inside[0]}."
    section = key.rpartition(".")[0]
    if section in known:
        return f"{section} is not a section: it must be {known[section].rule}."
    if section == "algorithm":
        among = sorted((name for name in known if name.startswith("algorithm.")), key="algorithm.name".__eq__)
        return f"Unknown key {shortened(key)}: with {algorithm}, the keys of [algorithm] are {', '.join(among)}."
    meant = " or ".join(same_key(key, known)) or nearest(key, known)
    way_out = f": did you mean {meant}?" if meant else "; `fnrfl list keys` prints all of them."
    return f"Unknown key {shortened(key)}{way_out}"


def refuse_value(key: Key, value: object) -> str:
    """Return the sentence about a value that has the wrong type or is out of range."""
    shown, default = show_value(value), show_value(key.default)
    return f"{key.name} = {shown} is not allowed: it must be {key.rule} (default {default})."
