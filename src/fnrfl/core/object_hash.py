"""A hash of a Python object that another process finds too: functions by what they do, tensors by their content.

It says whether a run that goes on was given the same model or method as before. A function counts with its bytecode,
its defaults, what it closes over, and the functions, classes and plain values of its own module that it names. Code of
torch, of fnrfl and of Python counts by name.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import re
import sys
from argparse import Namespace
from array import array
from collections import UserList, UserString, deque
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from random import Random
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, SimpleNamespace
from uuid import UUID

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from fnrfl.core.fingerprint import content

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_BY_NAME = (torch.dtype, torch.device, torch.memory_format)
_BY_REPR = (
    *(PurePath, Decimal, Fraction, range, slice, bytearray, array, date, time, timedelta, tzinfo, UUID, np.dtype),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller),
)
_KNOWN_CODE = sys.stdlib_module_names | {"torch", "numpy", "fnrfl"}
_NOT_WRITTEN = {
    "__doc__",
    "__module__",
    "__dict__",
    "__weakref__",
    "__annotations__",
    "__annotate__",
    "__abstractmethods__",
}
_NOT_WRITTEN |= {"__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__", "_abc_impl"}
_SEEN_ELSEWHERE = {"training", "_parameters", "_buffers", "_modules"}


def object_hash(value: object) -> str:
    """The sha256 of what an object is."""
    return hashlib.sha256("\n".join(_told(value, {})).encode("utf-8", "surrogatepass")).hexdigest()


def module_hash(module: nn.Module) -> str:
    """The sha256 of what a module computes, whatever its weights: classes, settings, names and shapes."""
    return hashlib.sha256("\n".join(_told_module(module, {})).encode("utf-8", "surrogatepass")).hexdigest()


def tensors_hash(named: Mapping[str, Tensor]) -> str:
    """The sha256 of some tensors: names, types, shapes and numbers."""
    return hashlib.sha256(
        repr([(name, None if is_lazy(one) else content(one)) for name, one in sorted(named.items())]).encode()
    ).hexdigest()


def _told(value: object, seen: dict[int, object]) -> Iterator[str]:
    """What an object is, line by line; what was told before is told by its number."""
    if isinstance(value, (*_PLAIN, *_BY_NAME)):
        yield f"{type(value).__name__} {value!r}"
    elif id(value) in seen:
        yield f"again {list(seen).index(id(value))}"
    else:
        if not isinstance(value, tuple):  # whether equal tuples are one object is Python's choice
            seen[id(value)] = value  # kept, so that its id stays its own
        yield from _told_anew(value, seen)


def _told_anew(value: object, seen: dict[int, object]) -> Iterator[str]:
    match value:
        case Tensor():
            yield repr(content(value))
        case np.ndarray():
            yield from _told_array(value, seen)
        case tuple() | list():
            yield f"{type(value).__name__} of {len(value)}"
            yield from (line for one in value for line in _told(one, seen))
        case Mapping():
            yield f"{type(value).__name__} of {len(value)}"
            yield from (line for pair in value.items() for one in pair for line in _told(one, seen))
        case set() | frozenset():
            yield f"{type(value).__name__} of {sorted(map(repr, value))}"
        case nn.Module():
            yield from _told_module(value, seen)
            yield tensors_hash(dict(value.named_parameters()) | dict(value.named_buffers()))
        case _:
            yield from _told_code(value, seen)


def _told_array(array: np.ndarray, seen: dict[int, object]) -> Iterator[str]:
    yield f"array {array.dtype} {array.shape}"
    if array.dtype.hasobject:
        yield from _told(array.tolist(), seen)
    else:
        yield hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _told_code(value: object, seen: dict[int, object]) -> Iterator[str]:
    match value:
        case type():
            yield from _told_class(value, seen)
        case FunctionType():
            yield from _told_function(value, seen)
        case CodeType():
            yield f"code {value.co_name} {value.co_code.hex()} {value.co_names} {value.co_argcount} {value.co_flags}"
            yield from _told(value.co_consts, seen)
        case MethodType():
            yield from _told((value.__func__, value.__self__), seen)
        case classmethod() | staticmethod():
            yield from _told(value.__func__, seen)
        case property():
            yield from _told((value.fget, value.fset), seen)
        case functools.partial():
            yield from _told((value.func, value.args, value.keywords), seen)
        case BuiltinFunctionType():
            yield f"{value.__module__}.{value.__qualname__}"
        case RemovableHandle():
            yield "hook"
        case _:
            yield from _told_object(value, seen)


def _told_object(value: object, seen: dict[int, object]) -> Iterator[str]:
    yield from _told(type(value), seen)
    held = _held(value)
    if held is not None:
        yield from _told(held, seen)
    if _package(type(value)) not in sys.stdlib_module_names:  # a logger knows half the program
        attributes = _attributes(value)
        plain = held is None and not attributes and not hasattr(value, "__dict__")
        yield from _told(_reduced(value) if plain else attributes, seen)


def _held(value: object) -> object:
    """What an object of Python or numpy holds elsewhere than in its attributes; None for others."""
    match value:
        case np.generic():
            return str(value.dtype), value.tobytes()
        case deque():
            return value.maxlen, list(value)
        case re.Pattern():
            return value.pattern, value.flags
        case SimpleNamespace() | Namespace():
            return vars(value)
        case UserList() | UserString():
            return value.data
        case Random():
            return value.getstate()
        case Enum():
            return value.name
    if isinstance(value, _BY_REPR):
        return repr(value)
    return getattr(value, "__wrapped__", None) if _package(type(value)) == "functools" else None


def _attributes(value: object) -> dict[str, object]:
    """The attributes of an object, in its dictionary and in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            attribute = f"_{cls.__name__.lstrip('_')}{name}" if private else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, attribute):
                found[attribute] = getattr(value, attribute)
    return found


def _reduced(value: object) -> object:
    """What an object without attributes would be copied by; one that cannot be copied is equal to no other."""
    try:
        return value.__reduce_ex__(4)
    except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError):
        return {} if _package(type(value)) in _KNOWN_CODE else f"{id(value)} of {os.getpid()}"


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _told_class(cls: type, seen: dict[int, object]) -> Iterator[str]:
    yield f"class {cls.__qualname__}"
    if _package(cls) in _KNOWN_CODE:
        yield cls.__module__
        return
    yield from _told({name: one for name, one in sorted(vars(cls).items()) if name not in _NOT_WRITTEN}, seen)
    yield from _told(cls.__bases__, seen)


def _told_function(function: FunctionType, seen: dict[int, object]) -> Iterator[str]:
    if (function.__module__ or "").partition(".")[0] in _KNOWN_CODE:
        yield f"{function.__module__}.{function.__qualname__}"
        return
    yield from _told((function.__code__, function.__defaults__, function.__kwdefaults__), seen)
    for cell in function.__closure__ or ():
        try:
            yield from _told(cell.cell_contents, seen)
        except ValueError:  # nothing is in it yet
            yield "empty"
    for name in sorted(set(_names(function.__code__))):
        named = function.__globals__.get(name)
        if isinstance(named, _PLAIN) or getattr(named, "__module__", None) == function.__module__:
            yield name
            yield from _told(named, seen)


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes that a function uses, and those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _told_module(module: nn.Module, seen: dict[int, object]) -> Iterator[str]:
    seen |= {id(layer): layer for layer in module.modules()}  # a hook may be a method of a layer
    for name, layer in module.named_modules(remove_duplicate=False):
        yield name
        yield from _told(type(layer), seen)
        own = {key: one for key, one in sorted(vars(layer).items()) if key not in _SEEN_ELSEWHERE}
        own |= {key: list(own[key].values()) for key in own if "_hooks" in key}  # numbered by the process
        own |= {key: layer._buffers[key] for key in sorted(layer._non_persistent_buffers_set)}  # in no state_dict
        yield from _told(own, seen)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield f"{name} {_shape(parameter)} {parameter.requires_grad}"
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield f"{name} {_shape(buffer)}"


def _shape(tensor: Tensor) -> tuple[int, ...] | None:
    """A tensor's shape; None if that will be known when the module sees an example."""
    return None if is_lazy(tensor) else tuple(tensor.shape)
