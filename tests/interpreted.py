"""The convolutions of `kernels/triton.py` and `kernels/hopper.py` by Triton's interpreter, on a CPU.

They are held against torch's in double precision.

TRITON_INTERPRET=1 python tests/interpreted.py    # all cases; the interpreter is chosen when triton is imported
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input, conv2d_weight
from triton.runtime import interpreter  # type: ignore[import-not-found, import-untyped, unused-ignore]

from fnrfl.kernels import hopper, triton

# clients, batch, in, out, height, width, side, stride, pad
CASES = [
    (3, 2, 3, 6, 12, 12, 5, 1, 0),
    (5, 15, 1, 6, 3, 4, 3, 1, 1),
    (1, 3, 6, 16, 14, 14, 5, 1, 0),
    (1, 3, 1, 16, 7, 9, 3, 1, 1),
    (3, 2, 5, 7, 8, 6, 3, 2, 1),
    (2, 1, 24, 20, 6, 6, 3, 3, 2),
    (3, 2, 16, 16, 6, 6, 3, 1, 1),
    (1, 2, 64, 64, 4, 4, 3, 1, 1),
    (3, 2, 16, 32, 8, 8, 1, 2, 0),
    (1, 1, 5, 7, 5, 5, 1, 1, 0),
    (1, 1, 32, 130, 4, 4, 1, 1, 0),
    (2, 1, 130, 6, 4, 4, 3, 2, 1),
    (1, 9, 16, 16, 16, 16, 3, 1, 1),
]
# the same, for kernels that load by tensor descriptors
HOPPER_CASES = [
    (1, 3, 64, 64, 4, 4, 3, 1, 1),
    (3, 7, 64, 128, 4, 8, 3, 2, 1),
    (1, 2, 64, 64, 16, 4, 5, 1, 2),
    (2, 5, 64, 128, 8, 8, 1, 2, 0),
    (2, 9, 128, 64, 2, 2, 3, 1, 1),
    (1, 40, 128, 128, 4, 4, 3, 1, 1),
    (1, 2, 64, 64, 16, 16, 3, 1, 1),
    (1, 1, 64, 64, 2, 256, 3, 1, 1),
    (2, 7, 128, 128, 1, 1, 1, 1, 0),
]


def bounds_of_loops() -> None:
    """Let the interpreter count loops with NumPy 2.4 and later, which make no number of an array with one axis."""
    patch = interpreter._patch_lang_tensor

    def patch_also(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_also


def guarded(t: Tensor) -> Tensor:
    """The same numbers with their channels last, and next to them in memory others that would be noticed."""
    last = t.movedim(-3, -1)
    room = torch.full((t.numel() + 2 * 4096,), torch.nan)
    room[4096:-4096] = last.flatten()
    return room[4096:-4096].view(last.shape).movedim(-1, -3)


def check(kernels: Any, clients: int, batch: int, into: int, out: int, height: int, width: int, *geometry: int) -> None:
    side, stride, pad = geometry
    torch.manual_seed(0)
    x = guarded(torch.randn(batch, clients * into, height, width))
    w = guarded(torch.randn(clients, out, into, side, side))
    exact, weights = x.double(), w.double().flatten(0, 1)
    y = conv2d(exact, weights, None, stride, pad, 1, clients)
    dy = guarded(torch.randn(y.shape))
    wanted = {
        "convolve": y,
        "convolve_back": conv2d_input(exact.shape, weights, dy.double(), stride, pad, 1, clients),
        "weigh": conv2d_weight(exact, weights.shape, dy.double(), stride, pad, 1, clients).unflatten(0, (clients, out)),
    }
    found = {
        "convolve": kernels.convolve(x, w, stride, pad),
        "convolve_back": kernels.convolve_back(dy, w, stride, pad, height, width),
        "weigh": kernels.weigh(x, dy, side, clients, stride, pad),
    }
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


if __name__ == "__main__":
    bounds_of_loops()
    for case in CASES:
        check(triton, *case)
        print(*case)
    for hopper.MULTIPROCESSORS in (132, 1):  # small tiles and many parts, large tiles and one part
        for case in HOPPER_CASES:
            check(hopper, *case)
            print(hopper.MULTIPROCESSORS, "multiprocessors:", *case)
