"""The kernel of a step of SGD with momentum: one pass over weights, velocities and a gradient of any type.

A client's row of a flat matrix begins anywhere, and wide loads begin at round addresses. So a program begins at the
round address before its numbers; only the first and the last one of a row must look which numbers are theirs.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

PROGRAM_NUMBERS = 1024  # that one program updates
ROUND = tl.constexpr(16)  # numbers from one round address to the next


@triton.jit
def _take_step(weights, velocity, grad, lr, mask, MOMENTUM: tl.constexpr, DECAY: tl.constexpr):
    weight = tl.load(weights, mask=mask)
    speed = MOMENTUM * tl.load(velocity, mask=mask) + (tl.load(grad, mask=mask).to(weight.dtype) + DECAY * weight)
    tl.store(velocity, speed, mask=mask)
    tl.store(weights, weight - speed * tl.load(lr), mask=mask)


@triton.jit(do_not_specialize=["P", "FIRST"])
def _descend(  # no argument may be called `params`: Triton's own launcher has a variable of this name
    weights, velocity, grad, lr, P, N, FIRST, SKIPS: tl.constexpr, MOMENTUM: tl.constexpr, DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The step of N numbers of every row of P: those from FIRST on, but for SKIPS: before, length, before, length, ...

    Before the `before`-th of the N numbers, `length` numbers of the row are passed over.
    """
    m, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    skew = ((m * P + FIRST) % ROUND).to(tl.int32)
    place = block * BLOCK + tl.arange(0, BLOCK)
    at = place - skew
    for i in tl.static_range(0, len(SKIPS), 2):
        place += tl.where(at >= SKIPS[i], SKIPS[i + 1], 0)
    place += tl.multiple_of(m * P + FIRST - skew, ROUND)
    weights, velocity, grad = weights + place, velocity + place, grad + m * N + at
    if (block > 0) & ((block + 1) * BLOCK <= N):
        _take_step(weights, velocity, grad, lr, None, MOMENTUM, DECAY)
    else:
        _take_step(weights, velocity, grad, lr, (at >= 0) & (at < N), MOMENTUM, DECAY)


def descend_part(
    params: Tensor,
    velocity: Tensor,
    lr: Tensor,
    grad: Tensor,
    first: int,
    skips: Sequence[tuple[int, int]],
    momentum: float,
    decay: float,
) -> None:
    """Take the step of some numbers of [P] or [M, P]: from `first` on, but for `skips`, (before, length) of each."""
    P, N = params.shape[-1], grad.shape[-1]
    _descend[triton.cdiv(N + ROUND.value - 1, PROGRAM_NUMBERS), params.numel() // P](
        params, velocity, grad.contiguous(), lr, P, N, first, tuple(number for skip in skips for number in skip),
        momentum, decay, PROGRAM_NUMBERS, num_warps=4,
    )  # fmt: skip
