"""Everything fnrfl says when it refuses to go on. Each message names the value, the rule and the way out."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping


class FnrflError(Exception):
    """Base of all errors that are meant for people; `exit_code` is what the command line returns."""

    exit_code = 3


class ConfigError(FnrflError):
    """A value that cannot be right: unknown key, wrong type or range, unreadable file."""

    exit_code = 2


class CompatibilityError(FnrflError):
    """Values that are right alone and cannot go together, such as a method and a data set without public labels."""

    exit_code = 2


class ShareableError(CompatibilityError):
    """An error that another machine may read: its sentence quotes nothing of this one's data, files or code."""


class ClientError(FnrflError):
    """A client that failed or produced a number that is not finite."""

    def __init__(self, reason: str, *, client: int, round: int, stage: str, step: int | None = None) -> None:
        self.reason, self.client, self.round, self.stage, self.step = reason, client, round, stage, step
        where = f"client {client}, round {round}, stage {stage}" + ("" if step is None else f", step {step}")
        super().__init__(f"{where}: {reason}")


class MissingClients(FnrflError):
    """Clients that have not answered, where the round may go on without them."""

    def __init__(self, reasons: Mapping[int, str], *, round: int, stage: str) -> None:
        self.reasons, self.round, self.stage = dict(reasons), round, stage
        told = "; ".join(f"client {client}: {reason}" for client, reason in sorted(self.reasons.items()))
        super().__init__(f"round {round}, stage {stage}: no answer from {told}")


# -- errors of others, in words ----------------------------------------------------------------------------------------

FULL = ("can't allocate memory", "not enough memory", "std::bad_alloc", "cannot allocate memory")
GPU_FULL = (
    "out of memory",  # CUDA and Triton
    "alloc_failed",  # cuBLAS, and cuDNN before 9
    "device_allocation_failed",  # cuDNN since then
    "cublas_status_not_initialized when calling `cublascreate",  # there was no memory for its handle
)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory was too small, on a CPU or a GPU: torch says so in several ways."""
    return isinstance(error, MemoryError) or gpu_out_of_memory(error) or _says(error, FULL)


def gpu_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory was too small; only torch's own allocator has an error of its own for it."""
    return type(error).__name__ == "OutOfMemoryError" or _says(error, GPU_FULL)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def from_system(error: BaseException) -> OSError | None:
    """What the system refused, if that is what went wrong; safetensors wraps it into an error of its own."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def sentence(error: BaseException, way_on: str = "") -> str:
    """What went wrong, for people; `way_on` is how to go on, where there is a way."""
    if isinstance(error, FnrflError):
        return str(error)
    if out_of_memory(error):
        less = "Set a smaller engine.clients_at_once, engine.threads, client.batch or model."
        return f"There is not enough memory. {less} {way_on}".rstrip()
    if (system := from_system(error)) is not None:
        where = f"{system.filename}: " if system.filename else ""
        full = system.errno in (errno.ENOSPC, errno.EDQUOT)
        way = way_on or "Choose another place, or change who may write there."
        return f"{where}{system.strerror or system}.{' Make room.' if full else ''} {way}"
    return f"Unexpected {type(error).__name__}: {error}. --debug shows where; please report it. {way_on}".rstrip()
