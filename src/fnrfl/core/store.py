"""What clients remember between tasks and rounds, by client index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file

from fnrfl.core import trees
from fnrfl.core.trees import Tree, aligned

CPU = torch.device("cpu")


class ClientMemory(Protocol):
    """What clients remember between rounds, wherever it lives: checkpoints and personal models read it."""

    birth: Tree  # what a client remembers before its first round
    changed: set[int]  # clients whose memory was written since the last checkpoint

    def __contains__(self, client: int) -> bool: ...

    def __iter__(self) -> Iterator[int]: ...

    def get(self, client: int) -> Tree:
        """One client's memory."""
        ...

    def put(self, client: int, memory: Tree) -> None:
        """Replace one client's memory."""
        ...


class ClientStore:
    """Named tensors per client, equal to `birth` until written.

    Nothing is allocated for a client before it writes. With a `folder`, memories live on disk and only the clients
    being read are in memory; else they live on `home`. They are read onto `device`.
    """

    def __init__(
        self,
        birth: Tree,
        folder: Path | None = None,
        device: torch.device = CPU,
        home: torch.device | None = None,
    ) -> None:
        self.birth, self.folder, self.device, self.home = birth, folder, device, home or device
        self.changed: set[int] = set()  # written since the last checkpoint
        self._here: dict[int, Tree] = {}
        self._there: set[int] = set()

    def __contains__(self, client: int) -> bool:
        return client in self._here or client in self._there

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._here.keys() | self._there))

    def get(self, client: int) -> Tree:
        """One client's memory."""
        if client in self._there:
            return trees.moved(aligned(load_file(self._file(client))), self.device)
        if client in self._here and self.home == self.device:
            return dict(self._here[client])
        return trees.moved(self._here.get(client, self.birth), self.device)

    def put(self, client: int, memory: Tree) -> None:
        """Replace one client's memory."""
        self.keep(client, self.copied(memory))

    def copied(self, memory: Tree) -> Tree:
        """A memory as it is kept."""
        return aligned(trees.moved(memory, self.home))

    def keep(self, client: int, memory: Tree) -> None:
        """Replace one client's memory by these very tensors, which nobody may change; `put` copies."""
        self.changed.add(client)
        if self.folder is None:
            self._here[client] = memory
        else:
            save_file(memory, self._file(client))
            self._there.add(client)

    def move(self, home: torch.device) -> None:
        """Keep memories elsewhere from now on, those there are as well."""
        if home != self.home:
            self.home, self._here = home, {client: trees.moved(memory, home) for client, memory in self._here.items()}

    def read(self, clients: list[int]) -> Tree:
        """Memories stacked, [M, ...]."""
        return trees.stacked([self.get(client) for client in clients]) if clients else {}

    def renewed(self, clients: list[int], changed: Tree) -> list[tuple[int, Tree]]:
        """Copies of some clients' memories with some names changed, to be kept; row m of `changed` is client m's."""
        if not changed:
            return []
        return [(client, self.copied(self.get(client) | trees.rows(changed, m))) for m, client in enumerate(clients)]

    def clear(self) -> None:
        """Forget everything."""
        for client in self._there:
            self._file(client).unlink()
        self._here.clear()
        self._there.clear()
        self.changed.clear()

    def _file(self, client: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client}.safetensors"
