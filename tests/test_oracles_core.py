"""The local step, the optimisers and the average, against torch and arithmetic by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fnrfl.core import optim
from fnrfl.core.algorithm import Objective
from fnrfl.core.errors import ConfigError
from fnrfl.core.fold import _Totals
from fnrfl.core.net import Net
from fnrfl.core.step import Carry, Gradient, by_autograd, by_transform, local_step
from fnrfl.core.training import canonical_schedule
from fnrfl.core.types import Batch, Flat, Folded, Replies, State, Training, Tree, fold
from mutants import mutants
from toys import Plain, assert_near, distance

TRAINING = {
    "sgd": Training(lr=0.1, momentum=0.0, weight_decay=0.0),
    "momentum": Training(lr=0.1, momentum=0.9, weight_decay=0.05),
    "adam": Training(optimizer="adam", lr=0.1, weight_decay=0.05),
    "adamw": Training(optimizer="adamw", lr=0.1, weight_decay=0.05),
}


class Leaning(Objective):
    """Cross-entropy with a constant added to its gradient."""

    def correct(self, grad: Flat, params: Flat, start: Flat, shared: Tree, own: Tree) -> Flat:
        return grad + shared["lean"]


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("gradient", [by_autograd, by_transform])
def test_a_step_is_torchs(name: str, as_tensor: bool, gradient: Gradient) -> None:
    """Ten steps on one batch, by the package and by a module with torch's own optimiser."""
    training = TRAINING[name]
    stream = torch.Generator().manual_seed(5)
    x = torch.randn(8, 12, dtype=torch.float64, generator=stream)
    y = torch.arange(8) % 4
    module = Plain().double()
    net = Net(module, x[:2])
    params, buffers = net.flatten()
    lean = torch.randn(len(params), dtype=torch.float64, generator=stream)
    start, carry = State(params, buffers), Carry.new(training, params, buffers)
    batch = Batch(x, y, torch.arange(8))

    theirs = params.clone().requires_grad_()
    options = {"lr": training.lr, "weight_decay": training.weight_decay}
    makers: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    maker = makers.get(training.optimizer, partial(torch.optim.SGD, momentum=training.momentum))
    optimiser: torch.optim.Optimizer = maker([theirs], **options)
    for _ in range(10):
        lr = torch.tensor(training.lr, dtype=torch.float64) if as_tensor else training.lr
        loss = local_step(net, Leaning(), training, carry, start, batch, {"lean": lean}, {}, lr, gradient)
        optimiser.zero_grad()
        wanted = nn.functional.cross_entropy(net.apply(theirs, buffers, x, mode="batch")[0].logits, y)
        (wanted + lean @ theirs).backward()
        optimiser.step()
        assert distance(loss, wanted.detach()) < 1e-12
        assert distance(carry.params, theirs.detach()) < 1e-10


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_frozen_parameters_stay(optimizer: str) -> None:
    training = Training(optimizer=optimizer, lr=0.1, weight_decay=0.5)  # type: ignore[arg-type]
    net = Net(Plain().double(), torch.ones(2, 12, dtype=torch.float64))
    params, buffers = net.flatten()
    name = next(iter(net.shapes))
    batch = Batch(torch.ones(2, 12).double(), torch.arange(2), torch.arange(2))
    carry = Carry.new(training, params, buffers)
    frozen = replace(training, frozen=frozenset({name}))
    local_step(net, Objective(), frozen, carry, State(params, buffers), batch, {}, {}, 0.1, by_autograd)
    moved = carry.params != params
    assert not moved[net.mask(frozenset({name}))].any()
    assert moved.any()


WARM = torch.optim.lr_scheduler.LinearLR
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 12),
    "step(4, 0.1)": lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.1),
    "warmup(3) + cosine": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [WARM(o, 0.25, total_iters=3), torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)], [3]
    ),
    "warmup(3) + step(4, 0.1)": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [WARM(o, 0.25, total_iters=3), torch.optim.lr_scheduler.StepLR(o, 4, 0.1)], [3]
    ),
    "warmup(3)": lambda o: WARM(o, 0.25, total_iters=3),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_torchs(schedule: str) -> None:
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs, ours = SCHEDULES[schedule](optimiser), Training(lr=0.5, schedule=schedule, schedule_rounds=12)
    for t in range(12):
        assert ours.in_round(t).lr == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-6), t
        assert ours.in_round(t).in_round(t + 1).lr == ours.in_round(t).lr
        optimiser.step()
        theirs.step()


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("Warmup( 2 )+Cosine", "warmup(2) + cosine"),
        ("warmup(2)", "warmup(2)"),
        ("step(5,.5)", "step(5, 0.5)"),
        ("constant",) * 2,
    ],
)
def test_equal_schedules_are_written_alike(text: str, written: str) -> None:
    assert canonical_schedule(text) == written == canonical_schedule(written)


@pytest.mark.parametrize(
    "text", [" ", "linear", "step", "step(0, 0.1)", "step(5, 2)", "cosine + warmup(2)", "+ cosine", "warmup(2) +"]
)
def test_other_schedules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        canonical_schedule(text)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_travel_is_the_way_under_a_gradient_of_one(momentum: float) -> None:
    training = Training(lr=0.25, momentum=momentum)
    params = torch.zeros(1, dtype=torch.float64)
    memory = optim.new_memory(training, params)
    for steps in range(1, 8):
        optim.update(training, training.lr, params, torch.ones_like(params), memory)
        assert optim.travel(training, steps) == pytest.approx(-float(params), rel=1e-12)
    assert optim.travel(Training(optimizer="adam"), 3) != optim.travel(Training(optimizer="adam"), 3)  # nan


def replies(examples: list[int], first: int) -> Replies:
    """Clients with recognisable numbers: client c has the model (c, c^2) and the buffers c and 10 - c."""
    clients = torch.arange(first, first + len(examples))
    c = clients.double()
    params = torch.stack([c, c.square()], 1)
    buffers = {"mean": c[:, None], "count": 10 - clients}
    return Replies(clients, torch.tensor(examples), clients + 1, c / 2, c, params, buffers, {})


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("sizes", [(3, 1), (20, 2)], ids=["two chunks", "more clients than are summed at once"])
def test_a_fold_is_the_average_by_hand(uniform: bool, sizes: tuple[int, int]) -> None:
    examples = [5 + 3 * (c % 4) for c in range(sum(sizes))]
    chunks = [replies(examples[: sizes[0]], 0), replies(examples[sizes[0] :], sizes[0])]
    got = fold(
        chunks,
        mean=lambda r: {"model": r.params},
        uniform=uniform,
        total=lambda r: {"model": r.params},
        rows=lambda r: {"first": r.params[:, 0]},
    )
    whole = Replies.stack(chunks)
    by_examples = torch.tensor(examples).double() / sum(examples)
    shares = torch.full_like(by_examples, 1 / len(examples)) if uniform else by_examples
    assert_near(State(got.mean["model"], {}), State(shares @ whole.params, {}))
    assert_near(State(got.total["model"], {}), State(whole.params.sum(0), {}))
    assert distance(got.buffers["mean"], by_examples @ whole.buffers["mean"]) < 1e-12  # by examples, however models are
    assert got.buffers["count"] == 10  # the largest counter
    assert got.rows["first"].tolist() == got.clients.tolist() == list(range(len(examples)))
    assert distance(got.weigh(got.travel), by_examples @ whole.travel) < 1e-12


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        fold,
        models_weighted_uniformly=("ones if uniform else chunk.examples", "ones if True else chunk.examples"),
        uniform_weights_by_examples=(
            "ones if uniform else chunk.examples",
            "chunk.examples if uniform else chunk.examples",
        ),
        buffers_weighted_uniformly=(
            "floating.add(..., chunk.examples)",
            "floating.add(..., ones)",
        ),
        weights_not_renormalised=("len(examples) if uniform else examples.sum()", "len(examples)"),
    ),
    *mutants(
        _Totals.raise_to,
        smallest_integer_buffer=("value.amax(0)", "value.amin(0)"),
        smallest_integer_buffer_of_chunks=("torch.maximum", "torch.minimum"),
    ),
    *mutants(
        Folded.weigh,
        travel_averaged_uniformly=("self.examples.to(values.dtype)", "torch.ones_like(values)"),
    ),
    *mutants(
        optim.update,
        sgd_ascends=("alpha=-lr", "alpha=lr"),
        no_momentum=("memory['velocity'].mul_(training.momentum)", "memory['velocity'].mul_(0.0)"),
        rate_as_a_tensor_ascends=("params.sub_(grad * lr)", "params.add_(grad * lr)"),
        rate_as_a_tensor_dropped=("grad * lr", "grad"),
        adam_without_first_correction=("memory['first'] / (1 - ADAM_BETA1 ** count)", "memory['first']"),
        adam_without_second_correction=("memory['second'] / (1 - ADAM_BETA2 ** count)", "memory['second']"),
        adam_first_moment_swapped=("1 - ADAM_BETA1", "ADAM_BETA1"),
        adam_second_moment_swapped=("1 - ADAM_BETA2", "ADAM_BETA2"),
        adamw_without_decay=("decayed is not None", "False"),
    ),
    *mutants(
        Training._scheduled,
        warm_up_is_full_at_once=("t + 1", "t + 2"),
        cosine_turned=("1 + math.cos(...)", "1 - math.cos(...)"),
        cosine_ends_late=("self.schedule_rounds - warmup", "self.schedule_rounds"),
        steps_ignore_warm_up=("(t - warmup) // every", "t // every"),
    ),
    *mutants(
        optim.travel,
        count_forgets_momentum=("training.momentum * count + 1", "1"),
        count_never_forgets=("training.momentum * count", "count"),
        travel_counts_steps=("training.lr * count", "training.lr"),
        travel_without_rate=("training.lr * count", "count"),
    ),
    *mutants(
        local_step,
        weight_decay_sign=("alpha=training.weight_decay", "alpha=-training.weight_decay"),
        adamw_decays_the_gradient=("training.weight_decay and decayed is None", "training.weight_decay"),
        adamw_decays_the_frozen=("decayed.masked_fill(net.mask(training.frozen), 0.0)", "decayed"),
        no_correction=("grad = objective.correct(grad, carry.params, start.params, shared, own)", "pass"),
    ),
]
