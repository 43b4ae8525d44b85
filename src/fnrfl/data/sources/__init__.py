"""The named data sets: where each is looked for, how it is fetched, and the checksum that it must have.

Whatever it is read from, a named data set ends in the same verified arrays, kept in the cache as `<name>.npz`. Nothing
that was downloaded is executed, unpickled or unpacked to disk. One file here describes one data set; digits, which are
part of the package, stand here.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import did_you_mean
from fnrfl.data.reading import UNREADABLE
from fnrfl.data.sources import cifar10, fashion_mnist
from fnrfl.data.sources.entry import Arrays, NamedDataset, cache_dir, cached_origin, read_cached, write_cached

EMBEDDED_FILE = Path(__file__).parents[1] / "files" / "digits.npz"

DIGITS = NamedDataset(  # from scikit-learn
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

NAMED_DATASETS: dict[str, NamedDataset] = {
    "digits": DIGITS,
    "fashion-mnist": fashion_mnist.DATASET,
    "cifar10": cifar10.DATASET,
}


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


def available() -> list[Availability]:
    """Every named data set, with where it is on this machine or how to get it; opens and fetches no file."""
    listed = []
    for name, entry in NAMED_DATASETS.items():
        where = cached if (cached := _cache_file(name, entry)).exists() else entry.original()
        listed.append(Availability(name, where, entry.provenance, entry.licence, entry.how))
    return listed


def load_named(name: str) -> tuple[Arrays, str]:
    """The verified arrays of a named data set and where they came from; fetched first if they are not here."""
    entry = _entry(name)
    cached = _cache_file(name, entry)
    original = None if cached.exists() else entry.original()
    if original is None:
        path = cached if cached.exists() else fetch(name)
        return read_verified(name, path, read_cached), cached_origin(path)
    arrays, origin = read_verified(name, original, entry.read_original), str(original.resolve())
    try:
        write_cached(cached, arrays, origin)
    except OSError as error:  # the arrays are good either way
        message = f"{cached} could not be written ({error}); set FNRFL_DATA to load faster next time."
        warnings.warn(message, stacklevel=2)
    return arrays, origin


def fetch(name: str) -> Path:
    """Bring a named data set into the cache and say where it is; a data set that is there is only verified."""
    entry = _entry(name)
    cached = _cache_file(name, entry)
    if cached.exists() or entry.download is None:
        read_verified(name, cached, read_cached)
        return cached
    folder = cached.with_suffix(".download")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        from filelock import FileLock  # of use to those who write alone

        lock = cached.with_name(f".{cached.name}.lock")
        with FileLock(lock):
            if cached.exists():  # another process fetched it while this one waited
                return cached
            if folder.is_symlink():
                folder.unlink()
            folder.mkdir(exist_ok=True)
            if (original := entry.original()) is not None:
                origin = str(original.resolve())
            else:
                original, origin = _download(name, entry, entry.download, folder)
            write_cached(cached, read_verified(name, original, entry.read_original), origin)
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # Windows removes no open file
                lock.unlink()
    except OSError as error:
        raise ConfigError(
            f"dataset {name!r} cannot be written to {cached.parent}: {error}. "
            "Make room there, or set FNRFL_DATA to a folder with room."
        ) from error
    return cached


def read_verified(name: str, path: Path, read: Callable[[Path], Arrays]) -> Arrays:
    """The arrays that `read` finds at `path`, if they are those of the data set called `name` to the last bit."""
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


def _entry(name: str) -> NamedDataset:
    if name not in NAMED_DATASETS:
        raise ConfigError(
            f"{name!r} is not a data set with a name of its own; those are {', '.join(NAMED_DATASETS)}."
            + did_you_mean(name, NAMED_DATASETS)
        )
    return NAMED_DATASETS[name]


def _cache_file(name: str, entry: NamedDataset) -> Path:
    return entry.embedded or cache_dir() / f"{name}.npz"


def _download(
    name: str, entry: NamedDataset, download: Callable[[Path], tuple[Path, str]], folder: Path
) -> tuple[Path, str]:
    try:
        return download(folder)
    except ConfigError as error:
        looked = ", ".join(str(path) for path in entry.originals())
        raise ConfigError(
            f"dataset {name!r} is not on this machine (looked for {looked}) and could not be fetched: {error} "
            f"{entry.how}"
        ) from error
