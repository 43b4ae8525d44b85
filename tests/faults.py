"""Faults to put into a run's way: a process that dies in any operation on files, and what is on disk afterwards."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fnrfl.rundir import events, files


class Crash(BaseException):
    """The process dies: nobody catches this."""


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files, their bytes and their times."""
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


@contextmanager
def crashing(operations: int) -> Iterator[None]:
    """After this many operations on files the process dies in the next one, and what it was writing is half there.

    The dead write nothing more: clean-up that would follow an exception finds every operation closed.
    """
    left = itertools.count(operations, -1)

    def dying(operation: Callable[..., Any], half: Callable[..., object] = lambda *_: None) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            turn = next(left)
            if turn == 0:
                half(*args)
            if turn <= 0:
                raise Crash
            return operation(*args, **options)

        return wrapped

    def half_content(path: Path, content: str | bytes) -> None:
        whole = content.encode() if isinstance(content, str) else content
        path.write_bytes(whole[: len(whole) // 2])

    def half_line(path: Path, event: dict[str, Any]) -> None:
        with path.open("a") as log:
            log.write(json.dumps(event)[:20])

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir"):
            patch.setattr(Path, name, dying(getattr(Path, name)))
        patch.setattr(files, "write_new", dying(files.write_new, half_content))
        patch.setattr(files, "sync", dying(files.sync))
        patch.setattr(events, "append_event", dying(events.append_event, half_line))
        yield
