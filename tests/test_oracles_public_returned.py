"""Public-returned: FedAvg as if no public data had been set aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fnrfl
from fnrfl.algorithms.public_returned import PublicReturned
from fnrfl.config import load
from fnrfl.core.errors import CompatibilityError
from fnrfl.data.partition.views import _owners
from fnrfl.runs.setup.build import Built, build
from mutants import mutants

BASE = ("rounds=2", "clients=5", "client.epochs=1", "public.size=300", "fnr.epochs=1", "fnr=off")


def built(algorithm: str = "public-returned", *keys: str) -> Built:
    return build(load("digits", [*BASE, f"algorithm={algorithm}", *keys]))


def positions(one: Built) -> list[list[int]]:
    return [mine.tolist() for mine in one.splits.clients]


def given(*keys: str) -> list[set[int]]:
    """The public positions that each client got."""
    returned, bare = positions(built("public-returned", *keys)), positions(built("fedavg", *keys))
    assert all(set(before) <= set(after) for before, after in zip(bare, returned, strict=True))
    return [set(after) - set(before) for before, after in zip(bare, returned, strict=True)]


@pytest.mark.parametrize("distill", ["0.0", "0.3"])
def test_all_that_was_carved_is_back_and_each_example_is_with_one_client(distill: str) -> None:
    one, bare = (built(name, f"public.distill={distill}") for name in ("public-returned", "fedavg"))
    everything = sorted(place for mine in positions(one) for place in mine)
    assert len(everything) == len(set(everything)) == len(one.splits.train) - len(one.splits.validation)
    assert len(everything) == sum(map(len, positions(bare))) + 300
    assert all(mine == sorted(mine) for mine in positions(one))


def test_the_draw_of_the_rest_is_that_of_fedavg() -> None:
    one, bare = built(), built("fedavg")
    assert one.partition == bare.partition
    assert all(set(before) <= set(after) for before, after in zip(positions(bare), positions(one), strict=True))
    for name in ("public", "ranking", "distill", "validation", "test"):
        assert torch.equal(getattr(one.splits, name).x, getattr(bare.splits, name).x)


def test_validation_and_test_data_stay_away() -> None:
    one = built()
    held = {row.numpy().tobytes() for row in one.splits.train.x[torch.cat([*one.splits.clients])]}
    for part in (one.splits.validation, one.splits.test):
        assert not held & {row.numpy().tobytes() for row in part.x}


def test_an_example_goes_only_to_clients_that_have_its_class() -> None:
    keys = ("scenario=label-classes(2)", "clients=10")
    one = built("public-returned", *keys)
    y = one.splits.train.y
    for client, more in enumerate(given(*keys)):
        classes = {int(y[place]) for place in more}
        assert classes <= set(np.flatnonzero(one.partition.counts[client]))
        assert len(one.splits.clients[client]) == int(one.partition.sizes[client]) + len(more)


def test_owners_are_drawn_in_proportion_to_counts() -> None:
    """A class held 6 : 3 : 1, one held by a single client, and one that nobody holds, by sizes 12 : 4 : 4."""
    labels = np.array([0] * 6 + [1] * 6 + [0] * 3 + [3] + [0] + [3] * 3)
    clients = [np.arange(12), np.arange(12, 16), np.arange(16, 20)]
    public = 20 + np.arange(9000)
    labels = np.concatenate([labels, np.repeat([0, 1, 2], 3000)])
    owner = _owners(labels, public, clients, seed=0, num_classes=4)
    shares = np.stack([np.bincount(part, minlength=3) / 3000 for part in owner.reshape(3, 3000)])
    assert np.abs(shares[0] - [0.6, 0.3, 0.1]).max() < 0.03
    assert shares[1].tolist() == [1, 0, 0]
    assert np.abs(shares[2] - [0.6, 0.2, 0.2]).max() < 0.03


def test_a_client_without_the_class_gets_none_wherever_it_stands() -> None:
    labels = np.array([0, 1, 0, 1, *[0] * 500])
    for owner in range(4):
        clients = [np.array([1]) for _ in range(4)]
        clients[owner] = np.array([0, 2])
        assert set(_owners(labels, np.arange(4, 504), clients, 3, 2).tolist()) == {owner}


def test_owners_follow_the_seed_and_not_what_the_server_uses_an_example_for() -> None:
    assert given() == given() == given("public.ranking=0.5") == given("public.ranking=0.0", "public.distill=0.4")
    labels, clients = np.zeros(200, dtype=int), [np.arange(50), np.arange(50, 100)]
    drawn = [_owners(labels, np.arange(100, 200), clients, seed, 1).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_weights_count_what_came_back() -> None:
    one = built()
    assert one.engine.examples.tolist() == [len(mine) for mine in one.splits.clients]
    assert float(one.engine.examples.sum()) == len(one.splits.train) - len(one.splits.validation)


def test_the_manifest_says_what_happened(tmp_path: Path) -> None:
    one, bare = built(), built("fedavg")
    told, other = one.splits.manifest(), bare.splits.manifest()
    assert (told["public_to"], other["public_to"]) == ("owners", "nobody")
    assert told["clients"] != other["clients"] and told["public"] == other["public"]
    fnrfl.run("digits", out=tmp_path / "run", rounds=1, algorithm="public-returned")
    assert '"public_to": "owners"' in (tmp_path / "run" / "partition.json").read_text()


def test_the_traffic_of_a_round_is_fedavgs() -> None:
    one, other = (fnrfl.run("digits", out=None, algorithm=a, rounds=1) for a in ("public-returned", "fedavg"))
    assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)
    assert one.model_sha256 != other.model_sha256


# -- with FNR, and refusals -------------------------------------------------------------------------------------------


def test_under_fnr_it_says_that_clients_have_seen_the_public_data() -> None:
    (said,) = built("public-returned", "fnr=on").notices
    assert said == "with public-returned, FNR ranks and refines on examples that clients have trained on."


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_refining_nobody_is_the_method_and_refining_somebody_is_not(engine: str) -> None:
    keys: dict[str, Any] = {"out": None, "rounds": 2, "algorithm": "public-returned", "engine": engine}
    keys["scenario"] = "label-dirichlet(1)"
    bare = fnrfl.run("digits", **keys)
    assert fnrfl.run("digits", fnr={"share": 0.0}, **keys).model_sha256 == bare.model_sha256
    refined = fnrfl.run("digits", fnr={"epochs": 1}, **keys)
    assert refined.model_sha256 != bare.model_sha256 and refined.rounds[-1]["refined"]
    assert min(bare.accuracy, refined.accuracy) > 0.3


def test_public_data_that_never_was_the_clients_is_refused() -> None:
    with pytest.raises(CompatibilityError, match='never was theirs. Set public.source = "train", or .* public-share'):
        built("public-returned", "protocol=paper", "dataset=digits", "model=mlp", "clients=5")


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        _owners,
        owners_by_sizes_alone=("counts.any(0)", "counts.any(0) & False"),
        absent_classes_to_the_first=("counts.sum(1, keepdims=True)", "np.ones_like(counts)"),
        owners_are_one_off=("drawn >= ends", "drawn > ends"),
        owners_always_the_largest=("ends[-1]", "np.minimum(1, ends[-1])"),
        owners_ignore_the_seed=(
            "numpy_generator(seed, 'split', 'returned')",
            "numpy_generator(0, 'split', 'returned')",
        ),
    ),
    *mutants(
        PublicReturned,
        returned_to_everybody=(
            "public_to: ClassVar[PublicTo] = 'owners'",
            "public_to: ClassVar[PublicTo] = 'everybody'",
        ),
        returned_to_nobody=("public_to: ClassVar[PublicTo] = 'owners'", "public_to: ClassVar[PublicTo] = 'nobody'"),
    ),
]
