"""The GPU's engine: on the CPU everywhere, on a GPU where there is one.

What the loop engine has done is gone on with, so that nothing that a method knows is still zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from threading import Barrier
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.parts.norms import ClassNorms
from fnrfl.algorithms.scaffold import Scaffold
from fnrfl.config import load
from fnrfl.core.algorithm import Objective
from fnrfl.core.errors import CompatibilityError, FnrflError
from fnrfl.core.store import ClientStore
from fnrfl.core.types import LocalTask, Tree
from fnrfl.data.batches import Pool
from fnrfl.engines.devices import DevicePool
from fnrfl.engines.gpus import Gpus, choose_kernels, found_devices
from fnrfl.engines.job import Job
from fnrfl.engines.recorder import cuda_graphs
from fnrfl.engines.recorder.cuda_graphs import cudnn_autotune
from fnrfl.engines.recorder.programs import MAX_RELATIVE_ERROR, close_enough
from fnrfl.engines.recorder.recorder import ProgramRequest, Recorder
from fnrfl.engines.runner import Blame, Probing, Runner
from fnrfl.models.catalogue import build_model
from fnrfl.runs.scores import score_model
from fnrfl.runs.setup.build import build as build_run
from test_conformance import FEW_METHODS, algorithm, each, labels, models
from toys import NUM_CLASSES, NUM_FEATURES, Run, World, assert_same, classification, distance

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
each_device = pytest.mark.parametrize("device", ["cpu", CUDA])
bare_and_refined = pytest.mark.parametrize("refined", [False, True], ids=["bare", "fnr"])
BORN = {"server.cluster"}  # may be zero: the number of a cluster


@pytest.fixture(autouse=True)
def _exact() -> Any:
    """Kernels that repeat, without tf32."""
    if torch.cuda.is_available():
        choose_kernels(deterministic=True, tf32=False)
    yield
    torch.use_deterministic_algorithms(False)


class Pictures(nn.Module):
    """Convolutions of both kinds, BatchNorm, Dropout and a Linear, for the toy examples as 3 by 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.point = nn.Conv2d(6, 8, 1, stride=(1, 2))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8 * NUM_FEATURES // 2, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x.view(-1, 1, 3, 4))).relu()
        logits: Tensor = self.head(self.drop(self.point(y)).relu().flatten(1))
        return logits


@cache
def begun(label: str, refined: bool) -> Run:
    """Three rounds on the loop engine."""
    run = Run(algorithm(label, refined), "loop-fast", world=classification(module=Pictures), record=False)
    run.rounds(3)
    return run


def gone_on(run: Run, engine: str, rounds: int = 2, **options: Any) -> Run:
    """Another run that has the first one's state and memories, after its next rounds."""
    other = Run(run.algorithm, engine, world=run.world, **options)
    other.state, other.t = run.state.to(other.net.device), run.t
    for client in run.engine.memory:
        other.engine.memory.put(client, {k: v.to(other.net.device) for k, v in run.engine.memory.get(client).items()})
    other.rounds(rounds)
    return other


def recorder(run: Run) -> Recorder:
    found = run.engine.server.runner.recorder
    assert found is not None
    return found


def everything(run: Run) -> Tree:
    """All numbers that a run has come to."""
    known = {"params": run.state.params} | run.state.buffers | known_to_the_method(run)
    for client, model in enumerate(models(run)):
        known |= {f"model {client}": model.params}
    return {k: v.cpu() for k, v in known.items()}


def known_to_the_method(run: Run) -> Tree:
    """What a method keeps beside the model: the server's, and that of every client that has taken part."""
    memory = {f"{c}.{k}": v for c in run.engine.memory for k, v in run.engine.memory.get(c).items()}
    return {f"server.{k}": v for k, v in run.state.extra.items()} | memory


def assert_alike(a: Run, b: Run, limit: float) -> None:
    mine, theirs = everything(a), everything(b)
    assert mine.keys() == theirs.keys()
    off = {k: distance(mine[k].double(), theirs[k].double()) for k in mine if mine[k].numel()}
    assert max(off.values()) <= limit, max(off.items(), key=lambda item: item[1])


@pytest.mark.usefixtures("no_programs")
@each(lambda label, refined: not refined or label in FEW_METHODS, refined=(False, True))
@each_device
@pytest.mark.parametrize("steps", ["plain", "captured"])
def test_rounds_equal_the_loop_engines(
    label: str, refined: bool, device: str, steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64, from a state in which nothing is zero any more."""
    if device == "cpu" and steps == "captured":
        pytest.skip("the CPU has recorded steps, which have tests of their own")
    monkeypatch.setattr(cuda_graphs, "repeated", lambda step: pytest.fail("not captured"))
    first = begun(label, refined)
    assert all(v.any() for k, v in known_to_the_method(first).items() if k not in BORN), "nothing to go on with"
    ours = gone_on(first, "gpu-fast", device=device, record=steps == "captured", threads=1)
    theirs = gone_on(first, "loop-fast", record=False)
    assert_alike(ours, theirs, 1e-9)
    if steps == "captured":
        programs = [kept.program for kept in recorder(ours).programs.values()]
        assert programs and None not in programs


@each_device
def test_the_same_twice_is_the_same_to_the_last_bit(device: str) -> None:
    world = classification(torch.float32, module=Pictures)
    runs = [Run(Scaffold(), "gpu-fast", world=world, device=device, record=device == "cuda") for _ in range(2)]
    assert_same(*(run.rounds(3) for run in runs))


def test_several_devices_give_what_one_gives() -> None:
    world = classification(module=Pictures)
    one = Run(Scaffold(), "gpu-fast", world=world, active=6, record=False)
    devices = [torch.device("cpu")] * 3
    many = Run(Scaffold(), "gpu-fast", world=world, active=6, record=False, devices=devices, clients_at_once=6)
    assert many.engine.server.runner.group_size == 2 < one.engine.server.runner.group_size  # as many groups as devices
    together = Barrier(3)
    modules = many.engine.each(3, lambda net, i: (together.wait(timeout=20), net.module)[1])
    assert len(set(map(id, modules))) == 3  # one for each device
    one.rounds(2)
    many.rounds(2)
    assert_alike(one, many, 1e-12)


# -- memory -----------------------------------------------------------------------------------------------------------


class Tight(Runner):
    """A runner like another, on a device where only some jobs fit in memory."""

    def __init__(self, runner: Runner, fits: Callable[[Job], bool], full: Exception) -> None:
        super().__init__(runner.recorder, runner.estimate, group_size=runner.group_size)
        self.runner, self.fits, self.full = runner, fits, full

    def run(self, job: Job, pool: DevicePool, blame: Blame) -> list[Tensor]:
        if not self.fits(job):
            raise self.full
        self.runner.group_size = self.group_size
        return self.runner.run(job, pool, blame)

    def measure(self, probing: Probing, pool: DevicePool) -> list[Tree]:
        return self.runner.measure(probing, pool)


FULL = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")]


def tighten(run: Run, fits: Callable[[Job], bool], full: Exception = FULL[0]) -> None:
    """From now on only some jobs fit in memory."""
    trainer = run.engine.server
    trainer.runner = Tight(trainer.runner, fits, full)


@pytest.mark.parametrize("full", FULL, ids=["torch", "others"])
def test_what_does_not_fit_is_done_again_with_half_the_clients(full: Exception, caplog: Any) -> None:
    roomy = Run(Scaffold(), "gpu", active=6)
    tight = Run(Scaffold(), "gpu", active=6)
    tighten(tight, lambda job: len(job.clients) <= 2, full)
    roomy.rounds(2)
    tight.rounds(2)
    assert_alike(roomy, tight, 1e-12)
    said = [r.getMessage() for r in caplog.records if "memory is full" in r.getMessage()]
    assert len(said) == 2 and "2 clients" in said[-1]  # 6, 3, 2; and never again
    tighten(tight, lambda job: False)
    with pytest.raises(FnrflError, match="does not fit in the GPU's memory"):
        tight.round()


@pytest.mark.parametrize("where", ["memory", "held_models"])
@bare_and_refined
def test_memory_that_is_full_in_the_end_changes_nothing(where: str, refined: bool, monkeypatch: Any) -> None:
    """Not a client may remember or hold what it came to in an attempt that failed."""
    method = algorithm("scaffold", refined)
    whole, interrupted = (Run(method, "gpu", active=6) for _ in range(2))
    store, calls = getattr(interrupted.engine.clients, where), []

    def copied(memory: Tree) -> Tree:
        calls.append(memory)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return type(store).copied(store, memory)

    monkeypatch.setattr(store, "copied", copied)
    whole.rounds(2)
    interrupted.rounds(2)
    assert len(calls) > 6 or (where == "held_models" and not refined)
    assert_alike(whole, interrupted, 1e-12)


@pytest.mark.usefixtures("no_programs")
def test_programs_are_let_go_once_and_then_there_are_fewer_clients(caplog: Any) -> None:
    """Those that cannot be there together would be recorded anew in every round."""
    roomy, crowded = (Run(algorithm("fedavg", True), "gpu", active=6, record=True) for _ in range(2))
    tighten(crowded, lambda job: len(recorder(crowded).programs) <= 1 or len(job.clients) <= 2)
    roomy.rounds(4)
    crowded.rounds(3)
    assert crowded.engine.clients.clients_at_once is not None and "clients are trained at once" in caplog.text
    recorded = recorder(crowded).num_recorded
    crowded.rounds(1)
    assert recorder(crowded).num_recorded == recorded
    assert_alike(roomy, crowded, 1e-12)


def test_without_programs_the_clock_goes_on() -> None:
    run = Run(FedAvg(), "gpu", active=2, record=True)
    run.round()
    before, prepared = run.engine.clock(), run.engine.seconds_preparing
    recorder(run).close()
    run.round()
    assert run.engine.seconds_preparing == prepared > 0 and not recorder(run).programs
    assert run.engine.clock() > before


@bare_and_refined
def test_models_that_are_not_trained_at_once_are_held_by_the_host(refined: bool, monkeypatch: Any) -> None:
    moved: list[tuple[str, torch.device]] = []
    run = Run(algorithm("scaffold", refined), "gpu", active=6)
    for name in ("memory", "held_models"):
        there = getattr(run.engine.clients, name)
        monkeypatch.setattr(there, "move", lambda home, name=name: moved.append((name, home)))
    run.round()
    assert not moved
    run.engine.clients.clients_at_once = 4
    run.round()
    assert set(moved) == {("held_models", torch.device("cpu"))}
    tighten(run, lambda job: len(job.clients) <= 2)
    run.round()
    assert set(moved) == {("held_models", torch.device("cpu")), ("memory", torch.device("cpu"))}


def test_what_is_kept_moves_whole() -> None:
    store = ClientStore({"a": torch.zeros(2)}, device=torch.device("cpu"))
    store.put(3, {"a": torch.ones(2)})
    store.move(torch.device("meta"))
    assert store.home.type == "meta" and store._here[3]["a"].is_meta and 3 in store


@pytest.mark.usefixtures("no_programs")
@pytest.mark.parametrize("what", ["fit", "repeat"])
@pytest.mark.parametrize("full_memory", FULL, ids=["torch", "others"])
def test_the_servers_own_training_lets_programs_go_if_it_does_not_fit(what: str, full_memory: Exception) -> None:
    roomy, full = (Run(FedAvg(), "gpu", active=2, record=True) for _ in range(2))

    def work(run: Run) -> Tensor:
        if what == "fit":
            other = replace(run.world.training, batch=5)  # than the clients', whose programs would do
            return run.engine.fit(LocalTask(Objective(), "server", run.state, data="public", training=other)).params
        total = torch.zeros(())
        run.engine.repeat("sum", lambda total, _, x: total.add_(x).clone(), total, (), torch.arange(3.0))
        return total

    for run in (roomy, full):
        run.round()
    programs, record = recorder(full).programs, recorder(full).begin

    def crowded(*args: Any) -> Any:
        if programs:
            raise full_memory
        return record(*args)

    assert programs
    with mock.patch.object(recorder(full), "begin", crowded):
        fitted = work(full)
    assert len(programs) == 1
    assert torch.equal(work(roomy), fitted)


@pytest.mark.usefixtures("no_programs")
def test_the_servers_own_training_begins_again_only_if_memory_is_full() -> None:
    run, error = Run(FedAvg(), "gpu", active=2, record=True), RuntimeError("shapes differ")
    run.round()
    programs = len(recorder(run).programs)
    begin = mock.Mock(side_effect=error)
    with mock.patch.object(recorder(run), "begin", begin), pytest.raises(RuntimeError, match="shapes differ"):
        run.engine.repeat("sum", lambda total, _, x: total.add_(x).clone(), torch.zeros(()), (), torch.arange(3.0))
    assert begin.call_count == 1 and len(recorder(run).programs) == programs > 0


class Narrow(Pictures):
    """In eval mode it has no room for more than three examples."""

    largest: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) > 3:
            raise FULL[len(x) % 2]
        if not self.training:
            self.largest.append(len(x))
        return super().forward(x)


@pytest.mark.parametrize("engine", ["gpu-fast", "gpu-loop", "loop"])
def test_probes_and_evaluation_that_do_not_fit_are_done_in_parts(engine: str) -> None:
    roomy, narrow = (
        Run(FedAvg(), engine.removesuffix("-loop"), world=classification(module=module), record=False)
        for module in (Pictures, Narrow)
    )
    if engine == "gpu-loop":  # one model after another
        for run in (roomy, narrow):
            run.engine.server.runner.group_size = 1
    cohort = torch.arange(4)
    probe = ClassNorms(NUM_CLASSES)
    for data in ("public", "private"):
        norms = [run.engine.measure(cohort, probe, data=data, at=run.state)["norms"] for run in (roomy, narrow)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=1e-12)
    x, y = roomy.engine.pool("public")
    scores = [score_model(run.net, run.state, x, y, NUM_CLASSES) for run in (roomy, narrow)]
    assert torch.equal(scores[0].predicted, scores[1].predicted) and scores[0].loss == pytest.approx(
        scores[1].loss, rel=1e-12
    )
    assert max(Narrow.largest) <= 3 < len(y)
    with (
        pytest.raises(torch.OutOfMemoryError),
        mock.patch.object(Narrow, "forward", side_effect=torch.OutOfMemoryError),
    ):
        score_model(narrow.net, narrow.state, x, y, NUM_CLASSES)  # not one example fits


# -- precision --------------------------------------------------------------------------------------------------------


@each_device
def test_bf16_learns_what_float32_learns(device: str) -> None:
    """Parameters, statistics and losses stay float32; only the arithmetic of the layers is short."""
    world = classification(torch.float32, module=Pictures)
    plain = Run(FedAvg(), "gpu-fast", world=world, device=device, record=False)
    short = Run(FedAvg(), "gpu-fast", world=world, device=device, record=False, compute=torch.bfloat16)
    plain.rounds(3)
    short.rounds(3)
    assert short.state.params.dtype == short.replies().loss.dtype == torch.float32
    assert not torch.equal(plain.state.params, short.state.params)
    assert distance(plain.state.params, short.state.params) < 0.05


class Unusual(Pictures):
    """With a layer that is not trained, a constant of its own and a mean of its own that it keeps."""

    constant: Tensor
    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(NUM_FEATURES, NUM_FEATURES).requires_grad_(False)
        self.register_buffer("constant", torch.full((NUM_FEATURES,), 1 / 3))
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))
        self.register_buffer("seen", torch.full((), 1000.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
            self.seen.add_(1)
        return super().forward(self.fixed(x) * self.constant + self.mean)


@each_device
@pytest.mark.parametrize("engine", ["gpu-fast", "loop"])
def test_bf16_goes_with_layers_that_are_not_trained_and_buffers_of_any_kind(engine: str, device: str) -> None:
    world = classification(torch.float32, module=Unusual)
    run = Run(FedAvg(), engine, world=world, device=device, compute=torch.bfloat16)
    before = run.state.buffers
    run.net.compute = torch.bfloat16
    run.rounds(2)
    assert distance(before["constant"], run.state.buffers["constant"]) < 1e-6  # not rounded to bf16
    assert not torch.equal(before["mean"], run.state.buffers["mean"])
    assert run.state.buffers["seen"] > before["seen"] + 2  # bf16 has no number between 1000 and 1004
    assert all(v.isfinite().all() for v in (run.state.params, *run.state.buffers.values()))
    assert run.state.buffers["mean"].dtype == run.state.params.dtype == torch.float32


def test_running_statistics_equal_torchs() -> None:
    """Also with a cumulative average, without weights, and for a batch of vectors."""
    from fnrfl.kernels.layers import share_kernels

    x = torch.randn(7, 5, 4, 3, dtype=torch.float64)
    for make in (
        lambda: nn.BatchNorm2d(5),
        lambda: nn.BatchNorm2d(5, momentum=None),
        lambda: nn.BatchNorm2d(5, affine=False),
        lambda: nn.BatchNorm2d(5, track_running_stats=False),
    ):
        plain, ours = make().double(), make().double()
        share_kernels(ours)
        for mode in (True, True, False):
            torch.testing.assert_close(plain.train(mode)(x), ours.train(mode)(x))
        plain.track_running_stats = ours.track_running_stats = False  # statistics are kept as they are
        torch.testing.assert_close(plain.train()(x), ours.train()(x))
        assert all(torch.allclose(a, b) for a, b in zip(plain.buffers(), ours.buffers(), strict=True))


def resnet_world() -> World:
    """Three clients with pictures of 32 by 32 pixels, four steps each."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (96, 3, 32, 32), generator=draw, dtype=torch.uint8)
    y = torch.randint(10, (96,), generator=draw)
    parts: dict[str, Any] = dict.fromkeys(("public", "ranking", "distill", "validation"), (x[:32], y[:32]))
    pool = Pool(parts | {"private": (x, y)}, torch.arange(96).split(32), 10, dtype=torch.float32)
    base = classification(torch.float32)
    return replace(
        base, module=lambda: build_model("resnet18", (3, 32, 32), 10), pool=pool, example=torch.zeros(2, 3, 32, 32),
        training=replace(base.training, batch=16, lr=0.001, weight_decay=1e-5, augment=True), active=3,
    )  # fmt: skip


OFTEN_CAPTURED = {"fedavg", "scaffold", "moon"}


@on_a_gpu
@pytest.mark.parametrize("label", labels())
@bare_and_refined
def test_four_steps_of_resnet18_equal_the_loop_engines(label: str, refined: bool) -> None:
    """Float32 without tf32, from the loop engine's state after three rounds.

    At a rate of 0.01 float32 is 4e-4 away from float64 after four steps, whatever the engine: a rounding error switches
    some ReLUs. At 0.001 it is 6e-6.
    """
    first = Run(algorithm(label, refined), "loop-fast", world=resnet_world(), device="cuda", record=False)
    first.rounds(3)
    ours = gone_on(first, "gpu-fast", 1, device="cuda", record=label in OFTEN_CAPTURED)
    theirs = gone_on(first, "loop-fast", 1, device="cuda", record=False)
    if not ours.recorder.passed:
        return  # a control without clients
    a, b = ours.recorder.passed[0].replies, theirs.recorder.passed[0].replies
    off, size = (a.params - b.params).norm(dim=1), b.params.norm(dim=1)
    assert set(a.steps.tolist()) == {4} and size.all()  # a clustered method trains its clusters in turn
    assert (off <= 1e-4 * size).all(), (off / size).tolist()
    start = theirs.recorder.passed[0].task.start
    if start is not None:
        way = (b.params - start.to(b.params.device).params).norm(dim=1)
        assert (off <= 0.1 * way).all(), (off / way).tolist()


# -- what is recorded and how ------------------------------------------------------------------------------------------


def test_what_is_worth_compiling_does_not_depend_on_who_is_in_the_cohort() -> None:
    """A run that is gone on with, in whatever round, must decide as the whole run did."""
    run = Run(FedAvg(), "gpu", active=3, record=True, rounds=7, participation=0.5)
    asked: list[dict[Any, int]] = []

    def programs_of(requests: list[ProgramRequest]) -> list[None]:
        asked[-1].update((one.key[0], one.expected_steps) for one in requests)
        return [None for _ in requests]

    recorder(run).programs_of = programs_of  # type: ignore[assignment,method-assign]
    examples = [int(n) for n in run.engine.examples.tolist()]
    by_size = sorted(range(len(examples)), key=lambda i: examples[i])
    for cohort in (by_size[:3], by_size[-3:], by_size[1:4]):
        asked.append({})
        run.round(torch.tensor(sorted(cohort)))
    run.engine.clients.clients_at_once = run.engine.server.runner.group_size = 1  # three chunks
    asked.append({})
    run.round(torch.tensor(by_size[:3]))
    in_chunks = asked.pop()
    known: dict[int, int] = {}
    for found in asked:
        assert all(known.setdefault(width, steps) == steps for width, steps in found.items())
    training = run.world.training
    all_steps = sum(-(-training.epochs * n // training.batch) for n in examples)
    assert len({*known.values()}) == 1  # widths are compiled side by side
    assert 0.9 * 7 * all_steps * 0.5 <= sum(known.values()) < 7 * all_steps
    assert in_chunks == {1: int(7 * all_steps * 0.5)}
    asked.append({})
    run.engine.fit(LocalTask(Objective(), "server", run.state, data="private"))
    assert asked.pop() == {1: 7 * all_steps}  # a server is there in every round


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_are_searched_for_while_recording_and_never_if_they_must_repeat(deterministic: bool) -> None:
    cudnn = torch.backends.cudnn
    choose_kernels(deterministic=deterministic, tf32=False)
    try:
        assert not cudnn.benchmark
        with cudnn_autotune():
            assert cudnn.benchmark is not deterministic
        assert not cudnn.benchmark
    finally:
        choose_kernels(deterministic=False, tf32=False)


def test_tf32_is_for_layers_alone() -> None:
    seen = []

    class Watching(FedAvg):
        def round(self, state: Any, cohort: Tensor, engine: Any) -> Any:
            seen.append(torch.backends.cuda.matmul.allow_tf32)
            return super().round(state, cohort, engine)

    class Layer(Pictures):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cuda.matmul.allow_tf32)
            return super().forward(x)

    run = Run(Watching(), "gpu-fast", world=classification(module=Layer), record=False, tf32=True)
    seen.clear()  # of what looked at the module
    run.round()
    assert seen[0] is False and all(seen[1:]) and len(seen) > 1
    assert torch.backends.cuda.matmul.allow_tf32 is False


def test_a_phase_ends_when_its_gpus_have(monkeypatch: Any) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    engine = Run(FedAvg(), "gpu", record=False).engine
    engine.clock()
    assert waited == []  # of a CPU
    assert isinstance(engine.server.pool, Gpus)
    engine.server.pool._devices = gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert engine.clock() <= engine.clock() and waited == gpus * 2


# -- no GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(CompatibilityError, match='needs an NVIDIA GPU.* Set engine = "auto"'):
        found_devices()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_says_that_it_found_no_gpu_where_it_would_take_one() -> None:
    assert build_run(load("digits", ["model=cnn"])).notices == ("engine = auto found no GPU and runs on the CPU.",)
    assert build_run(load("digits", ["model=cnn", "engine=loop"])).notices == ()
    assert build_run(load("digits")).notices == ()  # so small a net is faster on the CPU


@pytest.mark.parametrize("compute", list(MAX_RELATIVE_ERROR))
def test_a_program_that_does_something_else_is_refused(compute: torch.dtype) -> None:
    before = torch.randn(50, generator=torch.Generator().manual_seed(0))
    stepped = before + 0.1
    assert close_enough(before, stepped.clone(), stepped, compute)
    assert close_enough(before, stepped + 0.05 * MAX_RELATIVE_ERROR[compute] * 0.1, stepped, compute)
    assert not close_enough(before, before, stepped, compute)  # it did nothing
    assert not close_enough(before, before - 0.1, stepped, compute)  # it went the other way
    assert not close_enough(before, torch.where(before > 0, torch.nan, stepped), stepped, compute)
    zero = torch.zeros(50)  # a mean that stays zero but for rounding, and one that does not
    assert close_enough(zero, zero + 3e-9, zero - 3e-9, compute)
    assert not close_enough(zero, zero, zero + 1e-6, compute)
    assert not close_enough(zero, zero, torch.zeros(1), compute)  # of another shape
    assert not close_enough(zero, zero, zero + 1e-7, compute)
    assert close_enough(zero, zero, zero + 1e-7, compute, shortest=1.0)
