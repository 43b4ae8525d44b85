"""An engine whose clients live in child processes, and share nothing with the server but messages.

The children run the package's own client side, with the data, memory and held models of their clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from fnrfl.core import trees
from fnrfl.core.messages import ClientSide, Failure, MeasureRequest, MemoryRequest, TrainReply, TrainRequest
from fnrfl.core.trees import Tree
from fnrfl.engines.wire import from_bytes, to_bytes

CHILDREN, _RUNS = 2, count()


def serve(pipe: Connection) -> None:
    """A child: it makes a client side for every run, with data of its own, and answers requests."""
    from toys import client_side

    runs: dict[int, Any] = {}
    while message := pipe.recv_bytes():
        run, request = from_bytes(message)
        new = run not in runs
        runs[run] = client_side(request) if new else runs[run]
        pipe.send_bytes(to_bytes(None if new else answer(runs[run], request)))


def answer(clients: ClientSide, request: Any) -> Any:
    """Return a client side's answer as a plain value; an error becomes a `Failure`."""
    try:
        if isinstance(request, TrainRequest):
            return list(clients.train(request))
        if isinstance(request, MeasureRequest):
            return clients.measure(request)
        if request.memory is None:
            return clients.memory.get(request.client)
        return clients.memory.put(request.client, request.memory)
    except Exception as error:
        return Failure.of(error)


@cache
def children() -> list[Connection]:
    pipes = [get_context("spawn").Pipe() for _ in range(CHILDREN)]
    for _, theirs in pipes:
        get_context("spawn").Process(target=serve, args=(theirs,), daemon=True).start()
        theirs.close()  # so that a child that ends is noticed
    return [ours for ours, _ in pipes]


class Children:
    """A client side, and its clients' memory; client i is in child i modulo their number."""

    def __init__(self, run: Any) -> None:
        self.run, self.memory, self.changed = next(_RUNS), self, set[int]()
        for child in range(CHILDREN):
            self._ask(child, run)

    def train(self, request: TrainRequest) -> Iterator[TrainReply]:
        self.changed |= set(request.clients if request.task.remember else [])
        return (reply for replies in self._ask_each(request) for reply in replies)

    def measure(self, request: MeasureRequest) -> Tree:
        return trees.joined(self._ask_each(request))

    def get(self, client: int) -> Tree:
        return self._ask(client, MemoryRequest(client))  # type: ignore[no-any-return]

    def put(self, client: int, memory: Tree) -> None:
        self._ask(client, MemoryRequest(client, memory))

    def _ask_each(self, request: TrainRequest | MeasureRequest) -> list[Any]:
        rows = {client: request.rows(slice(m, m + 1)) for m, client in enumerate(request.clients)}
        ask = lambda child: {c: self._ask(c, row) for c, row in rows.items() if c % CHILDREN == child}  # noqa: E731
        with ThreadPoolExecutor(CHILDREN) as threads:  # the children work side by side
            replies = {c: reply for part in threads.map(ask, range(CHILDREN)) for c, reply in part.items()}
        return [replies[client] for client in request.clients]

    def _ask(self, client: int, request: Any) -> Any:
        pipe = children()[client % CHILDREN]
        pipe.send_bytes(to_bytes((self.run, request)))
        if isinstance(reply := from_bytes(pipe.recv_bytes()), Failure):
            raise reply.error()
        return reply
