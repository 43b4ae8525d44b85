"""Data with a file or folder for each client: what one site reads, and how the sites are put together.

A folder is read by what lies in it, so that nothing has to be guessed:

    CLASS/*.png                 classes, no clients            train/CLASS/*.png     the same in two parts
    SITE/CLASS/*.png            a folder of each client        SITE/train/CLASS/*.png
    SITE.csv or SITE.npz        a file of each client          SITE/train.csv and SITE/test.csv, or .npz
    train/*.json, test/*.json   as LEAF writes them, each file with some of the clients

`train` and `test` are parts, and never names of clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import same_spelling
from fnrfl.data import arrays, leaf
from fnrfl.data.partition.by_client import in_natural_order, some_of
from fnrfl.data.readers import PARTS, images_in, read_images, read_npz
from fnrfl.data.reading import ONLY_PART, Examples, Expected, RawData, Reading
from fnrfl.data.tables import read_tables

PART_WORDS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation"})  # in any case
TABLE_ENDINGS = (".csv", ".npz")


def read_csv(path: Path, expected: Expected | None, reading: Reading) -> RawData:
    """A table with a header: a column of classes, and columns of numbers or categories, which become float32."""
    read = read_tables([path], expected, reading)
    return RawData({ONLY_PART: read.examples[0]}, read.classes, read.columns, read.notices)


FILE_READERS: dict[str, Callable[[Path, Expected | None, Reading], RawData]] = {
    ".npz": read_npz,
    ".csv": read_csv,
    ".json": leaf.read_leaf,
}


@dataclass(frozen=True)
class Site:
    """Where the data of one client lies: its name, and a file or folder for each part."""

    name: str
    kind: str  # .csv, .npz or images
    parts: Mapping[str, Path]  # of images: its folder, under ONLY_PART


# -- which folder is what ----------------------------------------------------------------------------------------------


def read_folder(folder: Path, expected: Expected | None, reading: Reading) -> RawData:
    """A folder of images by class, of sites, or of LEAF's files."""
    if found := leaf.leaf_files(folder):
        return leaf.read_leaf_files(found, expected)
    sites = find_sites(folder)
    if not sites:
        refuse_other_tables(folder)
        return read_images(folder, expected, reading)
    kinds = {site.kind: site for site in sites}
    if len(kinds) > 1:
        one, other = list(kinds.values())[:2]
        raise ConfigError(
            f"{folder} has {one.name} as {_kind_in_words(one)} and {other.name} as {_kind_in_words(other)}; all "
            "clients must bring the same kind. Convert one of them."
        )
    if reading.client and sites[0].name:
        raise ConfigError(
            f"dataset.client = {reading.client!r} names a column, and {folder} has a file or folder for each client, "
            f"such as {sites[0].name}; one of them can say who holds a row. Leave the key out, or name the column in "
            "dataset.ignore."
        )
    used = expected is None or expected.labels_used
    together = put_together(str(folder), read_sites(sites, expected, reading), labels_used=used)
    return together.with_notices(*_unused(folder, sites))


def find_sites(folder: Path) -> list[Site]:
    """The clients that a folder has a file or folder for, in natural order; empty if it has none."""
    entries = _entries(folder)
    if (alone := site_at(folder)) is not None and alone.kind != "images":  # train.csv and test.csv of no client
        _refuse_other_part_names(folder, [at.stem for at in entries if at.suffix.lower() == alone.kind])
        return [replace(alone, name="")]
    if any(at.is_dir() and images_in(at) for at in entries):
        return []  # CLASS/*.png; folders that lie deeper are told of by whoever reads it
    found = [site for at in entries if (site := site_at(at)) is not None]
    names = [site.name for site in found]
    _refuse_other_part_names(folder, names)
    if set(names) & set(PARTS):
        return []  # train/CLASS/*.png: parts of one data set; whoever reads them says what lies beside them
    _refuse_twice_the_same(folder, names)
    order = {name: at for at, name in enumerate(in_natural_order(names))}
    return sorted(found, key=lambda site: order[site.name])


def _refuse_twice_the_same(folder: Path, names: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{folder} has more than one file or folder for the client {twice[0]}. Leave one of them.")


def _refuse_other_part_names(folder: Path, names: Sequence[str]) -> None:
    """Refuse parts of one data set under other names than train and test: they are nobody's clients."""
    if not names or not {name.lower() for name in names} <= PART_WORDS:
        return
    if set(names) <= {*PARTS} or ("train" in names and set(names) <= {"train", "test", "val", "valid", "validation"}):
        return  # whoever reads the parts says what lies beside them
    raise ConfigError(
        f"{folder} has {some_of(names)}, which look like parts of one data set and not like clients; its parts must be "
        "called train and test, in lower case. Rename them, and move elsewhere what is neither."
    )


def site_at(at: Path) -> Site | None:
    """What a file or folder holds of a client, if anything."""
    if not at.is_dir():
        kind = at.suffix.lower()
        return Site(same_spelling(at.stem), kind, {ONLY_PART: at}) if kind in TABLE_ENDINGS else None
    for kind in TABLE_ENDINGS:
        parts = {part: at / f"{part}{kind}" for part in PARTS if (at / f"{part}{kind}").is_file()}
        if list(parts) == ["test"]:
            raise ConfigError(f"{at} has test{kind} but no train{kind}, which must go with it. Add one.")
        if parts:
            return Site(same_spelling(at.name), kind, parts if len(parts) == 2 else {ONLY_PART: parts["train"]})
    classes = [*_folders(at), *(inside for part in PARTS for inside in _folders(at / part))]
    found = any(map(images_in, classes))
    return Site(same_spelling(at.name), "images", {ONLY_PART: at}) if found else None


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, hidden files aside."""
    return sorted(at for at in folder.iterdir() if at.name[0] != ".")


def _unused(folder: Path, sites: Sequence[Site]) -> list[str]:
    """A sentence about files and folders that no client is read from."""
    used = {path for site in sites for at in site.parts.values() for path in (at, *at.parents)}
    others = [at.name for at in _entries(folder) if at not in used]
    return [f"{folder} also has {some_of(others)}, which no client is read from."] if others else []


def _folders(folder: Path) -> list[Path]:
    return [at for at in folder.iterdir() if at.is_dir() and at.name[0] != "."] if folder.is_dir() else []


def has_tables(folder: Path) -> bool:
    """Whether a folder holds the tables of clients, whose columns have names."""
    return folder.is_dir() and any(site.kind == ".csv" for site in find_sites(folder))


def refuse_other_tables(folder: Path) -> None:
    """Refuse a folder of clients' folders whose tables have names of their own, such as north/2023.csv."""
    folders = sorted(_folders(folder))
    inside = [at for client in folders for at in sorted(client.iterdir()) if at.suffix.lower() in TABLE_ENDINGS]
    if inside and not any(map(images_in, folders)):
        one, kind = inside[0], inside[0].suffix.lower()
        raise ConfigError(
            f"{folder} has folders with tables such as {one.relative_to(folder)}; the folder of a client must hold "
            f"train{kind}, and may hold test{kind}. Join the tables of each client into one file, "
            f"{one.parent.name}{kind} in {folder}, or rename them."
        )


def _kind_in_words(site: Site) -> str:
    return "a folder of images" if site.kind == "images" else f"{site.kind} files"


# -- what one site reads -----------------------------------------------------------------------------------------------


def read_site(site: Site, expected: Expected | None, reading: Reading) -> RawData:
    """What one client reads by itself; a table's columns are those that `expected` has, if all have agreed on them."""
    if site.kind == "images":
        return read_images(site.parts[ONLY_PART], expected, reading)
    if site.kind == ".csv":
        return _tables_of([site], expected, reading)[0]
    read = {part: read_npz(path, expected, reading) for part, path in site.parts.items()}
    if list(read) == [ONLY_PART]:
        return read[ONLY_PART]
    parts = {}
    for part, found in read.items():
        if list(found.parts) != [ONLY_PART]:
            raise ConfigError(
                f"{site.parts[part]} has parts of its own; in a folder it is one part. Keep x and y in it."
            )
        parts[part] = found.parts[ONLY_PART]
    classes = read["train"].classes
    if classes != read["test"].classes:
        raise ConfigError(f"{site.parts['test']} names other classes than {site.parts['train']}. Name the same.")
    return RawData(parts, classes, notices=tuple(notice for found in read.values() for notice in found.notices))


def read_sites(sites: Sequence[Site], expected: Expected | None, reading: Reading) -> dict[str, RawData]:
    """What every client reads; they agree on columns, categories and classes of tables, and on colour, first."""
    if sites[0].kind == ".csv":
        return dict(zip((site.name for site in sites), _tables_of(sites, expected, reading), strict=True))
    read = {site.name: read_site(site, expected, reading) for site in sites}
    channels = {site.name: {part.x.shape[1] for part in read[site.name].parts.values()} for site in sites}
    if sites[0].kind == "images" and {1} in channels.values() and {3} in channels.values():
        colour = replace(expected or Expected(), colour=True)
        read |= {site.name: read_site(site, colour, reading) for site in sites if channels[site.name] == {1}}
    return read


def _tables_of(sites: Sequence[Site], expected: Expected | None, reading: Reading) -> list[RawData]:
    """The tables of some clients, read alike."""
    read = read_tables([path for site in sites for path in site.parts.values()], expected, reading)
    examples = iter(read.examples)
    found = [RawData({part: next(examples) for part in site.parts}, read.classes, read.columns) for site in sites]
    return [found[0].with_notices(*read.notices), *found[1:]]


# -- how sites are put together ----------------------------------------------------------------------------------------


def put_together(data: str, sites: Mapping[str, RawData], *, labels_used: bool = True) -> RawData:
    """The examples of all clients, each with the name of who holds it; a client without a name names nobody.

    Where some client brings a test part, those that bring none have none. Labels that nobody uses are none at all if
    they are not alike.
    """
    tested = any("test" in raw.parts for raw in sites.values())
    named = _alike(data, sites, labels_used)
    parts = {}
    for part in PARTS if tested else (ONLY_PART,):
        own = {site: raw.parts[name] for site, raw in named.items() if (name := _part_of(raw, part)) is not None}
        parts[part] = _joined(own)
    first = next(iter(named.values()))
    notices = tuple(notice for raw in sites.values() for notice in raw.notices)
    return RawData(parts, first.classes, first.columns, notices)


def _part_of(raw: RawData, part: str) -> str | None:
    """What a client calls a part: one that brings no test part trains with all that it has."""
    if part in raw.parts:
        return part
    return ONLY_PART if part == "train" and ONLY_PART in raw.parts else None


def _joined(examples: Mapping[str, Examples]) -> Examples:
    """The examples of some clients, one client after another."""
    held = list(examples.values())
    clients = np.repeat(np.array(list(examples), dtype=object), [len(mine.x) for mine in held])
    names, carried = (_in_a_row([getattr(mine, kind) for mine in held]) for kind in ("names", "carried"))
    y = None if any(mine.y is None for mine in held) else np.concatenate([mine.y for mine in held])
    x = np.concatenate([mine.x for mine in held])
    return Examples(x, y, names, carried, clients if all(examples) else None)


def _in_a_row(lists: Sequence[Sequence[str] | None]) -> list[str] | None:
    """Lists one after another; None if one is missing."""
    there = [each for each in lists if each is not None]
    return [one for each in there for one in each] if len(there) == len(lists) else None


def _alike(data: str, sites: Mapping[str, RawData], labels_used: bool) -> dict[str, RawData]:
    """The same data with arrays that can be joined: one type and shape of examples, one kind of labels."""
    titles = [(site, part) for site, raw in sites.items() for part in raw.parts]
    held = [sites[site].parts[part] for site, part in titles]
    where = [f"{f'{part} of ' if part else ''}{site or data}" for site, part in titles]
    x = arrays.as_one_type([_in_channels(mine.x, held, title) for mine, title in zip(held, where, strict=True)])
    y, classes = _labels([sites[site].classes for site, _ in titles], held, where, labels_used)
    for values, title in zip(x, where, strict=True):
        if (values.shape[1:], values.dtype) != (x[0].shape[1:], x[0].dtype):
            raise ConfigError(
                f"{where[0]} has examples of {x[0].dtype}{list(x[0].shape[1:])} and {title} of "
                f"{values.dtype}{list(values.shape[1:])}; those of all clients must be alike. Prepare them in one way."
            )
    made: dict[str, dict[str, Examples]] = {}
    for (site, part), mine, values, labels in zip(titles, held, x, y, strict=True):
        made.setdefault(site, {})[part] = replace(mine, x=values, y=labels, names=_rows(site, mine))
    return {site: replace(sites[site], parts=parts, classes=classes) for site, parts in made.items()}


def _rows(site: str, mine: Examples) -> list[str]:
    """Where each example of a site is: a path in the folder, or its row in the site's file."""
    return [f"{site}/{name}" for name in mine.names] if mine.names else [str(row) for row in range(len(mine.x))]


def _in_channels(x: object, held: Sequence[Examples], title: str) -> np.ndarray:
    """Examples as an array; grey images beside coloured ones get three channels."""
    values = arrays.features(x, title, gaps=True)
    coloured = any(mine.x.dtype == np.uint8 and mine.x.ndim == 4 and mine.x.shape[1] == 3 for mine in held)
    return values.repeat(3, axis=1) if coloured and values.dtype == np.uint8 and values.shape[1] == 1 else values


def _labels(
    classes: Sequence[Sequence[str] | None], held: Sequence[Examples], where: Sequence[str], used: bool
) -> tuple[Sequence[np.ndarray | None], Sequence[str] | None]:
    """The labels of all clients, which must be of one kind, and the names of the classes."""
    y = [arrays.labels_if_used(mine.y, f"y of {title}", used=used) for mine, title in zip(held, where, strict=True)]
    kinds = [arrays.kind_of_labels(labels) for labels in y]
    try:
        _check_labels_alike(kinds, classes, where)
    except ConfigError:
        if used:
            raise
        return [None] * len(y), None
    return y, classes[0]


def _check_labels_alike(kinds: Sequence[str], classes: Sequence[Sequence[str] | None], where: Sequence[str]) -> None:
    """Refuse labels of two kinds, and classes that two clients number in two ways."""
    for title, kind, known in zip(where, kinds, classes, strict=True):
        if kind != kinds[0]:
            raise ConfigError(
                f"{where[0]} has {kinds[0] or 'nothing'} as labels and {title} has {kind or 'nothing'}; all clients "
                "must have one kind. Write all as names, or all as numbers."
            )
        if (known and list(known)) != (classes[0] and list(classes[0])):
            raise ConfigError(
                f"{where[0]} and {title} do not have the same array `classes`; the number of a class must mean the "
                "same everywhere. Name all classes in one order in each file."
            )
