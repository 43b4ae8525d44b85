"""What an answer from another machine must look like; the server uses nothing that does not."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fnrfl.core.messages import TrainReply, TrainRequest
from fnrfl.core.trees import Tree
from fnrfl.core.values import Replies, State
from fnrfl.engines.letters import LetterAnswer, Version

Check = Callable[[int, Any], str | None]  # a client and its answer -> what is wrong with it


def check_answer(client: int, content: Any) -> str | None:
    """What is wrong with a client's answer to a question; None: nothing."""
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        return "its answer is no set of tensors."
    if any(value.ndim == 0 or len(value) != 1 for value in content.values()):
        return "its answer is not that of one client."
    return next((f"its {name} is not finite." for name, value in content.items() if not value.isfinite().all()), None)


def check_memory(content: Any, birth: Tree) -> str | None:
    """What is wrong with what a client shows of its memory; None: nothing."""
    if not isinstance(content, dict) or content.keys() != birth.keys():
        return "its memory has other names than this run's."
    alike = all(isinstance(content[k], Tensor) and content[k].shape == birth[k].shape for k in birth)
    return None if alike else "its memory has other shapes than this run's."


def check_version(version: Any) -> str | None:
    """What is wrong with the version that a client says it keeps; None: nothing, or there is none."""
    if version is None:
        return None
    whole = isinstance(version, Version) and isinstance(version.round, int) and isinstance(version.number, int)
    right = whole and isinstance(version.sha256, str) and re.fullmatch("[0-9a-f]{64}", version.sha256)
    return None if right else "it does not say in the right form what it keeps."


def check_reply(content: Any, client: int, request: TrainRequest, model: State, examples: float) -> str | None:
    """What is wrong with a client's reply to a task; None: nothing."""
    if not isinstance(content, TrainReply) or not isinstance(content.replies, Replies):
        return "its answer is no reply to a task."
    replies = content.replies
    if content.not_finite:  # it says so itself, and nothing else of its reply is used
        (who, step), *others = content.not_finite.items()
        right = (who, others, len(replies.clients)) == (client, [], 0) and isinstance(step, int)
        return None if right else "it does not say in the right form that its numbers are not finite."
    if replies.clients.tolist() != [client] or replies.examples.tolist() != [examples]:
        return f"it speaks of other clients, or of another number of examples than the {examples:g} that it has."
    if any(len(value) != 1 for value in replies.extras.values()):
        return "what it sends beside the model is not of one client."
    named = _named_tensors(replies, model, request)
    if isinstance(named, str):
        return named
    return next((wrong for name, (value, like) in named.items() if (wrong := _unlike(name, value, like))), None)


def _named_tensors(replies: Replies, model: State, request: TrainRequest) -> dict[str, tuple[Tensor, Tensor]] | str:
    """Each tensor of a reply with one that it should look like; a text says why there is no such thing."""
    expected = State(model.params, model.buffers) if request.task.send_model else State(model.params[:0], {})
    if replies.buffers.keys() != expected.buffers.keys():
        return "its model has other buffers than this run's."
    named = {"params": (replies.params, expected.params), "trained": (replies.trained, expected.params)}
    named |= {name: (replies.buffers[name], value) for name, value in expected.buffers.items()}
    named |= {"loss": (replies.loss, model.params.new_zeros(())), "steps": (replies.steps, replies.steps.new_zeros(()))}
    named |= {"travel": (replies.travel, model.params.new_tensor(math.nan))}  # Adam has none
    return named | {f"extra {name}": (value, value[0]) for name, value in replies.extras.items()}


def _unlike(name: str, value: Tensor, like: Tensor) -> str | None:
    """What is wrong with a tensor of one client that should look like another; None: nothing."""
    if list(value.shape) != [1, *like.shape] or value.dtype != like.dtype:
        return f"its {name} has the shape {list(value.shape)} of {value.dtype}; {[1, *like.shape]} is right."
    unusual = name.startswith("extra ") or bool(like.isfinite().all())  # some buffers are infinite from the start
    return f"its {name} is not finite, and it did not say so." if unusual and not value.isfinite().all() else None


def odd_ones_out(answers: Mapping[int, LetterAnswer], trees_of: Callable[[Any], Tree]) -> dict[int, str]:
    """Clients whose tensors have other names or shapes than those of most clients, and what is wrong."""
    looks = {
        client: tuple((name, tuple(value.shape[1:])) for name, value in sorted(trees_of(answer.content).items()))
        for client, answer in answers.items()
        if not getattr(answer.content, "not_finite", None)  # it has nothing to send
    }
    usual = Counter(looks.values()).most_common(1)[0][0] if looks else ()
    return {
        client: f"it sends {dict(look)}, and most clients send {dict(usual)}."
        for client, look in looks.items()
        if look != usual
    }
