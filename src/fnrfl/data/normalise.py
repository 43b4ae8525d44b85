"""The one way in: what files, folders of sites and objects hold becomes one checked value, for training and for use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted, printable, same_spelling
from fnrfl.data import arrays
from fnrfl.data.partition.by_client import in_natural_order
from fnrfl.data.reading import ONLY_PART, PARTS, Examples, Held, RawData, Reading


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


def normalise(name: str, held: Held, reading: Reading, *, labels_used: bool = True) -> RawData:
    """Check what each client brings, make it alike, and join it; a client called "" is nobody.

    Examples become numbers of one type and shape, with one label each if there are labels. Where some client brings a
    test part, those that bring none have none. Labels that nobody uses are none at all if some are missing or they are
    not alike.
    """
    pieces = [
        _checked(Piece(name, client, part, examples, raw.classes), reading, labels_used)
        for client, raw in held
        for part, examples in raw.parts.items()
    ]
    if not pieces:
        raise ConfigError(f"{name} has no examples; at least one is needed. Add some.")
    pieces, converted = _in_one_form(pieces)
    pieces, classes = _labels_alike(pieces, labels_used), pieces[0].classes
    classes = None if classes is None else [same_spelling(str(one)) for one in classes]
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
    y = arrays.labels_if_used(held.y, piece.title("y"), used=labels_used)
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
    coloured = any(_channels(piece) == 3 for piece in pieces)
    grey = [coloured and _channels(piece) == 1 for piece in pieces]
    x = [
        one.examples.x.repeat(3, axis=1) if is_grey else one.examples.x
        for one, is_grey in zip(pieces, grey, strict=True)
    ]
    x = arrays.as_one_type(x)
    for piece, values in zip(pieces, x, strict=True):
        if (values.shape[1:], values.dtype) != (x[0].shape[1:], x[0].dtype):
            raise ConfigError(
                f"{pieces[0].title('x')} has examples of {x[0].dtype}{list(x[0].shape[1:])} and {piece.title('x')} of "
                f"{values.dtype}{list(values.shape[1:])}; they must be alike. Prepare them in one way, or set "
                "dataset.image_size if they are the images of a folder."
            )
    made = [replace(one, examples=replace(one.examples, x=values)) for one, values in zip(pieces, x, strict=True)]
    counts = [len(values) for values, is_grey in zip(x, grey, strict=True) if is_grey]
    return made, [arrays.grey_as_colour(count, count) for count in counts]


def _channels(piece: Piece) -> int:
    """How many channels pictures have; 0 of anything else."""
    x = piece.examples.x
    return x.shape[1] if x.dtype == np.uint8 else 0


def _labels_alike(pieces: list[Piece], used: bool) -> list[Piece]:
    """Pieces with labels of one kind; refused where two pieces number classes in two ways."""
    labelled = [piece for piece in pieces if piece.examples.y is not None]
    kinds = [arrays.kind_of_labels(piece.examples.y) for piece in labelled]
    if len({*kinds}) > 1:
        if not used:
            return [replace(piece, examples=replace(piece.examples, y=None)) for piece in pieces]
        other = next(at for at, kind in enumerate(kinds) if kind != kinds[0])
        raise ConfigError(
            f"{labelled[0].title('y')} has {kinds[0]} as labels and {labelled[other].title('y')} has {kinds[other]}; "
            "all must have one kind. Write all as names, or all as numbers."
        )
    known = pieces[0].classes
    for piece in pieces:
        if used and (piece.classes and list(piece.classes)) != (known and list(known)):
            raise ConfigError(
                f"{pieces[0].title('y')} and {piece.title('y')} do not have the same array `classes`; the number of a "
                "class must mean the same everywhere. Name all classes in one order in each file."
            )
    return pieces


def _joined(held: Sequence[Examples]) -> Examples:
    """Examples, one after another; what some of them lack is not there."""
    if len(held) == 1:
        return held[0]
    y, clients = ([each for one in held if (each := getattr(one, kind)) is not None] for kind in ("y", "clients"))
    names, carried = (_in_a_row([getattr(one, kind) for one in held]) for kind in ("names", "carried"))
    return Examples(
        np.concatenate([one.x for one in held]),
        np.concatenate(y) if len(y) == len(held) else None,
        names,
        carried,
        np.concatenate(clients) if len(clients) == len(held) else None,
    )


def _in_a_row(lists: Sequence[Sequence[str] | None]) -> list[str] | None:
    known = [each for each in lists if each is not None]
    return [one for each in known for one in each] if len(known) == len(lists) else None


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
    parts, total, left_out = {}, 0, 0
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
    return replace(raw, parts=parts, emptied=tuple(in_natural_order(emptied))).with_notices(
        f"{name}: {left_out:,} of {counted(total, 'example')} {'has' if left_out == 1 else 'have'} missing values and "
        f'{"is" if left_out == 1 else "are"} left out (dataset.missing = "drop").'
    )
