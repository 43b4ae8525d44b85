"""Runs beside each other, after a fork, and under whatever settings the caller has."""

from __future__ import annotations

import ast
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fnrfl
import fnrfl.core.errors
import threads
from fnrfl import process
from fnrfl.core.ndarrays import read_arrays
from fnrfl.engines.gpus import kernel_settings
from fnrfl.process import filters_lock, isolated, parser_lock
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
        process.as_worker()
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


NESTED = "[" * 20 + "0" + "]" * 20


def test_threads_parse_and_read_arrays_beside_each_other(tmp_path: Path) -> None:
    stored = {f"x{number}": np.arange(number) for number in range(5)}
    np.savez(tmp_path / "arrays.npz", **stored)  # type: ignore[arg-type]

    def work(levels: int) -> None:
        if levels:  # threads at one depth have equal counts and would not notice each other
            return work(levels - 1)
        for _ in range(20):
            with parser_lock:
                assert ast.dump(ast.parse(NESTED)).count("List(") == 20
            for name, array in read_arrays(tmp_path / "arrays.npz").items():
                np.testing.assert_array_equal(array, stored[name])

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(switch)


# -- forks -------------------------------------------------------------------------------------------------------------


def _in_child(answers: Any) -> None:
    try:
        answers.put(run(seed=1))
    except RuntimeError as error:
        answers.put(str(error))


forks = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.cuda.is_available(), reason="needs fork, which torch refuses beside a GPU"
)


@contextmanager
def forked() -> Iterator[Any]:
    """What a child answers that was forked when this was entered."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(answers,))
    child.start()
    yield answers
    child.join(20)
    alive = child.is_alive()
    child.kill()
    assert not alive and child.exitcode == 0, "the child waits for threads that are its parent's, or has failed"


@forks
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking while threads are there
def test_a_forked_process_runs_after_its_parent_has() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # as it is for whoever has two cores
    try:
        run(seed=1, model="mlp(hidden=4000)", engine={"name": "loop", "threads": 2})
        wanted = run(seed=1)
        with forked() as answers:
            assert answers.get() == wanted
    finally:
        torch.set_num_threads(before)


@forks
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_was_forked_during_a_run_cannot_run() -> None:
    with isolated(), forked() as answers:
        assert "forked while a run was under way" in answers.get()
    assert run(seed=1)  # here all is as before


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
            process.until_left(kernel_settings(deterministic=True, tf32=True, use_cudnn=False))
        assert now() == (False, True, True, False, 1)
    assert now() == before


# -- filters of warnings ---------------------------------------------------------------------------------------------


@contextmanager
def isolated_thread() -> Iterator[tuple[threading.Thread, threading.Event, threading.Event]]:
    """A thread that is inside of `isolated` from the first event until the second; the filters are as before then."""
    inside, leave, before = threading.Event(), threading.Event(), list(warnings.filters)

    def stay() -> None:
        with isolated():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    yield thread, inside, leave
    leave.set()
    thread.join(10)
    assert not thread.is_alive() and list(warnings.filters) == before


def test_filters_of_warnings_are_as_before_whatever_threads_did_in_turns() -> None:
    with isolated_thread() as (other, inside, _):
        with filters_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other.start()
            assert not inside.wait(0.3)
        assert inside.wait(10)


def test_beside_a_run_nobody_waits_for_the_filters_of_warnings() -> None:
    """A run that records a step holds them for as long as a compiler takes, and others come and go meanwhile."""
    with isolated(), isolated_thread() as (other, inside, leave), filters_lock:
        leave.set()
        other.start()
        assert inside.wait(10)


def test_the_last_run_to_end_waits_until_filters_of_warnings_are_put_back() -> None:
    with isolated_thread() as (other, inside, leave):
        other.start()
        assert inside.wait(10)
        with filters_lock, warnings.catch_warnings():
            leave.set()
            other.join(0.3)
            assert other.is_alive()


def test_whoever_changes_the_filters_of_warnings_holds_their_lock() -> None:
    source = Path(__file__).parents[1] / "src" / "fnrfl"
    lines = [line for path in source.rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines()]
    changes = [line.strip() for line in lines if "with" in line and "catch_warnings(" in line]
    assert len(changes) >= 3
    assert all("filters_lock" in line for line in changes)


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
        assert process.TINY == 0.0
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
    yield
    device = torch.zeros(1).device.type
    torch.set_default_device(None)
    assert device == "meta"


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
    assert (found.steps, found.sent, found.parameters) == (expected.steps, expected.sent, expected.parameters)


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


# -- the clock ---------------------------------------------------------------------------------------------------------

BEFORE_1970 = """
import time
time.time = lambda: -3e8
time.time_ns = lambda: -3 * 10**17
def sleep(seconds):
    raise SystemExit("the run sleeps by the clock")
time.sleep = sleep
"""


@pytest.mark.skipif(sys.platform == "win32", reason="git is a script here")
def test_a_run_ends_with_a_clock_before_1970(tmp_path: Path) -> None:
    """A run does not ask what time it is: a clock that stands still changes nothing."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BEFORE_1970)
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text("#!/bin/sh\nexec >&- 2>&-\nsleep 1\nexit 1\n")  # it says nothing more, and does not end at once
    git.chmod(0o755)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path]),
        "PATH": os.pathsep.join([str(git.parent), os.environ["PATH"]]),
    }
    for words in ("run digits rounds=1 clients=2 client.epochs=1 fnr=on -o run", "evaluate run digits"):
        command = [sys.executable, "-m", "fnrfl", *words.split()]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
