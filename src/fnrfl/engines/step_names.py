"""Names of steps, the same in every process: what a step depends on, told as text where all of its code is known.

To record a step takes seconds. Steps with equal names have equal records, so that one that was compiled before is found
by its name alone. Code of fnrfl, of torch and of Python is known by its source or its version. Code of a user's own has
no name: it may use functions of other files, values that are read from somewhere, libraries; so it is recorded.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import sysconfig
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

import fnrfl
from fnrfl.core.fingerprint import Itself

log = logging.getLogger("fnrfl")
_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format}
_CONTAINERS = {tuple, list, torch.Size, dict, OrderedDict, set, frozenset}
_KNOWN = sys.stdlib_module_names | {"fnrfl", "torch"}
_PYTHON = Path(sysconfig.get_path("stdlib")).resolve()
_BEGAN = time.time()


class UnknownCode(Exception):
    """Something that has no name."""


def step_name(key: Hashable) -> str | None:
    """A name for everything that a step depends on; None if it has none."""
    sources = _sources_hash()
    if sources is None:
        log.debug("a step has no name: a file of fnrfl is newer than this process")
        return None
    try:
        told = _told(key)
    except UnknownCode as error:
        log.debug("a step has no name: %s is not of fnrfl or torch", error)
        return None
    return hashlib.sha256(f"{sources} {told}".encode("utf-8", "surrogatepass")).hexdigest()


@cache
def _sources_hash() -> str | None:
    """The hash of all source files of fnrfl; None if one is newer than this process, which may run an older one."""
    found, package = hashlib.sha256(), Path(fnrfl.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if path.stat().st_mtime > _BEGAN:
            return None
        source = path.read_bytes()
        found.update(f"{path.relative_to(package).as_posix()} {len(source)}\n".encode() + source)
    return found.hexdigest()


def _told(value: object) -> str:
    if type(value) in _PLAIN:
        return f"{type(value).__name__} {value!r}"
    if type(value) in _CONTAINERS:
        return _told_container(value)
    if isinstance(value, Itself):
        return _told(value.value)
    if isinstance(value, type):
        return _told_class(value)
    if isinstance(value, FunctionType):
        return _told_function(value)
    if is_dataclass(value):
        told = [f"{field.name}={_told(getattr(value, field.name))}" for field in fields(value)]
        return f"{_told_class(type(value))}({', '.join(told)})"
    raise UnknownCode(type(value).__qualname__)


def _told_container(value: Any) -> str:
    if isinstance(value, dict):
        told = [f"{_told(k)}: {_told(v)}" for k, v in value.items()]
    else:
        told = [_told(one) for one in value]
    if isinstance(value, set | frozenset):
        told.sort()
    return f"{type(value).__name__}({', '.join(told)})"


@cache
def _is_known(module: str) -> bool:
    """Whether a module is of fnrfl, of torch or of Python; a user's file may have the name of one of Python's."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    if package in ("fnrfl", "torch") or package not in _KNOWN or file is None:
        return package in _KNOWN
    return Path(file).resolve().is_relative_to(_PYTHON)


def _told_class(cls: type) -> str:
    """A class by its name and its bases, if all of their methods are written where the classes are known from."""
    for base in cls.__mro__:
        if "<" in base.__qualname__ or not _is_known(base.__module__):
            raise UnknownCode(base.__qualname__)
        for method in vars(base).values():
            _check_is_known(method)
    return " < ".join(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)


def _told_function(function: FunctionType) -> str:
    """A function by its place in a file; one that was made by another may hold anything."""
    _check_is_known(function)
    code = function.__code__
    if "<" in code.co_qualname or set(code.co_freevars) - {"__class__"}:  # which `super()` refers to
        raise UnknownCode(function.__qualname__)
    return f"{function.__globals__['__name__']}.{code.co_qualname}"


def _check_is_known(function: object) -> None:
    """Refuse a function of unknown code, also inside one of known code; decorators put their own names around it."""
    while isinstance(function, FunctionType):
        if not _is_known(str(function.__globals__.get("__name__"))):
            raise UnknownCode(function.__qualname__)
        function = getattr(function, "__wrapped__", None)
