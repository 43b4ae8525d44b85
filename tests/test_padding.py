"""Short batches that are padded, so that clients step together: nothing may change but the time that it takes.

A wrong answer to who takes padding would be a wrong model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from fnrfl.algorithms.moon import Moon
from fnrfl.algorithms.parts.penalties import PENALTIES, Penalised
from fnrfl.core.algorithm import Objective
from fnrfl.core.feed import Plan, plan_rows
from fnrfl.core.net import Model, Net
from fnrfl.core.rng import generator
from fnrfl.core.types import Batch
from fnrfl.engines import vectorised
from fnrfl.engines.groups import StepEstimate
from fnrfl.engines.job import Job
from fnrfl.engines.vectorised import Vectorised, _is_as_without, can_be_tried_with, takes_padding
from fnrfl.kernels.layers import _PaddedBackward, _PaddedNormalised, leaving_padding_out, share_kernels
from fnrfl.models import catalogue
from mutants import mutants
from test_conformance import FEW_METHODS, algorithm, each
from toys import NUM_CLASSES, NUM_FEATURES, Plain, Run, World, assert_near, assert_same, classification, with_pool

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KEEP = replace(classification().training, last_batch="keep", batch=15)


class Normed(nn.Module):
    """Convolutions and BatchNorm, without Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.hidden, self.norm2 = nn.Linear(6 * NUM_FEATURES, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.conv(x.view(-1, 1, 3, 4))).relu().flatten(1)
        return self.head(self.norm2(self.hidden(y)).relu())


class Dropped(nn.Sequential):
    """A net with Dropout, and without BatchNorm."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, NUM_CLASSES))


class Linear(nn.Module):
    """A net that does something to its inputs first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.share = nn.Parameter(torch.zeros(1))
        self.table, self.norm = nn.Parameter(torch.randn(NUM_FEATURES, 7)), nn.BatchNorm1d(7)
        self.norm3 = nn.BatchNorm1d(3)
        self.forgets = nn.BatchNorm1d(NUM_FEATURES, track_running_stats=False)  # the batch's numbers, in eval mode too

    def before(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.before(x))


def first(before: Callable[[Linear, Tensor], Any]) -> type[Linear]:
    return type("First", (Linear,), {"before": before})


CENTRED = first(lambda net, x: x - x.mean(0))
NETS_THAT_PADDING_CHANGES = {
    "rows look at each other": CENTRED,
    "they look a little": first(lambda net, x: x + 0.01 * x.mean(0)),
    "they begin to look after the first step": first(lambda net, x: x + net.share * x.mean(0)),
    "BatchNorm sees four rows for each example": first(
        lambda net, x: net.norm3(x.reshape(-1, 3)).reshape(-1, NUM_FEATURES).relu()
    ),
}


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


def both(method: Any, world: World | type[nn.Module], engine: str = "gpu", **options: Any) -> list[tuple[str, bool]]:
    """What another engine decides in two rounds, which end as those of the loop engine."""
    world = world if isinstance(world, World) else classification(module=world)
    options = {"training": KEEP} | options
    one, other = Run(method, "loop", world=world, **options), Run(method, engine, world=world, **options)
    with asked() as decided:
        for run in (one, other):
            run.rounds(2)
    assert_near(one.state, other.state.to(torch.device("cpu")), 1e-9)
    return decided


@each(lambda label, refined: not refined or label in FEW_METHODS, refined=(False, True))
def test_padding_changes_no_method(label: str, refined: bool) -> None:
    """Every method, with BatchNorm: those whose clients train on private data are padded."""
    decided = both(algorithm(label, refined), Normed)
    assert any(pads for data, pads in decided if data == "private") == (not label.startswith("public-only"))


@pytest.mark.parametrize("penalty", PENALTIES)
def test_padding_changes_no_penalty(penalty: str) -> None:
    """Refinement: all of its clients have the same batches, the last of them short."""
    assert ("public", True) in both(FNR(FedAvg(), weight=0.5, penalty=penalty), Normed)


@pytest.mark.parametrize("engine", ["batched", "batched-fast", "gpu", "gpu-fast"])
@pytest.mark.parametrize("module", [Plain, Dropped])
def test_every_engine_pads_a_net_without_batchnorm(module: Any, engine: str) -> None:
    """Masks are drawn for examples, as without padding."""
    assert both(FedAvg(), module, engine) == [("private", True)] * 2


@on_a_gpu
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("refined", [False, True])
def test_padding_on_a_gpu(record: bool, refined: bool) -> None:
    """Captured steps too, of clients that have fewer examples than a batch as well."""
    options = {"training": replace(KEEP, batch=39), "world": classification(module=Normed), "active": 6}
    one = Run(algorithm("fedavg", refined), "loop", **options)
    other = Run(algorithm("fedavg", refined), "gpu-fast", device="cuda", record=record, **options)
    with asked() as decided:
        for run in (one, other):
            run.rounds(2)
    assert all(pads for _, pads in decided) and decided
    assert_near(one.state, other.state.to(torch.device("cpu")), 1e-9)


@pytest.mark.parametrize("engine", ["gpu", "gpu-fast", "batched-fast"])
def test_clients_smaller_than_a_batch_and_weights_of_classes(engine: str) -> None:
    """Some clients have fewer examples than a batch has; steps are recorded with examples of theirs too."""
    both(FedAvg(), Normed, engine, training=replace(KEEP, batch=39, epochs=1, class_weights="balanced"), active=6)


def test_all_examples_together_make_larger_batches_than_any_client() -> None:
    both(algorithm("centralised", False), Normed, training=replace(KEEP, batch=200))


def test_noise_is_laid_over_examples_alone_and_drawn_as_without_padding() -> None:
    noise = lambda client, x, stream: x + 0.3 * client * torch.randn(x.shape, generator=stream, dtype=x.dtype)  # noqa: E731
    assert ("private", True) in both(FedAvg(), with_pool(classification(module=Plain), noise=noise))


def test_a_crowd_of_tiny_clients_is_not_padded_on_a_cpu() -> None:
    """Most rows would be padding, and on a CPU every row takes time."""
    for engine, pads in (("batched", False), ("gpu", True)):
        assert both(FedAvg(), Plain, engine, training=replace(KEEP, batch=90)) == [("private", pads)] * 2


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
    loss = lambda self, *args: OwnMean.loss(self, *args)  # noqa: E731
    own = type("OwnPenalty", (Penalised,), {"loss": loss})
    said = type("Said", (OwnMean,), {"takes_padding": True, "loss": loss})
    again = type("Again", (said,), {"loss": loss})
    beside = type("Both", (type("Beside", (), {"loss": loss}), Objective), {})
    below = type("Below", (beside,), {})
    assert not own(Objective(), "relative", 1.0, 3).takes_padding  # type: ignore[call-arg]
    assert [cls.takes_padding for cls in (said, again, beside, below)] == [True, False, False, False]  # type: ignore[attr-defined]
    for made in (own, said, again, beside, below):
        Objective.registry.pop(made.__name__)


def test_an_objective_of_a_user_gives_the_same_everywhere() -> None:
    method = type("Method", (FedAvg,), {"objective": OwnMean()})()
    assert both(method, Plain) == [("private", False)] * 2


@pytest.mark.parametrize(
    ("module", "shared", "padded"),
    [(Plain, False, True), (Normed, False, False), (Normed, True, True), (CENTRED, True, False)],
)
def test_whether_a_net_takes_padding_is_tried(module: Any, shared: bool, padded: bool) -> None:
    world = classification(module=module)
    net = Net(world.module(), world.example)
    net = net.with_shared_kernels() if shared else net
    before, _ = net.flatten()
    assert takes_padding(net, torch.randn(5, NUM_FEATURES, generator=generator(0, "x"), dtype=torch.float64)) is padded
    assert torch.equal(before, net.flatten()[0])


@pytest.mark.parametrize("engine", ["batched", "gpu"])
@pytest.mark.parametrize("module", NETS_THAT_PADDING_CHANGES.values(), ids=NETS_THAT_PADDING_CHANGES)
def test_nets_that_padding_would_change_are_not_padded(module: Any, engine: str) -> None:
    assert both(FedAvg(), module, engine) == [("private", False)] * 2


@pytest.mark.parametrize(("engine", "pads"), [("batched", True), ("gpu", False)])
def test_batchnorm_of_weights_is_no_error(engine: str, pads: bool) -> None:
    """Its layer sees parameters, whose rows are no examples: it cannot be told which rows are padding."""
    module = first(lambda net, x: x + (x @ net.norm(net.table)).mean(1, keepdim=True))
    assert both(FedAvg(), module, engine) == [("private", pads)] * 2


def test_frozen_models_leave_padding_out_too() -> None:
    """MOON compares with models in eval mode, whose BatchNorm may take the numbers of the batch all the same."""
    assert ("private", True) in both(Moon(), first(lambda net, x: net.forgets(x).relu()))


def test_examples_that_show_nothing_decide_about_their_own_task_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, NUM_FEATURES, generator=generator(0, "x"))
    assert can_be_tried_with(x) and not can_be_tried_with(x[:4]) and not can_be_tried_with(x[:1].expand(5, -1))
    can = iter([False, True])
    monkeypatch.setattr(vectorised, "can_be_tried_with", lambda x: next(can))
    assert both(FedAvg(), Plain) == [("private", False), ("private", True)]


def test_a_run_that_is_gone_on_with_decides_as_one_that_never_stopped() -> None:
    """Clients that are too small to try with say nothing about the net."""
    sizes = [4, 3, 4, 2, 31, 32, 33, 34]
    world = with_pool(classification(module=Plain), torch.arange(sum(sizes)).split(sizes))
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
    world = classification(module=CENTRED)
    x, _ = world.pool._parts["private"]
    largest = max(world.pool.shards, key=len)
    x[largest] = x[largest[0]].clone()
    both(FedAvg(), world, active=6)


@pytest.mark.parametrize("model", ["cnn(norm=batch)", "mlp", "resnet18"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_of_the_package_take_padding(model: str, dtype: torch.dtype) -> None:
    x = torch.rand(5, 3, 32, 32)
    net = Net(catalogue.build_model(model, (3, 32, 32), 10), x[:2], channels_last=True)
    assert takes_padding(net.copy(compute=dtype).with_shared_kernels(), x)


def test_padding_needs_no_knowledge_of_other_clients() -> None:
    """An engine that was not told about the run pads to the largest batch of the task."""
    run, other = (Run(FedAvg(), name, world=classification(module=Plain), training=KEEP) for name in ("gpu", "loop"))
    run.engine.server.runner.estimate = StepEstimate()
    assert_near(run.round(), other.round(), 1e-9)


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
    *mutants(_is_as_without, looks_where_it_begins=("PERTURBATION * ...", "0 * ...")),
    *mutants(Model.frozen, padding_in_frozen_models=("real=self.real", "real=None")),
    *mutants(StepEstimate.largest_batch, padded_to_the_largest_client=("max(mine, self._largest)", "self._largest")),
]
