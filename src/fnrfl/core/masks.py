"""Dropout whose masks are inputs, in place of torch's own: what is drawn is then the same on every engine.

A mask is made of uniform numbers, [batch, ...], that every training step supplies.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, multi_head_attention_forward

from fnrfl.core.errors import CompatibilityError


class Masked(nn.Module):
    """A layer with a mask, which is a buffer of its own."""

    uniform: Tensor

    def receive(self, name: str, two: tuple[Tensor, ...], three: tuple[Tensor, ...]) -> tuple[int, ...]:
        """The shape of the mask of one example, from the inputs of the layer for two examples and for three."""
        raise NotImplementedError


class Dropout(Masked):
    """torch's, with its mask as an input."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.axis: int | None = None  # where examples are one after another, each `parts` times; None: in front, once
        self.register_buffer("uniform", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keep what is at least `p`, scaled so that the mean stays."""
        if not self.training:
            return x
        uniform = self.uniform if self.axis is None else self.uniform.flatten(0, 1).movedim(0, self.axis)
        return x * (uniform >= self.p) * (1 / (1 - self.p) if self.p < 1 else 0.0)

    def receive(self, name: str, two: tuple[Tensor, ...], three: tuple[Tensor, ...]) -> tuple[int, ...]:
        small, large = two[0].shape, three[0].shape
        axes = [i for i, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
        if not axes or (axes == [0] and small[0] == 2):
            return tuple(small[1:])
        if len(small) != len(large) or len(axes) > 1 or 3 * small[axes[0]] != 2 * large[axes[0]]:
            raise CompatibilityError(
                f"The dropout layer {name} sees {tuple(small)} for two examples and {tuple(large)} for three, in which "
                "they cannot be told apart. Put it where one axis counts the examples."
            )
        self.axis = axes[0]
        return small[self.axis] // 2, *(n for i, n in enumerate(small) if i != self.axis)


class Attention(nn.MultiheadAttention, Masked):
    """torch's with dropout of its weights, which are computed as torch does it and then masked."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The same as torch's; never by one of its fused kernels, which cannot be batched over clients."""
        if self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        same, masked = self._qkv_same_embed_dim, self.training
        out, weights = multi_head_attention_forward(
            query, key, value, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, self.bias_k,
            self.bias_v, self.add_zero_attn, 0.0, self.out_proj.weight, self.out_proj.bias, self.training,
            key_padding_mask, True, attn_mask, not same,
            None if same else self.q_proj_weight, None if same else self.k_proj_weight,
            None if same else self.v_proj_weight,
            average_attn_weights=average_attn_weights and not masked, is_causal=is_causal,
        )  # fmt: skip
        assert weights is not None  # asked for
        if masked:  # [B, heads, L, S]
            weights = weights * (self.uniform >= self.dropout) * (1 / (1 - self.dropout) if self.dropout < 1 else 0.0)
            mixed = (weights @ self._values(value)).permute(2, 0, 1, 3).flatten(2)
            out = linear(mixed, self.out_proj.weight, self.out_proj.bias)
            weights = weights.mean(1) if average_attn_weights else weights
        return out.transpose(0, 1) if self.batch_first else out, weights if need_weights else None

    def _values(self, value: Tensor) -> Tensor:
        """What is mixed by the weights, [B, heads, S, D]."""
        E, batch = self.embed_dim, value.shape[1]
        weight = self.in_proj_weight[2 * E :] if self._qkv_same_embed_dim else self.v_proj_weight
        v = linear(value, weight, None if self.in_proj_bias is None else self.in_proj_bias[2 * E :])
        if self.bias_v is not None:
            v = torch.cat([v, self.bias_v.expand(1, batch, E)])
        if self.add_zero_attn:
            v = torch.cat([v, v.new_zeros(1, batch, E)])
        return v.view(len(v), batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def receive(self, name: str, two: tuple[Tensor, ...], three: tuple[Tensor, ...]) -> tuple[int, ...]:
        query, key = two[:2]
        if query.ndim != 3 or query.shape[not self.batch_first] != 2:
            raise CompatibilityError(
                f"The attention layer {name} sees {tuple(query.shape)} for two examples. Give it [batch, length, "
                "features] with batch_first=True, or set its dropout to 0."
            )
        seen = key.shape[int(self.batch_first)] + (self.bias_k is not None) + self.add_zero_attn
        return self.num_heads, query.shape[int(self.batch_first)], seen


class EncoderLayer(nn.TransformerEncoderLayer):
    """torch's, without the fused kernel for eval mode, which goes around the layers inside."""

    activation_relu_or_gelu = property(lambda self: 0)  # none that the kernel knows


def put_in(module: nn.Module) -> None:
    """Give every layer with dropout its mask as an input, in place."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p))
    for layer in module.modules():
        if type(layer) is nn.MultiheadAttention and layer.dropout:
            layer.__class__ = Attention
            layer.register_buffer("uniform", torch.ones(()), persistent=False)
    for layer in module.modules():
        if type(layer) is nn.TransformerEncoderLayer and isinstance(layer.self_attn, Attention):
            layer.__class__ = EncoderLayer


def take_out(module: nn.Module) -> None:
    """The reverse: ordinary layers of torch."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is Dropout:
                setattr(parent, name, nn.Dropout(child.p))
    for layer in module.modules():
        if type(layer) is EncoderLayer:
            layer.__class__ = nn.TransformerEncoderLayer  # type: ignore[assignment]
        elif type(layer) is Attention:
            layer.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
            del layer.uniform
            layer._non_persistent_buffers_set.discard("uniform")
