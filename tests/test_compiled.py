"""Steps compiled by a process of their own: the same step, kept on disk, and words when it cannot be done."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.core.errors import out_of_memory
from fnrfl.engines.recorder import compile_worker, compiled, cuda_graphs, recorder, torchscript
from fnrfl.engines.recorder.programs import FlatProgram, Recording, StepArguments, repeated
from fnrfl.engines.recorder.torchscript import TorchScript
from fnrfl.kernels import convolution
from fnrfl.kernels.layers import share_kernels
from toys import Run, assert_near

pytestmark = [pytest.mark.usefixtures("no_programs", "cache")]
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FNRFL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    return tmp_path / "programs"


def step(total: Tensor, factor: Tensor, x: Tensor) -> Tensor:
    """Holds a vector and a number of its own."""
    total.add_(factor * x * torch.tensor([1.0, 2.0]) * torch.tensor(3.0))
    return total.sum()


def recorded() -> Recording:
    return recording_of(StepArguments([torch.zeros(2), torch.ones(2)], [torch.ones(2)], 1, 0))


def recording_of(arguments: StepArguments) -> Recording:
    return recorder.recorded(step, arguments)


@compiles
@pytest.mark.slow
def test_a_compiled_step_is_the_step_and_is_compiled_once(cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    for name in ("json", "numpy", "safetensors"):  # files of the working folder are nobody's modules
        Path(f"{name}.py").write_text("raise SystemExit('a file of the working folder ran')")
    compiling = compiled.start(recorded())
    assert compiling.worker is not None
    total, want = torch.zeros(2), torch.zeros(2)
    loss = compiling.result()(total, torch.full((2,), 2.0), torch.ones(2))
    assert torch.equal(loss, step(want, torch.full((2,), 2.0), torch.ones(2))) and torch.equal(total, want)
    again = compiled.start(recorded())
    assert again.worker is None
    assert torch.equal(again.result()(total, torch.ones(2), torch.ones(2)), step(want, torch.ones(2), torch.ones(2)))
    del compiling
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [
        again.folder.name
    ]  # nothing is left of the request


def test_a_step_is_read_from_its_text_and_nothing_is_computed() -> None:
    """Also tensors that a step makes of nothing are made by the graph; those that it holds are its last arguments."""

    def making(total: Tensor, x: Tensor) -> Tensor:
        total.add_(x * torch.ones(2) * torch.full((2,), float("inf")).reciprocal().add(4.0))
        return total.sum()

    made = recorder.recorded(making, StepArguments([torch.zeros(2)], [torch.ones(2)], 1, 0))
    for recording, wanted in ((made, making), (recorded(), step)):
        held = compiled._held_constants(recording.graph)
        tensors = [*recording.arguments.constants, *recording.arguments.turn]
        graph = compile_worker._graph_of(recording.graph.code, list(held), len(tensors) + len(held))
        assert operators(graph) == operators(recording.graph)
        assert not list(graph.buffers())
        one, other = [t.clone() for t in tensors], [t.clone() for t in tensors]
        assert torch.equal(graph(*one, *held.values()), wanted(*other)) and torch.equal(one[0], other[0])
    assert torch.ops.aten.ones.default in operators(made.graph)


def operators(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


@compiles
@pytest.mark.slow
def test_rounds_of_compiled_steps_are_the_loop_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private training and refinement, BatchNorm and dropout, several workers at a time."""

    def candidates(self: TorchScript, recording: Recording) -> Iterator[FlatProgram]:
        compiling = compiled.start(recording)
        return (repeated(each.result()) for each in [compiling])

    monkeypatch.setattr(torchscript.TorchScript, "candidates", candidates)
    run = Run(FNR(FedAvg()), "batched-fast", active=3)
    run.rounds(2)
    assert_near(run.state, Run(FNR(FedAvg()), active=3).rounds(2), atol=1e-9)
    used = run.engine.server.runner.recorder
    assert used is not None and all(stored.program for stored in used.programs.values())


def test_what_a_compiled_step_depends_on_has_a_folder_of_its_own(monkeypatch: Any) -> None:
    monkeypatch.setattr(compiled.subprocess, "Popen", lambda *_, **__: _Ended(0))
    folders = {compiled.start(recorded()).folder for _ in range(2)}
    assert len(folders) == 1
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    folders.add(compiled.start(recorded()).folder)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    folders.add(compiled.start(recorded()).folder)
    wider = recording_of(StepArguments([torch.zeros(4, 2), torch.ones(2)], [torch.ones(2)], 1, 0))
    folders.add(compiled.start(wider).folder)
    assert len(folders) == 4


def working_on(step: Path) -> subprocess.Popen[bytes]:
    """A process that compiles a step until it is killed."""
    code = "import sys; from filelock import FileLock\n"
    code += "with FileLock(sys.argv[1] + '.lock'): print('at work', flush=True); sys.stdin.read()"
    at_work = subprocess.Popen([sys.executable, "-c", code, str(step)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert at_work.stdout is not None and at_work.stdout.readline() == b"at work\n"
    return at_work


def test_two_workers_do_not_compile_the_same_step(cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """One waits for the other; but not for one that was killed, nor for one that compiles something else."""
    cache.mkdir()
    done: list[Path] = []
    monkeypatch.setattr(compile_worker, "_compile", lambda asked, folder: done.append(folder))
    step, other = cache / ("a" * 32), cache / ("b" * 32)
    at_work = working_on(step)
    compile_worker.compile_request(tmp_path, other)
    assert done == [other]
    waiting = threading.Thread(target=compile_worker.compile_request, args=[tmp_path, step])
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    at_work.kill()
    waiting.join(30)
    assert done == [other, step]
    step.mkdir()
    (step / "step.bin").touch()
    compile_worker.compile_request(tmp_path, step)
    assert done == [other, step]


class _Ended:
    """A worker that has ended, after it has written to the file that it was given."""

    def __init__(self, status: int, said: str = "", stderr: Any = None) -> None:
        self.returncode = status
        if stderr is not None:
            stderr.write(said.encode())

    def wait(self, timeout: float) -> int:
        return self.returncode

    def poll(self) -> int:
        return self.returncode


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Traceback\n  ...\nOSError: full\n", "^OSError: full$"),
        ("Traceback\ntorch.AcceleratorError: CUDA error: out of memory\nFor debugging ...\n", "out of memory$"),
        ("Killed\n", "^Killed$"),
        ("\n", "^exit status 1$"),
    ],
)
def test_a_worker_that_fails_is_told_in_a_line(said: str, told: str, monkeypatch: Any, cache: Path) -> None:
    """The one that names the error. A GPU that was full for the worker is not full for who asked."""
    monkeypatch.setattr(compiled.subprocess, "Popen", lambda *_, stderr, **__: _Ended(1, said, stderr))
    compiling = compiled.start(recorded())
    with pytest.raises(compiled.NotCompiled, match=told) as caught:
        compiling.result()
    assert not out_of_memory(caught.value)
    del compiling, caught
    assert not list(cache.iterdir())


class _Held:
    """A worker that does not end although it was killed."""

    killed = False

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        self.killed = True

    def wait(self, timeout: float | None = None) -> None:
        assert self.killed and timeout is not None
        raise subprocess.TimeoutExpired("worker", timeout)


def test_nobody_waits_for_a_worker_that_a_driver_holds(cache: Path, monkeypatch: Any) -> None:
    held = _Held()
    monkeypatch.setattr(compiled.subprocess, "Popen", lambda *_, **__: held)
    compiling = compiled.start(recorded())
    asked = compiling.asked
    del compiling
    assert held.killed and not asked.exists()


def test_the_folder_stays_small_whatever_others_do_there(monkeypatch: Any, cache: Path) -> None:
    """What a killed run left goes, and what was not used for longest; what another just removes is no error."""
    monkeypatch.setattr(compiled, "KEPT_BYTES", 250)
    ages = {"asked-old": 2.0, "asked-new": 0.1, "gone": 0.0, "first": 3.0, "second": 2.5, "third": 2.2}
    for name, age in ages.items():
        (cache / name).mkdir(parents=True)
        (cache / name / "step.bin").write_bytes(bytes(0 if name in ("asked-new", "gone") else 100))
        used = time.time() - age * compiled.ABANDONED
        os.utime(cache / name, (used, used))
    look = Path.rglob

    def removed_meanwhile(path: Path, pattern: str) -> Any:
        if path.name == "gone":
            shutil.rmtree(path)
        return look(path, pattern)

    monkeypatch.setattr(Path, "rglob", removed_meanwhile)
    compiled._keep_few(cache)
    assert {path.name for path in cache.iterdir()} == {"asked-new", "third"}


def test_a_damaged_step_is_removed(cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(compiled.subprocess, "Popen", lambda *_, **__: _Ended(0))
    compiling = compiled.start(recorded())
    compiling.folder.mkdir()
    (compiling.folder / "step.bin").write_bytes(b"half of it")
    with pytest.raises(Exception, match=r"."):
        compiling.result()
    assert not compiling.folder.exists()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_a_step_that_a_full_gpu_could_not_load_stays(error: Exception, cache: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(compiled, "_load", full)
    cache.mkdir()
    with pytest.raises(type(error)):
        compiled.Compiling(cache, torch.device("cpu")).result()
    assert cache.exists()


def test_steps_in_a_folder_that_cannot_be_written_to_are_used(cache: Path, monkeypatch: Any) -> None:
    """A cache that several users share, or one on a read-only disk."""
    monkeypatch.setattr(compiled.subprocess, "Popen", lambda *_, **__: _Ended(0))
    recording = recorded()
    folder = compiled.start(recording).folder
    folder.mkdir()
    (folder / "step.bin").touch()

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for function in ("utime", "open", "unlink", "mkdir"):
        monkeypatch.setattr(compiled.os, function, refused)
    started = compiled.start(recording)
    assert started.folder == folder and started.worker is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_that_ends_leaves_the_worker_its_request(cache: Path, monkeypatch: Any) -> None:
    popen = subprocess.Popen
    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(compiled.subprocess, "Popen", lambda *_, **__: popen(asleep))
    others = list(weakref.finalize._registry)  # type: ignore[attr-defined]
    compiling = compiled.start(recorded())
    child = os.fork()
    if not child:
        with suppress(BaseException):
            for other in others:  # folders of other tests
                other.detach()
            weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # as at the end of a process
        os._exit(0)
    os.waitpid(child, 0)
    assert (compiling.asked / "step.py").exists() and compiling.worker is not None and compiling.worker.poll() is None
    asked = compiling.asked
    del compiling
    assert not asked.exists()


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="this system has no alarm")
def test_a_compiler_that_hangs_ends_and_lets_others_have_their_turn(cache: Path, tmp_path: Path) -> None:
    cache.mkdir()
    code = "import sys, time, json; from pathlib import Path; from fnrfl.engines.recorder import compile_worker\n"
    code += "compile_worker.PATIENCE = 1.0; json.loads = lambda text: time.sleep(600)\n"
    code += (
        "(Path(sys.argv[1]) / 'request.json').write_text(''); compile_worker.compile_request(*map(Path, sys.argv[1:]))"
    )
    hanging = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(cache / ("a" * 32))])
    assert hanging.wait(60) == -signal.SIGALRM


def test_without_a_folder_steps_are_captured(cache: Path, tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("FNRFL_CACHE", str(tmp_path / "file" / "in"))
    (tmp_path / "file").write_text("")
    backend = cuda_graphs.CudaGraphs.__new__(cuda_graphs.CudaGraphs)
    backend.compile = True
    captured: list[Any] = []
    monkeypatch.setattr(backend, "_captured", lambda step, recording: captured.append(step) or repeated(step))
    found = recorded()
    assert next(backend.candidates(found)) is not None
    assert captured == [found.graph] and caplog.text.count("cannot be compiled") == 1


def test_constants_stay_where_they_were(tmp_path: Path) -> None:
    constants = [torch.tensor(2.0), torch.arange(3), *(torch.tensor(float(i)) for i in range(10))]
    compiled._save_constants(tmp_path / "c", {str(i): held for i, held in enumerate(constants)})
    found = compiled.load_constants(tmp_path / "c", torch.device("meta"))
    assert all(torch.equal(a, b) and a.device == b.device for a, b in zip(found, constants, strict=True))


# -- on a GPU ---------------------------------------------------------------------------------------------------------


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
    backend = cuda_graphs.CudaGraphs(torch.float32)
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
    cuda_graphs.CudaGraphs(torch.float32).free_memory()
    assert alive == [False]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("words", ["Triton Error [CUDA]: out of memory", "operation not permitted"])
def test_a_step_that_cannot_be_captured_is_repeated_but_memory_that_is_full_is_told(
    words: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "_captured", refused)
    monkeypatch.setattr(compiled.Compiling, "result", lambda self: torch.add)
    compiling = compiled.Compiling(tmp_path, torch.device("cpu")) if is_compiled else None
    programs = cuda_graphs.CudaGraphs(torch.float32)._candidates(recorded(), compiling)
    if "memory" in words:
        with pytest.raises(RuntimeError, match="out of memory"):
            next(programs)
    else:
        assert len(list(programs)) == 1


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
        cuda_graphs.CudaGraphs(torch.float32)._captured(torch.add, StepArguments([torch.ones(1)], [], 1, 0))


# -- kernels of fnrfl's own operators: compiled before a step is taken, each once ----------------------------------


OPERATORS = ("convolve", "convolve_back", "weigh")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """On a CPU the operators are stood in for by torch's."""
    monkeypatch.setattr(convolution, "_has_kernels", lambda device: True)
    return recorded_step("cpu", channels=16)


def recorded_step(device: str, channels: int) -> Recording:
    """A step of three clients whose net has three layers of one shape and one of another."""
    layers = (nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False) for stride in (1, 1, 1, 2))
    net = nn.Sequential(*layers).to(device, torch.bfloat16)
    share_kernels(net)
    weights = {name: torch.randn(3, *w.shape, device=device).bfloat16() for name, w in net.named_parameters()}

    def step(*tensors: Tensor) -> Tensor:
        mine, x = dict(zip(weights, tensors[:-1], strict=True)), tensors[-1]
        loss = lambda w, x: functional_call(net, w, (x,)).float().square().mean()  # noqa: E731
        for name, found in vmap(grad(loss))(mine, x).items():
            mine[name].sub_(found)
        return x.sum()

    turn = torch.randn(3, 4, channels, 8, 8, device=device).bfloat16()
    return recorder.recorded(step, StepArguments([*weights.values()], [turn], len(weights), 0))


def test_each_operator_is_called_once_for_each_kind_of_arguments(recording: Recording, monkeypatch: Any) -> None:
    """Of the same shapes, strides and types as in the step, so that the same kernels are compiled."""
    called, threads, want = list[cuda_graphs.Call](), set[int](), list[Any]()
    told = lambda one: (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, Tensor) else one  # noqa: E731
    real = cuda_graphs._try

    def noted(call: cuda_graphs.Call, device: torch.device) -> None:
        called.append(call)
        threads.add(threading.get_ident())
        assert all(told(cuda_graphs._empty(one, device)) == one for one in call[1] if isinstance(one, tuple))
        real(call, device)

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "fnrfl":
                want.append((func, tuple(map(told, args))))
            return func(*args, **kwargs or {})

    monkeypatch.setattr(cuda_graphs, "_try", noted)
    cuda_graphs.compile_kernels(recording)
    with Calls():
        recording.graph(*[t.clone() for t in (*recording.arguments.constants, *recording.arguments.turn)])
    assert {*called} == {*want} and len(called) == len({*called}) < len(want)  # layers of one shape share their kernels
    assert {call[0] for call in called} == {getattr(torch.ops.fnrfl, name).default for name in OPERATORS}
    assert threading.get_ident() not in threads


def test_an_operator_that_fails_ends_nothing(recording: Recording, monkeypatch: Any, caplog: Any) -> None:
    def refuse(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_graphs, "_empty", refuse)
    with caplog.at_level("DEBUG", "fnrfl"):
        cuda_graphs.compile_kernels(recording)
    assert "could not be called before its step" in caplog.text


def test_a_step_without_such_operators_starts_no_thread(monkeypatch: Any) -> None:
    step = lambda total, x: total.add_(x).sum()  # noqa: E731
    recording = recorder.recorded(step, StepArguments([torch.zeros(2)], [torch.ones(2)], 1, 0))
    monkeypatch.setattr(cuda_graphs, "ThreadPoolExecutor", None)
    cuda_graphs.compile_kernels(recording)


def test_a_gpu_compiles_them_before_it_captures(recording: Recording, monkeypatch: Any) -> None:
    asked: list[Recording] = []
    monkeypatch.setattr("fnrfl.engines.recorder.cuda_graphs.compile_kernels", asked.append)
    cuda_graphs.CudaGraphs(torch.bfloat16, compile=False).candidates(recording)
    assert asked == [recording]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("channels", [16, 64])
def test_on_a_gpu_every_operator_can_be_called(channels: int, caplog: Any) -> None:
    """The second time kernels are there already, and new threads only launch them."""
    made = recorded_step("cuda", channels)
    with caplog.at_level("DEBUG", "fnrfl"):
        for _ in range(2):
            cuda_graphs.compile_kernels(made)
    assert "compiling kernels took" in caplog.text and "could not be called" not in caplog.text
