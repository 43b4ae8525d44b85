"""A faster program that is made while the first one is used, and takes its place when it is there."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.config import load
from fnrfl.core import trees
from fnrfl.core.errors import ClientError, FnrflError
from fnrfl.core.messages import TrainRequest
from fnrfl.engines.assemble import Layout
from fnrfl.engines.recorder import compiled, cuda_graphs
from fnrfl.engines.recorder.cuda_graphs import CompiledLater, CudaGraphs
from fnrfl.engines.recorder.programs import STORE, FlatProgram, Recording, StepArguments, StoredProgram, repeated
from fnrfl.engines.recorder.recorder import Recorder, recorded
from fnrfl.engines.recorder.torchscript import TorchScript
from fnrfl.engines.trainer import Trained, Trainer
from fnrfl.runs import build_engine
from fnrfl.runs.run import run
from toys import Run, assert_near

pytestmark = pytest.mark.usefixtures("no_programs")


@dataclass
class Later:
    """A program that is there after some questions, and counts its steps."""

    graph: fx.GraphModule
    questions: int
    wrong: bool
    fails: bool
    steps: list[int]

    def ready(self) -> bool:
        self.questions -= 1
        return self.questions < 0

    def programs(self, arguments: StepArguments) -> Iterator[FlatProgram]:
        if self.fails:
            raise RuntimeError("the compiler gave up")
        plain = repeated(self.graph)

        def program(constants: Sequence[Tensor], turns: Sequence[Tensor]) -> Tensor:
            self.steps.append(len(turns[0]))
            losses = plain(constants, turns)
            if self.wrong:
                constants[0].add_(1.0)
            return losses

        yield program


@dataclass
class Patient(TorchScript):
    """A backend with something coming for every step."""

    questions: int = 2
    wrong: bool = False
    fails: bool = False
    waits: bool = False
    made: list[Later] = field(default_factory=list)

    def candidates(self, recording: Recording) -> Any:
        self.made.append(Later(recording.graph, self.questions, self.wrong, self.fails, []))
        return super().candidates(recording)[0], self.made[-1]


def played(backend: TorchScript, rounds: int, *, threads: int = 2, group_size: int = 16) -> Run:
    run = Run(FNR(FedAvg()), "batched-fast", active=6, threads=threads)
    runner = run.engine.server.runner
    assert runner.recorder is not None
    runner.recorder, runner.group_size = Recorder(backend, run.net.fingerprint()), group_size
    run.engine.server.place.max_gather_bytes = 1  # programs are called for one step at a time
    run.rounds(rounds)
    return run


@pytest.fixture(scope="module")
def plain() -> Any:
    return Run(FNR(FedAvg()), active=6).rounds(4)


def test_it_takes_the_place_of_the_first_one_and_nothing_changes(plain: Any) -> None:
    backend = Patient()
    run = played(backend, 4)
    assert backend.made and all(later.steps for later in backend.made)  # all of them were used in the end
    assert all(sum(later.steps) > 1 for later in backend.made)  # and not only tried
    assert_near(run.state, plain, atol=1e-9)


def test_before_it_is_there_the_first_one_is_used(plain: Any) -> None:
    backend = Patient(questions=1000)
    assert_near(played(backend, 4).state, plain, atol=1e-9)
    assert not any(later.steps for later in backend.made)


def test_it_comes_in_the_middle_of_a_round() -> None:
    backend = Patient(questions=3)  # one when the round asks for programs, and one before each call
    run = played(backend, 1, threads=1)
    widest, refining = backend.made[0], backend.made[-1]
    assert widest.steps[1:] and refining.steps[1:]  # the first step is the trial
    assert_near(run.state, Run(FNR(FedAvg()), active=6).rounds(1), atol=1e-9)


WHEN = pytest.mark.parametrize("questions", [0, 3], ids=["before a round", "in the middle of one"])


def cannot_be_made(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refused(later: Later, arguments: StepArguments) -> Iterator[FlatProgram]:
        raise error

    monkeypatch.setattr(Later, "programs", refused)


@WHEN
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("CUDA error: out of memory")])
def test_memory_that_does_not_suffice_for_both_is_no_error(
    error: Exception, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    train = Trainer.train

    def counted(trainer: Trainer, request: TrainRequest, *rest: Any) -> Trained:
        begun.append(request.task.purpose)
        return train(trainer, request, *rest)

    monkeypatch.setattr(Trainer, "train", counted)
    cannot_be_made(monkeypatch, error)
    run = played(Patient(questions=questions), 1, threads=1)
    assert begun == ["local", "refine", "deliver"]  # nobody had to begin again
    assert_near(run.state, Run(FNR(FedAvg()), active=6).rounds(1), atol=1e-9)


@WHEN
def test_what_else_goes_wrong_with_it_is_told(questions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cannot_be_made(monkeypatch, RuntimeError("shapes differ"))
    with pytest.raises((RuntimeError, ClientError), match="shapes differ"):
        played(Patient(questions=questions), 1, threads=1)


def test_seconds_that_it_takes_in_the_middle_of_a_round_are_of_preparing(monkeypatch: Any) -> None:
    before: list[float] = []

    def improve(recorder: Recorder, stored: StoredProgram, *_: Any) -> None:
        before.append(recorder.seconds)
        stored.coming = None
        time.sleep(0.2)

    monkeypatch.setattr(Recorder, "_improve", improve)
    run = played(Patient(questions=3), 1, threads=1)
    assert before and run.engine.seconds_preparing >= before[-1] + 0.2


def test_while_several_threads_train_nothing_changes() -> None:
    backend = Patient(questions=1)
    played(backend, 1, threads=2, group_size=3)
    local, refining = backend.made[:-1], backend.made[-1]
    assert local and not any(later.steps for later in local)
    assert refining.steps  # of one group, which the thread that asked trains alone


@pytest.mark.parametrize("how", ["wrong", "fails"])
def test_one_that_is_wrong_or_could_not_be_made_is_not_used(how: str, plain: Any) -> None:
    backend = Patient(**{how: True})
    assert_near(played(backend, 4).state, plain, atol=1e-9)
    assert all(sum(later.steps) <= 1 for later in backend.made)  # tried once


def test_a_run_that_finds_it_in_the_process_uses_it(plain: Any) -> None:
    """It is asked for again by a later run, which records nothing."""
    backend = Patient(questions=1000)
    played(backend, 1)
    assert not any(later.steps for later in backend.made)
    for later in backend.made:
        later.questions = 0
    second = played(Patient(), 4)
    assert all(sum(later.steps) > 1 for later in backend.made)
    recorder = second.engine.server.runner.recorder
    assert recorder is not None and recorder.num_recorded == 0
    assert_near(second.state, plain, atol=1e-9)


def test_another_run_that_takes_it_first_is_no_error(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in threads of one process share programs, and so what is coming."""
    backend = Patient(questions=0)
    ready = Later.ready

    def taken_meanwhile(later: Later) -> bool:
        for stored in STORE._stored.values():
            stored.coming = None
        return ready(later)

    monkeypatch.setattr(Later, "ready", taken_meanwhile)
    assert_near(played(backend, 4).state, plain, atol=1e-9)


def test_a_run_whose_seconds_are_compared_waits_for_what_another_run_began(plain: Any) -> None:
    backend = Patient(questions=1000)
    played(backend, 1)
    assert_near(played(Patient(waits=True), 4).state, plain, atol=1e-9)
    assert all(sum(later.steps) > 1 for later in backend.made)


# -- on a GPU: compiled by another process -----------------------------------------------------------------------------


@dataclass
class Worker:
    """A process that compiles."""

    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        self.returncode = 0

    kill = wait


@pytest.mark.parametrize(
    ("waits", "deterministic", "on_disk", "steps", "comes"),
    [
        (False, False, False, 10**6, True),
        (False, True, False, 10**6, False),  # bits would depend on how fast the compiler is
        (False, False, True, 10**6, False),  # it is there already
        (False, False, False, 10, False),  # it does not pay
        (True, False, False, 10**6, False),  # seconds are to be compared
    ],
)
def test_what_is_compiled_in_the_background(
    waits: bool, deterministic: bool, on_disk: bool, steps: int, comes: bool, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    backend = CudaGraphs(torch.float32, waits=waits)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", deterministic)
    worker = Worker()
    made = compiled.Compiling(tmp_path, torch.device("cpu"), None if on_disk else worker)  # type: ignore[arg-type]
    started: list[Recording] = []
    monkeypatch.setattr(cuda_graphs.compiled, "start", lambda recording: started.append(recording) or made)
    monkeypatch.setattr(backend, "_captured", lambda step, arguments: (step, arguments))
    monkeypatch.setattr(compiled.Compiling, "result", lambda self: "compiled")
    arguments = StepArguments([torch.ones(2)], [torch.ones(2)], 1, steps)
    recording = recorded(torch.Tensor.add_, arguments)
    candidates, found = backend.candidates(recording)
    assert len(started) == (steps == 10**6)
    first: Any = next(candidates)
    assert first[0] is recording.graph if comes or steps == 10 else first == ("compiled", arguments)
    assert (found is not None) is comes
    if found is not None:
        assert isinstance(found, CompiledLater) and not found.ready()
        worker.returncode = 0
        assert found.ready()
        assert list(found.programs(arguments)) == [("compiled", arguments)]


@pytest.mark.parametrize(
    ("free", "kept_for_later", "is_short", "gives_back"),
    [(10, 0, False, False), (9, 0, True, True), (9, 1, False, True), (0, 9, True, True), (90, 10, False, False)],
)
def test_memory_of_a_gpu_is_short_if_it_is_nearly_full_without_what_torch_keeps_for_later(
    free: int, kept_for_later: int, is_short: bool, gives_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, memory, given_back = torch.device("cuda:0"), {0: (free, 100), 1: (0, 100)}, list[int]()

    def empty_cache() -> None:
        given_back.append(kept_for_later)
        memory[0] = free + kept_for_later, 100

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory[device.index])
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    backend = CudaGraphs(torch.float32)
    assert backend.memory_is_short(here) is is_short  # whatever is on the other GPU
    assert bool(given_back) is gives_back
    assert not backend.memory_is_short(torch.device("cpu"))


def test_memory_that_only_a_circle_of_objects_holds_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = list[bool]()
    circle: list[Any] = [torch.ones(1)]
    held = weakref.ref(circle[0])
    circle.append(circle)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(held() is not None))
    del circle
    CudaGraphs(torch.float32).free_memory()
    assert alive == [False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_compiled_step_comes_in_the_middle_of_a_round(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("FNRFL_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_graphs, "WORTH_COMPILING", 0)
    asked: Counter[int] = Counter()
    alive: list[CompiledLater] = []  # so that no other gets the id of one that has come

    def ready(later: CompiledLater) -> bool:
        """Not there for three questions, and then as soon as it is compiled."""
        alive.append(later)
        asked[id(later)] += 1
        if asked[id(later)] > 3 and later.compiling.worker is not None:
            later.compiling.worker.wait(300)
        return later.compiling.ready()

    monkeypatch.setattr(CompiledLater, "ready", ready)
    run = Run(FNR(FedAvg()), "gpu-fast", active=6, device="cuda")
    runner = run.engine.server.runner
    runner.recorder = Recorder(CudaGraphs(torch.float64, waits=False), run.net.fingerprint())
    run.engine.server.place.max_gather_bytes = 1
    run.rounds(1)
    assert max(asked.values()) == 4  # the widest step was asked for until it came, and then no more
    there = trees.moved(run.state, torch.device("cpu"))
    assert_near(there, Run(FNR(FedAvg()), active=6).rounds(1), atol=1e-9)


def test_what_could_not_be_compiled_in_the_background_is_told(monkeypatch: Any, tmp_path: Path, caplog: Any) -> None:
    backend = CudaGraphs.__new__(CudaGraphs)
    (tmp_path / "said.txt").write_text("Traceback\nOSError: full\n")
    failed = compiled.Compiling(tmp_path / "none", torch.device("cpu"), Worker(1), tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr(Worker, "wait", lambda self, timeout: None)
    assert list(CompiledLater(backend, failed).programs(StepArguments([], [], 0, 0))) == []
    assert "OSError: full" in caplog.text


@pytest.mark.parametrize(
    ("runs_alike", "compared", "waits"),
    [(None, True, False), (1, True, True), (10, True, True), (1, False, False), (10, False, False)],
)
def test_a_run_that_nobody_compares_does_not_wait(
    runs_alike: int | None, compared: bool, waits: bool, monkeypatch: Any
) -> None:
    asked: list[Layout] = []

    def assemble(*_: Any, layout: Layout, **__: Any) -> None:
        asked.append(layout)
        raise FnrflError("It is enough.")

    monkeypatch.setattr(build_engine, "assemble", assemble)
    with pytest.raises(FnrflError):
        run(load("digits", ["rounds=1"]), out=None, runs_alike=runs_alike, compared=compared)
    assert [layout.waits_for_compiler for layout in asked] == [waits]


class Sleeper(TorchScript):
    """A backend whose workers never end."""

    waits = False

    def candidates(self, recording: Recording) -> Any:
        later = CompiledLater(self, compiled.start(recording))  # type: ignore[arg-type]
        return super().candidates(recording)[0], later


def test_what_is_compiled_for_a_run_goes_on_when_the_run_has_ended(monkeypatch: Any, tmp_path: Path) -> None:
    """The next run of the process may use it; and it ends when nobody can any more."""
    monkeypatch.setenv("FNRFL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    workers, popen = [], subprocess.Popen

    def asleep(*_: Any, **__: Any) -> Any:
        workers.append(popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return workers[-1]

    monkeypatch.setattr(compiled.subprocess, "Popen", asleep)
    played(Sleeper(), 1)
    gc.collect()
    assert workers and all(worker.poll() is None for worker in workers)
    STORE.clear()
    gc.collect()
    assert all(worker.poll() is not None for worker in workers)


@pytest.mark.parametrize(("which", "num_instead"), [("recorded", 1), ("compiled", 0)])
@pytest.mark.parametrize("words", ["Triton Error [CUDA]: out of memory", "operation not permitted"])
def test_a_step_that_cannot_be_captured_has_another_program_but_memory_that_is_full_is_told(
    words: str, which: str, num_instead: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(CudaGraphs, "_captured", refused)
    monkeypatch.setattr(compiled.Compiling, "result", lambda self: torch.add)
    arguments = StepArguments([torch.ones(2)], [torch.ones(2)], 1, 0)
    step, backend = compiled.Compiling(tmp_path, torch.device("cpu")), CudaGraphs(torch.float32)
    programs = {
        "recorded": backend._candidates(recorded(torch.Tensor.add_, arguments), None),
        "compiled": backend.compiled_programs(step, arguments),
    }[which]
    if "memory" in words:
        with pytest.raises(RuntimeError, match="out of memory"):
            next(programs)
    else:
        assert len(list(programs)) == num_instead


def test_a_capture_that_fails_for_want_of_memory_says_so(monkeypatch: Any) -> None:
    """torch ends such a capture with another error, in the middle of the first."""

    def capture(*_: Any) -> None:
        try:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(cuda_graphs, "CapturedStep", capture)
    monkeypatch.setattr(cuda_graphs, "_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        CudaGraphs(torch.float32)._captured(torch.add, StepArguments([torch.ones(1)], [], 1, 0))
