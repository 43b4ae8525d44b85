"""Whether short batches may be padded, so that clients with batches of several sizes step together."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from fnrfl.core.net import Net

REAL_ROWS, TRIED_ROWS = 3, 5  # of the batch that is tried
TOLERANCE = 0.02  # a row that looks at the others changes by more, and rounding by less


def takes_padding(net: Net, x: Tensor) -> bool:
    """Whether rows of padding change nothing else in a training pass of a net, and nothing that it remembers.

    It is tried, with some examples: nobody can tell from a module whether its rows look at each other.
    """
    if len(x) < TRIED_ROWS:
        return False
    other = net.copy()
    other.compute = None  # in full precision, where a difference means something
    real = torch.arange(TRIED_ROWS, device=net.device) < REAL_ROWS
    params, buffers = other.flatten()
    x = other.laid_out(x[:TRIED_ROWS].to(net.device))
    with torch.no_grad():
        short, after_short = other.apply(params, buffers, x[:REAL_ROWS], mode="updating")
        padded, after_padded = other.apply(params, buffers, x, mode="updating", real=real.to(params.dtype))
    outputs = [(getattr(short, f.name), getattr(padded, f.name)[:REAL_ROWS]) for f in fields(short)]
    return all(map(_close, *zip(*outputs, *((after_short[k], after_padded[k]) for k in buffers), strict=True)))


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by rounding alone."""
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= TOLERANCE * a.norm() + 1e-6)
