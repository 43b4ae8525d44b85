"""Steps that an earlier process has compiled: found by their names, not recorded, and never taken for others."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fednova import FedNova
from fnrfl.algorithms.fedprox import FedProx
from fnrfl.core.algorithm import Objective
from fnrfl.engines import compiled, recorder, step_names
from fnrfl.engines.cuda_graphs import CudaGraphs
from fnrfl.engines.programs import STORE, FlatProgram, FlatStep, StepArguments, repeated
from fnrfl.engines.recorder import Recorder, Wanted
from toys import NUM_CLASSES, NUM_FEATURES, Run, assert_near, assert_same, classification

pytestmark = [pytest.mark.usefixtures("no_programs")]


class OnCpu(CudaGraphs):
    """The backend of GPUs, whose compiled steps are repeated and not captured."""

    def __init__(self) -> None:
        self.compute, self.compile, self.waits, self.max_programs = torch.float64, True, True, 64

    def recording(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _captured(self, step: FlatStep, arguments: StepArguments) -> FlatProgram:
        return repeated(step)


class Worker:
    """Writes a step as text where the compiler's worker would write a compiled one."""

    returncode = 0

    def __init__(self, command: list[str], **_: Any) -> None:
        asked, folder = map(Path, command[-2:])
        folder.mkdir()
        shutil.copy(asked / "step.py", folder / "step.bin")
        if (asked / "name").exists():
            (folder / (asked / "name").read_text()).touch()

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float) -> int:
        return 0


@dataclass
class Machine:
    """What was done on a machine since it was looked at last."""

    cache: Path
    recorded: list[FlatStep] = field(default_factory=list)
    compiled: list[Worker] = field(default_factory=list)

    def done(self) -> tuple[int, int]:
        """How many steps were recorded and how many compiled."""
        counts = len(self.recorded), len(self.compiled)
        self.recorded.clear()
        self.compiled.clear()
        return counts

    def names(self) -> list[Path]:
        return [path for path in self.cache.glob("*/*") if path.name != "step.bin"]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose compiler is the one of CPUs."""
    machine, recorded = Machine(tmp_path / "programs"), recorder.recorded
    monkeypatch.setenv("FNRFL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    monkeypatch.setattr(step_names, "_sources_hash", lambda: "sources")  # a file may be saved while tests run

    def counted(step: FlatStep, *more: Any) -> Any:
        machine.recorded.append(step)
        return recorded(step, *more)

    monkeypatch.setattr(recorder, "recorded", counted)
    return machine


@pytest.fixture
def machine(watched: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose compiler takes no time."""

    def begun(command: list[str], **more: Any) -> Worker:
        watched.compiled.append(Worker(command, **more))
        return watched.compiled[-1]

    monkeypatch.setattr(compiled.subprocess, "Popen", begun)
    monkeypatch.setattr(compiled, "_load", lambda folder, _: step_of((folder / "step.bin").read_text()))
    return watched


def step_of(code: str) -> FlatStep:
    """A step from its text; one that holds tensors cannot be called."""
    space: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    exec(code, space)
    return lambda *tensors: space["forward"](None, *tensors)


def net(activation: type[nn.Module] = nn.Tanh, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(NUM_FEATURES, width), activation(), nn.Linear(width, NUM_CLASSES))


def in_a_new_process(
    algorithm: Any = None, module: Callable[[], nn.Module] = net, dtype: torch.dtype = torch.float64, **options: Any
) -> Run:
    STORE.clear()
    world = classification(dtype, module=module)
    run = Run(algorithm or FedAvg(), "batched-fast", active=6, world=world, **options)
    runner = run.engine.server.runner
    runner.recorder = Recorder(OnCpu(), run.net.fingerprint())
    run.rounds(1)
    programs = runner.recorder.programs.values()
    assert programs and all(stored.program for stored in programs)
    return run


def test_a_second_process_records_nothing_and_is_the_same_to_the_bit(machine: Machine) -> None:
    first = in_a_new_process()
    recorded, made = machine.done()
    assert recorded == made == len(machine.names()) > 0
    second = in_a_new_process()
    assert machine.done() == (0, 0)
    assert_same(first.state, second.state)
    for name in machine.names():  # as before there were names: recorded, and found by the record
        name.unlink()
    third = in_a_new_process()
    assert machine.done() == (recorded, 0)
    assert_same(first.state, third.state)
    in_a_new_process()
    assert machine.done() == (0, 0)  # what was found by its record has got its name


def changed_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_names, "_sources_hash", lambda: "others")


def changed_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Objective.loss
    monkeypatch.setattr(Objective, "loss", lambda *arguments: 2 * loss(*arguments))


def changed_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Tanh, "forward", lambda layer, x: x.tanh() * 2)


def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")


def another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "1.0.0")


@pytest.mark.parametrize(
    "change", [changed_sources, changed_loss, changed_layer, deterministic, another_gpu, another_torch]
)
def test_what_has_changed_is_recorded_anew(
    change: Callable[[pytest.MonkeyPatch], None], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_new_process()
    machine.done()
    with monkeypatch.context() as changed:
        change(changed)
        other = in_a_new_process()
        assert machine.done()[0] > 0
        plain = Run(FedAvg(), active=6, world=classification(module=net)).rounds(1)
        assert_near(other.state, plain, atol=1e-9)
    in_a_new_process()
    assert machine.done() == (0, 0)


def test_other_nets_methods_options_and_types_are_recorded_each(machine: Machine) -> None:
    runs: list[tuple[Any, dict[str, Any]]] = [
        (FedAvg(), {}),
        (FedProx(mu=0.1), {}),
        (FedProx(mu=0.2), {}),
        (FedAvg(), {"module": lambda: net(nn.ReLU)}),
        (FedAvg(), {"module": lambda: net(width=9)}),
        (FedAvg(), {"dtype": torch.float32}),
    ]
    for algorithm, options in runs:
        in_a_new_process(algorithm, **options)
        assert machine.done()[0] > 0, (algorithm, options)
    for algorithm, options in runs:
        in_a_new_process(algorithm, **options)
        assert machine.done() == (0, 0), (algorithm, options)
    in_a_new_process(FedNova())
    assert machine.done() == (0, 0)  # the same objective


def test_runs_whose_inputs_are_scaled_otherwise_share_steps_and_not_the_numbers(machine: Machine) -> None:
    scales = [([0.0] * NUM_FEATURES, [spread] * NUM_FEATURES) for spread in (1.0, 1.5)]
    runs = [in_a_new_process(scale=scale) for scale in scales]
    in_a_new_process(scale=scales[0])
    assert machine.done()[0] == len(machine.names())  # each step was recorded once
    for run, scale in zip(runs, scales, strict=True):
        want = Run(FedAvg(), active=6, world=classification(module=net), scale=scale).rounds(1)
        assert_near(run.state, want, atol=1e-9)


class OwnTanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def test_code_of_a_users_own_is_recorded_in_every_process(machine: Machine) -> None:
    for _ in range(2):
        in_a_new_process(module=lambda: net(OwnTanh))
        assert machine.done()[0] > 0
    assert machine.names() == []


def test_a_damaged_one_is_recorded_and_compiled_again(machine: Machine) -> None:
    first = in_a_new_process()
    count = machine.done()
    for folder in machine.cache.iterdir():
        (folder / "step.bin").write_text("half of it")
    assert_same(in_a_new_process().state, first.state)
    assert machine.done() == count
    in_a_new_process()
    assert machine.done() == (0, 0)


def test_a_name_without_a_step_is_no_name(machine: Machine) -> None:
    in_a_new_process()
    count = machine.done()
    for folder in machine.cache.iterdir():
        (folder / "step.bin").unlink()
        folder.rename(folder.with_name(f"{folder.name}-old"))
    in_a_new_process()
    assert machine.done() == count


def test_one_that_does_not_repeat_the_step_is_refused_and_the_step_recorded(machine: Machine, caplog: Any) -> None:
    first = in_a_new_process()
    recorded, _ = machine.done()
    for folder in machine.cache.iterdir():
        code = (folder / "step.bin").read_text()
        wrong = code.replace("torch.ops.aten.tanh.default(", "torch.ops.aten.sigmoid.default(")
        assert wrong != code
        other = folder.with_name(f"{folder.name[:-1]}x")
        folder.rename(other)
        (other / "step.bin").write_text(wrong)
    wrongly_named = machine.names()
    assert_same(in_a_new_process().state, first.state)
    assert "does not repeat" in caplog.text
    assert machine.done() == (recorded, recorded)
    assert not any(path.exists() for path in wrongly_named)
    in_a_new_process()
    assert machine.done() == (0, 0)


def held(total: Tensor, fixed: Tensor, turn: Tensor) -> Tensor:
    return total.add_(turn * torch.tensor([1.0, 2.0])).sum()


LIBRARY = torch.library.Library("fnrfl_found", "DEF")
LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.impl("doubled", lambda x: x * 2, "CPU")  # can be recorded with numbers alone


def numbered(total: Tensor, fixed: Tensor, turn: Tensor) -> Tensor:
    return total.add_(torch.ops.fnrfl_found.doubled(turn)).sum()


def plain(total: Tensor, fixed: Tensor, turn: Tensor) -> Tensor:
    return total.add_(turn * fixed).sum()


@pytest.mark.parametrize(
    ("step", "complete", "named"), [(plain, True, 1), (plain, False, 0), (held, True, 0), (numbered, True, 0)]
)
def test_what_may_hold_numbers_of_a_run_has_no_name(step: Any, complete: bool, named: int, machine: Machine) -> None:
    """And neither has a step whose key does not say all."""
    asked = Wanted("sum", lambda: (step, torch.zeros(2), torch.ones(2), torch.ones(2)), key_is_complete=complete)
    Recorder(OnCpu()).programs_of([asked])
    assert machine.done() == (1, 1) and len(machine.names()) == named


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_is_really_compiled_is_found_and_is_the_same_to_the_bit(watched: Machine) -> None:
    first = in_a_new_process()
    assert watched.done()[0] > 0
    second = in_a_new_process()
    assert watched.done()[0] == 0
    assert_same(first.state, second.state)
