"""Card 11, cFedFN-style: what must come out, known without running a federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fnrfl
from fnrfl.algorithms.cfedfn import CFedFN, Description, positions
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.local_only import LocalOnly
from fnrfl.algorithms.parts.cluster import agglomerate
from fnrfl.core.errors import ConfigError
from fnrfl.core.rng import generator
from fnrfl.core.types import Data, Decorator, LocalTask, Probe, State, Training, Tree
from fnrfl.data.batches import Pool
from mutants import mutants
from toys import NUM_CLASSES, NUM_FEATURES, Run, World, assert_near, assert_same, classification, distance

ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])
EVERYONE = torch.arange(6)
SLOWLY = Training(lr=1e-4, momentum=0.0, weight_decay=0.0, batch=1000, epochs=1, last_batch="keep", shuffle=False)
TOLD = {  # two groups of clients, told apart by one thing each
    "scale": ([1.0, 10.0, 1.0, 10.0, 10.0, 1.0], [(0, 1, 2, 3)] * 6),
    "labels": ([1.0] * 6, [(0, 1), (2, 3), (0, 1), (2, 3), (2, 3), (0, 1)]),
}
GROUPS = [0, 1, 0, 1, 1, 0]


class Extractor(nn.Module):
    """Features that are linear in the input."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(NUM_FEATURES, 8, bias=False)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def world(scales: Sequence[float], labels: Sequence[Sequence[int]], shards: Sequence[Tensor] | None = None) -> World:
    """Clients of 30 examples, each with a scale and labels of its own; or other shards of the same examples."""
    draw = generator(0, "norms")
    x = torch.randn(30 * len(scales), NUM_FEATURES, generator=draw, dtype=torch.float64)
    x = x * torch.tensor(scales, dtype=torch.float64).repeat_interleave(30)[:, None]
    y = torch.cat([torch.tensor(mine)[torch.arange(30) % len(mine)] for mine in labels])
    pool = Pool({"private": (x, y)}, shards or torch.arange(len(x)).split(30), NUM_CLASSES, dtype=torch.float64)
    return World(lambda: Extractor().double(), pool, x[:2], SLOWLY, len(scales))


def described(played: Run, **options: Any) -> Tree:
    probe = Description(options.get("classes", NUM_CLASSES))
    return played.engine.measure(torch.arange(len(played.engine.examples)), probe, data="private", at=played.state)


def divided(algorithm: CFedFN, made: World) -> Tensor:
    """Clusters under the initial model."""
    played = Run(algorithm, world=made)
    return algorithm._divide(played.state, played.engine)


def same(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two labellings say the same, whatever the names."""
    return len(set(zip(a, b, strict=True))) == len(set(a)) == len(set(b))


def used(played: Run, client: int) -> State:
    """The model that a client uses."""
    return played.algorithm.personal(played.net, played.state, client, played.engine.memory.get(client))


# -- the description --------------------------------------------------------------------------------------------------


def test_card11_the_description_is_the_mean_norm_of_each_class() -> None:
    played = Run(CFedFN())
    told = described(played)
    x, y = played.world.pool.take("private", torch.arange(305))
    out, _ = played.net.apply(played.state.params, played.state.buffers, x, mode="frozen")
    for i, shard in enumerate(played.world.pool.shards):
        for c in range(NUM_CLASSES):
            mine = shard[y[shard] == c]
            assert told["counts"][i, c] == len(mine)
            want = out.features[mine].square().sum(1).sqrt().mean() if len(mine) else torch.tensor(0.0)
            assert abs(float(told["norms"][i, c] - want)) < 1e-12
    sizes = described(played, classes=0)["norms"]
    assert distance(sizes[2], out.features[played.world.pool.shards[2]].abs().mean(0)) < 1e-12


def test_card11_the_description_does_not_depend_on_the_order_of_examples() -> None:
    made = classification()
    mixed = [shard[torch.randperm(len(shard), generator=generator(0, i))] for i, shard in enumerate(made.pool.shards)]
    other = replace(made, pool=Pool(made.pool._parts, mixed, NUM_CLASSES, dtype=torch.float64))
    one, two = (described(Run(CFedFN(), world=w)) for w in (made, other))
    assert distance(one["norms"], two["norms"]) < 1e-12
    assert torch.equal(one["counts"], two["counts"])


def test_card11_scaled_data_have_scaled_norms() -> None:
    labels = TOLD["scale"][1]
    one, seven = (described(Run(CFedFN(), world=world([s] * 6, labels)))["norms"] for s in (1.0, 7.0))
    assert distance(seven, 7 * one) < 1e-12


def test_card11_positions() -> None:
    """sqrt(n_i^c / n_i) v_i[c] / vbar, vbar over what was reported, absent classes at 0; a common scale is nothing."""
    norms = torch.tensor([[2.0, 0.0, 4.0], [6.0, 8.0, 0.0]], dtype=torch.float64)
    counts = torch.tensor([[1.0, 0.0, 3.0], [8.0, 8.0, 0.0]], dtype=torch.float64)
    want = torch.tensor([[0.5 * 2 / 5, 0.0, 0.75**0.5 * 4 / 5], [0.5**0.5 * 6 / 5, 0.5**0.5 * 8 / 5, 0.0]]).double()
    assert distance(positions(norms, counts), want) < 1e-7
    assert distance(positions(3 * norms, counts), positions(norms, counts)) < 1e-12


# -- clusters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", TOLD)
@ENGINES
def test_card11_two_groups_are_recovered(what: str, engine: str) -> None:
    played = Run(CFedFN(clusters=2), engine, world=world(*TOLD[what]))
    played.rounds(2)
    assert played.state.extra["cluster"].tolist() == GROUPS
    assert played.engine.notes["clusters"] == GROUPS


@pytest.mark.parametrize("what", TOLD)
def test_card11_the_largest_gap_finds_how_many_groups_there_are(what: str) -> None:
    assert divided(CFedFN(clusters=5, cut="gap"), world(*TOLD[what])).tolist() == GROUPS


def test_card11_the_sizes_of_features_tell_scales_apart() -> None:
    made = world(*TOLD["scale"])
    assert divided(CFedFN(clusters=2, descriptor="features"), made).tolist() == GROUPS


@pytest.mark.parametrize("clusters", [2, 3, 4])
def test_card11_permuted_clients_have_permuted_clusters(clusters: int) -> None:
    made = classification()
    order = [3, 0, 5, 1, 4, 2]
    other = replace(
        made, pool=Pool(made.pool._parts, [made.pool.shards[i] for i in order], NUM_CLASSES, dtype=torch.float64)
    )
    one, two = (divided(CFedFN(clusters=clusters), w).tolist() for w in (made, other))
    assert len(set(one)) == clusters
    assert same([one[i] for i in order], two)


@pytest.mark.parametrize("clusters", [1, 2, 3])
def test_card11_identical_clients_share_a_cluster(clusters: int) -> None:
    base = torch.arange(90).split(30)
    twins = [0, 1, 0, 2, 1, 0]
    made = world(*TOLD["scale"], shards=[base[i] for i in twins])
    found = divided(CFedFN(clusters=clusters), made).tolist()
    assert len(set(found)) == clusters
    assert len(set(zip(twins, found, strict=True))) == 3


@pytest.mark.parametrize(("clients", "clusters"), [(1, 1), (2, 1), (3, 1), (5, 2), (6, 3), (10, 4), (30, 4)])
def test_card11_auto_is_four_or_half_of_the_clients(clients: int, clusters: int) -> None:
    made = world([1.0 + i for i in range(clients)], [(0, 1, 2, 3)] * clients)
    assert len(divided(CFedFN(), made).unique()) == clusters


def test_agglomerate_by_hand() -> None:
    """Average linkage: after 0 and 1 merge, 3.2 is 2.7 from their average and 2.5 from 5.7, though only 2.2 from 1."""
    points = torch.tensor([[0.0], [1.0], [3.2], [5.7]])
    assert agglomerate(points, 4).tolist() == [0, 1, 2, 3]
    assert agglomerate(points, 3).tolist() == [0, 0, 1, 2]
    assert agglomerate(points, 2).tolist() == [0, 0, 1, 1]
    assert agglomerate(points, 9).tolist() == [0, 1, 2, 3]
    assert agglomerate(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), 3).tolist() == [0, 0, 1, 2]  # ties to the lowest
    assert agglomerate(torch.tensor([[0.0], [1.0], [9.0], [10.0]]), 4, gap=True).tolist() == [0, 0, 1, 1]
    assert agglomerate(torch.tensor([[0.0], [1.0]]), 1, gap=True).tolist() == [0, 0]
    triangle = torch.tensor([[0.0, 0.0], [0.0, 1.0], [10.0, 0.0], [10.0, 1.0], [5.0, 9.0], [5.0, 10.0]])
    assert agglomerate(triangle, 5, gap=True).tolist() == [0, 0, 1, 1, 2, 2]
    # 3, 4 and 5 are one; 1 is 3 from them on average and 7.2 is 3.2, though nearer to 5 than 1 is.
    assert agglomerate(torch.tensor([[4.0], [3.0], [5.0], [1.0], [7.2]]), 2).tolist() == [0, 0, 0, 0, 1]


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 10_000))
def test_agglomerate_against_the_definition(n: int, clusters: int, seed: int) -> None:
    """Mean distance over all pairs, computed anew for every merge."""
    points = torch.randn(n, 3, generator=generator(seed, "points"), dtype=torch.float64)
    parts = [[i] for i in range(n)]
    while len(parts) > clusters:
        far = {
            (i, j): float(torch.cdist(points[parts[i]], points[parts[j]]).mean())
            for i in range(len(parts))
            for j in range(i + 1, len(parts))
        }
        i, j = min(far, key=lambda pair: far[pair])
        parts[i] += parts.pop(j)
    found = agglomerate(points, clusters).tolist()
    assert same(found, [next(k for k, part in enumerate(parts) if i in part) for i in range(n)])
    assert [found.index(k) for k in range(max(found) + 1)] == sorted(found.index(k) for k in range(max(found) + 1))


# -- training ---------------------------------------------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize("refining", [False, True], ids=["bare", "fnr"])
def test_card11_one_cluster_is_fedavg_bit_for_bit(engine: str, refining: bool) -> None:
    one, bare = (Run(FNR(a) if refining else a, engine) for a in (CFedFN(clusters=1), FedAvg()))
    for _ in range(4):
        assert_same(one.round(), bare.round())
    assert torch.equal(used(one, 3).params, bare.state.params)


@ENGINES
def test_card11_as_many_clusters_as_clients_is_local_training(engine: str) -> None:
    """After the warm-up, from its model."""
    played, alone = Run(CFedFN(clusters=6), engine), Run(LocalOnly(), engine)
    warm = played.round()
    for client in range(6):
        alone.engine.memory.put(client, warm.packed("model"))
    alone.t = 1
    played.rounds(3)
    alone.rounds(3)
    assert sorted(played.state.extra["cluster"].tolist()) == list(range(6))
    for client in range(6):
        assert_near(used(played, client), State(used(alone, client).params, used(alone, client).buffers))


@ENGINES
@pytest.mark.parametrize("refining", [False, True], ids=["bare", "fnr"])
def test_card11_every_cluster_is_a_federation_of_its_own(engine: str, refining: bool) -> None:
    """Averages, and under FNR selection and targets, are those of FedAvg with the cluster's active members alone."""
    wrap = (lambda a: FNR(a)) if refining else (lambda a: a)
    played = Run(wrap(CFedFN(clusters=2)), engine)
    played.rounds(2)
    cluster = played.state.extra["cluster"]
    for cohort in (EVERYONE, torch.tensor([0, 2, 3, 5])):
        before, t = played.state, played.t
        played.round(cohort)
        for k in range(2):
            model = State(before.extra["models"][k], {n: before.extra[f"models/{n}"][k] for n in before.buffers})
            apart = Run(wrap(FedAvg()), engine)
            apart.t, apart.state = t, model
            members = cohort[cluster[cohort] == k]
            want = apart.round(members) if len(members) else model
            mine = used(played, int((cluster == k).nonzero()[0]))
            assert_near(mine, want)
        assert torch.equal(played.state.extra["cluster"], cluster), "divided once and for all"


def test_card11_a_cluster_without_active_members_keeps_its_model() -> None:
    played = Run(CFedFN(clusters=2), world=world(*TOLD["labels"]))
    played.rounds(2)
    models = played.state.extra["models"]
    played.round(torch.tensor([0, 2]))
    assert torch.equal(played.state.extra["models"][1], models[1])
    assert not torch.equal(played.state.extra["models"][0], models[0])


def test_card11_the_servers_model_is_the_average_by_the_members_examples() -> None:
    played = Run(CFedFN(clusters=3))
    state = played.rounds(4)
    n, cluster = played.engine.examples, state.extra["cluster"]
    want = sum(n[i] / n.sum() * used(played, i).params for i in range(6))
    assert distance(state.params, want) < 1e-12
    variance = sum(n[i] / n.sum() * used(played, i).buffers["norm.running_var"] for i in range(6))
    assert distance(state.buffers["norm.running_var"], variance) < 1e-12
    counted = state.extra["models/norm.num_batches_tracked"]
    assert state.buffers["norm.num_batches_tracked"] == counted.max() and counted.dtype == torch.int64
    apart = torch.stack([state.extra["models"][k] - state.params for k in range(int(cluster.max()) + 1)]).norm(dim=1)
    assert played.engine.notes["cluster_distance"] == pytest.approx(float(apart.mean()))


def test_card11_warm_up_is_fedavg_with_the_rounds_cohort() -> None:
    played, bare = Run(CFedFN(warmup=3)), Run(FedAvg())
    for _ in range(3):
        assert_same(played.round(), bare.round())
        assert "cluster" not in played.state.extra
        assert_same(used(played, 0), bare.state)
    assert "cluster" in played.round().extra


class Order(Decorator):
    """Notes what is asked, in order."""

    asked: list[tuple[Any, ...]]

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public", at: State | None = None) -> Tree:
        self.asked.append((type(probe).__name__, data, at, len(cohort)))
        return self.engine.measure(cohort, probe, data=data, at=at)

    def stream(self, cohort: Tensor, task: LocalTask) -> Any:
        self.asked.append((task.purpose,))
        yield from self.engine.stream(cohort, task)


def test_card11_with_fnr_clients_are_described_before_refinement_and_by_private_data() -> None:
    """Everybody, once, under the model that all share; norms of own models on public data are FNR's."""
    played = Run(FNR(CFedFN(clusters=2)))
    warm = played.round()
    order = Order(played.recorder)
    order.asked = []
    played.metered.engine = order
    played.rounds(2)
    assert order.asked[0] == ("Description", "private", warm, 6)
    assert sum(ask[0] == "Description" for ask in order.asked) == 1
    assert ("refine",) in order.asked


def test_card11_traffic() -> None:
    """Dividing: the model to everybody, 8 C bytes back; then as FedAvg, and the model is not sent twice in a round."""
    played = Run(CFedFN(clusters=2))
    model = 4 * played.net.size + 4 * 32 + 8

    def crossed(way: str) -> int:
        return sum(count[way] for count in played.metered.bytes.values())

    played.round()
    assert crossed("up") == crossed("down") == 4 * model
    played.round()
    assert crossed("down") == 6 * model
    assert crossed("up") == 4 * model + 6 * 8 * NUM_CLASSES
    played.round()
    assert crossed("up") == crossed("down") == 4 * model


@pytest.mark.parametrize("bad", [{"clusters": 0}, {"clusters": "many"}, {"warmup": 0}, {"cut": "knife"}])
def test_bad_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        fnrfl.run("digits", out=None, rounds=1, algorithm={"name": "cfedfn", **bad})


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        agglomerate,
        farthest_merge=("far.argmin()", "far.where(far.isfinite(), -far[0, 0]).argmax()"),
        single_linkage=(
            "(sizes[i] * far[i] + sizes[j] * far[j]) / (sizes[i] + sizes[j])",
            "torch.where(far[i].isfinite() & far[j].isfinite(), torch.minimum(far[i], far[j]), math.inf)",
        ),
        unweighted_linkage=("(sizes[i] * far[i] + sizes[j] * far[j]) / (sizes[i] + sizes[j])", "(far[i] + far[j]) / 2"),
        sizes_forgotten=("sizes[i] += sizes[j]", "pass"),
        smallest_gap=("heights[left] - heights[left + 1]", "heights[left + 1] - heights[left]"),
        highest_merge_for_gap=("heights[left] - heights[left + 1]", "heights[left]"),
        one_cluster_less=("min(clusters, N)", "max(1, min(clusters, N) - 1)"),
        names_with_holes=("found[most].unique(return_inverse=True)[1]", "found[most]"),
    ),
    *mutants(
        Description.finish,
        norms_not_averaged=("total['sum'] / total['count'].clamp(min=1)", "total['sum']"),
    ),
    *mutants(
        Description.__call__,
        squared_norms=("out.features.norm(dim=-1)", "out.features.square().sum(-1)"),
        signed_features=("out.features.abs()", "out.features"),
    ),
    *mutants(
        positions,
        share_without_root=("share.sqrt()", "share"),
        share_dropped=("share.sqrt() * norms", "norms"),
        share_of_everybody=("counts.sum(1, keepdim=True)", "counts.sum()"),
        level_dropped=("share.sqrt() * norms / norms[told].mean().clamp(min=1e-12)", "share.sqrt() * norms"),
        level_counts_absent_classes=("norms[told]", "norms"),
    ),
    *mutants(
        CFedFN._divide,
        described_on_public_data=("data='private'", "data='public'"),
        described_by_own_models=("at=state", ""),
        auto_is_always_four=("max(1, min(4, N // 2))", "4"),
        gap_ignored=("self.cut == 'gap'", "False"),
    ),
    *mutants(
        CFedFN.round,
        no_warm_up=("engine.round < self.warmup", "engine.round < 0"),
        longer_warm_up=("engine.round < self.warmup", "engine.round <= self.warmup"),
        clusters_trained_by_everybody=("cohort[cluster[cohort] == k]", "cohort"),
        clusters_of_rows=("cluster[cohort] == k", "cluster[:len(cohort)] == k"),
    ),
    *mutants(
        CFedFN._gathered,
        average_uniform=(
            "torch.bincount(cluster, engine.examples.cpu(), len(models)) / engine.examples.sum().cpu()",
            "torch.full((len(models),), 1 / len(models))",
        ),
        average_by_heads=(
            "torch.bincount(cluster, engine.examples.cpu(), len(models)) / engine.examples.sum().cpu()",
            "torch.bincount(cluster, None, len(models)) / len(cluster)",
        ),
    ),
    *mutants(
        CFedFN.personal,
        average_is_used=("'cluster' in state.extra", "'nobody' in state.extra"),
    ),
]
