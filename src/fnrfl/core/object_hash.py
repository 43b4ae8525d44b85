"""A hash of a Python object that another process finds too: functions by what they do, tensors by their content.

It says whether a run that is resumed was given the same objects as before. A function counts with its bytecode, its
defaults, what it closes over, and what it names in its own module. Code of torch, of fnrfl and of Python counts by
name. An object that cannot be copied is equal to no other.
"""

from __future__ import annotations

import copyreg
import hashlib
import sys
import uuid
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from fnrfl.core.fingerprint import content

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.memory_format)
_KNOWN_CODE = sys.stdlib_module_names | {"torch", "numpy", "fnrfl"}
_WRITTEN_BY_PYTHON = {"__doc__", "__module__", "__dict__", "__weakref__", "__abstractmethods__", "_abc_impl"}
_WRITTEN_BY_PYTHON |= {"__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"}
_WRITTEN_BY_PYTHON |= {"__firstlineno__", "__static_attributes__"}
_HASHED_APART = {"training", "_parameters", "_buffers", "_modules"}


def object_hash(value: object) -> str:
    """Return the sha256 of what an object is."""
    return hashlib.sha256("\n".join(_lines(value, {})).encode("utf-8", "surrogatepass")).hexdigest()


def module_hash(module: nn.Module) -> str:
    """Return the sha256 of what a module computes, whatever its weights: classes, settings, names and shapes."""
    return hashlib.sha256("\n".join(_lines_of_module(module, {})).encode("utf-8", "surrogatepass")).hexdigest()


def tensors_hash(named: Mapping[str, Tensor]) -> str:
    """Return the sha256 of some tensors: names, types, shapes and numbers."""
    found = [(name, None if is_lazy(one) else content(one)) for name, one in sorted(named.items())]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _lines(value: object, seen: dict[int, object]) -> Iterator[str]:
    """Yield a canonical text for `value`; repeated objects become back references."""
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
    elif id(value) in seen:
        yield f"again {list(seen).index(id(value))}"
    else:
        if not isinstance(value, tuple):  # whether equal tuples are one object is Python's choice
            seen[id(value)] = value  # kept, so that its id stays its own
        yield from _lines_of_new(value, seen)


def _lines_of_new(value: object, seen: dict[int, object]) -> Iterator[str]:
    match value:
        case Tensor():
            yield repr(content(value))
        case np.ndarray():
            yield f"array {value.dtype} {value.shape}"
            if value.dtype.hasobject:
                yield from _lines(value.tolist(), seen)
            else:
                yield hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        case tuple() | list() | Mapping():
            parts = (one for pair in value.items() for one in pair) if isinstance(value, Mapping) else value
            yield f"{type(value).__name__} of {len(value)}"
            for part in parts:
                yield from _lines(part, seen)
        case set() | frozenset():
            yield f"{type(value).__name__} of {sorted(map(repr, value))}"
        case nn.Module():
            yield from _lines_of_module(value, seen)
            yield tensors_hash(dict(value.named_parameters()) | dict(value.named_buffers()))
        case type() | FunctionType() | BuiltinFunctionType() if (value.__module__ or "").split(".")[0] in _KNOWN_CODE:
            yield f"{value.__module__}.{value.__qualname__}"
        case _:
            yield from _lines(_parts(value), seen)


def _parts(value: object) -> tuple[object, ...]:
    """Return what a class, a function or an object is made of."""
    match value:
        case CodeType():
            return value.co_name, value.co_code, value.co_names, value.co_argcount, value.co_flags, value.co_consts
        case RemovableHandle():  # numbered by the process
            return ("hook",)
        case type():
            own = {name: one for name, one in sorted(vars(value).items()) if name not in _WRITTEN_BY_PYTHON}
            slots = {name for name, one in own.items() if type(one).__name__ == "member_descriptor"}
            return value.__qualname__, {name: one for name, one in own.items() if name not in slots}, value.__bases__
        case FunctionType():
            return _parts_of_function(value)
        case classmethod() | staticmethod():
            return (value.__func__,)
        case property():
            return value.fget, value.fset
    return (value.__wrapped__,) if hasattr(value, "__wrapped__") else _parts_of_copy(value)


def _parts_of_copy(value: object) -> tuple[object, ...]:
    """Return what a copy of an object would be made from; of one that cannot be copied, something unique."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # whatever a user's class raises
        return (uuid.uuid4().hex,)
    if isinstance(reduced, str):  # a global name
        return type(value), reduced
    make, given, state, *items = (*reduced, None, None, None)[:5]
    made_by = "new" if make is copyreg.__newobj__ else make  # type: ignore[attr-defined]
    return made_by, given, state, *([*one] for one in items if one is not None)


def _parts_of_function(function: FunctionType) -> tuple[object, ...]:
    names, codes = set[str](), [function.__code__]
    for code in codes:  # and those of the functions inside, which are added meanwhile
        names |= {*code.co_names}
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    used = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    of_module = {
        name: one
        for name, one in used.items()
        if isinstance(one, _PLAIN) or getattr(one, "__module__", None) == function.__module__
    }
    closed = [cell.cell_contents for cell in function.__closure__ or () if cell != type(cell)()]
    return function.__code__, function.__defaults__, function.__kwdefaults__, closed, of_module


def _lines_of_module(module: nn.Module, seen: dict[int, object]) -> Iterator[str]:
    seen |= {id(layer): layer for layer in module.modules()}  # a hook may be a method of a layer
    for name, layer in module.named_modules(remove_duplicate=False):
        own = {key: one for key, one in sorted(vars(layer).items()) if key not in _HASHED_APART}
        own |= {key: list(own[key].values()) for key in own if "_hooks" in key}  # numbered by the process
        own |= {key: layer._buffers[key] for key in sorted(layer._non_persistent_buffers_set)}  # in no state_dict
        yield name
        yield from _lines((type(layer), own), seen)
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        yield f"{name} {None if is_lazy(tensor) else tuple(tensor.shape)} {tensor.requires_grad}"
