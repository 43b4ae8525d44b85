"""The sections of a config and the frozen RunConfig that holds them: all values checked, and used as they are.

Each key is declared once, with its type, default, range and meaning, in the dataclass that uses it: how clients train
in `core/training.py`, refinement in `core/training.py`, a method's options in its file, all others here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field, ValidationError

from fnrfl.config import registry
from fnrfl.config.keys import Key
from fnrfl.config.stopping import StopRule
from fnrfl.config.typed import FlatValues, as_known, flatten, show_value, toml
from fnrfl.core.errors import ConfigError
from fnrfl.core.options import NetworkOptions, Option, Value, option, options_of, read_call, values_of, written
from fnrfl.core.training import ClientOptions, FnrOptions
from fnrfl.core.words import choices

Size = Annotated[float, Field(ge=0, lt=1)] | Annotated[int, Field(ge=0)]

# A key whose default has changed since it was introduced: the first default, which stays out of the hash for ever. By
# method, as in {"fedprox": {"algorithm.mu": 0.01}}; "" is for the keys of every run, [fnr] included.
FIRST_DEFAULTS: dict[str, FlatValues] = {
    "": {"engine.precision": "float32", "dataset.scale": "none"},
    "feddf": {"algorithm.batchnorm": "frozen"},
}


# A key that had another name once: hashes have the first one for ever, and files of older versions may say it.
FIRST_NAMES = {"dataset.name": "dataset"}


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """The examples that everybody trains on and is judged by."""

    name: str = option("cifar10", "a data set, file.npz, file.csv, folder/ or module:function")
    scale: Literal["auto", "none", "standard"] = option(
        "auto",
        "standard: each column, or channel of an image, gets mean 0 and spread 1 over the clients' examples; "
        "auto: standard for data of your own, none for the named data sets and tokens",
    )
    label: str = option("", "a table's column of classes; by default label, class, target or y, else the last")
    client: str = option("", "a table's column that says which client holds a row; never an input")
    ignore: str = option("", "columns of a table that are no inputs, separated by commas")
    categories: str = option("", "columns of a table whose numbers are names of categories, separated by commas")
    rename: str = option("", "columns that some tables call otherwise, old=new, separated by commas")
    missing: Literal["refuse", "mean", "drop"] = option(
        "refuse", "missing values; mean: that of the clients' known values, drop: leave such examples out"
    )
    image_size: str = option("", "size that pictures of a folder get: 32, or height x width as 48x64")

    @property
    def asks_for_means(self) -> bool:
        """Whether clients tell the means of their inputs, and the model has a first layer that takes them."""
        return self.scale == "standard" or self.missing == "mean"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The network that everybody trains."""

    name: str = option("resnet18", 'a model, perhaps with arguments, or "module:function"')
    features: str = option("auto", "layer whose output are the features; auto: the last Linear's input")
    init: str = option("seed", "where the first weights come from; those given in Python are named by their hash")


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The method, with the values of all its own options."""

    name: str = option("fedavg", 'a method, or "module:Class" of your own')
    options: dict[str, Value] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The method with the options that have another value than the default, as it is typed: fedprox(mu=0.1)."""
        defaults = {option.name: option.default for option in registry.options(self.name)}
        return written(self.name, {k: v for k, v in self.options.items() if v != defaults.get(k)})


@dataclass(frozen=True, kw_only=True)
class PublicOptions:
    """The labelled examples that the server may use."""

    source: str = option("train", 'train, test (a leak), a path or "module:function"')
    size: Size = option(0.1, "a fraction of the training set, or a count")
    ranking: float = option(0.2, "share that only ranks clients; 0: the same examples rank and refine", ge=0, lt=1)
    distill: float | Literal["auto"] = option(
        "auto", "share used without labels; auto: what the method needs", ge=0, lt=1
    )


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """Examples for choosing anything; never the test set."""

    size: Size = option(0.05, "a fraction of the training set, or a count")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the work is done; it changes the time, and the result by rounding alone."""

    name: str = option("auto", "auto, loop, batched, gpu, ray or flower; auto is a fixed rule")
    precision: Literal["auto", "float32", "tf32", "bf16", "float64"] = option(
        "auto",
        "of the layers' arithmetic; tf32, bf16: on a GPU alone; auto: bf16 for convolutions there, else float32",
    )
    deterministic: bool = option(True, "the same bits on every run; on a CPU always")
    clients_at_once: int | Literal["auto"] = option("auto", "clients trained together", ge=1)
    threads: int | Literal["auto"] = option("auto", "clients side by side on the CPU, GPUs, or Ray actors", ge=1)
    accelerate: bool = option(True, "channels-last convolutions, recorded or captured steps")


@dataclass(frozen=True, kw_only=True)
class LeakOptions:
    """What the released code does and an honest experiment must not; every result of it says leak."""

    public_is_test: bool = option(False, "refinement trains on the test set and its labels")
    norm_pass_train_mode: bool = option(False, "the norm pass overwrites clients' BatchNorm statistics")
    constant_penalty: bool = option(False, "the penalty has no gradient")
    clean_test_for_fnr: bool = option(False, "with feature noise, FNR alone is scored on clean images")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run. Made by `load`, which fills in the defaults and checks what belongs together."""

    name: str = option("run", "what the run is called; by default, the recipe's name")
    seed: int = option(0, "of all randomness", ge=0)
    rounds: int = option(10, "communication rounds", ge=1)
    clients: int = option(10, "clients that hold data; 0: those that the data names (scenario = natural)", ge=0)
    participation: float = option(1.0, "share of clients active in a round", gt=0, le=1)
    protocol: Literal["honest", "paper"] = option("honest", "paper: the released code's settings and leaks")
    scenario: str = option("label-dirichlet(0.5)", "how the data is spread over the clients; parts joined by +")
    stop: str = option(
        "never",
        "what ends a run early: patience(5), so many rounds without a better validation accuracy; patience(5, "
        "keep=best) keeps the best model, not the last",
    )
    metrics: str = option("none", 'metrics of your own, "module:function"; several are joined by commas')
    dataset: DatasetOptions
    model: ModelOptions
    client: ClientOptions
    algorithm: MethodOptions
    fnr: FnrOptions | None  # None: off
    public: PublicOptions
    validation: ValidationOptions
    engine: EngineOptions
    network: NetworkOptions
    leaks: LeakOptions

    @property
    def stop_rule(self) -> StopRule:
        """What ends the run before its last round."""
        return StopRule.read(self.stop)

    @property
    def leaks_on(self) -> tuple[str, ...]:
        """The leaks that this run has, by name; every result of the run must show them."""
        return tuple(name for name, on in asdict(self.leaks).items() if on)

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
        values = {key: json.dumps(value) for key, value in self.flat().items()}
        first = {key: json.dumps(value) for key, value in introduced(self.algorithm.name).items()}
        told = {FIRST_NAMES.get(key, key): value for key, value in values.items() if value != first.get(key)}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """The values as a tree of plain values, for JSON."""
        sections = {name: getattr(self, name) for name in section_classes()}
        tree = {name: None if section is None else values_of(section) for name, section in sections.items()}
        return values_of(self) | tree | {"algorithm": asdict(self.algorithm)}

    def to_toml(self) -> str:
        """The whole config as text that runs as it is."""
        text, sections = "", ""
        for name, value in self._tree().items():
            if isinstance(value, dict):
                sections += f"\n[{name}]\n" + "".join(f"{key} = {toml(one)}\n" for key, one in value.items())
            else:
                text += f"{name} = {toml(value)}\n"
        return text + sections

    def flat(self) -> FlatValues:
        """The values by full key, and under "fnr" whether refinement is on."""
        return flatten(self._tree(), text_keys())

    def _tree(self) -> dict[str, Any]:
        tree, method = self.as_dict(), self.algorithm
        return tree | {"algorithm": {"name": method.name, **method.options}, "fnr": tree["fnr"] or "off"}


# -- the protocol of the paper -----------------------------------------------------------------------------------------

# What protocol = "paper" takes as defaults: the settings of the released code, as its documentation runs it.
PAPER: FlatValues = {
    "rounds": 10,
    "clients": 10,
    "participation": 1.0,
    "dataset.name": "cifar10",
    "dataset.scale": "none",
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
    **{f"leaks.{leak.name}": True for leak in fields(LeakOptions)},
}
# A leak that another key also expresses: the two must say the same.
TWINS = (("leaks.public_is_test", "public.source", "test"), ("leaks.constant_penalty", "fnr.penalty", "constant"))


def default_values(given: FlatValues, known: Mapping[str, Key]) -> FlatValues:
    """Return the default of each key, as the protocol has it. A leak follows its twin if that is given."""
    values = {name: key.default for name, key in known.items()}
    if given.get("protocol") != "paper":
        return values
    values |= PAPER
    for leak, twin, leaking in TWINS:
        if twin in given:
            values[leak] = given[twin] == leaking
        elif given.get(leak) is False:
            values[twin] = known[twin].default
    return values


# -- the keys of a run -------------------------------------------------------------------------------------------------


@cache
def section_classes() -> dict[str, type]:
    """The sections of a config, by name."""
    types = get_type_hints(RunConfig)
    named = {f.name: types[f.name] for f in fields(RunConfig) if "help" not in f.metadata}
    return {name: next(t for t in (kind, *get_args(kind)) if isinstance(t, type)) for name, kind in named.items()}


@cache
def keys_by_name(method: tuple[Option, ...] = ()) -> dict[str, Key]:
    """Everything that can be set for a run, by full name; `method` are the options of its method."""
    known = {option.name: Key.of(option.name, option) for option in options_of(RunConfig)}
    for section, cls in section_classes().items():
        inside = (*options_of(cls), *(method if section == "algorithm" else ()))
        known |= {name: Key.of(name, option) for option in inside for name in [f"{section}.{option.name}"]}
    return known


@cache
def text_keys() -> frozenset[str]:
    """Keys whose values are text, whatever they look like."""
    return frozenset(name for name, key in keys_by_name().items() if key.type is str)


@cache
def introduced(algorithm: str) -> FlatValues:
    """The value that each key was introduced with; options of a user's own method have none."""
    known = keys_by_name(() if ":" in algorithm else registry.options(algorithm))  # of one that was given: none
    first = {name: key.default for name, key in known.items()}
    first |= FIRST_DEFAULTS.get("", {}) | FIRST_DEFAULTS.get(algorithm, {})
    values: FlatValues = {name: known[name].checked(value) for name, value in first.items()}
    return values | {"fnr": False, "scenario": canonical(values["scenario"])}


def describe_keys() -> tuple[Key, ...]:
    """Every key there is, those of all methods included."""
    switch = Key("fnr", Literal["off", "on"], "off", "refine the weakest clients; any key of [fnr] turns it on")
    refinement = [key for name, key in keys_by_name().items() if name.startswith("fnr.")]
    methods = (key for entry in registry.methods() for key in keys_of_method(entry.name, entry.options))
    return (*(key for key in keys_by_name().values() if key not in refinement), *methods, switch, *refinement)


def keys_of_method(method: str, options: Iterable[Option]) -> list[Key]:
    """The keys that stand for the options of a method."""
    return [Key.of(f"algorithm.{option.name}", option, method) for option in options]


def canonical(scenario: str) -> str:
    """A scenario's text as its grammar writes it, so that equal scenarios are equal configs."""
    from fnrfl.data.scenarios import parse

    return str(parse(scenario))


def canonical_inner(words: str) -> str:
    """The method that another goes around as it is always written: with the options that are not at their default."""
    try:
        name, options = read_call(words)
    except ValueError:
        return words  # whoever builds it says what is wrong with it
    name = as_known(name, registry.method_names())
    if not options or name not in registry.method_names():
        return words
    known = {one.name: Key.of(f"{name}.{one.name}", one) for one in registry.options(name)}
    checked: dict[str, Value] = {}
    for word, value in options.items():
        said = f"algorithm.inner = {show_value(words)}: {word}"
        if word not in known:
            raise ConfigError(f"{said} is not an option of {name}. {choices(word, known)}.")
        try:
            checked[word] = known[word].checked(value)
        except ValidationError:
            raise ConfigError(f"{said} must be {known[word].rule}.") from None
    return MethodOptions(name=name, options=checked).label


def counts_clients(scenario: str) -> bool:
    """Whether a scenario says how many clients there are, and not the key `clients`."""
    from fnrfl.data.scenarios import parse

    return parse(scenario).counts_clients


def slug(text: str, most: int = 100) -> str:
    """Text as part of a file name that every file system takes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:most].strip("-.") or "run"
