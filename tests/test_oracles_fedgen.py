"""Card 10, FedGen: what must come out, known without running a federation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

import fnrfl
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fedgen import FedGen, Generated, edges, teaching
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.generator import (
    Generator,
    _normed,
    descend,
    diversity,
    holders,
    labelled,
    proportional,
    standardised,
    weighted,
)
from fnrfl.core import optim
from fnrfl.core.algorithm import Objective, class_indicator
from fnrfl.core.errors import ConfigError
from fnrfl.core.net import Model
from fnrfl.core.rng import generator
from fnrfl.core.step import Carry
from fnrfl.core.types import Batch, State, Training, Tree
from mutants import mutants
from toys import NUM_CLASSES, SIZES, Run, World, assert_same, classification, distance

ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])
EPOCHS = classification().training.epochs


def rand(*shape: int, of: str = "numbers") -> Tensor:
    return torch.rand(*shape, generator=generator(0, of, shape), dtype=torch.float64)


def without(label: int) -> World:
    """The classification world in which nobody has a label."""
    world = classification()
    x, y = world.pool._parts["private"]
    world.pool._parts["private"] = x, torch.where(y == label, (label + 1) % NUM_CLASSES, y)
    return world


def histograms(world: World) -> Tensor:
    """[N, C]."""
    _, y = world.pool._parts["private"]
    return torch.stack([torch.bincount(y[shard], minlength=NUM_CLASSES) for shard in world.pool.shards]).double()


class Watched:
    """What every step of the generator was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heads: list[Tensor] = []
        self.shares: list[Tensor] = []
        self.noise: list[Tensor] = []
        self.y: list[Tensor] = []
        inner = FedGen._loss

        def loss(fedgen: FedGen, net: Any, maker: Any, statistics: Any, *given: Tensor) -> tuple[Tensor, Tree]:
            for into, value in zip((self.heads, self.shares, self.noise, self.y), given, strict=False):
                into.append(value)
            return inner(fedgen, net, maker, statistics, *given)

        monkeypatch.setattr(FedGen, "_loss", loss)


# -- identities -------------------------------------------------------------------------------------------------------


@ENGINES
def test_card10_without_weights_it_is_fedavg_bit_for_bit(engine: str) -> None:
    """The generator learns all the same: its numbers come from streams of their own."""
    neutral, bare = Run(FedGen(a=0.0, b=0.0), engine), Run(FedAvg(), engine)
    assert_same(neutral.rounds(3), bare.rounds(3))
    assert neutral.state.extra["adam.count"] == 3 * 50


@ENGINES
def test_card10_the_first_round_is_fedavg(engine: str) -> None:
    """And the second is not, with either term."""
    for algorithm in (FedGen(a=10.0), FedGen(a=0.0, b=10.0)):
        played, bare = Run(algorithm, engine), Run(FedAvg(), engine)
        assert_same(played.round(), bare.round())
        assert distance(played.round().params, bare.round().params) > 1e-6


def test_card10_the_average_is_by_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Run(FedGen(a=5.0))
    played.rounds(2)
    replies = played.replies()
    p = replies.examples / replies.examples.sum()
    assert distance(played.state.params, p @ replies.params) < 1e-12


# -- the server -------------------------------------------------------------------------------------------------------


def test_card10_weights_of_heads_sum_to_one_for_every_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """W[y, i] = cnt_i[y] / sum_j cnt_j[y], cnt = epochs * histogram + 1, over the cohort."""
    watched, played = Watched(monkeypatch), Run(FedGen())
    played.round()
    count = EPOCHS * histograms(played.world)[played.cohort(0)] + 1
    assert distance(watched.shares[0], count / count.sum(0)) < 1e-15
    assert distance(watched.shares[0].sum(0), torch.ones(NUM_CLASSES).double()) < 1e-15
    assert len(watched.shares) == 50


def test_card10_every_example_has_its_own_weight() -> None:
    """CE = (2, 10), W = (1, 0): 1.0, where a mean taken before weighting gives 3.0."""
    assert weighted(torch.tensor([2.0, 10.0]), torch.tensor([1.0, 0.0])) == 1.0
    with pytest.raises(ValueError, match="one weight per loss"):
        weighted(torch.tensor([2.0, 10.0]), torch.tensor([[1.0], [0.0]]))
    margin = torch.tensor([2.0, 10.0]).double().expm1().log()  # log(1 + e^margin) is the loss
    logits = torch.stack([torch.tensor([-margin[0], 0.0]), torch.tensor([0.0, -margin[1]])]).double()
    y, shares = torch.tensor([0, 1]), torch.tensor([[1.0, 0.0]]).double()
    assert float(teaching(logits[None], shares, y)) == pytest.approx(1.0, abs=1e-12)


def test_card10_teaching_is_the_sum_over_heads() -> None:
    logits, shares, y = rand(3, 5, 4), rand(3, 4, of="shares"), torch.tensor([0, 3, 1, 1, 2])
    loops = sum(
        shares[i, y[b]] * cross_entropy(logits[i, b : b + 1], y[b : b + 1]) / 5 for i in range(3) for b in range(5)
    )
    assert float(teaching(logits, shares, y)) == pytest.approx(float(loops), abs=1e-12)


def test_card10_the_generators_loss_is_the_formula() -> None:
    """sum_i mean_b W[y_b, i] CE(head_i(G(u, y_b)), y_b) + eta L_div, with G in train mode."""
    net, maker = Run(FedAvg()).net, Generator(NUM_CLASSES, 3, 8, (16,))
    heads, shares = rand(2, 16 * NUM_CLASSES + NUM_CLASSES, of="heads"), rand(2, NUM_CLASSES, of="shares")
    weights, statistics = maker.new(generator(0, "weights"), torch.zeros((), dtype=torch.float64))
    noise, y = rand(6, 3), torch.arange(6) % 4
    loss, after = FedGen(diversity=0.7)._loss(net, maker, statistics, heads, shares, noise, y, weights)
    made, expected = maker(weights, statistics, noise, y, training=True)
    logits = torch.stack([made @ h[:64].view(4, 16).T + h[64:] for h in heads])
    assert float(loss) == pytest.approx(float(teaching(logits, shares, y) + 0.7 * diversity(made, noise)), abs=1e-12)
    assert all(torch.equal(after[k], expected[k]) and not torch.equal(after[k], statistics[k]) for k in statistics)


def test_card10_one_participant_teaches_plain_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, played = Watched(monkeypatch), Run(FedGen())
    played.round(torch.tensor([4]))
    assert torch.equal(watched.shares[0], torch.ones(1, NUM_CLASSES).double())
    logits, y = rand(6, 4), torch.arange(6) % 4
    assert float(teaching(logits[None], watched.shares[0], y)) == pytest.approx(
        float(cross_entropy(logits, y)), abs=1e-12
    )


def test_card10_the_generator_learns_from_fresh_heads_with_uniform_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the average; noise uniform in [0, 1); labels uniform."""
    watched, played = Watched(monkeypatch), Run(FedGen(batch=64))
    played.round()
    assert torch.equal(watched.heads[-1], played.replies().params[:, played.net.head_slice])
    noise, y = torch.cat(watched.noise), torch.cat(watched.y)
    assert 0 <= noise.min() < 0.01 and 0.99 < noise.max() < 1
    assert float(noise.mean()) == pytest.approx(0.5, abs=0.01)
    assert (torch.bincount(y) / len(y) - 0.25).abs().max() < 0.03


def test_card10_only_labels_that_somebody_has_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, played = Watched(monkeypatch), Run(FedGen(), world=without(2))
    played.round()
    assert set(torch.cat(watched.y).tolist()) == {0, 1, 3}
    assert played.state.extra["labels"].tolist() == [1, 1, 0, 1]
    played.round()
    assert distance(played.tasks("local")[0].shared["labels"], torch.tensor([1, 2, 2, 3]).double() / 3) < 1e-15


def test_card10_labels_learnt_from_earlier_cohorts_stay_known() -> None:
    played = Run(FedGen(), world=without(2))
    played.round()
    extra = played.state.extra | {"labels": torch.tensor([0.0, 0.0, 1.0, 0.0]).double()}
    played.state = State(played.state.params, played.state.buffers, extra)
    assert played.round().extra["labels"].tolist() == [1, 1, 1, 1]


def test_card10_labels_are_drawn_evenly_from_those_there_are() -> None:
    ends = edges(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]))
    drawn = labelled(ends, (torch.arange(1000) + 0.5) / 1000)
    assert torch.bincount(drawn, minlength=5).tolist() == [0, 500, 0, 500, 0]
    assert labelled(ends, torch.tensor([0.0, 1 - 2**-24])).tolist() == [1, 3]  # the whole of [0, 1)
    assert torch.equal(edges(torch.zeros(4)), torch.tensor([0.25, 0.5, 0.75, 1.0]))


# -- the generator ----------------------------------------------------------------------------------------------------


def as_modules(maker: Generator, weights: Tensor) -> nn.Sequential:
    """The same net of torch's own layers."""
    layers = maker._layers(weights)
    first, norm = nn.Linear(maker.noise + maker.num_classes, maker.hidden, bias=False), nn.BatchNorm1d(maker.hidden)
    last = nn.Linear(maker.hidden, maker.shape[0])
    made = nn.Sequential(first, norm, nn.ReLU(), last).double()
    with torch.no_grad():
        for parameter, name in zip(made.parameters(), ("in", "scale0", "shift0", "out", "bias"), strict=True):
            parameter.copy_(layers[name])
    return made


def test_card10_the_generator_is_what_torch_would_build() -> None:
    """fc, BatchNorm, ReLU, fc: batch statistics and new running ones in training, running ones otherwise."""
    maker = Generator(4, 3, 8, (5,), "linear")
    weights, statistics = maker.new(generator(0, "weights"), torch.zeros((), dtype=torch.float64))
    assert maker.size == len(weights) == (3 + 4) * 8 + 2 * 8 + 8 * 5 + 5
    weights = weights + 0.3 * rand(len(weights))  # no scale of one and no bias of zero
    modules, noise, y = as_modules(maker, weights), rand(16, 3), torch.arange(16) % 4
    for training in (True, True, False):
        made, statistics = maker(weights, statistics, noise, y, training=training)
        expected = modules.train(training)(torch.cat([noise, class_indicator(y, 4)], 1))
        assert distance(made, expected.detach()) < 1e-12
        assert distance(statistics["0.mean"], modules[1].running_mean) < 1e-12
        assert distance(statistics["0.var"], modules[1].running_var) < 1e-12
    assert made.min() < 0
    assert torch.equal(replace(maker, end="relu")(weights, statistics, noise, y, training=False)[0], made.relu())


def test_card10_diversity_is_the_mean_over_pairs() -> None:
    made, noise = rand(6, 5), rand(6, 3)
    pairs = sum(
        (made[a] - made[b]).abs().mean() * (noise[a] - noise[b]).square().mean() for a in range(6) for b in range(6)
    )
    assert float(diversity(made, noise)) == pytest.approx(float((-pairs / 36).exp()), abs=1e-12)
    assert diversity(made[:1].expand(6, -1), noise) == 1  # noise without any effect is the worst


def test_card10_the_generator_learns_a_fixed_head_and_minds_the_label() -> None:
    """Its loss falls, what it makes is classified as asked, and means over noise differ between labels."""
    fedgen = FedGen()
    played = Run(fedgen)
    net, maker = played.net, Generator(NUM_CLASSES, 16, 64, (played.net.num_features,))
    heads, shares = net.flatten()[0][net.head_slice][None], torch.ones(1, NUM_CLASSES).double()
    weights, statistics = maker.new(generator(0, "weights"), torch.zeros((), dtype=torch.float64))
    training, stream = Training(optimizer="adam", lr=1e-2, weight_decay=0.0), generator(0, "steps")
    learnt, losses = Carry(weights, statistics, optim.new_memory(training, weights)), list[float]()
    for _ in range(100):
        noise, y = torch.rand(32, 16, generator=stream).double(), torch.randint(NUM_CLASSES, (32,), generator=stream)
        value = descend(
            training, training.lr, learnt,
            lambda w, s=statistics, u=noise, y=y: fedgen._loss(net, maker, s, heads, shares, u, y, w),
        )  # fmt: skip
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
    made = [maker(weights, statistics, rand(64, 16), torch.full((64,), y), training=False)[0] for y in range(4)]
    assert all((net.head(heads[0], made[y]).argmax(1) == y).double().mean() > 0.9 for y in range(4))
    means = torch.stack([m.mean(0) for m in made])
    assert all((means[a] - means[b]).abs().max() > 0.1 for a in range(4) for b in range(a))


def test_card10_adam_goes_on_from_round_to_round_with_a_falling_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Training] = []
    monkeypatch.setattr(
        "fnrfl.algorithms.fedgen.descend", lambda adam, *rest: seen.append(adam) or descend(adam, *rest)
    )
    played = Run(FedGen(steps=4, lr=1e-3, decay=0.5, weight_decay=0.01))
    played.rounds(3)
    assert [s.lr for s in seen] == [1e-3] * 4 + [5e-4] * 4 + [2.5e-4] * 4
    assert {s.weight_decay for s in seen} == {0.01}
    assert played.state.extra["adam.count"] == 12


def test_card10_weight_decay_enters_the_generators_gradient() -> None:
    weights = rand(5)
    expected = weights - 0.1 * (2 * weights + 0.3 * weights)
    sgd = Training(lr=0.1, momentum=0.0, weight_decay=0.3)
    descend(sgd, sgd.lr, Carry(weights, {}, {}), lambda w: (w.square().sum(), {}))
    assert distance(weights, expected) < 1e-15


# -- the clients ------------------------------------------------------------------------------------------------------


def local_loss(a: float, b: float, size: int = 24) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradient) of the objective, and those of the formula with torch's own layers and losses."""
    played = Run(FedGen(noise=3, hidden=8))
    played.rounds(2)
    net, shared = played.net, dict(played.tasks("local")[0].shared)
    shared |= {"a": torch.tensor(a).double(), "b": torch.tensor(b).double()}
    x, y = played.world.pool.take("public", torch.arange(16))
    objective = Generated(size, 3, 8, "relu", b > 0)
    noise = {k: rand(*shape, of=k) for k, shape in objective.noise(16).items()}
    params = played.state.params.clone().requires_grad_()
    model = Model(net, played.state, played.state.buffers, {}, "frozen")
    out = model(params, x)
    loss = objective.loss(out, model, params, Batch(x, y, torch.arange(16), noise), shared, {})
    (grad,) = torch.autograd.grad(loss, params)

    maker = Generator(NUM_CLASSES, 3, 8, (net.num_features,))
    modules = as_modules(maker, shared["generator"])
    modules[1].running_mean, modules[1].running_var = shared["generator.0.mean"], shared["generator.0.var"]
    modules = modules.eval().requires_grad_(False)
    make = lambda u, y: modules(torch.cat([u, class_indicator(y, NUM_CLASSES)], 1)).relu()  # noqa: E731
    label = (noise["generated.label"] * NUM_CLASSES).long()  # everybody has all labels
    logits = net.apply(params, played.state.buffers, x, mode="frozen")[0].logits
    head = net.unflatten(params)
    answer = lambda f: f @ head["head.weight"].T + head["head.bias"]  # noqa: E731
    expected = cross_entropy(logits, y) + size / 16 * a * cross_entropy(answer(make(noise["generated"], label)), label)
    if b:
        target = answer(make(noise["generated.view"], y)).softmax(-1).detach()
        expected = expected + b * kl_div(logits.log_softmax(-1), target, reduction="batchmean")
    return loss.detach(), grad, expected.detach(), torch.autograd.grad(expected, params)[0]


@pytest.mark.parametrize(("a", "b"), [(0.0, 0.0), (3.0, 0.0), (3.0, 2.0)])
def test_card10_the_local_loss_is_the_formula(a: float, b: float) -> None:
    """CE + (B_g / B) a CE(head(G(y~)), y~) + b KL(head(G(y)), without gradient, || model(x))."""
    loss, grad, expected, slope = local_loss(a, b)
    assert distance(loss, expected) < 1e-12
    assert distance(grad, slope) < 1e-12


def test_card10_generated_features_train_the_head_alone() -> None:
    """The term of a reaches no other layer."""
    with_it, without_it = local_loss(3.0, 0.0)[1], local_loss(0.0, 0.0)[1]
    where = Run(FedGen()).net.head_slice
    moved = with_it != without_it
    assert moved[where].any()
    assert not torch.cat([moved[: where.start], moved[where.stop :]]).any()


def test_card10_weights_fade_to_a_floor() -> None:
    """a_t = max(a_0 0.98^t, 1e-4), 0 in the first round; a smaller a_0 is not raised."""
    played = Run(FedGen(a=10.0, b=4e-4, decay=0.5, steps=1))
    got = []
    for _ in range(5):
        played.round()
        shared = played.tasks("local")[0].shared
        got.append((float(shared["a"]), float(shared["b"])))
    assert got == [(0, 0), (5, 2e-4), (2.5, 1e-4), (1.25, 1e-4), (0.625, 1e-4)]
    tiny = Run(FedGen(a=1e-5, steps=1))
    tiny.rounds(2)
    assert float(tiny.tasks("local")[0].shared["a"]) == pytest.approx(1e-5)


# -- traffic, FNR, refusals -------------------------------------------------------------------------------------------


def test_card10_traffic() -> None:
    """Down a model and the generator, its statistics and where labels end; up a model and C counts."""
    played = Run(FedGen(noise=5, hidden=7))
    for _ in range(2):
        played.round()
        params, buffers = played.net.flatten()
        model = 4 * len(params) + sum(b.numel() * (4 if b.is_floating_point() else 8) for b in buffers.values())
        F, C = played.net.num_features, NUM_CLASSES
        G = (5 + C) * 7 + 2 * 7 + 7 * F + F
        assert played.metered.bytes["local"]["down"] == 4 * (model + 4 * (G + 2 * 7 + C))
        assert played.metered.bytes["local"]["up"] == 4 * model
        assert played.metered.bytes["measure"] == {"down": 0, "up": 4 * 4 * C, "headers": 0}


def test_card10_under_fnr_refined_heads_teach_and_public_examples_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    fnr, bare = Run(FNR(FedGen())), Run(FedGen())
    fnr.round()
    heads, shares = watched.heads[0], watched.shares[0]
    refined, cohort = fnr.replies("refine"), fnr.cohort(0).tolist()
    rows = [cohort.index(c) for c in refined.clients.tolist()]
    assert len(rows) == 2
    assert torch.equal(heads[rows], refined.params[:, fnr.net.head_slice])
    assert all(type(task.objective.inner) is Objective for task in fnr.tasks("refine"))  # without a and b
    bare.round()
    assert torch.equal(watched.shares[-1], shares)
    assert not torch.equal(watched.heads[-1][rows], heads[rows])
    assert torch.equal(
        watched.heads[-1][[i for i in range(4) if i not in rows]], heads[[i for i in range(4) if i not in rows]]
    )


@pytest.mark.parametrize(
    "bad", [{"a": -1.0}, {"b": -1.0}, {"batch": 1}, {"decay": 0.0}, {"features": "tanh"}, {"noise": 0}]
)
def test_card10_bad_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        fnrfl.run("digits", out=None, rounds=1, algorithm={"name": "fedgen", **bad})


def test_card10_clients_differ_in_this_world() -> None:
    """Of the instruments above: weights by label are not weights by examples."""
    shares = histograms(classification()) / torch.tensor(SIZES).double()[:, None]
    assert (shares - shares.mean(0)).abs().max() > 0.02


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        FedGen.round,
        average_sign=("state.params + got.mean['moved']", "state.params - got.mean['moved']"),
        average_forgets_refinement=("r.params - state.params", "r.trained - state.params"),
        heads_before_refinement=("r.params[:, net.head_slice]", "r.trained[:, net.head_slice]"),
        generator_on_the_first_round=("extra['labels'].amax()", "torch.ones_like(extra['labels'].amax())"),
        weights_never_fade=("max(weight * fade, min(weight, FLOOR))", "weight"),
        no_floor=(
            "extra['labels'].amax() * max(weight * fade, min(weight, FLOOR))",
            "extra['labels'].amax() * weight * fade",
        ),
        floor_raises=("min(weight, FLOOR)", "FLOOR"),
        rate_never_falls=("self.lr * fade", "self.lr"),
    ),
    *mutants(
        Generated.loss,
        no_generated_features=("shared['a'] * self.size / batch.count", "0.0"),
        generated_sign=(
            "... + shared['a'] * self.size / batch.count * made",
            "... - shared['a'] * self.size / batch.count * made",
        ),
        generated_not_per_batch=("shared['a'] * self.size / batch.count", "shared['a']"),
        agreement_sign=("loss + ...", "loss - ..."),
        agreement_weight_dropped=(
            "shared['b'] * batch.mean((view.exp() * (view - out.logits.log_softmax(-1))).sum(-1))",
            "batch.mean((view.exp() * (view - out.logits.log_softmax(-1))).sum(-1))",
        ),
        agreement_turned_round=("view - out.logits.log_softmax(-1)", "out.logits.log_softmax(-1) - view"),
        agreement_with_gradient=(
            "net.head(head.detach(), ...).log_softmax(-1).detach()",
            "net.head(head, ...).log_softmax(-1)",
        ),
        agreement_of_other_labels=(
            "make(batch.noise['generated.view'], batch.y)",
            "make(batch.noise['generated.view'], batch.y * 0)",
        ),
        local_generator_in_train_mode=("training=False", "training=True"),
    ),
    *mutants(
        teaching,
        heads_weighted_alike=("shares[:, y]", "torch.ones_like(shares[:, y])"),
        heads_averaged=(
            "weighted(cross_entropy(logits, y.expand(len(logits), -1)), shares[:, y]).sum",
            "weighted(cross_entropy(logits, y.expand(len(logits), -1)), shares[:, y]).mean",
        ),
    ),
    *mutants(
        FedGen._taught,
        weights_over_labels=("seen.sum(0)", "seen.sum(1, keepdim=True)"),
        counts_not_smoothed=("engine.training.epochs * counts + 1", "engine.training.epochs * counts"),
        counts_of_one_epoch=("engine.training.epochs * counts", "counts"),
        all_labels_generated=("(counts.amax(0) > 0).to(counts.dtype)", "torch.ones_like(counts[0])"),
        labels_forgotten=("torch.maximum(extra['labels'], held)", "held"),
        gaussian_noise=("torch.rand(self.batch, n, generator=stream)", "torch.randn(self.batch, n, generator=stream)"),
    ),
    *mutants(
        FedGen._loss,
        diversity_sign=("teaching(logits, shares, y) + ...", "teaching(logits, shares, y) - ..."),
        no_diversity=(
            "teaching(logits, shares, y) + self.diversity * diversity(made, noise)",
            "teaching(logits, shares, y)",
        ),
        generator_in_eval_mode=("training=True", "training=False"),
    ),
    *mutants(
        Generator.__call__,
        also="tests/test_oracles_fedftg.py",
        label_ignored=("[noise, hot]", "[noise, 0 * hot]"),
        noise_ignored=("[noise, hot]", "[0 * noise, hot]"),
    ),
    *mutants(
        Generator._body,
        also="tests/test_oracles_fedftg.py",
        no_hidden_relu=("h.relu()", "h"),
    ),
    *mutants(
        Generator._ended,
        also="tests/test_oracles_fedftg.py",
        no_last_relu=("made.relu()", "made"),
    ),
    *mutants(
        standardised,
        also="tests/test_oracles_fedftg.py",
        statistics_keep_the_new=(
            "torch.lerp(old_mean, mean.detach(), BATCHNORM_MOMENTUM)",
            "torch.lerp(old_mean, mean.detach(), 1 - BATCHNORM_MOMENTUM)",
        ),
        variance_biased=("var.detach() * count / (count - 1)", "var.detach()"),
    ),
    *mutants(
        _normed,
        also="tests/test_oracles_fedftg.py",
        no_shift=(
            "h * layers[f'scale{i}'].view(across) + layers[f'shift{i}'].view(across)",
            "h * layers[f'scale{i}'].view(across)",
        ),
    ),
    *mutants(
        descend,
        also="tests/test_oracles_fedftg.py",
        decay_sign=("training.weight_decay", "-training.weight_decay"),
    ),
    *mutants(
        diversity,
        also="tests/test_oracles_fedftg.py",
        diversity_sign=(
            "-(apart * (noise[:, None] - noise).square().mean(-1)).mean()",
            "(apart * (noise[:, None] - noise).square().mean(-1)).mean()",
        ),
        diversity_without_noise=("apart * (noise[:, None] - noise).square().mean(-1)", "apart"),
        diversity_of_absolute_noise=("(noise[:, None] - noise).square", "(noise[:, None] - noise).abs"),
        diversity_not_per_coordinate=(
            "torch.cdist(flat, flat, p=1.0) / flat.shape[1]",
            "torch.cdist(flat, flat, p=1.0)",
        ),
    ),
    *mutants(
        weighted,
        also="tests/test_oracles_fedftg.py",
        weight_after_the_mean=("(each * weights).mean(-1)", "each.mean(-1) * weights.mean(-1)"),
    ),
    *mutants(
        holders,
        also="tests/test_oracles_fedftg.py",
        holders_over_labels=("counts.sum(0)", "counts.sum(1, keepdim=True)"),
    ),
    *mutants(
        proportional,
        also="tests/test_oracles_fedftg.py",
        labels_sorted=("labelled(edges, ...)[...]", "labelled(edges, ...)"),
    ),
    *mutants(
        labelled,
        also="tests/test_oracles_fedftg.py",
        labels_at_the_edge=("at[:, None] >= edges", "at[:, None] > edges"),
    ),
]
