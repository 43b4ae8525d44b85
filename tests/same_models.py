"""Many short runs and the hashes of their models: whether two versions of the source compute the same, to the bit.

    python tests/same_models.py record old.json      # with the old source
    python tests/same_models.py check old.json       # with the new one: prints every run that differs
    python tests/same_models.py record gpu.json --gpu --processes 1      # ten runs on a GPU

Use one machine and one torch for both. Every run is recorded with its `model_sha256` and with a hash of its event log
without the seconds. The runs are short, and together they reach every method, bare and under FNR, on every CPU engine.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

import fnrfl

METHODS = [
    "bn-recalibrate", "centralised", "cfedfn", "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedbn", "feddc", "feddf",
    "feddyn", "fedftg", "fedgen", "fednova", "fedprox", "fedyogi", "ktpfl", "local-only", "moon", "public-finetune",
    "public-only", "public-returned", "public-share", "scaffold",
]  # fmt: skip
NET = "same_models:net"  # BatchNorm and dropout
BASE: dict[str, Any] = {
    "rounds": 2, "clients": 6, "participation": 0.67, "model": NET, "client": {"epochs": 1, "lr": 0.02},
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "loop": {"engine": {"name": "loop", "threads": 1}},
    "batched": {"engine": {"name": "batched", "threads": 1}},
    "loop of 2 threads": {"engine": {"name": "loop", "threads": 2}, "model": "cnn(norm=batch)"},
}
SLOW_STEPS = {"client": {"epochs": 2, "batch": 1, "lr": 0.01}, "model": "mlp"}  # so many that they are recorded
OTHERS: dict[str, dict[str, Any]] = {
    "stragglers": {"client": {"epochs": 3, "stragglers": 0.5}},
    "dropout": {"client": {"epochs": 1, "dropout": 0.4}},
    "stragglers and dropout": {"client": {"epochs": 3, "stragglers": 0.4, "dropout": 0.3}, "participation": 1.0},
    "keep": {"client": {"epochs": 2, "last_batch": "keep", "batch": 15}},
    "drop": {"client": {"epochs": 2, "last_batch": "drop", "batch": 15}},
    "adam": {"client": {"epochs": 1, "optimizer": "adam", "lr": 0.001}},
    "decay": {"client": {"epochs": 1, "lr_decay": 0.5, "weight_decay": 0.01, "momentum": 0.0}},
    "chunks": {"engine.clients_at_once": 2},
    "float64": {"engine.precision": "float64"},
    "recorded": SLOW_STEPS,
    "noise": {"scenario": "feature-noise(0.5)"},
    "quantity": {"scenario": "quantity-dirichlet(0.5)"},
    "skip": {"client": {"epochs": 1, "nonfinite": "skip"}},
    "not accelerated": {"engine.accelerate": False},
}
FNR: dict[str, dict[str, Any]] = {
    "local": {"when": "local"}, "both": {"when": "both"}, "twice": {"upload": "twice"}, "all": {"target": "all"},
    "everybody": {"target": "all", "share": 1.0}, "frozen": {"batchnorm": "frozen"}, "batch": {"batchnorm": "batch"},
    "per-sample": {"penalty": "per-sample"}, "literal": {"penalty": "literal"}, "constant": {"penalty": "constant"},
    "adam": {"optimizer": "adam", "lr": 0.001}, "augment": {"augment": True},
}  # fmt: skip
PAPER = {"protocol": "paper", "participation": 1.0}
SITES: dict[str, Any] = {
    "dataset": {"name": "sites", "missing": "mean"}, "scenario": "natural", "model": "mlp(hidden=8)", "rounds": 2,
}  # fmt: skip
TABLE: dict[str, Any] = SITES | {"dataset": {"name": "sites/2.csv", "missing": "mean"}, "scenario": "iid", "clients": 2}
ON_A_GPU = {  # with the engine's default, deterministic arithmetic
    "gpu": {"engine": "gpu"}, "gpu, convolutions": {"engine": "gpu", "model": "cnn(norm=batch)"},
}  # fmt: skip
RESUMED = ["fedavg", "scaffold", "moon", "fedbn", "local-only", "cfedfn", "ktpfl", "fedadam"]


def net(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A small net with BatchNorm and dropout."""
    width = int(torch.tensor(input_shape).prod())
    return nn.Sequential(
        nn.Flatten(), nn.Linear(width, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, num_classes)
    )


def _merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Keys of all parts; a section is merged, and "engine.threads" is a key of a section."""
    keys: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            section, dot, name = key.partition(".")
            if dot:
                value, key = {name: value}, section
            both = isinstance(value, dict) and isinstance(keys.get(key), dict)
            keys[key] = {**keys[key], **value} if both else value
    return keys


def runs() -> dict[str, tuple[str, dict[str, Any]]]:
    """Label -> (recipe, keys); "resume" in front of a label stops the run after its first round and goes on."""
    found: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        for fnr in ({}, {"fnr": {"epochs": 1}}):
            for engine, keys in ENGINES.items():
                found[f"{method}{' fnr' if fnr else ''}, {engine}"] = _merged(BASE, keys, {"algorithm": method}, fnr)
    for name in ("loop", "batched"):
        for method, fnr in (("fedavg", {}), ("scaffold", {"fnr": {"epochs": 1}})):
            for other, keys in OTHERS.items():
                if other == "adam" and method == "scaffold":
                    continue
                label = f"{method}{' fnr' if fnr else ''}, {name}, {other}"
                found[label] = _merged(BASE, ENGINES[name], {"algorithm": method}, fnr, keys)
        for other, keys in FNR.items():
            found[f"fnr {other}, {name}"] = _merged(BASE, ENGINES[name], {"fnr": {"epochs": 1, **keys}})
        found[f"paper, {name}"] = _merged(BASE, ENGINES[name], {"fnr": {"epochs": 1}}, PAPER)
        for method in RESUMED:
            found[f"resume {method}, {name}"] = _merged(
                BASE, ENGINES[name], {"algorithm": method, "fnr": {"epochs": 1}}
            )
        for method in ("fedavg", "scaffold", "local-only"):
            found[f"sites {method}, {name}"] = _merged(SITES, ENGINES[name], {"algorithm": method})
        found[f"table, {name}"] = _merged(TABLE, ENGINES[name])
    return {label: ("digits", keys) for label, keys in found.items()}


def runs_on_a_gpu() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return ten runs in the form of `runs`."""
    found: dict[str, dict[str, Any]] = {}
    for engine, keys in ON_A_GPU.items():
        for method, fnr in (("fedavg", {}), ("fedavg", {"fnr": "on"}), ("scaffold", {"fnr": "on"}), ("moon", {})):
            found[f"{method}{' fnr' if fnr else ''}, {engine}"] = _merged(BASE, keys, {"algorithm": method}, fnr)
        found[f"float32, {engine}"] = _merged(BASE, keys, {"engine": {"name": "gpu", "precision": "float32"}})
    return {label: ("digits", keys) for label, keys in found.items()}


def _write_sites(folder: Path) -> None:
    """Write the tables of three sites, with words and missing numbers."""
    dice = Random(0)
    (folder / "sites").mkdir()
    for site in range(3):
        with (folder / "sites" / f"{site}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["age", "dose", "ward", "diagnosis"])
            for _ in range(80 + 20 * site):
                age, dose = dice.gauss(site, 1), dice.gauss(0, 2)
                known = "" if dice.random() < 0.05 else f"{age:.3f}"
                table.writerow([known, f"{dose:.3f}", dice.choice("abc"), "ill" if age > dose else "well"])


class _Stop(Exception):
    """Ends a run after its first round."""


def outcome(label: str) -> dict[str, str]:
    """One run's hashes, or the first words of its error."""
    recipe, keys = (runs() | runs_on_a_gpu())[label]
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if "dataset" in keys:
                _write_sites(Path(folder))
                keys = _merged(keys, {"dataset": {"name": str(Path(folder) / keys["dataset"]["name"])}})
            result = _resumed(recipe, keys, Path(folder)) if label.startswith("resume") else _whole(recipe, keys)
            told = [{k: v for k, v in event.items() if "seconds" not in k} for event in result.rounds]
            log = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
            return {"model": result.model_sha256, "log": log}
    except Exception as error:
        return {"model": f"{type(error).__name__}: {error}"[:200], "log": ""}


def _whole(recipe: str, keys: dict[str, Any]) -> Any:
    return fnrfl.run(recipe, out=None, trust=True, **keys)


def _resumed(recipe: str, keys: dict[str, Any], folder: Path) -> Any:
    def stop(event: dict[str, Any]) -> None:
        raise _Stop

    place = folder / "run"
    with suppress(_Stop):
        fnrfl.run(recipe, out=place, trust=True, progress=stop, **keys)
    return fnrfl.resume(place, trust=True)


def main() -> int:
    """Record or check; 1 if a run differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="runs whose label has this text")
    parser.add_argument("--gpu", action="store_true", help="the ten runs on a GPU instead")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    labels = [label for label in (runs_on_a_gpu() if options.gpu else runs()) if options.only in label]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        found = dict(zip(labels, pool.map(outcome, labels, chunksize=4), strict=True))
    failed = {label: got["model"] for label, got in found.items() if not got["log"]}
    for label, error in failed.items():
        print(f"{label}: {error}")
    print(f"{len(found)} runs, {len({got['model'] for got in found.values()})} distinct models, {len(failed)} errors")
    if options.what == "record":
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    before = json.loads(options.file.read_text())
    changed = [label for label in labels if before[label]["model"] != found[label]["model"]]
    logs = [label for label in labels if label not in changed and before[label]["log"] != found[label]["log"]]
    print(f"{len(changed)} models differ: {changed}\n{len(logs)} other logs differ: {logs}")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
