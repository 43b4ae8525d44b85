"""Refuses what FNR would undo: differential privacy and secure aggregation, around FNR or inside it.

Both promise something about every number that leaves a client. FNR sends class norms, an accuracy and a second model
past them, so the promise would no longer be true, and nobody would notice.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator

from flwr.client import mod as older
from flwr.clientapp import mod as newer
from flwr.server.workflow import SecAggPlusWorkflow, SecAggWorkflow
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from fnrfl.core.errors import CompatibilityError

REFUSAL = "FNR cannot go together with"  # how the sentence begins: the server knows it again in a client's error

_CLASSES = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    SecAggPlusWorkflow,
    SecAggWorkflow,
    newer.LocalDpMod,
    older.LocalDpMod,
)
_FUNCTIONS = (
    newer.fixedclipping_mod,
    newer.adaptiveclipping_mod,
    older.fixedclipping_mod,
    older.adaptiveclipping_mod,
    older.secagg_mod,
    older.secaggplus_mod,
)


def refuse_strategy(strategy: object) -> None:
    """Refuse a strategy that is one of these, or has one inside."""
    for one in (strategy, *_attributes(strategy, set())):
        if isinstance(one, _CLASSES):
            raise _refusal(type(one).__name__)


def refuse_callers() -> None:
    """Refuse if one of these called the function that calls this: it is around FNR."""
    frame = sys._getframe(1)
    codes = {function.__code__: function.__name__ for function in _FUNCTIONS}
    while frame.f_back is not None:
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if isinstance(caller, _CLASSES):
            raise _refusal(type(caller).__name__)
        if frame.f_code in codes:
            raise _refusal(codes[frame.f_code])


def refuse_mods_inside(call_next: Callable[..., object]) -> None:
    """Refuse if one of these comes between FNR's mod and the app's function: Flower chains mods by closures."""
    for one in _enclosed(call_next, set()):
        if isinstance(one, _CLASSES):
            raise _refusal(type(one).__name__)
        if one in _FUNCTIONS:
            raise _refusal(one.__name__)


def _attributes(strategy: object, seen: set[int]) -> Iterator[object]:
    """The strategies that a strategy holds, at any depth."""
    for value in list(getattr(strategy, "__dict__", {}).values()):
        if isinstance(value, Strategy) and id(value) not in seen:
            seen.add(id(value))
            yield value
            yield from _attributes(value, seen)


def _enclosed(call: object, seen: set[int]) -> Iterator[Callable[..., object]]:
    """The callables that a function is a closure over, at any depth."""
    call = call.func if isinstance(call, functools.partial) else call
    for cell in getattr(call, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        value = value.func if isinstance(value, functools.partial) else value
        if callable(value) and id(value) not in seen:
            seen.add(id(value))
            yield value
            yield from _enclosed(value, seen)


def _refusal(name: str) -> CompatibilityError:
    return CompatibilityError(
        f"{REFUSAL} {name}: FNR's refinement sends class norms, an accuracy and a second model past it, so what it "
        "promises about privacy would not hold. Use one of the two."
    )
