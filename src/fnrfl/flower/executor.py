"""Takes the tasks of a SuperNode (`--isolation process`) and runs Flower's ClientApp process for each, by a fork.

Flower's own executor starts a program for every message, which costs a second or more of imports. A fork of a process
that has imported Flower costs milliseconds, and runs the same function of Flower's, `run_clientapp`.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from fnrfl.flower.short_waits import shorten_waits

ASK_SECONDS = 0.1  # seconds between two questions to the SuperNode, which is on this machine


def take_tasks(address: str, parent: str, secret_file: str = "") -> None:
    """Serve the SuperNode at `address` until the process `parent` is gone."""
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
    from flwr.supercore.protobuf.client import ProtobufClientInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    shorten_waits()
    asking: list[ProtobufClientInterceptor] = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    if secret_file:
        secret = Path(secret_file).read_bytes()
        acquire = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        asking.append(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=acquire))
    node = RuntimeHttpClient.from_server_address(
        server_address=address, insecure=True, root_certificates=None, interceptors=asking
    )
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    while os.getppid() == int(parent):
        with suppress(httpx.HTTPError):  # the SuperNode is not up yet, or not any more
            task = node.AcquireTask(request)
            if task.HasField("task") and os.fork() == 0:
                try:
                    run_clientapp(address, task.token, insecure=True, parent_pid=os.getppid())
                finally:
                    sys.stdout.flush()
                    os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(ASK_SECONDS)


if __name__ == "__main__":
    take_tasks(*sys.argv[1:])
