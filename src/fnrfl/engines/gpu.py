"""Clients on GPUs: groups of them as one grouped network, their steps captured."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnrfl.core.net import Net
from fnrfl.core.types import Feed, LocalTask, Replies, Training
from fnrfl.engines.batched import Batched
from fnrfl.engines.capture import Capturer
from fnrfl.engines.trace import Tracer
from fnrfl.errors import CompatibilityError, FnrflError

T = TypeVar("T")
log = logging.getLogger("fnrfl")
COPIES = 16  # of a client's parameters that are alive while it trains, at most
PART = 0.5  # of the free memory that models may take; activations and data have the rest


def devices() -> list[torch.device]:
    """All GPUs, or a sentence about why there is none."""
    if not torch.cuda.is_available():
        built = "sees none" if torch.version.cuda else "was built without CUDA"
        raise CompatibilityError(
            f'engine = "gpu" needs an NVIDIA GPU, and torch {torch.__version__} {built}. Set engine = "auto", which '
            "takes the GPU where there is one and the CPU otherwise."
        )
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def set_up(*, deterministic: bool, tf32: bool) -> None:
    """Choose among torch's kernels, for all of this process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.benchmark_limit = 0  # try all: the default misses the best for grouped convolutions
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def clients_at_once(size: int, itemsize: int, cohort: int) -> int:
    """How many clients' models fit in the memory that is free now."""
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(cohort, int(PART * free / (COPIES * size * itemsize))))


class Gpu(Batched):
    """`Batched` with models and examples on GPUs: groups and probes are spread over them, the server is on the first.

    Results depend on the number of GPUs by rounding alone: groups are smaller where there are more. What does not fit
    in memory is tried again with half the clients. `devices` may be anything that torch knows.
    """

    gathered = 256 << 20

    def __init__(
        self, net: Net, feed: Feed, training: Training, *, devices: Sequence[torch.device] = (), **options: Any
    ) -> None:
        self.devices = list(devices) or [net.device]
        others = [device for device in dict.fromkeys(self.devices) if device != net.device]
        self._others = {device: (net.copy(device), feed.elsewhere(device)) for device in others}
        super().__init__(net, feed, training, **options | {"threads": len(self.devices)})

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

    def warm_up(self) -> None:
        """Nothing: what the first round prepares is counted apart."""

    def begin(self, t: int) -> None:
        super().begin(t)
        here = -(-(self.clients_at_once or type(self).rows) // len(self.devices))
        self.rows = min(type(self).rows, here)

    def _fitting(self, cohort: Tensor, task: LocalTask) -> Replies | None:
        try:
            return self._chunk(cohort, task)
        except torch.OutOfMemoryError as error:
            if len(cohort) == 1:
                raise FnrflError(
                    "One client's training does not fit in the GPU's memory. Set a smaller client.batch, or "
                    'engine.precision = "bf16".'
                ) from error
        if self.tracer is not None:
            self.tracer.clear()
        self.clients_at_once = -(-min(len(cohort), self.clients_at_once or len(cohort)) // 2)
        self.rows = min(self.rows, self.clients_at_once)
        log.warning("the GPU's memory is full: from now on %d clients are trained at once.", self.clients_at_once)
        return None
