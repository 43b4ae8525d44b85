"""Where steps are taken: nets, the examples beside them, and work side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch

from fnrfl.core.feed import Feed
from fnrfl.core.net import Net
from fnrfl.process import as_worker, one_intra_op_thread

T = TypeVar("T")


class Worker(NamedTuple):
    """A net that one thread at a time uses, and the examples on its device."""

    net: Net
    feed: Feed


Work = Callable[[Worker, int], T]


class DevicePool:
    """Threads that take a worker each for as long as they work."""

    probes_together: bool  # whether the models of several clients are asked in one pass; else one fills the device
    max_gather_bytes: int  # examples that are gathered at once: many steps of a small net, one of a large
    idle_rows_cost: bool  # whether a step takes longer for rows that do nothing

    def __init__(self, net: Net, feed: Feed, workers: Sequence[Worker]) -> None:
        """`net` and `feed` are the server's."""
        self.net, self.feed = net, feed
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in workers:
            self._free.put(worker)
        self._count = len(workers)
        self._threads = ThreadPoolExecutor(len(workers), initializer=as_worker)

    def each(self, count: int, work: Work[T]) -> list[T]:
        """Return `work(worker, i)` for every i below count, side by side, each with a worker that nobody else uses.

        Nobody works any more when an error goes on: the one of the lowest i.
        """
        todo, done, errors = deque(range(count)), dict[int, T](), dict[int, BaseException]()

        def take_work() -> None:
            worker = self._free.get()
            try:
                with torch.no_grad(), suppress(IndexError):  # a thread's own setting; nothing is left to do
                    while True:
                        i = todo.popleft()
                        try:
                            done[i] = work(worker, i)  # noqa: F821  (deleted when all is done)
                        except BaseException as error:
                            errors[i] = error
                            todo.clear()
            finally:
                self._free.put(worker)

        try:
            if count == 1 or self._count == 1:
                with one_intra_op_thread():
                    take_work()
            else:
                wait([self._threads.submit(take_work) for _ in range(min(count, self._count))])
        finally:
            todo.clear()  # whoever interrupts has nothing begun any more
            del work  # a thread keeps what it did last for a moment, and with it would keep the models of the clients
        if errors:
            raise errors[min(errors)]
        return [done[i] for i in range(count)]

    def devices(self) -> list[Worker]:
        """Return one worker for each device, to be used while no other thread works."""
        return [Worker(self.net, self.feed)]

    def layer_precision(self) -> AbstractContextManager[object]:
        """Inside, the layers of nets compute in the precision that was asked for."""
        return nullcontext()

    def wait(self) -> None:
        """Wait until the work that was begun is done: operators on a CPU are done when they return."""

    def free_memory(self) -> None:
        """Give back memory that is kept for later; on a CPU it goes back by itself."""

    def close(self, *, wait: bool) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=wait, cancel_futures=True)


class Threads(DevicePool):
    """The CPU: `threads` workers, each with a module of its own.

    `functional_call` swaps parameters inside the module, so two threads that shared one would silently mix clients up.
    """

    probes_together, max_gather_bytes, idle_rows_cost = True, 4 << 20, True

    def __init__(self, net: Net, feed: Feed, threads: int = 1) -> None:
        super().__init__(net, feed, [Worker(net.copy(), feed) for _ in range(threads)])
