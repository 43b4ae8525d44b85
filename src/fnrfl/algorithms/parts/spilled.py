"""Replies that must wait until the whole cohort has answered."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fnrfl.core import trees
from fnrfl.core.values import Replies, nobody_answered


class SpilledReplies:
    """Replies that wait: one chunk in memory, several on disk; without their models if the clients keep those.

    They can be read once.
    """

    def __init__(self, chunks: Iterable[Replies], *, keep_models: bool) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # made for the first chunk that goes to disk
        self._only: Replies | None = None
        self._shapes: list[Replies] = []  # of the chunks on disk: their names, types and devices, without rows
        clients = []
        for chunk in chunks:
            clients.append(chunk.clients)
            if not keep_models:
                gone = chunk.params.new_zeros(len(chunk.clients), 0)  # a view would keep all of them
                chunk = replace(chunk, trained=gone, refined=None, buffers={})
            if len(clients) == 1:
                self._only = chunk
                continue
            if self._only is not None:
                self._save(self._only)
                self._only = None
            self._save(chunk)
        if not clients:
            raise nobody_answered()
        self.clients = torch.cat(clients)

    def __iter__(self) -> Iterator[Replies]:
        if self._only is not None:
            yield self._only
        if self._folder is not None:
            with self._folder as folder:
                for i in range(len(self._shapes)):
                    yield self._load(Path(folder) / f"{i}.safetensors", self._shapes[i])

    def _save(self, chunk: Replies) -> None:
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="fnrfl-")
        tensors = {str(i): leaf for i, leaf in enumerate(trees.leaves(trees.aligned(chunk)))}
        save_file(tensors, Path(self._folder.name) / f"{len(self._shapes)}.safetensors")
        self._shapes.append(trees.mapped(lambda t: t[:0].clone(), chunk))

    def _load(self, file: Path, like: Replies) -> Replies:
        tensors = trees.aligned(load_file(file))
        file.unlink()
        places = [leaf.device for leaf in trees.leaves(like)]
        return trees.rebuilt(like, iter([tensors[str(k)].to(place) for k, place in enumerate(places)]))
