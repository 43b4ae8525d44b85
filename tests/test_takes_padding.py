"""Which nets and objectives short batches may be padded for: a wrong answer would be a wrong model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.moon import Moon
from fnrfl.core.algorithm import Objective
from fnrfl.core.net import Model, Net
from fnrfl.data.batches import Pool
from fnrfl.engines.step_estimate import NO_ESTIMATE
from fnrfl.engines.vectorised import Vectorised, _is_as_without, takes_padding
from fnrfl.models import catalogue
from mutants import mutants
from test_padding import KEEP, Centred, OwnMean, asked, both
from toys import NUM_CLASSES, NUM_FEATURES, Plain, Run, World, assert_near, assert_same, classification


class Linear(nn.Module):
    """A net that does something to its inputs first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def before(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.before(x))
        return logits


class LooksALittle(Linear):
    """Rows look at each other, and little comes of it."""

    def before(self, x: Tensor) -> Tensor:
        return x + 0.01 * x.mean(0)


class LooksLater(Linear):
    """Rows begin to look at each other when the first step has been taken."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(1))

    def before(self, x: Tensor) -> Tensor:
        return x + self.share * x.mean(0)


class NormsPlaces(Linear):
    """BatchNorm sees four rows for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def before(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, 3)).reshape(-1, NUM_FEATURES).relu()


class NormsWeights(Linear):
    """BatchNorm sees parameters, whose rows are no examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Parameter(torch.randn(NUM_FEATURES, 7)), nn.BatchNorm1d(7)

    def before(self, x: Tensor) -> Tensor:
        return x + (x @ self.norm(self.table)).mean(1, keepdim=True)


class NeverRemembers(Linear):
    """BatchNorm takes the numbers of the batch, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES, track_running_stats=False)

    def before(self, x: Tensor) -> Tensor:
        return self.norm(x).relu()


@pytest.mark.parametrize("engine", ["batched", "gpu"])
@pytest.mark.parametrize("module", [LooksALittle, LooksLater, NormsPlaces])
def test_nets_that_padding_would_change_are_not_padded(module: Any, engine: str) -> None:
    with asked() as decided:
        one, other = both(FedAvg(), classification(module=module), engine)
    assert_near(one.state, other.state, 1e-9)
    assert [pads for _, pads in decided] == [False, False]


def test_batchnorm_of_weights_is_no_error() -> None:
    """Its layer cannot be told which rows are padding, and on a CPU need not be."""
    for engine, pads in (("batched", True), ("gpu", False)):
        with asked() as decided:
            one, other = both(FedAvg(), classification(module=NormsWeights), engine)
        assert_near(one.state, other.state, 1e-9)
        assert decided == [("private", pads)] * 2


def test_frozen_models_leave_padding_out_too() -> None:
    """MOON compares with models in eval mode, whose BatchNorm may take the numbers of the batch all the same."""
    with asked() as decided:
        one, other = both(Moon(), classification(module=NeverRemembers))
    assert_near(one.state, other.state, 1e-9)
    assert ("private", True) in decided


def test_a_run_that_is_gone_on_with_decides_as_one_that_never_stopped() -> None:
    """Clients that are too small to try with say nothing about the net."""
    sizes, world = [4, 3, 4, 2, 31, 32, 33, 34], classification(module=Plain)
    x, y = (part[: sum(sizes)] for part in world.pool._parts["private"])
    pool = Pool({"private": (x, y)}, torch.arange(len(x)).split(sizes), NUM_CLASSES, dtype=torch.float64)
    world = replace(world, pool=pool)
    small, large = torch.arange(4), torch.arange(4, 8)
    never, again = (Run(FedAvg(), "gpu", world=world, training=replace(KEEP, batch=8, epochs=1)) for _ in range(2))
    again.state, again.t = never.round(small), 1
    with asked() as decided:
        never.round(large)
        again.round(large)
    assert decided == [("private", True)] * 2
    assert_same(never.state, again.state)


def test_examples_that_are_alike_say_nothing_about_a_net() -> None:
    """All other rows are then like one's own, and to look at them changes nothing."""
    world = classification(module=Centred)
    x, y = world.pool._parts["private"]
    largest = max(world.pool.shards, key=len)
    x[largest] = x[largest[0]].clone()
    one, other = both(FedAvg(), world, active=6)
    assert_near(one.state, other.state, 1e-9)


@pytest.mark.parametrize("model", ["cnn(norm=batch)", "mlp", "resnet18"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_of_the_package_take_padding(model: str, dtype: torch.dtype) -> None:
    x = torch.rand(5, 3, 32, 32)
    net = Net(catalogue.build_model(model, (3, 32, 32), 10), x[:2], channels_last=True)
    assert takes_padding(net.copy(compute=dtype).with_shared_kernels(), x)


def test_a_loss_from_a_class_beside_is_a_loss_of_its_own() -> None:
    class Beside:
        loss = OwnMean.loss

    @dataclass(frozen=True)
    class Both(Beside, Objective):  # type: ignore[misc]
        pass

    @dataclass(frozen=True)
    class Below(Both):
        pass

    assert not Both.takes_padding and not Below.takes_padding
    for made in (Both, Below):
        Objective.registry.pop(made.__name__)


def test_padding_needs_no_knowledge_of_other_clients() -> None:
    """An engine that was not told about the run pads to the largest batch of the task."""
    world: World = classification(module=Plain)
    run = Run(FedAvg(), "gpu", world=world, training=KEEP)
    assert isinstance(run.engine.server.runner, Vectorised)
    run.engine.server.runner.estimate = NO_ESTIMATE
    other = Run(FedAvg(), "loop", world=world, training=KEEP)
    assert_near(run.round(), other.round(), 1e-9)


MUTANTS = [
    *mutants(_is_as_without, looks_where_it_begins=("PERTURBATION * ...", "0 * ...")),
    *mutants(Model.frozen, padding_in_frozen_models=("real=self.real", "real=None")),
]
