"""Runs whose models must be the same, byte for byte, and runs that must differ: by `model_sha256`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import fnrfl
from fnrfl.algorithms.parts.penalties import PENALTIES
from fnrfl.config import registry
from fnrfl.config.registry import algorithms

pytestmark = pytest.mark.xdist_group("hashes")  # by one worker: the tests share runs
SHORT: dict[str, dict[str, Any]] = {"feddf": {"steps": 40}, "fedgen": {"steps": 10}, "fedftg": {"iterations": 2}}
ON, OFF = {"weight": 0.1, "epochs": 1}, {"weight": 0.0, "epochs": 1}  # what refines, with and without penalty


def sha256(engine: str, algorithm: Any = "fedavg", fnr: Any = "off", **keys: Any) -> str:
    if isinstance(algorithm, str):
        algorithm = {"name": algorithm} | SHORT.get(algorithm, {})
    return _run(engine, repr(algorithm), repr(fnr), repr(keys))


@cache
def _run(engine: str, algorithm: str, fnr: str, keys: str) -> str:
    """A short run on digits with ragged clients, half of them active; with BatchNorm in the loop."""
    from ast import literal_eval

    result = fnrfl.run(
        "digits", out=None, rounds=3, clients=6, participation=0.5, engine=engine,
        model="mlp" if engine == "batched" and "bn" not in algorithm else "cnn(norm=batch)",
        algorithm=literal_eval(algorithm),
        fnr=literal_eval(fnr), client={"epochs": 1}, **literal_eval(keys),
    )  # fmt: skip
    return result.model_sha256


each_engine = pytest.mark.parametrize("engine", ["loop", "batched"])


FEW_METHODS = {"fedavg", "scaffold", "fedbn", "feddf"}


def methods(names: list[str]) -> Any:
    """Every method on both engines; quickly, all on one engine and a few on the other."""
    return pytest.mark.parametrize(
        ("algorithm", "engine"),
        [
            pytest.param(name, engine, marks=[] if engine == "batched" or name in FEW_METHODS else pytest.mark.slow)
            for name in names
            for engine in ("batched", "loop")
        ],
    )


@methods(list(algorithms()))
def test_share_zero_is_fnr_off(engine: str, algorithm: str) -> None:
    assert sha256(engine, algorithm, {"share": 0.0}) == sha256(engine, algorithm)
    refined = sha256(engine, algorithm, ON) != sha256(engine, algorithm)
    assert refined == registry.load_method(algorithm)().trains_clients


@each_engine
@pytest.mark.parametrize("penalty", PENALTIES)
def test_only_the_constant_penalty_is_inert(engine: str, penalty: str) -> None:
    with_it = sha256(engine, fnr=ON | {"penalty": penalty})
    assert (with_it == sha256(engine, fnr=OFF)) == (penalty == "constant")


@methods([a for a in algorithms() if a != "fedavg" and registry.load_method(a)().trains_clients])
def test_the_penalty_reaches_every_method(engine: str, algorithm: str) -> None:
    assert sha256(engine, algorithm, ON) != sha256(engine, algorithm, OFF)


@each_engine
def test_fedprox_without_pull_is_fedavg(engine: str) -> None:
    assert sha256(engine, {"name": "fedprox", "mu": 0.0}) == sha256(engine) != sha256(engine, "fedprox")


@each_engine
def test_the_seed_changes_everything_and_a_rerun_nothing(engine: str) -> None:
    first = sha256(engine)
    _run.cache_clear()
    assert first == sha256(engine)
    assert first != sha256(engine, seed=1)
