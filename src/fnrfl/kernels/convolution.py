"""Convolutions whose weights differ from client to client, as one kernel for all clients of a `vmap`.

On a GPU and in bf16 these are kernels of our own (`triton.py`, `hopper.py`), which torch knows as three
operators, so that steps with them can be recorded and compiled. In other types 1x1 convolutions are matrix products,
since a grouped convolution goes group by group and a batched product does not; larger ones are torch's own.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return"
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

MAX_COUNTED = 2**31 - 1  # numbers of one tensor: kernels count in 32 bits


_library = torch.library.Library("fnrfl", "DEF")
_library.define("convolve(Tensor x, Tensor w, int stride, int pad) -> Tensor")
_library.define("convolve_back(Tensor dy, Tensor w, int stride, int pad, int height, int width) -> Tensor")
_library.define("weigh(Tensor x, Tensor dy, int side, int clients, int stride, int pad) -> Tensor")

_own, _torch = torch.ops.fnrfl, torch.ops.aten


@torch.library.impl(_library, "convolve", "CompositeExplicitAutograd")
def _convolve(x: Tensor, w: Tensor, stride: int, pad: int) -> Tensor:
    """x [batch, clients * in, height, width], w [clients, out, in, side, side] -> [batch, clients * out, ...]."""
    if x.is_cuda and _countable(x, x.shape[0] * w.shape[0] * w.shape[1] * x.shape[2] * x.shape[3]):
        rows, columns = ((size + 2 * pad - w.shape[-1]) // stride + 1 for size in x.shape[2:])
        return _kernels(x, w.shape[1:3], stride, x.shape[2:], (rows, columns)).convolve(x, w, stride, pad)
    y: Tensor = _torch.convolution(x, w.flatten(0, 1), None, *_geometry(stride, pad), len(w))
    return _empty(y, *y.shape).copy_(y)


@torch.library.register_fake("fnrfl::convolve", lib=_library)
def _(x: Tensor, w: Tensor, stride: int, pad: int) -> Tensor:
    rows, columns = ((size + 2 * pad - w.shape[-1]) // stride + 1 for size in x.shape[2:])
    return _empty(x, x.shape[0], w.shape[0] * w.shape[1], rows, columns)


@torch.library.register_vmap("fnrfl::convolve", lib=_library)
def _(info: Any, dims: Any, x: Tensor, w: Tensor, stride: int, pad: int) -> tuple[Tensor, int]:
    M = info.batch_size
    if dims[1] is None and len(w) == 1:  # one model looks at the batches of all clients
        return _own.convolve(x.movedim(dims[0], 0).flatten(0, 1), w, stride, pad).unflatten(0, (M, -1)), 0
    return _own.convolve(folded(x, dims[0], M), _joined(w, dims[1], M), stride, pad).unflatten(1, (M, -1)), 1


@torch.library.impl(_library, "convolve_back", "CompositeExplicitAutograd")
def _convolve_back(dy: Tensor, w: Tensor, stride: int, pad: int, height: int, width: int) -> Tensor:
    """The gradient of `convolve` with respect to x."""
    if dy.is_cuda and _countable(dy, dy.shape[0] * w.shape[0] * w.shape[2] * height * width):
        kernels = _kernels(dy, w.shape[1:3], stride, (height, width), dy.shape[2:])
        return kernels.convolve_back(dy, w, stride, pad, height, width)
    x = dy.new_empty(dy.shape[0], w.shape[0] * w.shape[2], height, width)
    dx: Tensor = _torch.convolution_backward(
        dy, x, w.flatten(0, 1), None, *_geometry(stride, pad), len(w), [True, False, False]
    )[0]
    return _empty(dx, *dx.shape).copy_(dx)


@torch.library.register_fake("fnrfl::convolve_back", lib=_library)
def _(dy: Tensor, w: Tensor, stride: int, pad: int, height: int, width: int) -> Tensor:
    return _empty(dy, dy.shape[0], w.shape[0] * w.shape[2], height, width)


@torch.library.register_vmap("fnrfl::convolve_back", lib=_library)
def _(info: Any, dims: Any, dy: Tensor, w: Tensor, *geometry: int) -> tuple[Tensor, int]:
    M = info.batch_size
    return _own.convolve_back(folded(dy, dims[0], M), _joined(w, dims[1], M), *geometry).unflatten(1, (M, -1)), 1


@torch.library.impl(_library, "weigh", "CompositeExplicitAutograd")
def _weigh(x: Tensor, dy: Tensor, side: int, clients: int, stride: int, pad: int) -> Tensor:
    """The gradient of `convolve` with respect to w."""
    if x.is_cuda and _countable(x, dy.numel()):
        channels = (x.shape[1] // clients, dy.shape[1] // clients)
        return _kernels(x, channels, stride, x.shape[2:], dy.shape[2:]).weigh(x, dy, side, clients, stride, pad)
    w = x.new_empty(dy.shape[1], x.shape[1] // clients, side, side)
    dw: Tensor = _torch.convolution_backward(dy, x, w, None, *_geometry(stride, pad), clients, [False, True, False])[1]
    return dw.unflatten(0, (clients, -1)).movedim(2, -1).contiguous().movedim(-1, 2)


@torch.library.register_fake("fnrfl::weigh", lib=_library)
def _(x: Tensor, dy: Tensor, side: int, clients: int, stride: int, pad: int) -> Tensor:
    return x.new_empty(clients, dy.shape[1] // clients, side, side, x.shape[1] // clients).movedim(-1, 2)


@torch.library.register_vmap("fnrfl::weigh", lib=_library)
def _(info: Any, dims: Any, x: Tensor, dy: Tensor, side: int, clients: int, *geometry: int) -> tuple[Tensor, int]:
    M = info.batch_size
    dw = _own.weigh(folded(x, dims[0], M), folded(dy, dims[1], M), side, M * clients, *geometry)
    return dw.unflatten(0, (M, -1)), 0


def _kernels(t: Tensor, channels: Sequence[int], stride: int, sizes: Sequence[int], outputs: Sequence[int]) -> Any:
    """The module whose kernels are for a GPU, for a client's channels and for heights and widths."""
    from fnrfl.kernels import triton

    smaller = all(size == stride * output for size, output in zip(sizes, outputs, strict=True))
    if not smaller or any(size & (size - 1) for size in sizes) or any(number % 64 for number in channels):
        return triton
    if not _has_descriptors(t.device):
        return triton
    from fnrfl.kernels import hopper

    return hopper


@cache
def _has_descriptors(device: torch.device) -> bool:
    """Whether a device loads tiles by tensor descriptors; older tritons were not seen to compile that well."""
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return torch.cuda.get_device_capability(device)[0] == 9 and version >= (3, 6)


def _countable(x: Tensor, numbers: int) -> bool:
    """Whether the kernels can count the numbers of their input and of their output."""
    return max(x.numel(), numbers) <= MAX_COUNTED


def _geometry(stride: int, pad: int) -> tuple[Any, ...]:
    return [stride] * 2, [pad] * 2, [1, 1], False, [0, 0]


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


class ClientConv2d(nn.Conv2d):
    """A convolution with one kernel for all clients; a 1x1 convolution of another type is a matrix product."""

    channels_last = True  # False: outputs in torch's usual memory order, for a module that asks for a `view` of them
    own_kernels = True  # False: torch's convolutions alone, for which nothing has to be compiled

    def forward(self, x: Tensor) -> Tensor:
        """The same as torch's."""
        y = self._convolved(x)
        return y if self.channels_last else y.contiguous()

    def _convolved(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32 and torch.is_autocast_enabled(x.device.type):  # as torch's own convolutions do
            x = x.to(torch.get_autocast_dtype(x.device.type))
        own = self.own_kernels and x.dtype is self.weight.dtype is torch.bfloat16 and _has_kernels(x.device)
        if own and self._fits(x):
            y: Tensor = _Convolved.apply(x, self.weight, self.stride[0], int(self.padding[0]))
            return y if self.bias is None else y + self.bias[:, None, None]
        if x.ndim == 4 and self.kernel_size == (1, 1) and self.padding == (0, 0) and self.groups == 1:
            rows, columns = self.stride
            return linear(x[:, :, ::rows, ::columns].movedim(1, -1), self.weight.flatten(1), self.bias).movedim(-1, 1)
        return super().forward(x)

    def _fits(self, x: Tensor) -> bool:
        """Whether the kernels know the layer's geometry."""
        if isinstance(self.padding, str) or self.padding_mode != "zeros" or self.groups > 1 or self.dilation != (1, 1):
            return False
        if x.ndim != 4:  # one example without its batch
            return False
        square = all(len({*pair}) == 1 for pair in (self.kernel_size, self.stride, self.padding))
        return square and all(size % self.stride[0] == 0 for size in x.shape[-2:])


@cache
def _has_kernels(device: torch.device) -> bool:
    """Whether a device can run the kernels."""
    return (
        device.type == "cuda" and find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def folded(x: Tensor, axis: int | None, clients: int) -> Tensor:
    """[batch, clients * channels, ...] of activations with an axis of clients, without a copy where they lie so."""
    x = x.unsqueeze(1).expand(-1, clients, *x.shape[1:]) if axis is None else x.movedim(axis, 1)
    return x.flatten(1, 2)


def _joined(w: Tensor, axis: int | None, clients: int) -> Tensor:
    """[clients * models, ...] of the weights of some models, with an axis of clients."""
    return (w.expand(clients, *w.shape) if axis is None else w.movedim(axis, 0)).flatten(0, 1)


class _Convolved(Function):
    """x [batch, in, height, width], w [out, in, side, side] -> the outputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, pad: int) -> Any:
        return _own.convolve(x, w[None], stride, pad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, ctx.stride, ctx.pad = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), (dy,), dx = ctx.saved_tensors, grads, None
        if ctx.needs_input_grad[0]:
            dx = _own.convolve_back(dy, w[None], ctx.stride, ctx.pad, *x.shape[2:])
        return dx, _own.weigh(x, dy, w.shape[-1], 1, ctx.stride, ctx.pad)[0], None, None
