"""Missing values, which are NaN among the inputs: what `dataset.missing` makes of them.

refuse: there must be none. drop: examples with a missing value are left out. mean: they stay NaN, and the first layer
of the model puts the mean of the clients' known values in their place; `data/scaling.py` says how it is known.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted
from fnrfl.data.partition.by_client import in_natural_order
from fnrfl.data.reading import RawData, Reading


def with_gaps_treated(name: str, raw: RawData, reading: Reading) -> RawData:
    """Checked data with its missing values treated, and a notice about them if there are some."""
    gaps = {part: np.isnan(examples.x) for part, examples in raw.parts.items() if examples.x.dtype.kind == "f"}
    if reading.missing == "refuse" or not any(found.any() for found in gaps.values()):
        return raw
    if reading.missing == "drop":
        return _without_gaps(name, raw, gaps)
    count = sum(int(found.sum()) for found in gaps.values())
    columns = "" if raw.columns is None else _in_columns(raw, gaps)
    return raw.with_notices(
        f"{name} has {counted(count, 'missing input')}{columns}; in the place of each the model puts the mean of the "
        'clients\' known values (dataset.missing = "mean").'
    )


def _in_columns(raw: RawData, gaps: dict[str, np.ndarray]) -> str:
    """The inputs in which values are missing, for a sentence."""
    assert raw.columns is not None
    some = np.any([found.any(0) for found in gaps.values()], axis=0)
    names = [repr(name) for name, missing in zip(raw.columns.encoded, some, strict=True) if missing]
    return f" in {', '.join(names[:6])}" + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _without_gaps(name: str, raw: RawData, gaps: dict[str, np.ndarray]) -> RawData:
    """The examples of which every value is known."""
    parts, total, left_out = {}, 0, 0
    emptied: set[str] = set()
    for part, examples in raw.parts.items():
        known = np.logical_not(gaps[part].reshape(len(examples.x), -1).any(axis=1))
        if not known.any():
            raise ConfigError(
                f'{name} has no example without a missing value, and dataset.missing = "drop" leaves the others out. '
                'Set dataset.missing = "mean", or leave columns out with dataset.ignore.'
            )
        rows = examples.names or [str(row) for row in range(len(known))]
        parts[part] = replace(examples, names=rows).take(np.flatnonzero(known))
        if examples.clients is not None:
            emptied |= {*examples.clients.tolist()} - {*examples.clients[known].tolist()}
        total, left_out = total + len(known), left_out + int((~known).sum())
    return replace(raw, parts=parts, emptied=tuple(in_natural_order(emptied))).with_notices(
        f"{name}: {left_out:,} of {counted(total, 'example')} {'has' if left_out == 1 else 'have'} missing values and "
        f'{"is" if left_out == 1 else "are"} left out (dataset.missing = "drop").'
    )
