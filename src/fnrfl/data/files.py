"""Readers of the user's own files: arrays, tables, LEAF's users, folders of images.

A reader checks the files, and `normalise` what the arrays hold. With `Expected`, labels may be missing.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.ndarrays import read_arrays
from fnrfl.data.arrays import class_names, grey_as_colour
from fnrfl.data.partition.by_client import some_of
from fnrfl.data.reading import (
    ONLY_PART,
    PARTS,
    PLAIN_READING,
    UNREADABLE,
    Examples,
    Expected,
    Held,
    RawData,
    Reading,
    require_file,
    unreadable,
)

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "PPM")  # for others, as PostScript, pillow may run a program
IMAGE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
CLIENT_ARRAYS = frozenset({"client", "clients", "client_id", "client_ids"})
LEAF_FORM = (
    "it must have users, each once, num_samples, and user_data with lists x and y of that length for each user. Write "
    "the file again as LEAF does, or give another format."
)
OF_OBJECTS = "Python's objects are not read, since that may run code. Save text with .astype(str), numbers as floats."
TOO_DEEP = 'pixels must be bytes. Make 8 bits of 16, (pixels / 256).astype("uint8"), or save them as floats in a .npz.'


# -- arrays ------------------------------------------------------------------------------------------------------------


def read_npz(path: Path, expected: Expected | None = None, reading: Reading = PLAIN_READING) -> RawData:
    """Arrays called x_train, y_train, x_test, y_test, or x and y; `classes` may name the classes."""
    require_file(path)
    try:
        arrays = read_arrays(path)
    except (*UNREADABLE, AttributeError) as error:  # a lone .npy under this name has no files
        way_out = OF_OBJECTS if "Object arrays" in str(error) else ""
        raise unreadable(path, "a .npz of plain arrays", error, way_out) from error
    classes = class_names(arrays["classes"], f"classes of {path}") if "classes" in arrays else None
    parts, used = dict[str, Examples](), {"classes"}
    for part, (x, y) in _parts_of_arrays(arrays, labelled=expected is None or expected.labelled).items():
        clients = _client_array(path, arrays, part)
        parts[part] = Examples(arrays[x], arrays.get(y), clients=arrays.get(clients))
        used |= {x, y, clients}
    if not parts:
        raise ConfigError(
            f"{path} holds the arrays {', '.join(arrays) or '(none)'}; it must hold x_train, y_train, x_test and "
            "y_test, or x and y. Save it with numpy.savez(path, x=..., y=...)."
        )
    return RawData(parts, classes).with_notices(*_unused(path, [key for key in arrays if key not in used]))


def _client_array(path: Path, arrays: Mapping[str, np.ndarray], part: str) -> str:
    """The name of the array that says who holds each example of a part; "" if there is none."""
    found = [key for key in arrays if key.lower() in {f"{name}_{part}" if part else name for name in CLIENT_ARRAYS}]
    if len(found) > 1:
        raise ConfigError(f"{path} has {' and '.join(found)}; one of them can name the clients. Leave the others out.")
    return "".join(found)


def _parts_of_arrays(arrays: Mapping[str, np.ndarray], *, labelled: bool) -> dict[str, tuple[str, str]]:
    """The names of each part's examples and labels; for a model that is only asked, labels may be missing."""
    two: dict[str, tuple[str, str]] = {part: (f"x_{part}", f"y_{part}") for part in PARTS}
    if all(name in arrays for names in two.values() for name in names):
        return two
    if "x" in arrays and (not labelled or "y" in arrays):
        return {ONLY_PART: ("x", "y")}
    return {} if labelled else {part: names for part, names in two.items() if names[0] in arrays}


def _unused(path: Path, names: Sequence[str]) -> list[str]:
    notices = [f"{path} also holds {', '.join(names)}, which fnrfl does not use."] if names else []
    if of_clients := [name for name in names if name.lower() in CLIENT_ARRAYS]:
        name = of_clients[0]
        notices.append(f"Beside x_train and x_test, clients are named by {name}_train and {name}_test, not by {name}.")
    return notices


# -- images ------------------------------------------------------------------------------------------------------------


def read_images(folder: Path, root: Path, expected: Expected | None, reading: Reading) -> RawData:
    """Images in a folder for each class; their names are paths from `root`."""
    classes = subfolders(folder)
    files = [file for class_ in classes for file in images_in(class_)]
    pixels, converted = _stack(files, expected, reading)
    labels = np.array([file.parent.name for file in files])
    examples = Examples(pixels, labels, [str(file.relative_to(root)) for file in files])
    passed_over = {
        "folders without an image in them, which make no class": [at for at in classes if not images_in(at)],
        "folders inside the classes' folders, which are not read": [at for one in classes for at in subfolders(one)],
        "images outside of the classes' folders, which are not used": images_in(folder),
    }
    notices = [
        f"{root} has {what}: {some_of([str(at.relative_to(root)) for at in paths])}."
        for what, paths in passed_over.items()
        if paths
    ]
    return RawData({ONLY_PART: examples}, notices=(*converted, *notices))


def read_loose_images(folder: Path, expected: Expected, reading: Reading) -> RawData:
    """The images that lie in a folder itself, without labels, for a model that is only asked."""
    inside = [file for at in sorted(folder.rglob("*")) if at.is_dir() for file in images_in(at)]
    if inside:
        raise ConfigError(
            f"{folder} has images of its own, such as {images_in(folder)[0].name}, and others in folders, such as "
            f"{inside[0].relative_to(folder)}. Ask about one kind at a time."
        )
    files = images_in(folder)
    pixels, converted = _stack(files, expected, reading)
    return RawData({ONLY_PART: Examples(pixels, names=[file.name for file in files])}, notices=converted)


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, hidden ones aside; none if it is no folder."""
    return sorted(at for at in folder.iterdir() if at.is_dir() and at.name[0] != ".") if folder.is_dir() else []


def images_in(folder: Path) -> list[Path]:
    """The image files of a folder; hidden ones are none, such as the ._1.png that macOS puts beside 1.png."""
    return sorted(at for at in folder.iterdir() if at.suffix.lower() in IMAGE_ENDINGS and at.name[0] != ".")


def _stack(files: list[Path], expected: Expected | None, reading: Reading) -> tuple[np.ndarray, tuple[str, ...]]:
    """The images as uint8 [n, C, H, W], and a notice if grey ones became coloured; C is 1 only if all are grey."""
    images = []
    for file in files:
        require_file(file)
        try:
            images.append(read_image(file, reading.image_size))
        except UNREADABLE as error:
            raise unreadable(file, "an image", error, TOO_DEEP if isinstance(error, DeepPixelsError) else "") from error
        (height, width), (this_height, this_width) = images[0].shape[:2], images[-1].shape[:2]
        if (this_height, this_width) != (height, width):
            raise ConfigError(
                f"{file} is {this_height} x {this_width} pixels (height x width) and {files[0]} is {height} x {width}; "
                f'all images must have one size. Set dataset.image_size = "{height}x{width}", or resize them first.'
            )
    grey = sum(image.ndim == 2 for image in images)
    if grey == len(images) and not (expected and expected.colour):
        return np.stack(images)[:, None], ()
    colour = [image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2) for image in images]
    notices = (grey_as_colour(len(images), grey),) if grey else ()
    return np.ascontiguousarray(np.stack(colour).transpose(0, 3, 1, 2)), notices


class DeepPixelsError(ValueError):
    """A picture has more than 8 bits for each value."""


def read_image(file: Path | io.BytesIO, size: tuple[int, int] | None = None) -> np.ndarray:
    """The 8-bit pixels of an image file: [H, W] where it is grey, [H, W, 3] otherwise; resized to a height and width.

    It is turned as its EXIF data says, as cameras write it. The filter is Pillow's bilinear one: a pixel is an average
    over all that it stands for.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ConfigError("image files need pillow, which is not installed. Run `pip install pillow`.") from error
    try:
        with Image.open(file, formats=FORMATS) as image:
            refuse_deep_pixels(image.mode)
            upright = ImageOps.exif_transpose(image)
            plain = upright.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
            return np.asarray(plain if size is None else plain.resize(size[::-1], Image.Resampling.BILINEAR))
    except (SyntaxError, struct.error, Image.DecompressionBombError) as error:  # what pillow makes of broken files
        raise ValueError(str(error)) from error


def refuse_deep_pixels(mode: str) -> None:
    """Refuse pixels of 16 bits or more, which pillow would cut off at white in making 8 bits of them."""
    if mode[0] in "IF":
        raise DeepPixelsError(f"its pixels are of mode {mode}, not 8 bits deep")


# -- LEAF's users ------------------------------------------------------------------------------------------------------


def read_leaf(files: Mapping[str, Sequence[Path]]) -> Held:
    """Files of LEAF's, by part: the examples of each user, who is a client."""
    return [
        (user, RawData({part: Examples(_numbers(x), y)}))
        for part, paths in files.items()
        for path in paths
        for user, x, y in _users(path)
        if y
    ]


def _users(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Each user of a file, with the lists x and y, which `num_samples` says the length of."""
    require_file(path)
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        users, data = tree["users"], tree["user_data"]
        held = [(user, data[user]["x"], data[user]["y"]) for user in users]
        rows = [{len(x), len(y), size} for (_, x, y), size in zip(held, tree["num_samples"], strict=True)]
        named = all(isinstance(user, str) for user in users) and len({*users}) == len(users)
        if not named or any(len(row) > 1 for row in rows):
            raise TypeError("users without a name of their own, or lists of another length")
    except (KeyError, TypeError, AttributeError) as error:
        raise unreadable(path, "LEAF's JSON", error, LEAF_FORM) from error
    except (*UNREADABLE, RecursionError) as error:
        raise unreadable(path, "JSON", error) from error
    yield from held


def _numbers(x: list[Any]) -> np.ndarray | list[Any]:
    """A user's examples: whole numbers as they are, others as float32; what is no array is refused later."""
    try:
        values = np.asarray(x)
    except ValueError:
        return x
    values = values.reshape(len(x), -1) if values.ndim == 1 else values
    return values.astype(np.float32) if values.dtype.kind == "f" else values
