"""Who holds what, as a value that can be written down and known again by its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fnrfl.core.errors import ConfigError
from fnrfl.core.ndarrays import Floats, Ints, Ragged
from fnrfl.data.scenarios import FeatureNoise, Scenario, parse


@dataclass(frozen=True, eq=False)
class Partition:
    """Which examples, by position, went to which client, and where that came from. Equal when the hashes are."""

    positions: Sequence[Ints]  # one array per client; empty where the examples are elsewhere
    counts: Ints  # [clients, classes]
    scenario: Scenario
    seed: int
    ids: tuple[str, ...] | None = None  # what the data calls the clients; None: they have numbers alone

    @property
    def names(self) -> tuple[str, ...]:
        """What each client is called: its id in the data, or its number."""
        return self.ids or tuple(str(client) for client in range(len(self.positions)))

    @property
    def num_classes(self) -> int:
        return int(self.counts.shape[1])

    @property
    def sizes(self) -> Ints:
        """How many examples each client holds, [clients]."""
        sizes: Ints = self.counts.sum(1)
        return sizes

    @property
    def noise(self) -> FeatureNoise | None:
        return self.scenario.noise

    @property
    def levels(self) -> Floats:
        """The standard deviation of each client's noise, [clients]; zeros without noise."""
        clients = len(self.positions)
        return np.zeros(clients) if self.noise is None else self.noise.levels(clients)

    @cached_property
    def sha256(self) -> str:
        return _sha256(self._content())

    def manifest(self) -> dict[str, object]:
        """The partition as plain JSON values, with its hash."""
        return {**self._content(), "sha256": self.sha256}

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, object]) -> Partition:
        """The partition that `manifest` describes; refused if anything in it was changed."""
        content = {key: value for key, value in manifest.items() if key != "sha256"}
        if content.get("format") != _FORMAT:
            raise ConfigError(
                f"The partition has format {content.get('format')!r} and this version reads format {_FORMAT}. "
                f"Draw it again from its scenario and seed."
            )
        if _sha256(content) != manifest.get("sha256"):
            raise ConfigError(
                "The partition does not match its sha256: it was changed after it was drawn. Draw it again from its "
                "scenario and seed."
            )
        positions: list[list[int]] = content["positions"]  # type: ignore[assignment]  # what the hash vouches for
        ids: list[str] | None = content.get("ids")  # type: ignore[assignment]
        return cls(
            positions=_frozen(positions),
            counts=np.array(content["counts"], dtype=np.int64),
            scenario=parse(str(content["scenario"])),
            seed=int(str(content["seed"])),
            ids=None if ids is None else tuple(ids),
        )

    def _content(self) -> dict[str, object]:
        return {
            "format": _FORMAT,
            "scenario": str(self.scenario),
            "seed": self.seed,
            "counts": self.counts.tolist(),
            "positions": [mine.tolist() for mine in self.positions],
            **({} if self.ids is None else {"ids": list(self.ids)}),
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partition) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


_FORMAT = 1


def partition_of(
    positions: Sequence[Ints],
    labels: npt.NDArray[np.integer],
    scenario: Scenario,
    seed: int,
    num_classes: int,
    ids: tuple[str, ...] | None = None,
) -> Partition:
    """A partition of the examples with these labels, its counts taken from them."""
    frozen = _frozen(positions)
    kinds = np.repeat(np.arange(len(frozen)) * num_classes, frozen.sizes) + labels[frozen.flat]
    counts = np.bincount(kinds, minlength=len(frozen) * num_classes).reshape(-1, num_classes).astype(np.int64)
    return Partition(frozen, counts, scenario, seed, ids)


def _frozen(positions: Sequence[Any]) -> Ragged[Ints]:
    held = Ragged.joined(positions, np.concatenate)
    flat = np.array(held.flat, dtype=np.int64)
    flat.flags.writeable = False
    return Ragged(flat, held.sizes)


def _sha256(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
