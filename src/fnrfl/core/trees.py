"""Named tensors, and values made of them: indexed, stacked, moved and packed here and nowhere else.

A tree is a tensor, None, a dict or a tuple of trees, or a dataclass that is marked with `node`: `State`, `Carry`,
`Batch`, `Replies`. torch's own transforms (`vmap`) take marked dataclasses apart in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

Tree = dict[str, Tensor]  # a few named tensors
T = TypeVar("T")
_NODES: dict[type, tuple[str, ...]] = {}  # a marked dataclass -> the names of its fields


def node(cls: type[T]) -> type[T]:
    """Mark a dataclass as a tree of its fields."""
    names = tuple(f.name for f in fields(cls))  # type: ignore[arg-type]
    _NODES[cls] = names
    _pytree.register_pytree_node(
        cls,
        lambda value: ([getattr(value, name) for name in names], None),
        lambda children, _: cls(*children),
    )
    return cls


def mapped(change: Callable[..., Tensor], first: Any, *others: Any) -> Any:
    """The first value with every tensor changed; `change` is given the tensors that all values have in one place."""
    if not others:
        return _changed(change, first)  # by far the most common case, without lists of one
    kind = type(first)
    if first is None:
        return None
    if isinstance(first, Tensor):
        return change(first, *others)
    if isinstance(first, dict):
        return {k: mapped(change, part, *[other[k] for other in others]) for k, part in first.items()}
    if (names := _NODES.get(kind)) is not None:
        return kind(*[mapped(change, *[getattr(value, name) for value in (first, *others)]) for name in names])
    parts = [mapped(change, *each) for each in zip(first, *others, strict=True)]
    return kind(*parts) if hasattr(first, "_fields") else kind(parts)


def _changed(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with every tensor changed."""
    kind = type(value)
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: change(v) if type(v) is Tensor else _changed(change, v) for k, v in value.items()}
    if value is None:
        return None
    names = _NODES.get(kind)
    inner = value if names is None else [getattr(value, name) for name in names]
    parts = [change(part) if type(part) is Tensor else _changed(change, part) for part in inner]
    return kind(*parts) if names is not None or hasattr(value, "_fields") else kind(parts)


def leaves(value: Any) -> list[Tensor]:
    """All tensors of a tree, those of a dict in the order of their names, whoever was put in first."""
    found: list[Tensor] = []
    _collect((value,), found)
    return found


def _collect(parts: Iterable[Any], found: list[Tensor]) -> None:
    """Add all tensors of some trees to a list."""
    for part in parts:
        kind = type(part)
        if kind is Tensor or isinstance(part, Tensor):  # the first is by far the faster to ask
            found.append(part)
        elif (names := _NODES.get(kind)) is not None:
            _collect([getattr(part, name) for name in names], found)
        elif part:
            _collect([part[k] for k in sorted(part)] if isinstance(part, dict) else part, found)


def rebuilt(like: T, tensors: Iterator[Tensor]) -> T:
    """The inverse of `leaves`: a tree like another, made of the next tensors."""
    made: Any
    if isinstance(like, Tensor):
        made = next(tensors)
    elif like is None:
        made = None
    elif isinstance(like, dict):
        made = dict.fromkeys(like) | {k: rebuilt(like[k], tensors) for k in sorted(like)}
    elif (names := _NODES.get(type(like))) is not None:
        made = type(like)(*[rebuilt(getattr(like, name), tensors) for name in names])
    else:
        parts = [rebuilt(part, tensors) for part in like]  # type: ignore[attr-defined]
        made = type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)  # type: ignore[call-arg]
    return made  # type: ignore[no-any-return]


def rows(value: T, where: Tensor | slice | int | list[int]) -> T:
    """Some rows of every tensor, of the first axis."""
    return mapped(lambda t: t[where], value)  # type: ignore[no-any-return]


def stacked(values: Sequence[T]) -> T:
    """Values as one, with a new axis in front."""
    return mapped(lambda *each: torch.stack(each), *values)  # type: ignore[no-any-return]


def joined(values: Sequence[T]) -> T:
    """Values as one, end to end along the first axis."""
    return mapped(lambda *each: torch.cat(each), *values)  # type: ignore[no-any-return]


def moved(value: T, device: torch.device) -> T:
    """The same on a device."""
    return mapped(lambda t: t.to(device), value)  # type: ignore[no-any-return]


def aligned(value: T) -> T:
    """Copies in memory of their own.

    Rows of a larger tensor drag all of it along, files refuse them, and fast sums depend on where a tensor begins in
    memory: only copies make a run that was interrupted the same to the last bit as one that was not.
    """
    return mapped(lambda t: t.clone(memory_format=torch.contiguous_format), value)  # type: ignore[no-any-return]


# -- trees inside of trees ---------------------------------------------------------------------------------------------


def prefixed(name: str, tree: Tree, joint: str = ".") -> Tree:
    """A tree with a name in front of its names, to lie in a larger one."""
    return {f"{name}{joint}{k}": v for k, v in tree.items()}


def under(name: str, tree: Tree, joint: str = ".") -> Tree:
    """The tree that was put into a larger one with a name in front."""
    front = f"{name}{joint}"
    return {k.removeprefix(front): v for k, v in tree.items() if k.startswith(front)}
