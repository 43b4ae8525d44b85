"""Card 8, FedDF: what must come out, known without running a federation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fnrfl
from fnrfl.algorithms import feddf
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.feddf import FedDF
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.distill import SoftTargets, batch_positions, cosine, distill
from fnrfl.algorithms.parts.ensemble import accuracy, logits, verdict, votes
from fnrfl.core import trees
from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.core.net import Net
from fnrfl.core.rng import generator
from fnrfl.core.types import Batch, Data, Engine, LocalTask, Out, Replies, State, Training
from fnrfl.data.batches import Pool
from fnrfl.process import one_intra_op_thread
from mutants import mutants
from toys import NUM_CLASSES, NUM_FEATURES, Mlp, Plain, Run, World, assert_near, assert_same, classification, distance

ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])
KINDS = pytest.mark.parametrize("kind", ["logits", "probs"])
TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 2.5])


@pytest.fixture(autouse=True)
def _as_in_a_run() -> Iterator[None]:
    """The server's own steps on one thread."""
    with one_intra_op_thread():
        yield


class Normed(nn.Module):
    """BatchNorm without Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(NUM_FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.norm(self.hidden(x)).relu())
        return answer


def world(module: Callable[[], nn.Module] = Mlp, *, validation: int = 0, label: int = -1) -> World:
    """The classification world, with 30 of the public examples to distil from and some of the ranking ones to judge."""
    toy = classification(module=module)
    (px, py), (rx, ry) = toy.pool.all("public"), toy.pool.all("ranking")
    parts = {
        "private": toy.pool.all("private"),
        "public": (px[:25], py[:25]),
        "distill": (px[25:], torch.full((30,), label)),
        "ranking": (rx[:20], ry[:20]),
        "validation": (rx[20 : 20 + validation], ry[20 : 20 + validation]),
    }
    return replace(toy, pool=Pool(parts, toy.pool.shards, NUM_CLASSES, dtype=torch.float64))


def some_logits(*shape: int, of: str = "logits") -> Tensor:
    return 3 * torch.randn(*shape, generator=generator(0, of), dtype=torch.float64)


def loss_of(said: Tensor, target: Tensor, temperature: float) -> Tensor:
    """The objective's loss of a batch of logits; it reads nothing else."""
    index = torch.arange(len(said))
    out = Out(said[:, :0], said, said[:, :0])
    batch = Batch(said, torch.full_like(index, -1), index)
    model: Any = None
    return SoftTargets(temperature, 0.0).loss(out, model, said, batch, {"target": target}, {})


@dataclass(frozen=True)
class UniformFedAvg(Algorithm):
    """FedAvg that counts every client alike."""

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        task = LocalTask(Objective(), "local", state)
        got = engine.fold(cohort, task, mean=lambda r: {"moved": r.params - state.params}, uniform=True)
        return state.step(got, state.params + got.mean["moved"])


# -- J = 0 ------------------------------------------------------------------------------------------------------------


@ENGINES
def test_card8_without_steps_it_is_uniform_fedavg(engine: str) -> None:
    """Bit for bit, as the official code averages."""
    bare = Run(UniformFedAvg(), engine, world=world()).rounds(3)
    assert_same(Run(FedDF(steps=0, weights="uniform"), engine, world=world()).rounds(3), bare)
    assert distance(Run(FedAvg(), engine, world=world()).rounds(3).params, bare.params) > 1e-3


@ENGINES
@pytest.mark.parametrize("under_fnr", [False, True])
def test_card8_without_steps_it_is_fedavg(engine: str, under_fnr: bool) -> None:
    inner: list[Algorithm] = [FedDF(steps=0), FedAvg()]
    mine, bare = (Run(FNR(a) if under_fnr else a, engine, world=world()).rounds(3) for a in inner)
    assert_same(mine, bare)


# -- the loss ---------------------------------------------------------------------------------------------------------


@TEMPERATURES
def test_card8_gradient_of_the_loss_at_the_logits(temperature: float) -> None:
    """(softmax(s / T) - t) / (T B): by autograd, and by finite differences. There is no factor T^2."""
    said = some_logits(5, 4).requires_grad_()
    target = some_logits(5, 4, of="target").softmax(-1)
    (grad,) = torch.autograd.grad(loss_of(said, target, temperature), said)
    with torch.no_grad():
        want = ((said / temperature).softmax(-1) - target) / (temperature * 5)
        assert distance(grad, want) < 1e-12
        for i, c in ((0, 0), (2, 3), (4, 1)):
            step = torch.zeros_like(said)
            step[i, c] = 1e-6
            up, down = (loss_of(said + way * step, target, temperature) for way in (1, -1))
            assert float(up - down) / 2e-6 == pytest.approx(float(want[i, c]), abs=1e-8)


@TEMPERATURES
def test_card8_loss_is_torchs_divergence(temperature: float) -> None:
    """Zeros in the target included, which a logarithm would not survive."""
    said, target = some_logits(6, 4), some_logits(6, 4, of="target").softmax(-1)
    target[0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    want = F.kl_div((said / temperature).log_softmax(-1), target, reduction="batchmean")
    assert float(loss_of(said, target, temperature)) == pytest.approx(float(want), abs=1e-12)


def test_card8_targets_are_found_by_the_examples_of_the_batch() -> None:
    """A batch in another order has its targets in that order."""
    target, index = some_logits(6, 4).softmax(-1), torch.tensor([4, 0, 5])
    said = some_logits(3, 4, of="student")
    model: Any = None
    found = SoftTargets(1.0, 0.0).loss(
        Out(said, said, said), model, said, Batch(said, index, index), {"target": target}, {}
    )
    assert float(found) == pytest.approx(float(loss_of(said, target[index], 1.0)), abs=1e-14)


def test_card8_long_gradients_are_clipped_and_short_ones_left() -> None:
    grad, none = some_logits(7), torch.zeros(7).double()
    long = 10 * grad / grad.norm()
    clipped = SoftTargets(1.0, 5.0).correct(long, long, long, {}, {})
    assert distance(clipped, long / 2) < 1e-12
    assert torch.equal(SoftTargets(1.0, 5.0).correct(long / 4, long, long, {}, {}), long / 4)
    assert torch.equal(SoftTargets(1.0, 0.0).correct(long, long, long, {}, {}), long)
    assert torch.equal(SoftTargets(1.0, 5.0).correct(none, long, long, {}, {}), none)


def test_card8_the_clip_of_the_options_is_felt() -> None:
    """Far below Adam's epsilon, where even Adam feels the length of a gradient."""
    average = Run(FedAvg(), world=world()).round().params
    free, clipped = (Run(FedDF(steps=5, clip=clip), world=world()).round().params for clip in (0.0, 1e-12))
    assert distance(clipped, average) < 0.01 * distance(free, average)


def test_card8_averaged_losses_have_the_gradient_of_averaged_probabilities() -> None:
    """So that `teachers = "probs"` stands for two schemes of the official code."""
    said, teachers = some_logits(5, 4).requires_grad_(), some_logits(3, 5, 4, of="teachers")
    apart = torch.stack([loss_of(said, t.softmax(-1), 1.0) for t in teachers]).mean()
    together = loss_of(said, verdict(teachers.softmax(-1).sum(0), 3, "probs", 1.0), 1.0)
    (one,), (other,) = torch.autograd.grad(apart, said), torch.autograd.grad(together, said)
    assert distance(one, other) < 1e-12


# -- the teachers -----------------------------------------------------------------------------------------------------


def replies_of(played: Run) -> Replies:
    """A cohort's replies, in tensors of their own."""
    played.round()
    return trees.aligned(played.replies())


@KINDS
@TEMPERATURES
def test_card8_verdict_of_the_teachers(kind: Any, temperature: float) -> None:
    """softmax(mean logits / T), or the mean of softmax(logits / T), of models in eval mode with their own buffers."""
    played = Run(FedAvg(), world=world())
    replies, (x, _) = replies_of(played), played.world.pool.all("distill")
    every = []
    for m in range(len(replies.clients)):
        module = played.net.export(replies.params[m], {k: v[m] for k, v in replies.buffers.items()})
        assert not module.training
        with torch.no_grad():
            every.append(module(x))
    said = torch.stack(every)
    want = (said.mean(0) / temperature).softmax(-1) if kind == "logits" else (said / temperature).softmax(-1).mean(0)
    found = verdict(votes(played.net, replies, x, kind, temperature).sum(0), 4, kind, temperature)
    assert distance(found, want) < 1e-12
    assert distance(found.sum(-1), torch.ones(30)) < 1e-12


@KINDS
def test_card8_teachers_do_not_change(kind: Any) -> None:
    """Parameters and buffers of every teacher are the same before and after, and so is the module that asked."""
    played = Run(FedAvg(), world=world())
    replies, (x, _) = replies_of(played), played.world.pool.all("distill")
    before = [replies.params.clone(), *(v.clone() for v in replies.buffers.values())]
    module = copy.deepcopy(played.net.module.state_dict())
    votes(played.net, replies, x, kind, 1.0)
    assert all(map(torch.equal, before, [replies.params, *replies.buffers.values()]))
    assert all(torch.equal(v, module[k]) for k, v in played.net.module.state_dict().items())


@pytest.mark.parametrize("batchnorm", ["frozen", "updating"])
def test_card8_teachers_do_not_change_in_a_round(batchnorm: Any) -> None:
    """What clients replied is, after the distillation, what they reply to FedAvg."""
    mine, bare = Run(FedDF(steps=5, batchnorm=batchnorm), world=world()), Run(FedAvg(), world=world())
    mine.round()
    bare.round()
    assert torch.equal(mine.replies().params, bare.replies().params)
    assert all(torch.equal(mine.replies().buffers[k], v) for k, v in bare.replies().buffers.items())


def test_card8_a_constant_on_a_teachers_logits_changes_nothing() -> None:
    """For every example another constant, and for a teacher's whole head."""
    said = some_logits(3, 30, 4)
    shifted = said + 5 * torch.randn(3, 30, 1, generator=generator(0, "shift"), dtype=torch.float64)
    assert distance(said.mean(0), shifted.mean(0)) > 1
    assert distance(verdict(said.sum(0), 3, "logits", 1.0), verdict(shifted.sum(0), 3, "logits", 1.0)) < 1e-12
    played = Run(FedAvg(), world=world())
    replies, (x, _) = replies_of(played), played.world.pool.all("distill")
    lifted = replies.params.clone()
    lifted[1, played.net.mask({"head.bias"})] += 7.0
    one, other = (votes(played.net, replace(replies, refined=p), x, "logits", 1.0) for p in (replies.params, lifted))
    assert distance(one[1], other[1]) > 6.9
    assert distance(verdict(one.sum(0), 4, "logits", 1.0), verdict(other.sum(0), 4, "logits", 1.0)) < 1e-12


def test_card8_logits_in_parts_are_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Run(FedAvg(), world=world())
    x, y = played.world.pool.all("ranking")
    whole = logits(played.net, played.state, x)
    monkeypatch.setattr("fnrfl.algorithms.parts.ensemble.forward_batch", lambda device: 7)
    assert distance(logits(played.net, played.state, x), whole) < 1e-12
    assert accuracy(played.net, played.state, x, y) == float((whole.argmax(1) == y).double().mean())


def test_card8_the_order_of_participants_is_irrelevant() -> None:
    one, other = (Run(FedDF(steps=15), world=world()) for _ in range(2))
    for _ in range(2):
        cohort = one.cohort(one.t)
        assert_near(one.round(cohort), other.round(cohort.flip(0)), atol=1e-10)


def test_card8_a_client_that_is_left_out_does_not_teach() -> None:
    """Counted among the teachers, it would make the verdict flatter."""
    spoiled = world(Plain)
    x, y = spoiled.pool._parts["private"]
    x = x.clone()
    x[spoiled.pool.shards[1]] = torch.nan
    spoiled.pool._parts["private"] = x, y
    left_out = Run(FedDF(steps=15), world=spoiled, nonfinite="skip")
    never_there = Run(FedDF(steps=15), world=world(Plain))
    left_out.round(torch.tensor([0, 1, 3]))
    assert left_out.engine.notes["skipped"] == [1]
    assert_near(left_out.state, never_there.round(torch.tensor([0, 3])), atol=1e-10)


# -- the student ------------------------------------------------------------------------------------------------------


def student(module: Callable[[], nn.Module] = Plain) -> tuple[Net, State, Tensor]:
    """A net, a model of it and examples."""
    played = Run(FedAvg(), world=world(module))
    played.round()
    return played.net, State(played.state.params, played.state.buffers), played.world.pool.all("distill")[0]


def stream(name: str) -> torch.Generator:
    return generator(3, "student", name)


def test_card8_a_student_that_equals_its_teacher_stays() -> None:
    """One teacher, no BatchNorm: loss and gradient are 0, and SGD leaves the weights. (Adam would amplify noise.)"""
    net, model, x = student()
    alone = Replies(*[torch.zeros(1)] * 5, model.params[None], {}, {})
    target = verdict(votes(net, alone, x, "logits", 1.0).sum(0), 1, "logits", 1.0)
    sgd = Training("sgd", 10.0, momentum=0.0, weight_decay=0.0, batch=30, batchnorm="frozen")
    taught = distill(net, model, x, target, SoftTargets(1.0, 0.0), sgd, steps=3, stream=stream)
    assert abs(taught.loss) < 1e-14
    assert distance(taught.model.params, model.params) < 1e-13
    flat = torch.full_like(target, 0.25)  # the instrument: another teacher would have moved it
    other = distill(net, model, x, flat, SoftTargets(1.0, 0.0), sgd, steps=3, stream=stream)
    assert distance(other.model.params, model.params) > 1e-2


@KINDS
@pytest.mark.parametrize("batchnorm", ["frozen", "updating"])
@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_card8_a_round_is_torchs_own_loop(kind: Any, batchnorm: Any, weights: Any) -> None:
    """Adam with a cosine on modules, from the average of the replies, on the same batches."""
    steps, temperature = 12, 1.5
    method = FedDF(
        steps=steps, batch=8, lr=0.02, temperature=temperature, teachers=kind, batchnorm=batchnorm, weights=weights
    )
    played = Run(method, world=world(Normed))
    played.round()
    got, (x, _) = played.replies(), played.world.pool.all("distill")
    teachers = [
        played.net.export(got.params[m], {k: v[m] for k, v in got.buffers.items()}) for m in range(len(got.clients))
    ]
    w = got.examples if weights == "examples" else torch.ones_like(got.examples)
    p, by_examples = w / w.sum(), got.examples / got.examples.sum()
    floating = {k: torch.tensordot(by_examples, v, 1) for k, v in got.buffers.items() if v.is_floating_point()}
    net = played.net.export(p @ got.params, {k: v[0] for k, v in got.buffers.items()} | floating)
    net.train(batchnorm == "updating")
    adam = torch.optim.Adam(net.parameters(), lr=0.02)
    annealed = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for index in batch_positions(30, 8, steps, generator(played.seed, 0, "server", "distill", "batches")):
        with torch.no_grad():
            said = torch.stack([t(x[index]) for t in teachers]) / temperature
        target = said.mean(0).softmax(-1) if kind == "logits" else said.softmax(-1).mean(0)
        loss = F.kl_div((net(x[index]) / temperature).log_softmax(-1), target, reduction="batchmean")
        adam.zero_grad()
        loss.backward()
        adam.step()
        annealed.step()
    found = played.net.unflatten(played.state.params) | played.state.buffers
    want = {k: v.detach() for k, v in [*net.named_parameters(), *net.named_buffers()]}
    names = [k for k in found if "num_batches" not in k]
    assert len(names) == 8
    assert all(distance(found[k], want[k]) < 1e-9 for k in names)
    assert played.engine.notes["distill_loss"] == pytest.approx(float(loss.detach()), abs=1e-9)


def test_card8_batches_are_orders_end_to_end() -> None:
    order = batch_positions(10, 4, 6, stream("batches"))
    assert order.shape == (6, 4)
    whole = order.flatten()
    assert sorted(whole[:10].tolist()) == sorted(whole[10:20].tolist()) == list(range(10))
    assert whole[:10].tolist() != whole[10:20].tolist()
    assert batch_positions(3, 128, 5, stream("batches")).shape == (5, 3)  # no example twice in a batch


@pytest.mark.parametrize("batchnorm", ["frozen", "batch", "updating"])
def test_card8_the_students_statistics(batchnorm: Any) -> None:
    """Frozen by default: else they become those of the distillation data, whatever the task's are."""
    mine, bare = Run(FedDF(steps=5, batchnorm=batchnorm), world=world()), Run(FedAvg(), world=world())
    found, average = mine.round(), bare.round()
    same = all(torch.equal(found.buffers[k], v) for k, v in average.buffers.items())
    assert same == (batchnorm != "updating")
    assert distance(found.params, average.params) > 1e-4


def test_card8_the_modes_differ_and_dropout_is_drawn_in_train_mode_only() -> None:
    net, model, x = student(Mlp)
    target = torch.full((30, NUM_CLASSES), 0.25).double()
    ends, drawn = {}, {}
    for mode in ("frozen", "batch", "updating"):
        names: list[str] = []
        training = Training("adam", 0.01, momentum=0.0, weight_decay=0.0, batch=8, batchnorm=mode)  # type: ignore[arg-type]
        taught = distill(
            net, model, x, target, SoftTargets(1.0, 0.0), training, steps=4,
            stream=lambda name, names=names: (names.append(name), stream(name))[1],
        )  # fmt: skip
        ends[mode], drawn[mode] = taught.model, sorted(names)
    assert distance(ends["frozen"].params, ends["batch"].params) > 1e-3
    assert torch.equal(ends["batch"].params, ends["updating"].params)
    assert drawn == {"frozen": ["batches"]} | dict.fromkeys(("batch", "updating"), ["batches", "drop.uniform"])


def judged(
    said: list[float], *, steps: int, every: int, patience: int
) -> tuple[State, list[State], tuple[int, int, State]]:
    """(start, the models that the judge saw, what came out) for a judge who says these numbers."""
    net, model, x = student()
    saw: list[State] = []

    def judge(m: State) -> float:
        saw.append(State(m.params.clone(), {}))
        return said[len(saw) - 1]

    adam = Training("adam", 0.01, momentum=0.0, weight_decay=0.0, batch=8, batchnorm="frozen")
    target = torch.full((30, NUM_CLASSES), 0.25).double()
    out = distill(
        net, model, x, target, SoftTargets(1.0, 0.0), adam, steps=steps, stream=stream, judge=judge, every=every,
        patience=patience,
    )  # fmt: skip
    return model, saw, (out.taken, out.chosen, out.model)


def test_card8_the_best_judged_model_is_kept_and_patience_ends() -> None:
    """Looks after steps 2, 4, ...: 4 is the best, 6 is a tie, and at 8 four steps have passed without a better one."""
    _, saw, (taken, chosen, model) = judged([0.5, 0.4, 0.6, 0.6, 0.3, 0.9], steps=40, every=2, patience=4)
    assert (taken, chosen, len(saw)) == (8, 4, 5)
    assert torch.equal(model.params, saw[2].params)
    assert distance(model.params, saw[4].params) > 1e-4


def test_card8_the_average_itself_is_a_candidate() -> None:
    """So that a round cannot end worse than FedAvg, on validation data."""
    start, _, (taken, chosen, model) = judged([0.5, 0.1, 0.1, 0.5], steps=40, every=1, patience=3)
    assert (taken, chosen) == (3, 0)
    assert_same(model, start)


def test_card8_the_last_step_is_judged_too() -> None:
    _, saw, (taken, chosen, model) = judged([0.1, 0.2, 0.3], steps=7, every=5, patience=100)
    assert (taken, chosen, len(saw)) == (7, 7, 3)
    assert torch.equal(model.params, saw[2].params)


def test_card8_validation_data_decides() -> None:
    """Whatever the steps do to it, the model is never worse on validation data than the average."""
    wild = FedDF(steps=30, every=5, patience=30, lr=0.5)
    played, bare = Run(wild, world=world(validation=20)), Run(FedAvg(), world=world(validation=20))
    x, y = played.world.pool.all("validation")
    chosen = []
    for _ in range(3):
        bare.state, bare.t = played.state, played.t
        played.round()
        bare.round()
        assert accuracy(played.net, played.state, x, y) >= accuracy(bare.net, bare.state, x, y)
        chosen.append(played.engine.notes["distill_chosen"])
    unjudged = Run(wild, world=world())
    unjudged.round()
    assert unjudged.engine.notes["distill_steps"] == unjudged.engine.notes["distill_chosen"] == 30
    assert min(chosen) < 30  # there were steps not worth taking


@pytest.mark.parametrize(("batchnorm", "most"), [("frozen", 0.2), ("updating", 0.6)])  # judged in eval mode
def test_card8_the_student_comes_nearer_to_the_teachers(
    batchnorm: Any, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[Tensor] = []
    monkeypatch.setattr(feddf, "verdict", lambda *a: (targets.append(verdict(*a)), targets[-1])[1])
    mine, bare = Run(FedDF(lr=0.01, batchnorm=batchnorm), world=world()), Run(FedAvg(), world=world())
    x, _ = mine.world.pool.all("distill")
    after, before = (logits(run.net, run.round(), x) for run in (mine, bare))
    assert float(loss_of(after, targets[0], 1.0)) < most * float(loss_of(before, targets[0], 1.0))


def test_card8_no_label_is_looked_at() -> None:
    """-1 marks an example without a label; any other number would do as well."""
    assert_same(
        Run(FedDF(steps=10), world=world(label=-1)).rounds(2), Run(FedDF(steps=10), world=world(label=2)).rounds(2)
    )


# -- under FNR --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("upload", ["once", "twice"])
def test_card8_refined_models_teach(upload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teachers and average are the models handed over; private training is not looked at."""
    taught: list[Tensor] = []
    original = feddf.votes

    def watched(net: Net, r: Replies, *rest: Any) -> Tensor:
        taught.append(r.params)
        return original(net, r, *rest)

    monkeypatch.setattr(feddf, "votes", watched)
    played = Run(FNR(FedDF(steps=5), upload=upload), world=world())
    played.round()
    refined, local = played.replies("refine"), played.replies("local")
    teachers = torch.cat(taught)
    rows = [local.clients.tolist().index(c) for c in refined.clients.tolist()]
    assert len(rows) == 2
    assert torch.equal(teachers[rows], refined.params)
    rest = [m for m in range(4) if m not in rows]
    assert torch.equal(teachers[rest], local.params[rest])
    assert distance(teachers[rows], local.params[rows]) > 1e-3


def test_card8_three_sets_serve_three_purposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refinement is on public data, distillation on its own, and validation judges; none is asked for another's."""
    played = Run(FNR(FedDF(steps=5)), world=world(validation=20))
    asked: list[Data] = []
    pool = played.engine.pool
    monkeypatch.setattr(played.engine, "pool", lambda data: (asked.append(data), pool(data))[1])
    played.round()
    assert asked == ["distill", "validation"]
    assert {task.data for task in played.tasks("refine")} == {"public"}
    sets = [played.world.pool.all(name)[0] for name in ("public", "ranking", "distill", "validation")]  # type: ignore[arg-type]
    rows = [tuple(row) for part in sets for row in part.tolist()]
    assert len(rows) == len(set(rows))


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [("steps", -1), ("every", 0), ("patience", 0), ("batch", 0), ("lr", 0.0), ("temperature", 0.0), ("clip", -1.0),
     ("weights", "sizes"), ("teachers", "losses"), ("batchnorm", "off")],
)  # fmt: skip
def test_options_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}"):
        fnrfl.run("digits", out=None, rounds=1, algorithm={"name": "feddf", key: value})


def test_a_distillation_that_diverges_says_so() -> None:
    net, model, x = student()
    sgd = Training("sgd", float("inf"), momentum=0.0, weight_decay=0.0, batch=8, batchnorm="frozen")
    target = torch.full((30, NUM_CLASSES), 0.25).double()
    with pytest.raises(FnrflError, match=r"not finite.*Lower algorithm\.lr"):
        distill(net, model, x, target, SoftTargets(1.0, 0.0), sgd, steps=5, stream=stream)


def test_the_objective_is_a_model_of_one_client() -> None:
    """It can be trained by any engine: by `fit`, one step of SGD is the step that `distill` takes."""
    played = Run(FedDF(), world=world(Plain))
    x, _ = played.world.pool.all("distill")
    target = torch.full((30, NUM_CLASSES), 0.25).double()
    sgd = Training("sgd", 0.1, momentum=0.0, weight_decay=0.0, batch=30, epochs=1, batchnorm="frozen")
    start = State(played.state.params, {})
    task = LocalTask(SoftTargets(1.0, 0.0), "distill", start, {"target": target}, data="distill", training=sgd)
    one = played.engine.fit(task)
    other = distill(played.net, start, x, target, SoftTargets(1.0, 0.0), sgd, steps=1, stream=stream)
    assert distance(one.params, start.params) > 1e-4
    assert distance(one.params, other.model.params) < 1e-12


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        FedDF.round,
        average_sign=("state.params + got.mean['moved']", "state.params - got.mean['moved']"),
        average_forgets_refinement=("r.params - state.params", "r.trained - state.params"),
        always_by_examples=("self.weights == 'uniform'", "False"),
        teachers_counted_by_cohort=("len(got.clients)", "len(cohort)"),
        sum_of_logits=("len(got.clients)", "1"),
        student_starts_from_the_old_model=(
            "self._taught(average, x, target, engine)",
            "self._taught(state, x, target, engine)",
        ),
        distils_on_public_data=("engine.pool('distill')", "engine.pool('public')"),
    ),
    *mutants(
        FedDF._taught,
        students_temperature_dropped=("self.temperature", "1.0"),
        clip_dropped=("SoftTargets(self.temperature, self.clip)", "SoftTargets(self.temperature, 0.0)"),
        sgd_for_adam=("'adam'", "'sgd'"),
        weight_decay=("weight_decay=0.0", "weight_decay=0.1"),
        statistics_always_updated=("self.batchnorm", "'updating'"),
        judged_by_distillation_labels=("'validation'", "'distill'"),
        validation_ignored=("len(labels)", "False"),
    ),
    *mutants(
        logits,
        teachers_in_train_mode=(
            "net.eval_forward(model.params, model.buffers, net.laid_out(part))",
            "net.apply(model.params, model.buffers, net.laid_out(part), mode='batch')[0]",
        ),
    ),
    *mutants(
        votes,
        teachers_share_buffers=("v[m]", "v[0]"),
        probs_without_temperature=("said / temperature", "said"),
        kinds_swapped=("kind == 'logits'", "kind == 'probs'"),
    ),
    *mutants(
        verdict,
        temperature_multiplies=("mean / temperature", "mean * temperature"),
        verdict_of_probs_softened_again=("kind == 'probs'", "False"),
    ),
    *mutants(
        accuracy,
        wrong_answers_counted=("logits(net, model, x).argmax(-1) == y", "logits(net, model, x).argmax(-1) != y"),
    ),
    *mutants(
        SoftTargets.loss,
        divergence_sign=("target * said", "-target * said"),
        entropy_dropped=("torch.special.xlogy(target, target) - target * said", "-target * said"),
        student_without_temperature=("out.logits / self.temperature", "out.logits"),
        targets_in_the_order_of_the_batch=("shared['target'][batch.index]", "shared['target'][:len(batch.index)]"),
        t_squared=(
            "batch.mean((torch.special.xlogy(target, target) - target * said).sum(-1))",
            "self.temperature ** 2 * batch.mean((torch.special.xlogy(target, target) - target * said).sum(-1))",
        ),
    ),
    *mutants(
        SoftTargets.correct,
        gradients_lengthened=("max=1.0", "min=1.0"),
    ),
    *mutants(
        distill,
        no_annealing=("cosine(training.lr, step, steps)", "training.lr"),
        annealed_a_step_early=("cosine(training.lr, step, steps)", "cosine(training.lr, step + 1, steps)"),
        last_for_best=(
            "if judge is None:\n    best, chosen = (now, taken)",
            "if True:\n    best, chosen = (now, taken)",
        ),
        start_no_candidate=("-math.inf if judge is None else judge(start)", "-math.inf"),
        ties_to_the_later=("found > liked", "found >= liked"),
        patience_never_ends=("taken - chosen >= patience", "False"),
        patience_from_the_start=("taken - chosen", "taken"),
        the_start_judged=("judge(now)", "judge(start)"),
        best_moves_on=("State(carry.params.clone(), aligned(carry.buffers))", "now"),
        dropout_without_masks=("{name: stream(name) for name in net.drop_shapes}", "{}"),
    ),
    *mutants(
        cosine,
        annealed_upwards=("1 + math.cos(math.pi * step / steps)", "1 - math.cos(math.pi * step / steps)"),
    ),
    *mutants(
        batch_positions,
        same_order_every_epoch=("torch.cat(orders)", "torch.cat(orders[:1] * len(orders))"),
    ),
]
