"""A client on its own machine: it answers letters, and keeps its memory and the model that it holds in a folder."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from fnrfl.core.errors import FnrflError, from_system, sentence
from fnrfl.core.messages import Failure, MeasureRequest, MemoryRequest, TrainReply, TrainRequest
from fnrfl.core.net import Net
from fnrfl.core.store import ClientStore
from fnrfl.core.trees import Tree, aligned
from fnrfl.core.values import LocalTask, State
from fnrfl.engines.kept_clients import KeptClients
from fnrfl.engines.letters import Letter, LetterAnswer, Version, check_run_id
from fnrfl.engines.trainer import Trainer
from fnrfl.engines.wire import answer, from_bytes, plain_fields, to_bytes

log = logging.getLogger("fnrfl")


@dataclass(frozen=True)
class Participant:
    """All that the work of one client needs."""

    client: int
    trainer: Trainer
    birth: Tree  # what the client remembers before its first round
    shares_memory: bool = False  # whether the server may read what the client remembers
    scaled: Callable[[Tree], Trainer] | None = None  # means and spreads -> the trainer that scales; None: none does

    def trainer_for(self, letter: Letter) -> Trainer:
        """Who does the work that a letter asks for: where inputs are to be scaled, the letter says how.

        Before that the client can be asked for sums of its inputs alone, about which no model is asked.
        """
        if letter.scale is not None and self.scaled is not None:
            return self.scaled(letter.scale)
        about_data = isinstance(letter.request, MeasureRequest) and not letter.request.probe.asks_model
        if (letter.scale is None) != (self.scaled is None) and not about_data:
            says, are = ("says", "are not") if self.scaled is None else ("does not say", "are")
            raise FnrflError(
                f"A letter {says} how inputs are scaled, and those of client {self.client} {are}. It was refused: give "
                "server and node the same recipe."
            )
        return self.trainer


class VersionedFolder:
    """Trees of tensors in files, by version; a file is written whole or not at all, and read if its hash is right."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def read(self, version: Version) -> Tree | None:
        """What was kept; None if it is not there, or damaged."""
        try:
            content = (self.folder / version.file).read_bytes()
        except FileNotFoundError:
            return None
        return aligned(load(content)) if hashlib.sha256(content).hexdigest() == version.sha256 else None

    def write(self, version: Version, tree: Tree) -> Version:
        """Keep a tree; the version that is given back has its hash."""
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tree.items()})
        part = self.folder / f"{version.file}.{os.getpid()}.part"
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.folder / version.file)
        except OSError:  # a full disk
            with suppress(OSError):
                part.unlink()
            raise
        return replace(version, sha256=hashlib.sha256(content).hexdigest())

    def remove_all_but(self, versions: Iterable[Version | None]) -> None:
        """Remove every other version, and what an interrupted write has left."""
        names = {version.file for version in versions if version is not None}
        for path in self.folder.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)


class Node:
    """Answers letters for one client of one run. Whatever it must know from one letter to the next is in its folder."""

    def __init__(self, participant: Participant, folder: Path, run: str) -> None:
        self.participant, self.run = participant, check_run_id(run)
        place = folder / self.run / f"client-{participant.client}"
        self.memories, self.models = VersionedFolder(place / "memory"), VersionedFolder(place / "held")

    def answer(self, message: bytes) -> bytes:
        """The answer to a letter; what goes wrong is told, never raised."""
        head: dict[str, Any] = {}
        try:
            head = plain_fields(message)
            return to_bytes(self._answer(self._checked(from_bytes(message))))
        except Exception as error:
            return to_bytes(LetterAnswer(str(head.get("id", "")), self.participant.client, failure_at_node(error)))

    def _checked(self, letter: Any) -> Letter:
        if not isinstance(letter, Letter):
            raise FnrflError("A message is no letter of fnrfl. It was refused.")
        mine = self.participant.client
        if letter.run != self.run or letter.client != mine:
            raise FnrflError(
                f"A letter is for client {letter.client} of run {str(letter.run)[:80]!r}, and this is client {mine} of "
                f"{self.run!r}. It was refused."
            )
        requested = getattr(letter.request, "clients", [getattr(letter.request, "client", None)])
        if not isinstance(letter.request, TrainRequest | MeasureRequest | MemoryRequest) or requested != [mine]:
            raise FnrflError(f"A letter to client {mine} does not ask for the work of that client. It was refused.")
        if isinstance(letter.request, MeasureRequest):
            self._check_question(letter.request)
        return letter

    def _check_question(self, request: MeasureRequest) -> None:
        """Refuse a question about single private examples, and one for scaling where the recipe does not scale."""
        probe = request.probe
        if request.data == "private" and probe.by_example:
            raise FnrflError(
                f"{type(probe).__name__} answers for single examples, and these are private. It was refused."
            )
        if probe.for_scaling and self.participant.scaled is None:
            raise FnrflError("The recipe does not scale inputs, so nobody is told sums of them. It was refused.")

    def _answer(self, letter: Letter) -> LetterAnswer:
        request, client = letter.request, letter.client
        memory, lost = self._remembered(letter)
        if isinstance(request, MemoryRequest):
            return LetterAnswer(letter.id, client, self._shared(request, memory), lost_memory=lost)
        trainer = self.participant.trainer_for(letter)
        clients = self._clients(letter, memory, trainer)
        content = answer(clients, request)
        if isinstance(content, Failure) or isinstance(request, MeasureRequest):
            return LetterAnswer(letter.id, client, content, lost_memory=lost)
        (reply,) = content
        new = Version(letter.round, letter.number)
        written = held = None
        if client in clients.memory.changed:
            written = self.memories.write(new, clients.memory.get(client))
            self.memories.remove_all_but([letter.kept, letter.memory, written])
        if request.task.hold_model and client in clients.held_models:
            held = self.models.write(new, clients.held_models.get(client))
            self.models.remove_all_but([letter.held, held])
        content = uploaded(reply, request.task, trainer.net, trainer.initial)
        return LetterAnswer(letter.id, client, content, written, held, lost)

    def _remembered(self, letter: Letter) -> tuple[Tree, bool]:
        """What the client remembers, and whether it has lost what the server believes it does."""
        kept = None if letter.memory is None else self.memories.read(letter.memory)
        return (self.participant.birth if kept is None else kept), letter.memory is not None and kept is None

    def _clients(self, letter: Letter, memory: Tree, trainer: Trainer) -> KeptClients:
        """The client side that answers this letter, as the client was when the server last heard of it."""
        client = letter.client
        memories = ClientStore(self.participant.birth, None, trainer.net.device)
        models = ClientStore({}, None, trainer.net.device)
        if letter.memory is not None:
            memories.put(client, memory)
            memories.changed.clear()
        if letter.held is not None:
            held = self.models.read(letter.held)
            if held is None:
                raise FnrflError(f"Client {client} no longer has the model that it held in round {letter.round + 1}.")
            models.put(client, held)
        return KeptClients(trainer, memories, models, round=letter.round)

    def _shared(self, request: MemoryRequest, memory: Tree) -> Tree:
        if not self.participant.shares_memory or request.memory is not None:
            raise FnrflError(
                f"Client {request.client} does not show its memory to the server. Methods with personal models are "
                "scored by the server: set share_memory = true in the node's own configuration to allow it."
            )
        return memory


def failure_at_node(error: Exception) -> Failure:
    """What a server is told of an error: of files no name, since the paths of a node are its own."""
    log.error(sentence(error))
    if (system := from_system(error)) is not None:
        return Failure(f"its node cannot use a file of its own: {system.strerror or 'no reason given'}.")
    return Failure.of(error)


def uploaded(reply: TrainReply, task: LocalTask, net: Net, initial: State) -> TrainReply:
    """What of a reply leaves the client: no model if it is to stay, and never what belongs to the client alone.

    In the place of that stands what everybody knows from the start.
    """
    replies = reply.replies
    if not task.send_model:
        gone = replies.params.new_zeros(len(replies.clients), 0)
        return replace(reply, replies=replace(replies, params=gone, trained=gone, buffers={}))
    if not task.never_sent:
        return reply
    params = torch.where(net.mask(task.never_sent), initial.params, replies.params)
    buffers = {k: initial.buffers[k].expand_as(v) if k in task.never_sent else v for k, v in replies.buffers.items()}
    return replace(reply, replies=replace(replies, params=params, trained=params, buffers=buffers))
