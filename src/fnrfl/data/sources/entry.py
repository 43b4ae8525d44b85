"""A named data set: what is known about it before it is read, its arrays, and the cache that keeps them."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fnrfl.core.ndarrays import read_arrays
from fnrfl.process import parser_lock


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


# -- the cache, a folder that keeps the arrays of each as `<name>.npz` -------------------------------------------------


def cache_dir() -> Path:
    """Where data is kept: FNRFL_DATA, or `fnrfl` under the user's cache directory; without a home, data/ here."""
    if chosen := os.environ.get("FNRFL_DATA"):
        return Path(os.path.expanduser(chosen))
    if base := os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA"):
        return Path(base) / "fnrfl"
    home = os.path.expanduser("~")
    if home == "~":  # neither HOME nor an entry in the system's list of users
        return Path("data")
    return Path(home) / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "fnrfl"


def read_cached(path: Path) -> Arrays:
    """The arrays of a cache file, which stores labels as small integers."""
    x_train, y_train, x_test, y_test = read_arrays(path, "x_train", "y_train", "x_test", "y_test").values()
    return Arrays(x_train, y_train.astype(np.int64), x_test, y_test.astype(np.int64))


def cached_origin(path: Path) -> str:
    """Where the arrays of a cache file came from."""
    with parser_lock, np.load(path, allow_pickle=False) as file:
        return str(file["source"]) if "source" in file else str(path)


def write_cached(path: Path, arrays: Arrays, origin: str) -> None:
    """Write a cache file under a temporary name, then rename it: a reader sees the whole file or none."""
    y_train, y_test = arrays.y_train.astype(np.uint8), arrays.y_test.astype(np.uint8)
    x_train, x_test, source = arrays.x_train, arrays.x_test, np.array(origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        unfinished.unlink(missing_ok=True)  # a link that stood there is not written through
        with unfinished.open("xb") as file:
            np.savez(file, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, source=source)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
