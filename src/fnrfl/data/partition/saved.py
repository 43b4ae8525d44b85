"""Splits from files: what `fnrfl scenario save` wrote, or the partition.json of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted
from fnrfl.data.datasets import Dataset
from fnrfl.data.partition.holdout import Carved, count_of
from fnrfl.data.partition.value import Partition
from fnrfl.data.partition.views import splits_hash
from fnrfl.data.reading import UNREADABLE, require_file
from fnrfl.data.sources.entry import checksum


@dataclass(frozen=True, eq=False)
class SavedFile:
    """A split from a file: who holds what, what is set aside, and which data it is of."""

    path: str
    partition: Partition
    public: np.ndarray  # positions in the training set, in the order in which they are shared out
    validation: np.ndarray
    splits: Mapping[str, Any]  # sizes and hashes of all parts

    def carve(
        self,
        labels: np.ndarray,
        *,
        public: float | int,
        ranking: float,
        distill: float,
        validation: float | int,
        seed: int,
    ) -> Carved:
        """What the file sets aside; refused if the config asks for another number of examples."""
        wanted = (("public.size", public, self.public), ("validation.size", validation, self.validation))
        for key, size, found in wanted:
            if (asked := count_of(key, size, len(labels))) != len(found):
                raise ConfigError(
                    f"{self.path} sets {counted(len(found), 'example')} aside, and {key} = {size} asks for {asked}. "
                    f"Set {key} = {len(found)}, or save a split with this {key}."
                )
        set_aside = np.concatenate([self.public, self.validation])
        rest = np.setdiff1d(np.arange(len(labels)), set_aside)
        for count, held in ((len(labels), set_aside), *((len(rest), held) for held in self.partition.positions)):
            if len(beyond := held[(held < 0) | (held >= count)]):
                why = f"it has the position {beyond.flat[0]} among {counted(count, 'example')}, numbered from 0"
                raise damaged_split(self.path, why)
        return Carved(self.public, self.validation, rest, ranking, distill, seed)

    def refuse_other_data(self, dataset: Dataset) -> None:
        """Refuse data that the split was not drawn for: contents are compared."""
        for name, part in (("training", dataset.train), ("test", dataset.test)):
            then = self.splits[name.removesuffix("ing")]
            if then["sha256"] != checksum(part.x.numpy(), part.y.numpy()):
                raise ConfigError(
                    f"{self.path} is a split of other data than dataset = {dataset.name!r}: its {name} part has "
                    f"{counted(then['examples'], 'example')}, and this one {counted(len(part), 'example')} with other "
                    "contents. Name the data that it was drawn for, or save a split of this data."
                )


def damaged_split(path: str, why: str) -> ConfigError:
    """What to say of a file that is no split any more, or never was."""
    return ConfigError(f"scenario = {path!r} is no split ({why}). Save it again with `fnrfl scenario save`.")


def read_saved_split(path: str) -> SavedFile:
    """A split that was written down; refused if anything in it was changed."""
    file = Path(os.path.expanduser(path))
    require_file(file)
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"scenario = {path!r} does not exist (looked from {Path.cwd()}). Save a split with `fnrfl scenario save`, "
            "or name a scenario."
        ) from error
    except (*UNREADABLE, RecursionError) as error:
        raise damaged_split(path, f"it cannot be read as JSON: {error}") from error
    try:
        splits = manifest["splits"]
        partition = Partition.from_manifest({key: value for key, value in manifest.items() if key != "splits"})
        if splits_hash(splits) != splits["sha256"]:
            raise damaged_split(path, "it does not match its sha256: it was changed after it was saved")
        if "public_positions" not in splits:
            raise damaged_split(path, "it is of a version that did not write down what is set aside")
        public, validation = (np.array(splits[f"{name}_positions"], np.int64) for name in ("public", "validation"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise damaged_split(path, f"{type(error).__name__}: {error}") from error
    return SavedFile(path, partition, public, validation, splits)
