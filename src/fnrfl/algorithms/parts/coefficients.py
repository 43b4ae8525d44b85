"""Who teaches whom: rows of coefficients on the simplex, and the gradients that move them (KT-pFL)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Fit = Literal["kl", "mse", "weights"]


def weighted_sums(c: Tensor, said: Tensor) -> Tensor:
    """sum_m c_nm s_m, [n, ...], for said [K, ...]."""
    return (c @ said.flatten(1)).view(len(c), *said.shape[1:])


def gradient(c: Tensor, said: Tensor, own: Tensor, fit: Fit) -> Tensor:
    """How the misfit between a client's teacher and the client itself changes with its coefficients, [n, K].

    c [n, K] has a row for each client that is updated, said [K, ...] is what everybody said, own [n] says which of
    them is the row's. kl: the mean over examples of KL(t_n || s_n), but for a constant, which moves nothing along the
    simplex; mse: the mean of (t_n - s_n)^2; weights: half of ||t_n - w_n||^2, in units of the models' spread.
    """
    flat = said.flatten(1)
    if fit == "weights":
        flat = flat - flat.mean(0)  # no difference along the simplex, and exact where all are near to each other
        flat = flat / flat.square().sum().clamp(min=1e-12).sqrt()
    teacher, mine = c @ flat, flat[own]
    if fit == "kl":
        tiny = torch.finfo(flat.dtype).tiny
        return (teacher.clamp(min=tiny).log() - mine.clamp(min=tiny).log()) @ flat.mT / said.shape[1]
    return (teacher - mine) @ flat.mT * (2 / flat.shape[1] if fit == "mse" else 1)


def curvature(c: Tensor, said: Tensor) -> Tensor:
    """A bound on the second derivatives of the kl misfit along the simplex, [n, 1]."""
    flat = said.flatten(1)
    spread, teacher = (flat - flat.mean(0)).square().sum(0), (c @ flat).clamp(min=torch.finfo(flat.dtype).tiny)
    return (spread / teacher).sum(1, keepdim=True).div(said.shape[1])


def simplex(rows: Tensor) -> Tensor:
    """The nearest rows that are 0 or more and sum to 1.

    >>> simplex(torch.tensor([[0.75, 0.75, -3.0], [0.25, 0.25, 0.5]]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.2500, 0.2500, 0.5000]])
    """
    down = rows.sort(-1, descending=True).values
    rank = torch.arange(1, rows.shape[-1] + 1, device=rows.device)
    excess = (down.cumsum(-1) - 1) / rank
    count = (down > excess).sum(-1, keepdim=True)
    return (rows - excess.gather(-1, count - 1)).clamp(min=0)


def projected(c: Tensor, grad: Tensor, rho: float, step: float | Tensor) -> Tensor:
    """A step down misfit + rho ||c_n - 1/K||^2 along the simplex; implicit in the second term: stable for any rho."""
    pull = 2 * step * rho
    return simplex((c - step * grad + pull / c.shape[1]) / (1 + pull))


def released(c: Tensor, grad: Tensor, rho: float) -> Tensor:
    """The released code's step down misfit + rho * mean of (c_n - 1/K)^2, and its way back to the simplex.

    The step is scaled by powers of 5 until it is about 0.01 long, five times at most; then softmax(5 c_n), which
    flattens a row whatever it fits.
    """
    K = c.shape[1]
    grad = grad + 2 * rho / K * (c - 1 / K)
    size = grad.abs().mean(1, keepdim=True)
    scale = torch.ones_like(size)
    for _ in range(5):
        for factor, off in ((1 / 5, torch.gt), (5.0, torch.lt)):
            scale = torch.where(off(size * scale, 0.01), scale * factor, scale)
    return (5 * (c - scale * grad)).softmax(-1)
