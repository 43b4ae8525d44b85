"""Metered bytes against the formulas: M = 4 (parameters + float buffers) + 8 (integer buffers), C classes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

import fnrfl
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.config.registry import algorithms, load_method
from fnrfl.core.net import Net
from fnrfl.core.training import ClientOptions
from fnrfl.data.batches import Pool
from fnrfl.engines.assemble import Layout, assemble
from fnrfl.engines.metered import Metered
from fnrfl.models.catalogue import build_model
from fnrfl.runs import run as runs
from fnrfl.runs.setup.build import build

CLIENTS, CLASSES, ROUNDS, SHARE = 6, 10, 3, 0.4
MIB = 2**20


@dataclass(frozen=True)
class Sent:
    """What a run on digits with a BatchNorm net sent, by round, and what the formulas are made of."""

    up: list[int]
    down: list[int]
    M: int  # bytes of a model
    P: int  # parameters
    norms: int  # bytes of BatchNorm layers
    features: int
    distill: int  # public examples without labels
    cohorts: list[list[int]]  # the active clients, by round
    clusters: list[int]  # of every client, where a method divides them


def traffic(**keys: object) -> Sent:
    built: list[Any] = []
    with mock.patch.object(runs, "build", lambda *a, **k: built.append(build(*a, **k)) or built[0]):
        result = fnrfl.run(
            "digits", out=None, model="mlp(norm=batch)", rounds=ROUNDS, clients=CLIENTS, engine="loop",
            client={"epochs": 1, "batch": 128}, **keys,
        )  # fmt: skip
    net = built[0].net
    _, buffers = net.flatten()
    assert any(not b.is_floating_point() for b in buffers.values()), "the formula's last term needs an integer buffer"
    of = lambda tree: sum(b.numel() * (4 if b.is_floating_point() else 8) for b in tree.values())  # noqa: E731
    return Sent(
        up=[event["bytes_up"] for event in result.rounds],
        down=[event["bytes_down"] for event in result.rounds],
        M=4 * net.size + of(buffers),
        P=net.size,
        norms=4 * int(net.mask(net.batchnorm).sum()) + of({k: v for k, v in buffers.items() if k in net.batchnorm}),
        features=net.num_features,
        distill=len(built[0].splits.distill),
        cohorts=[event["cohort"] for event in result.rounds],
        clusters=next((event["clusters"] for event in result.rounds if "clusters" in event), []),
    )


def generator_bytes(features: int) -> int:
    """FedGen's: (16 + C) x 64, BatchNorm's weights, 64 x F and a bias; two statistics of 64; a number a class."""
    return 4 * ((16 + CLASSES) * 64 + 2 * 64 + 64 * features + features + 2 * 64 + CLASSES)


def client(name: str, sent: Sent) -> tuple[int, int]:
    """(bytes down, bytes up) of an active client in every round, bare."""
    M, P = sent.M, sent.P
    if name in ("scaffold", "feddc"):  # the literal four messages: variates, on parameters
        return M + 4 * P, M + 4 * P
    if name == "fedbn":
        return M - sent.norms, M - sent.norms
    if name == "fedgen":
        return M + generator_bytes(sent.features), M + 4 * CLASSES
    if name == "ktpfl":
        return 4 * sent.distill * CLASSES, 4 * sent.distill * CLASSES
    if name in ("local-only", "public-only", "centralised"):
        return 0, 0
    return M, M


def once(name: str, sent: Sent, t: int) -> tuple[int, int]:
    """(bytes down, bytes up) in round t of what clients tell about their data once in a run, all of them together.

    FedFTG's are asked for label counts when they first take part. cFedFN's describe their data in the second round, all
    of them; those of the cohort have the model already, under which they describe it.
    """
    active = set(sent.cohorts[t])
    if name == "fedftg":
        return 0, len(active.difference(*sent.cohorts[:t])) * 4 * CLASSES
    if name == "cfedfn" and t == 1:
        return (CLIENTS - len(active)) * sent.M, CLIENTS * 8 * CLASSES
    return 0, 0


def groups(name: str, sent: Sent, t: int) -> list[int]:
    """Sizes of the groups that FNR ranks and refines by themselves: the cohort, or cFedFN's clusters in it."""
    if name == "cfedfn" and t > 0:
        return list(Counter(sent.clusters[i] for i in sent.cohorts[t]).values())
    return [len(sent.cohorts[t])] if load_method(name).trains_clients else []


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("name", algorithms())
def test_bare_traffic(name: str, participation: float) -> None:
    sent = traffic(algorithm=name, participation=participation)
    m = round(CLIENTS * participation)
    for t in range(ROUNDS):
        (down, up), (all_down, all_up) = client(name, sent), once(name, sent, t)
        assert sent.down[t] == m * down + all_down
        assert sent.up[t] == m * up + all_up


@pytest.mark.parametrize("upload", ["once", "twice"])
@pytest.mark.parametrize("name", algorithms())
def test_traffic_under_fnr(name: str, upload: str) -> None:
    sent = traffic(algorithm=name, fnr={"upload": upload, "share": SHARE, "epochs": 1})
    model = 0 if name in ("ktpfl", "local-only") else sent.M - (sent.norms if name == "fedbn" else 0)
    both_models = upload == "twice" or "uses-trained" in load_method(name)().needs
    for t in range(ROUNDS):
        sizes = groups(name, sent, t)
        refined = sum(int(size * SHARE) for size in sizes)
        answers = sum(size * 4 * (CLASSES + 1) for size in sizes if int(size * SHARE))  # else there is nothing to rank
        (down, up), (all_down, all_up) = client(name, sent), once(name, sent, t)
        assert sent.up[t] == CLIENTS * up + all_up + answers + (refined * model if both_models else 0)
        assert sent.down[t] == CLIENTS * down + all_down + refined * 4 * CLASSES


def test_the_small_federation_has_what_the_formulas_tell_apart() -> None:
    """Clients that are new and clients that are not; clusters that refine somebody and clusters that refine nobody."""
    half = traffic(algorithm="fedavg", participation=0.5)
    assert all(0 < len(set(now) & set(half.cohorts[0])) < len(now) for now in half.cohorts[1:])
    divided = traffic(algorithm="cfedfn")
    assert {int(size * SHARE) > 0 for size in groups("cfedfn", divided, 1)} == {True, False}


def test_scaffold_with_whole_gradients_sends_the_same_four_messages() -> None:
    sent = traffic(algorithm={"name": "scaffold", "variates": "I"})
    assert sent.up == sent.down == [CLIENTS * (sent.M + 4 * sent.P)] * ROUNDS


def test_moon_with_a_head_sends_the_head() -> None:
    headed = traffic(algorithm={"name": "moon", "head": 32})
    assert headed.P > traffic(algorithm="moon").P
    assert headed.up == headed.down == [CLIENTS * headed.M] * ROUNDS


def test_paper_traffic_of_fedavg() -> None:
    """The paper's 8,920: ten clients, ten rounds, ResNet-18 with 1000 outputs, BatchNorm buffers included, in MiB."""
    module = build_model("resnet18(head=1000)", (3, 32, 32), 10)
    net = Net(module, torch.zeros(2, 3, 32, 32))
    x, y = torch.zeros(20, 3, 32, 32, dtype=torch.uint8), torch.zeros(20, dtype=torch.int64)
    pool = Pool({"private": (x, y)}, torch.arange(20).split(2), 10)
    metered = Metered(
        assemble("loop", net, pool, ClientOptions(batch=2, epochs=1, augment=False), layout=Layout(clients_at_once=1))
    )
    algorithm = FedAvg()
    algorithm.round(algorithm.init(net), torch.arange(10), metered)
    a_round = sum(metered.bytes["local"][way] for way in ("up", "down"))
    assert round(10 * a_round / MIB, 1) == 8919.9
