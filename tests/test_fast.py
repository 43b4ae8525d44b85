"""Accelerators: recorded steps, groups of clients, channels-last weights, batches gathered at once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.moon import Moon
from fnrfl.algorithms.scaffold import Scaffold
from fnrfl.config import RunConfig, load
from fnrfl.core.net import Net
from fnrfl.core.types import Training, Tree
from fnrfl.core.values import SERVER
from fnrfl.engines.devices import Threads
from fnrfl.engines.groups import (
    GROUP_SIZE,
    MIN_STEPS_FOR_OWN_WIDTH,
    MIN_STEPS_FOR_SHORT_BATCH,
    ShortSizes,
    StepEstimate,
    halves,
    in_groups,
    shrinking,
)
from fnrfl.engines.recorder import recorder as recorder_module
from fnrfl.engines.recorder import torchscript
from fnrfl.engines.recorder.programs import FlatProgram, Program, Recording
from fnrfl.engines.recorder.recorder import Recorder
from fnrfl.engines.recorder.torchscript import TorchScript
from fnrfl.engines.vectorised import Vectorised
from fnrfl.models.catalogue import build_model
from fnrfl.runs import run as runs
from fnrfl.runs.setup import build
from fnrfl.runs.setup import engine as auto
from settings import with_keys
from test_conformance import FEW_METHODS, LIKE_FEDAVG, METHODS, algorithm, each
from toys import NUM_CLASSES, NUM_FEATURES, Plain, Run, assert_near, assert_same, classification, distance, with_pool

FAST = pytest.mark.parametrize("engine", ["loop-fast", "batched-fast"])


def recorder(run: Run) -> Recorder:
    found = run.engine.server.runner.recorder
    assert found is not None
    return found


def programs(run: Run) -> list[Program | None]:
    return [kept.program for kept in recorder(run).programs.values()]


# -- Recorded steps ---------------------------------------------------------------------------------------------------


# FedBN's refinement leaves some parameters out, by a mask that TorchScript does not take; its steps run one by one.
@pytest.mark.usefixtures("no_programs")
@each(
    lambda label, engine: label not in LIKE_FEDAVG if engine == "loop-fast" else label in FEW_METHODS,
    left_out={label for label in METHODS if label.startswith("fedbn")},
    engine=("loop-fast", "batched-fast"),
)
def test_the_steps_of_every_method_can_be_recorded(label: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By TorchScript, with BatchNorm and dropout: the slower way to run a record is taken away."""
    monkeypatch.setattr(torchscript, "repeated", lambda step: pytest.fail("not scripted"))
    run = Run(algorithm(label, refined=True), engine, active=3)
    run.rounds(1)
    assert programs(run)
    assert all(program is not None for program in programs(run))


@pytest.mark.usefixtures("no_programs")
@each(lambda label, engine: True, engine=("batched-fast",))
def test_a_record_does_not_depend_on_numbers(label: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU steps are recorded without any: the record is the one that a computed step leaves."""
    records: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def both(*arguments: Any, **_: Any) -> Recording:
        computed, shapes = (recorded(*arguments, computes=computes) for computes in (True, False))
        records.append((computed.graph, shapes.graph))
        return shapes

    recorded = recorder_module.recorded
    monkeypatch.setattr(recorder_module, "recorded", both)
    run = Run(algorithm(label, refined=True), engine, active=3)
    run.rounds(1)
    assert records and all(program is not None for program in programs(run))
    for computed, shapes in records:
        assert operators(computed) == operators(shapes)


def operators(graph: fx.GraphModule) -> list[str]:
    """What a record computes; views that change nothing may be left out of it, and a >= b stand as b <= a."""
    views = (torch.ops.aten.view.default, torch.ops.aten.expand.default)
    computed = [node.target for node in graph.graph.nodes if node.op == "call_function" and node.target not in views]
    return sorted(str(target).replace(".ge.", ".le.") for target in computed)


@pytest.mark.usefixtures("no_programs")
@FAST
def test_nothing_is_recorded_twice(engine: str) -> None:
    """The learning rate decays, models and memories change: all of it is read, none of it recorded."""
    run = Run(FNR(Scaffold()), engine, active=3, lr_decay=0.7)
    run.rounds(1)
    recorded = recorder(run).num_recorded
    assert recorded > 0
    run.rounds(3)
    assert recorder(run).num_recorded == recorded
    assert_near(run.state, Run(FNR(Scaffold()), active=3, lr_decay=0.7).rounds(4), atol=1e-9)


class Convolutional(nn.Sequential):
    """With every layer whose derivative says which of its outputs are wanted."""

    def __init__(self) -> None:
        width = NUM_FEATURES
        first = [nn.Flatten(), nn.Unflatten(1, (1, width)), nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU()]
        second = [nn.Conv1d(4, 4, 3, padding=1), nn.LayerNorm(width), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten()]
        super().__init__(*first, *second, nn.Linear(4 * width, NUM_CLASSES))


@pytest.mark.usefixtures("no_programs")
@FAST
def test_steps_of_convolutions_and_norms_run_in_torchscript(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchscript, "repeated", lambda step: pytest.fail("not scripted"))
    world = classification(module=Convolutional)
    run = Run(FNR(FedAvg()), engine, world=world)
    assert_near(run.rounds(3), Run(FNR(FedAvg()), world=world).rounds(3), atol=1e-9)
    assert programs(run) and None not in programs(run)


class Moody(nn.Module):
    """Looks at its input before it decides, which no record can."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.other = nn.Linear(NUM_FEATURES, 8), nn.Linear(NUM_FEATURES, 8)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Any:
        layer = self.hidden if float(x.sum()) > 0 else self.other
        return self.head(layer(x.flatten(1)).relu())


def test_what_cannot_be_recorded_is_run_as_it_is() -> None:
    world = classification(module=Moody)
    plain, fast = Run(FNR(FedAvg()), world=world), Run(FNR(FedAvg()), "loop-fast", world=world)
    assert_same(plain.rounds(2), fast.rounds(2))
    assert programs(fast)
    assert set(programs(fast)) == {None}


@pytest.mark.usefixtures("no_programs")
@FAST
def test_a_record_that_does_not_repeat_the_step_is_refused(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.sub_.Tensor:  # the update
                node.target = torch.ops.aten.add_.Tensor

    monkeypatch.setattr(recorder_module, "leave_out_views", spoil)
    run = Run(FedAvg(), engine)
    plain = Run(FedAvg(), engine.removesuffix("-fast"), threads=2)
    assert_same(run.rounds(2), plain.rounds(2))
    assert set(programs(run)) == {None}


@pytest.mark.usefixtures("no_programs")
@FAST
def test_without_torchscript_a_record_is_run_operator_by_operator(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> FlatProgram:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torchscript, "_scripted", refuse)
    run = Run(FNR(Moon()), engine, active=2)
    assert_near(run.rounds(2), Run(FNR(Moon()), active=2).rounds(2), atol=1e-9)
    assert None not in programs(run)


def test_arguments_are_told_apart_by_place_and_by_name() -> None:
    """One tensor may be two arguments, and dicts may be filled in any order."""

    def step(carry: Tree, fixed: Tree, x: Tensor) -> Tensor:
        carry["a"].add_(fixed["c"] * x)
        return carry["b"] - fixed["d"]

    one, two, three, four = (torch.full((2,), value) for value in (1.0, 2.0, 3.0, 4.0))
    for carried in ({"b": two.clone(), "a": one.clone()}, {"b": one, "a": one}):
        example = step, carried, {"d": four, "c": three}, one
        program = Recorder(TorchScript()).program(id(carried), lambda example=example: example)  # type: ignore[misc]
        assert program is not None
        carry = {"a": one.clone(), "b": two.clone()}
        losses = program(carry, {"c": three, "d": four}, torch.tensor([[1.0, 1.0], [10.0, 10.0]]))
        assert carry["a"].tolist() == [34.0, 34.0] and carry["b"].tolist() == [2.0, 2.0]
        assert losses.tolist() == [[-2.0, -2.0]] * 2 and one.tolist() == [1.0, 1.0]


# -- Threads ----------------------------------------------------------------------------------------------------------


def many(clients: int, threads: int = 2) -> Run:
    world = with_pool(classification(module=Plain), torch.arange(clients * 6).split(6))
    training = Training(epochs=1, batch=6, lr=0.05)
    return Run(FedAvg(), "batched", world=replace(world, training=training, active=clients), threads=threads)


@FAST
def test_programs_use_no_module_at_all(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads may share them: once recorded, a round of FedAvg calls no model."""
    run, other = (Run(FedAvg(), engine, active=3) for _ in range(2))
    run.round(torch.arange(3))
    other.round(torch.arange(3))
    monkeypatch.setattr(Net, "apply", lambda *_, **__: pytest.fail("a model was called"))
    assert distance(other.state.params, run.round(torch.arange(3)).params) > 0


@FAST
@pytest.mark.parametrize("threads", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_number_of_threads_changes_no_bit(engine: str, threads: int) -> None:
    assert_same(Run(FNR(FedAvg()), engine, threads=threads).rounds(2), Run(FNR(FedAvg()), engine).rounds(2))


def test_a_cohort_of_several_groups_has_the_same_bits_on_any_number_of_threads() -> None:
    assert_same(many(40, threads=1).rounds(2), many(40, threads=3).rounds(2))


# -- Groups -----------------------------------------------------------------------------------------------------------

STEPS = st.lists(st.integers(0, 9), min_size=1, max_size=60)


@given(STEPS)
def test_groups_hold_everybody_once_longest_first(steps: list[int]) -> None:
    groups = in_groups(steps)
    flat = [m for group in groups for m in group]
    assert sorted(flat) == list(range(len(steps)))
    assert [steps[m] for m in flat] == sorted(steps, reverse=True)
    assert max(map(len, groups)) <= GROUP_SIZE


@given(STEPS)
def test_a_shrinking_group_takes_every_step_of_everybody(steps: list[int]) -> None:
    steps = sorted(steps, reverse=True)
    taken = shrinking(steps, halves(len(steps)))
    assert [first for first, _, _ in taken] == [0, *(last for _, last, _ in taken)][: len(taken)]
    assert (taken[-1][1] if taken else 0) == max(steps)
    for first, last, width in taken:
        live = sum(n > first for n in steps)
        assert live <= width <= len(steps)
        assert width in halves(len(steps))
        assert width == 1 or live > width // 2 or width == min(w for w in halves(len(steps)) if w >= live)
        assert all(n <= first or n >= last for n in steps)


@pytest.mark.parametrize("engine", ["batched", "batched-fast", "gpu", "gpu-fast"])
def test_a_group_may_hold_nobody_who_takes_a_step(engine: str) -> None:
    """Clients with fewer examples than a batch, under `last_batch = "drop"`: the last groups have nothing to do."""
    world = classification()
    training = replace(world.training, last_batch="drop", batch=40)
    one, other = (Run(FedAvg(), name, world=world, training=training, active=6) for name in ("loop", engine))
    other.engine.server.runner.group_size = 2
    for run in (one, other):
        run.rounds(2)
    assert_near(one.state, other.state, 1e-9)


# -- Batches gathered at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "batched", "loop-fast", "batched-fast"])
@pytest.mark.parametrize("policy", ["run-on", "keep"])
def test_how_much_is_gathered_at_once_changes_no_bit(engine: str, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout and a client's noise, whose numbers are drawn for many steps or for one."""
    noise = lambda client, x, stream: x + 0.1 * client * torch.randn(x.shape, generator=stream).to(x)  # noqa: E731
    world = with_pool(classification(), noise=noise)
    world = replace(world, training=replace(world.training, last_batch=policy, batch=15))
    whole = Run(FedAvg(), engine, world=world).rounds(2)
    monkeypatch.setattr(Threads, "max_gather_bytes", 1)
    assert_same(whole, Run(FedAvg(), engine, world=world).rounds(2))
    assert_near(whole, Run(FedAvg(), world=world).rounds(2), atol=1e-9)


# -- Channels-last ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn(norm=batch)", "simple-cnn", "resnet18"])
def test_only_the_order_inside_the_vector_differs(name: str) -> None:
    module = build_model(name, (3, 32, 32), 10)
    x = torch.rand(2, 3, 32, 32)
    plain, last = Net(module, x), Net(module, x, channels_last=True)
    (a, buffers), (b, _) = plain.flatten(), last.flatten()
    assert a.shape == b.shape
    assert not torch.equal(a, b)
    assert torch.equal(a.sort().values, b.sort().values)
    one, other = plain.unflatten(a), last.unflatten(b)
    assert all(torch.equal(one[k], other[k]) and one[k].shape == other[k].shape for k in one)
    assert torch.equal(last.pack(other | buffers)[0], b)
    assert torch.equal(last.pack(one | buffers)[0], b)
    exported = last.export(b, buffers)
    assert all(torch.equal(p, one[n]) for n, p in exported.named_parameters())
    weight = next(v for v in other.values() if v.ndim == 4 and v.shape[1] > 1)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert last.laid_out(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "DefaultCPUAllocator: not enough memory"])
def test_a_module_for_which_there_is_no_memory_is_not_taken_for_one_that_asks_for_views(words: str) -> None:
    def full(layer: nn.Module, x: tuple[Tensor]) -> None:
        if x[0].is_contiguous(memory_format=torch.channels_last):
            raise RuntimeError(words)

    module = build_model("cnn", (3, 32, 32), 10)
    module.register_forward_pre_hook(full)
    with pytest.raises(RuntimeError, match=words):
        Net(module, torch.rand(2, 3, 32, 32), channels_last=True)


# -- What a run uses --------------------------------------------------------------------------------------------------


def built(*keys: str) -> build.Built:
    return build.build(load(None, list(keys)))


@pytest.mark.parametrize(
    ("keys", "engine", "threads"),
    [
        ("", "batched", 3), ("clients=2", "batched", 2), ("clients=1 scenario=iid", "loop", 1),
        ("model=mlp(hidden=1000)", "loop", 3), ("model=cnn", "loop", 3), ("engine=loop", "loop", 3),
        ("engine=batched model=cnn engine.threads=1", "batched", 1),
    ],
)  # fmt: skip
def test_auto_is_the_documented_rule(keys: str, engine: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = built(*keys.split()).config.engine
    assert (chosen.name, chosen.threads) == (engine, threads)


@pytest.mark.parametrize(
    ("keys", "records", "channels_last"),
    [
        ("rounds=1", False, False), ("rounds=1000 model=mlp", True, False), ("rounds=1000 engine=loop", True, None),
        ("rounds=1000 engine.accelerate=false", False, None), ("rounds=1000 model=cnn", True, True),
        ("rounds=2 clients=10 model=cnn", False, True), ("model=cnn engine.accelerate=false", None, False),
    ],
)  # fmt: skip
def test_long_runs_are_recorded_and_convolutions_are_channels_last(
    keys: str, records: bool | None, channels_last: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = built(*keys.split())
    assert records in (None, made.engine.server.runner.recorder is not None)
    assert channels_last in (None, made.net.channels_last)


@FAST
@pytest.mark.parametrize("rounds", [1, MIN_STEPS_FOR_SHORT_BATCH])
def test_last_batches_are_recorded_if_there_will_be_many(engine: str, rounds: int) -> None:
    """And full ones, however many sizes the last ones have."""
    world = classification(module=Plain)
    training = replace(world.training, last_batch="keep", epochs=1)
    run = Run(FedAvg(), engine, world=world, training=training, active=6, rounds=rounds)
    with mock.patch.object(Vectorised, "_pads", return_value=False):  # as where nothing can be padded
        got = run.round()
    last = {int(n) % training.batch for n in world.pool.examples} - {0}
    sizes = {key[1 if engine == "batched-fast" else 0] for key in recorder(run).programs}
    assert sizes == ({training.batch} if rounds == 1 else {training.batch, *last})
    assert_near(got, Run(FedAvg(), world=world, training=training, active=6).round(), atol=1e-12)


def test_on_a_gpu_steps_are_captured_if_the_groups_of_a_cohort_take_enough() -> None:
    few = built("clients=10", "rounds=2", "client.batch=32")
    keys = {"rounds": auto.WORTH_CAPTURING - 1, "client": {"epochs": 1, "batch": 10_000}, "engine": {"name": "gpu"}}
    for clients, captured in ((10, False), (16, False), (17, True), (100, True)):
        config = with_keys(few.config, {**keys, "clients": clients})
        assert auto.records_steps(config, few.net, int(few.pool.examples.max())) is captured


@pytest.mark.parametrize("rounds", [1, 5])
def test_engines_that_train_clients_one_by_one_record_the_same_runs(rounds: int) -> None:
    few = built("clients=10", "client.batch=32")
    configs = [
        with_keys(few.config, {"rounds": rounds, "engine": {"name": name}}) for name in ("loop", "ray", "flower")
    ]
    assert len({auto.records_steps(config, few.net, 60) for config in configs}) == 1


def short(*keys: str) -> RunConfig:
    return load(None, ["rounds=4", "clients=4", "client.epochs=1", "fnr=on", "algorithm=scaffold", *keys])


@pytest.mark.parametrize("model", ["mlp", "cnn(norm=batch)"])
def test_a_fast_run_is_the_plain_run(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In double precision, model by name, and the same bits on every rerun."""
    monkeypatch.setattr(auto, "WORTH_RECORDING", 1)
    keys = (f"model={model}", "engine.precision=float64")
    fast, again = (runs.run(short(*keys), out=None) for _ in range(2))
    plain = runs.run(short(*keys, "engine=loop", "engine.accelerate=false"), out=None)
    assert fast.model_sha256 == again.model_sha256
    ours, theirs = fast.model.state_dict(), plain.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(distance(ours[k].double(), theirs[k].double()) < 1e-9 for k in ours)


# -- How many steps a run will take ---------------------------------------------------------------------------------


def job(epochs: int, batch: int, clients: int) -> Any:
    return SimpleNamespace(
        task=SimpleNamespace(data="private"), training=SimpleNamespace(epochs=epochs, batch=batch, last_batch="keep"),
        clients=list(range(clients)),
    )  # fmt: skip


def test_every_step_of_every_client_is_in_a_group_of_some_rows() -> None:
    work = StepEstimate(examples=[64 * n for n in (1, 2, 3, 40)], rounds=5)
    by_rows = work.steps_by_rows(job(epochs=2, batch=64, clients=4), halves(4))
    assert set(by_rows) <= {4, 2, 1}
    assert sum(by_rows.values()) >= 5 * 2 * (1 + 2 + 3 + 40)  # idle rows are counted too
    assert by_rows[1] > by_rows[4]


def test_a_task_on_public_data_counts_for_the_whole_cohort_however_few_clients_a_chunk_has() -> None:
    work, task = StepEstimate(examples=[64] * 40, rounds=5, participation=0.5), job(epochs=2, batch=8, clients=3)
    task.task.data, task.plans = "public", [SimpleNamespace(order=range(2 * 19))]
    assert work.short_sizes(task, 1, 9).recorded == set()  # 3: 20 clients, 2 epochs, 5 rounds
    assert replace(work, rounds=8).short_sizes(task, 1, 9).recorded == {3}
    task.clients = [SERVER]
    assert replace(work, rounds=8).short_sizes(task, 1, 9).recorded == set()


@pytest.mark.parametrize(
    ("width", "most", "participation", "sizes"),
    [
        (4, 9, 1.0, ({3, 5}, {5}, {3})),  # two of four clients share 3
        (4, 9, 0.5, ({3, 5}, {5}, set())),  # how many do, differs from round to round
        (4, 3, 1.0, ({3, 5}, {3, 5}, set())),  # a program for each number of rows would be too many
        (4, 1, 1.0, (set(), set(), set())),
        (1, 9, 1.0, ({3, 5}, {3, 5}, set())),
    ],
)
def test_last_batches_that_clients_share_are_recorded_for_groups(
    width: int, most: int, participation: float, sizes: Any
) -> None:
    work = StepEstimate(examples=[11, 19, 27, 13], rounds=1000, participation=participation)
    assert work.short_sizes(job(epochs=2, batch=8, clients=4), width, most) == ShortSizes(*sizes)


@pytest.mark.parametrize("rounds", [1, 3, 10, 1000])
def test_a_width_of_few_steps_needs_no_program_where_idle_rows_cost_little(rounds: int) -> None:
    work, task = StepEstimate(examples=[640, 6400, 32000, 32640], rounds=rounds), job(epochs=2, batch=64, clients=4)
    widths, halved = work.widths(task, 4), work.steps_by_rows(task, halves(4))
    assert widths == [rows for rows in halves(4) if rows == 4 or halved[rows] // rows >= MIN_STEPS_FOR_OWN_WIDTH]
    assert (len(widths), widths[-1]) == ({1: 2, 3: 2, 10: 2, 1000: 3}[rounds], 4)
    taken = work.steps_by_rows(task, widths)  # wider, and as many
    assert set(taken) == set(widths) and sum(taken.values()) >= sum(halved.values())


@pytest.mark.parametrize(("engine", "rounds"), [("gpu-fast", 1), ("gpu-fast", 10_000), ("batched-fast", 1)])
@pytest.mark.usefixtures("no_programs")
def test_groups_shrink_to_widths_that_have_a_program(engine: str, rounds: int) -> None:
    """Where idle rows cost time, to a half each time."""
    training = replace(classification().training, batch=7)
    run = Run(FedAvg(), engine, training=training, active=6, rounds=rounds)
    run.rounds(2)
    assert_near(run.state, Run(FedAvg(), training=training, active=6).rounds(2), atol=1e-9)
    recorder = run.engine.server.runner.recorder
    assert recorder is not None
    widths: Any = {key[0] for key in recorder.programs}  # type: ignore[index]
    assert widths == ({6} if (engine, rounds) == ("gpu-fast", 1) else set(halves(6)))
