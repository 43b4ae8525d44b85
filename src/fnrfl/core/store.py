"""What clients remember between tasks and rounds, by client index."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fnrfl.core.types import Tree, aligned

CPU = torch.device("cpu")


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

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(sorted(self._here.keys() | self._there))

    def get(self, client: int) -> Tree:
        """One client's memory."""
        found = aligned(load_file(self._file(client))) if client in self._there else self._here.get(client, self.birth)
        return {k: v.to(self.device) for k, v in found.items()}

    def put(self, client: int, memory: Tree) -> None:
        """Replace one client's memory."""
        self.keep(client, self.copied(memory))

    def copied(self, memory: Tree) -> Tree:
        """A memory as it is kept."""
        return aligned({k: v.to(self.home) for k, v in memory.items()})

    def keep(self, client: int, memory: Tree) -> None:
        """Replace one client's memory by a copy."""
        self.changed.add(client)
        if self.folder is None:
            self._here[client] = memory
        else:
            save_file(memory, self._file(client))
            self._there.add(client)

    def move(self, home: torch.device) -> None:
        """Keep memories elsewhere from now on, those there are as well."""
        if home != self.home:
            self.home, self._here = home, {c: {k: v.to(home) for k, v in m.items()} for c, m in self._here.items()}

    def read(self, clients: list[int]) -> Tree:
        """Memories stacked, [M, ...]."""
        rows = [self.get(c) for c in clients]
        return {k: torch.stack([row[k] for row in rows]) for k in rows[0]} if rows else {}

    def renewed(self, clients: list[int], changed: dict[str, list[Tensor]]) -> list[tuple[int, Tree]]:
        """Copies of some clients' memories with some names changed, to be kept; row m belongs to client m."""
        if not changed:
            return []
        new = (self.get(c) | {k: rows[m] for k, rows in changed.items()} for m, c in enumerate(clients))
        return [(client, self.copied(memory)) for client, memory in zip(clients, new, strict=True)]

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
