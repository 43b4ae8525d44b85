"""From what was typed to a RunConfig: defaults, then the protocol's, then the recipe, then the overrides."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from fnrfl import usercode
from fnrfl.config import registry, schema, typed
from fnrfl.config.keys import Key
from fnrfl.config.refusals import is_own_data, refuse_config, refuse_keys, refuse_value
from fnrfl.config.schema import MethodOptions, RunConfig
from fnrfl.config.stopping import canonical_stop
from fnrfl.config.typed import FlatValues, Overrides, PassedLabel, as_known, shortened, show_value
from fnrfl.core.errors import ConfigError
from fnrfl.core.training import canonical_class_weights, canonical_schedule
from fnrfl.core.words import choices

EXAMPLE = "digits"
CANONICAL = {  # keys whose text has a grammar: equal ones are written alike
    "scenario": schema.canonical,
    "client.class_weights": canonical_class_weights,
    "client.schedule": canonical_schedule,
    "stop": canonical_stop,
    "algorithm.inner": schema.canonical_inner,
}


def load(recipe: str | Path | None = None, overrides: Overrides = (), *, trust: bool = False) -> RunConfig:
    """The config of a packaged recipe, of a TOML file, or without either of the embedded example, with overrides.

    Overrides are `key=value` strings, or nested values such as `{"algorithm": "scaffold", "fnr": {"weight": 0.1}}`;
    later ones win over earlier ones, and all of them over the recipe. Code (`module:name`) that the file names and that
    was never allowed is refused, unless `trust` allows it.

    >>> config = load("digits", ["algorithm=fedprox", "algorithm.mu=0.1", "fnr=on"])
    >>> config.algorithm.options, config.fnr.share, config.protocol
    ({'mu': 0.1}, 0.5, 'honest')
    """
    path = _find_recipe(EXAMPLE if recipe is None else recipe)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe may never end
            raise OSError(0, "it is not an ordinary file")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"The recipe {path} cannot be read: {reason}. Give the path of a TOML file.") from error
    name = path.stem if recipe is not None else _name_of_data(overrides) or path.stem
    return loads(text, overrides, name=name, origin=str(path), trust=trust)


def loads(
    text: str,
    overrides: Overrides = (),
    *,
    name: str = "run",
    origin: str = "The config",
    trust: bool = False,
    of_run: bool = False,
    listed_code: Collection[str] | None = None,
) -> RunConfig:
    """The config of TOML text, with overrides; `name` is the run's name unless the text or an override says another.

    A text that is `of_run` was written by a run, with every key of its version: one that it lacks is newer, and has the
    value that it was introduced with. With `listed_code`, a node's, the text may name that code and no other.
    """
    recipe = read_keys(text, origin=origin)
    recipe = schema.FIRST_DEFAULTS[""] | recipe if of_run else recipe
    given = typed.read_overrides(overrides, schema.text_keys())
    named = {key: recipe[key] for key in usercode.KEYS if key in recipe and key not in given}
    usercode.check_allowed(named, given, origin=origin, trust=trust, listed=listed_code)  # before anything is imported
    return _resolve(recipe, given, name)


def read_keys(text: str, *, origin: str) -> FlatValues:
    """Return the values of TOML text by dotted key, before any is checked."""
    try:
        return typed.flatten(typed.parse_toml(text), schema.text_keys())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin} is not valid TOML: {error}.") from error


def from_flat(values: FlatValues) -> RunConfig:
    """The config that `RunConfig.flat` has written, in another process that works for the same run and user.

    The code that it names was allowed before the process was told of it.
    """
    usercode.check_allowed({}, {key: values[key] for key in usercode.KEYS if key in values}, origin="", trust=False)
    return _resolve(values, {}, "run")


def _name_of_data(overrides: Overrides) -> str:
    """What a run on data of the user's own is called if no recipe has a name for it; "" for other data."""
    data = typed.read_overrides(overrides, schema.text_keys()).get("dataset.name")
    if not isinstance(data, str) or not (PassedLabel.FORM.fullmatch(data) or is_own_data(data)):
        return ""
    words = data.partition(" (given in Python")[0].rpartition(":")[2]
    path = Path(os.path.abspath(words))
    return re.sub(r"[^\w.-]+", "-", path.name if path.is_dir() else path.stem)[:40].strip("-.")


def _find_recipe(recipe: str | Path) -> Path:
    """Return the path of a recipe: a bare word is a packaged one, anything with a suffix or a separator is a file."""
    if not isinstance(recipe, str | os.PathLike):
        raise ConfigError(
            f"The recipe is a {type(recipe).__name__}; it must be a name or a TOML file. Data and models are given by "
            "name: dataset=..., model=..."
        )
    packaged = registry.recipes()
    if isinstance(recipe, str) and recipe in packaged:
        return registry.RECIPES / f"{recipe}.toml"
    path = Path(recipe)
    if path.suffix == ".toml" or len(path.parts) > 1 or os.path.exists(path):
        return path
    word = shortened(str(recipe))
    raise ConfigError(f'There is no recipe "{word}". {choices(str(recipe), packaged)}, or give a .toml file.')


def _resolve(recipe: FlatValues, overrides: FlatValues, name: str) -> RunConfig:
    """Return the config of a recipe and overrides; all problems are reported at once."""
    recipe, overrides = _spelled(PassedLabel.marked(recipe)), _spelled(PassedLabel.marked(overrides))
    algorithm, recipe = _algorithm(recipe, overrides)
    known = schema.keys_by_name(registry.options(algorithm))
    given: FlatValues = {"name": name} | recipe | overrides
    refining = given.pop("fnr", False)
    problems = [*refuse_keys(given, known, algorithm)]
    wanted = {key: value for key, value in given.items() if key in known and (refining or not key.startswith("fnr."))}
    given = {key: known[key].spelled(value) for key, value in wanted.items()}
    values, wrong = _checked(schema.default_values(given, known) | given, known)
    if wrong:
        raise ConfigError(" ".join([*problems, *wrong]))
    problems += _made_canonical(values)
    chosen = "clients" in overrides or ("scenario" not in overrides and "clients" in recipe)
    if not problems and not chosen and schema.counts_clients(values["scenario"]):
        values["clients"] = 0
    config = _typed(values, refining)
    if problems := [*problems, *refuse_config(config, known)]:
        raise ConfigError(" ".join(problems))
    return config


def _made_canonical(values: FlatValues) -> list[str]:
    """Write each text that has a grammar as it is always written; return what is wrong with those that have not."""
    problems = []
    for key in CANONICAL.keys() & values.keys():
        try:
            values[key] = CANONICAL[key](values[key])
        except ConfigError as error:
            problems.append(str(error))
    return sorted(problems)


def _algorithm(recipe: FlatValues, overrides: FlatValues) -> tuple[str, FlatValues]:
    """(the method, the recipe without options that were chosen for another method)."""
    recipes_own = recipe.get("algorithm.name", MethodOptions.name)
    algorithm = overrides.get("algorithm.name", recipes_own)
    if algorithm != recipes_own:  # another method's mu is another quantity
        recipe = {key: value for key, value in recipe.items() if not key.startswith("algorithm.")}
    if not isinstance(algorithm, str):
        raise ConfigError(f"algorithm.name = {show_value(algorithm)} is not allowed: it must be text.")
    if algorithm == "fnr":
        raise ConfigError('algorithm.name = "fnr" is not a method: FNR wraps any method. Set fnr = "on" instead.')
    return algorithm, recipe


def _checked(values: FlatValues, known: Mapping[str, Key]) -> tuple[FlatValues, list[str]]:
    """(the values as their types have them, a sentence for each that is wrong)."""
    right: FlatValues = {}
    wrong: list[str] = []
    for name, value in values.items():
        try:
            right[name] = known[name].checked(value)
        except ValidationError:
            wrong.append(refuse_value(known[name], value))
    return right, wrong


def _typed(values: FlatValues, refining: bool) -> RunConfig:
    """Return checked values as the objects that use them."""
    tree = typed.nest(values)
    method = tree["algorithm"]
    sections = {name: cls(**tree[name]) for name, cls in schema.section_classes().items() if name != "algorithm"}
    sections |= {"algorithm": MethodOptions(name=method.pop("name"), options=method)}
    sections["client"] = replace(sections["client"], schedule_rounds=tree["rounds"])
    return schema.RunConfig(**tree | sections | ({} if refining else {"fnr": None}))


def _spelled(flat: FlatValues) -> FlatValues:
    """Return the values with names as the tables have them: FedAvg, ResNet18 and cifar-10 are known names."""
    tables: dict[str, Iterable[str]] = {
        "algorithm.name": [*registry.method_names(), "fnr"],
        "algorithm.inner": registry.method_names(),
        "engine.name": registry.ENGINES,
        "public.source": ["train", "test"],
        "dataset.name": registry.DATASETS,
        "model.name": registry.MODELS,
    }
    spelled = dict(flat)
    for key in tables.keys() & flat.keys():
        word = flat[key]
        if not isinstance(word, str) or isinstance(word, PassedLabel):
            continue
        if key == "model.name":  # perhaps with options
            name, bracket, rest = word.partition("(")
            spelled[key] = as_known(name.strip(), tables[key]) + bracket + rest
        elif not (is_own_data(word) if key in ("dataset.name", "public.source") else ":" in word):
            spelled[key] = as_known(word, tables[key])
    return spelled
