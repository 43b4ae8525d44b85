"""Layers that many clients can share a kernel in: the clients of a `vmap` become channels, or one batch of products.

BatchNorm: torch's own rule for `vmap` copies activations into another memory order and wants one type for all. Here the
library's kernels see [batch, clients * channels, ...] as it lies in memory, and statistics keep all their digits when
activations do not. Pooling of whole images: torch computes a mean, and then arranges it in memory in a way that `vmap`
can only do client by client. Convolutions: `convolution.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fnrfl.kernels.convolution import ClientConv2d, folded

aten = torch.ops.aten
BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def share_kernels(module: nn.Module, *, channels_last: bool = True) -> None:
    """Replace the layers of a module by the layers of this file, where there is one for them.

    Without `channels_last`, convolutions give what they compute in torch's usual memory order.
    """
    for layer in module.modules():
        if (kind := shared_norm(type(layer))) is not None:
            layer.__class__ = kind
        elif type(layer) is nn.Conv2d:
            layer.__class__ = ClientConv2d
            cast(ClientConv2d, layer).channels_last = channels_last
        elif type(layer) is nn.AdaptiveAvgPool2d and layer.output_size in (1, (1, 1), [1, 1]):
            layer.__class__ = WholeImageMean


class WholeImageMean(nn.AdaptiveAvgPool2d):
    """The same as torch's of output size 1."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean over height and width."""
        return x.mean((-2, -1), keepdim=True)


class Norm:
    """What replaces the forward pass of a BatchNorm layer."""

    real: Tensor | None = None  # of the batch that is coming: 1 for an example, 0 for padding; None: no padding

    def forward(self: Any, x: Tensor) -> Any:
        """The same as torch's."""
        channels = x.shape[1]
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = x.new_ones(channels, dtype=wide) if self.weight is None else self.weight
        bias = torch.zeros_like(weight) if self.bias is None else self.bias
        if not self.training and self.running_mean is not None:
            scale = weight * (self.running_var + self.eps).rsqrt()
            across = (1, channels, *[1] * (x.ndim - 2))
            return (x * scale.view(across) + (bias - self.running_mean * scale).view(across)).to(x.dtype)
        if self.real is None:
            y, mean, rstd = _Normalised.apply(x, weight, bias, self.eps)
            count = x.numel() // channels
            unbiased = count / max(1, count - 1)
        else:
            rows = self.real.to(wide)[:, None].expand(-1, channels)
            y, mean, rstd = _PaddedNormalised.apply(x, rows, weight, bias, self.eps)
            count = self.real.sum() * (x.numel() // (len(x) * channels))
            unbiased = count / (count - 1).clamp(min=1)
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._remember(mean, rstd, unbiased)
        return y

    def _remember(self: Any, mean: Tensor, rstd: Tensor, unbiased: float | Tensor) -> None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            part = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.to(mean.dtype)
            var = (rstd.square().reciprocal() - self.eps) * unbiased
            self.running_mean.add_((mean - self.running_mean) * part)
            self.running_var.add_((var - self.running_var) * part)


_NORMS: dict[type, Any] = {}  # a layer has the same class in every run: it says what a recorded step computes


def shared_norm(kind: type) -> Any:
    """What replaces a kind of BatchNorm, or a subclass that leaves torch's forward pass as it is; None for others."""
    if not issubclass(kind, BATCHNORMS) or kind.forward is not nn.BatchNorm1d.forward:
        return None
    return _NORMS.setdefault(kind, type(f"Shared{kind.__name__}", (Norm, kind), {}))


@contextmanager
def leaving_padding_out(module: nn.Module, real: Tensor | None) -> Iterator[None]:
    """Inside, the BatchNorm layers of this file leave padding out; `real` is 1 for an example and 0 for padding."""
    layers = [] if real is None else [layer for layer in module.modules() if isinstance(layer, Norm)]
    for layer in layers:
        layer.real = real
    try:
        yield
    finally:
        for layer in layers:
            layer.real = None


def _joined(v: Tensor, axis: int | None, clients: int) -> Tensor:
    """[clients * channels] of vectors with an axis of clients."""
    return (v.expand(clients, -1) if axis is None else v.movedim(axis, 0)).reshape(-1)


class _Normalised(Function):
    """x, weight, bias -> the normalised batch, its mean and 1 / its standard deviation."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        got: tuple[Tensor, Tensor, Tensor] = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.0, eps)
        return got

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.eps = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(x, weight, mean, rstd)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = _Backward.apply(grads[0], *ctx.saved_tensors, ctx.eps)
        return dx, dweight, dbias, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Any, Any]:
        M = info.batch_size
        y, mean, rstd = _Normalised.apply(
            folded(x, dims[0], M), _joined(weight, dims[1], M), _joined(bias, dims[2], M), eps
        )
        return (y.unflatten(1, (M, -1)), mean.view(M, -1), rstd.view(M, -1)), (1, 0, 0)


class _Backward(Function):
    """The gradients with respect to x, weight and bias."""

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        got: tuple[Tensor, Tensor, Tensor] = aten.native_batch_norm_backward(
            grad, x, weight, None, None, mean, rstd, True, eps, [True, True, True]
        )
        return got

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("second derivatives of BatchNorm")

    @staticmethod
    def vmap(
        info: Any, dims: Any, grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, eps: float
    ) -> tuple[Any, Any]:
        M = info.batch_size
        vectors = (_joined(v, d, M) for v, d in zip((weight, mean, rstd), dims[2:5], strict=True))
        dx, dweight, dbias = _Backward.apply(folded(grad, dims[0], M), folded(x, dims[1], M), *vectors, eps)
        return (dx.unflatten(1, (M, -1)), dweight.view(M, -1), dbias.view(M, -1)), (1, 0, 0)


class _PaddedNormalised(Function):
    """The same with padding: only examples, for which `rows` [B, C] is 1, count for mean and deviation.

    Mean and variance are those of each example first, in one pass over x, and then of all examples; other passes are
    few as well, since a step that is captured and not compiled makes each of them. Whoever reads the outputs of padding
    must send no gradient back through them.
    """

    @staticmethod
    def forward(x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        across, examples, wide = _beside(x), rows.sum(0), x.to(rows.dtype)
        numbers = wide[..., None] if x.ndim == 2 else wide.flatten(2)  # of each example and channel
        own_var, own_mean = torch.var_mean(numbers, 2, correction=0)
        mean = (own_mean * rows).sum(0) / examples
        var = ((own_var + (own_mean - mean).square()) * rows).sum(0) / examples
        rstd = (var + eps).rsqrt()
        scale = rstd * weight
        y = torch.addcmul((bias - mean * scale).view(across), wide, scale.view(across))
        return y.to(x.dtype), mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, rows, weight, _, _ = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(x, rows, weight, mean, rstd)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = _PaddedBackward.apply(grads[0], *ctx.saved_tensors)
        return dx, None, dweight, dbias, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Any, Any]:
        M = info.batch_size
        y, mean, rstd = _PaddedNormalised.apply(
            folded(x, dims[0], M), folded(rows, dims[1], M), _joined(weight, dims[2], M), _joined(bias, dims[3], M), eps
        )
        return (y.unflatten(1, (M, -1)), mean.view(M, -1), rstd.view(M, -1)), (1, 0, 0)


class _PaddedBackward(Function):
    """Its gradients with respect to x, weight and bias."""

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, rows: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        across, axes = _beside(x), [0, *range(2, x.ndim)]
        wide, gap = grad.to(rows.dtype), x - mean.view(across)
        dbias, dweight = wide.sum(axes), (wide * gap).sum(axes) * rstd
        # dx = scale * (grad - (dbias + gap * rstd * dweight) / count), where padding has no second part.
        scale, share = weight * rstd, rows / (rows.sum(0) * (x.numel() // (len(x) * x.shape[1])))
        common, slope = -share * (scale * dbias), -share * (scale * rstd * dweight)
        along = (*rows.shape, *across[2:])
        dx = torch.addcmul(torch.addcmul(common.view(along), gap, slope.view(along)), wide, scale.view(across))
        return dx.to(x.dtype), dweight, dbias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("second derivatives of BatchNorm")

    @staticmethod
    def vmap(
        info: Any, dims: Any, grad: Tensor, x: Tensor, rows: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
    ) -> tuple[Any, Any]:
        M = info.batch_size
        tables = (folded(t, d, M) for t, d in zip((grad, x, rows), dims[:3], strict=True))
        vectors = (_joined(v, d, M) for v, d in zip((weight, mean, rstd), dims[3:], strict=True))
        dx, dweight, dbias = _PaddedBackward.apply(*tables, *vectors)
        return (dx.unflatten(1, (M, -1)), dweight.view(M, -1), dbias.view(M, -1)), (1, 0, 0)


def _beside(x: Tensor) -> tuple[int, ...]:
    """The shape of channels' numbers beside x."""
    return 1, x.shape[1], *[1] * (x.ndim - 2)
