"""A named data set: its arrays, and what is known about it before they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, eq=False)
class Arrays:
    """A data set before it becomes tensors: pixels as they are stored, labels as int64."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    def checksum(self) -> str:
        return checksum(self.x_train, self.y_train, self.x_test, self.y_test)


def checksum(*arrays: np.ndarray) -> str:
    """The sha256 of some arrays: their types, shapes and contents, in this order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class NamedDataset:
    """What is known about a data set that has a name in fnrfl."""

    classes: tuple[str, ...]
    checksum: str  # of its arrays
    provenance: str
    licence: str
    how: str  # how to get it: the sentence that ends an error about it
    originals: Callable[[], list[Path]]  # where its original files may lie on this machine
    read_original: Callable[[Path], Arrays]
    download: Callable[[Path], tuple[Path, str]] | None  # into a folder -> the original there, and its address
    downloaded_from: str = "nowhere"  # the addresses, in words
    embedded: Path | None = None  # its file in the package, if the package has it

    def original(self) -> Path | None:
        """Its original files on this machine; None where there are none."""
        return next((path for path in self.originals() if path.exists()), None)
