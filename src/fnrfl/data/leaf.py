"""Data as LEAF writes it: `.json` files with users, and the examples of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import printable
from fnrfl.data import arrays
from fnrfl.data.reading import (
    ONLY_PART,
    PLAIN_READING,
    UNREADABLE,
    Examples,
    Expected,
    RawData,
    Reading,
    require_file,
    unreadable,
)

ENDING = ".json"


def leaf_files(folder: Path) -> dict[str, list[Path]]:
    """LEAF's files by part: those of train/ and test/, or those that are all that a folder has; else none."""
    parts = {part: _files(folder / part) for part in ("train", "test")}
    if parts["train"]:
        return {part: files for part, files in parts.items() if files}
    return {ONLY_PART: files} if (files := _files(folder)) else {}


def _files(folder: Path) -> list[Path]:
    """The `.json` files of a folder that has nothing else."""
    inside = sorted(at for at in folder.iterdir() if at.name[0] != ".") if folder.is_dir() else []
    return inside if all(at.suffix.lower() == ENDING for at in inside) else []


def read_leaf(path: Path, expected: Expected | None = None, reading: Reading = PLAIN_READING) -> RawData:
    """One file of LEAF's; its users are the clients."""
    return read_leaf_files({ONLY_PART: [path]}, expected)


def read_leaf_files(files: Mapping[str, Sequence[Path]], expected: Expected | None = None) -> RawData:
    """Files of LEAF's, by part; their users are the clients."""
    used = expected is None or expected.labels_used
    users = {part: [one for path in paths for one in _users(path, used)] for part, paths in files.items()}
    return RawData({part: _joined(of_part, used) for part, of_part in users.items()})


def _users(path: Path, labels_used: bool) -> Iterator[tuple[str, Examples]]:
    """Each user of a file that has examples, and these."""
    tree = _parsed(path)
    users, sizes, data = (tree.get(key) for key in ("users", "num_samples", "user_data"))
    if not (isinstance(users, list) and isinstance(data, dict) and all(isinstance(user, str) for user in users)):
        raise ConfigError(
            f"{path} has {', '.join(tree) or 'nothing'} at its top; LEAF's files have users, num_samples and "
            "user_data. Write it as LEAF does, or give another format."
        )
    if len(set(users)) < len(users):
        twice = next(user for user in users if users.count(user) > 1)
        raise ConfigError(f"{path} has the user {printable(twice)} more than once. Leave one of them.")
    said = dict(zip(users, sizes, strict=False)) if isinstance(sizes, list) else {}
    for user in users:
        x, y = _lists_of(path, user, data.get(user), said.get(user))
        if y:
            labels = arrays.labels_if_used(y, f"y of {printable(user)} in {path}", used=labels_used)
            yield user, Examples(_numbers(x, path, user), labels)


def _lists_of(path: Path, user: str, held: object, said: object) -> tuple[list[Any], list[Any]]:
    """The lists x and y of a user, which `num_samples` says the length of."""
    x, y = (held.get(kind) for kind in "xy") if isinstance(held, dict) else (None, None)
    if isinstance(x, list) and isinstance(y, list) and len(x) == len(y) and said in (None, len(y)):
        return x, y
    found = f"{len(x)} x and {len(y)} y" if isinstance(x, list) and isinstance(y, list) else "no lists x and y"
    count = "" if said is None else f"; num_samples says {said}"
    raise ConfigError(
        f"{path} has {found} for the user {printable(user)}{count}. There must be a label for each example. Write the "
        "file again."
    )


def _parsed(path: Path) -> dict[str, Any]:
    require_file(path)
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (*UNREADABLE, RecursionError) as error:
        raise unreadable(path, "JSON", error) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is a JSON {type(tree).__name__}; LEAF's files are objects. Give another file.")
    return tree


def _numbers(x: list[Any], path: Path, user: str) -> np.ndarray:
    """A user's examples: whole numbers as they are, others as float32."""
    title = f"x of {printable(user)} in {path}"
    try:
        values = np.asarray(x)
    except ValueError as error:
        raise ConfigError(f"{title} has rows of different lengths. Pad them, or leave some out.") from error
    if values.dtype.kind not in "biuf":
        raise ConfigError(
            f"{title} holds text, such as {str(x[0])[:40]!r}; examples must be numbers. Turn it into numbers in a "
            "function of your own, and give that as module:function."
        )
    values = values.reshape(len(x), -1) if values.ndim == 1 else values
    return arrays.features(values.astype(np.float32) if values.dtype.kind == "f" else values, title)


def _joined(users: Sequence[tuple[str, Examples]], labels_used: bool) -> Examples:
    """The examples of all users, each with its client; labels that nobody uses and that are not alike are none."""
    if not users:
        raise ConfigError("The files have no user with examples; at least one is needed. Add some.")
    x, kinds = arrays.as_one_type([held.x for _, held in users]), [arrays.kind_of_labels(held.y) for _, held in users]
    known = "" not in kinds and (labels_used or len({*kinds}) == 1)
    for (user, _), values, kind in zip(users, x, kinds, strict=True):
        if values.shape[1:] != x[0].shape[1:] or (known and kind != kinds[0]):
            labels = f" with {kinds[0]} and {kind} as labels" if known else ""
            raise ConfigError(
                f"The users {printable(users[0][0])} and {printable(user)} have examples of {list(x[0].shape[1:])} and "
                f"{list(values.shape[1:])} numbers{labels}; those of all users must be alike. Prepare them in one way."
            )
    y = np.concatenate([held.y for _, held in users]) if known else None
    clients = np.repeat(np.array([user for user, _ in users], dtype=object), [len(values) for values in x])
    return Examples(np.concatenate(x), y, clients=clients)
