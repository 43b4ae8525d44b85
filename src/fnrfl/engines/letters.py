"""Letters between the server and clients on other machines: a request, with the versions of what a client keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fnrfl.core.errors import FnrflError
from fnrfl.core.trees import Tree

RUN_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")


class Network(Protocol):
    """Carries bytes to clients and brings back what they answer; it knows nothing about their content."""

    def exchange(self, letters: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        """Send each client its letter, and give (client, answer) as answers come; a text says why there is none.

        It ends when everybody has answered or `seconds` have passed; whoever has not answered by then is left out.
        Answers that come later, or twice, may turn up in a later exchange: letters have numbers.
        """
        ...


@dataclass(frozen=True)
class Connection:
    """The network of one run."""

    network: Network
    run: str  # its id, which names a folder at each node; the same when the run goes on


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


@dataclass(frozen=True)
class Letter:
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


@dataclass(frozen=True)
class LetterAnswer:
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
