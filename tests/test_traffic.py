"""Metered bytes against the formulas: M = 4 (parameters + float buffers) + 8 (integer buffers), C classes."""

from __future__ import annotations

import pytest
import torch

import fnrfl
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.core.net import Net
from fnrfl.core.types import Training
from fnrfl.data.batches import Pool
from fnrfl.engines.loop import Loop
from fnrfl.engines.metered import Metered
from fnrfl.models.build import build
from fnrfl.registry import algorithms, load

CLIENTS, CLASSES, ROUNDS = 6, 10, 2
MIB = 2**20


def traffic(**keys: object) -> tuple[int, int, int, int]:
    """(bytes up per round, bytes down per round, M, P) of a run on digits with a BatchNorm net."""
    result = fnrfl.run(
        "digits", out=None, model="cnn(norm=batch)", rounds=ROUNDS, clients=CLIENTS, client={"epochs": 1}, **keys
    )
    parameters = sum(p.numel() for p in result.model.parameters())
    buffers = [b for n, b in result.model.named_buffers() if not n.endswith("uniform")]
    model = 4 * parameters + sum(b.numel() * (4 if b.is_floating_point() else 8) for b in buffers)
    assert any(not b.is_floating_point() for b in buffers), "the formula's last term needs an integer buffer"
    up, down = {e["bytes_up"] for e in result.rounds}, {e["bytes_down"] for e in result.rounds}
    assert len(up) == len(down) == 1, "the same in every round"
    return up.pop(), down.pop(), model, parameters


def vectors(name: str, parameters: int) -> int:
    """What a method sends each way beside the model: SCAFFOLD's variates, on parameters."""
    return 4 * parameters if name == "scaffold" else 0


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("name", algorithms())
def test_bare_traffic(name: str, participation: float) -> None:
    up, down, model, parameters = traffic(algorithm=name, participation=participation)
    m = round(CLIENTS * participation)
    assert up == down == m * (model + vectors(name, parameters))


@pytest.mark.parametrize("upload", ["once", "twice"])
@pytest.mark.parametrize("name", algorithms())
def test_traffic_under_fnr(name: str, upload: str) -> None:
    up, down, model, parameters = traffic(algorithm=name, fnr={"upload": upload, "share": 0.4, "epochs": 1})
    refined = int(CLIENTS * 0.4)
    both_models = upload == "twice" or "uses-trained" in load(name).needs
    again = refined * model if both_models else 0
    assert up == CLIENTS * (model + vectors(name, parameters)) + CLIENTS * 4 * (CLASSES + 1) + again
    assert down == CLIENTS * (model + vectors(name, parameters)) + refined * 4 * CLASSES


def test_scaffold_with_whole_gradients_sends_the_same_four_messages() -> None:
    up, down, model, parameters = traffic(algorithm={"name": "scaffold", "variates": "I"})
    assert up == down == CLIENTS * (model + 4 * parameters)


def test_moon_with_a_head_sends_the_head() -> None:
    bare = traffic(algorithm="moon")
    headed = traffic(algorithm={"name": "moon", "head": 32})
    assert headed[3] > bare[3]
    assert headed[0] == headed[1] == CLIENTS * headed[2]


def test_paper_traffic_of_fedavg() -> None:
    """The paper's 8,920: ten clients, ten rounds, ResNet-18 with 1000 outputs, BatchNorm buffers included, in MiB."""
    module = build("resnet18(head=1000)", (3, 32, 32), 10)
    net = Net(module, torch.zeros(2, 3, 32, 32))
    x, y = torch.zeros(20, 3, 32, 32, dtype=torch.uint8), torch.zeros(20, dtype=torch.int64)
    pool = Pool({"private": (x, y)}, torch.arange(20).split(2), 10)
    metered = Metered(Loop(net, pool, Training(batch=2, epochs=1), clients_at_once=1))
    algorithm, (params, buffers) = FedAvg(), net.flatten()
    algorithm.round(algorithm.init(params, buffers), torch.arange(10), metered)
    a_round = sum(metered.bytes["local"][way] for way in ("up", "down"))
    assert round(10 * a_round / MIB, 1) == 8919.9
