"""A step of SGD with momentum in which every large layer goes down by its own gradient.

Gradients that are laid end to end are written and read once more, in the type of the parameters. Here they are read
where they lie, in the type in which they were computed. torch knows the whole step as one operator: a compiled step
hands it parameters and velocities as they are, and copies neither.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest

import torch
from torch import Tensor

from fnrfl.core.client_convolutions import has_kernels

_library = torch.library.Library("fnrfl", "FRAGMENT")
_library.define(
    "descend(Tensor(a!) params, Tensor(b!) velocity, Tensor lr, Tensor[] grads, int[] firsts, Tensor? rest, "
    "float momentum, float decay) -> ()"
)


@torch.library.impl(_library, "descend", "CompositeExplicitAutograd")
def _descend(
    params: Tensor,
    velocity: Tensor,
    lr: Tensor,
    grads: Sequence[Tensor],
    firsts: Sequence[int],
    rest: Tensor | None,
    momentum: float,
    decay: float,
) -> None:
    """Take the step of `params` and `velocity`, [P] or [M, P].

    `grads` are those of large layers, [N] or [M, N], which begin at `firsts`, in this order; `rest` has all others, end
    to end.
    """
    lengths = [grad.shape[-1] for grad in grads]
    before = [
        first - large for first, large in zip(firsts, accumulate(lengths, initial=0), strict=False)
    ]  # of the rest
    if has_kernels(params.device) and params.is_contiguous() and velocity.is_contiguous():
        from fnrfl.core.descent_kernels import descend_part

        for grad, first in zip(grads, firsts, strict=True):
            descend_part(params, velocity, lr, grad, first, [], momentum, decay)
        if rest is not None:
            descend_part(params, velocity, lr, rest, 0, list(zip(before, lengths, strict=True)), momentum, decay)
        return
    between = [] if rest is None else rest.tensor_split(before, -1)
    parts = [part for pair in zip_longest(between, grads) for part in pair if part is not None]
    velocity.mul_(momentum).add_(torch.cat(parts, -1).to(params.dtype).add(params, alpha=decay))
    params.sub_(velocity * lr)


@torch.library.register_fake("fnrfl::descend", lib=_library)
def _(*_: object) -> None:
    """Nothing is returned."""
