"""Refuses what FNR would undo: differential privacy and secure aggregation, around FNR or inside it.

Both promise something about every number that leaves a client. FNR sends class norms, an accuracy and a second model
past them, so the promise would no longer be true, and nobody would notice.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import CellType, FrameType

from flwr.serverapp.strategy import Strategy

from fnrfl.core.errors import CompatibilityError

REFUSAL = "FNR cannot go together with"  # how the sentence begins: the server knows it again in a client's error
_PRIVATE = re.compile(  # classes and functions of Flower
    "DifferentialPrivacy.*Clipping|SecAgg(Plus)?Workflow|LocalDpMod|(fixed|adaptive)clipping_mod|secagg(plus)?_mod"
)


def refuse_callers() -> None:
    """Refuse if one of these called the function that calls this: it is around FNR."""
    frame: FrameType | None = sys._getframe(1)
    while frame := frame and frame.f_back:
        _refuse(frame.f_locals.get("self"), frame.f_code.co_name)


def refuse_inside(outer: object) -> None:
    """Refuse a strategy, or the rest of a chain of mods, that is one of these or has one inside."""
    for one in _parts(outer, set()):
        _refuse(one, str(getattr(one, "__name__", "")))


def _parts(one: object, seen: set[int]) -> Iterator[object]:
    """An object, and at any depth what it holds: Flower's wrappers are attributes, and its mods closures."""
    if id(one) in seen or not (callable(one) or isinstance(one, Strategy)):
        return
    seen.add(id(one))
    yield one
    cells = getattr(one, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells if cell != CellType()]  # an empty cell has no contents
    held += vars(one).values() if isinstance(one, Strategy) else [getattr(one, "func", None)]  # of a partial
    for part in held:
        yield from _parts(part, seen)


def _refuse(one: object, name: str) -> None:
    for known in filter(_PRIVATE.fullmatch, (name, *(cls.__name__ for cls in type(one).__mro__))):
        raise CompatibilityError(
            f"{REFUSAL} {known}: FNR's refinement sends class norms, an accuracy and a second model past it, so what "
            "it promises about privacy would not hold. Use one of the two."
        )
