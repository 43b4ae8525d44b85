"""Kernels of fnrfl's own operators, compiled side by side before a step is taken.

Triton compiles a kernel when it is first called, and a step calls dozens one after another. Here each operator of a
recorded step is called once, by several threads, on tensors that hold nothing.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, fx

from fnrfl.engines.recorder.programs import Recording, timed

log = logging.getLogger("fnrfl")
THREADS = min(8, os.cpu_count() or 1)
Call = tuple[Any, tuple[Any, ...]]  # an operator, and its arguments: (shape, stride, type) for a tensor


def compile_kernels(recording: Recording) -> None:
    """Call every operator of fnrfl's in a step once for each kind of arguments."""
    device = recording.arguments.constants[0].device
    calls = list(dict.fromkeys(_call(node) for node in recording.graph.graph.nodes if _is_own(node)))
    if calls:
        with timed("compiling kernels"), ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda call: _try(call, device), calls))


def _is_own(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "fnrfl"


def _call(node: fx.Node) -> Call:
    return node.target, tuple(_kind(given) if isinstance(given, fx.Node) else given for given in node.args)


def _kind(node: fx.Node) -> tuple[Any, ...]:
    meta = node.meta["tensor_meta"]
    return tuple(meta.shape), tuple(meta.stride), meta.dtype


def _try(call: Call, device: torch.device) -> None:
    """Call an operator; one that cannot be called is called again, and fails, when the step is taken."""
    operator, given = call
    try:
        if device.type == "cuda":  # Triton makes descriptors only in a thread that has called the GPU before
            torch.cuda.set_device(device)
            torch.cuda.synchronize()
        arguments = [_empty(one, device) if isinstance(one, tuple) else one for one in given]
        with torch.no_grad():
            operator(*arguments)
    except Exception:
        log.debug("an operator could not be called before its step", exc_info=True)


def _empty(kind: Any, device: torch.device) -> Tensor:
    shape, stride, dtype = kind
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
