"""Correctness: FNR as the paper prints it and as the released code runs it, and cFedFN, against plain loops."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fnrfl.algorithms.cfedfn import CFedFN
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.cluster import agglomerate
from fnrfl.algorithms.parts.penalties import PENALTIES
from fnrfl.config import load
from fnrfl.core.types import Training
from fnrfl.data.batches import Pool
from fnrfl.runs.setup.method import build_algorithm
from plain_loops import Federation, Normed, assert_equal, assert_model, averaged, descend, fedavg
from toys import NUM_CLASSES, distance


def class_norms(lengths: Tensor, y: Tensor) -> list[float]:
    """Algorithm 1: example by example into lists, and the mean of each list."""
    lists: dict[int, list[float]] = {}
    for length, label in zip(lengths.tolist(), y.tolist(), strict=True):
        lists.setdefault(label, []).append(length)
    return [sum(lists[k]) / len(lists[k]) if k in lists else 0.0 for k in range(NUM_CLASSES)]


def weakest(scores: list[float], share: float) -> list[int]:
    """Rows of the floor(n p) lowest scores."""
    return sorted(sorted(range(len(scores)), key=lambda m: (scores[m], m))[: math.floor(len(scores) * share)])


def peers_of(j: int, refined: list[int], count: int, target: str) -> list[int]:
    return [m for m in range(count) if m not in refined] if target == "others" else [m for m in range(count) if m != j]


def penalty(name: str, lengths: Tensor, y: Tensor, goal: list[float], delta: list[float], peers: int) -> Tensor | float:
    """J of one batch, class by class; F is the class's mean length now, T its target, rho its share of the batch."""
    total: Tensor | float = 0.0
    for label in y.unique().tolist():
        mine = lengths[y == label]
        F, T, rho = mine.mean(), goal[label], len(mine) / len(y)
        gap = F - T
        J: Tensor | float
        if name == "relative":
            J = (F / T - 1) ** 2
        elif name == "squared":
            J = gap**2
        elif name == "absolute":
            J = gap.abs()
        elif name == "huber":
            J = gap**2 / 2 if gap.abs() < 1 else gap.abs() - 0.5
        elif name == "per-sample":
            J = ((mine - T) ** 2).mean()
        elif name == "log-ratio":
            J = (F / T).log() ** 2
        elif name == "literal":
            J = peers * gap.detach() * F
        else:
            J = delta[label]
        total = total + rho * J
    return total


def refine(module: Any, batches: Any, training: Training, mode: str, *, weight: float, **of_penalty: Any) -> None:
    """Lines 30 to 42 of Algorithm 3: cross-entropy + lambda J on public data, with a fresh optimiser."""

    def loss(module: Any, x: Tensor, y: Tensor, *_: Any) -> Tensor:
        features = module.features(x)
        J = penalty(lengths=features.norm(dim=1), y=y, **of_penalty)
        return cross_entropy(module.head(features), y) + weight * J

    before = copy.deepcopy(module.norm)
    if mode == "batch":  # normalised by the batch, and nothing is stored
        module.norm.momentum = 0.0
    descend(module.train(mode != "frozen"), batches, training, loss=loss)
    if mode == "batch":
        module.norm.momentum, module.norm.num_batches_tracked = before.momentum, before.num_batches_tracked


@pytest.mark.parametrize("mode", ["frozen", "batch", "updating"])
@pytest.mark.parametrize("name", PENALTIES)
def test_fnr_algorithms_1_to_3_with_every_penalty_and_batchnorm_mode(name: str, mode: str) -> None:
    """Rank by accuracy, targets from the norms of others in eval mode, refine, average by private examples."""
    fed = Federation(Normed, active=5)
    target = "others" if mode != "batch" else "all"
    weight, share = 0.3, 0.5
    options: dict[str, Any] = {"share": share, "weight": weight, "penalty": name, "target": target}
    run = fed.run(FNR(FedAvg(), epochs=1, batch=16, lr=0.03, batchnorm=mode, **options))  # type: ignore[arg-type]
    training = replace(fed.training, epochs=1, batch=16, lr=0.03, batchnorm=mode)
    (x, y), (rx, ry) = fed.whole("public"), fed.whole("ranking")
    server: Any = fed.first
    for t in range(2):
        clients, modules, _ = fedavg(fed, t, server)
        norms, scores = [], []
        with torch.no_grad():
            for module in modules:
                module.eval()
                norms.append(class_norms(module.features(x).norm(dim=1), y))
                scores.append(float((module(rx).argmax(1) == ry).double().mean()))
        refined = weakest(scores, share)
        for j in refined:
            peers = peers_of(j, refined, len(clients), target)
            goal = [sum(norms[m][k] for m in peers) / len(peers) for k in range(NUM_CLASSES)]
            delta = [sum(norms[m][k] - norms[j][k] for m in peers) for k in range(NUM_CLASSES)]
            batches = fed.batches(t, clients[j], "refine", "public", training)
            refine(
                modules[j], batches, training, mode, weight=weight, name=name, goal=goal, delta=delta, peers=len(peers)
            )
        server = averaged(modules, fed.shares(clients))
        run.round()
        assert run.engine.notes["refined"] == [clients[j] for j in refined]
        assert_equal(run, server)


def test_fnr_protocol_paper_is_the_released_code() -> None:
    """Norms of a pass that overwrites the statistics, ranking by recall with them, a fixed order, all others."""
    made = build_algorithm(load("digits", ["protocol=paper", "fnr.epochs=2", "fnr.lr=0.02"]))
    assert isinstance(made, FNR)
    fed = Federation(Normed, active=6, last_batch="keep")
    x, y = fed.whole("public")
    unequal = torch.cat([torch.arange(len(y)), torch.where(y == 0)[0].repeat(4)])  # or recall would be accuracy
    x, y = x[unequal], y[unequal]
    parts = {"private": fed.pool.take("private", torch.arange(sum(fed.sizes))), "public": (x, y), "ranking": (x, y)}
    fed.pool = Pool(parts, fed.pool.shards, NUM_CLASSES, dtype=torch.float64)
    fed.world = replace(fed.world, pool=fed.pool)
    run = fed.run(made)
    training = replace(fed.training, epochs=2, lr=0.02, batch=32, shuffle=False)
    server: Any = fed.first
    otherwise = 0
    for t in range(3):
        clients, modules, _ = fedavg(fed, t, server)
        norms, recalls, plain = [], [], []
        with torch.no_grad():
            for module in modules:
                module.train()
                lengths = [module.features(part).norm(dim=1) for part in x.split(32)]  # moves the statistics
                norms.append(class_norms(torch.cat(lengths), y))
                module.eval()
                right = module(x).argmax(1) == y
                recalls.append(sum(float(right[y == k].double().mean()) for k in range(NUM_CLASSES)) / NUM_CLASSES)
                plain.append(float(right.double().mean()))
        refined = weakest(recalls, 0.5)
        otherwise += refined != weakest(plain, 0.5)
        for j in refined:
            delta = [sum(norms[m][k] - norms[j][k] for m in range(6) if m != j) for k in range(NUM_CLASSES)]
            batches = fed.batches(t, clients[j], "refine", "public", training)
            refine(
                modules[j], batches, training, "updating", weight=0.5, name="constant", goal=delta, delta=delta, peers=5
            )
        server = averaged(modules, fed.shares(clients))
        run.round()
        told = run.engine.notes
        assert told["refined"] == [clients[j] for j in refined]
        assert told["ranking"] == pytest.approx(recalls, abs=1e-12)
        assert distance(torch.tensor(told["norms"]), torch.tensor(norms)) <= 1e-10
        assert_equal(run, server)
    assert otherwise  # of the instrument: accuracy would have refined others


# -- cFedFN -----------------------------------------------------------------------------------------------------------


def linked(points: list[list[float]], clusters: int) -> list[set[int]]:
    """Average linkage by its definition: the two groups with the least mean distance of their members merge."""
    groups = [{i} for i in range(len(points))]
    while len(groups) > clusters:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a + 1, len(groups))]

        def apart(pair: tuple[int, int], groups: list[set[int]] = groups) -> float:
            far = [math.dist(points[i], points[j]) for i in groups[pair[0]] for j in groups[pair[1]]]
            return sum(far) / len(far)

        a, b = min(pairs, key=apart)
        groups = [g for i, g in enumerate(groups) if i not in (a, b)] + [groups[a] | groups[b]]
    return groups


@pytest.mark.parametrize("clusters", [2, 3])
def test_cfedfn_clusters_by_average_linkage_and_averages_within(clusters: int) -> None:
    """One round of FedAvg, then every cluster of clients that are alike in class norms is a FedAvg of its own."""
    fed = Federation(Normed)
    run = fed.run(CFedFN(clusters=clusters))
    N = len(fed.sizes)
    clients, modules, _ = fedavg(fed, 0, fed.first)
    server: Any = averaged(modules, fed.shares(clients))
    run.round()
    assert_equal(run, server)
    norms, shares = [], []
    with torch.no_grad():
        for i in range(N):
            x, y = fed.whole("private", i)
            norms.append(class_norms(server.eval().features(x).norm(dim=1), y))
            shares.append([float((y == k).double().mean()) for k in range(NUM_CLASSES)])
    told = [v for row, part in zip(norms, shares, strict=True) for v, p in zip(row, part, strict=True) if p]
    points = [
        [math.sqrt(p) * v / (sum(told) / len(told)) for v, p in zip(row, part, strict=True)]
        for row, part in zip(norms, shares, strict=True)
    ]
    groups = linked(points, clusters)
    models: list[nn.Module] = [copy.deepcopy(server) for _ in groups]
    for t in range(1, 3):
        cohort = fed.cohort(t)
        for g, group in enumerate(groups):
            mine, trained = [i for i in cohort if i in group], []
            for i in mine:
                module = copy.deepcopy(models[g]).train()
                descend(module, fed.batches(t, i), fed.training)
                trained.append(module)
            models[g] = averaged(trained, fed.shares(mine)) if mine else models[g]
        run.round()
        for g, group in enumerate(groups):
            for i in group:
                found = run.algorithm.personal(run.net, run.state, i, {})
                assert_model(found.params, found.buffers, models[g])


def test_cfedfn_linkage_is_scipys() -> None:
    """44 draws of up to 12 points, without ties, cut into every number of clusters: the same groups."""
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    draw = torch.Generator().manual_seed(11)
    for n in list(range(2, 13)) * 4:
        points = torch.randn(n, 3, generator=draw, dtype=torch.float64)
        tree = hierarchy.linkage(points.numpy(), "average")
        for clusters in range(1, n + 1):
            want = hierarchy.fcluster(tree, clusters, "maxclust")
            found = agglomerate(points, clusters).tolist()
            assert len(set(zip(found, want.tolist(), strict=True))) == len(set(found)) == len(set(want.tolist()))
