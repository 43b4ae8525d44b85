"""Fashion-MNIST: four idx files, from Debian's package or the authors' server."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from fnrfl.data.sources import fetching
from fnrfl.data.sources.entry import Arrays, NamedDataset, cache_dir

FILES = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")


def _originals() -> list[Path]:
    return [cache_dir() / "fashion-mnist", Path("data/fashion-mnist"), Path("data/FashionMNIST/raw"), DEBIAN_FOLDER]


def _download(folder: Path) -> tuple[Path, str]:
    for name, md5 in FILES.items():
        if not (folder / f"{name}.gz").exists():
            fetching.download(f"{URL}/{name}.gz", folder / f"{name}.gz", md5)
    return folder, URL


def read_idx_folder(folder: Path) -> Arrays:
    """The four idx files of a data set of the MNIST family, gzipped or not."""
    arrays = []
    for name in FILES:
        plain, zipped = folder / name, folder / f"{name}.gz"
        arrays.append(read_idx(plain.read_bytes() if plain.exists() else gzip.decompress(zipped.read_bytes())))
    x_train, y_train, x_test, y_test = arrays
    return Arrays(x_train[:, None], y_train.astype(np.int64), x_test[:, None], y_test.astype(np.int64))


def read_idx(raw: bytes) -> np.ndarray:
    """An array in idx format: two zeros, the type (8: uint8), the number of axes, their lengths, the values."""
    if raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise ValueError("not an idx file of bytes")
    axes = raw[3]
    shape = np.frombuffer(raw, ">u4", count=axes, offset=4).astype(np.int64)
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes)
    if len(values) != shape.prod():
        raise ValueError(f"{len(values)} values where the header promises {shape.prod()}")
    return values.reshape(shape)


DATASET = NamedDataset(
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    checksum="b42e0f3189f494f730119201c9e1a41654a875ffd564ea07b7cf8032d5327c02",
    provenance="70,000 grey pictures of clothes, 28 x 28 (Xiao, Rasul and Vollgraf 2017; Zalando SE)",
    licence="MIT",
    how="Install Debian's dataset-fashion-mnist, or put its idx files into the folder FNRFL_DATA/fashion-mnist.",
    originals=_originals,
    read_original=read_idx_folder,
    download=_download,
    downloaded_from=URL,
)
