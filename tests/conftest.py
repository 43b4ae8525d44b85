"""What holds for all tests."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is: more than the 200 ms that Hypothesis allows, with bad luck.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
# `make test` draws the same examples every time, so what passed here passes elsewhere; `make test-all` draws new ones.
settings.register_profile("repeatable", derandomize=True, database=None)

# A job that was started in the background ignores Ctrl-C, and one of `nohup` ignores SIGHUP; so would the programs that
# the tests start and stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# On processors of Intel, MKL rounds a product otherwise if its matrices begin at other addresses, and so in another
# process. Told to be the same everywhere, it is; tests ask for bits that are equal in several processes.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# What tests allow to run is not remembered in the home of whoever starts them.
STATE = os.environ["FNRFL_STATE"] = tempfile.mkdtemp(prefix="fnrfl-state-")


def pytest_unconfigure() -> None:
    """Leave nothing behind; a worker of xdist ends without what `atexit` would do."""
    shutil.rmtree(STATE, ignore_errors=True)


# FNRFL_TEST_COSTS=FILE: every test appends a line with its CPU seconds, children included, and the process's megabytes.
COSTS = os.environ.get("FNRFL_TEST_COSTS")


def _cpu_seconds() -> float:
    """Of this process and of the children that it has waited for."""
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def _megabytes() -> float:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure a test together with the fixtures that it is the first to ask for."""
    if not COSTS:
        return (yield)
    before = _cpu_seconds()
    result = yield
    with Path(COSTS).open("a") as file:
        file.write(f"{_cpu_seconds() - before:.3f}\t{_megabytes():.0f}\t{item.nodeid}\n")
    return result


@pytest.fixture
def tmp_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a test, with a state folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FNRFL_STATE", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def no_programs() -> Iterator[None]:
    """No program of an earlier test is found, and none of this test's by later ones."""
    from fnrfl.engines.recorder.programs import STORE

    STORE.clear()
    yield
    STORE.clear()
