"""Ray for as long as somebody uses it: a cluster that exists, or one that is started here and leaves nothing behind."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
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

# What Ray's processes are told: report nothing, and let nobody in who does not have the token.
_TOKEN = secrets.token_hex(32)
RAY_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # no call starts a Ray by itself
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no line about what later versions will do
}


LOOK = 1.0  # seconds between two looks at the clock, and at whether somebody wants to stop
LONGEST_PATH = 24  # characters of a temporary folder: names of sockets below it must have at most 107


class _Started:
    """The Ray that was started by this process, and how many runs use it."""

    def __init__(self) -> None:
        self.lock, self.users, self.open = threading.Lock(), 0, ExitStack()


_started = _Started()


@contextmanager
def connected(address: str, cpus: float) -> Iterator[Any]:
    """Inside, Ray can be used: the module is given.

    A program that has called ray.init goes on with its Ray, which stays. Else Ray connects to `address`, or is started
    here with `cpus` cores at least, for all runs of this process, and ends with the last of them.
    """
    with _started.lock:
        if not _started.users and not _is_initialized():
            _started.open.enter_context(_joined(address) if address else _local(cpus))
            _started.users += 1
            mine = True
        else:
            mine = _started.users > 0
            _started.users += mine
    try:
        import ray

        yield ray
    finally:
        with _started.lock:
            _started.users -= mine
            if mine and not _started.users:
                _started.open.close()


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
    """What an error of Python says at its end."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if len(line.strip()) > 1), "no reason.")


def why_not_answered(error: Any) -> str:
    """Why a process of Ray has not answered, in words."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):  # raised inside
        return str(cause) if isinstance(cause, MemoryError) else last_line(error)
    if type(error).__name__ == "OutOfMemoryError":
        return "Ray has ended its process, because the machine's memory was full."
    return "its Ray process died before it answered."


def _is_initialized() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


@contextmanager
def _joined(address: str) -> Iterator[None]:
    """A driver of a cluster that exists."""
    with _environment(RAY_QUIET):
        import ray

        with _signals_as_before():
            try:
                _knock(address)
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, RuntimeError, ValueError, ImportError) as error:
                raise FnrflError(
                    f'network.address = "{address}": there is no Ray cluster to connect to ({last_line(error)}). Start '
                    "one with `ray start --head`, or leave network.address out: then Ray is started here."
                ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise an OSError if nobody answers at an address: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


@contextmanager
def _local(cpus: float) -> Iterator[None]:
    """Ray on this machine alone, without dashboard; its files go when it ends."""
    where = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="fnrfl-ray-", dir=where if len(where) <= LONGEST_PATH else "/tmp")
    with ExitStack() as open:
        open.callback(shutil.rmtree, folder, ignore_errors=True)
        with _environment(RAY_QUIET | _token()):
            import ray

            with _signals_as_before(), _no_dashboard_process():
                open.callback(ray.shutdown)
                try:
                    ray.init(
                        address="local",
                        num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)),
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                        _temp_dir=folder,
                    )
                except Exception as error:  # of many kinds: no room on a disk or in memory, no free port
                    raise FnrflError(f"Ray could not be started on this machine: {last_line(error)}") from error
        yield


def _token() -> dict[str, str]:
    """The environment under which Ray's ports, which are open to the network, accept this process alone.

    Ray reads the mode when it is imported, and keeps it.
    """
    if "RAY_AUTH_MODE" in os.environ:  # the user's choice
        return {}
    if "ray" in sys.modules:
        inside = sys.modules["ray"]._raylet
        if inside.get_authentication_mode() != inside.AuthenticationMode.TOKEN:
            return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Inside, the environment that Ray's processes inherit has these values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _signals_as_before() -> Iterator[None]:
    """Without the handler that Ray puts in the place of SIGTERM's."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with suppress(ValueError, TypeError):  # only the main thread may, and Ray leaves the others alone
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _no_dashboard_process() -> Iterator[None]:
    """Inside, Ray starts no process for its dashboard.

    Without a dashboard it would start one that only reports usage; even where it may not, it asks the addresses of
    cloud providers whose machine this is.
    """
    from ray._private.node import Node

    found = getattr(Node, "start_api_server", None)
    if found is not None:  # another version of Ray may have another way
        Node.start_api_server = lambda self, **_: None
    try:
        yield
    finally:
        if found is not None:
            Node.start_api_server = found
