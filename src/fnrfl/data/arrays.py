"""What a user's arrays may be: numbers or pixels, labels, names of classes. Anything else is refused in a sentence.

`title` is what such a sentence calls the array: "x_train of mine.npz".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted, same_spelling
from fnrfl.data.reading import refuse_amounts

USUAL_CHANNELS = (1, 3, 4)  # of a picture
_NOT_FINITE = (
    "{title} holds values that are not finite ({count}, the first {value} in example {at}); all must be finite "
    'numbers. Fill them in, leave those examples out, or set dataset.missing = "mean" or "drop" where NaN stands for '
    "a missing value."
)
_LABEL = "{title} holds the label {value} (example {at}, {count} in all); "
_ONLY = _LABEL + "fnrfl is for classification only, with "
_NUMBER = "Number the classes 0, 1, 2, ..., give their names, or make classes of amounts, such as with numpy.digitize."


def _refuse(broken: np.ndarray, values: np.ndarray, title: str, sentence: str) -> None:
    """Raise the sentence if some value is broken; it has how many are, the first of them, and its example."""
    if len(bad := np.argwhere(broken)):
        told = {"value": values[tuple(bad[0])], "at": bad[0][0], "count": f"{len(bad):,}"}
        raise ConfigError(sentence.format(title=title, **told))


def tensor(array: np.ndarray) -> Tensor:
    """An array as a tensor, in the same memory where that can be written."""
    return torch.from_numpy(np.require(array, requirements=("C", "W")))


def plain(values: object) -> np.ndarray:
    """Values as an array, in the same memory where that can be; raises what numpy and torch raise."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    return values if isinstance(values, np.ma.MaskedArray) else np.asarray(values)


def _array(values: object, title: str) -> np.ndarray:
    if np.ma.is_masked(values):
        raise ConfigError(
            f"{title} is a masked array with {counted(np.ma.count_masked(values), 'masked value')}; all must be "
            "known. Fill them in or leave those examples out."
        )
    if isinstance(values, Tensor) and values.layout != torch.strided:
        raise ConfigError(f"{title} is a sparse tensor; it must be dense. Give it with .to_dense().")
    try:
        return np.asarray(plain(values))
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{title} is not an array ({error}); all its rows must have the same shape. Pad them."
        ) from error


def features(values: object, title: str, *, gaps: bool = False) -> np.ndarray:
    """Examples: uint8 pixels [n, C, H, W], or numbers [n, ...], floating as they come and whole ones as int64.

    With `gaps`, NaN is allowed and stands for a missing value.
    """
    x = _array(values, title)
    if x.ndim < 2 or x.dtype.kind not in "biuf" or 0 in x.shape[1:]:
        raise ConfigError(
            f"{title} is {x.dtype}{list(x.shape)}; it must be numbers, with examples along the first axis and at least "
            "one more axis that is not empty. Store features as float32 [n, F] or pixels as uint8 [n, C, H, W]; of a "
            "data frame with text give pandas.get_dummies(frame, dtype=float), or save it as a table."
        )
    if x.dtype == np.uint8:
        return _pixels(x, title)
    if x.dtype.kind in "iu":
        if x.size and int(x.max()) > np.iinfo(np.int64).max:
            raise ConfigError(f"{title} holds {x.max()}; whole numbers must fit into int64. Store it as float64.")
        return x.astype(np.int64, copy=False)
    x = x.astype({1: np.float32, 2: np.float16, 4: np.float32}.get(x.dtype.itemsize, np.float64), copy=False)
    _refuse(np.isinf(x) if gaps else ~np.isfinite(x), x, title, _NOT_FINITE)
    return x


def _pixels(x: np.ndarray, title: str) -> np.ndarray:
    """uint8 means pixels: [n, C, H, W], whichever of the usual layouts they come in."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim != 4:
        raise ConfigError(
            f"{title} is uint8{list(x.shape)}; uint8 means pixels, [n, H, W] or [n, C, H, W]. "
            "Reshape it to images, or store features as float32 and whole numbers as int64."
        )
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if _channels_are_last(x.shape, title) else x


def _channels_are_last(shape: tuple[int, ...], title: str) -> bool:
    """Whether four axes are [n, H, W, C] rather than [n, C, H, W]; refused where they may be both.

    One, three or four channels speak for a layout, and so does a square picture. Where neither tells, [n, C, H, W]
    has fewer channels than pixels in height and width.
    """
    _, left, middle, right = shape
    first = (left in USUAL_CHANNELS) + (left != middle == right)
    last = (right in USUAL_CHANNELS) + (left == middle > right)
    if first > last or left == right == 1 or (first == last and left < min(middle, right)):
        return False
    if last > first == 0:
        return True
    raise ConfigError(
        f"{title} is uint8{list(shape)}, which may be pixels [n, C, H, W] or [n, H, W, C]. Give them as [n, C, H, W]; "
        "if they are, give them as floats from 0 to 1, which are taken as they are."
    )


def grey_as_colour(images: int, grey: int) -> str:
    """A notice that pictures get three channels, since others have them."""
    return f"Of {counted(images, 'image')}, {grey:,} grey {'is' if grey == 1 else 'are'} taken as colour."


def class_labels(values: object, title: str) -> np.ndarray:
    """Class numbers as int64, or names as they are."""
    y = _array(values, title)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise ConfigError(
            f"{title} has the shape {list(y.shape)}, and fnrfl is for classification only, with one class for each "
            "example. Use argmax on one-hot labels; where several labels may hold, train a model for each of them."
        )
    if y.dtype.kind == "O" and all(isinstance(label, str) for label in y):
        y = y.astype(np.str_)
    if y.dtype.kind in "US":
        y = _decoded(y, title)
        plain_names = all(map(str.isascii, y.tolist()))
        return y if plain_names else np.array([same_spelling(name) for name in y.tolist()])
    if y.dtype.kind not in "biuf":
        raise ConfigError(f"{title} is of type {y.dtype}; labels must be class numbers from 0, or names. Convert them.")
    _refuse(np.isnan(y), y, title, _LABEL + "a label is never filled in. Label those examples or leave them out.")
    _refuse(y != np.floor(y), y, title, _ONLY + "whole numbers as labels. " + _NUMBER)
    _refuse(y < 0, y, title, _ONLY + "labels numbered from 0. " + _NUMBER)
    _refuse(y >= 2.0**63, y, title, _LABEL + "class numbers must fit into int64. Give names as strings.")
    if y.dtype.kind == "f":
        refuse_amounts(y.tolist(), title)
    return y.astype(np.int64)


def _decoded(y: np.ndarray, title: str) -> np.ndarray:
    """Names as text; bytes are read as UTF-8."""
    if y.dtype.kind == "U":
        return y
    try:
        return np.char.decode(y, "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{title} holds bytes that are not UTF-8 ({error.object!r}); names must be text. Store them as strings."
        ) from error


def client_names(values: object, num_examples: int, title: str) -> np.ndarray:
    """Who holds each example, as text: names without the space around them, or whole numbers."""
    ids = _array(values, title)
    if ids.ndim != 1 or len(ids) != num_examples:
        raise ConfigError(
            f"{title} has the shape {list(ids.shape)} for {counted(num_examples, 'example')}; it must name one client "
            "for each example. Write both from the same list."
        )
    if ids.dtype.kind == "S":
        ids = _decoded(ids, title)
    if ids.dtype.kind == "f" and np.isfinite(ids).all() and (ids == np.floor(ids)).all():
        ids = np.array([int(number) for number in ids.tolist()], dtype=object)
    named = ids.dtype.kind in "Uiub" or all(isinstance(one, str | int) for one in ids.tolist())
    names = [same_spelling(str(one).strip()) for one in ids.tolist()] if named and ids.dtype.kind != "f" else [""]
    if "" in names:
        at = names.index("")
        raise ConfigError(
            f"{title} has {str(ids[at])!r} for example {at}; a client is called by a name or a whole number. Name it, "
            "or leave those examples out."
        )
    return np.array(names, dtype=object)


def class_names(values: object, title: str) -> list[str]:
    """The names of classes, one each."""
    listed = _array(values, title)
    if listed.ndim != 1:
        raise ConfigError(
            f"{title} has the shape {list(listed.shape)}; it must be a list with one name for each class. Make it one."
        )
    return [same_spelling(str(name)) for name in (_decoded(listed, title) if listed.dtype.kind == "S" else listed)]


def numbered(
    y: Sequence[np.ndarray], classes: Sequence[str] | None, name: str
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Labels as class numbers, and the name of each class.

    Names are numbered in sorted order. Where labels are numbers and nothing names the classes, the numbers that occur
    are the names: 1, 2, 3 make three classes.
    """
    every = np.concatenate(y)
    if classes is None:
        known, numbers = np.unique(every, return_inverse=True)
        listed = tuple(str(label) for label in known)
    else:
        listed = tuple(classes)
        if twice := [label for label, count in Counter(listed).items() if count > 1]:
            raise ConfigError(f"{name} names the class {twice[0]!r} more than once; names must differ. Rename one.")
        place = {label: at for at, label in enumerate(listed if every.dtype.kind == "U" else range(len(listed)))}
        if unknown := sorted({*every.tolist()} - {*place}):
            raise ConfigError(
                f"{name} has the label {unknown[0]!r}, which is not among its "
                f"{counted(len(listed), 'class', 'classes')} {', '.join(listed)}; "
                "numbers count them from 0. Add it to the classes or correct the label."
            )
        numbers = np.array([place[label] for label in every.tolist()], dtype=np.int64)
    if len(listed) > len(y[0]):
        raise ConfigError(
            f"{name} has {counted(len(listed), 'class', 'classes')} for {counted(len(y[0]), 'training example')}; "
            "there must be at least as many examples as classes. Check that the labels are classes."
        )
    return np.split(numbers.astype(np.int64), np.cumsum([len(labels) for labels in y])[:-1]), listed
