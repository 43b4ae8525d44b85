"""The typed config: TOML and overrides go in, one frozen RunConfig comes out, and every mistake is a sentence.

Each key is declared once, with its type, default, range and meaning: here, or as a field of the method that uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model

from fnrfl.config import registry
from fnrfl.config.keys import Key, Section, keys_of, model_of
from fnrfl.config.registry import Value
from fnrfl.config.spelling import as_known, same_key
from fnrfl.config.typed import Flat, Overrides, flatten, nest, parse, read_overrides, shortened, show, toml
from fnrfl.core import own_code
from fnrfl.core import trust as trusted
from fnrfl.core.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Size = Share | Annotated[int, Field(ge=0)]

EXAMPLE = "digits"
LONGEST_NAME = 150  # bytes: a folder's name has the method and the seed as well, and at most 255


class Model(Section):
    """The network that everybody trains."""

    name: str = Field("resnet18", description='a model, perhaps with arguments, or "module:function"')
    features: str = Field("auto", description="layer whose output are the features; auto: the last Linear's input")


class Client(Section):
    """Local training."""

    optimizer: Literal["sgd", "adam"] = Field("sgd", description="new each round")
    lr: Positive = Field(0.01, description="learning rate")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on the learning rate per round")
    momentum: float = Field(0.9, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(1e-5, ge=0, description="added to the gradient")
    batch: Count = Field(64, description="examples per step")
    epochs: Count = Field(10, description="passes over a client's data per round")
    last_batch: Literal["run-on", "keep", "drop"] = Field(
        "run-on", description="run-on: epochs end to end in full batches; keep a shorter last batch; drop it"
    )
    augment: Literal["auto", "crop-flip", "none"] | bool = Field(
        "auto", description="auto: crop-flip for colour images"
    )
    stragglers: float = Field(0.0, ge=0, lt=1, description="share of a cohort that does a random part of the epochs")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of a cohort whose replies are lost")
    nonfinite: Literal["fail", "skip"] = Field(
        "fail", description="when a client's loss is NaN or infinite: stop the run, or leave the client out"
    )


class Method(Section):
    """The method, with all of its own fields."""

    name: str = Field("fedavg", description='a method, or "module:Class" of your own')
    options: dict[str, Value]


class Public(Section):
    """The labelled examples that the server may use."""

    source: str = Field("train", description='train, test (a leak), a path or "module:function"')
    size: Size = Field(0.1, description="a fraction of the training set, or a count")
    ranking: Share = Field(0.2, description="share that only ranks clients; 0: the same examples rank and refine")
    distill: Share | Literal["auto"] = Field(
        "auto", description="share used without labels; auto: what the method needs"
    )


class Validation(Section):
    """Examples for choosing anything; never the test set."""

    size: Size = Field(0.05, description="a fraction of the training set, or a count")


class Engine(Section):
    """How the work is done; it changes the time, and the result by rounding alone."""

    name: str = Field("auto", description="auto, loop, batched or gpu; auto is a fixed rule")
    precision: Literal["float32", "tf32", "bf16", "float64"] = Field(
        "float32", description="of the layers' arithmetic; tf32 and bf16 need a GPU"
    )
    deterministic: bool = Field(True, description="the same bits on every run; on a CPU always")
    clients_at_once: Count | Literal["auto"] = Field("auto", description="clients trained together")
    threads: Count | Literal["auto"] = Field("auto", description="clients side by side on the CPU, or GPUs")
    accelerate: bool = Field(True, description="channels-last convolutions, recorded or captured steps")


class Leaks(Section):
    """What the released code does and an honest experiment must not; every result of it says leak."""

    public_is_test: bool = Field(False, description="refinement trains on the test set and its labels")
    norm_pass_train_mode: bool = Field(False, description="the norm pass overwrites clients' BatchNorm statistics")
    constant_penalty: bool = Field(False, description="the penalty has no gradient")
    clean_test_for_fnr: bool = Field(False, description="with feature noise, FNR alone is scored on clean images")


class RunConfig(Section):
    """Everything that decides a run. Made by `load`, which fills in the defaults and checks what belongs together."""

    name: str = Field("run", description="what the run is called; by default, the recipe's name")
    seed: int = Field(0, ge=0, description="of all randomness")
    rounds: Count = Field(10, description="communication rounds")
    clients: Count = Field(10, description="clients that hold data")
    participation: float = Field(1.0, gt=0, le=1, description="share of clients active in a round")
    protocol: Literal["honest", "paper"] = Field("honest", description="paper: the released code's settings and leaks")
    dataset: str = Field("cifar10", description="a data set, file.npz, file.csv, folder/ or module:function")
    scenario: str = Field(
        "label-dirichlet(0.5)", description="how the data is spread over the clients; parts joined by +"
    )
    model: Model
    client: Client
    algorithm: Method
    fnr: dict[str, Value] | None  # fields of the refinement, or None: off
    public: Public
    validation: Validation
    engine: Engine
    leaks: Leaks

    @property
    def leaks_on(self) -> tuple[str, ...]:
        """The leaks that this run has, by name; every result of the run must show them."""
        return tuple(name for name, on in self.leaks if on)

    @property
    def run_dir(self) -> Path:
        """Where the run is kept unless somebody says otherwise, or this name is taken."""
        refined = "" if self.fnr is None else "-fnr"
        return Path("runs") / f"{self.name}-{slug(self.algorithm.name, 40)}{refined}-{self.seed}"

    @property
    def sha256(self) -> str:
        """The same for two configs exactly when all their values are the same, whichever keys a later version adds.

        Keys that have the value they were introduced with are left out, so a new key changes no hash.
        """
        values = {key: json.dumps(value) for key, value in _flatten(self._tree()).items()}
        first = {key: json.dumps(value) for key, value in introduced(self.algorithm.name).items()}
        told = {key: value for key, value in values.items() if value != first.get(key)}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def to_toml(self) -> str:
        """The whole config as text that runs as it is."""
        tree = self._tree()
        text = "".join(f"{key} = {toml(value)}\n" for key, value in tree.items() if not isinstance(value, dict))
        for section, values in tree.items():
            if isinstance(values, dict):
                text += f"\n[{section}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in values.items())
        return text

    def replace(self, overrides: Overrides) -> RunConfig:
        """The same config with some keys changed, checked again."""
        given = _read_overrides(overrides)
        trusted.check({}, given, origin="", trust=False)
        return _resolve(_flatten(self._tree()), given, self.name)

    def _tree(self) -> dict[str, Any]:
        method = {"name": self.algorithm.name, **self.algorithm.options}
        return self.model_dump() | {"algorithm": method, "fnr": "off" if self.fnr is None else self.fnr}


# What protocol = "paper" takes as defaults: the settings of the released code, as its documentation runs it.
PAPER: Flat = {
    "rounds": 10,
    "clients": 10,
    "participation": 1.0,
    "dataset": "cifar10",
    "scenario": "niid(label-dirichlet(0.5))",
    "model.name": "resnet18(head=1000)",
    "client.optimizer": "sgd",
    "client.lr": 0.01,
    "client.momentum": 0.9,
    "client.weight_decay": 1e-5,
    "client.batch": 64,
    "client.epochs": 10,
    "client.last_batch": "keep",
    "fnr.share": 0.5,
    "fnr.weight": 0.5,
    "fnr.penalty": "constant",
    "fnr.target": "all",
    "fnr.epochs": 5,
    "fnr.batch": 32,
    "fnr.batchnorm": "updating",
    "public.source": "test",
    "public.ranking": 0.0,
    "validation.size": 0,
    **{f"leaks.{name}": True for name in Leaks.model_fields},
}
# A key whose default has changed since it was introduced: the first default, which stays out of the hash for ever. By
# method, as in {"fedprox": {"algorithm.mu": 0.01}}; "" is for the keys of every run, [fnr] included.
FIRST_DEFAULTS: dict[str, Flat] = {}
# A leak that another key also expresses: the two must say the same.
TWINS = (("leaks.public_is_test", "public.source", "test"), ("leaks.constant_penalty", "fnr.penalty", "constant"))


def load(recipe: str | Path | None = None, overrides: Overrides = (), *, trust: bool = False) -> RunConfig:
    """The config of a packaged recipe, of a TOML file, or without either of the embedded example, with overrides.

    Overrides are `key=value` strings, or nested values such as `{"algorithm": "scaffold", "fnr": {"weight": 0.1}}`;
    later ones win over earlier ones, and all of them over the recipe. Code (`module:name`) that the file names and that
    was never allowed is refused, unless `trust` allows it.

    >>> config = load("digits", ["algorithm=fedprox", "algorithm.mu=0.1", "fnr=on"])
    >>> config.algorithm.options, config.fnr["share"], config.protocol
    ({'mu': 0.1}, 0.5, 'honest')
    """
    path = _find(EXAMPLE if recipe is None else recipe)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe may never end
            raise OSError(0, "it is not an ordinary file")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"The recipe {path} cannot be read: {reason}. Give the path of a TOML file.") from error
    return loads(text, overrides, name=path.stem, origin=str(path), trust=trust)


def loads(
    text: str, overrides: Overrides = (), *, name: str = "run", origin: str = "The config", trust: bool = False
) -> RunConfig:
    """The same from TOML text; `name` is the run's name unless the text or an override says another."""
    try:
        recipe = _flatten(parse(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{origin} is not valid TOML: {reason}.") from error
    given = _read_overrides(overrides)
    found = {key: recipe[key] for key in own_code.KEYS if key in recipe and key not in given}
    trusted.check(found, given, origin=origin, trust=trust)  # before anything is imported
    return _resolve(recipe, given, name)


@cache
def introduced(algorithm: str) -> Flat:
    """The value that each key was introduced with; options of a user's own method have none."""
    options = () if ":" in algorithm else registry.fields(algorithm)
    schema = _schema(options, registry.fields("fnr"))
    first = {key: declared.default for key, declared in keys_of(schema).items()}
    first |= FIRST_DEFAULTS.get("", {}) | FIRST_DEFAULTS.get(algorithm, {})
    checked = _flatten(schema.model_validate(nest(first)).model_dump())
    return checked | {"fnr": False, "scenario": _canonical(checked["scenario"])}


def describe_keys() -> tuple[Key, ...]:
    """Every key there is, those of all methods included."""
    methods = {name: keys_of(model_of(registry.fields(name)), "algorithm.").values() for name in registry.algorithms()}
    switch = Key(
        "fnr", '"off" | "on"', "off", "", "refine the weakest clients; any key of [fnr] turns it on", "off or on"
    )
    return (
        *keys_of(RunConfig).values(),
        *(replace(key, meaning=f"{name}: {key.meaning}") for name, keys in methods.items() for key in keys),
        switch,
        *keys_of(model_of(registry.fields("fnr")), "fnr.").values(),
    )


def slug(text: str, most: int = 100) -> str:
    """Text as part of a file name that every file system takes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:most].strip("-.") or "run"


def _find(recipe: str | Path) -> Path:
    """Where a recipe is; a bare word is a packaged one, anything with a suffix or a separator is a file."""
    packaged = registry.recipes()
    if isinstance(recipe, str) and recipe in packaged:
        return registry.FOLDER / "config" / "recipes" / f"{recipe}.toml"
    path = Path(recipe)
    if path.suffix == ".toml" or len(path.parts) > 1 or os.path.exists(path):
        return path
    word = shortened(str(recipe))
    raise ConfigError(f'There is no recipe "{word}". {registry.hint(str(recipe), packaged)}, or give a .toml file.')


@cache
def _text_keys() -> frozenset[str]:
    """Keys whose values are text, whatever they look like."""
    return frozenset(name for name, key in keys_of(RunConfig).items() if key.type == "str")


def _flatten(tree: Mapping[str, object]) -> Flat:
    return flatten(tree, _text_keys())


def _read_overrides(overrides: Overrides) -> Flat:
    return read_overrides(overrides, _text_keys())


def _resolve(recipe: Flat, overrides: Flat, name: str) -> RunConfig:
    """Defaults, then the protocol's, then the recipe, then the overrides; all problems are reported at once."""
    recipe, overrides = _spelled(recipe), _spelled(overrides)
    default = Method.model_fields["name"].default
    algorithm = (recipe | overrides).get("algorithm.name", default)
    if algorithm != recipe.get("algorithm.name", default):
        # The recipe's fields were chosen for its own method: another method's mu is another quantity.
        recipe = {key: value for key, value in recipe.items() if not key.startswith("algorithm.")}
    if not isinstance(algorithm, str):
        raise ConfigError(f"algorithm.name = {show(algorithm)} is not allowed: it must be text.")
    if algorithm == "fnr":
        raise ConfigError('algorithm.name = "fnr" is not a method: FNR wraps any method. Set fnr = "on" instead.')

    schema = _schema(registry.fields(algorithm), registry.fields("fnr"))
    known = keys_of(schema)
    given: Flat = {"name": name} | recipe | overrides
    refining = given.pop("fnr", False)
    problems = [
        *(
            _unknown(key, known, algorithm)
            for key in given
            if key not in known and not _is_empty_section(key, given, known)
        ),
        *_bad_text(given, known),
    ]
    given = {key: value for key, value in given.items() if key in known and (refining or not key.startswith("fnr."))}
    given |= {
        key: as_known(v, known[key].choices) for key, v in given.items() if isinstance(v, str) and known[key].choices
    }

    values = {key: declared.default for key, declared in known.items()}
    if given.get("protocol") == "paper":
        values |= PAPER
        for leak, twin, telling in TWINS:  # whichever of the two is given decides the other
            if twin in given:
                values[leak] = given[twin] == telling
            elif given.get(leak) is False:
                values[twin] = known[twin].default
    values |= given

    try:
        checked = schema.model_validate(nest(values)).model_dump()
    except ValidationError as error:
        raise ConfigError(" ".join([*problems, *_wrong_values(error, values, known)])) from None
    try:
        checked["scenario"] = _canonical(checked["scenario"])
    except ConfigError as error:
        problems.append(str(error))
    method, refinement = checked.pop("algorithm"), checked.pop("fnr")
    config = RunConfig(
        **checked,
        algorithm=Method(name=algorithm, options={key: value for key, value in method.items() if key != "name"}),
        fnr=refinement if refining else None,
    )
    problems += [*_unknown_names(config), *_leaks_refused(config, known), *_conflicts(config)]
    if problems:
        raise ConfigError(" ".join(problems))
    return config


def _canonical(scenario: str) -> str:
    """A scenario's text as its grammar writes it, so that equal scenarios are equal configs."""
    from fnrfl.data.scenarios import parse

    return str(parse(scenario))


def _spelled(flat: Flat) -> Flat:
    """Names as the tables have them, where they were spelled in another way: FedAvg, ResNet18, cifar-10."""
    tables = {
        "algorithm.name": [*registry.algorithms(), "fnr"],
        "algorithm.inner": registry.algorithms(),
        "engine.name": [*registry.ENGINES, *registry.LATER_ENGINES],
        "public.source": ["train", "test"],
    }
    spelled = dict(flat)
    for key, known in tables.items():
        word = flat.get(key)
        if isinstance(word, str) and not (_is_own_data(word) if key == "public.source" else ":" in word):
            spelled[key] = as_known(word, known)
    if isinstance(word := flat.get("dataset"), str) and not _is_own_data(word):
        spelled["dataset"] = as_known(word, registry.DATASETS)
    if isinstance(word := flat.get("model.name"), str):
        name, bracket, rest = word.partition("(")
        spelled["model.name"] = as_known(name.strip(), registry.MODELS) + bracket + rest
    return spelled


def _is_empty_section(key: str, given: Flat, known: Mapping[str, Key]) -> bool:
    """Whether it is a section with nothing in it, which says nothing."""
    return given[key] == {} and any(name.startswith(f"{key}.") for name in known)


def _bad_text(given: Flat, known: Mapping[str, Key]) -> Iterator[str]:
    """Text that is empty, or that no file could hold."""
    for key, value in given.items():
        if not isinstance(value, str) or key not in known:
            continue
        if not value.strip() and known[key].type == "str" and key != "name":
            yield f'{key} = "{value}" is not allowed: it must not be empty (default {show(known[key].default)}).'
        elif not _is_utf8(value):
            yield f"{key} = {show(value)} is not valid UTF-8 text; write it in UTF-8."


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unknown(key: str, known: Mapping[str, Key], algorithm: str) -> str:
    """An unknown key, and the one that was meant."""
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        return f"{key} is a section and cannot be given a value; set its keys, such as {inside[0]}."
    section = key.rpartition(".")[0]
    if section in known:
        return f"{section} is not a section: it must be {known[section].rule}."
    if section == "algorithm":
        among = [name for name in known if name.startswith("algorithm.")]
        return f"Unknown key {shortened(key)}: with {algorithm}, the keys of [algorithm] are {', '.join(among)}."
    meant = " or ".join(same_key(key, known)) or registry.nearest(key, known)
    return f"Unknown key {shortened(key)}" + (
        f": did you mean {meant}?" if meant else "; `fnrfl list keys` prints all of them."
    )


def _wrong_values(error: ValidationError, values: Flat, known: Mapping[str, Key]) -> list[str]:
    """One sentence per key whose value has the wrong type or is out of range."""
    located = [".".join(map(str, e["loc"])) + "." for e in error.errors()]
    return [
        f"{key} = {show(values[key])} is not allowed: it must be {declared.rule} (default {show(declared.default)})."
        for key, declared in known.items()
        if any(place.startswith(f"{key}.") for place in located)
    ]


def _unknown_names(config: RunConfig) -> Iterator[str]:
    """Names that are in no table and do not look like the user's own."""
    if config.name.startswith(".") or not config.name.strip() or set(config.name) & set("/\\\0\n"):
        yield f"name = {show(config.name)} is not allowed: it must be the name of one folder, such as my-run."
    if len(config.name.encode(errors="surrogateescape")) > LONGEST_NAME:
        yield f"name = {show(config.name)} is too long: it names a folder and must have at most {LONGEST_NAME} bytes."
    dataset, shown = config.dataset, shortened(config.dataset)
    forms = ", ".join(registry.DATASET_FORMS)
    if dataset not in registry.DATASETS and not _is_own_data(dataset):
        yield f'dataset = "{shown}" is not known. {registry.hint(dataset, registry.DATASETS)}, or give {forms}.'
    source = config.public.source
    if source not in ("train", "test") and not _is_own_data(source):
        yield f'public.source = "{shortened(source)}" is not known. Choose "train", or give {forms}.'
    model = config.model.name.partition("(")[0].strip()
    if ":" not in model and model not in registry.MODELS:
        hint = registry.hint(model, registry.MODELS)
        yield f'model = "{shortened(model)}" is not known. {hint}, or give module:function.'
    engine = config.engine.name
    if engine in registry.LATER_ENGINES:
        yield f'engine = "{engine}" is not in this version. Choose one of {", ".join(registry.ENGINES)}.'
    elif engine not in registry.ENGINES:
        yield f'engine = "{shortened(engine)}" is not known. {registry.hint(engine, registry.ENGINES)}.'


def _is_own_data(text: str) -> bool:
    """Whether a text looks like a file, a folder or a function of the user's."""
    return Path(text).suffix.lower() in (".npz", ".csv") or ":" in text or "/" in text or os.path.isdir(text)


def _leaks_refused(config: RunConfig, known: Mapping[str, Key]) -> Iterator[str]:
    """Leaks under the honest protocol, and leaks that a second key denies."""
    values = _flatten(config._tree())
    twins = [(leak, twin, values[twin] == telling) for leak, twin, telling in TWINS if twin in values]
    if config.protocol == "honest":
        leaking = [f"leaks.{name}" for name in config.leaks_on]
        leaking += ["public.source"] if values["public.source"] == "test" else []
        for key in leaking:
            honest = f"{key} = {show(known[key].default)}"
            yield f'{key} = {show(values[key])} is a leak; set protocol = "paper", which labels it, or {honest}.'
        return
    for leak, twin, leaks in twins:
        if values[leak] != leaks:
            yield f"{leak} = {show(values[leak])} contradicts {twin} = {show(values[twin])}; give only one of them."


def _conflicts(config: RunConfig) -> Iterator[str]:
    """Values that are right alone and cannot go together."""
    public = config.public
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
    if config.fnr["share"] == 1 and config.fnr["target"] == "others":
        yield (
            'fnr.share = 1 leaves nobody unrefined to take targets from, so fnr.target = "others" cannot be used. '
            'Set fnr.target = "all" or a smaller share.'
        )


@cache
def _schema(algorithm: tuple[registry.Field, ...], fnr: tuple[registry.Field, ...]) -> type[Section]:
    """RunConfig with the fields of one method and of the refinement where they are written."""
    named = create_model("Method", __base__=model_of(algorithm), name=(str, Method.model_fields["name"]))
    fixed: dict[str, Any] = {
        name: (field.annotation, field)
        for name, field in RunConfig.model_fields.items()
        if name not in ("algorithm", "fnr")
    }
    return create_model("Schema", __base__=Section, **fixed, algorithm=(named, ...), fnr=(model_of(fnr), ...))
