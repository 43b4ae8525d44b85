"""Objects that are passed to a run in Python: data, a model, a method, first weights.

A config cannot hold an object. In its place it has words: what the object is, and the beginning of its hash. So two
configs are the same exactly when the same objects were given, and a run that goes on asks for the same ones.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fnrfl.algorithms.fnr import FNR
from fnrfl.config import RunConfig, registry
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.isolation import isolated
from fnrfl.core.modules import unwrapped
from fnrfl.core.object_hash import module_hash, object_hash, tensors_hash
from fnrfl.core.options import values_of
from fnrfl.core.trees import Tree, under
from fnrfl.core.words import INPUT_SCALE
from fnrfl.data.in_memory import values_hash, values_in_memory

# The sections that may be given as an object, and the key that has words for it.
OBJECT_SECTIONS = {"dataset": "name", "model": "name", "algorithm": "name", "public": "source"}
INIT = "init"  # the argument of first weights


@dataclass(frozen=True, eq=False)
class GivenObject:
    """An object, under the argument that it was passed as."""

    argument: str
    what: str  # in a word
    sha256: str
    value: Any
    log: dict[str, Any] = field(default_factory=dict)  # what else the run's log says of it
    implied: bool = False  # nobody passed it by itself: the weights of a module

    @property
    def words(self) -> str:
        """What the config says in its place."""
        return f"{self.what} (given in Python, {self.sha256[:8]})"


@dataclass(frozen=True, eq=False)
class Given:
    """All objects that were passed in."""

    objects: tuple[GivenObject, ...] = ()
    named: Mapping[str, object] = field(default_factory=dict)  # what was passed in as a name, by section

    def fetch(self, argument: str, words: str) -> Any:
        """The object that a config's words stand for."""
        mine = [one for one in self.objects if one.argument == argument]
        for one in mine:
            if one.sha256.startswith(words[-9:-1]):
                return one.value
        if mine:
            raise ConfigError(
                f"{argument} is not what the run was begun with: that was {words}, and this is {mine[0].words}. Give "
                "the same again, or run again into another directory."
                + (_BYTECODE if argument in ("model", "algorithm") else "")
            )
        raise ConfigError(
            f'"{words}" is no name: the run was given {_NOUNS[argument]} in Python, and a config cannot hold that. Use '
            f"fnrfl.run, resume, load, evaluate or predict in Python, with {argument}=."
        )

    def algorithm(self, words: str) -> Algorithm | None:
        """The method that was passed in, if the words stand for one."""
        return self.fetch("algorithm", words) if registry.is_given(words) else None

    def used_by(self, config: RunConfig) -> Given:
        """The objects that a config has words for."""
        words = words_in(config).values()
        return replace(self, objects=tuple(one for one in self.objects if one.words in words))

    def as_json(self, config: RunConfig) -> dict[str, Any]:
        """What the log of a run says about the objects that its config has words for."""
        used = self.used_by(config).objects
        return {one.argument: {"what": one.what, "sha256": one.sha256} | one.log for one in used}

    def heading(self, config: RunConfig) -> str:
        """What config.toml opens with, if it cannot be run as it is."""
        if not words_in(config):
            return ""
        listed = ", ".join(f"{one.argument}=..." for one in self.used_by(config).objects if not one.implied)
        return (
            f"# Part of it was given in Python, so this file alone cannot run. To go on: fnrfl.resume(..., {listed})\n"
        )


NOTHING = Given()


def words_in(config: RunConfig) -> dict[str, str]:
    """The words of a config that stand for objects, by the argument that each was passed as."""
    named = {section: getattr(getattr(config, section), key) for section, key in OBJECT_SECTIONS.items()}
    return {key: words for key, words in (named | {INIT: config.model.init}).items() if registry.is_given(words)}


def check_given(run_dir: Path, config: RunConfig, given: Given) -> None:
    """Refuse what is not the run's own: an object that it was not begun with, or another name than its config has."""
    words = words_in(config)
    others = [key for key, name in given.named.items() if config.replace({key: name}).sha256 != config.sha256]
    for one in given.objects:
        if one.argument in words and one.argument != INIT:
            given.fetch(one.argument, words[one.argument])
        elif one.argument not in words and not one.implied:
            others.append(one.argument)
    if others:
        raise ConfigError(
            f"{run_dir} was begun with another {others[0]}, which its config.toml names. Leave {others[0]}= out, or "
            "run again into another directory."
        )


_BYTECODE = " Functions count by their bytecode, which another version of Python may write in another way."
_NOUNS = {"dataset": "its data", "model": "its model", "algorithm": "its method", "public": "its public data"}
_NOUNS[INIT] = "its first weights"


@isolated()
def take_objects(keys: Mapping[str, object], init: object = None) -> tuple[dict[str, object], Given]:
    """(the keys with words in the place of objects, the objects)."""
    taken, objects, names = dict(keys), list[GivenObject](), dict[str, object]()
    for section, key in OBJECT_SECTIONS.items():
        values = _section(section, keys.get(section))
        value = values.get(key)
        if section == "algorithm" and not _is_name(value) and (packaged := _packaged_method(value)):
            if twice := values.keys() & packaged.keys() - {"name"}:
                raise ConfigError(
                    f"algorithm.{min(twice)} is given twice: by the method itself and beside it. Give one."
                )
            values |= packaged
        elif not _is_name(value):
            objects += _TAKERS[section](value)
            taken[section] = values | {key: objects[-1].words}
            continue
        if values:
            taken[section] = names[section] = values
    if init is not None:
        objects = [one for one in objects if one.argument != INIT] + [_init(init)]
    for one in objects:
        if one.argument == INIT:
            taken["model"] = _section("model", taken.get("model")) | {"init": one.words}
    return taken, Given(tuple(objects), names)


def take_axes(over: Mapping[str, Iterable[object]], given: Given) -> tuple[dict[str, list[object]], Given]:
    """(the lists of values that keys take in turn, with words in the place of objects, all objects)."""
    axes, objects = dict[str, list[object]](), list(given.objects)
    for key, values in over.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ConfigError(f"over has {values!r} for {key}; it must be a list of values, as in [{values!r}].")
        axes[key], section = list(values), key.removesuffix(".name")
        for place, value in enumerate(axes[key]):
            if _is_name(value) or OBJECT_SECTIONS.get(section) != "name":
                continue
            if isinstance(value, nn.Module):
                raise ConfigError(
                    f"over varies {key} and holds a module ({type(value).__name__}), which brings weights of its own. "
                    "Give functions that make the modules."
                )
            plain = _packaged_method(value) if section == "algorithm" else None
            if plain is not None and type(_instance(value))() == _instance(value):
                axes[key][place] = plain["name"]
            else:
                objects += _TAKERS[section](value)
                axes[key][place] = objects[-1].words
    return axes, replace(given, objects=tuple(objects))


def _section(section: str, value: object) -> dict[str, object]:
    """What was passed in as a section of the config: by key, or the name alone, which may be data by part."""
    if isinstance(value, Mapping) and not (section in ("dataset", "public") and {"train", "target"} & {*value}):
        return dict(value)
    return {} if value is None else {OBJECT_SECTIONS[section]: value}


def _is_name(value: object) -> bool:
    """Whether a value is what a config can hold, or nothing; whether it is right is for the config to say."""
    return value is None or isinstance(value, str | int | float) or hasattr(value, "__fspath__")


def objects_in(*, init: object = None, **arguments: object) -> Given:
    """What was passed in, for a run that exists already."""
    return take_objects({key: value for key, value in arguments.items() if value is not None}, init)[1]


# -- data --------------------------------------------------------------------------------------------------------------


def _dataset(value: object, argument: str = "dataset") -> list[GivenObject]:
    values = values_in_memory(value, argument)
    first = value[0] if isinstance(value, tuple) and value else value
    arrays = isinstance(value, tuple) and (isinstance(first, list | Tensor) or hasattr(first, "__array__"))
    return [GivenObject(argument, "arrays" if arrays else _name_of(first), values_hash(values), values)]


def _name_of(value: object) -> str:
    """A word for an object: the name of a function or class, or else of its class."""
    named = value if inspect.isroutine(value) or isinstance(value, type) else type(value)
    return str(getattr(named, "__name__", type(named).__name__)).strip("<>")


# -- model and weights -------------------------------------------------------------------------------------------------


def _model(value: object) -> list[GivenObject]:
    """A module, copied, with its weights as the first ones; or what makes one, called under the run's seed."""
    if not isinstance(value, nn.Module):
        if not callable(value):
            raise ConfigError(
                f"model is a {type(value).__name__}; it must be a name, a torch.nn.Module, or a function that returns "
                "one."
            )
        return [GivenObject("model", _name_of(value), object_hash(value), value)]
    try:
        module = unwrapped(copy.deepcopy(value)).cpu().train()
    except CompatibilityError:
        raise
    except Exception as error:  # whatever copying a user's object may raise
        raise CompatibilityError(
            f"model cannot be copied ({type(error).__name__}: {error}), and it is never changed itself. Give a "
            "function that makes it."
        ) from error
    given = [GivenObject("model", _name_of(module), module_hash(module), module)]
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return given  # its weights are drawn when it sees an example
    return [replace(_init(module.state_dict()), implied=True), *given]


def _init(value: object) -> GivenObject:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"init is a {type(value).__name__}; it must be a state_dict: tensors by name.")
    try:
        weights = {name: torch.as_tensor(one).detach().cpu().clone() for name, one in value.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"init holds something that is no tensor ({error}). Give model.state_dict().") from error
    return GivenObject(INIT, "weights", tensors_hash(weights), weights)


def put_first_weights(module: nn.Module, weights: Tree, model: str) -> None:
    """Give a module the weights that were passed in, if they are exactly its own by name and shape.

    What a trained model scales its inputs by is left aside: the clients of this run tell their own.
    """
    weights = _without_wrappers(weights, module)
    if not hasattr(module, INPUT_SCALE):
        weights = _without_wrappers(_without_scale(weights), module)
    wanted = {name: tuple(one.shape) for name, one in module.state_dict().items()}
    found = {name: tuple(one.shape) for name, one in weights.items()}
    way = f"Give the state_dict of a module like model = {model}."
    if missing := [name for name in wanted if name not in found]:
        raise CompatibilityError(
            f"init has no {missing[0]}, which the model has with shape {list(wanted[missing[0]])}. {way}"
        )
    if unknown := [name for name in found if name not in wanted]:
        raise CompatibilityError(f"init has {unknown[0]}, which the model has not. {way}")
    if other := [name for name in wanted if wanted[name] != found[name]]:
        name = other[0]
        raise CompatibilityError(
            f"init has {name} with shape {list(found[name])}, and the model has it with {list(wanted[name])}. {way}"
        )
    module.load_state_dict(weights)


def _without_wrappers(weights: Tree, module: nn.Module) -> Tree:
    """The weights without the words that torch.compile's module and DataParallel put before all of their names."""
    for word in ("_orig_mod", "module"):
        inside = under(word, weights)
        if inside and len(inside) == len(weights) and not hasattr(module, word):
            return _without_wrappers(inside, module)
    return weights


def _without_scale(weights: Tree) -> Tree:
    """The weights of a trained model without its first layer, which scales inputs, by the names of the module."""
    if not under(INPUT_SCALE, weights):
        return weights
    rest = {name: one for name, one in weights.items() if not name.startswith(f"{INPUT_SCALE}.")}
    inside = under("model", rest)  # an exported model has the module under this name
    return inside if len(inside) == len(rest) else rest


# -- method ------------------------------------------------------------------------------------------------------------


def _packaged_method(value: object) -> dict[str, object] | None:
    """A method of the package as a config names it, with its options; None for any other object."""
    method = _instance(value)
    if isinstance(method, FNR):
        raise ConfigError(
            "algorithm is FNR, which wraps any method. Give the inner method, and fnr=dict(...) beside it."
        )
    for entry in registry.methods():
        if (entry.module, entry.class_name) == (type(method).__module__, type(method).__qualname__):
            options = values_of(method)
            return {"name": entry.name, **options} if type(method)(**options) == method else None
    return None


def _instance(value: object) -> Algorithm:
    if isinstance(value, type) and issubclass(value, Algorithm):
        value = value()
    if not isinstance(value, Algorithm):
        raise ConfigError(
            f"algorithm is a {type(value).__name__}; it must be a name, or a method that derives from "
            "fnrfl.core.algorithm.Algorithm."
        )
    return value


def _method(value: object) -> list[GivenObject]:
    method = _instance(value)
    fields = {name: repr(one) for name, one in vars(method).items()}
    return [GivenObject("algorithm", type(method).__name__, object_hash(method), method, {"fields": fields})]


_TAKERS: dict[str, Callable[[object], list[GivenObject]]] = {
    "dataset": _dataset,
    "model": _model,
    "algorithm": _method,
    "public": lambda value: _dataset(value, "public"),
}
