"""What the models of a cohort say about public examples: the teachers of a distillation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fnrfl.core.feed import forward_batch
from fnrfl.core.net import Net
from fnrfl.core.types import Replies, State

Vote = Literal["logits", "probs"]


def logits(net: Net, model: State, x: Tensor) -> Tensor:
    """A model's logits, [n, C]: eval mode, its own buffers, no gradient."""
    with torch.no_grad():
        parts = [
            net.eval_forward(model.params, model.buffers, net.laid_out(part))
            for part in x.split(forward_batch(net.device))
        ]
        return torch.cat([out.logits for out in parts])


def accuracy(net: Net, model: State, x: Tensor, y: Tensor) -> float:
    """The share of right answers."""
    return float((logits(net, model, x).argmax(-1) == y).double().mean())


def votes(net: Net, replies: Replies, x: Tensor, kind: Vote, temperature: float) -> Tensor:
    """What each client's model says, [m, n, C]: logits as they are, or probabilities at a temperature."""
    models = [State(p, {k: v[m] for k, v in replies.buffers.items()}) for m, p in enumerate(replies.params)]
    said = torch.stack([logits(net, model, x) for model in models])
    return said if kind == "logits" else (said / temperature).softmax(-1)


def verdict(total: Tensor, count: int, kind: Vote, temperature: float) -> Tensor:
    """The ensemble's probabilities, [n, C], from the sum of `count` votes."""
    mean = total / count
    return mean if kind == "probs" else (mean / temperature).softmax(-1)
