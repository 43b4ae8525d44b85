"""How a command ends that was not let finish: by a signal, a closed pipe, a full memory, or one failing run of many."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from fnrfl import cli
from fnrfl.cli import display as shown
from fnrfl.cli import train
from fnrfl.config import load
from fnrfl.core.errors import FnrflError, gpu_out_of_memory, out_of_memory, sentence
from fnrfl.results import compare
from fnrfl.rundir import interrupt
from fnrfl.runs import forecast as plan
from fnrfl.runs import run as runs
from fnrfl.runs.setup import build

RUN = ("run", "rounds=4", "clients=3", "client.epochs=1", "model=mlp(hidden=8)", "-o", "run")
CODES = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}
each_signal = pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)


def fnrfl(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, and one for what is temporary beside it."""
    (tmp_path / "work").mkdir()
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path / "work"


def left(folder: Path) -> list[str]:
    """What lies about."""
    return [path.name for path in (*folder.rglob(".*"), *(folder.parent / "scratch").glob("fnrfl*"))]


@pytest.fixture
def at_phase(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has something happen in the middle of the first round, or of some round's training."""

    def arrange(happen: Callable[[], object], round: int = 1) -> None:
        heard: list[str] = []

        def display(show: Any, phase: Any) -> shown.Display:
            def told(name: str) -> None:
                heard.append(name)
                if name == "local" and heard.count("local") == round:
                    happen()

            return real(show, told)

        real = shown.Display
        monkeypatch.setattr(shown, "Display", display)

    return arrange


# -- signals -----------------------------------------------------------------------------------------------------------


@each_signal
def test_the_first_signal_saves(number: signal.Signals, folder: Path, at_phase: Callable[..., None]) -> None:
    at_phase(lambda: os.kill(os.getpid(), number), round=2)
    before = signal.getsignal(number)
    got = fnrfl(*RUN)
    assert got.exit_code == CODES[number], got.output
    assert got.stderr.endswith("fnrfl: stopped. To go on: fnrfl resume run\n")
    assert json.loads((folder / "run" / "checkpoint.json").read_text())["round"] == 2
    assert left(folder) == [] and signal.getsignal(number) is before
    assert runs.resume("run").model_sha256 == runs.run(load(None, RUN[1:-2]), out=None).model_sha256


@each_signal
def test_the_second_signal_stops_at_once(number: signal.Signals, folder: Path, at_phase: Callable[..., None]) -> None:
    at_phase(lambda: [os.kill(os.getpid(), number), os.kill(os.getpid(), number)])
    got = fnrfl(*RUN)
    assert got.exit_code == CODES[number], got.output
    assert (folder / "run" / "events.jsonl").read_text().count("\n") == 1  # no round has ended
    assert left(folder) == []


BUILDING = {"run": RUN, "dry-run": ("run", "--dry-run"), "compare": ("compare", "rounds=1", "--over", "fnr=off,on")}


@each_signal
@pytest.mark.parametrize("words", BUILDING.values(), ids=BUILDING)
def test_a_signal_while_building_leaves_nothing(
    words: tuple[str, ...], number: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def building(*given: object, **named: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(5)

    for module in (runs, build, plan):
        monkeypatch.setattr(module, "build", building)
    got = fnrfl(*words)
    assert got.exit_code == CODES[number], got.output
    assert got.stderr.startswith("fnrfl: stopped.")
    assert left(folder) == list(folder.iterdir()) == []


def test_a_signal_while_reporting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.run(load(None, RUN[1:-2]), out="run")
    happens = lambda *a, **k: [os.kill(os.getpid(), signal.SIGTERM), time.sleep(5)]  # noqa: E731
    monkeypatch.setattr("fnrfl.results.report.page.report", happens)
    got = fnrfl("report", "run")
    assert (got.exit_code, got.stderr) == (143, "fnrfl: stopped.\n")


@contextmanager
def handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_handled_or_ignored_stays_so(at_phase: Callable[..., None]) -> None:
    heard: list[int] = []
    at_phase(lambda: [os.kill(os.getpid(), signal.SIGHUP), os.kill(os.getpid(), signal.SIGTERM)])
    with handled(signal.SIGHUP, signal.SIG_IGN), handled(signal.SIGTERM, lambda number, _: heard.append(number)):
        assert fnrfl(*RUN).exit_code == 0
    assert heard == [signal.SIGTERM]


def test_python_hears_of_a_signal_as_of_ctrl_c(folder: Path) -> None:
    with pytest.raises(interrupt.Interrupted) as caught:
        runs.run(load(None, RUN[1:-2]), out=None, phase=lambda name: os.kill(os.getpid(), signal.SIGTERM))
    assert isinstance(caught.value, KeyboardInterrupt)
    assert left(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_real_process_ends_with_the_signals_code(folder: Path, times: int) -> None:
    """Refinement of clients one at a time keeps models on disk; a second signal comes in the middle of that."""
    words = ["rounds=100000", "fnr=on", "engine.clients_at_once=2", "engine.threads=2", "client.epochs=5", "-o", "run"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from fnrfl.cli import main; main()", "run", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(folder.parent / "scratch")},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        while "round 2" not in process.stdout.readline():
            pass
        for _ in range(times):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert "To go on: fnrfl resume run" in err
    assert left(folder) == []


# -- pipes -------------------------------------------------------------------------------------------------------------


@contextmanager
def closed(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, nobody reads what is written to a stream."""
    read, write = os.pipe()
    os.close(read)
    with monkeypatch.context() as patch, os.fdopen(os.dup(write), "w") as stream:
        patch.setattr(sys, name, stream)
        yield
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # closing must not fail
    os.close(write)


def called(*words: str) -> object:
    return cli.app(list(words), standalone_mode=False)


def test_a_closed_output_saves_the_round(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = train.console

    def quiet_first(**options: Any) -> Any:
        screen = real(**options)
        written = screen.print
        monkeypatch.setattr(screen, "print", lambda text="", **k: written(text, **k) if text else None)
        return screen

    monkeypatch.setattr(shown, "title", lambda config: "")  # which `head -1` would have read
    monkeypatch.setattr(train, "print_leaks", lambda *a, **k: None)
    with closed("stdout", monkeypatch):
        monkeypatch.setattr(train, "console", quiet_first)
        assert called(*RUN) == 141
    assert capsys.readouterr().err == "fnrfl: the output was closed. To go on: fnrfl resume run\n"
    assert json.loads((folder / "run" / "checkpoint.json").read_text())["round"] == 1
    assert left(folder) == []


def test_a_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with closed("stdout", monkeypatch):
        for words in (["list", "keys"], ["list", "algorithms", "--json"], ["run", "--dry-run"]):
            assert called(*words) == 141
        with closed("stderr", monkeypatch):
            assert called(*RUN) == 141
    assert capsys.readouterr().err == ""


# -- memory ------------------------------------------------------------------------------------------------------------


class Greedy(nn.Module):
    """Asks for more memory than there is, once it trains on more than the two examples that it is built with."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, when: str = "training") -> None:
        super().__init__()
        self.linear = nn.Linear(int(torch.tensor(input_shape).prod()), num_classes)
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2 and (self.training or self.when == "scoring"):
            torch.empty(1 << 50)
        return self.linear(x.flatten(1))


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("when", ["training", "scoring"])
def test_memory_is_not_a_clients_fault(engine: str, when: str) -> None:
    words = [word for word in RUN if not word.startswith("model")]
    got = fnrfl(*words, f"model=test_ends:Greedy(when={when})", f"engine={engine}")
    assert got.exit_code == 3
    assert "not enough memory. Set a smaller engine.clients_at_once" in got.stderr
    assert got.stderr.endswith("To go on: fnrfl resume run\n")


def test_memory_has_many_names() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    for error in (caught.value, MemoryError(), RuntimeError("std::bad_alloc")):
        assert out_of_memory(error) and not gpu_out_of_memory(error)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not out_of_memory(RuntimeError("shapes differ"))
    assert sentence(MemoryError()).startswith("There is not enough memory. Set a smaller")


@pytest.mark.parametrize(
    "words",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call.",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ],
)
def test_a_full_gpu_has_many_names(words: str) -> None:
    assert out_of_memory(RuntimeError(words)) and gpu_out_of_memory(RuntimeError(words))
    assert not gpu_out_of_memory(ValueError(words))  # of somebody who only speaks of it


# -- one failing run of many -------------------------------------------------------------------------------------------


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The run with fedprox fails; returns the names of what is started."""
    started: list[str] = []
    real = runs.run

    def run(config: Any, **options: Any) -> Any:
        started.append(config.algorithm.name)
        if config.algorithm.name == "fedprox":
            raise error
        return real(config, **options)

    monkeypatch.setattr(runs, "run", run)
    return started


GRID = ("compare", "rounds=1", "clients=3", "client.epochs=1", "--seeds", "0", "--no-report", "-o", "grid", "--over")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("full"), "There is not enough memory."),
        (OSError(28, "No space left on device", "run/x"), "run/x: No space left on device. Make room."),
        (RuntimeError("mine"), "Unexpected RuntimeError: mine."),
        (FnrflError("a sentence."), "a sentence."),
        (SystemExit(5), "Unexpected SystemExit: 5."),
    ],
    ids=repr,
)
def test_one_failing_run_stops_no_other(
    error: BaseException, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(error, monkeypatch)
    got = fnrfl(*GRID, "algorithm=fedprox,fedavg")
    assert got.exit_code == 3, got.output
    found = json.loads((folder / "grid" / "comparison.json").read_text())
    assert [run["algorithm"] for run in found["runs"]] == ["fedavg"]
    assert said in found["failed"][0]["error"]
    assert f"failed: {said}" in got.stdout


def test_who_failed_comes_last_the_next_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = failing(RuntimeError("mine"), monkeypatch)
    cells = compare.grid(None, list(GRID[1:4]), ["algorithm=fedprox,fedavg,scaffold"], [0])

    def stop(notice: compare.Notice) -> None:
        if notice.what == "failed":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # the first time somebody stops it after the failure
        patch.setattr("fnrfl.results.compare.running.write_tables", lambda *a: None)
        with pytest.raises(KeyboardInterrupt):
            compare.compare(cells, "grid", progress=stop)
    assert started == ["fedprox"]
    compare.compare(cells, "grid")
    assert started[1:] == ["fedprox", "fedavg", "scaffold"]
    compare.compare(cells, "grid")  # all others are finished
    (folder / "grid" / cells[1].name / "model.safetensors").unlink()
    (folder / "grid" / cells[1].name).rename(folder / "aside")
    started.clear()
    compare.compare(cells, "grid")
    assert started == ["fedavg", "fedprox"]


def test_ctrl_c_still_stops_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = failing(KeyboardInterrupt(), monkeypatch)
    got = fnrfl(*GRID, "algorithm=fedprox,fedavg")
    assert got.exit_code == 130
    assert "To go on, give the same command again" in got.stderr
    assert started == ["fedprox"]


def test_a_run_that_only_lacked_its_model_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full when all rounds were done: the next time there is no round to hear of."""
    with monkeypatch.context() as patch:
        write = runs.checkpoint.write_tensors

        def full(path: Path, tensors: Any) -> str:
            if path.name.startswith("model"):
                raise OSError(28, "No space left on device")
            return write(path, tensors)

        patch.setattr(runs.checkpoint, "write_tensors", full)
        assert fnrfl(*GRID, "algorithm=fedavg").exit_code == 3
    got = fnrfl(*GRID, "algorithm=fedavg")
    assert got.exit_code == 0, got.output
    assert "accuracy" in got.stdout
