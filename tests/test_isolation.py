"""Runs beside each other, in a forked process, and under whatever settings the caller has."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fnrfl
import fnrfl.core.errors
import threads
from fnrfl.core import isolation
from fnrfl.core.isolation import isolated
from fnrfl.engines.gpus import kernel_settings
from fnrfl.runs.forecast import forecast
from fnrfl.runs.functional import class_norms, refine

KEYS: dict[str, Any] = {"rounds": 1, "clients": 3, "out": None, "client": {"epochs": 1, "batch": 32}}


def run(**keys: Any) -> str:
    return fnrfl.run("digits", **KEYS | keys).model_sha256


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "at_once", "names"),
    [
        pytest.param(12, 4, ("dropout loop", "fedavg loop", "fedavg loop 2"), id="few"),
        pytest.param(200, 8, tuple(threads.KINDS), id="many", marks=pytest.mark.slow),
    ],
)
def test_runs_at_once_are_the_runs_one_after_another(runs: int, at_once: int, names: tuple[str, ...]) -> None:
    together, alone = threads.compared(runs, at_once, names)
    assert [run.outcome for run in together] == [run.outcome for run in alone]
    assert len({run.sha256 for run in alone}) > 0.9 * runs  # so that one mistaken for another would be seen
    assert threads.overlapping(together) is not None


def test_the_settings_are_put_back_by_the_last_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that enter and leave in turns: inside everything holds, and in the end all is as it was."""
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    entered, left, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with isolated():
            entered.set()
            left.wait(10)
            seen.append((torch.get_default_dtype(), torch.get_num_threads()))
        seen.append((torch.get_default_dtype(), torch.get_num_threads()))

    thread = threading.Thread(target=other)
    try:
        with isolated():
            thread.start()
            entered.wait(10)
        assert torch.get_num_threads() == 2  # of this thread
        left.set()
        thread.join()
        assert seen == [(torch.float32, 1), (torch.float64, 2)]
        assert torch.get_default_dtype() == torch.float64
        fresh: list[int] = []
        new = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        new.start()
        new.join()
        assert fresh == [2]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)


def test_a_worker_has_one_thread_whatever_others_set() -> None:
    """A run that is left sets the number for all threads that have not asked for it yet."""
    ready, go_on, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        isolation.as_worker()
        ready.set()
        go_on.wait(10)
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(10)
    torch.set_num_threads(2)
    go_on.set()
    thread.join()
    torch.set_num_threads(before)
    assert seen == [1]


# -- forks -------------------------------------------------------------------------------------------------------------


def _in_child(answers: Any) -> None:
    answers.put(run(seed=1))


@pytest.mark.skipif(
    not hasattr(os, "fork") or torch.cuda.is_available(), reason="needs fork, which torch refuses beside a GPU"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking while threads are there
def test_a_forked_process_runs_after_its_parent_has(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # as it is for whoever has two cores
    try:
        wanted = [run(seed=1, model="mlp(hidden=4000)", engine={"name": "loop", "threads": 2}), run(seed=1)][1]
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        child = context.Process(target=_in_child, args=(answers,))
        child.start()
        child.join(20)
        alive = child.is_alive()
        child.kill()
        assert not alive, "the child waits for threads that are its parent's"
        assert child.exitcode == 0, "the child failed"
        assert answers.get() == wanted
    finally:
        torch.set_num_threads(before)


FORK_BESIDE_A_THREAD = """
import os, threading, time
from fnrfl.core.forks import process_lock

for order in (1, -1):
    outer, inner = (process_lock(), process_lock())[::order]
    begun = threading.Event()

    def work():
        with outer:
            begun.set()
            time.sleep(0.2)
            with inner:
                pass

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    if not (child := os.fork()):
        with outer, inner:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_and_a_thread_that_takes_two_locks_do_not_wait_for_each_other() -> None:
    subprocess.run([sys.executable, "-c", FORK_BESIDE_A_THREAD], check=True, timeout=60)


FORK_BESIDE_A_GPU_RUN = """
import os, sys, threading
import torch
from fnrfl.core.isolation import isolated, until_left
from fnrfl.engines.gpus import kernel_settings

def now():
    cudnn = torch.backends.cudnn
    return cudnn.deterministic, cudnn.allow_tf32, cudnn.enabled, torch.get_deterministic_debug_mode()

def child_of_a_fork():
    wanted = now() if threading.current_thread() is runner else before
    if not (child := os.fork()):
        same = now() == wanted
        with kernel_settings(deterministic=True, tf32=False):
            os._exit(not same)
    assert os.waitpid(child, 0)[1] == 0

def work():
    with isolated():
        if sys.argv[1] == "until left":
            until_left(kernel_settings(deterministic=True, tf32=True, use_cudnn=False))
            wait()
        else:
            with kernel_settings(deterministic=True, tf32=True, use_cudnn=False):
                wait()

def wait():
    child_of_a_fork()  # of the run's own thread, which keeps its settings
    begun.set()
    forked.wait()

torch.set_deterministic_debug_mode(2)
before, begun, forked = now(), threading.Event(), threading.Event()
runner = threading.Thread(target=work)
runner.start()
begun.wait()
assert now() != before
child_of_a_fork()  # while the run goes on
forked.set()
runner.join()
assert now() == before
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("how", ["until left", "with"])
def test_a_fork_waits_neither_here_nor_there_for_a_run_on_a_gpu_and_has_settings_as_before(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK_BESIDE_A_GPU_RUN, how],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


FORK_BESIDE_THE_FIRST_GPU_RUN = """
import os, signal, sys, threading, time
from fnrfl.engines.gpus import kernel_settings

begun = threading.Event()

class Slowly:
    def find_spec(self, name, *_):
        if name.startswith("torch.") and threading.current_thread() is runner and not begun.is_set():
            begun.set()
            time.sleep(0.2)

def work():
    with kernel_settings(deterministic=True, tf32=False):  # torch imports what it needs for the first change
        begun.set()

runner = threading.Thread(target=work)
sys.meta_path.insert(0, Slowly())
runner.start()
begun.wait()
if not (child := os.fork()):
    signal.alarm(30)
    with kernel_settings(deterministic=True, tf32=False):
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_what_torch_imported_in_another_thread() -> None:
    subprocess.run([sys.executable, "-c", FORK_BESIDE_THE_FIRST_GPU_RUN], check=True, timeout=120)


FORK_BESIDE_AN_IMPORT = """
import os, threading, time
from fnrfl.core.own_code import import_lock

begun = threading.Event()

def work():
    with import_lock:
        begun.set()
        time.sleep(0.2)

threading.Thread(target=work).start()
begun.wait()
if not (child := os.fork()):
    with import_lock:
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_can_import_what_another_thread_was_about_to() -> None:
    subprocess.run([sys.executable, "-c", FORK_BESIDE_AN_IMPORT], check=True, timeout=60)


def test_a_run_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    run(engine={"name": "loop", "threads": 2})
    with pytest.raises(fnrfl.core.errors.FnrflError):
        run(engine={"name": "loop", "threads": 2}, client={"lr": 1e30, "epochs": 3})
    assert set(threading.enumerate()) <= before


def test_settings_for_a_gpu_are_put_back_when_a_run_is_left() -> None:
    """Whether there is a GPU or not: they belong to the process."""
    cudnn = torch.backends.cudnn

    def now() -> tuple[object, ...]:
        flags = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cudnn.enabled
        return *flags, torch.get_deterministic_debug_mode()

    before = now()
    with isolated():
        with isolated():
            isolation.until_left(kernel_settings(deterministic=True, tf32=True, use_cudnn=False))
        assert now() == (False, True, True, False, 1)
    assert now() == before


# -- the caller's settings ---------------------------------------------------------------------------------------------


@contextmanager
def put(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
        assert get() == value, "the caller's setting has changed"
    finally:
        put(before)


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    gc.collect()  # what other tests left, such as temporary folders, warns when it goes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filters = list(warnings.filters)
        yield
        assert list(warnings.filters) == filters


@contextmanager
def flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        yield
        assert isolation.TINY == 0.0
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def numpy_raises() -> Iterator[None]:
    with np.errstate(all="raise"):
        yield
        assert np.geterr()["under"] == "raise"


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
        assert torch.zeros(1).device.type == "meta"
    finally:
        torch.set_default_device(None)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dtype": lambda: put(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "half": lambda: put(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "default device": default_device,
    "device": lambda: torch.device("meta"),
    "matmul": lambda: put(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "deterministic": lambda: put(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 2),
    "numpy": numpy_raises,
    "warnings": warnings_are_errors,
    "threads": lambda: put(torch.get_num_threads, torch.set_num_threads, 3),
    "onednn": lambda: put(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "tiny numbers": flushed,
    "none": nullcontext,
}
RUNS: dict[str, dict[str, Any]] = {
    "loop": {"engine": {"name": "loop", "threads": 2}, "model": "cnn(norm=batch)", "fnr": {"epochs": 1}},
    "batched": {"engine": "batched", "algorithm": "scaffold"},
    "recorded": {"engine": "batched", "client": {"epochs": 1, "batch": 1}},
}


@cache
def undisturbed(kind: str) -> str:
    return run(**RUNS[kind])


@pytest.mark.parametrize("kind", ["loop", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(RUNS)[1:])])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_callers_settings_change_nothing(name: str, kind: str) -> None:
    wanted = undisturbed(kind)
    with SETTINGS[name]():
        assert run(**RUNS[kind]) == wanted
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        with pytest.raises(fnrfl.core.errors.FnrflError):
            run(client={"lr": 1e30}, model="mlp(hidden=4)")
        assert grad == (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))


@pytest.mark.parametrize("name", ["dtype", "autocast", "inference", "device", "warnings"])
def test_models_and_forecasts_do_not_depend_on_them_either(name: str) -> None:
    result = fnrfl.run("digits", **KEYS)
    x = torch.rand(4, *result.input_shape)
    wanted = fnrfl.run("digits", **KEYS).model(x)
    expected = forecast(result.config)
    with SETTINGS[name]():
        model, found = result.model, forecast(result.config)
    assert torch.equal(model(x), wanted)
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" and not p.is_inference() for p in model.parameters())
    assert (found.steps, found.bytes_up, found.parameters) == (
        expected.steps, expected.bytes_up, expected.parameters
    )  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_a_loop_of_ones_own_may_call_from_any_gradient_mode(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    made = torch.Generator().manual_seed(0)

    def refined() -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        x = torch.rand(6, 4, generator=made.manual_seed(0), dtype=torch.float64)
        loader = [(x, torch.arange(6) % 3)]
        with mode():
            data = [(x.clone(), y) for x, y in loader]
            refine(model, data, class_norms(model, data) * 2, epochs=2)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    found = refined()
    mode = nullcontext
    assert torch.equal(found, refined())
