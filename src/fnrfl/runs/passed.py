"""Objects that are passed to a run in Python: data, a model, a method, first weights.

They travel beside the config. The config has a label in the place of each: what it is, and how its hash begins. So two
configs are equal exactly when the same objects were passed, and a run that is resumed needs the same ones again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fnrfl.algorithms.fnr import FNR
from fnrfl.config import RunConfig, loads, registry
from fnrfl.config.typed import PassedLabel
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.modules import unwrapped
from fnrfl.core.object_hash import module_hash, object_hash, tensors_hash
from fnrfl.core.options import values_of, written
from fnrfl.data.objects import read_object, values_hash
from fnrfl.process import isolated

# The sections that may be passed as an object, and the key that has its label.
OBJECT_SECTIONS = {"dataset": "name", "model": "name", "algorithm": "name", "public": "source"}
INIT = "init"  # the argument of first weights
_NOUNS = {"dataset": "data", "model": "model", "algorithm": "method", "public": "public data", INIT: "first weights"}


@dataclass(frozen=True, eq=False)
class PassedObject:
    """An object, under the argument that it was passed as."""

    argument: str
    what: str  # in a word
    sha256: str
    value: Any
    log: dict[str, Any] = field(default_factory=dict)  # what else the run's log says of it
    implied: bool = False  # nobody passed it by itself: the weights of a module

    @property
    def label(self) -> PassedLabel:
        """What the config has in its place."""
        return PassedLabel.of(self.what, self.sha256)


@dataclass(frozen=True, eq=False)
class PassedObjects:
    """All objects that were passed to a run."""

    objects: tuple[PassedObject, ...] = ()
    named: Mapping[str, object] = field(default_factory=dict)  # sections that were passed as names

    def find(self, argument: str, value: str) -> Any:
        """Return the object that a value of the config is the label of; None if the value is a name.

        Raise if that object was not passed, or another one.
        """
        if not isinstance(value, PassedLabel):
            return None
        passed = [one for one in self.objects if one.argument == argument]
        for one in passed:
            if one.sha256.startswith(value.digits):
                return one.value
        if not passed:
            raise ConfigError(
                f'"{value}" is no name: the run was given its {_NOUNS[argument]} in Python, and a config cannot hold '
                f"that. Use fnrfl.run, resume, load, evaluate or predict in Python, with {argument}=."
            )
        caveat = " Functions count by their bytecode, which another version of Python may write in another way."
        raise ConfigError(
            f"{argument} is not what the run was begun with: that was {value}, and this is {passed[0].label}. Give the "
            f"same again, or run again into another directory.{caveat if argument in ('model', 'algorithm') else ''}"
        )

    def used_by(self, config: RunConfig) -> PassedObjects:
        """Return the objects that a config has labels of."""
        labels = labels_in(config).values()
        return replace(self, objects=tuple(one for one in self.objects if one.label in labels))

    def as_json(self, config: RunConfig) -> dict[str, Any]:
        """Return what the log of a run says about its objects."""
        used = self.used_by(config).objects
        return {one.argument: {"what": one.what, "sha256": one.sha256} | one.log for one in used}

    def heading(self, config: RunConfig) -> str:
        """Return the first line of a config.toml that cannot run by itself; "" if it can."""
        listed = ", ".join(f"{one.argument}=..." for one in self.used_by(config).objects if not one.implied)
        told = f"# Part of it was given in Python, so this file alone cannot run. To go on: fnrfl.resume(..., {listed})"
        return f"{told}\n" if labels_in(config) else ""

    def check_resumed(self, run_dir: Path, config: RunConfig) -> None:
        """Raise if objects or names differ from those that the run was started with."""
        labels, text = labels_in(config), config.to_toml()
        again = {key: loads(text, {key: name}, trust=True).sha256 for key, name in self.named.items()}
        others = [key for key, sha256 in again.items() if sha256 != config.sha256]
        others += [one.argument for one in self.objects if one.argument not in labels and not one.implied]
        for one in self.objects:
            if one.argument in labels and one.argument != INIT:
                self.find(one.argument, labels[one.argument])
        if others:
            raise ConfigError(
                f"{run_dir} was begun with another {others[0]}, which its config.toml names. Leave {others[0]}= out, "
                "or run again into another directory."
            )


NOTHING_PASSED = PassedObjects()


def labels_in(config: RunConfig) -> dict[str, PassedLabel]:
    """Return the labels of a config by the argument that each object was passed as."""
    values = {section: getattr(getattr(config, section), key) for section, key in OBJECT_SECTIONS.items()}
    values[INIT] = config.model.init
    return {argument: value for argument, value in values.items() if isinstance(value, PassedLabel)}


@isolated()
def split_arguments(keys: Mapping[str, object], init: object = None) -> tuple[dict[str, object], PassedObjects]:
    """Return the keys with labels in the place of objects, and the objects."""
    words, objects, named = dict(keys), list[PassedObject](), dict[str, object]()
    for section, key in OBJECT_SECTIONS.items():
        values = _section(section, keys.get(section))
        value = values.get(key)
        if section == "algorithm" and not _is_name(value) and (packaged := _packaged_method(value)):
            if twice := sorted(values.keys() & packaged.keys() - {"name"}):
                raise ConfigError(f"algorithm.{twice[0]} is given twice: by the method itself and beside it. Give one.")
            values |= packaged
        elif not _is_name(value):
            objects += _READERS[section](value, section)
            words[section] = values | {key: objects[-1].label}
            continue
        if values:
            words[section] = named[section] = values
    if init is not None:
        objects = [one for one in objects if one.argument != INIT] + [_weights(init)]
    for one in objects:
        if one.argument == INIT:
            words["model"] = _section("model", words.get("model")) | {"init": one.label}
    return words, PassedObjects(tuple(objects), named)


def split_axes(
    over: Mapping[str, Iterable[object]], passed: PassedObjects
) -> tuple[dict[str, list[object]], PassedObjects]:
    """Return the values of each varied key with labels in the place of objects, and all objects."""
    axes, objects = dict[str, list[object]](), list(passed.objects)
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
            if plain is not None:
                name, options = str(plain.pop("name")), values_of(type(_method(value))())
                axes[key][place] = written(name, {k: v for k, v in plain.items() if v != options[k]})
            else:
                objects += _READERS[section](value, section)
                axes[key][place] = objects[-1].label
    return axes, replace(passed, objects=tuple(objects))


def objects_for_run(*, init: object = None, **arguments: object) -> PassedObjects:
    """Return what was passed for a run that exists already."""
    return split_arguments({key: value for key, value in arguments.items() if value is not None}, init)[1]


def _section(section: str, value: object) -> dict[str, object]:
    """Return the values of a section by key: a dict is one already, unless it is data by part."""
    if isinstance(value, Mapping) and not (section in ("dataset", "public") and {"train", "target"} & {*value}):
        return dict(value)
    return {} if value is None else {OBJECT_SECTIONS[section]: value}


def _is_name(value: object) -> bool:
    """Return whether a config can hold a value; whether it is right is checked there."""
    return value is None or isinstance(value, str | int | float) or hasattr(value, "__fspath__")


def _name_of(value: object) -> str:
    """Return the name of a function or class, or else of an object's class."""
    named = value if inspect.isroutine(value) or isinstance(value, type) else type(value)
    return str(getattr(named, "__name__", type(named).__name__)).strip("<>")


# -- what each argument may be -----------------------------------------------------------------------------------------


def _data(value: object, argument: str) -> list[PassedObject]:
    values = read_object(value, argument)
    first = value[0] if isinstance(value, tuple) and value else value
    arrays = isinstance(value, tuple) and (isinstance(first, list | Tensor) or hasattr(first, "__array__"))
    return [PassedObject(argument, "arrays" if arrays else _name_of(first), values_hash(values), values)]


def _model(value: object, argument: str) -> list[PassedObject]:
    """Copy a module, with its weights as the first ones; a function that makes one is called under the run's seed."""
    if not isinstance(value, nn.Module):
        if not callable(value):
            raise ConfigError(
                f"model is a {type(value).__name__}; it must be a name, a torch.nn.Module, or a function that returns "
                "one."
            )
        return [PassedObject(argument, _name_of(value), object_hash(value), value)]
    try:
        copied = copy.deepcopy(value)
    except Exception as error:  # whatever copying a user's object may raise
        raise CompatibilityError(
            f"model cannot be copied ({type(error).__name__}: {error}), and it is never changed itself. Give a "
            "function that makes it."
        ) from error
    module = unwrapped(copied).cpu().train()
    found = [PassedObject(argument, _name_of(module), module_hash(module), module)]
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return found  # its weights are drawn when it sees an example
    return [replace(_weights(module.state_dict()), implied=True), *found]


def _weights(value: object) -> PassedObject:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"init is a {type(value).__name__}; it must be a state_dict: tensors by name.")
    try:
        weights = {name: torch.as_tensor(one).detach().cpu().clone() for name, one in value.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"init holds something that is no tensor ({error}). Give model.state_dict().") from error
    return PassedObject(INIT, "weights", tensors_hash(weights), weights)


def _method(value: object) -> Algorithm:
    if isinstance(value, type) and issubclass(value, Algorithm):
        value = value()
    if not isinstance(value, Algorithm):
        raise ConfigError(
            f"algorithm is a {type(value).__name__}; it must be a name, or a method that derives from "
            "fnrfl.core.algorithm.Algorithm."
        )
    return value


def _packaged_method(value: object) -> dict[str, object] | None:
    """Return a method of the package as a config names it, with its options; None for any other object."""
    method = _method(value)
    if isinstance(method, FNR):
        raise ConfigError(
            "algorithm is FNR, which wraps any method. Give the inner method, and fnr=dict(...) beside it."
        )
    for entry in registry.methods():
        if (entry.module, entry.class_name) == (type(method).__module__, type(method).__qualname__):
            options = values_of(method)
            return {"name": entry.name, **options} if type(method)(**options) == method else None
    return None


def _own_method(value: object, argument: str) -> list[PassedObject]:
    method = _method(value)
    fields = {name: repr(one) for name, one in vars(method).items()}
    return [PassedObject(argument, type(method).__name__, object_hash(method), method, {"fields": fields})]


_READERS = {"dataset": _data, "public": _data, "model": _model, "algorithm": _own_method}
