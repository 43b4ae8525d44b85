"""Data that is passed in as Python objects: arrays, data sets that are read item by item, or a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from fnrfl import usercode
from fnrfl.core.errors import ConfigError
from fnrfl.core.object_hash import object_hash
from fnrfl.core.rng import seeded
from fnrfl.core.words import counted, same_spelling
from fnrfl.data import frames
from fnrfl.data.datasets import Dataset, DataSource, as_returned, source_of_values
from fnrfl.data.readers import PARTS
from fnrfl.data.reading import ONLY_PART, PLAIN_READING, Examples, RawData, Reading
from fnrfl.data.sources.images import refuse_deep_pixels

LABELS = ("label", "labels", "y", "target", "class")  # what items with named values call their label
INPUTS = ("x", "image", "img", "pixel_values", "input_ids", "features", "inputs")  # and their input
ITEM_ITSELF = object()  # in place of a name: an item is an input and nothing else


def source_in_memory(
    values: object, title: str, reading: Reading = PLAIN_READING, *, labels_used: bool = True
) -> DataSource:
    """Values that were passed in, checked; `title` is what sentences call them."""
    return source_of_values(title, values, f"{title} is", reading, labels_used=labels_used)


def values_in_memory(value: object, title: str, *, labelled: bool = True) -> object:
    """The values that an object holds: a tuple of arrays, parts with names, or a Dataset.

    Items are read once, in their order, while torch's global stream stands at a fixed place, so that transforms that
    draw from it draw the same each time. Without `labelled`, an array alone is data without labels, and so are items
    of which each is an input alone.
    """
    if callable(value) and not _has_items(value):
        with usercode.errors_in_words(f"The function given as {title} failed", "correct it, or give its data."):
            value = value()
    if isinstance(value, Mapping) and {"data", "target"} <= set(value):
        return _from_bunch(value, title)
    if isinstance(value, Mapping):
        value = _from_mapping(value, title)
    parts = value if isinstance(value, tuple) else (value,)
    if len(parts) in (1, 2) and all(map(_has_items, parts)):
        value = _read_parts(parts, title, labelled)
    elif not labelled and not isinstance(value, tuple | Dataset):
        return RawData({ONLY_PART: Examples(_array_or_itself(value))}, columns=frames.columns_of(value))
    return _arrays_and_columns(value, title) if isinstance(value, tuple) else value


def _arrays_and_columns(values: tuple[object, ...], title: str) -> RawData | tuple[object, ...]:
    """Arrays, with the names of columns where inputs are data frames; a test part has those of the training part."""
    arrays = tuple(map(_array_or_itself, values))
    half = len(values) if len(values) < 4 else len(values) // 2
    columns = frames.columns_of(*values[:2]) if len(values) in (2, 3, 4, 6) else None
    if columns is None:
        return arrays
    parts = {ONLY_PART: as_returned(arrays[:half])}
    if half < len(values):
        test = RawData({ONLY_PART: as_returned(arrays[half:])}, columns=frames.columns_of(values[half]))
        test = frames.in_order_of(test, columns, f"The test part of {title}", "the training part")
        parts = {"train": parts[ONLY_PART], "test": test.parts[ONLY_PART]}
    return RawData(parts, columns=columns)


def values_hash(values: object) -> str:
    """The sha256 of the content of values that were passed in, in whichever form."""
    parts: list[object]
    if isinstance(values, RawData):
        parts = [
            array for part in values.parts.values() for array in (part.x, part.y, part.clients) if array is not None
        ]
        parts += [] if values.classes is None else [list(values.classes)]
    elif isinstance(values, Dataset):
        parts = [_plain(array) for part in (values.train, values.test) for array in (part.x, part.y)]
        parts += [values.classes, values.train_clients, values.test_clients]
    else:
        parts = list(values) if isinstance(values, tuple) else [values]
    return object_hash([part if isinstance(part, np.ndarray | list | tuple) else type(part) for part in parts])


def _array_or_itself(values: object) -> object:
    """Values as an array; what cannot be one is left to whoever checks it."""
    try:
        return _plain(values)
    except (TypeError, ValueError, RuntimeError):
        return values


def _from_mapping(parts: Mapping[Any, Any], title: str) -> object:
    """What data that names its parts would be without names: {"train": ..., "test": ...}, each a data set or (x, y)."""
    if not {"train"} <= set(parts) <= {*PARTS}:
        raise ConfigError(
            f"{title} has the parts {', '.join(map(str, parts)) or '(none)'}; it must have train, and may have test. "
            "Give those two by these names."
        )
    found = tuple(parts[part] for part in PARTS if part in parts)
    if all(isinstance(part, tuple) for part in found):
        return tuple(array for part in found for array in part)
    return found if len(found) == 2 else found[0]


def _from_bunch(bunch: Mapping[Any, Any], title: str) -> RawData:
    """The data of a loader of scikit-learn; target_names are of classes where targets are numbers."""
    values = _arrays_and_columns((bunch["data"], bunch["target"]), title)
    raw = values if isinstance(values, RawData) else RawData({ONLY_PART: as_returned(values)})
    names = bunch.get("target_names", ()) if np.asarray(bunch["target"]).dtype.kind in "iu" else ()
    return replace(raw, classes=[str(name) for name in names] or None)


def _has_items(value: object) -> bool:
    """Whether an object is a data set that is read item by item, and no array."""
    if isinstance(value, TorchDataset):
        return True
    array = isinstance(value, str | bytes | Sequence | Mapping | Tensor) or hasattr(value, "__array__")
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not array and not isinstance(value, Dataset)


def _read_parts(parts: Sequence[object], title: str, labelled: bool) -> RawData:
    """One data set, or one to train with and one to test with; both number their classes as the first does."""
    names = (ONLY_PART,) if len(parts) == 1 else PARTS
    titles = [f"{title} ({name})" if name else title for name in names]
    with seeded(0, "given data"):
        read = [_read_items(part, told, labelled) for part, told in zip(parts, titles, strict=True)]
    examples, (classes, *others) = [one for one, _ in read], [known for _, known in read]
    if classes and others and others[0] and others[0] != classes:
        examples[1] = replace(examples[1], y=_renumbered(examples[1].y, others[0], classes, titles))
    return RawData(dict(zip(names, examples, strict=True)), classes)


def _renumbered(y: object, own: Sequence[str], classes: Sequence[str], titles: Sequence[str]) -> object:
    """Labels that number a data set's own classes, as numbers of the same names in the training data's list."""
    numbers = np.asarray(y)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        return y  # names, or something that is refused elsewhere
    for number in np.unique(numbers).tolist():
        if not 0 <= number < len(own):
            raise ConfigError(
                f"{titles[1]} has the label {number} and names {counted(len(own), 'class', 'classes')}; labels are "
                "positions in that list. Correct the label or name every class."
            )
        if own[number] not in classes:
            raise ConfigError(
                f"{titles[1]} has the class {own[number]!r}, which {titles[0]} has not; its classes are "
                f"{', '.join(classes)}. Add it to the training data or leave its examples out."
            )
    place = {name: at for at, name in enumerate(classes)}
    return np.array([place[own[number]] for number in numbers.tolist()], dtype=np.int64)


def _read_items(items: Any, title: str, labelled: bool) -> tuple[Examples, list[str] | None]:
    """All items of a data set as two arrays, or one without labels, and the names of the classes if it says them."""
    if isinstance(items, IterableDataset) or not hasattr(items, "__len__"):
        raise ConfigError(
            f"{title} is an iterable data set ({type(items).__name__}), which has no length and no fixed order; it "
            "must have a length and items by number. Collect it first, such as with list(...), and give its arrays."
        )
    if not len(items):
        raise ConfigError(f"{title} has no items; at least one is needed. Add some.")
    x, labels, names = np.empty(0), [], None  # x: made for the first item
    for place in range(len(items)):
        with usercode.errors_in_words(f"Item {place} of {title} could not be read", "correct the data set."):
            item = items[place]
        names = names or _names_of(item, title, labelled)
        values, label = _input_and_label(item, names, f"Item {place} of {title}")
        if not place:
            x = np.empty((len(items), *values.shape), values.dtype)
        elif (values.shape, values.dtype) != (x.shape[1:], x.dtype):
            raise ConfigError(
                f"Item {place} of {title} is {values.dtype}{list(values.shape)}, and item 0 is "
                f"{x.dtype}{list(x.shape[1:])}; all must be alike. Resize, pad or convert them in its transform."
            )
        x[place] = values
        labels.append(label)
    unlabelled = names is not None and names[1] is None
    return Examples(x, None if unlabelled else _array_or_itself(labels)), _class_names(items, names)


def _names_of(item: object, title: str, labelled: bool) -> tuple[Any, Any]:
    """Where the input and the label are in every item: two places, or two names; None if there is no label."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return 0, 1
    if not labelled and not isinstance(item, tuple | list | Mapping):
        return ITEM_ITSELF, None
    if not labelled and isinstance(item, tuple | list) and len(item) == 1:
        return 0, None
    if isinstance(item, Mapping):
        found, label = _names_in(item)
        if found is not None and not (labelled and label is None):
            return found, label
    told = f"named {', '.join(map(str, item))}" if isinstance(item, Mapping) else f"a {type(item).__name__}"
    told += f" of {len(item)}" if isinstance(item, tuple | list) else ""
    raise ConfigError(
        f"The items of {title} are {told}; they must be pairs (x, y), or have a value named {', '.join(LABELS[:-1])} "
        f"or {LABELS[-1]} and one input, named {', '.join(INPUTS)} if there are more. Rename them, or give arrays."
    )


def _names_in(item: Mapping[Any, object]) -> tuple[Any, Any]:
    """The names of an item's input and of its label; None where there is none, or where it cannot be told."""
    label = next((name for name in LABELS if name in item), None)
    others = [name for name in item if name != label]
    inputs = others if len(others) == 1 else [name for name in INPUTS if name in others]
    return next(iter(inputs), None), label


def _input_and_label(item: Any, names: tuple[Any, Any], title: str) -> tuple[np.ndarray, object]:
    """One item as an array and a label."""
    try:
        x = item if names[0] is ITEM_ITSELF else item[names[0]]
        y = None if names[1] is None else item[names[1]]
        values = _plain(_picture(x, title) if hasattr(x, "convert") else x)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{title} is not like the first ({type(error).__name__}: {error}); all must be alike. Correct it."
        ) from error
    label = _plain(y)
    return values, label.item() if label.size == 1 else label.tolist()


def _picture(image: Any, title: str) -> Any:
    """A picture with 8 bits for each value; one with a palette or one bit a pixel is read as colour."""
    try:
        refuse_deep_pixels(image.mode)
    except ValueError as error:
        raise ConfigError(
            f"{title} is a picture that cannot be taken: {error}. Give its pixels as an array of floats, or scale them "
            "to 8 bits in its transform."
        ) from error
    return image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")


def _plain(values: object) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray):
        return values
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    return np.asarray(values)


def _class_names(items: Any, names: tuple[Any, Any] | None) -> list[str] | None:
    """The names of the classes where a data set says them: torchvision in `classes`, Hugging Face in its features."""
    features = getattr(items, "features", None)
    if isinstance(features, Mapping) and names is not None and names[1] in features:
        found = getattr(features[names[1]], "names", None)
    else:
        found = getattr(items, "classes", None)
    known = isinstance(found, list | tuple) and all(isinstance(name, str) for name in found)
    return [same_spelling(name) for name in found] if known and found else None
