"""The models of clients that have one of their own, made one at a time from what a run keeps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import ConfigError
from fnrfl.core.net import Net
from fnrfl.core.store import CPU, ClientMemory, ClientStore
from fnrfl.core.types import State, Tree
from fnrfl.core.words import printable
from fnrfl.data.partition.by_client import some_of
from fnrfl.rundir import checkpoint
from fnrfl.rundir.record import Index

# The server's state, and what a client remembers: None for one that never wrote anything.
StoredModels = tuple[State, Callable[[int], Tree | None]]
ReadModels = Callable[[], StoredModels]


@dataclass(frozen=True, eq=False)
class ClientModels:
    """Every client's model, of what the server knows and the client remembers; one at a time is in memory."""

    algorithm: Algorithm
    net: Net
    names: tuple[str, ...]  # what each client is called: its id in the data, or its number
    stored: ReadModels

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[State]:
        return (self[client] for client in range(len(self)))

    def number(self, client: int | str) -> int:
        """Return the number of the client of this name."""
        if str(client) in self.names:
            return self.names.index(str(client))
        numbered = all(name == str(number) for number, name in enumerate(self.names))
        called, way = "numbered from 0", f"Give one from 0 to {len(self) - 1}."
        if not numbered:
            called, way = f"called {some_of(self.names)}", "Give one of them as the data names it."
        raise ConfigError(f"There is no client {printable(str(client))}: the run has {len(self)}, {called}. {way}")

    def __getitem__(self, client: int) -> State:
        state, memory = self._stored
        found = memory(client)
        mine = self.algorithm.personal(self.net, state, client, self._birth if found is None else found)
        return State(mine.params, mine.buffers)

    def model(self, client: int | str) -> nn.Module:
        """One client's model as an ordinary module in eval mode; the client is called as in `names`."""
        mine = self[self.number(client)]
        return self.net.export(mine.params, mine.buffers)

    @cached_property
    def _stored(self) -> StoredModels:
        return self.stored()

    @cached_property
    def _birth(self) -> Tree:
        return self.algorithm.client_state(self.net)


def on_disk(run_dir: Path, saved: Index) -> ReadModels:
    """Keep the last checkpoint of a finished run; it is read, and compared with its hashes, when it is needed."""
    path = run_dir.absolute()  # the working folder may be another by then

    def read() -> StoredModels:
        if not (path / "rounds").exists():
            raise ConfigError(
                f"{run_dir} keeps the clients' models in its last checkpoint, and rounds/ is missing. Put it back as "
                "it was, or run again into another directory."
            )
        return checkpoint.server_state(path, saved), lambda client: checkpoint.client_memory(path, saved, client)

    return read


def in_memory(state: State, store: ClientMemory) -> ReadModels:
    """Keep what an engine has at the end of a run that writes nothing; memories on disk are copied, for they go."""
    state = state.to(CPU)
    if not isinstance(store, ClientStore) or store.folder is None:
        memories = {client: {k: v.cpu() for k, v in store.get(client).items()} for client in store}
        return lambda: (state, memories.get)
    folder = tempfile.TemporaryDirectory(prefix="fnrfl-")
    copies = ClientStore({}, Path(folder.name))
    for client in store:
        copies.put(client, store.get(client))

    def memory(client: int, _owner: object = folder) -> Tree | None:  # the folder goes when nobody can ask any more
        return copies.get(client) if client in copies else None

    return lambda: (state, memory)
