"""Arrays: types for whole numbers and others, many short ones end to end, and files of numpy's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fnrfl.process import parser_lock

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
A = TypeVar("A")  # numpy's arrays, or torch's


class Ragged(Sequence[A]):
    """Short arrays end to end in one, each a view of it: 100,000 arrays of their own would take 40 times the memory."""

    def __init__(self, flat: A, sizes: Ints) -> None:
        self.flat: Any = flat
        self.sizes = sizes
        self._ends = np.cumsum(sizes)

    @classmethod
    def joined(cls, arrays: Sequence[A], concatenate: Callable[[list[A]], A]) -> Ragged[A]:
        """The same arrays, copied if they are apart."""
        if isinstance(arrays, Ragged):
            return arrays
        return cls(concatenate([*arrays]), sizes_of(arrays))

    def mapped(self, change: Callable[[Any], Any]) -> Ragged[Any]:
        """Arrays of the same lengths, their elements changed all at once."""
        return Ragged(change(self.flat), self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[row] for row in range(*at.indices(len(self)))]
        end = int(self._ends[at])
        return self.flat[end - int(self.sizes[at]) : end]


def sizes_of(arrays: Sequence[Any]) -> Ints:
    """The length of each array."""
    return arrays.sizes if isinstance(arrays, Ragged) else np.array([len(one) for one in arrays], dtype=np.int64)


def read_arrays(path: Path, *names: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a `.npz` file, or those of some names; what numpy would have to unpickle is refused."""
    with parser_lock, np.load(path, allow_pickle=False) as file:  # numpy parses the header
        return {name: file[name] for name in names or file.files}
