"""Readers of the user's own data: `.npz`, `.csv`, folders of images, functions.

Each gives the examples in their parts (train and test, or one), and the names of the classes if it knows them. What the
arrays hold is judged later, in one place; here only the files are. With `Expected`, labels may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fnrfl.core import own_code, trust
from fnrfl.core.errors import ConfigError
from fnrfl.data.arrays import class_names
from fnrfl.data.reading import ALL, UNREADABLE, Examples, Expected, Read, regular, unreadable
from fnrfl.data.sources.images import read_image
from fnrfl.data.tables import read_csv

IMAGE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
CLIENTS = frozenset({"client", "clients", "client_id", "client_ids"})
PARTS = ("train", "test")


# -- arrays ------------------------------------------------------------------------------------------------------------


def read_npz(path: Path, expected: Expected | None = None) -> Read:
    """Arrays called x_train, y_train, x_test, y_test, or x and y; `classes` may name the classes."""
    regular(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (*UNREADABLE, AttributeError) as error:  # a lone .npy under this name has no files
        raise unreadable(path, "a .npz of plain arrays", error) from error
    classes = class_names(arrays["classes"], f"classes of {path}") if "classes" in arrays else None
    four = [f"{kind}_{part}" for part in PARTS for kind in "xy"]
    if all(key in arrays for key in four):
        used, parts = four, {part: Examples(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in PARTS}
    elif "x" in arrays and "y" in arrays:
        used, parts = ["x", "y"], {ALL: Examples(arrays["x"], arrays["y"])}
    elif expected is not None and not expected.labelled:
        used, parts = _any_part(arrays)
    else:
        used, parts = [], {}
    if not parts:
        raise ConfigError(
            f"{path} holds the arrays {', '.join(arrays) or '(none)'}; it must hold x_train, y_train, x_test and "
            "y_test, or x and y. Save it with numpy.savez(path, x=..., y=...)."
        )
    unused = [key for key in arrays if key not in (*used, "classes")]
    return Read(parts, classes).noticing(*_unused(path, unused))


def _any_part(arrays: dict[str, np.ndarray]) -> tuple[list[str], dict[str, Examples]]:
    """Whatever examples there are, with or without labels: for a model that is only asked."""
    if "x" in arrays:
        return ["x"], {ALL: Examples(arrays["x"])}
    there = [part for part in PARTS if f"x_{part}" in arrays]
    parts = {part: Examples(arrays[f"x_{part}"], arrays.get(f"y_{part}")) for part in there}
    return [f"{kind}_{part}" for part in there for kind in "xy"], parts


def _unused(path: Path, names: Sequence[str]) -> list[str]:
    said = [f"{path} also holds {', '.join(names)}, which fnrfl does not use."] if names else []
    if about := [name for name in names if name.lower() in CLIENTS]:
        said.append(f"Who holds which examples is drawn by `scenario`, not read from {about[0]}.")
    return said


# -- images ------------------------------------------------------------------------------------------------------------


def read_images(folder: Path, expected: Expected | None = None) -> Read:
    """Images in a folder for each class, under train/ and test/, or without a test part.

    For a model that is only asked they may also lie in the folder itself, without labels.
    """
    loose = _images(folder)
    groups = [folder / part for part in PARTS if _subfolders(folder / part)] or [folder]
    inside = [[file for group in _subfolders(part) for file in _images(group)] for part in groups]
    if expected is not None and not expected.labelled and loose:
        if any(inside):
            raise ConfigError(
                f"{folder} has images of its own, such as {loose[0].name}, and others in folders, such as "
                f"{next(found for found in inside if found)[0].relative_to(folder)}. Ask about one kind at a time."
            )
        return Read({ALL: Examples(_stack(loose), names=[file.name for file in loose])})
    if groups == [folder / "test"]:
        raise ConfigError(f"{folder} has a folder test but no folder train, which must go with it. Add one.")
    for part, found in zip(groups, inside, strict=True):
        if not found:
            raise ConfigError(
                f"{part} has no images in folders named by their class; it must hold <class>/<image>, an image "
                f"ending in {', '.join(sorted(IMAGE_ENDINGS))}. Sort the images into a folder for each class."
            )
    pixels = np.split(_stack([file for found in inside for file in found]), np.cumsum([len(f) for f in inside])[:-1])
    parts = {
        ALL if len(groups) == 1 else part.name: Examples(
            x, np.array([file.parent.name for file in found]), [str(file.relative_to(folder)) for file in found]
        )
        for part, x, found in zip(groups, pixels, inside, strict=True)
    }
    return Read(parts).noticing(*_passed_over(folder, groups, loose))


def _passed_over(folder: Path, groups: list[Path], loose: list[Path]) -> list[str]:
    """Folders and images that no part was read from."""
    said = []
    if groups != [folder] and (others := [at.name for at in _subfolders(folder) if at not in groups]):
        said.append(f"{folder} also has the folders {', '.join(others)}, which are not used: only train and test are.")
    classes = [group for part in groups for group in _subfolders(part)]
    if empty := [str(group.relative_to(folder)) for group in classes if not _images(group)]:
        said.append(f"{folder} has folders without an image in them, which make no class: {', '.join(empty)}.")
    if deep := [str(at.relative_to(folder)) for group in classes if _images(group) for at in _subfolders(group)]:
        said.append(f"{folder} has folders inside the classes' folders, which are not read: {', '.join(deep)}.")
    if loose:
        said.append(f"{folder} has {len(loose)} images outside of the classes' folders, which are not used.")
    return said


def _subfolders(folder: Path) -> list[Path]:
    return sorted(at for at in folder.iterdir() if at.is_dir() and at.name[0] != ".") if folder.is_dir() else []


def _images(folder: Path) -> list[Path]:
    return sorted(at for at in folder.iterdir() if at.suffix.lower() in IMAGE_ENDINGS)


def _stack(files: list[Path]) -> np.ndarray:
    """The images as uint8 [n, C, H, W]; C is 1 only if all of them are grey."""
    images = []
    for file in files:
        regular(file)
        try:
            images.append(read_image(file))
        except UNREADABLE as error:
            raise unreadable(file, "an image", error) from error
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


FILES: dict[str, Callable[[Path, Expected | None], Read]] = {".npz": read_npz, ".csv": read_csv}
