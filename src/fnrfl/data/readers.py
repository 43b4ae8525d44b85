"""Readers of the user's own data: `.npz`, `.csv`, folders of images, functions.

Each gives the arrays (x_train, y_train, x_test, y_test), or (x, y) where there is no test part, and the names of the
classes if it knows them. What the arrays hold is judged later, in one place; here only the files are.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fnrfl import own_code, trust
from fnrfl.data.sources import UNREADABLE, read_image
from fnrfl.errors import ConfigError

Read = tuple[tuple[np.ndarray, ...], list[str] | None]
Line = tuple[int, list[str]]  # the number of a line in a table, and its cells

LABEL_COLUMNS = ("label", "class", "target", "y")
IMAGE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})


def _unreadable(path: Path, kind: str, error: Exception) -> ConfigError:
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"dataset {path} does not exist (looked from {Path.cwd()}); name a file that does.")
    return ConfigError(
        f"{path} cannot be read as {kind} ({type(error).__name__}: {error}); it is truncated or of another kind. "
        "Write it again."
    )


# -- arrays ------------------------------------------------------------------------------------------------------------


def read_npz(path: Path) -> Read:
    """Arrays called x_train, y_train, x_test, y_test, or x and y; `classes` may name the classes."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (*UNREADABLE, AttributeError) as error:  # a lone .npy under this name has no files
        raise _unreadable(path, "a .npz of plain arrays", error) from error
    classes = [str(label) for label in arrays["classes"]] if "classes" in arrays else None
    for keys in (("x_train", "y_train", "x_test", "y_test"), ("x", "y")):
        if all(key in arrays for key in keys):
            return tuple(arrays[key] for key in keys), classes
    raise ConfigError(
        f"{path} holds the arrays {', '.join(arrays) or '(none)'}; it must hold x_train, y_train, x_test and y_test, "
        "or x and y. Save it with numpy.savez(path, x=..., y=...)."
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def read_csv(path: Path) -> Read:
    """A table with a header: a label column, by name or the last, and columns of numbers, which become float32."""
    header, lines = _table(path)
    lowered = [cell.lower() for cell in header]
    column = next((lowered.index(known) for known in LABEL_COLUMNS if known in lowered), len(header) - 1)
    try:
        x = np.array([cells[:column] + cells[column + 1 :] for _, cells in lines], dtype=np.float64)
    except ValueError as error:
        number, at = next(
            (number, at)
            for number, cells in lines
            for at, cell in enumerate(cells)
            if at != column and not _is_number(cell)
        )
        raise ConfigError(
            f"line {number} of {path} has {dict(lines)[number][at]!r} in column {header[at]!r}; every column but the "
            f"labels' ({header[column]!r}) must hold numbers. Encode categories as numbers and fill in what is missing."
        ) from error
    y, classes = _classes([(number, cells[column].strip()) for number, cells in lines], path, header[column])
    return (x.astype(np.float32), y), classes


def _table(path: Path) -> tuple[list[str], list[Line]]:
    """The header and the other lines that are not empty, all of one length."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, cells) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(path, "a table in UTF-8", error) from error
    if len(lines) < 2 or len(lines[0][1]) < 2:
        raise ConfigError(
            f"{path} has {len(lines)} lines and {len(lines[0][1]) if lines else 0} columns; it must have a header, "
            "examples, and two columns at least, separated by commas. Write it again."
        )
    header = [cell.strip() for cell in lines.pop(0)[1]]
    if all(_is_number(cell) for cell in header):
        raise ConfigError(
            f"{path} starts with the numbers {', '.join(header[:3])}, ...; its first line must name the columns. "
            "Add a header, and call the column of the classes label."
        )
    for number, cells in lines:
        if len(cells) != len(header):
            raise ConfigError(
                f"line {number} of {path} has {len(cells)} columns; the header names {len(header)}. Correct that line."
            )
    return header, lines


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _classes(labels: list[tuple[int, str]], path: Path, column: str) -> tuple[np.ndarray, list[str]]:
    """Class numbers and names; labels in a table are names even where they look like numbers, as 1, 2, 3 or -1, 1."""
    numeric = all(_is_number(label) for _, label in labels)
    for number, label in labels:
        if not label or (numeric and not float(label).is_integer()):
            raise ConfigError(
                f"line {number} of {path} has {label!r} in column {column!r}; a label must be a whole number or a name."
                " Correct that line, or call the column of the classes label."
            )
    names = [str(_whole(label)) if numeric else label for _, label in labels]
    known = sorted(set(names), key=int if numeric else None)
    index = {name: at for at, name in enumerate(known)}
    return np.array([index[name] for name in names], dtype=np.int64), known


def _whole(label: str) -> int:
    try:
        return int(label)  # exactly, since long codes do not survive as floats
    except ValueError:
        return int(float(label))


# -- images ------------------------------------------------------------------------------------------------------------


def read_images(folder: Path) -> Read:
    """Images in a folder for each class, under train/ and test/, or without a test part."""
    groups = [folder / part for part in ("train", "test") if _subfolders(folder / part)] or [folder]
    if groups == [folder / "test"]:
        raise ConfigError(f"{folder} has a folder test but no folder train, which must go with it. Add one.")
    files = [[file for group in _subfolders(part) for file in _images(group)] for part in groups]
    for part, found in zip(groups, files, strict=True):
        if not found:
            raise ConfigError(
                f"{part} has no images in folders named by their class; it must hold <class>/<image>, an image "
                f"ending in {', '.join(sorted(IMAGE_ENDINGS))}. Sort the images into a folder for each class."
            )
    pixels = _stack([file for found in files for file in found])
    splits = np.split(pixels, np.cumsum([len(found) for found in files])[:-1])
    labels = [np.array([file.parent.name for file in found]) for found in files]
    return tuple(array for pair in zip(splits, labels, strict=True) for array in pair), None


def _subfolders(folder: Path) -> list[Path]:
    return sorted(at for at in folder.iterdir() if at.is_dir() and at.name[0] != ".") if folder.is_dir() else []


def _images(folder: Path) -> list[Path]:
    return sorted(at for at in folder.iterdir() if at.suffix.lower() in IMAGE_ENDINGS)


def _stack(files: list[Path]) -> np.ndarray:
    """The images as uint8 [n, C, H, W]; C is 1 only if all of them are grey."""
    images = []
    for file in files:
        try:
            images.append(read_image(file))
        except UNREADABLE as error:
            raise _unreadable(file, "an image", error) from error
        (height, width), (rows, columns) = images[0].shape[:2], images[-1].shape[:2]
        if (rows, columns) != (height, width):
            raise ConfigError(
                f"{file} is {columns} x {rows} pixels and {files[0]} is {width} x {height}; all images must have one "
                "size. Resize them first."
            )
    if all(image.ndim == 2 for image in images):
        return np.stack(images)[:, None]
    colour = [image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2) for image in images]
    return np.ascontiguousarray(np.stack(colour).transpose(0, 3, 1, 2))


# -- functions ---------------------------------------------------------------------------------------------------------


def call(name: str) -> object:
    """What the function called `module:function` returns; the module may lie in the current folder."""
    found = trust.fetch(f"dataset = {name!r}", own_code.target("dataset", name))
    if not callable(found):
        raise ConfigError(f"dataset = {name!r} is a {type(found).__name__}, which cannot be called. Name a function.")
    rule = "it is called without arguments and must return the data. Correct the function."
    with trust.in_words(f"dataset = {name!r} failed", rule):
        return found()


FILES: dict[str, Callable[[Path], Read]] = {".npz": read_npz, ".csv": read_csv}
