"""Data that is passed in as Python objects, or that a function returns: arrays, frames, data sets read item by item.

Of data frames, of pandas or polars, columns have names, by which other data is matched. Neither is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from fnrfl import usercode
from fnrfl.core.errors import ConfigError
from fnrfl.core.object_hash import object_hash
from fnrfl.core.rng import seeded
from fnrfl.core.words import counted, same_spelling
from fnrfl.data.arrays import plain
from fnrfl.data.column_names import refuse_other_columns
from fnrfl.data.files import refuse_deep_pixels
from fnrfl.data.reading import ONLY_PART, PARTS, Columns, Examples, Expected, RawData

LABELS = ("label", "labels", "y", "target", "class")  # what items with named values call their label
INPUTS = ("x", "image", "img", "pixel_values", "input_ids", "features", "inputs")  # and their input
UNNAMED_LABEL = "label"  # what labels are called that have no name
ITEM_ITSELF = object()  # in place of a name: an item is an input and nothing else


def read_object(value: object, title: str, expected: Expected | None = None, begins: str = "") -> RawData:
    """Return what an object holds, to be normalised; `title` is what sentences call it, `begins` how a refusal begins.

    Items are read once, in their order, while torch's global stream stands at a fixed place, so that transforms that
    draw from it draw the same each time. With `expected`, an array alone is data without labels, and so are items of
    which each is an input alone.
    """
    if callable(value) and (isinstance(value, type) or not _has_items(value)):
        with usercode.errors_in_words(f"The function given as {title} failed", "correct it, or give its data."):
            value = value()
    if hasattr(value, "as_raw"):  # a Dataset of fnrfl's
        value = value.as_raw()
    classes = None
    if isinstance(value, Mapping):
        value, classes = _unpacked(value, title)
    if isinstance(value, RawData):
        raw = value
    elif len(parts := value if isinstance(value, tuple) else (value,)) in (1, 2) and all(map(_has_items, parts)):
        raw = _read_parts(parts, title, expected is None)
    else:
        raw = _arrays(value, title, expected, begins or f"{title} is")
    raw = replace(raw, classes=classes or raw.classes)
    return raw if expected is None else _in_order_of(raw, expected.columns, title)


def values_hash(raw: RawData) -> str:
    """The sha256 of the content of values that were passed in, in whichever form."""
    parts = [array for part in raw.parts.values() for array in (part.x, part.y, part.clients) if array is not None]
    parts += [] if raw.classes is None else [list(raw.classes)]
    return object_hash([part if isinstance(part, np.ndarray | list | tuple) else type(part) for part in parts])


def _unpacked(named: Mapping[Any, Any], title: str) -> tuple[object, list[str] | None]:
    """(data that names its parts as it would be without names, the names of classes if it says them).

    It is a loader's of scikit-learn, or {"train": ..., "test": ...}, each a data set or (x, y).
    """
    if {"data", "target"} <= set(named):  # target_names are of classes where targets are numbers
        names = named.get("target_names", ()) if np.asarray(named["target"]).dtype.kind in "iu" else ()
        return (named["data"], named["target"]), [str(name) for name in names]
    if not {"train"} <= set(named) <= {*PARTS}:
        raise ConfigError(
            f"{title} has the parts {', '.join(map(str, named)) or '(none)'}; it must have train, and may have test. "
            "Give those two by these names."
        )
    found = tuple(named[part] for part in PARTS if part in named)
    if all(isinstance(part, tuple) for part in found):
        return tuple(array for part in found for array in part), None
    return found if len(found) == 2 else found[0], None


# -- arrays and frames -------------------------------------------------------------------------------------------------


def _arrays(value: object, title: str, expected: Expected | None, begins: str) -> RawData:
    """Arrays in a tuple, with the names of columns where inputs are frames; or inputs alone, to be used."""
    if expected is not None and not isinstance(value, tuple):
        inputs, labels = _without_label(value, expected.columns)
        value = (inputs,) if labels is None or not expected.labels_used else (inputs, labels)
    elif not isinstance(value, tuple) or len(value) not in (2, 3, 4, 6):
        length = f" of {len(value)}" if isinstance(value, tuple) else ""
        raise ConfigError(
            f"{begins} {type(value).__name__}{length}; it must be a fnrfl Dataset, a tuple x_train, y_train, x_test, "
            "y_test, or a tuple x, y; with the client of each example, x_train, y_train, clients_train, x_test, "
            f"y_test, clients_test, or x, y, clients. In Python a torch Dataset will do too.{_instead_of(value)}"
        )
    half = len(value) if len(value) < 4 else len(value) // 2
    raw = _part(*value[:half])
    if half == len(value):
        return raw
    test = _in_order_of(_part(*value[half:]), raw.columns, f"The test part of {title}", "the training part")
    return replace(raw, parts={"train": raw.parts[ONLY_PART], "test": test.parts[ONLY_PART]})


def _part(x: object, y: object = None, clients: object = None) -> RawData:
    held = [None if each is None else _array_or_itself(each) for each in (x, y, clients)]
    return RawData({ONLY_PART: Examples(held[0], held[1], clients=held[2])}, columns=columns_of(x, y))


def columns_of(x: object, y: object = None) -> Columns | None:
    """The columns of a data frame; None of anything else, and where a name is no text or stands twice."""
    names = getattr(x, "columns", None)
    if names is None or getattr(x, "ndim", 2) != 2 or not all(isinstance(name, str) for name in names):
        return None
    inputs, label = tuple(map(same_spelling, names)), getattr(y, "name", None)
    if len({*inputs}) < len(inputs):
        return None
    label = same_spelling(label) if isinstance(label, str) and label not in inputs else UNNAMED_LABEL
    return Columns(inputs, ("number",) * len(inputs), label)


def _without_label(frame: Any, columns: Columns | None) -> tuple[Any, Any]:
    """(a data frame less the training data's column of labels, that column); anything else as it is, and None."""
    own = columns_of(frame)
    if own is None or columns is None or columns.label not in own.inputs or columns.label in columns.inputs:
        return frame, None
    names = {same_spelling(name): name for name in frame.columns}
    label = names.pop(columns.label)
    return frame[[*names.values()]], frame[label]


def _in_order_of(raw: RawData, columns: Columns | None, title: str, whose: str = "the training data") -> RawData:
    """The same data with its columns in the order of others; refused if they are not the same columns.

    Data without names is taken by position, and so are numbers for a table that has categories.
    """
    if raw.columns is None or columns is None or columns.categories or raw.columns.inputs == columns.inputs:
        return raw
    own = raw.columns.inputs
    refuse_other_columns(title, own, columns.inputs, whose, "columns of a data frame are matched by name")
    order = [own.index(name) for name in columns.inputs]
    parts = {name: replace(part, x=np.asarray(part.x)[:, order]) for name, part in raw.parts.items()}
    return replace(raw, parts=parts, columns=columns)


def _instead_of(value: object) -> str:
    """What to give in place of some objects that people try."""
    if hasattr(value, "columns") and hasattr(value, "drop"):
        return " Of a data frame give the inputs and the column of classes: (frame.drop(columns=NAME), frame[NAME])."
    if hasattr(value, "batch_sampler") and hasattr(value, "dataset"):
        return " Of a DataLoader give its dataset: loader.dataset."
    return " Change what it gives."


def _array_or_itself(values: object) -> object:
    """Values as an array; what cannot be one is left to whoever checks it."""
    try:
        return plain(values)
    except (TypeError, ValueError, RuntimeError):
        return values


# -- data sets that are read item by item ------------------------------------------------------------------------------


def _has_items(value: object) -> bool:
    """Whether an object is a data set that is read item by item, and no array."""
    if isinstance(value, TorchDataset):
        return True
    array = isinstance(value, str | bytes | Sequence | Mapping | Tensor) or hasattr(value, "__array__")
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not array


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
    place = {name: at for at, name in enumerate(classes)}
    for number in np.unique(numbers).tolist():
        if not 0 <= number < len(own):
            raise ConfigError(
                f"{titles[1]} has the label {number} and names {counted(len(own), 'class', 'classes')}; labels are "
                "positions in that list. Correct the label or name every class."
            )
        if own[number] not in place:
            raise ConfigError(
                f"{titles[1]} has the class {own[number]!r}, which {titles[0]} has not; its classes are "
                f"{', '.join(classes)}. Add it to the training data or leave its examples out."
            )
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
    x, labels, names = np.empty(0), [], (None, None)  # made and found for the first item
    for place in range(len(items)):
        with usercode.errors_in_words(f"Item {place} of {title} could not be read", "correct the data set."):
            item = items[place]
        names = names if place else _names_of(item, title, labelled)
        values, label = _input_and_label(item, names, f"Item {place} of {title}")
        x = x if place else np.empty((len(items), *values.shape), values.dtype)
        if (values.shape, values.dtype) != (x.shape[1:], x.dtype):
            raise ConfigError(
                f"Item {place} of {title} is {values.dtype}{list(values.shape)}, and item 0 is "
                f"{x.dtype}{list(x.shape[1:])}; all must be alike. Resize, pad or convert them in its transform."
            )
        x[place] = values
        labels.append(label)
    return Examples(x, None if names[1] is None else _array_or_itself(labels)), _class_names(items, names[1])


def _names_of(item: object, title: str, labelled: bool) -> tuple[Any, Any]:
    """Where the input and the label are in every item: two places, or two names; None if there is no label."""
    found: tuple[Any, Any] | None
    if isinstance(item, Mapping):
        found, told = _names_in(item), f"named {', '.join(map(str, item))}"
    elif isinstance(item, tuple | list):
        found, told = {1: (0, None), 2: (0, 1)}.get(len(item)), f"a {type(item).__name__} of {len(item)}"
    else:
        found, told = (ITEM_ITSELF, None), f"a {type(item).__name__}"
    if found is None or (labelled and found[1] is None):
        raise ConfigError(
            f"The items of {title} are {told}; they must be pairs (x, y), or have a value named "
            f"{', '.join(LABELS[:-1])} or {LABELS[-1]} and one input, named {', '.join(INPUTS)} if there are more. "
            "Rename them, or give arrays."
        )
    return found


def _names_in(item: Mapping[Any, object]) -> tuple[Any, Any] | None:
    """The names of an item's input and of its label, None if there is none; None where the input cannot be told."""
    label = next((name for name in LABELS if name in item), None)
    others = [name for name in item if name != label]
    inputs = others if len(others) == 1 else [name for name in INPUTS if name in others]
    return (inputs[0], label) if inputs else None


def _input_and_label(item: Any, names: tuple[Any, Any], title: str) -> tuple[np.ndarray, object]:
    """One item as an array and a label."""
    try:
        x = item if names[0] is ITEM_ITSELF else item[names[0]]
        y = None if names[1] is None else item[names[1]]
        values = plain(_picture(x, title) if hasattr(x, "convert") else x)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{title} is not like the first ({type(error).__name__}: {error}); all must be alike. Correct it."
        ) from error
    label = plain(y)
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


def _class_names(items: Any, label: Any) -> list[str] | None:
    """The names of the classes where a data set says them: torchvision in `classes`, Hugging Face in its features."""
    found, features = getattr(items, "classes", None), getattr(items, "features", None)
    if isinstance(features, Mapping) and label in features:
        found = getattr(features[label], "names", None)
    known = isinstance(found, list | tuple) and all(isinstance(name, str) for name in found)
    return [same_spelling(name) for name in found] if known and found else None
