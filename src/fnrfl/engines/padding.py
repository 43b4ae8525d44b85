"""Whether short batches may be padded, so that clients with batches of several sizes step together."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from fnrfl.core.errors import out_of_memory
from fnrfl.core.net import Net
from fnrfl.core.rng import generator

REAL_ROWS, TRIED_ROWS = 3, 5  # of the batch that is tried
TOLERANCE = 1e-9  # a row that looks at the others changes by more, and rounding of float64 by less
MOVED = 0.1  # parameters are tried about so far from where they begin: some begin at 0, and hide what they will do


def can_be_tried_with(x: Tensor) -> bool:
    """Whether some examples can show if rows look at each other: there are enough, and they are not all alike."""
    return len(x) >= TRIED_ROWS and not bool((x == x[:1]).all())


def takes_padding(net: Net, x: Tensor) -> bool:
    """Whether rows of padding change nothing else in a training pass of a net, and nothing that it remembers.

    It is tried, with some examples: nobody can tell from a module whether its rows look at each other. A net that
    cannot be tried takes none: its BatchNorm layers see other rows than those of the batch.
    """
    try:
        return _is_as_without(_in_double_precision(net), x[:TRIED_ROWS].to(net.device))
    except Exception as error:
        if out_of_memory(error):
            raise
        return False


def _in_double_precision(net: Net) -> Net:
    """The same net, in a precision in which a difference means something."""
    other = net.copy()
    other.module.double()
    other.dtype, other.compute = torch.float64, None
    return other


def _is_as_without(net: Net, x: Tensor) -> bool:
    """Whether a batch of three examples is the same with two rows of padding."""
    real = torch.arange(TRIED_ROWS, device=net.device) < REAL_ROWS
    params, buffers = net.flatten()
    params += MOVED * torch.rand(net.size, generator=generator(0, "padding"), dtype=net.dtype).to(net.device)
    x = net.laid_out(x.to(net.dtype) if x.is_floating_point() else x)
    with torch.no_grad():
        short, after_short = net.apply(params, buffers, x[:REAL_ROWS], mode="updating")
        padded, after_padded = net.apply(params, buffers, x, mode="updating", real=real.to(net.dtype))
    outputs = [(getattr(short, f.name), getattr(padded, f.name)[:REAL_ROWS]) for f in fields(short)]
    return all(map(_close, *zip(*outputs, *((after_short[k], after_padded[k]) for k in buffers), strict=True)))


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by rounding alone."""
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= TOLERANCE * (1 + a.norm()))
