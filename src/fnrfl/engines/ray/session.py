"""Ray for as long as somebody uses it: a cluster that exists, or one that is started here and leaves nothing behind."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fnrfl.core.errors import CompatibilityError, FnrflError

# What Ray's processes inherit.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # no call starts a Ray by itself
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no line about what later versions will do
}
LOOK = 1.0  # seconds between two looks at the clock, and at whether somebody wants to stop
LONGEST_PATH = 24  # characters of a temporary folder: names of sockets below it must have at most 107
_lock, _users, _session = threading.Lock(), 0, ExitStack()  # runs that use the Ray that this process has joined


@contextmanager
def connected(address: str, cpus: float) -> Iterator[Any]:
    """Inside, Ray can be used: the module is given.

    A program that has called ray.init goes on with its Ray, which stays. Else Ray connects to `address`, or is started
    here with `cpus` cores at least, for all runs of this process, and ends with the last of them.
    """
    global _users
    with _lock:
        mine = _users > 0 or not ("ray" in sys.modules and sys.modules["ray"].is_initialized())
        if mine and not _users:
            _session.enter_context(_joined(address, cpus))
        _users += mine
    try:
        import ray

        yield ray
    finally:
        with _lock:
            _users -= mine
            if mine and not _users:
                _session.close()


@contextmanager
def _joined(address: str, cpus: float) -> Iterator[None]:
    """Connect to a cluster; without an address, start Ray on this machine alone, whose files go when it ends."""
    options: dict[str, Any] = {"address": address}
    refused = (
        f'network.address = "{address}": there is no Ray cluster to connect to. Start one with `ray start --head`, or '
        "leave network.address out: then Ray is started here. Ray says: "
    )
    inherited = dict(_ENVIRONMENT)
    with ExitStack() as stack:
        if not address:
            parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= LONGEST_PATH else "/tmp"
            folder = tempfile.TemporaryDirectory(prefix="fnrfl-ray-", dir=parent, ignore_cleanup_errors=True)
            if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:  # read when Ray is imported, and kept
                inherited["RAY_AUTH_MODE"] = "token"  # its ports let in who has the token in this user's ~/.ray
            cores = max(os.cpu_count() or 1, math.ceil(cpus))
            options = {"address": "local", "num_cpus": cores, "include_dashboard": False}
            options["_temp_dir"] = stack.enter_context(folder)
            refused = "Ray could not be started on this machine: "
        with _as_before(inherited):
            import ray

            stack.callback(ray.shutdown)
            try:
                host, _, port = address.removeprefix("ray://").rpartition(":")
                if port.isdigit():  # Ray itself would try for minutes
                    socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
                ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as error:  # of many kinds: nobody there, no room on a disk or in memory, no free port
                raise FnrflError(refused + last_line(error)) from error
        yield


@contextmanager
def _as_before(environment: dict[str, str]) -> Iterator[None]:
    """Inside, there is more in the environment; after it that is gone, and so is the handler of Ray for SIGTERM."""
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in environment.keys() & before.keys()})
        with suppress(ValueError, TypeError):  # only the main thread may, and Ray leaves the others alone
            signal.signal(signal.SIGTERM, handler)


@dataclass(frozen=True)
class Need:
    """How much of something a cluster must have, by which key, and what to do if it has less."""

    what: str  # CPU or GPU
    count: float
    key: str
    way_out: str


def check_room(ray: Any, who_needs: str, needs: Sequence[Need]) -> None:
    """Refuse what the cluster has no room for: Ray would wait for it for ever."""
    there = ray.cluster_resources()
    for need in needs:
        found = there.get(need.what, 0.0)
        if need.count > found + 1e-9:
            raise CompatibilityError(
                f"{who_needs} {need.count:g} {need.what}s ({need.key}), and the Ray cluster has {found:g}. "
                f"{need.way_out}, or add machines."
            )


def last_line(error: object) -> str:
    """Return what an error of Python says at its end."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if len(line.strip()) > 1), "no reason.")


def why_not_answered(error: Any) -> str:
    """Return why a process of Ray has not answered, in words."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):  # raised inside
        return str(cause) if isinstance(cause, MemoryError) else last_line(error)
    if type(error).__name__ == "OutOfMemoryError":
        return "Ray has ended its process, because the machine's memory was full."
    return "its Ray process died before it answered."
