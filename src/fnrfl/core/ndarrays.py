"""numpy's arrays: types for whole numbers and others, and files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fnrfl.core.parsing import parsed

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def read_arrays(path: Path, *names: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a `.npz` file, or those of some names; what numpy would have to unpickle is refused."""

    def read() -> dict[str, npt.NDArray[Any]]:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names or file.files}

    return parsed(read)
