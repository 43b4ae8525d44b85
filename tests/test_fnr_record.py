"""What FNR writes between a Flower server and its clients, without Flower."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fnrfl.algorithms.parts.norms import norm_targets, weakest
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.flower.fnr_record import Measured, RefinementTerms, other_public_data, read_measured, refinement_targets

USUAL: dict[str, Any] = {
    "share": 0.5, "weight": 0.1, "penalty": "relative", "target": "others", "epochs": 5, "lr": 0.01, "momentum": 0.9,
    "weight_decay": 0.0, "batchnorm": "updating",
}  # fmt: skip


def terms(**changed: Any) -> RefinementTerms:
    return RefinementTerms(**USUAL | changed)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.lists(st.floats(0, 100), min_size=3, max_size=3)), min_size=1, max_size=8),
    st.floats(0, 1),
    st.sampled_from(["others", "all"]),
)
def test_orders_are_the_packages_ranking_and_targets(
    clients: list[tuple[float, list[float]]], share: float, target: Any
) -> None:
    measured = [Measured(100 + row, tuple(norms), accuracy) for row, (accuracy, norms) in enumerate(clients)]
    refined = weakest(torch.tensor([accuracy for accuracy, _ in clients], dtype=torch.float64), share)
    targets = norm_targets(torch.tensor([norms for _, norms in clients], dtype=torch.float64), refined, target)
    got, peers = refinement_targets(measured, terms(share=share, target=target))
    assert [*got] == [100 + row for row in refined.tolist()]
    assert [*got.values()] == targets.tolist()
    assert peers == (len(clients) - len(refined) if target == "others" else len(clients) - 1)


def test_the_constant_penalty_is_sent_differences() -> None:
    measured = [Measured(1, (2.0, 1.0), 0.1), Measured(2, (4.0, 1.0), 0.8), Measured(3, (6.0, 4.0), 0.9)]
    assert refinement_targets(measured, terms(penalty="constant")) == ({1: [6.0, 3.0]}, 2)


SOUND: dict[str, Any] = {"norms": [1.0, 0.0], "accuracy": 0.5, "counts": [3, 0]}


@pytest.mark.parametrize(
    "changed",
    [
        {"norms": None}, {"norms": []}, {"norms": 3.0}, {"norms": [1.0, float("nan")]}, {"norms": [1.0, float("inf")]},
        {"norms": [1.0, -1.0]}, {"norms": [1.0, "1"]}, {"counts": None}, {"counts": [1]}, {"counts": [1, "1"]},
        {"accuracy": None}, {"accuracy": float("nan")}, {"accuracy": 1.5}, {"accuracy": "0.5"}, {"accuracy": [0.5]},
        {"problem": "no public data"},
    ],
)  # fmt: skip
def test_a_record_without_sound_numbers_is_refused(changed: dict[str, Any]) -> None:
    assert read_measured(1, SOUND) == Measured(1, (1.0, 0.0), 0.5, (3, 0))
    with pytest.raises(FnrflError):
        read_measured(1, {key: value for key, value in (SOUND | changed).items() if value is not None})


def test_nodes_with_other_numbers_of_labels_than_most_are_named() -> None:
    same, fewer, more = (Measured(0, (1.0, 2.0), 0.5, counts) for counts in ((3, 4), (3, 0), (3, 5)))
    nodes = [replace(one, node=node) for node, one in enumerate([same, fewer, same, more, same])]
    assert other_public_data(nodes) == [1, 3]
    assert other_public_data(nodes[::2]) == []


WRONG: list[tuple[str, object, str]] = [
    ("share", 1.5, "1"), ("share", "half", "number"), ("weight", -1.0, "0"), ("weight", float("nan"), "number"),
    ("penalty", "relativ", "relative"), ("target", "both", "others"), ("epochs", 1.5, "whole number"),
    ("lr", 0.0, "0"), ("lr", "client", "number"), ("momentum", 1.0, "1"), ("weight_decay", -0.1, "0"),
    ("batchnorm", "eval", "frozen"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "rule"), WRONG)
def test_an_option_that_cannot_be_is_refused_by_name(name: str, value: object, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = .* is not allowed: it must be .*{rule}"):
        terms(**{name: value})


def test_importing_the_room_imports_neither_torch_nor_flower() -> None:
    code = "import sys, fnrfl.flower; sys.exit('torch' in sys.modules or 'flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_without_flower_the_names_say_what_to_install() -> None:
    code = """
import sys
sys.modules["flwr"] = None  # as if it were not installed
import fnrfl.flower
assert not hasattr(fnrfl.flower, "nonsense")
try:
    fnrfl.flower.FeatureNormStrategy
except ImportError as error:
    assert "pip install 'fnrfl[flower]'" in str(error), error
else:
    sys.exit("it was found")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
