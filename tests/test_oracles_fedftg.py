"""Card 7, FedFTG: what must come out, known without running a federation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fnrfl
from fnrfl.algorithms import fedftg
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fedftg import Ensembled, FedFTG, disagreement, ensemble
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.generator import ConvGenerator, Generator, diversity, holders, proportional
from fnrfl.core import trees
from fnrfl.core.algorithm import class_indicator
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.core.net import Model, Net
from fnrfl.core.rng import generator
from fnrfl.core.types import Batch, State
from mutants import mutants
from toys import NUM_CLASSES, Plain, Run, assert_near, assert_same, classification, distance

SMALL = {"iterations": 3, "batch": 12, "noise": 5, "hidden": 8}
BUFFERS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


def randn(*shape: int, of: str = "numbers") -> Tensor:
    return torch.randn(*shape, generator=generator(0, of, shape), dtype=torch.float64)


def histograms(run: Run) -> Tensor:
    """[N, C]."""
    _, y = run.world.pool._parts["private"]
    return torch.stack([torch.bincount(y[shard], minlength=NUM_CLASSES) for shard in run.world.pool.shards]).double()


class Watched:
    """Every call of one of the module's functions: arguments before it, and what it gave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.gave: list[Any] = []
        inner = getattr(fedftg, name)

        def call(*given: Any) -> Any:
            self.calls.append(given)
            self.gave.append(inner(*given))
            return self.gave[-1]

        monkeypatch.setattr(fedftg, name, call)


# -- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("off", [{"iterations": 0}, {"student_steps": 0}, {"lr": 0.0}], ids=str)
def test_card7_without_tuning_it_is_fedavg_bit_for_bit(off: dict[str, Any], engine: str) -> None:
    """Buffers too."""
    assert_same(Run(FedFTG(**SMALL | off), engine).rounds(3), Run(FedAvg(), engine).rounds(3))


def test_card7_a_cohort_of_one_has_nothing_to_learn() -> None:
    """alpha = 1, q = the teacher, who is the student: its gradient is 0, in a net without BatchNorm."""
    world = classification(module=Plain)
    tuned, bare = Run(FedFTG(**SMALL, weight_decay=0.0), world=world), Run(FedAvg(), world=world)
    for t in range(3):
        assert distance(tuned.round(torch.tensor([t])).params, bare.round(torch.tensor([t])).params) < 1e-13


def test_card7_weight_decay_shrinks_the_student() -> None:
    world = classification(module=Plain)
    tuned, bare = Run(FedFTG(**SMALL, weight_decay=0.5, lr=0.1), world=world), Run(FedAvg(), world=world)
    tuned.round(torch.tensor([1]))
    bare.round(torch.tensor([1]))
    norm = bare.state.params.norm()
    assert float(tuned.state.params.norm() / norm) == pytest.approx((1 - 0.1 * 0.5) ** 15, rel=0.1)


def test_card7_the_order_of_participants_changes_nothing() -> None:
    one, other = Run(FedFTG(**SMALL)), Run(FedFTG(**SMALL))
    for _ in range(2):
        cohort = one.cohort(one.t)
        assert_near(one.round(cohort), other.round(cohort.flip(0)))


# -- labels and weights -----------------------------------------------------------------------------------------------


def test_card7_weights_of_teachers_sum_to_one_for_every_label_that_somebody_has() -> None:
    counts = torch.tensor([[3.0, 0.0, 0.0], [1.0, 7.0, 0.0]])
    assert torch.equal(holders(counts), torch.tensor([[0.75, 0.0, 0.0], [0.25, 1.0, 0.0]]))


def test_card7_teachers_count_by_label_over_the_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha^{i,y} = n_i^y / sum_j n_j^y."""
    watched, steps, played = Watched(monkeypatch, "ensemble"), Watched(monkeypatch, "local_step"), Run(FedFTG(**SMALL))
    played.round()
    counts = histograms(played)[played.cohort(0)]
    for i in range(3):
        shares, y = watched.calls[i][2], steps.calls[5 * i][5].y
        assert distance(shares, (counts / counts.sum(0))[:, y]) < 1e-15
        assert distance(shares.sum(0), torch.ones(12).double()) < 1e-15


@pytest.mark.parametrize("counts", [[5, 0, 3, 2], [29, 71], [0, 0, 1], [1, 1, 1]])
@pytest.mark.parametrize("total", [0, 7, 100, 500])
def test_card7_labels_are_in_exact_proportion(counts: list[int], total: int) -> None:
    """Floors of cumulative sums; a class that nobody has is never drawn."""
    edges = [sum(counts[: c + 1]) * total // sum(counts) for c in range(len(counts))]
    expected = [b - a for a, b in zip([0, *edges], edges, strict=False)]
    drawn = proportional(torch.tensor(counts).float(), total, generator(0, "labels"))
    assert torch.bincount(drawn, minlength=len(counts)).tolist() == expected
    if total == 500 and len(counts) > 3:
        assert not torch.equal(drawn, drawn.sort().values)


def test_card7_a_label_nobody_has_is_never_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    world = classification()
    x, y = world.pool._parts["private"]
    world.pool._parts["private"] = x, torch.where(y == 1, 0, y)
    watched, played = Watched(monkeypatch, "local_step"), Run(FedFTG(**SMALL), world=world)
    played.round()
    drawn = torch.cat([call[5].y for call in watched.calls[::5]])
    assert set(drawn.tolist()) == {0, 2, 3}
    counts = histograms(played)[played.cohort(0)].sum(0)
    expected = proportional(counts, 36, generator(0, "any"))
    assert torch.equal(torch.bincount(drawn), torch.bincount(expected))


def test_card7_clients_are_asked_for_their_counts_once() -> None:
    """4 C bytes from a client that takes part for the first time; the generator never leaves the server."""
    played = Run(FedFTG(**SMALL))
    asked: set[int] = set()
    for t in range(4):
        cohort = set(played.cohort(t).tolist())
        played.round()
        up = played.metered.bytes.get("measure", {"up": 0})["up"]
        assert up == len(cohort - asked) * 4 * NUM_CLASSES
        asked |= cohort
        bare = Run(FedAvg())
        bare.round()
        assert played.metered.bytes["local"] == bare.metered.bytes["local"]
    counts = played.state.extra["counts"]
    known = sorted(asked)
    assert torch.equal(counts[known].double(), histograms(played)[known])
    assert (counts[[i for i in range(6) if i not in asked]] == -1).all()


# -- the student ------------------------------------------------------------------------------------------------------


def test_card7_the_students_loss_is_averaged_over_examples_and_classes() -> None:
    """Its gradient by the logits is (softmax(s) - q) / (B C), so 0 where it agrees with the ensemble."""
    net = Run(FedAvg()).net
    logits, teacher = randn(6, 4).requires_grad_(), randn(6, 4, of="teacher")
    state = State(*net.flatten())
    model, batch = Model(net, state, state.buffers, {}, "frozen"), Batch(logits, torch.zeros(6).long(), torch.arange(6))
    out = model(state.params, randn(6, 12))
    for q in (teacher.softmax(-1), logits.detach().softmax(-1)):
        seen = type(out)(out.features, logits, out.projection)
        loss = Ensembled().loss(seen, model, state.params, batch, {"target": q}, {})
        (grad,) = torch.autograd.grad(loss, logits)
        assert distance(grad, (logits.softmax(-1) - q).detach() / 24) < 1e-12
    assert grad.abs().max() < 1e-16


def test_card7_the_ensembles_answer_is_weighted_by_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teachers in eval mode, with their own statistics."""
    watched, played = Watched(monkeypatch, "ensemble"), Run(FedFTG(**SMALL))
    played.round()
    engine, teachers, shares, x = watched.calls[0]
    net, replies = played.net, played.replies()
    expected = torch.zeros(12, NUM_CLASSES).double()
    for m in range(4):
        own = {k: v[m] for k, v in replies.buffers.items()}
        logits = net.apply(replies.params[m], own, x, mode="frozen")[0].logits
        expected += shares[m][:, None] * logits.softmax(-1)
    assert distance(watched.gave[0], expected) < 1e-12
    assert distance(watched.gave[0].sum(1), torch.ones(12).double()) < 1e-12
    first = State(teachers.params[:1], {k: v[:1] for k, v in teachers.buffers.items()})
    one, alone = ensemble(engine, first, torch.ones(1, 12).double(), x), trees.rows(first, 0)
    assert distance(one, net.apply(alone.params, alone.buffers, x, mode="frozen")[0].logits.softmax(-1)) == 0


def test_card7_student_steps_are_plain_gradient_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    """x <- x - lr decay^t (gradient + L2 x), five steps on each of three batches, from the average."""
    played = Run(FedFTG(**SMALL, lr=0.3, decay=0.5))
    played.round()
    watched = Watched(monkeypatch, "local_step")
    before = played.state
    played.round()
    assert len(watched.calls) == 15
    net, replies = played.net, played.replies()
    p = replies.examples / replies.examples.sum()
    x = (before.params + p @ (replies.params - before.params)).requires_grad_()
    for call in watched.calls:
        batch, target = call[5], call[6]["target"]
        logits = net.apply(x, played.state.buffers, batch.x, mode="batch", masks=batch.noise)[0].logits
        loss = -(target * logits.log_softmax(-1)).sum() / (12 * NUM_CLASSES)
        (grad,) = torch.autograd.grad(loss, x)
        x = (x - 0.15 * (grad + 1e-3 * x)).detach().requires_grad_()
    assert distance(played.state.params, x.detach()) < 1e-12


def test_card7_tuning_brings_the_average_nearer_to_the_ensemble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step, and never past the entropy of the ensemble's answer, the loss of whoever agrees."""
    watched = Watched(monkeypatch, "local_step")
    Run(FedFTG(**SMALL | {"iterations": 1, "student_steps": 20}, lr=1.0, weight_decay=0.0, batchnorm="frozen")).round()
    q = watched.calls[0][6]["target"]
    losses = [*watched.gave, -(q * q.log()).mean()]
    assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False))


def test_card7_statistics_of_the_student_stay_those_of_the_average_unless_asked() -> None:
    bare = Run(FedAvg()).rounds(1)
    frozen, batch, updating = (Run(FedFTG(**SMALL, batchnorm=b)).rounds(1) for b in ("frozen", "batch", "updating"))
    assert all(torch.equal(frozen.buffers[k], bare.buffers[k]) for k in BUFFERS)
    assert all(torch.equal(batch.buffers[k], bare.buffers[k]) for k in BUFFERS)
    assert all(not torch.equal(updating.buffers[k], bare.buffers[k]) for k in BUFFERS)
    assert distance(frozen.params, batch.params) > 0


# -- the generator ----------------------------------------------------------------------------------------------------


def test_card7_disagreement_is_l1_of_logits_or_kl() -> None:
    s, t = randn(5, 4).requires_grad_(), randn(5, 4, of="teacher").requires_grad_()
    assert distance(disagreement("l1", s, t).detach(), (s - t).detach().abs().sum(1) / 4) < 1e-12
    p, q = s.softmax(-1), t.softmax(-1)
    assert distance(disagreement("kl", s, t).detach(), (p * (p / q).log()).sum(1).detach()) < 1e-12
    assert torch.autograd.grad(disagreement("l1", s, t).sum(), t, allow_unused=True)[0] is None
    assert torch.autograd.grad(disagreement("kl", s, t).sum(), t)[0].abs().max() > 0


@pytest.mark.parametrize("kind", ["l1", "kl"])
def test_card7_the_generators_loss_is_the_formula(kind: Any) -> None:
    """-L_md + l_cls L_cls + l_dis L_dis / m, each example with its own weight."""
    ftg = FedFTG(**SMALL, disagreement=kind, classify=0.7, diversity=0.3)
    net = Run(FedAvg(), world=classification(module=Plain)).net
    params = net.flatten()[0]
    student, teacher = State(params, {}), State(params + 0.3 * randn(len(params)), {})
    maker = Generator(NUM_CLASSES, 5, 8, (12,), "unit")
    weights, statistics = maker.new(generator(0, "weights"), torch.zeros((), dtype=torch.float64))
    z, y, share = randn(6, 5), torch.arange(6) % 4, torch.tensor([1.0, 0.0, 0.5, 0.25, 0.0, 1.0]).double()
    loss, new = ftg._harder(net, maker, statistics, (student, teacher), share, z, y, 4, weights)
    x, expected_new = maker(weights, statistics, z, y, training=True)
    s, t = (net.apply(model.params, {}, x, mode="frozen")[0].logits for model in (student, teacher))
    expected = 0.3 * diversity(x, z) / 4
    for b in range(6):
        gap = (
            (s[b] - t[b]).abs().mean()
            if kind == "l1"
            else (s[b].softmax(0) * (s[b].softmax(0) / t[b].softmax(0)).log()).sum()
        )
        expected = expected + share[b] / 6 * (0.7 * cross_entropy(t[b : b + 1], y[b : b + 1]) - gap)
    assert float(loss) == pytest.approx(float(expected), abs=1e-12)
    assert all(torch.equal(new[k], expected_new[k]) for k in new)


def test_card7_one_generator_step_for_every_participant(monkeypatch: pytest.MonkeyPatch) -> None:
    """I * I_g * m steps of a fresh Adam, whose rate falls; in the order of the clients."""
    watched = Watched(monkeypatch, "descend")
    played = Run(FedFTG(**SMALL, generator_steps=2, decay=0.5))
    played.round(torch.tensor([5, 0, 3]))
    assert len(watched.calls) == 3 * 2 * 3
    assert watched.calls[-1][2].memory["count"] == 18
    order = [5, 0, 3]
    replies = played.replies()
    for call, client in zip(watched.calls, [0, 3, 5] * 6, strict=True):
        _, teacher = call[3].args[3]
        assert torch.equal(teacher.params, replies.params[order.index(client)])
    assert {float(call[1]) for call in watched.calls} == {0.01}
    played.round()
    assert float(watched.calls[-1][1]) == 0.005
    assert watched.calls[-1][2].memory["count"] == 3 * 2 * 4


def test_card7_one_batch_serves_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The student sees the noise and labels that the generator was trained on, made afterwards in eval mode."""
    made, steps = Watched(monkeypatch, "descend"), Watched(monkeypatch, "local_step")
    Run(FedFTG(**SMALL)).round()
    for i in range(3):
        _, maker, *_ = made.calls[4 * i + 3][3].args
        noise, y = made.calls[4 * i + 3][3].args[5:7]
        batches = [call[5] for call in steps.calls[5 * i : 5 * i + 5]]
        assert all(torch.equal(batch.x, batches[0].x) and torch.equal(batch.y, y) for batch in batches)
        if i == 2:  # the weights have not moved since
            generator = made.calls[-1][2]
            x = maker(generator.params, generator.buffers, noise, y, training=False)[0]
            assert torch.equal(x, batches[0].x)


def test_card7_the_generator_hunts_for_disagreement() -> None:
    """With the student fixed and the other terms off, its steps make the two models differ more.

    Not so for l1 as the official code has it, which takes the teacher's answer for constant while both change.
    """
    ftg = FedFTG(classify=0.0, diversity=0.0, noise=5, hidden=8)
    net = Run(FedAvg(), world=classification(module=Plain)).net
    params = net.flatten()[0]
    models = State(params, {}), State(params + 0.3 * randn(len(params)), {})
    maker = Generator(NUM_CLASSES, 5, 8, (12,), "unit")
    weights, statistics = maker.new(generator(0, "weights"), torch.zeros((), dtype=torch.float64))
    z, y, losses = randn(20, 5), torch.arange(20) % 4, []
    adam = fedftg.Training(optimizer="adam", lr=0.01, weight_decay=0.0)
    learnt = fedftg.Carry(weights, statistics, fedftg.optim.new_memory(adam, weights))
    for _ in range(40):
        loss = fedftg.descend(
            adam, adam.lr, learnt,
            lambda w, s=statistics: ftg._harder(net, maker, s, models, torch.ones(20).double(), z, y, 1, w),
        )  # fmt: skip
        losses.append(float(loss))
    assert losses[-1] < 1.5 * losses[0] < 0


def test_card7_images_lie_in_the_range_of_the_data() -> None:
    """unit: in (0, 1), as pixels; standard: mean 0 and variance 1 over a batch, channel by channel."""
    z, y = randn(40, 5), torch.arange(40) % 4
    for kind in (Generator, ConvGenerator):
        unit, standard = (kind(4, 5, 6, (3, 8, 8), end) for end in ("unit", "standard"))
        x = unit(*unit.new(generator(0), torch.zeros((), dtype=torch.float64)), z, y, training=True)[0]
        assert x.shape == (40, 3, 8, 8) and 0 < x.min() < 0.5 < x.max() < 1
        x, _ = standard(*standard.new(generator(0), torch.zeros((), dtype=torch.float64)), z, y, training=True)
        assert x.mean((0, 2, 3)).abs().max() < 1e-12
        assert (x.var((0, 2, 3), correction=0) - 1).abs().max() < 1e-2


def test_card7_the_convolutional_generator_is_what_torch_would_build() -> None:
    """A quarter of the size; twice upsampling, convolution, BatchNorm and LeakyReLU; a convolution and a sigmoid."""
    maker, W = ConvGenerator(4, 5, 3, (2, 13, 16), "unit"), 3
    weights, statistics = maker.new(generator(0, "weights"), torch.zeros((), dtype=torch.float64))
    weights = weights + 0.2 * randn(len(weights))
    modules = nn.Sequential(
        nn.Linear(9, 2 * W * 4 * 4, bias=False), nn.Unflatten(1, (2 * W, 4, 4)), nn.BatchNorm2d(2 * W),
        nn.Upsample((7, 8)), nn.Conv2d(2 * W, 2 * W, 3, padding=1, bias=False), nn.BatchNorm2d(2 * W),
        nn.LeakyReLU(0.2),
        nn.Upsample((13, 16)), nn.Conv2d(2 * W, W, 3, padding=1, bias=False), nn.BatchNorm2d(W), nn.LeakyReLU(0.2),
        nn.Conv2d(W, 2, 3, padding=1), nn.Sigmoid(),
    ).double()  # fmt: skip
    torch.nn.utils.vector_to_parameters(weights, modules.parameters())
    z, y = randn(10, 5), torch.arange(10) % 4
    for training in (True, False):
        x, statistics = maker(weights, statistics, z, y, training=training)
        assert distance(x, modules.train(training)(torch.cat([z, class_indicator(y, 4)], 1)).detach()) < 1e-12
    assert distance(statistics["1.var"], modules[5].running_var) < 1e-12


@pytest.mark.parametrize(("shape", "kind"), [((1, 8, 8), Generator), ((3, 32, 32), ConvGenerator), ((12,), Generator)])
def test_card7_larger_images_get_convolutions(shape: tuple[int, ...], kind: type) -> None:
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 2)), torch.zeros(2, *shape))
    assert type(FedFTG()._maker(net, 2)) is kind
    assert type(FedFTG(generator="dense")._maker(net, 2)) is Generator


# -- FNR and refusals -------------------------------------------------------------------------------------------------


def test_card7_under_fnr_refined_models_teach_and_public_examples_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, "ensemble")
    fnr, bare = Run(FNR(FedFTG(**SMALL))), Run(FedFTG(**SMALL))
    fnr.round()
    teachers, refined, cohort = watched.calls[0][1], fnr.replies("refine"), fnr.cohort(0).tolist()
    assert len(refined.clients) == 2
    for i, client in enumerate(refined.clients.tolist()):
        teacher = trees.rows(teachers, cohort.index(client))
        assert torch.equal(teacher.params, refined.params[i])
        assert all(torch.equal(teacher.buffers[k], v[i]) for k, v in refined.buffers.items())
    bare.round()
    assert torch.equal(fnr.state.extra["counts"], bare.state.extra["counts"])
    assert torch.equal(watched.calls[0][2], watched.calls[3][2])


@pytest.mark.parametrize(
    "bad",
    [{"iterations": -1}, {"batch": 1}, {"lr": -0.1}, {"disagreement": "l2"}, {"images": "tanh"}, {"batchnorm": "off"}],
)
def test_card7_bad_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        fnrfl.run("digits", out=None, rounds=1, algorithm={"name": "fedftg", **bad})


def test_card7_convolutions_are_refused_where_there_are_no_images() -> None:
    with pytest.raises(CompatibilityError, match="makes images, and the examples here have the shape"):
        Run(FedFTG(generator="conv"))


def test_card7_a_student_that_is_not_finite_is_named_with_the_way_out() -> None:
    with pytest.raises(FnrflError, match=r"tuned has numbers that are not finite \(round 1\). Lower algorithm.lr"):
        Run(FedFTG(**SMALL, lr=1e30)).round()


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        FedFTG.round,
        average_sign=("state.params + got.mean['moved']", "state.params - got.mean['moved']"),
        teachers_before_refinement=("State(r.params, r.buffers)", "State(r.trained, r.buffers)"),
        teachers_in_order_of_answers=("got.clients.sort()", "(got.clients, torch.arange(len(got.clients)))"),
        teachers_with_the_averages_statistics=(
            "trees.rows(..., order)",
            "State(trees.rows(..., order).params, {k: torch.stack([v] * len(order)) for k, v in got.buffers.items()})",
        ),
        counts_of_the_wrong_clients=("counts[clients]", "counts[got.clients.flip(0)]"),
    ),
    *mutants(
        Ensembled.loss,
        student_sign=(
            "-(shared['target'] * out.logits.log_softmax(-1)).mean(-1)",
            "(shared['target'] * out.logits.log_softmax(-1)).mean(-1)",
        ),
        student_summed_over_classes=(
            "(shared['target'] * out.logits.log_softmax(-1)).mean",
            "(shared['target'] * out.logits.log_softmax(-1)).sum",
        ),
    ),
    *mutants(
        disagreement,
        disagreement_with_the_teachers_gradient=("teacher.detach()", "teacher"),
        disagreement_squared=("(student - teacher.detach()).abs", "(student - teacher.detach()).square"),
        divergence_turned_round=(
            "student.softmax(-1) * (student.log_softmax(-1) - teacher.log_softmax(-1))",
            "teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))",
        ),
    ),
    *mutants(
        FedFTG._harder,
        hunts_for_agreement=("self.classify * right - apart", "self.classify * right + apart"),
        no_disagreement=("self.classify * right - apart", "self.classify * right"),
        no_classification=("self.classify * right - apart", "-apart"),
        classification_sign=("self.classify", "-self.classify"),
        classification_weight_lost=(
            "weighted(cross_entropy(teacher, y), share)",
            "cross_entropy(teacher, y).mean() * share.mean()",
        ),
        diversity_sign=("self.classify * right - apart + ...", "self.classify * right - apart - ..."),
        diversity_not_shared=(
            "self.diversity * diversity(x, noise) / num_teachers",
            "self.diversity * diversity(x, noise)",
        ),
        generator_in_eval_mode=("training=True", "training=False"),
    ),
    *mutants(
        FedFTG._tuned,
        teachers_alike=("holders(counts.to(net.dtype))", "torch.full_like(counts, 1 / len(counts)).to(net.dtype)"),
        labels_uniform=("counts.sum(0)", "torch.ones_like(counts.sum(0))"),
        student_in_train_mode=("self.batchnorm", "'updating'"),
        student_without_decay=("self.weight_decay", "0.0"),
        student_rate_never_falls=("self.lr * rate", "self.lr"),
        generator_rate_never_falls=("self.generator_lr * rate", "self.generator_lr"),
        images_in_train_mode=("training=False", "training=True"),
    ),
    *mutants(
        FedFTG._counts,
        counts_asked_every_round=("clients[(known[clients, 0] < 0).cpu()]", "clients"),
    ),
    *mutants(
        ensemble,
        answers_not_weighted=(
            "share[:, None] * logits_in_eval(engine.net, teacher, x).softmax(-1)",
            "logits_in_eval(engine.net, teacher, x).softmax(-1)",
        ),
    ),
]
