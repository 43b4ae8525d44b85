"""What a module computes, as a value: two modules with equal fingerprints compute the same from the same tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

_SEEN_ELSEWHERE = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.memory_format, torch.device)


def fingerprint(module: nn.Module) -> Hashable:
    """Classes, settings, which parameters are shared, and untrained ones; not the trained ones and the buffers.

    An object that is not a plain value, such as a module's own tensor or function, stands for itself: modules that
    share it are equal, others are not.
    """
    parts = [(name, type(layer), _settings(layer)) for name, layer in module.named_modules(remove_duplicate=False)]
    untrained = [(name, content(p)) for name, p in module.named_parameters() if not p.requires_grad]
    first = {id(p): name for name, p in module.named_parameters()}
    shapes = [(name, p.shape, first[id(p)]) for name, p in module.named_parameters(remove_duplicate=False)]
    return (*parts, *untrained, *shapes)


def _settings(layer: nn.Module) -> Hashable:
    return tuple((k, _value(v)) for k, v in sorted(vars(layer).items()) if k not in _SEEN_ELSEWHERE)


def _value(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), *map(_value, value)
    if isinstance(value, dict):
        return type(value), *((_value(k), _value(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(_value, value))
    return Itself(value)


class Itself:
    """Equal to itself alone, and alive as long as it is compared."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def content(tensor: Tensor) -> Hashable:
    """A tensor's type, shape and bytes, as a value."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return tensor.dtype, tuple(tensor.shape), digest
