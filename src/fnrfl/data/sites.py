"""Files and folders: which clients they hold data of, and what each of them reads.

A folder is read by what lies in it, so that nothing has to be guessed:

    CLASS/*.png                 classes, no clients            train/CLASS/*.png     the same in two parts
    SITE/CLASS/*.png            a folder of each client        SITE/train/CLASS/*.png
    SITE.csv or SITE.npz        a file of each client          SITE/train.csv and SITE/test.csv, or .npz
                                (or .tsv, .xlsx, .parquet)
    train/*.json, test/*.json   as LEAF writes them, each file with some of the clients

`train` and `test` are parts, and never names of clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import same_spelling
from fnrfl.data.files import IMAGE_ENDINGS, images_in, read_images, read_leaf, read_loose_images, read_npz, subfolders
from fnrfl.data.partition.by_client import some_of, sort_key
from fnrfl.data.reading import ONLY_PART, PARTS, TABLE_ENDINGS, Expected, Held, Reading
from fnrfl.data.tables import read_tables

PART_WORDS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation"})  # in any case
ARRAYS_ENDING = ".npz"
LEAF_ENDING = ".json"
FILE_ENDINGS = (*TABLE_ENDINGS, ARRAYS_ENDING)  # of files that hold the data of one client
IMAGES = "images"  # the kind of a folder with a folder of images for each class
TABLE = "table"  # the kind of a file with columns that have names
KINDS = {**dict.fromkeys(TABLE_ENDINGS, TABLE), ARRAYS_ENDING: ARRAYS_ENDING}


@dataclass(frozen=True)
class Site:
    """Where the data of one client lies: its name, and a file or folder for each part."""

    name: str
    kind: str  # table, .npz or images
    parts: Mapping[str, Path]  # of images: the folder with the folders of the classes


# -- which folder is what ----------------------------------------------------------------------------------------------


def read_path(path: Path, expected: Expected | None, reading: Reading) -> Held:
    """What a file or a folder holds, client by client."""
    ending = path.suffix.lower()
    if ending in FILE_ENDINGS:
        return read_sites([Site("", KINDS[ending], {ONLY_PART: path})], expected, reading)
    return read_leaf({ONLY_PART: [path]}) if ending == LEAF_ENDING else _read_folder(path, expected, reading)


def _read_folder(folder: Path, expected: Expected | None, reading: Reading) -> Held:
    """A folder of images by class, of sites, or of LEAF's files."""
    if found := _leaf_files(folder):
        return read_leaf(found)
    if expected is not None and not expected.labelled and images_in(folder):
        return [("", read_loose_images(folder, expected, reading))]
    sites = find_sites(folder)
    if not sites:
        refuse_other_tables(folder)
        raise ConfigError(
            f"{folder} has no images in folders named by their class; it must hold <class>/<image>, an image ending in "
            f"{', '.join(sorted(IMAGE_ENDINGS))}. Sort the images into a folder for each class."
        )
    kinds = {site.kind: site.name for site in sites}
    if len(kinds) > 1:
        words = {TABLE: "a table", ARRAYS_ENDING: "a .npz file", IMAGES: IMAGES}
        first, other = ((name, words[kind]) for kind, name in [*kinds.items()][:2])
        raise ConfigError(
            f"{folder} has {first[0]} as {first[1]} and {other[0]} as {other[1]}; all clients must bring the same "
            "kind. Convert one of them."
        )
    if reading.client and sites[0].name:
        raise ConfigError(
            f"dataset.client = {reading.client!r} names a column, and {folder} has a file or folder for each client, "
            f"such as {sites[0].name}; one of them can say who holds a row. Leave the key out, or name the column in "
            "dataset.ignore."
        )
    *held, (name, last) = read_sites(sites, expected, reading)
    return [*held, (name, last.with_notices(*_unused(folder, sites)))]


def _leaf_files(folder: Path) -> dict[str, list[Path]]:
    """LEAF's files by part: those of train/ and test/, or those that are all that a folder has; else none."""
    found = {}
    for part in (*PARTS, ONLY_PART):
        inside = _entries(folder / part) if (folder / part).is_dir() else []
        if inside and all(at.suffix.lower() == LEAF_ENDING for at in inside):
            found[part] = inside
    return found if "train" in found else {part: files for part, files in found.items() if part == ONLY_PART}


def find_sites(folder: Path) -> list[Site]:
    """The clients that a folder has a file or folder for, in natural order; empty if it has none."""
    entries = _entries(folder)
    if (alone := site_at(folder)) is not None:  # the data of no client in particular
        images = alone.kind == IMAGES
        alike = [_holds_classes(at) if images else KINDS.get(at.suffix.lower()) == alone.kind for at in entries]
        names = [at.stem for at, one in zip(entries, alike, strict=True) if one]
        _refuse_other_part_names(folder, names)
        return [replace(alone, name="")]
    found = [site for at in entries if (site := site_at(at)) is not None]
    names = [site.name for site in found]
    _refuse_other_part_names(folder, names)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{folder} has more than one file or folder for the client {twice[0]}. Leave one of them.")
    return sorted(found, key=lambda site: sort_key(site.name))


def _refuse_other_part_names(folder: Path, names: Sequence[str]) -> None:
    """Refuse parts of one data set under other names than train and test: they are nobody's clients."""
    beside = {"train", "test", "val", "valid", "validation"}  # whoever reads the parts says what lies beside them
    read = {*names} <= {*PARTS} or ("train" in names and {*names} <= beside)
    if not read and {name.lower() for name in names} <= PART_WORDS:
        raise ConfigError(
            f"{folder} has {some_of(names)}, which look like parts of one data set and not like clients; its parts "
            "must be called train and test, in lower case. Rename them, and move elsewhere what is neither."
        )


def site_at(at: Path) -> Site | None:
    """What a file or folder holds of a client, if anything."""
    if not at.is_dir():
        kind = KINDS.get(at.suffix.lower())
        return Site(same_spelling(at.stem), kind, {ONLY_PART: at}) if kind else None
    for kind in (TABLE, ARRAYS_ENDING, IMAGES):
        found = {part: _of_part(at, part, kind) for part in PARTS}
        parts = {part: path for part, path in found.items() if _holds_classes(path) or path.is_file()}
        if list(parts) == ["test"]:
            name, other = found["test"].name, found["train"].name
            raise ConfigError(f"{at} has {name} but no {other}, which must go with it. Add one.")
        if parts:
            return Site(same_spelling(at.name), kind, parts if len(parts) == 2 else {ONLY_PART: parts["train"]})
    return Site(same_spelling(at.name), IMAGES, {ONLY_PART: at}) if _holds_classes(at) else None


def _of_part(folder: Path, part: str, kind: str) -> Path:
    """The file or folder of a part, which need not be there."""
    files = [folder / f"{part}{ending}" for ending in FILE_ENDINGS if KINDS[ending] == kind]
    there = [at for at in files if at.is_file()]
    if len(there) > 1:
        raise ConfigError(f"{folder} has {there[0].name} and {there[1].name}; a part is one file. Leave one of them.")
    return folder / part if kind == IMAGES else (there or files)[0]


def _holds_classes(folder: Path) -> bool:
    return any(map(images_in, subfolders(folder)))


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, hidden files aside."""
    return sorted(at for at in folder.iterdir() if at.name[0] != ".")


def _unused(folder: Path, sites: Sequence[Site]) -> list[str]:
    """A sentence about files and folders that no client is read from."""
    used = {path for site in sites for at in site.parts.values() for path in (at, *at.parents)}
    others = [at.name for at in _entries(folder) if at not in used] if sites[0].parts.get(ONLY_PART) != folder else []
    return [f"{folder} also has {some_of(others)}, which is not read."] if others else []


def has_tables(path: Path) -> bool:
    """Whether a path is a table, or a folder with the tables of clients, whose columns have names."""
    if path.is_dir():
        return any(site.kind == TABLE for site in find_sites(path))
    return path.suffix.lower() in TABLE_ENDINGS


def refuse_other_tables(folder: Path) -> None:
    """Refuse a folder of clients' folders whose tables have names of their own, such as north/2023.csv."""
    folders = subfolders(folder)
    inside = [at for client in folders for at in sorted(client.iterdir()) if at.suffix.lower() in FILE_ENDINGS]
    if inside and not any(map(images_in, folders)):
        one, kind = inside[0], inside[0].suffix.lower()
        raise ConfigError(
            f"{folder} has folders with tables such as {one.relative_to(folder)}; the folder of a client must hold "
            f"train{kind}, and may hold test{kind}. Join the tables of each client into one file, "
            f"{one.parent.name}{kind} in {folder}, or rename them."
        )


# -- what sites read ---------------------------------------------------------------------------------------------------


def read_sites(sites: Sequence[Site], expected: Expected | None, reading: Reading) -> Held:
    """What clients bring; the columns of tables are those that `expected` has, or those of all of them together."""
    files = [(site.name, part, path) for site in sites for part, path in site.parts.items()]
    if sites[0].kind == IMAGES:
        read = [read_images(path, path.parent if part else path, expected, reading) for _, part, path in files]
    elif sites[0].kind == ARRAYS_ENDING:
        read = [read_npz(path, expected, reading) for _, _, path in files]
    else:
        read = read_tables([path for _, _, path in files], expected, reading)
    held = []
    for (name, part, path), raw in zip(files, read, strict=True):
        if part and list(raw.parts) != [ONLY_PART]:
            raise ConfigError(f"{path} has parts of its own; in a folder it is one part. Keep x and y in it.")
        held.append((name, replace(raw, parts={part: raw.parts[ONLY_PART]}) if part else raw))
    return held
