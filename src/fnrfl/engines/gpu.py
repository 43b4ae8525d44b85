"""Clients on GPUs: groups of them as one grouped network, their steps captured."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnrfl.core.errors import CompatibilityError, FnrflError
from fnrfl.core.net import Net
from fnrfl.core.store import CPU
from fnrfl.core.types import Data, Feed, LocalTask, Part, Probe, Replies, State, Step, Training, Tree
from fnrfl.engines.batched import Batched
from fnrfl.engines.capture import Capturer
from fnrfl.engines.job import Job
from fnrfl.engines.trace import Steps, Tracer

T = TypeVar("T")
log = logging.getLogger("fnrfl")
COPIES = 16  # of a client's parameters that are alive while it trains, at most
PART = 0.5  # of the memory that models may take; activations and data have the rest


def devices() -> list[torch.device]:
    """All GPUs, or a sentence about why there is none."""
    if not torch.cuda.is_available():
        built = "sees none" if torch.version.cuda else "was built without CUDA"
        raise CompatibilityError(
            f'engine = "gpu" needs an NVIDIA GPU, and torch {torch.__version__} {built}. Set engine = "auto", which '
            "takes the GPU where there is one and the CPU otherwise."
        )
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


_TURN = threading.RLock()  # of runs on GPUs in one process


@contextmanager
def settings(*, deterministic: bool, tf32: bool) -> Iterator[None]:
    """Inside, torch's kernels are chosen as a run needs them, for all of this process: such runs take turns."""
    cudnn, matmul, utils = torch.backends.cudnn, torch.backends.cuda.matmul, torch.utils.deterministic
    with _TURN, ExitStack() as before:
        for place, name in (
            (cudnn, "allow_tf32"), (cudnn, "benchmark"), (cudnn, "deterministic"), (matmul, "allow_tf32"),
            (utils, "fill_uninitialized_memory"),
        ):  # fmt: skip
            before.callback(setattr, place, name, getattr(place, name))
        before.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        set_up(deterministic=deterministic, tf32=tf32)
        yield


def set_up(*, deterministic: bool, tf32: bool) -> None:
    """Choose among torch's kernels, for all of this process; matrix products have tf32 within the layers only."""
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = tf32, False
    torch.backends.cudnn.benchmark = False  # captured steps alone are worth a search
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def clients_at_once(size: int, itemsize: int, cohort: int) -> int:
    """How many clients' models fit in the memory of a GPU: all of it, so that the same run decides alike."""
    _, total = torch.cuda.mem_get_info()
    return max(1, min(cohort, int(PART * total / (COPIES * size * itemsize))))


class Gpu(Batched):
    """`Batched` with models and examples on GPUs: groups and probes are spread over them, the server is on the first.

    Results depend on the number of GPUs by rounding alone: groups are smaller where there are more. What does not fit
    in memory is tried again with half the clients. `devices` may be anything that torch knows.
    """

    gathered = 256 << 20

    def __init__(
        self,
        net: Net,
        feed: Feed,
        training: Training,
        *,
        devices: Sequence[torch.device] = (),
        tf32: bool = False,
        **options: Any,
    ) -> None:
        self.tf32 = tf32
        self.devices = list(devices) or [net.device]
        if net.device.type == "cuda" and len(set(self.devices)) < len(self.devices):
            raise ValueError("A GPU can be named once: programs write to tensors of their own.")
        others = [device for device in dict.fromkeys(self.devices) if device != net.device]
        self._others = {device: (net.copy(device), feed.elsewhere(device)) for device in others}
        self._full = False  # whether memory was too small once
        super().__init__(net, feed, training, **options | {"threads": len(self.devices)})

    def clock(self) -> float:
        """Seconds of work that is done: a phase ends when its GPUs have, not when Python goes on."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return super().clock()

    def _tracer(self) -> Tracer:
        return Capturer(self.net.compute or self.net.dtype) if self.net.device.type == "cuda" else super()._tracer()

    def _copy(self, i: int) -> Net:
        return self.net.copy(self.devices[i])

    def _feed(self, net: Net) -> Feed:
        return self.feed if net.device == self.net.device else self._others[net.device][1]

    def _everywhere(self) -> list[Net]:
        return [self.net, *(net for net, _ in self._others.values())]

    def each(self, count: int, work: Callable[[Net, int], T]) -> list[T]:
        def there(net: Net, m: int) -> T:
            with torch.cuda.device(net.device) if net.device.type == "cuda" else nullcontext():
                return work(net, m)

        return super().each(count, there)

    def _run(self, job: Job) -> list[Tensor]:
        with self._layers():
            return super()._run(job)

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public", at: State | None = None) -> Tree:
        with self._layers():
            return super().measure(cohort, probe, data=data, at=at)

    def repeat(self, key: Hashable, step: Step, same: Sequence[Part], turns: Sequence[Part]) -> Tensor:
        with self._layers():
            return super().repeat(key, step, same, turns)

    def _recorded(self, *what: Any) -> Steps | None:
        return self._with_room(partial(super()._recorded, *what))

    def fit(self, task: LocalTask) -> State:
        return self._with_room(partial(super().fit, task))

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        if len(cohort) > (self.clients_at_once or len(cohort)):
            self.held.move(CPU)
        yield from super().stream(cohort, task)

    @contextmanager
    def _layers(self) -> Iterator[None]:
        """The precision of layers. What a server does with models is not rounded to it."""
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    def warm_up(self) -> None:
        """Nothing: what the first round prepares is counted apart."""

    def begin(self, t: int) -> None:
        super().begin(t)
        self._spread()

    def _spread(self) -> None:
        """As many clients in a group as there are for each device."""
        self.rows = min(type(self).rows, -(-(self.clients_at_once or type(self).rows) // len(self.devices)))

    def _fitting(self, cohort: Tensor, task: LocalTask) -> Replies | None:
        try:
            replies = self._chunk(cohort, task)
        except torch.OutOfMemoryError:
            replies = None  # outside of this clause the failed attempt and its tensors are gone
        if replies is None:
            self._make_room(len(cohort))
        return replies

    def _make_room(self, clients: int) -> None:
        """Less to do at once: without the other programs, then with half the clients, at last without any program.

        Programs are let go once: those that cannot be there together would be recorded anew in every round.
        """
        self._let_go()
        if not self._full:
            self._full = True
            return
        rows = min(self.rows, clients)
        if rows > 1:
            self.clients_at_once = -(-rows // 2) * len(self.devices)
            self._spread()
            self.store.move(CPU)
            self.held.move(CPU)
            self.note(clients_at_once=self.clients_at_once)
            log.warning("the GPU's memory is full: from now on %d clients are trained at once.", self.clients_at_once)
        elif self.tracer is not None and not self.tracer.closed:
            self.tracer.close()
        else:
            raise FnrflError(
                "One client's training does not fit in the GPU's memory. Set a smaller client.batch, or "
                'engine.precision = "bf16".'
            )

    def _with_room(self, work: Callable[[], T]) -> T:
        """What the server does alone: without the other programs, if it does not fit beside them."""
        with suppress(torch.OutOfMemoryError):
            return work()
        self._let_go()
        return work()

    def _let_go(self) -> None:
        """Without programs, and without what torch keeps for later."""
        if self.tracer is not None:
            self.tracer.clear()
        gc.collect()
        if self.net.device.type == "cuda":
            torch.cuda.empty_cache()
