"""Replies that must wait until the whole cohort has answered."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fnrfl.core.types import Replies, Tree, aligned, nobody_answered


class Kept:
    """One chunk waits in memory, several on disk; without their models if the clients keep those. Read once."""

    def __init__(self, chunks: Iterable[Replies], *, models: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fnrfl-")
        self._first: Replies | None = None
        self._device = torch.device("cpu")
        self._count = 0
        clients = []
        for chunk in chunks:
            if not models:
                gone = chunk.params.new_zeros(len(chunk.clients), 0)  # a view would keep all of them
                chunk = replace(chunk, params=gone, trained=gone, buffers={})
            if self._count == 0:
                self._first, self._device = chunk, chunk.params.device
            else:
                if self._first is not None:
                    self._save(0, self._first)
                    self._first = None
                self._save(self._count, chunk)
            self._count += 1
            clients.append(chunk.clients)
        if not clients:
            raise nobody_answered()
        self.clients = torch.cat(clients)

    def __iter__(self) -> Iterator[Replies]:
        with self._folder:
            if self._first is not None:
                yield self._first
                return
            for i in range(self._count):
                yield self._load(i)

    def _file(self, i: int) -> Path:
        return Path(self._folder.name) / f"{i}.safetensors"

    def _save(self, i: int, chunk: Replies) -> None:
        flat: Tree = {}
        for f in fields(chunk):
            value = getattr(chunk, f.name)
            flat |= {f"{f.name}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {f.name: value}
        save_file(aligned(flat), self._file(i))

    def _load(self, i: int) -> Replies:
        values: dict[str, Any] = {"buffers": {}, "extras": {}}
        for name, tensor in aligned(load_file(self._file(i))).items():
            tree, _, key = name.partition("/")
            place = tensor.device if name == "clients" else self._device
            (values[tree] if key else values)[key or tree] = tensor.to(place)
        self._file(i).unlink()
        return Replies(**values)
