"""GPUs as a pool of devices: a net and the examples on every device, and the settings of torch's kernels."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn

from fnrfl.core.errors import CompatibilityError
from fnrfl.core.feed import Feed
from fnrfl.core.net import Net
from fnrfl.engines.devices import DevicePool, Work, Worker
from fnrfl.kernels.layers import BATCHNORMS, Norm, shared_norm

T = TypeVar("T")
MODEL_COPIES = 16  # copies of a client's parameters that are alive while it trains, at most
MODEL_MEMORY_SHARE = 0.5  # share of the memory that models may take; activations and data have the rest


def found_devices(
    who: str = 'engine = "gpu"',
    way_out: str = 'Set engine = "auto", which takes the GPU where there is one and the CPU otherwise.',
) -> list[torch.device]:
    """All GPUs, or a sentence about why there is none for those who need one, and what they can do."""
    if not torch.cuda.is_available():
        built = "sees none" if torch.version.cuda else "was built without CUDA"
        raise CompatibilityError(f"{who} needs an NVIDIA GPU, and torch {torch.__version__} {built}. {way_out}")
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def on_first_gpu(net: Net, compute: torch.dtype) -> Net:
    """The net on the first GPU, with layers that clients share; its layers compute in a type."""
    return net.copy(found_devices()[0], compute=compute).with_shared_kernels()


def can_use_cudnn(net: Net) -> bool:
    """Whether clients of a net can step together in cuDNN's kernels.

    `vmap` has no rule for its recurrent layers, nor, where channels come last, for its BatchNorm: a subclass with a
    forward pass of its own is not replaced by fnrfl's.
    """
    return not any(isinstance(layer, nn.RNNBase) or _keeps_own_norm(layer) for layer in net.module.modules())


def _keeps_own_norm(layer: nn.Module) -> bool:
    return isinstance(layer, BATCHNORMS) and not isinstance(layer, Norm) and shared_norm(type(layer)) is None


_kernels_lock = threading.RLock()  # runs on GPUs in one process take turns


@contextmanager
def kernel_settings(*, deterministic: bool, tf32: bool, use_cudnn: bool = True) -> Iterator[None]:
    """Inside, torch's kernels are chosen as a run needs them, for the whole process: runs take turns."""
    cudnn, matmul, utils = torch.backends.cudnn, torch.backends.cuda.matmul, torch.utils.deterministic
    with _kernels_lock, ExitStack() as before:
        for owner, name in (
            (cudnn, "allow_tf32"), (cudnn, "benchmark"), (cudnn, "deterministic"), (cudnn, "enabled"),
            (matmul, "allow_tf32"), (utils, "fill_uninitialized_memory"),
        ):  # fmt: skip
            before.callback(setattr, owner, name, getattr(owner, name))
        before.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        choose_kernels(deterministic=deterministic, tf32=tf32)
        cudnn.enabled = use_cudnn
        yield


def choose_kernels(*, deterministic: bool, tf32: bool) -> None:
    """Choose among torch's kernels, for all of this process; matrix products have tf32 within the layers only."""
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = tf32, False
    torch.backends.cudnn.benchmark = False  # captured steps alone are worth a search
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def clients_that_fit(size: int, itemsize: int, cohort: int) -> int:
    """How many clients' models fit in the memory of a GPU: all of its memory, so that the same run decides alike."""
    _, total = torch.cuda.mem_get_info()
    return max(1, min(cohort, int(MODEL_MEMORY_SHARE * total / (MODEL_COPIES * size * itemsize))))


class Gpus(DevicePool):
    """One worker on each device; the server is on the first. `devices` may be anything that torch knows."""

    probes_together, max_gather_bytes, idle_rows_cost = False, 256 << 20, False

    def __init__(self, net: Net, feed: Feed, devices: Sequence[torch.device] = (), *, tf32: bool = False) -> None:
        self.tf32 = tf32
        self._devices = list(devices) or [net.device]
        if net.device.type == "cuda" and len(set(self._devices)) < len(self._devices):
            raise ValueError("A GPU can be named once: programs write to tensors of their own.")
        others = [device for device in dict.fromkeys(self._devices) if device != net.device]
        self._first = [Worker(net, feed), *(Worker(net.copy(other), feed.on_device(other)) for other in others)]
        feeds = {worker.net.device: worker.feed for worker in self._first}
        super().__init__(net, feed, [Worker(net.copy(device), feeds[device]) for device in self._devices])

    def each(self, count: int, work: Work[T]) -> list[T]:
        def there(worker: Worker, i: int) -> T:
            device = worker.net.device
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                return work(worker, i)

        return super().each(count, there)

    def devices(self) -> list[Worker]:
        return self._first

    @contextmanager
    def layer_precision(self) -> Iterator[None]:
        """What a server does with models is not rounded to the precision of layers."""
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    def wait(self) -> None:
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def free_memory(self) -> None:
        if self.net.device.type == "cuda":
            torch.cuda.empty_cache()
