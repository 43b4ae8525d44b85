"""The schema of an answer from another machine: names, types, shapes and ranges. The server uses nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnrfl.core import optim
from fnrfl.core.algorithm import Objective
from fnrfl.core.messages import Failure, TrainReply, TrainRequest
from fnrfl.core.trees import Tree
from fnrfl.core.values import State
from fnrfl.core.words import printable
from fnrfl.federation.messages import NodeReply, NodeRequest, Version

Check = Callable[[int, Any], str | None]  # a client and its answer -> the sentence that refuses it, if it is wrong
MOST_TOLD = 500  # characters of a client's own words that are repeated


@dataclass(frozen=True)
class Field:
    """A tensor of an answer: its shape and type, and the range of its numbers."""

    like: Tensor  # of one client, without the client axis; a number equal to it is right whatever the range
    least: float = -math.inf
    most: float = math.inf

    @classmethod
    def exactly(cls, value: Tensor) -> Field:
        """A field with one right value."""
        return cls(value, math.inf, -math.inf)

    def refuse(self, name: str, value: Any) -> str | None:
        """Say why a value is not right; None: it is."""
        like = self.like
        if not isinstance(value, Tensor) or value.dtype != like.dtype or list(value.shape) != [1, *like.shape]:
            right = f"{[1, *like.shape]} of {like.dtype}"
            return f"its {name} is {_shape_of(value)}, and {right} is right."
        # Squares of so large numbers, and sums of many squares, can still be computed.
        largest = torch.finfo(like.dtype).max ** 0.4 if like.is_floating_point() else 2.0**53
        least, most = max(self.least, -largest), min(self.most, largest)
        fine = (value >= least) & (value <= most) | (value == like) | (value.isnan() & like.isnan())
        if bool(fine.all()):
            return None
        right = f"from {least:.6g} to {most:.6g}" if least <= most else f"{like.tolist():.6g}"
        return f"its {name} has {value[~fine][0].item():.6g}, which is not {right}."


Fields = dict[str, Field]


def refuse_tree(tree: Any, fields: Fields) -> str | None:
    """Say what is wrong with named tensors of one client; None: nothing."""
    if not isinstance(tree, dict) or tree.keys() != fields.keys():
        names = [*tree] if isinstance(tree, dict) else type(tree).__name__
        return in_short(f"it sends {names}, and {[*fields]} is right.")
    return next((wrong for name, field in fields.items() if (wrong := field.refuse(name, tree[name]))), None)


def refuse_envelope(answer: NodeReply, request: NodeRequest) -> str | None:
    """Say what is wrong with all but the content of an answer, or what its client says has gone wrong."""
    if isinstance(answer.content, Failure):
        return in_short(answer.content.reason) or "it failed without a reason."
    right = type(answer.lost_memory) is bool and all(
        version is None
        or (_is_hash(version.sha256) and str(version) == str(Version(request.round, request.number, version.sha256)))
        for version in (answer.memory, answer.held)
    )
    return None if right else "it does not say in the right form what it keeps."


def refuse_reply(
    content: Any, client: int, request: TrainRequest, model: State, extras: Tree, examples: float, steps: int
) -> str | None:
    """Say what is wrong with a client's reply to a task; None: nothing."""
    if not isinstance(content, TrainReply) or not isinstance(content.not_finite, dict):
        return "its answer is no reply to a task."
    replies = content.replies
    if content.not_finite:  # it says so itself, and nothing else of its reply is used
        ((who, step),) = content.not_finite.items()
        right = (who, len(replies.clients)) == (client, 0) and type(step) is int and -1 <= step <= steps
        return None if right else "it does not say in the right form that its numbers are not finite."
    if replies.refined is not None:
        return "it has a second model beside the one that it was trained to."
    facts = ("clients", "examples", "steps", "travel", "loss", "trained")
    named = {name: getattr(replies, name) for name in facts}
    named |= _labelled("buffer", replies.buffers) | _labelled("extra", replies.extras)
    return refuse_tree(named, _reply_fields(client, request, model, extras, examples, steps))


def _reply_fields(
    client: int, request: TrainRequest, model: State, extras: Tree, examples: float, steps: int
) -> Fields:
    """The fields of a reply: the number of steps follows from the task, and `travel` from that."""
    task, exactly = request.task, Field.exactly
    params, buffers = (model.params, model.buffers) if task.send_model else (model.params[:0], {})
    never_negative = type(task.objective).loss is Objective.loss  # a cross-entropy
    return {
        "clients": exactly(torch.tensor(client)),
        "examples": exactly(torch.tensor(examples, dtype=torch.float64)),
        "steps": exactly(torch.tensor(steps)),
        "travel": exactly(params.new_tensor(optim.travel(request.training, steps))),
        "loss": Field(params.new_zeros(()), 0.0 if never_negative else -math.inf),
        "trained": Field(params),
        **_labelled("buffer", fields_like(buffers)),
        **_labelled("extra", fields_like(extras)),
    }


def fields_like(tree: Tree) -> Fields:
    """Fields like named tensors; a variance is never negative."""
    return {k: Field(v, 0.0 if k.endswith("running_var") else -math.inf) for k, v in tree.items()}


def in_short(words: Any) -> str:
    """A client's own words as they are repeated: some of them, and none that move a cursor."""
    return printable(words[:MOST_TOLD]) if isinstance(words, str) else ""


def _labelled(kind: str, tree: dict[Any, Any]) -> dict[str, Any]:
    return {f"{kind} {name!r}": value for name, value in tree.items()}  # 1 is another name than '1'


def _is_hash(text: Any) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text) is not None


def _shape_of(value: Any) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
