"""What a config refuses, in sentences: each names the value, the rule and the way out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from fnrfl import usercode
from fnrfl.config import registry
from fnrfl.config.keys import Key
from fnrfl.config.protocol import TWINS
from fnrfl.config.schema import RunConfig, counts_clients
from fnrfl.config.spelling import same_key
from fnrfl.config.typed import FlatValues, PassedLabel, shortened, show_value
from fnrfl.core.errors import ConfigError
from fnrfl.core.nearest import choices, nearest
from fnrfl.data.reading import parse_image_size

LONGEST_NAME = 150  # bytes: a folder's name has the method and the seed as well, and at most 255


def refuse_unknown_keys(given: FlatValues, known: Mapping[str, Key], algorithm: str) -> Iterator[str]:
    """Keys that there are not. A section with nothing in it says nothing, so it is allowed."""
    for key, value in given.items():
        empty_section = value == {} and any(name.startswith(f"{key}.") for name in known)
        if key not in known and not empty_section:
            yield _unknown_key(key, known, algorithm)


def _unknown_key(key: str, known: Mapping[str, Key], algorithm: str) -> str:
    """An unknown key, and the key that was meant."""
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
    return f"Unknown key {shortened(key)}" + (
        f": did you mean {meant}?" if meant else "; `fnrfl list keys` prints all of them."
    )


def refuse_value(key: Key, value: object) -> str:
    """A value that has the wrong type or is out of range."""
    return (
        f"{key.name} = {show_value(value)} is not allowed: it must be {key.rule} (default {show_value(key.default)})."
    )


def refuse_bad_text(given: FlatValues, known: Mapping[str, Key]) -> Iterator[str]:
    """Text that is empty, or that no file could hold."""
    for key, value in given.items():
        if not isinstance(value, str) or key not in known:
            continue
        if not value.strip() and known[key].type == "str" and known[key].default and key != "name":
            yield f'{key} = "{value}" is not allowed: it must not be empty (default {show_value(known[key].default)}).'
        elif not _is_utf8(value):
            yield f"{key} = {show_value(value)} is not valid UTF-8 text; write it in UTF-8."


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_config(config: RunConfig, known: Mapping[str, Key]) -> Iterator[str]:
    """What is wrong although every value has the right type: unknown names, leaks, and values against each other."""
    yield from _bad_run_name(config.name)
    try:
        parse_image_size(config.dataset.image_size)
    except ConfigError as error:
        yield str(error)
    yield from _unknown_names(config)
    yield from refuse_metrics(config.metrics)
    yield from _leaks_refused(config, known)
    yield from _conflicts(config)


def is_own_data(text: str) -> bool:
    """Whether a text looks like a file, a folder or a function of the user's."""
    return Path(text).suffix.lower() in (".npz", ".csv", ".json") or ":" in text or "/" in text or os.path.isdir(text)


def _bad_run_name(name: str) -> Iterator[str]:
    if name.startswith(".") or not name.strip() or set(name) & set("/\\\0\n"):
        yield f"name = {show_value(name)} is not allowed: it must be the name of one folder, such as my-run."
    if len(name.encode(errors="surrogateescape")) > LONGEST_NAME:
        yield f"name = {show_value(name)} is too long: it names a folder and must have at most {LONGEST_NAME} bytes."


def _unknown_names(config: RunConfig) -> Iterator[str]:
    """Names that are in no table and do not look like the user's own."""
    dataset, shown = config.dataset.name, shortened(config.dataset.name)
    forms = ", ".join(registry.DATASET_FORMS)
    if dataset not in registry.DATASETS and not is_own_data(dataset) and not isinstance(dataset, PassedLabel):
        yield f'dataset = "{shown}" is not known. {choices(dataset, registry.DATASETS)}, or give {forms}.'
    source = config.public.source
    if source not in ("train", "test") and not is_own_data(source) and not isinstance(source, PassedLabel):
        yield f'public.source = "{shortened(source)}" is not known. Choose "train", or give {forms}.'
    model = config.model.name.partition("(")[0].strip()
    if ":" not in model and model not in registry.MODELS and not isinstance(config.model.name, PassedLabel):
        hint = choices(model, registry.MODELS)
        yield f'model = "{shortened(model)}" is not known. {hint}, or give module:function.'
    if config.model.init != "seed" and not isinstance(config.model.init, PassedLabel):
        yield f'model.init = "{shortened(config.model.init)}" is not known: it must be "seed". In Python, give init=.'
    engine = config.engine.name
    if engine not in registry.ENGINES:
        yield f'engine = "{shortened(engine)}" is not known. {choices(engine, registry.ENGINES)}.'


def refuse_metrics(words: str) -> Iterator[str]:
    """Metrics that are no functions of the user's, or whose names are taken."""
    if words == "none":
        return
    from fnrfl.core.quality import NAMES_OF_RESULTS, TEST_METRICS  # numpy takes a while

    names: list[str] = []
    said = f"metrics = {show_value(words)}"
    targets = [(one, usercode.target("metrics", one)) for one in usercode.each_name("metrics", words)]
    if others := [f'"{one}"' for one, target in targets if target is None]:
        are_none = f"{', '.join(others)} {'is none' if len(others) == 1 else 'are none'}"
        yield (
            f'{said} must name functions of yours, "module:function", joined by commas; {are_none}. '
            "The metrics of `fnrfl list metrics` are in the log of every run and are not named here: --metric NAME of "
            "`fnrfl compare` and `fnrfl evaluate` shows one."
        )
    for _, target in targets:
        if target is None:
            continue
        if target.name in TEST_METRICS:
            yield f"{said}: {target.name} is the name of a metric of fnrfl's. Rename the function."
        elif target.name in NAMES_OF_RESULTS:
            yield f"{said}: {target.name} is something else in the results of a run. Rename the function."
        elif target.name in names:
            yield f"{said} has two functions {target.name}, and a metric has its function's name. Rename one."
        else:
            names.append(target.name)


def _leaks_refused(config: RunConfig, known: Mapping[str, Key]) -> Iterator[str]:
    """Leaks under the honest protocol, and leaks that a second key denies."""
    values = config.flat()
    twins = [(leak, twin, values[twin] == telling) for leak, twin, telling in TWINS if twin in values]
    if config.protocol == "honest":
        leaking = [f"leaks.{name}" for name in config.leaks_on]
        leaking += ["public.source"] if values["public.source"] == "test" else []
        for key in leaking:
            honest = f"{key} = {show_value(known[key].default)}"
            yield f'{key} = {show_value(values[key])} is a leak; set protocol = "paper", which labels it, or {honest}.'
        return
    for leak, twin, leaks in twins:
        if values[leak] != leaks:
            ours, theirs = show_value(values[leak]), show_value(values[twin])
            yield f"{leak} = {ours} contradicts {twin} = {theirs}; give only one of them."


def _conflicts(config: RunConfig) -> Iterator[str]:
    """Values that are right alone and cannot go together."""
    public = config.public
    if config.clients == 0 and not counts_clients(config.scenario):
        yield (
            f'clients = 0 stands for the clients that the data names, and scenario = "{config.scenario}" draws others. '
            "Set clients to 1 or more, or scenario = natural."
        )
    if isinstance(public.distill, float) and public.ranking + public.distill >= 1:
        yield (
            f"public.ranking = {public.ranking} and public.distill = {public.distill} leave nothing to refine on; "
            f"their sum must be below 1."
        )
    if config.fnr is None:
        return
    if public.source == "train" and public.size == 0:
        yield (
            "FNR needs labelled public data; public.size is 0. "
            "Set public.size = 0.1, give public.source, or set fnr = off."
        )
    if config.fnr.share == 1 and config.fnr.target == "others":
        yield (
            'fnr.share = 1 leaves nobody unrefined to take targets from, so fnr.target = "others" cannot be used. '
            'Set fnr.target = "all" or a smaller share.'
        )
