"""Clients on GPUs: groups of them as one grouped network, their steps captured."""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor

from fnrfl.core.types import LocalTask, Replies
from fnrfl.engines.batched import Batched
from fnrfl.engines.capture import Capturer
from fnrfl.engines.trace import Tracer
from fnrfl.errors import CompatibilityError, FnrflError

log = logging.getLogger("fnrfl")
COPIES = 16  # of a client's parameters that are alive while it trains, at most
PART = 0.5  # of the free memory that models may take; activations and data have the rest


def device() -> torch.device:
    """The GPU, or a sentence about why there is none."""
    if not torch.cuda.is_available():
        built = "sees none" if torch.version.cuda else "was built without CUDA"
        raise CompatibilityError(
            f'engine = "gpu" needs an NVIDIA GPU, and torch {torch.__version__} {built}. Set engine = "auto", which '
            "takes the GPU where there is one and the CPU otherwise."
        )
    return torch.device("cuda", torch.cuda.current_device())


def set_up(*, deterministic: bool, tf32: bool) -> None:
    """Choose among torch's kernels, for all of this process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = not deterministic
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
    """`Batched` with models and examples on a GPU. What does not fit in memory is tried again with half the clients."""

    gathered = 256 << 20

    def _tracer(self) -> Tracer:
        return Capturer(self.net.compute or self.net.dtype) if self.net.device.type == "cuda" else super()._tracer()

    def warm_up(self) -> None:
        """Nothing: the first round pays, and says what for."""

    def begin(self, t: int) -> None:
        super().begin(t)
        if self.clients_at_once:
            self.rows = min(type(self).rows, self.clients_at_once)

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
        torch.cuda.empty_cache()
        self.clients_at_once = self.rows = -(-min(len(cohort), self.clients_at_once or len(cohort)) // 2)
        log.warning("the GPU's memory is full: from now on %d clients are trained at once.", self.clients_at_once)
        return None
