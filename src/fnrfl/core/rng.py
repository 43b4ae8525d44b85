"""Randomness is addressed, not consumed: a stream is named by the seed and what it is for.

Work may then be done in any order, on any engine, and resumed anywhere, with the same numbers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def address(seed: int, *key: object) -> int:
    """The 63-bit number that a seed and a key stand for.

    >>> address(0, 1, "batches") == address(0, 1, "batches") != address(0, 1, "noise")
    True
    """
    digest = hashlib.blake2b(repr((seed, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *key: object) -> torch.Generator:
    """The stream named by `seed` and `key`, for example `generator(0, round, client, "local", "batches")`."""
    import torch

    return torch.Generator().manual_seed(address(seed, *key))


def elsewhere(stream: torch.Generator, device: torch.device) -> torch.Generator:
    """The stream of the same address on another device: the same numbers on each of its kind, not those of a CPU."""
    import torch

    return stream if device.type == "cpu" else torch.Generator(device).manual_seed(stream.initial_seed())


def numpy_generator(seed: int, *key: object) -> np.random.Generator:
    """The same for numpy, which draws partitions."""
    return np.random.Generator(np.random.PCG64(address(seed, *key)))


@contextmanager
def seeded(seed: int, *key: object) -> Iterator[None]:
    """Inside, torch's global stream is the addressed one: for initialising modules, which take no generator."""
    import torch

    with stream_kept():
        torch.manual_seed(address(seed, *key))
        yield


@contextmanager
def stream_kept() -> Iterator[None]:
    """Inside, torch's global stream is this thread's alone among those that ask; afterwards it is as it was."""
    import torch

    with _GLOBAL_STREAM, torch.random.fork_rng(devices=[]):
        yield


_GLOBAL_STREAM = threading.RLock()  # there is one such stream in a process, and runs may be several
