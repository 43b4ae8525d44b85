"""Words as people type them: other spellings of a name, and other names of a key."""

from __future__ import annotations

import re
from collections.abc import Iterable

# What others call a key, and what it is called here.
OTHER_NAMES = {
    "learning_rate": "lr", "learningrate": "lr", "step_size": "lr", "eta": "lr",
    "learning_rate_decay": "lr_decay", "batch_size": "batch", "batchsize": "batch", "local_batch_size": "batch",
    "mini_batch": "batch", "local_epochs": "epochs", "num_epochs": "epochs", "n_epochs": "epochs", "epoch": "epochs",
    "num_local_epochs": "epochs", "local_ep": "epochs", "num_clients": "clients", "n_clients": "clients",
    "nclients": "clients", "number_of_clients": "clients", "n_parties": "clients", "num_rounds": "rounds",
    "n_rounds": "rounds", "comm_round": "rounds", "communication_rounds": "rounds", "global_rounds": "rounds",
    "random_seed": "seed", "weightdecay": "weight_decay", "wd": "weight_decay", "l2": "weight_decay",
    "optimiser": "optimizer", "opt": "optimizer", "data": "dataset", "data_set": "dataset", "partition": "scenario",
    "split": "scenario", "skew": "scenario", "fraction": "participation", "frac": "participation",
    "join_ratio": "participation", "client_fraction": "participation", "sample": "participation",
    "eligible_perc": "participation", "alpha": "scenario", "beta": "scenario", "noise": "scenario",
    "distribution": "scenario", "network": "model", "net": "model",
    "arch": "model", "architecture": "model", "method": "algorithm", "algo": "algorithm", "alg": "algorithm",
    "device": "engine", "backend": "engine", "num_threads": "threads", "workers": "threads", "num_workers": "threads",
    "penalty_weight": "weight", "refine_share": "share",
}  # fmt: skip


def as_known(word: str, known: Iterable[str]) -> str:
    """The known name that `word` is a spelling of, as FedAvg and fed_avg are of fedavg; the word itself if none is."""
    names = list(known)
    alike = [name for name in names if _bare(name) == _bare(word)]
    return alike[0] if word not in names and len(alike) == 1 else word


def same_key(key: str, known: Iterable[str]) -> list[str]:
    """The known keys that somebody who typed `key` may have meant: those of the same section if there are any."""
    section, _, word = key.lower().replace("-", "_").rpartition(".")
    names = list(known)
    found = _ending_in(word, names) or _ending_in(OTHER_NAMES.get(word, word), names)
    here = [name for name in found if name.rpartition(".")[0] == section]
    return here or found


def _ending_in(word: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if word in (name.rpartition(".")[2], name.removesuffix(".name"))]


def _bare(word: str) -> str:
    return re.sub(r"[-_ .]", "", word.lower())
