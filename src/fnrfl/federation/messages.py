"""Letters between the server and clients on other machines: a request, with the versions of what a client keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fnrfl.core.errors import FnrflError
from fnrfl.core.messages import Failure, TrainReply
from fnrfl.core.trees import Tree
from fnrfl.core.values import Replies, State
from fnrfl.engines.wire import travels

RUN_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")


@travels
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
class NodeRequest:
    """A request to one client, with what the server knows about that client."""

    run: str
    id: str  # one for each letter that a server has ever sent
    client: int
    round: int
    number: int  # of this request in the round: names the version that comes of it
    phase: str
    request: Any  # TrainRequest, MeasureRequest or MemoryRequest, of this client alone
    memory: Version | None = None  # what the client remembers; None: what it remembers before its first round
    kept: Version | None = None  # what it remembered when the round began: stays until the round is over
    held: Version | None = None  # the model that it holds; None: it holds none in this round
    scale: Tree | None = None  # means and spreads of inputs; None: they are not scaled, or clients are being asked


@travels
@dataclass(frozen=True)
class NodeReply:
    """What a client answers to a letter."""

    id: str  # of the letter
    client: int
    content: Any  # of a TrainRequest a TrainReply, of a MeasureRequest a tree [1, ...]; or a Failure
    memory: Version | None = None  # that the client has written
    held: Version | None = None
    lost_memory: bool = False  # the client had not kept what the letter names, and started from scratch


def check_run_id(run: object) -> str:
    """A run's id, which names a folder at each node; anything else is refused."""
    if not isinstance(run, str) or not RUN_ID.fullmatch(run):
        raise FnrflError(
            f"A message names the run {str(run)[:80]!r}; it must be 1 to 64 letters, digits, - or _. It was refused."
        )
    return run


def model_alone(state: State | None) -> State | None:
    """Return the part of the server's state that a client may see."""
    return None if state is None else State(state.params, state.buffers)


ANSWERS = {cls.__name__: cls for cls in (NodeReply, TrainReply, Replies, Failure, Version)}  # what a client sends
