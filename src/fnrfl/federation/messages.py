"""Messages between the server and its nodes, and the schema of replies: names, types, shapes and ranges.

`engines/wire.py` makes bytes of them; each is parsed once at each end.
"""

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
from fnrfl.core.errors import FnrflError
from fnrfl.core.messages import Failure, TrainReply, TrainRequest
from fnrfl.core.trees import Tree
from fnrfl.core.values import Replies, State
from fnrfl.core.words import printable
from fnrfl.engines.wire import travels

RUN_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")


@dataclass(frozen=True)
class Version:
    """What a client had kept after the n-th request of a round: its memory, or the model that it held."""

    round: int
    number: int
    sha256: str = ""  # of its file

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.round:06d}-{self.number:03d}.safetensors"


@travels
@dataclass(frozen=True)
class HandshakeRequest:
    """A question to a node before the first round."""

    id: str  # one for each question that a server has ever asked
    step: str  # "describe" its data, "count" its examples of what was agreed on, "begin" a run
    recipe: str
    agreement: dict[str, Any] | None = None  # as plain values
    run: str = ""


@travels
@dataclass(frozen=True)
class NodeRequest:
    """A request to one client, with what the server knows about that client."""

    run: str
    id: str  # one for each request that a server has ever sent
    client: int
    round: int
    number: int  # of this request in the round: names the version that comes of it
    phase: str
    request: Any  # TrainRequest, MeasureRequest, MemoryRequest or ScoreRequest, of this client alone
    memory: Version | None = None  # what the client remembers; None: what it remembers before its first round
    kept: Version | None = None  # what it remembered when the round began: stays until the round is over
    held: Version | None = None  # the model that it holds; None: it holds none in this round


@travels
@dataclass(frozen=True)
class ScoreRequest:
    """The question to a site, after the last round, how many of its test examples a model answers right."""

    model: State


@dataclass(frozen=True)
class NodeReply:
    """What a node answers to a request."""

    id: str  # of the request
    client: int
    content: Any  # a TrainReply, an answer to a probe as a tree [1, ...], or to a ScoreRequest as a tensor [1], plain
    # values of a handshake, or a Failure
    memory: Version | None = None  # that the client has written
    held: Version | None = None
    lost_memory: bool = False  # the client had not kept what the request names, and started from scratch


REPLIES = {cls.__name__: travels(cls) for cls in (NodeReply, TrainReply, Replies, Failure, Version)}  # of a node


def check_run_id(run: object) -> str:
    """Return a run's id, which names a folder at each node; refuse anything else."""
    if not isinstance(run, str) or not RUN_ID.fullmatch(run):
        raise FnrflError(f"A message names the run {str(run)[:80]!r}; it must be 1 to 64 letters, digits, - or _.")
    return run


def scores_model(request: TrainRequest, *, personalised: bool) -> bool:
    """Whether a site scores the model of this request: the one of the round before, or its own if it has one."""
    task = request.task
    return request.round > 0 and task.is_private_training and (task.start is not None or personalised)


def model_alone(state: State | None) -> State | None:
    """Return the part of the server's state that a client may see."""
    return None if state is None else State(state.params, state.buffers)


# -- the schema of replies: the server uses nothing else of what comes from another machine ---------------------------

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
        if not isinstance(value, Tensor):
            return f"its {name} is a {type(value).__name__}, and no tensor."
        if value.dtype != like.dtype or list(value.shape) != [1, *like.shape]:
            right = f"{[1, *like.shape]} of {like.dtype}"
            return f"its {name} is {list(value.shape)} of {value.dtype}, and {right} is right."
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
        return reason_of(answer.content)

    def right(version: Version) -> bool:
        sha256 = version.sha256
        hashed = isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256) is not None
        return hashed and str(version) == str(Version(request.round, request.number, sha256))

    kept = [version for version in (answer.memory, answer.held) if version is not None]
    fine = type(answer.lost_memory) is bool and all(map(right, kept))
    return None if fine else "it does not say in the right form what it keeps."


def refuse_score(right: Any, tests: int) -> str | None:
    """Say why this is not how many of so many test examples a site has answered right; None: it can be."""
    if not tests:
        return None if right is None else "it sends a score, and has agreed to send none."
    return Field(torch.tensor(0), 0, tests).refuse("score", right)


def refuse_reply(
    content: Any, client: int, request: TrainRequest, model: State, extras: Tree, examples: float, steps: int
) -> str | None:
    """Say what is wrong with a client's reply to a task; None: nothing.

    The number of steps follows from the task, and `travel` from that.
    """
    if not isinstance(content, TrainReply) or not isinstance(content.not_finite, dict):
        return "its answer is no reply to a task."
    replies, task, exactly = content.replies, request.task, Field.exactly
    if content.not_finite:  # it says so itself, and nothing else of its reply is used
        ((who, step),) = content.not_finite.items()
        right = (who, len(replies.clients)) == (client, 0) and type(step) is int and -1 <= step <= steps
        return None if right else "it does not say in the right form that its numbers are not finite."
    if replies.refined is not None:
        return "it has a second model beside the one that it was trained to."
    params, buffers = (model.params, model.buffers) if task.send_model else (model.params[:0], {})
    never_negative = type(task.objective).loss is Objective.loss  # a cross-entropy
    fields = {
        "clients": exactly(torch.tensor(client)),
        "examples": exactly(torch.tensor(examples, dtype=torch.float64)),
        "steps": exactly(torch.tensor(steps)),
        "travel": exactly(params.new_tensor(optim.travel(request.training, steps))),
        "loss": Field(params.new_zeros(()), 0.0 if never_negative else -math.inf),
        "trained": Field(params),
    }
    named = {name: getattr(replies, name) for name in fields}
    named |= _labelled("buffer", replies.buffers) | _labelled("extra", replies.extras)
    fields |= _labelled("buffer", fields_like(buffers)) | _labelled("extra", fields_like(extras))
    return refuse_tree(named, fields)


def fields_like(tree: Tree) -> Fields:
    """Return fields like named tensors; a variance is never negative."""
    return {k: Field(v, 0.0 if k.endswith("running_var") else -math.inf) for k, v in tree.items()}


def in_short(words: Any) -> str:
    """Repeat some of a client's own words, and none that move a cursor."""
    return printable(words[:MOST_TOLD]) if isinstance(words, str) else ""


def reason_of(failure: Failure) -> str:
    """Return why a client has failed, in short."""
    return in_short(failure.reason) or "it failed without a reason."


def _labelled(kind: str, tree: dict[Any, Any]) -> dict[str, Any]:
    return {f"{kind} {name!r}": value for name, value in tree.items()}  # 1 is another name than '1'
