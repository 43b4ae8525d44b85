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
from dataclasses import dataclass
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
        thread.enter_context(one_intra_op_thread(_threads_of_caller()))
        thread.enter_context(torch.inference_mode(False))  # gradients are on too
        thread.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                thread.callback(torch.set_autocast_enabled, kind, True)
                torch.set_autocast_enabled(kind, False)
        if any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
            thread.enter_context(torch.device("cpu"))  # inside of the caller's default device
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


@dataclass(frozen=True)
class Setting:
    """A setting of the whole process, and the value that a run needs."""

    wanted: Any
    get: Callable[[], Any]
    set: Callable[[Any], object]


@cache
def settings() -> tuple[Setting, ...]:
    """Return the settings of the whole process that a run puts aside."""
    import torch

    def matmul_precision() -> str:
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # set through a newer way, which is oneDNN's below
            return "highest"

    def onednn(part: Any) -> Setting:  # "none" and "ieee" are exact
        get = lambda: str(part.fp32_precision).replace("none", "ieee")  # noqa: E731
        return Setting("ieee", get, lambda value: setattr(part, "fp32_precision", value))

    cuda, mkldnn = torch.backends.cuda, torch.backends.mkldnn
    parts: tuple[Any, ...] = (mkldnn.matmul, mkldnn.conv, mkldnn.rnn)  # type: ignore[attr-defined]
    return (
        Setting(torch.float32, torch.get_default_dtype, torch.set_default_dtype),
        Setting(0, torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        *map(onednn, parts),
        Setting("highest", matmul_precision, torch.set_float32_matmul_precision),
        Setting(True, torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
        Setting(True, cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        Setting(True, cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        Setting(True, cuda.math_sdp_enabled, cuda.enable_math_sdp),
    )


class _Process:
    """How many entries there are in this process, and how to put back what the first of them found."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # not filters_lock, which a run that records a step holds until it is compiled
        self.inside, self.threads, self.forked_inside = 0, 1, False
        self.found = ExitStack()

    def forked(self) -> None:
        self.forked_inside = self.forked_inside or self.inside > 0


class _Here(threading.local):
    """Entries of this thread, and what the outermost has to put back."""

    def __init__(self) -> None:
        self.depth, self.found = 0, ExitStack()


_process, _here = _Process(), _Here()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: _process.forked())


@contextmanager
def _entered() -> Iterator[None]:
    """Count an entry: the first of the process sets its settings, the last to leave puts back what there was."""
    import torch

    if _process.forked_inside:
        raise RuntimeError(
            "This process was forked while a run was under way, so fnrfl cannot run in it. Fork before or after the "
            'run, or start the process with multiprocessing.get_context("spawn").'
        )
    with _process.lock:
        if not _process.inside:
            _process.threads = torch.get_num_threads()
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
    for setting in settings():
        if (now := setting.get()) != setting.wanted:
            found.callback(setting.set, now)
            setting.set(setting.wanted)


def _threads_of_caller() -> int:
    """Return the caller's `torch.get_num_threads()`, not the 1 that another run has set."""
    import torch

    now = torch.get_num_threads()
    fresh = now == 1 and _here.depth == 1 and _process.inside > 1  # a new thread begins with what was set last
    return _process.threads if fresh else now
