"""Short batches that are padded, so that clients step together: nothing may change but the time that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fedgen import Generated
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.penalties import PENALTIES, Penalised
from fnrfl.core.algorithm import Objective
from fnrfl.core.feed import Plan, plan_rows
from fnrfl.core.net import Net
from fnrfl.core.rng import generator
from fnrfl.core.types import Batch
from fnrfl.data.batches import Pool
from fnrfl.engines import vectorised
from fnrfl.engines.job import Job
from fnrfl.engines.step_estimate import StepEstimate
from fnrfl.engines.vectorised import Vectorised, can_be_tried_with, takes_padding
from fnrfl.kernels.layers import _PaddedBackward, _PaddedNormalised, leaving_padding_out, share_kernels
from mutants import mutants
from test_conformance import FEW_METHODS, algorithm, each
from toys import NUM_CLASSES, NUM_FEATURES, Plain, Run, World, assert_near, classification

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KEEP = replace(classification().training, last_batch="keep", batch=15)


class Normed(nn.Module):
    """Convolutions and BatchNorm, without Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.hidden = nn.Linear(6 * NUM_FEATURES, 8)
        self.norm2 = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x.view(-1, 1, 3, 4))).relu().flatten(1)
        logits: Tensor = self.head(self.norm2(self.hidden(y)).relu())
        return logits


class Dropped(nn.Sequential):
    """A net with Dropout, and without BatchNorm."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, NUM_CLASSES))


class NormedAndDropped(nn.Sequential):
    """A net with BatchNorm and Dropout."""

    def __init__(self) -> None:
        hidden = nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU()
        super().__init__(*hidden, nn.Dropout(0.3), nn.Linear(16, NUM_CLASSES))


class Centred(nn.Module):
    """A net of a user's, whose rows look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x - x.mean(0))
        return logits


near = partial(torch.testing.assert_close, atol=1e-9, rtol=0)


@contextmanager
def asked() -> Iterator[list[tuple[str, bool]]]:
    """What engines decided about tasks with batches of several sizes: (data, whether they pad)."""
    found: list[tuple[str, bool]] = []
    decide = Vectorised._pads

    def told(self: Vectorised, job: Job, place: Any) -> bool:
        found.append((job.task.data, decide(self, job, place)))
        return found[-1][1]

    with mock.patch.object(Vectorised, "_pads", told):
        yield found


def both(method: Any, world: World, engine: str = "gpu", **options: Any) -> tuple[Run, Run]:
    """The loop engine's run and another's, after two rounds."""
    options = {"training": KEEP} | options
    one, other = Run(method, "loop", world=world, **options), Run(method, engine, world=world, **options)
    for run in (one, other):
        run.rounds(2)
    return one, other


@each(lambda label, refined: not refined or label in FEW_METHODS, refined=(False, True))
def test_padding_changes_no_method(label: str, refined: bool) -> None:
    """Every method, with BatchNorm: those whose clients train on private data are padded."""
    with asked() as decided:
        one, other = both(algorithm(label, refined), classification(module=Normed))
    assert_near(one.state, other.state, 1e-9)
    assert any(pads for data, pads in decided if data == "private") == _is_padded(label)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_padding_changes_no_penalty(penalty: str) -> None:
    """Refinement: all of its clients have the same batches, the last of them short."""
    with asked() as decided:
        one, other = both(FNR(FedAvg(), weight=0.5, penalty=penalty), classification(module=Normed))
    assert_near(one.state, other.state, 1e-9)
    assert ("public", True) in decided


def _is_padded(label: str) -> bool:
    """Whether a method trains its clients with an objective that takes padding."""
    return not label.startswith("public-only")


@pytest.mark.parametrize("engine", ["batched", "batched-fast", "gpu", "gpu-fast"])
def test_every_engine_pads_a_net_without_batchnorm(engine: str) -> None:
    with asked() as decided:
        one, other = both(FedAvg(), classification(module=Plain), engine)
    assert_near(one.state, other.state, 1e-9)
    assert ("private", True) in decided


@on_a_gpu
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("refined", [False, True])
def test_padding_on_a_gpu(record: bool, refined: bool) -> None:
    """Captured steps too, of clients that have fewer examples than a batch as well."""
    world, training = classification(module=Normed), replace(KEEP, batch=39)
    one, other = (
        Run(algorithm("fedavg", refined), engine, world=world, training=training, active=6, **options)
        for engine, options in (("loop", {}), ("gpu-fast", {"device": "cuda", "record": record}))
    )
    with asked() as decided:
        for run in (one, other):
            run.rounds(2)
    assert all(pads for _, pads in decided) and decided
    assert_near(one.state, other.state.to(torch.device("cpu")), 1e-9)


def test_clients_smaller_than_a_batch_and_weights_of_classes() -> None:
    """Some clients have fewer examples than a batch has; steps are recorded with examples of theirs too."""
    world = classification(module=Normed)
    for engine in ("gpu", "gpu-fast", "batched-fast"):
        training = replace(KEEP, batch=39, epochs=1, class_weights="balanced")
        one, other = both(FedAvg(), world, engine, training=training, active=6)
        assert_near(one.state, other.state, 1e-9)


def test_all_examples_together_make_larger_batches_than_any_client() -> None:
    world, training = classification(module=Normed), replace(KEEP, batch=200)
    one, other = both(algorithm("centralised", False), world, training=training)
    assert_near(one.state, other.state, 1e-9)


def test_noise_is_laid_over_examples_alone_and_drawn_as_without_padding() -> None:
    world = classification(module=Plain)
    parts, shards = dict(world.pool._parts), world.pool.shards

    def noise(client: int, x: Tensor, stream: torch.Generator) -> Tensor:
        return x + 0.3 * client * torch.randn(x.shape, generator=stream, dtype=x.dtype)

    noisy = replace(world, pool=Pool(parts, shards, NUM_CLASSES, dtype=torch.float64, noise=noise))
    with asked() as decided:
        one, other = both(FedAvg(), noisy)
    assert_near(one.state, other.state, 1e-9)
    assert ("private", True) in decided


@pytest.mark.parametrize("engine", ["batched", "gpu", "gpu-fast"])
def test_masks_are_drawn_for_examples_as_without_padding(engine: str) -> None:
    with asked() as decided:
        one, other = both(FedAvg(), classification(module=Dropped), engine)
    assert_near(one.state, other.state, 1e-9)
    assert [pads for _, pads in decided] == [True, True]


def test_a_crowd_of_tiny_clients_is_not_padded_on_a_cpu() -> None:
    """Most rows would be padding, and on a CPU every row takes time."""
    with asked() as decided:
        both(FedAvg(), classification(module=Plain), "batched", training=replace(KEEP, batch=90))
        both(FedAvg(), classification(module=Plain), "gpu", training=replace(KEEP, batch=90))
    assert [pads for _, pads in decided] == [False] * 2 + [True] * 2


def test_how_batches_are_chosen_makes_no_other_program() -> None:
    """Runs that keep short batches and runs that have none share the program of a full one."""
    training = classification().training
    assert training.step_options() == replace(KEEP, epochs=7, batch=3, lr=0.5, shuffle=False).step_options()
    for other in ({"momentum": 0.5}, {"weight_decay": 0.5}, {"optimizer": "adam"}, {"batchnorm": "frozen"}):
        assert training.step_options() != replace(training, **other).step_options()  # type: ignore[arg-type]


# -- who takes padding -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnMean(Objective):
    """An objective of a user's, which does not reduce with `batch.mean`."""

    def loss(self, out: Any, model: Any, params: Any, batch: Batch, shared: Any, own: Any) -> Tensor:
        return nn.functional.cross_entropy(out.logits, batch.y)


@dataclass(frozen=True)
class Corrected(Objective):
    """One without a loss of its own."""

    def correct(self, grad: Tensor, params: Tensor, start: Tensor, shared: Any, own: Any) -> Tensor:
        return grad + 0.1 * (params - start)


def test_an_objective_with_a_loss_of_its_own_is_not_padded_unless_it_says_so() -> None:
    assert not OwnMean.takes_padding and Corrected.takes_padding and Objective.takes_padding
    for inner in (OwnMean(), Corrected()):
        assert Penalised(inner, "relative", 1.0, 3).takes_padding is inner.takes_padding

    class OwnPenalty(Penalised):
        def loss(self, *args: Any) -> Tensor:
            return super().loss(*args)

    assert not OwnPenalty(Objective(), "relative", 1.0, 3).takes_padding

    class Said(OwnMean):
        takes_padding = True

        def loss(self, *args: Any) -> Tensor:
            return super().loss(*args)

    class Again(Said):
        def loss(self, *args: Any) -> Tensor:
            return super().loss(*args)

    assert Said.takes_padding and not Again.takes_padding
    for made in (OwnPenalty, Said, Again):
        Objective.registry.pop(made.__name__)


def test_an_objective_of_a_user_gives_the_same_everywhere() -> None:
    class Method(FedAvg):
        objective = OwnMean()

    with asked() as decided:
        one, other = both(Method(), classification(module=Plain))
    assert_near(one.state, other.state, 1e-9)
    assert [pads for _, pads in decided] == [False, False]


@pytest.mark.parametrize(
    ("module", "shared", "padded"),
    [(Plain, False, True), (Normed, False, False), (Normed, True, True), (Centred, True, False)],
)
def test_whether_a_net_takes_padding_is_tried(module: Any, shared: bool, padded: bool) -> None:
    world = classification(module=module)
    net = Net(world.module(), world.example)
    net = net.with_shared_kernels() if shared else net
    x = torch.randn(5, NUM_FEATURES, generator=generator(0, "x"), dtype=torch.float64)
    before, _ = net.flatten()
    assert takes_padding(net, x) is padded
    assert torch.equal(before, net.flatten()[0])


def test_examples_that_show_nothing_decide_about_their_own_task_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed after that task decides as the one that went on."""
    x = torch.randn(5, NUM_FEATURES, generator=generator(0, "x"))
    assert can_be_tried_with(x) and not can_be_tried_with(x[:4]) and not can_be_tried_with(x[:1].expand(5, -1))
    can = iter([False, True])
    monkeypatch.setattr(vectorised, "can_be_tried_with", lambda x: next(can))
    with asked() as decided:
        one, other = both(FedAvg(), classification(module=Plain))
    assert_near(one.state, other.state, 1e-9)
    assert [pads for _, pads in decided] == [False, True]


def test_a_net_whose_rows_look_at_each_other_gives_the_same_everywhere() -> None:
    with asked() as decided:
        one, other = both(FedAvg(), classification(module=Centred))
    assert_near(one.state, other.state, 1e-9)
    assert [pads for _, pads in decided] == [False, False]


# -- BatchNorm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("examples", [1, 2, 5])
def test_batchnorm_with_padding_is_torchs_without(examples: int, affine: bool, momentum: float | None) -> None:
    """Outputs, gradients and what it remembers; for clients side by side, each with padding of its own."""
    draw = generator(0, "padding", str(examples))
    x = torch.randn(3, 6, 4, 2, 3, generator=draw, dtype=torch.float64)  # clients, rows, channels
    along = torch.randn(3, 6, 4, 2, 3, generator=draw, dtype=torch.float64)
    counts = torch.tensor([examples, 6, 3])
    real = (torch.arange(6) < counts[:, None]).double()
    layers = [nn.BatchNorm2d(4, momentum=momentum, affine=affine).double() for _ in range(3)]

    def outputs(x: Tensor, real: Tensor, along: Tensor) -> Tensor:
        with leaving_padding_out(shared, real):
            y: Tensor = shared(x)
        return (y * along * real[:, None, None, None]).sum()

    shared = nn.BatchNorm2d(4, momentum=momentum, affine=affine, track_running_stats=False).double()
    share_kernels(shared)
    slopes = vmap(grad(outputs))(x, real, along)
    for i, (layer, n) in enumerate(zip(layers, counts.tolist(), strict=True)):
        mine = x[i, :n].clone().requires_grad_()
        y = layer(mine)
        (y * along[i, :n]).sum().backward()
        near(slopes[i, :n], mine.grad)
        assert not slopes[i, n:].any()
        alone = nn.BatchNorm2d(4, momentum=momentum, affine=affine).double()
        share_kernels(alone)
        with leaving_padding_out(alone, real[i]):
            near(alone(x[i])[:n], y)
        assert alone.real is None
        for name, buffer in layer.named_buffers():
            near(dict(alone.named_buffers())[name].double(), buffer.double())


MUTANTS = [
    *mutants(
        Batch.mean,
        padding_in_the_mean=("self.real.sum()", "len(self.real)"),
        padding_in_the_sum=("(per_example * self.real).sum()", "per_example.sum()"),
    ),
    *mutants(Objective.loss, padding_in_class_weights=("weights * batch.real", "weights")),
    *mutants(
        Objective.__init_subclass__,
        own_loss_inherits_padding=("first('loss') < first('takes_padding')", "False"),
    ),
    *mutants(Penalised.loss, padding_has_a_class=("hot * batch.real[:, None]", "hot")),
    *mutants(
        Penalised.__post_init__,
        penalty_hides_the_inner_loss=("self.inner.takes_padding", "True"),
        penalty_hides_its_own_loss=("type(self).takes_padding", "True"),
    ),
    *mutants(
        _PaddedNormalised.forward,
        padding_in_the_statistics=("own_mean * rows", "own_mean"),
        padding_in_the_deviation=("(own_var + ...) * rows", "own_var + ..."),
        padding_is_counted=("rows.sum(0)", "len(rows)"),
        examples_do_not_differ=("own_var + (own_mean - mean).square()", "own_var"),
    ),
    *mutants(
        _PaddedBackward.forward,
        padding_has_a_gradient=("rows / (...)", "torch.ones_like(rows) / (...)"),
        padding_is_counted=("rows.sum(0)", "len(rows)"),
        sign_of_the_slope=("-share * (scale * rstd * dweight)", "share * (scale * rstd * dweight)"),
        sign_of_the_mean=("-share * (scale * dbias)", "share * (scale * dbias)"),
    ),
    *mutants(plan_rows, padding_is_an_example=("column < sizes", "column < sizes.max().expand_as(sizes)")),
    *mutants(Plan.lay_noise, noise_over_padding=("self.noise(batch[:size])", "self.noise(batch)[:size]")),
    *mutants(
        Job.example_batch,
        few_examples_do_not_come_again=("torch.arange(size) % len(order)", "torch.arange(size).clamp(max=len(order))"),
    ),
    *mutants(
        Job._drawn,
        numbers_drawn_for_padding=("self.draws[m](len(list(run)), size)", "self.draws[m](len(list(run)), padded_to)"),
    ),
    *mutants(Generated.loss, padding_in_generated=("batch.count", "len(batch.y)")),
    *mutants(
        Vectorised._pads,
        padding_of_every_objective=("not job.task.objective.takes_padding", "False"),
        padding_whatever_it_costs=("(1 + MAX_PADDING) * taken", "10 * taken"),
    ),
    *mutants(StepEstimate.largest_batch, padded_to_the_largest_client=("max(mine, self._largest)", "self._largest")),
]
