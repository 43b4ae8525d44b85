"""What a run must not share with the program around it: torch's and numpy's settings, and those of other runs.

Some settings belong to the whole process: the first run to come in sets them, the last one to leave puts back what was
there. Others belong to a thread, and every entry sets and puts back its own.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from fnrfl.core.forks import filters_lock, process_lock

TINY = 5e-324  # the smallest float there is: zero where such numbers are flushed


@contextmanager
def isolated() -> Iterator[None]:
    """Inside, nothing but the config decides: the caller's settings are put aside, and are as before afterwards.

    Put aside for the process: the default dtype, deterministic mode, the precision of matrix products, oneDNN's and
    attention's switches, and warnings as errors. For the thread: gradient and inference mode, autocast, the default
    device, flushing of tiny numbers, numpy's way with errors, and the number of threads inside operators. That is one,
    since sums inside operators are split by it: results are then the same on any machine, and no pool of threads is
    left behind that a forked process would wait for.
    """
    with _process(), ExitStack() as thread:
        thread.enter_context(one_intra_op_thread(_threads()))
        thread.enter_context(torch.inference_mode(False))  # gradients are on too
        thread.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        thread.enter_context(_no_autocast())
        thread.enter_context(_no_default_device())
        thread.enter_context(_tiny_numbers())
        yield


def as_worker() -> None:
    """Make a new thread, whose settings are all at their defaults, one that works for a run."""
    torch.get_num_threads()  # a thread that has not asked yet takes the number later, whatever it has set by then
    torch.set_num_threads(1)


# -- the process -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Something that is one for the whole process, and what it must be inside."""

    wanted: Any
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _precisions() -> tuple[str, ...]:
    """How exactly oneDNN computes in float32: "none" and "ieee" are exact."""
    return tuple(str(part.fp32_precision) for part in _onednn())


def _set_precisions(values: tuple[str, ...]) -> None:
    for part, value in zip(_onednn(), values, strict=True):
        part.fp32_precision = value


def _onednn() -> tuple[Any, ...]:
    onednn: Any = torch.backends.mkldnn
    return onednn.matmul, onednn.conv, onednn.rnn


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set through a newer way, which `_precisions` sees
        return "highest"


SETTINGS = (
    Setting(torch.float32, torch.get_default_dtype, torch.set_default_dtype),
    Setting(0, torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    Setting("highest", _matmul_precision, torch.set_float32_matmul_precision),
    Setting(True, torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    Setting(True, torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    Setting(True, torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    Setting(True, torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
)


class _Process:
    """How many entries there are in this process, and how to put back what the first of them found."""

    def __init__(self) -> None:
        self.lock = process_lock()  # not that of filters, which a run that records a step holds until it is compiled
        self.inside = 0
        self.threads = 1  # inside operators, as the first found them
        self.found = ExitStack()

    def enter(self) -> None:
        with self.lock:
            if not self.inside:
                self.threads = torch.get_num_threads()
                with filters_lock:
                    self._set()
            self.inside += 1

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                with filters_lock:
                    self.found.close()

    def _set(self) -> None:
        self.found.enter_context(_no_warning_is_an_error())
        if {*(before := _precisions())} - {"none", "ieee"}:
            self.found.callback(_set_precisions, before)
            _set_precisions(("ieee",) * len(before))
        for setting in SETTINGS:
            if (now := setting.get()) != setting.wanted:
                self.found.callback(setting.set, now)
                setting.set(setting.wanted)

    def forked(self) -> None:
        """In a child process only the thread that forked is left."""
        self.inside = _here.depth
        if not self.inside:
            self.found.close()


class _Here(threading.local):
    """Entries of this thread, and what the outermost has to put back."""

    def __init__(self) -> None:
        self.depth = 0
        self.found = ExitStack()


def until_left(setting: AbstractContextManager[object]) -> None:
    """Enter something that is left with the outermost `isolated` of this thread; never, if there is none."""
    _here.found.enter_context(setting)


_one, _here = _Process(), _Here()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: _one.forked())


@contextmanager
def _process() -> Iterator[None]:
    _one.enter()
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        if not _here.depth:
            _here.found.close()
        _one.leave()


@contextmanager
def _no_warning_is_an_error() -> Iterator[None]:
    """Warnings are shown, or not, as the caller wishes, but none stops a run."""
    with warnings.catch_warnings():
        filters: Any = warnings.filters
        filters[:] = [("default" if action == "error" else action, *rest) for action, *rest in filters]
        warnings.simplefilter("default", append=True)  # what holds anyway; Python notices the change of the others
        yield


# -- a thread ----------------------------------------------------------------------------------------------------------


@contextmanager
def one_intra_op_thread(before: int | None = None) -> Iterator[None]:
    """The part of `isolated` that makes sums the same on any machine; `before` is the number to go back to."""
    before = before or torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)


def _threads() -> int:
    """Threads inside operators, as the caller has them; a new thread begins with what was set last, also by a run."""
    now = torch.get_num_threads()
    fresh = now == 1 and _here.depth == 1 and _one.inside > 1
    return _one.threads if fresh else now


@contextmanager
def _no_autocast() -> Iterator[None]:
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)


@contextmanager
def _no_default_device() -> Iterator[None]:
    """Without `torch.set_default_device` and `with torch.device(...)`, which see every call of torch."""
    modes = _get_current_function_mode_stack()
    if not any(isinstance(mode, DeviceContext) for mode in modes):
        yield
        return
    _replace_modes([mode for mode in modes if not isinstance(mode, DeviceContext)])
    try:
        yield
    finally:
        _replace_modes(modes)


def _replace_modes(modes: list[Any]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


@contextmanager
def _tiny_numbers() -> Iterator[None]:
    """With numbers so small that processors may take them for zero (`torch.set_flush_denormal`)."""
    flushed = TINY == 0.0
    if flushed:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(True)
