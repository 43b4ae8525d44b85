"""Ray actors that all toy runs share, since starting some takes seconds: each run tells them anew what it is."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from fnrfl.core.options import NetworkOptions
from fnrfl.engines.ray.actors import RayActors
from fnrfl.engines.trainer import Trainer
from fnrfl.engines.wire import from_bytes

ACTORS = 2


def toy_trainer(plain: bytes) -> Trainer:
    """The trainer of a toy run: what an actor makes."""
    from toys import run_elsewhere

    return run_elsewhere(from_bytes(plain)).engine.server


class ToyActors(RayActors):
    """The actors of a toy run, which takes them over from the run before; they end with the process, or by `close`."""

    last: ToyActors | None = None  # whoever has the actors

    def __init__(self, described: Callable[[], bytes]) -> None:
        pytest.importorskip("ray")
        super().__init__(ACTORS, NetworkOptions(), toy_trainer, described)

    def put(self, message: Any) -> object:
        self._take_over()
        return super().put(message)

    def ask(self, *args: Any) -> Iterator[tuple[slice, Any]]:
        self._take_over()
        return super().ask(*args)

    def _take_over(self) -> None:
        last, ToyActors.last = ToyActors.last, self
        if last is None:
            os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Ray's processes find this module
            self._ray, self._open, self._idle, self._starting = None, ExitStack(), [], {}  # others may have closed them
            self.__enter__()
        elif last is not self:
            self._ray, self._open = last._ray, last._open
            self._prepare([*last._idle])


@atexit.register
def close() -> None:
    """Leave no process and no folder, and room for the actors of others."""
    last, ToyActors.last = ToyActors.last, None
    if last is not None:
        last.close()
