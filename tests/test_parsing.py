"""Threads that parse, and threads that change the filters of warnings, beside each other."""

from __future__ import annotations

import ast
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fnrfl.core.forks import filters_lock
from fnrfl.core.isolation import isolated
from fnrfl.core.ndarrays import read_arrays
from fnrfl.core.parsing import ATTEMPTS, parsed

NESTED = "[" * 20 + "0" + "]" * 20


@pytest.fixture
def threads_change_places() -> Iterator[None]:
    """Python switches threads wherever it can: at collections too, which happen all the time."""
    switch, threshold = sys.getswitchinterval(), gc.get_threshold()
    call: Callable[[str, dict[str, int]], None] = lambda phase, info: [None for _ in range(30)] and None  # noqa: E731
    gc.callbacks.append(call)
    sys.setswitchinterval(1e-6)
    gc.set_threshold(5, 1000, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        sys.setswitchinterval(switch)
        gc.callbacks.remove(call)


def deeper(levels: int, do: Callable[[], object]) -> object:
    """Do it so many calls down: threads at one depth have equal counts and would not notice each other."""
    return do() if levels == 0 else deeper(levels - 1, do)


@pytest.mark.usefixtures("threads_change_places")
def test_threads_parse_and_read_arrays_beside_each_other(tmp_path: Path) -> None:
    stored = {f"x{number}": np.arange(number) for number in range(5)}
    np.savez(tmp_path / "arrays.npz", **stored)  # type: ignore[arg-type]

    def work(levels: int) -> None:
        for _ in range(20):
            assert ast.dump(parsed(lambda: ast.parse(NESTED))).count("List(") == 20
            for name, array in read_arrays(tmp_path / "arrays.npz").items():
                np.testing.assert_array_equal(array, stored[name])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda levels: deeper(levels, lambda: work(levels)), range(4)))


@pytest.mark.usefixtures("threads_change_places")
def test_a_thread_of_somebody_else_that_parses_makes_nothing_fail() -> None:
    stop = threading.Event()

    def foreign() -> None:
        while not stop.is_set():
            with suppress(SystemError):  # what `parsed` is for
                ast.parse(NESTED)

    other = threading.Thread(target=foreign)
    other.start()
    try:
        for levels in range(60):
            deeper(levels % 5, lambda: parsed(lambda: ast.parse(NESTED)))
    finally:
        stop.set()
        other.join()


def test_an_error_that_never_ends_and_errors_of_another_kind_are_raised() -> None:
    calls: list[int] = []

    def fail(sentence: str) -> None:
        calls.append(1)
        raise SystemError(sentence)

    with pytest.raises(SystemError, match="mismatch"):
        parsed(lambda: fail("AST constructor recursion depth mismatch (before=69, after=65)"))
    assert len(calls) == ATTEMPTS
    with pytest.raises(SystemError, match="something else"):
        parsed(lambda: fail("something else"))
    assert len(calls) == ATTEMPTS + 1


def isolated_thread() -> tuple[threading.Thread, threading.Event, threading.Event]:
    """A thread that is inside of `isolated` from the first event until the second."""
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with isolated():
            inside.set()
            leave.wait(10)

    return threading.Thread(target=stay), inside, leave


def test_filters_of_warnings_are_as_before_whatever_threads_did_in_turns() -> None:
    before, (other, inside, leave) = list(warnings.filters), isolated_thread()
    with filters_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.start()
        assert not inside.wait(0.3)
    assert inside.wait(10)
    leave.set()
    other.join()
    assert list(warnings.filters) == before


def test_beside_a_run_nobody_waits_for_the_filters_of_warnings() -> None:
    """A run that records a step holds them for as long as a compiler takes, and others come and go meanwhile."""
    passed = threading.Event()

    def come_and_go() -> None:
        with isolated():
            passed.set()

    other = threading.Thread(target=come_and_go)
    with isolated(), filters_lock:
        other.start()
        assert passed.wait(10)
        other.join(10)
        assert not other.is_alive()


def test_the_last_run_to_end_waits_until_filters_of_warnings_are_put_back() -> None:
    before, (other, inside, leave) = list(warnings.filters), isolated_thread()
    other.start()
    assert inside.wait(10)
    with filters_lock, warnings.catch_warnings():
        leave.set()
        other.join(0.3)
        assert other.is_alive()
    other.join(10)
    assert list(warnings.filters) == before


def test_whoever_changes_the_filters_of_warnings_holds_their_lock() -> None:
    source = Path(__file__).parents[1] / "src" / "fnrfl"
    lines = [line for path in source.rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines()]
    changes = [line.strip() for line in lines if "with" in line and "catch_warnings(" in line]
    alone = [line for line in changes if "filters_lock" not in line]
    assert len(changes) > 3
    assert alone == ["with warnings.catch_warnings():"]  # of `isolated`, whose first entry and last leaving hold it
