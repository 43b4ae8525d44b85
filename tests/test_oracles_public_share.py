"""Public-share: FedAvg on private and public data together, with nothing else changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fnrfl
from fnrfl.algorithms.public_share import PublicShare
from fnrfl.config import load
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.types import State
from fnrfl.data.batches import Pool
from fnrfl.data.partition.views import Splits, _handed_out
from fnrfl.engines.assemble import assemble
from fnrfl.runs.setup.build import Built, build
from mutants import mutants

BASE = (
    "rounds=2",
    "clients=5",
    "client.epochs=1",
    "public.size=100",
    "fnr.epochs=1",
    "fnr=off",
    "engine.accelerate=false",
)


def built(algorithm: str = "public-share", *keys: str) -> Built:
    return build(load("digits", [*BASE, f"algorithm={algorithm}", *keys]))


def rows(x: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in x]


def carved(one: Built) -> list[bytes]:
    """Everything that was set aside for the server."""
    parts = (one.splits.public, one.splits.ranking, one.splits.distill)
    return [row for part in parts for row in rows(part.x)]


def held(one: Built, client: int) -> list[bytes]:
    return rows(one.splits.private.x[one.splits.clients[client]])


@pytest.mark.parametrize("distill", ["0.0", "0.3"])
def test_every_client_holds_its_own_and_all_public_data(distill: str) -> None:
    share, bare = (built(name, f"public.distill={distill}") for name in ("public-share", "fedavg"))
    assert len(carved(share)) == 100
    assert carved(share) == carved(bare), "the server's parts are the same"
    assert share.partition == bare.partition, "the draw is the same"
    for client in range(5):
        assert sorted(held(share, client)) == sorted(held(bare, client) + carved(share))


def test_examples_that_the_server_uses_without_labels_have_theirs_here() -> None:
    share = built("public-share", "public.distill=0.3")
    assert set(share.splits.distill.y.tolist()) == {-1}
    mine = share.splits.private.y[share.splits.clients[0]]
    assert mine.min() == 0
    assert torch.bincount(mine, minlength=10).min() >= 9, "every class, as stratified carving has it"


def test_the_same_examples_that_rank_and_refine_are_given_once() -> None:
    share, bare = (built(name, "public.ranking=0.0") for name in ("public-share", "fedavg"))
    sizes = [len(mine) for mine in bare.splits.clients]
    assert [len(mine) for mine in share.splits.clients] == [size + 100 for size in sizes]


def test_nobody_sees_validation_or_test_data() -> None:
    share = built()
    kept = set(rows(share.splits.validation.x)) | set(rows(share.splits.test.x))
    assert not any(kept & set(held(share, client)) for client in range(5))


def test_public_examples_count_in_the_weights() -> None:
    """Against the rule for refinement, where they never do: here they are training data."""
    share, bare = built(), built("fedavg")
    assert torch.equal(share.engine.examples, bare.engine.examples + 100)


@pytest.mark.parametrize("refined", [False, True], ids=["bare", "fnr"])
def test_it_is_fedavg_on_larger_shards(refined: bool) -> None:
    """Bit for bit: a pool whose shards were enlarged by hand, and FedAvg."""
    keys = ["engine=loop", "engine.threads=1"] + (["fnr=on"] if refined else [])
    share, bare = built("public-share", *keys), built("fedavg", *keys)
    train = bare.splits.train
    where = {row: place for place, row in enumerate(rows(train.x))}
    public = torch.tensor([where[row] for row in carved(bare)])
    shards = [torch.cat([mine, public]).sort().values for mine in bare.splits.clients]
    parts = {"private": train, "public": bare.splits.public, "ranking": bare.splits.ranking}
    pool = Pool({k: (p.x, p.y) for k, p in parts.items()}, shards, 10, dtype=bare.net.dtype)
    engine = assemble("loop", bare.net, pool, bare.engine.options, seed=0)
    states = []
    for one, by in ((share, share.engine), (bare, engine)):
        state = one.algorithm.init(one.net)
        for t in range(2):
            by.begin(t)
            state = one.algorithm.round(state, torch.arange(5), by)
        states.append(state)
    assert torch.equal(states[0].params, states[1].params)
    assert not torch.equal(states[0].params, State(*bare.net.flatten()).params)


def test_the_traffic_of_a_round_is_fedavgs() -> None:
    """Public data is where it is needed before training begins, as under FNR, and is not counted."""
    one, other = (fnrfl.run("digits", out=None, algorithm=a, rounds=1) for a in ("public-share", "fedavg"))
    assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)
    assert one.model_sha256 != other.model_sha256


def own_data(folder: Path) -> str:
    """Public data from elsewhere: digits upside down, which the data set has not."""
    digits = built("fedavg").dataset
    x = np.ascontiguousarray(digits.train.x.numpy()[:40, :, ::-1])
    y = digits.train.y.numpy()[:40]
    path = folder / "public.npz"
    np.savez(path, x_train=x[:30], y_train=y[:30], x_test=x[30:], y_test=y[30:])
    return str(path)


def test_public_data_from_elsewhere_is_added_too(tmp_path: Path) -> None:
    source = f"public.source={own_data(tmp_path)}"
    share, bare = built("public-share", source), built("fedavg", source)
    assert len(carved(share)) == 40
    for client in range(5):
        assert sorted(held(share, client)) == sorted(held(bare, client) + carved(share))
    assert len(share.splits.private) == len(share.splits.train) + 40
    assert len(bare.splits.private) == len(bare.splits.train) == len(share.splits.train)
    x, y = share.pool.take("private", share.splits.clients[2])
    assert (len(x), int(y.min())) == (len(bare.splits.clients[2]) + 40, 0)


def test_the_manifest_says_what_happened(tmp_path: Path) -> None:
    share, bare = built(), built("fedavg")
    told, other = share.splits.manifest(), bare.splits.manifest()
    assert (told["public_to"], other["public_to"]) == ("everybody", "nobody")
    assert told["sha256"] != other["sha256"]
    same = ("train", "public", "ranking", "distill", "validation", "test")
    assert all(told[name] == other[name] for name in same)
    more = [one["examples"] - two["examples"] for one, two in zip(told["clients"], other["clients"], strict=True)]
    assert more == [100] * 5
    result = fnrfl.run("digits", out=tmp_path / "run", rounds=1, algorithm="public-share")
    assert fnrfl.load(tmp_path / "run").model_sha256 == result.model_sha256
    assert '"public_to": "everybody"' in (tmp_path / "run" / "partition.json").read_text()


def test_a_clients_own_test_distribution_is_that_of_the_draw() -> None:
    """So that `accuracy_own` compares with every other method's."""
    assert np.array_equal(built().partition.counts, built("fedavg").partition.counts)


# -- with FNR, and refusals -------------------------------------------------------------------------------------------


def test_under_fnr_it_says_that_clients_have_seen_the_public_data() -> None:
    (said,) = built("public-share", "fnr=on").notices
    assert "FNR ranks and refines on examples that clients have trained on" in said
    assert built().notices == built("fedavg", "fnr=on").notices == ()


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_refining_nobody_is_the_method_and_refining_somebody_is_not(engine: str) -> None:
    keys: dict[str, Any] = {"out": None, "rounds": 2, "algorithm": "public-share", "engine": engine}
    bare = fnrfl.run("digits", **keys)
    assert fnrfl.run("digits", fnr={"share": 0.0}, **keys).model_sha256 == bare.model_sha256
    refined = fnrfl.run("digits", fnr={"epochs": 1}, **keys)
    assert refined.model_sha256 != bare.model_sha256 and refined.rounds[-1]["refined"]
    assert min(bare.accuracy, refined.accuracy) > 0.3


def test_noise_that_an_example_keeps_is_refused() -> None:
    fixed = "scenario=iid + feature-noise(0.1, redraw=false)"
    with pytest.raises(CompatibilityError, match="an example keeps the noise of one. Leave out redraw=false"):
        built("public-share", fixed)
    assert built("public-share", "scenario=iid + feature-noise(0.1)").engine.examples.min() > 100
    assert built("public-returned", fixed).engine.examples.min() > 0


def test_the_test_set_is_shared_only_as_a_named_leak() -> None:
    with pytest.raises(ConfigError, match="public.source = .test. is a leak"):
        built("public-share", "public.source=test")
    leak = built("public-share", "protocol=paper", "dataset=digits", "model=mlp", "clients=5")
    assert "public_is_test" in leak.config.leaks_on
    assert set(rows(leak.splits.test.x)) <= set(held(leak, 0))


def test_a_last_batch_is_dropped_only_from_clients_that_have_one() -> None:
    """Sizes are those of what clients hold."""
    keys = ("client.batch=100", "client.last_batch=drop", "scenario=label-dirichlet(0.1)")
    with pytest.raises(CompatibilityError, match="less than one batch of 100"):
        built("fedavg", *keys, "clients=20")
    assert built("public-share", *keys, "clients=20").engine.examples.min() >= 100


def test_a_server_optimiser_around_it_shares_too() -> None:
    inside = built("fedavgm", "algorithm.inner=public-share")
    assert inside.splits.public_to == "everybody"
    assert built("fedavgm", "algorithm.inner=public-share", "fnr=on").splits.public_to == "everybody"
    assert built("fedavgm").splits.public_to == "nobody"


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        _handed_out,
        public_data_is_not_handed_out=("np.concatenate(both)", "both[0]"),
        only_refinement_data_is_handed_out=("np.concatenate(shared)", "shared[0]"),
        ranking_data_given_twice=("np.unique(np.concatenate(shared))", "np.sort(np.concatenate(shared))"),
        outside_data_at_wrong_positions=("public + len(dataset.train)", "public"),
    ),
    *mutants(
        Splits.manifest,
        manifest_is_silent=(
            "{'num_classes': self.num_classes, 'public_to': self.public_to}",
            "{'num_classes': self.num_classes}",
        ),
    ),
    *mutants(
        PublicShare,
        shares_with_owners=("public_to: ClassVar[PublicTo] = 'everybody'", "public_to: ClassVar[PublicTo] = 'owners'"),
        shares_with_nobody=("public_to: ClassVar[PublicTo] = 'everybody'", "public_to: ClassVar[PublicTo] = 'nobody'"),
    ),
]
