"""Data sets as tensors, from a name, a file, a folder of images or a function of the user's.

Values are kept as they come: pixels stay uint8 (they are divided by 255 where batches are gathered) and features are
never scaled. Whatever is not one of the named data sets is checked by `from_arrays`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fnrfl.data import readers
from fnrfl.data.sources import CIFAR_BATCHES, NAMED, Arrays, checksum, named, read_cifar, verified
from fnrfl.errors import ConfigError
from fnrfl.rng import numpy_generator

Values = np.ndarray | Tensor

TEST_SHARE = 0.2  # of data that comes without a test set


@dataclass(frozen=True, eq=False)
class Part:
    """Some examples: x is uint8 pixels [n, C, H, W] or floating [n, ...], y int64 [n]."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> Part:
        """The examples at these positions, copied."""
        return Part(self.x[index], self.y[index])


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test part, the names of the classes, and where it all came from."""

    name: str
    train: Part
    test: Part
    classes: tuple[str, ...]
    source: str
    checksum: str

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])


def load(name: str, *, seed: int = 0) -> Dataset:
    """The data set called `name`; the seed only draws a test part for data that comes without one."""
    path = Path(os.path.expanduser(name))  # of an unknown user: as it is, where Path would raise
    if name in NAMED:
        return _original(name, *named(name))
    if (path / CIFAR_BATCHES[0]).is_file():
        return _original("cifar10", verified("cifar10", path, read_cifar), str(path.resolve()))
    arrays: tuple[Values, ...]
    classes: Sequence[str] | None = None
    if path.suffix.lower() in readers.FILES:
        arrays, classes = readers.FILES[path.suffix.lower()](path)
    elif path.is_dir():
        arrays, classes = readers.read_images(path)
    elif ":" in name:
        made = readers.call(name)
        if isinstance(made, Dataset):
            arrays = (made.train.x, made.train.y, made.test.x, made.test.y)
            return from_arrays(made.name, *arrays, classes=made.classes, source=made.source)
        if not isinstance(made, tuple) or len(made) not in (2, 4):
            raise ConfigError(
                f"dataset = {name!r} returned {type(made).__name__}; it must return a fnrfl Dataset, a tuple x_train, "
                "y_train, x_test, y_test, or a tuple x, y. Change what the function returns."
            )
        arrays = made
    else:
        near = get_close_matches(name, NAMED, n=1)
        raise ConfigError(
            f"dataset = {name!r} is neither a known data set nor a file or folder that exists; it must be "
            f"{', '.join(NAMED)}, a .npz or .csv file, a folder of images, or module:function."
            + (f" Did you mean {near[0]!r}?" if near else " Check the name.")
        )
    if len(arrays) == 2:
        arrays = _with_test(name, *arrays, seed)
    return from_arrays(name, *arrays, classes=classes, source=str(path.resolve()) if path.exists() else name)


def from_arrays(
    name: str,
    x_train: Values,
    y_train: Values,
    x_test: Values,
    y_test: Values,
    *,
    classes: Sequence[str] | None = None,
    source: str = "arrays",
) -> Dataset:
    """A data set from four arrays or tensors, checked.

    Images of uint8 may be [n, H, W], [n, C, H, W] or [n, H, W, C]; floating features keep their shape and precision,
    other numbers become float32. Labels are class numbers from 0, or names, which are numbered in sorted order.
    """
    x = [_features(x_train, f"x_train of {name}"), _features(x_test, f"x_test of {name}")]
    y = [_labels(y_train, f"y_train of {name}"), _labels(y_test, f"y_test of {name}")]
    for values, labels, part in zip(x, y, ("train", "test"), strict=True):
        if len(values) != len(labels):
            raise ConfigError(
                f"{name} has {len(values)} examples in x_{part} and {len(labels)} labels in y_{part}; "
                "there must be one label for each example. Write both from the same list."
            )
        if not len(values):
            raise ConfigError(f"{name} has no examples in x_{part}; at least one is needed. Add some.")
    if x[0].shape[1:] != x[1].shape[1:] or x[0].dtype != x[1].dtype:
        raise ConfigError(
            f"{name} has training examples of {x[0].dtype}{list(x[0].shape[1:])} and test examples of "
            f"{x[1].dtype}{list(x[1].shape[1:])}; they must be alike. Prepare both in the same way."
        )
    y, known = _numbered(y, classes, name)
    parts = [Part(_tensor(values), _tensor(labels)) for values, labels in zip(x, y, strict=True)]
    return Dataset(name, parts[0], parts[1], known, source, checksum(x[0], y[0], x[1], y[1]))


def stratified_order(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random order of the examples in which every stretch holds the classes in their proportions, up to rounding.

    The r-th of a class's n examples, shuffled, stands at (r + 1/2) / n of the way, and equals are shuffled too.
    So the first k examples are an exact k, stratified, and contain the first j < k.
    """
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    _, first, size = np.unique(labels[by_class], return_index=True, return_counts=True)
    rank = np.arange(len(labels)) - np.repeat(first, size)
    return by_class[np.lexsort((rng.random(len(labels)), (rank + 0.5) / np.repeat(size, size)))]


def _original(name: str, arrays: Arrays, source: str) -> Dataset:
    """A named data set; its arrays have been verified to the last bit."""
    train = Part(_tensor(arrays.x_train), _tensor(arrays.y_train))
    test = Part(_tensor(arrays.x_test), _tensor(arrays.y_test))
    return Dataset(name, train, test, NAMED[name].classes, source, NAMED[name].checksum)


def _with_test(name: str, x: object, y: object, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Examples that come without a test part, in four arrays: a stratified fifth of them becomes one."""
    values, labels = _features(x, f"x of {name}"), _labels(y, f"y of {name}")
    if len(values) != len(labels) or len(labels) < 2:
        raise ConfigError(
            f"{name} has {len(values)} examples and {len(labels)} labels; there must be one label for each, and two "
            "examples at least, as a fifth becomes the test set. Write both from the same list."
        )
    order = stratified_order(labels, numpy_generator(seed, "split", "test"))
    num_test = max(1, round(TEST_SHARE * len(order)))
    test, train = np.sort(order[:num_test]), np.sort(order[num_test:])
    return values[train], labels[train], values[test], labels[test]


# -- checks ------------------------------------------------------------------------------------------------------------


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.require(array, requirements=("C", "W")))


def _array(values: object, what: str) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ConfigError(
            f"{what} is not an array ({error}); all its rows must have the same shape. Pad them."
        ) from error


def _features(values: object, what: str) -> np.ndarray:
    x = _array(values, what)
    if x.ndim < 2 or x.dtype.kind not in "biuf" or 0 in x.shape[1:]:
        raise ConfigError(
            f"{what} is {x.dtype}{list(x.shape)}; it must be numbers, with examples along the first axis and at least "
            "one more axis that is not empty. Store features as float32 [n, F] or pixels as uint8 [n, C, H, W]."
        )
    if x.dtype == np.uint8:
        return _pixels(x, what)
    if x.dtype.kind == "f":
        x = x.astype({2: np.float16, 4: np.float32}.get(x.dtype.itemsize, np.float64), copy=False)
    else:
        x = x.astype(np.float32)
    if bad := int(x.size - np.isfinite(x).sum()):
        where = np.argwhere(~np.isfinite(x))[0]
        raise ConfigError(
            f"{what} holds {bad} values that are not finite, the first {x[tuple(where)]} in example {where[0]}; "
            "all must be finite numbers. Fill them in or leave those examples out."
        )
    return x


def _pixels(x: np.ndarray, what: str) -> np.ndarray:
    """uint8 means pixels: [n, C, H, W], whichever of the usual layouts they come in."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] not in (1, 3, 4) and x.shape[3] in (1, 3, 4):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.ndim != 4:
        raise ConfigError(
            f"{what} is uint8{list(x.shape)}; uint8 means pixels, [n, H, W] or [n, C, H, W]. "
            "Reshape it to images, or store features as float32."
        )
    return x


def _labels(values: object, what: str) -> np.ndarray:
    """Class numbers as int64, or names as they are."""
    y = _array(values, what)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise ConfigError(
            f"{what} has the shape {list(y.shape)}; labels are a list of one class each. Use argmax on one-hot labels."
        )
    if y.dtype.kind == "O" and all(isinstance(label, str) for label in y):
        y = y.astype(np.str_)
    if y.dtype.kind in "US":
        return y.astype(np.str_)
    if y.dtype.kind not in "biuf":
        raise ConfigError(f"{what} is of type {y.dtype}; labels must be class numbers from 0, or names. Convert them.")
    for bad, rule in ((y != np.floor(y), "whole numbers"), (y < 0, "numbered from 0")):
        if bad.any():
            raise ConfigError(
                f"{what} holds the label {y[bad][0]} (example {np.flatnonzero(bad)[0]}); class labels must be {rule}. "
                "Number the classes 0, 1, 2, ... or give their names as strings."
            )
    return y.astype(np.int64)


def _numbered(
    y: Sequence[np.ndarray], classes: Sequence[str] | None, name: str
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Labels as class numbers, and the name of each class."""
    if any(labels.dtype.kind == "U" for labels in y):
        y = [labels.astype(np.str_) for labels in y]
        known = (
            tuple(classes) if classes is not None else tuple(sorted({str(label) for labels in y for label in labels}))
        )
        number = {label: index for index, label in enumerate(known)}
        if unknown := sorted({str(label) for labels in y for label in labels} - set(known)):
            raise ConfigError(
                f"{name} has the label {unknown[0]!r}, which is not among its classes {', '.join(known)}. "
                "Add it to the classes or correct the label."
            )
        y = [np.array([number[str(label)] for label in labels], dtype=np.int64) for labels in y]
    else:
        highest = max(int(labels.max()) for labels in y)
        known = tuple(classes) if classes is not None else tuple(str(number) for number in range(highest + 1))
        if highest >= len(known):
            raise ConfigError(
                f"{name} has the label {highest}, but names {len(known)} classes; labels must be below that. "
                "Name every class or correct the label."
            )
    if len(known) > len(y[0]):
        raise ConfigError(
            f"{name} has {len(known)} classes for {len(y[0])} training examples; there must be at least as many "
            "examples as classes. Check that the labels are classes, numbered from 0 without large gaps."
        )
    return list(y), known
