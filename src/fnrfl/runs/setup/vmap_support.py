"""Whether torch can train several clients of a model in one step: a trial step of two."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fnrfl.config import RunConfig, registry
from fnrfl.core.errors import CompatibilityError, FnrflError, out_of_memory
from fnrfl.core.net import Net
from fnrfl.core.step import by_transform
from fnrfl.core.types import Flat, Tree
from fnrfl.engines.gpus import can_use_cudnn, kernel_settings, on_first_gpu
from fnrfl.kernels.convolution import ClientConv2d
from fnrfl.process import filters_lock


class VmapError(CompatibilityError):
    """Torch cannot train several clients of a model in one step, and the config asks for that."""

    def __init__(self, asked: str, model: str, why: str, way_out: str) -> None:
        """`asked` is what in the config asks for it, `why` what torch says."""
        self.why = why
        super().__init__(
            f'{asked} trains several clients in one step, and torch cannot do that with model = "{model}" ({why}). '
            f"{way_out}, or change the model."
        )


def vmap_failure(
    config: RunConfig, net: Net, engine: str, *, loops: bool, compute: torch.dtype | None = None
) -> str | None:
    """Return what torch says to a step of two clients of a user's own model; None if it takes one, or is fnrfl's.

    The step is taken where the engine takes its steps: on a GPU a layer may be computed by other operators. For some
    operators torch goes through the clients one by one inside the step, which is slower than one client after another.
    With `loops` that is no reason. On a GPU layers compute in `compute`; None: in the net's own type.
    """
    if not registry.is_own_model(config.model.name):
        return None
    on_gpu = engine == "gpu"
    settings = kernel_settings(deterministic=False, tf32=False, use_cudnn=can_use_cudnn(net))
    with settings if on_gpu else nullcontext(), _warnings_here() as warned:  # in this order, as while a run records
        try:
            _step_of_two(_without_own_kernels(on_first_gpu(net, compute or net.dtype)) if on_gpu else net)
        except FnrflError:  # there is no GPU
            raise
        except Exception as error:  # a user's model may raise anything
            if out_of_memory(error):  # which says nothing about the model, and may be otherwise next time
                return None
            said = str(error).strip().partition("\n")[0].partition(". ")[0][:200].rstrip(".")
            return f"{type(error).__name__}: {said}"
    slow = re.search(r"performance drop.*?aten::(\w+)", " ".join(warned))
    return None if slow is None or loops else f"torch goes through them one by one for its operator {slow[1]}"


def _without_own_kernels(net: Net) -> Net:
    """Return the net without kernels of fnrfl's own, which would have to be compiled for one step."""
    for layer in net.module.modules():
        if isinstance(layer, ClientConv2d):
            layer.own_kernels = False
    return net


@contextmanager
def _warnings_here() -> Iterator[list[str]]:
    """Collect what this thread is warned of: Python has one place for all threads, and others may use `vmap` too."""
    here, warned = threading.get_ident(), list[str]()

    def keep(message: object, *_: Any, **__: Any) -> None:
        if threading.get_ident() == here:
            warned.append(str(message))

    with filters_lock, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = keep
        yield warned


def _step_of_two(net: Net) -> None:
    """Gradients of two clients, with two examples each; by a copy, for a module may keep what it has seen."""
    net = net.copy()
    params, buffers = net.flatten()
    x = net.laid_out(torch.zeros(2, *net.input_shape, dtype=net.input_dtype, device=net.device))
    masks = {k: torch.ones(2, *v, dtype=net.dtype, device=net.device) for k, v in net.drop_shapes.items()}

    def step(params: Flat, buffers: Tree, x: Tensor, masks: Tree) -> Flat:
        def loss(params: Flat) -> tuple[Tensor, Tree]:
            out, new = net.apply(params, buffers, x, mode="updating", masks=masks)
            return out.logits.square().mean(), new

        return by_transform(loss, params)[0]

    twice = lambda tree: {name: torch.stack([one, one]) for name, one in tree.items()}  # noqa: E731
    vmap(step)(torch.stack([params, params]), twice(buffers), torch.stack([x, x]), twice(masks))
