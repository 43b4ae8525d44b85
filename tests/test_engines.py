"""Engines, optimisers, batches and nets: what every method relies on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fednova import FedNova
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.moon import Moon
from fnrfl.algorithms.parts.norms import ClassNorms
from fnrfl.algorithms.scaffold import Scaffold
from fnrfl.core import optim, trees
from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.errors import ClientError, CompatibilityError, FnrflError
from fnrfl.core.masks import Dropout
from fnrfl.core.net import Model, Net
from fnrfl.core.rng import generator
from fnrfl.core.step import Carry, ReusedMemory
from fnrfl.core.store import ClientStore
from fnrfl.core.types import Batch, Flat, LocalTask, Out, Replies, State, Training, Tree
from fnrfl.data.batches import plan
from fnrfl.engines.devices import Worker
from fnrfl.engines.federation import Federation
from fnrfl.engines.gpus import Gpus
from fnrfl.engines.kept_clients import KeptClients
from fnrfl.engines.metered import Metered
from fnrfl.engines.one_by_one import OneByOne
from fnrfl.engines.trainer import Trainer
from toys import (
    NUM_CLASSES,
    NUM_FEATURES,
    Mlp,
    Run,
    World,
    assert_near,
    assert_same,
    bowls,
    classification,
    distance,
    named,
    quadratic,
    with_pool,
)

ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])
EVERYONE = torch.arange(6)


def crowd() -> World:
    """The classification world cut into 26 tiny clients."""
    world = with_pool(classification(), torch.arange(305).split(12))
    return replace(world, training=replace(world.training, batch=4), active=26)


def assert_same_memories(one: Run, other: Run) -> None:
    assert list(one.engine.memory) == list(other.engine.memory) != []
    for client in one.engine.memory:
        mine, theirs = one.engine.memory.get(client), other.engine.memory.get(client)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


# -- Trees ------------------------------------------------------------------------------------------------------------


class Two(NamedTuple):
    """A tuple whose parts have names."""

    first: Any
    second: Any


TENSORS = {k: torch.full((2,), float(n)) for n, k in enumerate("abcdefgh")}


def tree_of(*order: str) -> Any:
    """A tree of every kind, whose dicts were filled in an order."""
    named = {k: TENSORS[k] for k in order}
    state = State(TENSORS["c"], named, {"h": TENSORS["h"]})
    return {"carry": Carry(TENSORS["e"], named, {}), "list": [state, {}], "two": Two(named, (TENSORS["d"], None))}


def test_leaves_and_rebuilt_are_inverse_whoever_was_put_in_first() -> None:
    one, other = tree_of("a", "b", "g"), tree_of("g", "b", "a")
    leaves = trees.leaves(one)
    assert [*map(id, leaves)] == [*map(id, trees.leaves(other))] and len(leaves) == 13
    for like in (one, other):
        again = trees.rebuilt(like, iter(leaves))
        assert _pytree.tree_structure(again) == _pytree.tree_structure(like)
        assert _pytree.tree_structure(trees.mapped(lambda t: t, like)) == _pytree.tree_structure(like)
        assert [*map(id, trees.leaves(again))] == [*map(id, leaves)]
    doubled = trees.leaves(trees.mapped(lambda a, b: a + b, one, other))
    assert all(torch.equal(two, 2 * one) for one, two in zip(leaves, doubled, strict=True))


def some_state(rows: int, of: str) -> State:
    draw = generator(0, of)
    return State(torch.rand(rows, 3, generator=draw), {"mean": torch.rand(rows, 2, 2, generator=draw)}, {})


def test_rows_stacked_joined_and_moved() -> None:
    one, other = some_state(4, "one"), some_state(4, "other")
    both = trees.stacked([one, other])
    assert both.params.shape == (2, 4, 3) and both.buffers["mean"].shape == (2, 4, 2, 2)
    assert_same(trees.rows(both, 0), one)
    assert_same(trees.rows(both, 1), other)
    assert_same(trees.joined([trees.rows(one, slice(0, 1)), trees.rows(one, slice(1, 4))]), one)
    end_to_end = trees.joined([one, other])
    assert torch.equal(end_to_end.params, torch.cat([one.params, other.params]))
    assert torch.equal(end_to_end.buffers["mean"], torch.cat([one.buffers["mean"], other.buffers["mean"]]))
    picked = trees.rows(one, torch.tensor([3, 0]))
    assert torch.equal(picked.params, one.params[[3, 0]])
    assert torch.equal(picked.buffers["mean"], one.buffers["mean"][[3, 0]])
    there = trees.moved((one, {"x": other.params}), torch.device("meta"))
    assert all(leaf.is_meta for leaf in trees.leaves(there))
    assert isinstance(there[0], State) and there[0].params.shape == (4, 3) and not one.params.is_meta


@pytest.mark.parametrize("joint", ["/", "."])
def test_packed_and_unpacked_are_inverse(joint: str) -> None:
    """Beside other names, and another model whose name begins alike."""
    model, other = (State(torch.rand(5), {k: torch.rand(3) for k in ("norm.mean", "norm.var")}) for _ in range(2))
    packed = model.packed("model", joint)
    assert packed.keys() == {"model", f"model{joint}norm.mean", f"model{joint}norm.var"}
    tree = {"seen": torch.ones(())} | other.packed("models", joint) | packed
    for name, want in (("model", model), ("models", other)):
        found = State.unpacked(name, tree, joint)
        assert found.buffers.keys() == want.buffers.keys() and not found.extra
        assert_same(found, want)


# -- Parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 3])
def test_a_part_can_be_exchanged(devices: int) -> None:
    """One client after another, at the place that is made for GPUs: the same as the loop engine to the last bit."""
    loop, other = Run(FNR(Scaffold())), Run(FNR(Scaffold()))
    trainer = Trainer(Gpus(other.net, other.world.pool, [torch.device("cpu")] * devices), OneByOne(), seed=other.seed)
    clients = KeptClients(trainer, ClientStore(other.algorithm.client_state(other.net)), ClientStore({}))
    other.use(Federation(clients, trainer, other.engine.options, seed=other.seed))
    assert_same(loop.rounds(3), other.rounds(3))
    assert_same_memories(loop, other)


# -- Threads and chunks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meeting(Objective):
    """Waits in its first loss until as many clients are there, and notes whose module each was called with."""

    barrier: threading.Barrier = field(compare=False)
    modules: list[int] = field(compare=False)

    def loss(self, out: Out, model: Model, *rest: Any) -> Tensor:
        self.modules.append(id(model.net.module))
        self.barrier.wait(timeout=20)
        return super().loss(out, model, *rest)


@ENGINES
def test_clients_side_by_side_never_share_a_module(engine: str) -> None:
    """Four clients, or groups of one, in the middle of a step at the same time, each with a module of its own."""
    played = Run(FedAvg(), engine, threads=4, training=Training(epochs=1, batch=1000, last_batch="keep"))
    played.engine.server.runner.group_size = 1
    meeting = Meeting(threading.Barrier(4), [])
    played.engine.train(torch.arange(4), LocalTask(meeting, "local", played.state))
    assert len(meeting.modules) == len(set(meeting.modules)) == 4
    assert id(played.net.module) not in meeting.modules


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_error_goes_on_when_nobody_is_at_work_and_nobody_begins_after_it(threads: int) -> None:
    pool, begun, ended = Run(FedAvg(), threads=threads).engine.server.pool, list[int](), list[int]()

    def work(worker: Worker, i: int) -> int:
        begun.append(i)
        time.sleep(0.02 * (i == 4))
        if i in (3, 5):
            raise ValueError(i)
        ended.append(i)
        return i

    with pytest.raises(ValueError, match="3"):
        pool.each(1000, work)
    assert sorted(ended) == sorted({*begun} - {3, 5}) and len(begun) < 1000
    assert pool.each(3, lambda worker, i: i) == [0, 1, 2]


class Reader(nn.Module):
    """A net with an operator that cannot be batched in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(NUM_FEATURES // 4, 6, batch_first=True)
        self.head = nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.lstm(x.view(len(x), 4, -1))[0][:, -1])


@pytest.mark.parametrize("engine", ["batched", "gpu"])
def test_a_net_that_cannot_be_asked_together_is_asked_one_by_one(engine: str) -> None:
    ours, theirs = (Run(FNR(FedAvg()), name, world=classification(module=Reader)) for name in (engine, "loop"))
    assert distance(ours.rounds(2).params, theirs.rounds(2).params) < 1e-12


@pytest.mark.parametrize("algorithm", [FNR(Moon(mu=2.0)), Scaffold()], ids=named)
def test_threads_do_not_change_a_bit(algorithm: Algorithm) -> None:
    alone, many = (Run(algorithm, world=crowd(), threads=n) for n in (1, 4))
    assert_same(alone.rounds(2), many.rounds(2))
    assert_same_memories(alone, many)


# -- Memory and held models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [FNR(Scaffold()), FNR(Moon())], ids=named)
@ENGINES
def test_memory_on_disk_is_memory_in_ram(algorithm: Algorithm, engine: str, tmp_path: Path) -> None:
    there, here = Run(algorithm, engine, folder=tmp_path, clients_at_once=2), Run(algorithm, engine, clients_at_once=2)
    assert_same(there.rounds(3), here.rounds(3))
    assert_same_memories(there, here)
    assert len(list((tmp_path / "memory").iterdir())) == len(list(here.engine.memory))


def test_a_client_that_never_took_part_takes_no_memory() -> None:
    played = Run(Scaffold())
    played.round(torch.tensor([1, 4]))
    assert list(played.engine.memory) == [1, 4]
    assert (played.engine.memory.get(0)["c"] == 0).all()


def test_held_models_last_for_a_round(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        played = Run(FNR(FedAvg()), folder=folder)
        played.round()
        held_models, cohort, probe = played.engine.clients.held_models, played.cohort(0), ClassNorms(NUM_CLASSES)
        assert list(held_models) == cohort.tolist()
        before = played.engine.measure(cohort, probe)["norms"]
        assert list(held_models) == cohort.tolist()
        played.engine.begin(1)
        after = played.engine.measure(cohort, probe)["norms"]  # the first request of another round
        assert list(held_models) == []
        assert torch.equal(after, played.engine.measure(cohort, probe, at=State(*played.net.flatten()))["norms"])
        assert distance(after, before) > 1e-3
    assert list((tmp_path / "held").iterdir()) == []


@dataclass(frozen=True)
class Remembering(Objective):
    """Keeps where it ended."""

    def finish(self, start: State, end: State, *rest: Any) -> tuple[Tree, Tree]:
        return {}, {"end": end.params}


@pytest.mark.parametrize(("remember", "who"), [(True, [0, 3]), (False, [])])
def test_a_task_that_does_not_remember_leaves_memory_alone(remember: bool, who: list[int]) -> None:
    played = Run(FedAvg())
    played.engine.train(torch.tensor([0, 3]), LocalTask(Remembering(), "local", played.state, remember=remember))
    assert list(played.engine.memory) == who


# -- Clients that fail ------------------------------------------------------------------------------------------------


def poisoned(client: int) -> tuple[World, int]:
    """(the world in which one example of a client is not a number, the step of round 3 that first meets it)."""
    world = with_pool(classification())
    shard = world.pool.shards[client]
    world.pool._parts["private"][0][shard[7]] = torch.nan
    order = plan(len(shard), world.training, lambda name: generator(7, 2, client, "local", name))
    return world, next(step for step, positions in enumerate(order.batches) if 7 in positions)


@ENGINES
def test_a_loss_that_is_not_finite_names_client_round_and_step(engine: str) -> None:
    """Rounds are counted from one, as in reports; steps from zero."""
    world, step = poisoned(3)
    played = Run(FedAvg(), engine, world=world)
    played.t = 2
    with pytest.raises(ClientError, match=f"client 3, round 3, stage local, step {step}: .*finite.*learning rate") as e:
        played.round(EVERYONE)
    assert (e.value.client, e.value.round, e.value.stage, e.value.step) == (3, 3, "local", step)
    assert step > 0


@pytest.mark.parametrize(
    "algorithm", [FedAvg(), Moon(), Scaffold(), Scaffold(variates="I"), FedNova(), FNR(FedAvg())], ids=named
)
@ENGINES
def test_a_skipped_client_is_as_if_it_were_absent(algorithm: Algorithm, engine: str) -> None:
    world, _ = poisoned(3)
    skipping = Run(algorithm, engine, world=world, nonfinite="skip")
    without = Run(algorithm, engine, world=world)
    for _ in range(2):
        skipping.round(EVERYONE)
        without.round(torch.tensor([0, 1, 2, 4, 5]))
        assert skipping.engine.notes["skipped"] == [3]
        assert_near(skipping.state, without.state)
    assert 3 not in skipping.engine.memory


def test_a_cohort_of_skipped_clients_is_an_error() -> None:
    world, _ = poisoned(3)
    with pytest.raises(FnrflError, match="No client of the cohort"):
        Run(FedAvg(), world=world, nonfinite="skip").round(torch.tensor([3]))


@ENGINES
def test_a_client_that_raises_becomes_a_client_error_with_its_cause(engine: str) -> None:
    def broken(client: int, x: Tensor, stream: torch.Generator) -> Tensor:
        if client == 2:
            raise ValueError("a broken sensor")
        return x

    played = Run(FedAvg(), engine, world=with_pool(classification(), noise=broken), clients_at_once=1)
    with pytest.raises(ClientError, match="client 2, round 1, stage local: ValueError: a broken sensor") as e:
        played.round(EVERYONE)
    assert isinstance(e.value.__cause__, ValueError)
    assert e.value.client == 2


# -- Rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "eps", "least", "most"),
    [("adam", 1e-8, 1e-12, 1e-7), ("adam", 1e-2, 0.0, 1e-13), ("sgd", 1e-8, 0.0, 1e-13)],
)
def test_batched_differs_from_loop_by_as_much_as_loop_from_itself_after_one_last_bit(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, eps: float, least: float, most: float
) -> None:
    """Before BatchNorm the true gradient of a bias is 0: Adam divides what rounding leaves of it by its own length."""
    monkeypatch.setattr(optim, "ADAM_EPS", eps)

    def trained(engine: str, nudged: int | None = None) -> Flat:
        played = Run(FNR(FedAvg()), engine, training=Training(optimizer=optimizer, lr=0.05, batch=16, epochs=2))
        if nudged is not None:
            params = played.state.params.clone()
            params[nudged] = torch.nextafter(params[nudged], params.new_tensor(9.0))
            played.state = replace(played.state, params=params)
        return played.rounds(3).params

    loop = trained("loop")
    itself = max(distance(loop, trained("loop", nudged)) for nudged in (0, 50, 100))
    assert distance(loop, trained("batched")) <= 10 * itself
    assert least < itself < most


# -- Optimisers -------------------------------------------------------------------------------------------------------


@ENGINES
def test_learning_rate_decays_with_the_round(engine: str) -> None:
    """A linear loss moves by lr * decay^t * b."""
    _, b = bowls()
    world = quadratic(torch.zeros(4, 3, 3).double(), b[:1].expand(4, -1), (10, 20, 30, 40), lr=0.2)
    played = Run(FedAvg(), engine, world=world, lr_decay=0.5)
    for t in range(4):
        before = played.state.params
        assert distance(played.round().params - before, 0.2 * 0.5**t * b[0]) < 1e-12


# -- Batches ----------------------------------------------------------------------------------------------------------


def stream(name: str) -> torch.Generator:
    return generator(0, name)


def orders(n: int, epochs: int) -> list[list[int]]:
    """The epochs' shuffled orders: one stream, one permutation after another."""
    shuffled = stream("batches")
    return [torch.randperm(n, generator=shuffled).tolist() for _ in range(epochs)]


N, B, E = st.integers(1, 40), st.integers(1, 50), st.integers(1, 4)


@given(N, B, E)
def test_every_policy_of_last_batches_covers_every_epoch(n: int, batch: int, epochs: int) -> None:
    def parts(policy: Any) -> list[list[int]]:
        training = Training(batch=batch, epochs=epochs, last_batch=policy)
        return [p.tolist() for p in plan(n, training, stream).batches]

    shuffled = orders(n, epochs)
    want, (full, rest) = sum(shuffled, []), divmod(n, batch)
    run_on, kept, even = parts("run-on"), parts("keep"), parts("even")
    flat = sum(run_on, [])
    assert {len(part) for part in run_on} == {batch} and len(run_on) == -(-epochs * n // batch)
    assert flat[: epochs * n] == want == sum(kept, []) == sum(even, [])
    filled = flat[epochs * n :]  # from the start of the last order, again and again if it is short
    assert filled == [shuffled[-1][i % n] for i in range(len(filled))]
    assert [len(part) for part in kept] == ([batch] * full + [rest] * (rest > 0)) * epochs
    assert parts("drop") == [part for part in kept if len(part) == batch]
    sizes = {len(part) for part in even}
    assert len(even) == len(kept) and max(sizes) <= batch and max(sizes) - min(sizes) <= 1


def test_without_shuffling_examples_come_in_order() -> None:
    parts = plan(5, Training(batch=2, epochs=2, shuffle=False, last_batch="keep"), stream)
    assert [p.tolist() for p in parts.batches] == [[0, 1], [2, 3], [4]] * 2
    assert plan(5, Training(epochs=0), stream).steps == 0


@dataclass(frozen=True)
class Seen(Objective):
    """Notes which positions it was given."""

    batches: list[Tensor] = field(compare=False)

    def loss(self, out: Out, model: Model, params: Flat, batch: Batch, *rest: Any) -> Tensor:
        self.batches.append(batch.index)
        return super().loss(out, model, params, batch, *rest)


def test_a_client_trains_on_its_own_shard_epoch_by_epoch() -> None:
    """As planned for its address, and with another order in another round."""
    played, seen = Run(FedAvg()), []
    for t in (0, 1):
        played.engine.begin(t)
        played.engine.train(torch.tensor([2]), LocalTask(Seen(batches := []), "local", played.state))
        seen.append(torch.cat(batches))
        assert {len(b) for b in batches} == {16}
        for epoch in seen[-1][:100].split(50):
            assert torch.equal(epoch.sort().values, played.world.pool.shards[2].sort().values)
    assert not torch.equal(*seen)


# -- Nets -------------------------------------------------------------------------------------------------------------

X = torch.randn(6, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class Net12(nn.Module):
    """Base of the nets below: layers that they put together as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)  # declared first, called last
        self.body = nn.Linear(12, 16)
        self.drop = nn.Dropout(0.5)
        self.act: nn.Module = nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.drop(self.act(self.body(x))))


def made(module: nn.Module, **options: str) -> Net:
    return Net(module.double(), X, **options)


def test_features_are_the_input_of_the_linear_called_last() -> None:
    net = made(Net12())
    out, _ = net.apply(*net.flatten(), X, mode="frozen")
    assert (net.classifier, net.num_features, net.num_logits) == ("head", 16, 4)
    assert torch.equal(out.features, net.module.body(X).relu())
    assert torch.equal(out.logits, net.module(X))
    assert out.projection is out.features


def test_features_are_the_output_of_a_named_layer() -> None:
    net = made(Net12(), features="body")
    assert torch.equal(net.apply(*net.flatten(), X, mode="frozen")[0].features, net.module.body(X))
    own = Net12()
    own.feature_layer = "body"
    assert made(own).feature_layer == "body"
    with pytest.raises(CompatibilityError, match="'boddy', which is not a layer of the model. Choose one of .*body"):
        made(Net12(), features="boddy")


def test_a_net_without_linear_has_no_features() -> None:
    net = made(nn.Sequential(nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 4, 12), nn.Flatten()))
    assert not net.has_features
    assert net.num_features == 0


def test_dropout_masks_are_inputs() -> None:
    """Kept where the uniform number is at least p, scaled so that the mean stays; nothing dropped in eval mode."""
    net = made(Net12())
    assert isinstance(net.module.drop, Dropout)
    assert net.drop_shapes == {"drop.uniform": (16,)}
    uniform = torch.rand(6, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    params, buffers = net.flatten()
    assert buffers == {}
    features = net.apply(params, buffers, X, mode="updating", masks={"drop.uniform": uniform})[0].features
    kept = net.module.body(X).relu()
    assert torch.equal(features, torch.where(uniform >= 0.5, kept * 2, 0.0))
    assert torch.equal(net.apply(params, buffers, X, mode="frozen")[0].features, kept)


def test_dropout_of_a_run_is_drawn_from_addressed_streams() -> None:
    """The global generator neither matters nor moves."""
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        states.append(Run(FNR(Moon())).rounds(2))
        assert torch.equal(torch.get_rng_state(), before)
    assert_same(*states)
    assert distance(states[0].params, Run(FNR(Moon()), seed=8).rounds(2).params) > 1e-3


class Odd(Net12):
    """Does one odd thing in its forward pass, or in its layers."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.act = what, nn.RReLU() if what == "a layer draws" else nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        if self.what in ("draws", "draws in eval mode"):
            return self.head(functional.dropout(self.body(x), 0.5, self.training == (self.what == "draws")))
        logits = super().forward(self.drop(x) if self.what == "drops twice" else x)
        return {"pair": (logits, x), "flat": logits.flatten()}.get(self.what, logits)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("a layer draws", r"^act \(RReLU\) draws random numbers"),
        ("draws", r"^the model \(Odd\) draws random numbers"),
        ("draws in eval mode", r"^the model \(Odd\) draws random numbers"),
        ("drops twice", "drop is called twice"),
        ("pair", r"\[batch, classes\] but gave tuple for a batch of 6"),
        ("flat", r"\(24,\) for a batch of 6"),
    ],
)
def test_nets_that_cannot_be_repeated_or_read_are_refused_by_name(what: str, says: str) -> None:
    with pytest.raises(CompatibilityError, match=says):
        made(Odd(what))


def test_a_net_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(CompatibilityError, match="no trainable parameters"):
        made(Net12().requires_grad_(False))


class HalfFrozen(Mlp):
    """A net whose first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden.requires_grad_(False)


@ENGINES
def test_frozen_parameters_stay(engine: str) -> None:
    played = Run(FNR(FedAvg()), engine, world=classification(module=HalfFrozen))
    before = played.net.export(played.state.params, played.state.buffers)
    assert played.net.size == sum(p.numel() for p in before.parameters() if p.requires_grad) == 16 * 2 + 16 * 4 + 4
    after = played.net.export(played.rounds(2).params, played.state.buffers)
    assert torch.equal(before.hidden.weight, after.hidden.weight)
    assert not torch.equal(before.head.weight, after.head.weight)


def test_export_is_an_ordinary_module_with_the_same_logits() -> None:
    """The caller's own; and it can be trained on, since its dropout drops again."""
    played = Run(FedAvg())
    state = played.rounds(2)
    module = played.net.export(state.params, state.buffers)
    assert torch.equal(module(X), played.net.apply(state.params, state.buffers, X, mode="frozen")[0].logits)
    with torch.no_grad():
        module.hidden.weight.zero_()
    assert not torch.equal(module(X), played.net.export(state.params, state.buffers)(X))
    dropped = module.train().drop(torch.ones(1000, 16, dtype=torch.float64))
    assert 0.1 < float((dropped == 0).double().mean()) < 0.3
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.05)


def test_buffers_of_the_caller_are_never_written() -> None:
    net = Run(FedAvg()).net
    params, buffers = net.flatten()
    copies = {k: v.clone() for k, v in buffers.items()}
    masks = {"drop.uniform": torch.ones(6, 16, dtype=torch.float64)}
    for mode in ("updating", "batch", "frozen"):
        _, new = net.apply(params, buffers, X, mode=mode, masks=masks)
        assert all(torch.equal(buffers[k], v) for k, v in copies.items())
        assert torch.equal(new["norm.running_mean"], copies["norm.running_mean"]) == (mode != "updating")
    assert all(torch.equal(net.module.get_buffer(k), v) for k, v in copies.items())


# -- Metered ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("most", [1e-3, 0.05, 1e9])
def test_no_client_moves_further_than_its_update_may(engine: str, most: float) -> None:
    def replies(clip: float) -> tuple[State, Replies]:
        played = Run(FedAvg(), engine, training=replace(classification().training, clip_update=clip))
        start = played.state
        return start, played.engine.train(played.cohort(0), LocalTask(Objective(), "local", start))

    start, free = replies(0.0)
    _, bound = replies(most)
    moved = free.params - start.params
    lengths = moved.norm(dim=1, keepdim=True)
    assert torch.allclose(bound.params, start.params + moved * (most / lengths).clamp(max=1.0), atol=1e-12)
    assert ((bound.params - start.params).norm(dim=1) <= most * (1 + 1e-9)).all()
    public = LocalTask(Objective(), "refine", start, data="public", remember=False)
    played = Run(FedAvg(), engine, training=replace(classification().training, clip_update=1e-6))
    assert (played.engine.train(played.cohort(0), public).params - start.params).norm() > 1e-3  # private training alone


def test_a_start_sent_twice_is_counted_once() -> None:
    played = Run(FedAvg())
    model = 4 * (played.net.size + 2 * 16) + 8  # parameters, two statistics, a counter
    task = LocalTask(Objective(), "local", played.state)
    played.metered.train(torch.tensor([0, 1]), task)
    assert played.metered.bytes["local"] == {"down": 2 * model, "up": 2 * model, "headers": 2 * (8 + 4 + 8 + 4 + 4)}
    played.metered.train(torch.tensor([1, 2, 3]), replace(task, purpose="again"))
    assert played.metered.bytes["again"]["down"] == 2 * model  # client 1 has it
    other = State(played.state.params.clone(), played.state.buffers)
    played.metered.train(torch.tensor([1]), LocalTask(Objective(), "other", other))
    assert played.metered.bytes["other"]["down"] == model
    played.metered.begin()
    played.metered.train(torch.tensor([1]), task)
    assert played.metered.bytes == {"local": {"down": model, "up": model, "headers": 28}}


def test_seconds_of_a_phase_are_those_of_all_its_chunks() -> None:
    played, ticks = Run(FedAvg(), clients_at_once=2), count()
    metered = Metered(played.engine, clock=lambda: float(next(ticks)))  # goes on by one at each look
    metered.train(EVERYONE, LocalTask(Objective(), "local", played.state))
    assert metered.seconds == {"local": 4.0}  # three chunks, and that there are no more


# -- Crowds -----------------------------------------------------------------------------------------------------------


def test_memory_is_used_again_when_no_tensor_lies_in_it() -> None:
    memory, like = ReusedMemory(), torch.zeros(3, 5)
    first = memory.like(like).fill_(1.0)
    view = first[1]
    del first
    second = memory.like(like).fill_(2.0)  # not over the view
    assert view.tolist() == [1.0] * 5
    where = second.data_ptr()
    assert where % 64 == 0
    del second, view
    assert memory.like(like[:2]).data_ptr() == where
    assert memory.like(like.double()).dtype == torch.float64


def test_a_cohort_is_trained_in_blocks_unless_its_clients_hold_models() -> None:
    whole, blocks = (Run(FedAvg(), "loop", active=6) for _ in range(2))
    blocks.engine.clients.block = 2
    task, cohort = LocalTask(Objective(), "local", whole.state), torch.arange(6)
    assert [len(chunk.clients) for chunk in blocks.engine.stream(cohort, task)] == [2, 2, 2]
    assert [len(chunk.clients) for chunk in blocks.engine.stream(cohort, replace(task, hold_model=True))] == [6]
    for played in (whole, blocks):
        played.rounds(2)
    assert_near(whole.state, blocks.state)
