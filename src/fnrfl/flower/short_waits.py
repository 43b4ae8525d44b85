"""Flower's waits, shortened in our own processes: not a file of Flower's is changed.

Flower 1.41 waits at five places where nothing happens meanwhile. An idle SuperNode asks for messages every 3 seconds;
it looks for a finished reply every half second; whoever fetches a part of a message that has not arrived yet tries
again after a second; a Python process starts for every message (`executor.py`); `Grid.send_and_receive` looks for
replies every 3 seconds (`grid_network.py`). All waits below are at most as long as Flower's.
"""

from __future__ import annotations

import time
from typing import Any

SHORTEST = 0.1  # seconds between two questions to the SuperLink while messages come
IDLE_SHARE = 20.0  # an idle node waits a twentieth of the time for which it has been idle
HEARTBEAT = 12  # seconds; a node that misses two is gone, and its key may come back. Flower's own is 30
TRY_AGAIN = 0.05  # seconds after which a part of a message is fetched again; the wait doubles, as in Flower


class ShortWaits:
    """Stands for the module `time` in Flower's loop: it sleeps shortly while messages come, longer when idle."""

    def __init__(self) -> None:
        self.last_busy = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """At most as long as Flower would."""
        if seconds < 1.0:  # it waits for the reply of the app
            self.last_busy = time.monotonic()
        idle = time.monotonic() - self.last_busy
        time.sleep(min(seconds, max(SHORTEST, idle / IDLE_SHARE)))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def shorten_waits() -> None:
    """In this process: of a SuperNode for messages and replies, and of everybody for parts of a message."""
    from flwr.supercore import heartbeat
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.supernode import fleet_http_connection, start_client_internal

    start_client_internal.time = ShortWaits()
    for module in (fleet_http_connection, heartbeat):
        module.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    defaults = pull_objects.__kwdefaults__ or {}
    if "initial_backoff" in defaults:
        defaults["initial_backoff"] = TRY_AGAIN
