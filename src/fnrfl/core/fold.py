"""One pass over a cohort's replies, after which the models can go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from fnrfl.core.trees import Tree
from fnrfl.core.values import Folded, Replies, nobody_answered

Fold = Callable[[Replies], Tree]  # some clients' replies -> named [m, ...] values
FOLD_ROWS = 16  # clients whose values are computed and summed at once: more would only take memory


def nothing(_: Replies) -> Tree:
    """The fold that keeps nothing."""
    return {}


class _Totals:
    """Sums of named values, by name."""

    def __init__(self) -> None:
        self.sums: Tree = {}

    def add(self, values: Tree, weights: Tensor) -> None:
        """Add rows, each times its weight."""
        for name, value in values.items():
            part = (weights.to(value.dtype) @ value.reshape(len(value), -1)).view(value.shape[1:])
            self.sums[name] = part if name not in self.sums else self.sums[name].add_(part)

    def raise_to(self, values: Tree) -> None:
        """Keep the largest of what there is and of these rows."""
        for name, value in values.items():
            top = value.amax(0)
            self.sums[name] = top if name not in self.sums else torch.maximum(self.sums[name], top)

    def divided(self, by: Tensor | int) -> Tree:
        """The sums over a number."""
        return {name: value.div_(by) for name, value in self.sums.items()}


def fold(
    chunks: Iterable[Replies], *, mean: Fold, uniform: bool = False, total: Fold = nothing, rows: Fold = nothing
) -> Folded:
    """One pass over the replies; no more than one chunk of models is alive at a time."""
    facts: list[tuple[Tensor, ...]] = []
    kept_rows: dict[str, list[Tensor]] = {}
    sums, means, floating, counters = _Totals(), _Totals(), _Totals(), _Totals()
    for chunk in _few_at_once(chunks):
        ones = torch.ones_like(chunk.examples)
        means.add(mean(chunk), ones if uniform else chunk.examples)
        sums.add(total(chunk), ones)
        for name, value in rows(chunk).items():
            kept_rows.setdefault(name, []).append(value)
        floating.add({k: v for k, v in chunk.buffers.items() if v.is_floating_point()}, chunk.examples)
        counters.raise_to({k: v for k, v in chunk.buffers.items() if not v.is_floating_point()})  # no sense in a mean
        facts.append((chunk.clients, chunk.examples, chunk.steps, chunk.travel, chunk.loss))
        del chunk
    if not facts:
        raise nobody_answered()
    clients, examples, steps, travel, loss = (torch.cat(f) for f in zip(*facts, strict=True))
    buffers = floating.divided(examples.sum()) | counters.sums
    averages = means.divided(len(examples) if uniform else examples.sum())
    stacked = {k: torch.cat(values) for k, values in kept_rows.items()}
    return Folded(clients, examples, steps, travel, loss, buffers, averages, sums.sums, stacked)


def _few_at_once(chunks: Iterable[Replies]) -> Iterator[Replies]:
    for chunk in chunks:
        count = len(chunk.clients)
        if count <= FOLD_ROWS:
            yield chunk
        else:
            yield from (chunk.pick(slice(i, i + FOLD_ROWS)) for i in range(0, count, FOLD_ROWS))
        del chunk
