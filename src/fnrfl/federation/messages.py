"""Messages between the server and its nodes. `engines/wire.py` makes bytes of them; each is parsed once at each end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fnrfl.core.errors import FnrflError
from fnrfl.core.messages import Failure, TrainReply
from fnrfl.core.values import Replies, State
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
    request: Any  # TrainRequest, MeasureRequest or MemoryRequest, of this client alone
    memory: Version | None = None  # what the client remembers; None: what it remembers before its first round
    kept: Version | None = None  # what it remembered when the round began: stays until the round is over
    held: Version | None = None  # the model that it holds; None: it holds none in this round


@dataclass(frozen=True)
class NodeReply:
    """What a node answers to a request."""

    id: str  # of the request
    client: int
    content: Any  # a TrainReply, an answer to a probe as a tree [1, ...], plain values of a handshake, or a Failure
    memory: Version | None = None  # that the client has written
    held: Version | None = None
    lost_memory: bool = False  # the client had not kept what the request names, and started from scratch


REPLIES = {cls.__name__: travels(cls) for cls in (NodeReply, TrainReply, Replies, Failure, Version)}  # of a node


def check_run_id(run: object) -> str:
    """Return a run's id, which names a folder at each node; refuse anything else."""
    if not isinstance(run, str) or not RUN_ID.fullmatch(run):
        raise FnrflError(f"A message names the run {str(run)[:80]!r}; it must be 1 to 64 letters, digits, - or _.")
    return run


def model_alone(state: State | None) -> State | None:
    """Return the part of the server's state that a client may see."""
    return None if state is None else State(state.params, state.buffers)
