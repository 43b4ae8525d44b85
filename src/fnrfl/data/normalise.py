"""The one way in: what files, folders of sites and objects hold becomes one checked value, for training and for use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted, printable, same_spelling
from fnrfl.data import arrays
from fnrfl.data.partition.by_client import in_natural_order
from fnrfl.data.reading import ONLY_PART, PARTS, Examples, Expected, Held, RawData, Reading


@dataclass(frozen=True, eq=False)
class Piece:
    """One part of what one client brings, or of all there is."""

    data: str
    client: str  # "": nobody says who holds it
    part: str
    examples: Examples
    classes: Sequence[str] | None

    def title(self, kind: str) -> str:
        """The name of one of its arrays in a sentence: x_train of mine.npz."""
        return f"{kind}{'_' if self.part else ''}{self.part} of {printable(self.client) or self.data}"


def normalise(name: str, held: Held, reading: Reading, expected: Expected | None = None) -> RawData:
    """Check what each client brings, make it alike, and join it; a client called "" is nobody.

    Examples become numbers of one type and shape, with one label each if there are labels. Where some client brings a
    test part, those that bring none have none. Labels that nobody uses are none at all if some are missing.
    """
    labels_used = expected is None or expected.labels_used
    pieces = [
        _checked(Piece(name, client, part, examples, raw.classes), reading, labels_used)
        for client, raw in held
        for part, examples in raw.parts.items()
    ]
    if not pieces:
        raise ConfigError(f"{name} has no examples; at least one is needed. Add some.")
    pieces, converted = _in_one_form(pieces)
    if labels_used:
        _refuse_other_labels(pieces)
    classes = None if pieces[0].classes is None else [same_spelling(str(one)) for one in pieces[0].classes]
    notices = (*(notice for _, raw in held for notice in raw.notices), *converted)
    return _with_gaps_treated(name, RawData(_parts(pieces), classes, held[0][1].columns, notices), reading)


def _parts(pieces: Sequence[Piece]) -> dict[str, Examples]:
    """The examples of everybody by part; a client that brings no test part, where others do, trains with all it has."""
    tested = any(piece.part == "test" for piece in pieces)
    found: dict[str, list[Piece]] = {part: [] for part in (PARTS if tested else (ONLY_PART,))}
    for piece in pieces:
        found[piece.part or ("train" if tested else ONLY_PART)].append(piece)
    return {part: _joined([piece.examples for piece in mine]) for part, mine in found.items()}


def _checked(piece: Piece, reading: Reading, labels_used: bool) -> Piece:
    """The same piece with its arrays checked."""
    held = piece.examples
    x = arrays.features(held.x, piece.title("x"), gaps=reading.missing != "refuse")
    try:
        y = None if held.y is None else arrays.class_labels(held.y, piece.title("y"))
    except ConfigError:
        if labels_used:
            raise
        y = None  # some are missing, and nobody uses the others
    if y is not None and len(x) != len(y):
        where = (f" in x_{piece.part}", f" in y_{piece.part}") if piece.part else ("", "")
        raise ConfigError(
            f"{piece.client or piece.data} has {counted(len(x), 'example')}{where[0]} and "
            f"{counted(len(y), 'label')}{where[1]}; there must be one label for each example. Write both from the same "
            "list."
        )
    if not len(x):
        raise ConfigError(f"{piece.data} has no examples in {piece.title('x')}; at least one is needed. Add some.")
    clients, names = held.clients, held.names
    if piece.client:
        clients = np.repeat(np.array([piece.client], dtype=object), len(x))
        names = [f"{piece.client}/{one}" for one in names] if names else [str(row) for row in range(len(x))]
    elif clients is not None:
        clients = arrays.client_names(clients, len(x), piece.title("clients"))
    return replace(piece, examples=replace(held, x=x, y=y, clients=clients, names=names))


def _in_one_form(pieces: Sequence[Piece]) -> tuple[list[Piece], list[str]]:
    """(pieces of one type and shape, notices): whole numbers beside fractions, and grey pictures beside colour."""
    channels = [piece.examples.x.shape[1] if piece.examples.x.dtype == np.uint8 else 0 for piece in pieces]
    floating = any(piece.examples.x.dtype.kind == "f" for piece in pieces)
    made, notices = list[Piece](), list[str]()
    for piece, count in zip(pieces, channels, strict=True):
        x = piece.examples.x
        if count == 1 and 3 in channels:
            x = x.repeat(3, axis=1)
            notices.append(arrays.grey_as_colour(len(x), len(x)))
        x = x.astype(np.float32) if floating and x.dtype == np.int64 else x
        made.append(replace(piece, examples=replace(piece.examples, x=x)))
        first = made[0].examples.x
        if (x.shape[1:], x.dtype) != (first.shape[1:], first.dtype):
            raise ConfigError(
                f"{pieces[0].title('x')} has examples of {first.dtype}{list(first.shape[1:])} and {piece.title('x')} "
                f"of {x.dtype}{list(x.shape[1:])}; they must be alike. Prepare them in one way, or set "
                "dataset.image_size if they are the images of a folder."
            )
    return made, notices


def _refuse_other_labels(pieces: Sequence[Piece]) -> None:
    """Refuse two pieces that number classes in two ways."""
    labelled = [piece for piece in reversed(pieces) if piece.examples.y is not None]
    kinds = {"names" if piece.examples.y.dtype.kind == "U" else "numbers": piece for piece in labelled}
    if len(kinds) > 1:
        one, other = sorted(kinds, key=lambda kind: pieces.index(kinds[kind]))
        raise ConfigError(
            f"{kinds[one].title('y')} has {one} as labels and {kinds[other].title('y')} has {other}; all must have one "
            "kind. Write all as names, or all as numbers."
        )
    first = pieces[0]
    for piece in pieces:
        if [*(piece.classes or ())] != [*(first.classes or ())]:
            raise ConfigError(
                f"{first.title('y')} and {piece.title('y')} do not have the same array `classes`; the number of a "
                "class must mean the same everywhere. Name all classes in one order in each file."
            )


def _joined(held: Sequence[Examples]) -> Examples:
    """Examples, one after another; what some of them lack is not there."""
    if len(held) == 1:
        return held[0]
    y, names, carried, clients = (
        [getattr(one, kind) for one in held] if all(getattr(one, kind) is not None for one in held) else None
        for kind in ("y", "names", "carried", "clients")
    )
    return Examples(
        np.concatenate([one.x for one in held]),
        None if y is None else np.concatenate(y),
        names and [*chain(*names)],
        carried and [*chain(*carried)],
        None if clients is None else np.concatenate(clients),
    )


# -- missing values ----------------------------------------------------------------------------------------------------


def _with_gaps_treated(name: str, raw: RawData, reading: Reading) -> RawData:
    """Missing values, which are NaN: mean leaves them to the first layer of the model, drop leaves examples out."""
    gaps = {part: np.isnan(examples.x) for part, examples in raw.parts.items() if examples.x.dtype.kind == "f"}
    if reading.missing == "refuse" or not any(found.any() for found in gaps.values()):
        return raw
    if reading.missing == "drop":
        return _without_gaps(name, raw, gaps)
    count, columns = sum(int(found.sum()) for found in gaps.values()), ""
    if raw.columns is not None:
        some = np.any([found.any(0) for found in gaps.values()], axis=0)
        names = [repr(name) for name, missing in zip(raw.columns.encoded, some, strict=True) if missing]
        columns = f" in {', '.join(names[:6])}" + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return raw.with_notices(
        f"{name} has {counted(count, 'missing input')}{columns}; in the place of each the model puts the mean of the "
        'clients\' known values (dataset.missing = "mean").'
    )


def _without_gaps(name: str, raw: RawData, gaps: dict[str, np.ndarray]) -> RawData:
    """The examples of which every value is known."""
    parts, total, left_out = dict[str, Examples](), 0, 0
    emptied: set[str] = set()
    for part, examples in raw.parts.items():
        known = np.logical_not(gaps[part].reshape(len(examples.x), -1).any(axis=1))
        if not known.any():
            raise ConfigError(
                f'{name} has no example without a missing value, and dataset.missing = "drop" leaves the others out. '
                'Set dataset.missing = "mean", or leave columns out with dataset.ignore.'
            )
        rows = examples.names or [str(row) for row in range(len(known))]
        parts[part] = replace(examples, names=rows).take(np.flatnonzero(known))
        if examples.clients is not None:
            emptied |= {*examples.clients.tolist()} - {*examples.clients[known].tolist()}
        total, left_out = total + len(known), left_out + int((~known).sum())
    are = "is" if left_out == 1 else "are"
    return replace(raw, parts=parts, emptied=tuple(in_natural_order(emptied))).with_notices(
        f"{name}: of {counted(total, 'example')}, {left_out:,} with missing values {are} left out "
        '(dataset.missing = "drop").'
    )
