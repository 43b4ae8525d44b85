"""What there is once in a process: torch's and numpy's settings, which a run puts aside, and locks.

Some settings belong to the whole process: the first run to enter sets them, the last one to leave puts back what was
there. Others belong to a thread, and every entry sets and puts back its own. Nothing here imports torch before it is
needed.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

TINY = 5e-324  # the smallest float there is: zero where denormal numbers are flushed

# Before Python 3.11.8 and 3.12.2 the parsers of all threads share one count of depth, and may fail beside each other
# (python/cpython, gh-106905).
parser_lock = threading.RLock()
# All threads share one list of warning filters: `warnings.catch_warnings` in two of them leaves changes behind.
filters_lock = threading.RLock()


@contextmanager
def isolated() -> Iterator[None]:
    """Put the caller's settings aside, so that nothing but the config decides, and put them back afterwards.

    Put aside for the process: the default dtype, deterministic mode, the precision of matrix products, oneDNN's and
    attention's switches, and warnings as errors. For the thread: gradient and inference mode, autocast, the default
    device, flushing of tiny numbers, numpy's way with errors, and the number of threads inside operators. That is one,
    since sums inside operators are split by it: results are then the same on any machine, and no pool of threads is
    left behind that a forked process would wait for.
    """
    import numpy as np
    import torch
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    with _entered(), ExitStack() as thread:
        threads = torch.get_num_threads()
        fresh = threads == 1 and _here.depth == 1 and _process.inside > 1  # a new thread begins with what was set last
        thread.enter_context(one_intra_op_thread(_process.threads if fresh else threads))
        thread.enter_context(torch.inference_mode(False))  # gradients are on too
        thread.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                thread.callback(torch.set_autocast_enabled, kind, True)
                torch.set_autocast_enabled(kind, False)
        modes = _get_current_function_mode_stack()
        if any(isinstance(mode, DeviceContext) for mode in modes):  # a default device, which sees every call of torch
            thread.callback(_set_function_modes, modes)
            _set_function_modes([mode for mode in modes if not isinstance(mode, DeviceContext)])
        if TINY == 0.0:
            thread.callback(torch.set_flush_denormal, True)
            torch.set_flush_denormal(False)
        yield


def as_worker() -> None:
    """Make a new thread, whose settings are all at their defaults, one that works for a run."""
    import torch

    torch.get_num_threads()  # a thread that has not called this yet takes the number later, whatever it has set by then
    torch.set_num_threads(1)


@contextmanager
def one_intra_op_thread(before: int | None = None) -> Iterator[None]:
    """Use one thread inside operators; `before` is the number to go back to."""
    import torch

    before = before or torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)


def until_left(setting: AbstractContextManager[object]) -> None:
    """Enter a context that is left with the outermost `isolated` of this thread; never, if there is none."""
    _here.found.enter_context(setting)


# -- the process -------------------------------------------------------------------------------------------------------


@cache
def settings() -> tuple[tuple[Any, Callable[[], Any], Callable[[Any], object]], ...]:
    """List settings of the whole process that a run puts aside: (the value that it needs, how to get and set it)."""
    import torch

    def matmul_precision() -> str:
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # set through a newer way, which is oneDNN's below
            return "highest"

    def onednn(part: Any) -> tuple[Any, ...]:  # "none" and "ieee" are exact
        get = lambda: str(part.fp32_precision).replace("none", "ieee")  # noqa: E731
        return "ieee", get, lambda value: setattr(part, "fp32_precision", value)

    cuda, mkldnn, c = torch.backends.cuda, torch.backends.mkldnn, torch._C
    parts: tuple[Any, ...] = (mkldnn.matmul, mkldnn.conv, mkldnn.rnn)  # type: ignore[attr-defined]
    rows: tuple[Any, ...] = (
        (torch.float32, torch.get_default_dtype, torch.set_default_dtype),
        (0, torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        *map(onednn, parts),
        ("highest", matmul_precision, torch.set_float32_matmul_precision),
        (True, c._get_mkldnn_enabled, c._set_mkldnn_enabled),
        (True, cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        (True, cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        (True, cuda.math_sdp_enabled, cuda.enable_math_sdp),
    )
    return rows


class _Process:
    """How many entries there are in this process, and how to put back what the first of them found."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # not filters_lock, which a run that records a step holds until it is compiled
        self.inside, self.threads, self.number = 0, 1, os.getpid()
        self.found = ExitStack()


class _Here(threading.local):
    """Entries of this thread, and what the outermost has to put back."""

    def __init__(self) -> None:
        self.depth, self.found = 0, ExitStack()


_process, _here = _Process(), _Here()


@contextmanager
def _entered() -> Iterator[None]:
    """Count an entry: the first of the process sets its settings, the last to leave puts back what there was."""
    import torch

    if _process.inside and _process.number != os.getpid():
        raise RuntimeError(
            "This process was forked while a run was under way, so fnrfl cannot run in it. Fork before or after the "
            'run, or start the process with multiprocessing.get_context("spawn").'
        )
    with _process.lock:
        if not _process.inside:
            _process.threads, _process.number = torch.get_num_threads(), os.getpid()
            with filters_lock:
                _set_all(_process.found)
        _process.inside += 1
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        if not _here.depth:
            _here.found.close()
        with _process.lock:
            _process.inside -= 1
            if not _process.inside:
                with filters_lock:
                    _process.found.close()


def _set_all(found: ExitStack) -> None:
    found.enter_context(warnings.catch_warnings())
    filters: Any = warnings.filters
    filters[:] = [("default" if action == "error" else action, *rest) for action, *rest in filters]
    warnings.simplefilter("default", append=True)  # what holds anyway; Python notices the change of the others
    for wanted, get, put in settings():
        if (now := get()) != wanted:
            found.callback(put, now)
            put(wanted)


def _set_function_modes(modes: list[Any]) -> None:
    from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
