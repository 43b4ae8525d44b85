"""Words as people type them: other spellings of a name, and other names of a key."""

from __future__ import annotations

import re
from collections.abc import Iterable

# What others call a key, and what it is called here.
OTHER_NAMES = {
    "learning_rate": "lr", "batch_size": "batch", "local_epochs": "epochs", "optimiser": "optimizer",
    "num_clients": "clients", "num_rounds": "rounds", "fraction": "participation", "data": "dataset",
    "partition": "scenario", "alpha": "scenario", "beta": "scenario", "method": "algorithm", "network": "model",
    "device": "engine", "workers": "threads",
}  # fmt: skip


def as_known(word: str, known: Iterable[str]) -> str:
    """Return the known name that `word` is a spelling of, as FedAvg and fed_avg are of fedavg; else the word itself."""
    names = list(known)
    alike = [name for name in names if _bare(name) == _bare(word)]
    return alike[0] if word not in names and len(alike) == 1 else word


def same_key(key: str, known: Iterable[str]) -> list[str]:
    """Return the known keys that `key` may have meant: those of the same section if there are any."""
    section, _, word = key.lower().replace("-", "_").rpartition(".")
    names = list(known)
    found = _ending_in(word, names) or _ending_in(OTHER_NAMES.get(word, word), names)
    here = [name for name in found if name.rpartition(".")[0] == section]
    return here or found


def _ending_in(word: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if word in (name.rpartition(".")[2], name.removesuffix(".name"))]


def _bare(word: str) -> str:
    return re.sub(r"[-_ .]", "", word.lower())
