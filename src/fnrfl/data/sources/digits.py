"""The handwritten digits that are part of the package, from scikit-learn."""

from __future__ import annotations

from pathlib import Path

from fnrfl.data.sources.cache import read_cached
from fnrfl.data.sources.entry import NamedDataset

EMBEDDED_FILE = Path(__file__).parents[1] / "files" / "digits.npz"

DATASET = NamedDataset(
    classes=tuple("0123456789"),
    checksum="cdcd4849301b0357eab1801245e84def8b43e1b9431815a0111c61339096b15d",
    provenance="1,797 handwritten digits of 8 x 8 pixels (UCI optical recognition of handwritten digits, test set)",
    licence="CC BY 4.0",
    how="It is part of the package; install the package again if it is missing.",
    originals=list,
    read_original=read_cached,
    download=None,
    embedded=EMBEDDED_FILE,
)
