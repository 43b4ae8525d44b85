"""A Flower federation of real processes on this machine: a SuperLink, some SuperNodes, and `flwr run`.

Everything listens on 127.0.0.1, without TLS, and keeps its files in a folder; processes that still run when the block
is left are ended. With `simulation=True` the SuperLink runs Flower's simulation, and there are no SuperNodes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from deployed import HERE, free_ports, kill, wait_until, working_in
from fnrfl.flower.deployment import Address, Deployment
from fnrfl.flower.supervisor import listens, start, stop


class Processes(Deployment):
    """A folder whose programs find this source, and print lines that are not wrapped."""

    def environment(self) -> dict[str, str]:
        return super().environment() | HERE | {"NO_COLOR": "1", "COLUMNS": "400"}


class FlowerProcesses:
    """A SuperLink and its SuperNodes, while the block lasts; node n has partition-id n."""

    def __init__(self, folder: Path, *, nodes: int, simulation: bool = False) -> None:
        self.folder, self.nodes, self.simulation = folder, nodes, simulation
        self.made, self.address = Processes(folder), Address("127.0.0.1", free_ports(1 + nodes), secure=False)

    def __enter__(self) -> FlowerProcesses:
        self.address.write(self.made)
        host, port = self.address.host, self.address.port
        link = ["flower-superlink", "--insecure", "--host", host, "--port", str(port)]
        try:
            start(self.made, "superlink", [*link, *(["--simulation"] if self.simulation else [])], self.folder)
            wait_until(lambda: listens(host, port))
            for number in range(0 if self.simulation else self.nodes):
                node = ["flower-supernode", "--insecure", "--superlink", str(self.address), "--host", host]
                node += ["--port", str(port + 1 + number)]
                node += ["--node-config", f"partition-id={number} num-partitions={self.nodes}"]
                start(self.made, f"node {number}", node, self.folder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.made)
        kill(working_in(self.folder))

    def run(self, app: Path, config: Mapping[str, object], seconds: float) -> str:
        """Run an app to its end with `flwr run`, and give what that printed."""
        words = [f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in config.items()]
        command = [str(Path(sys.executable).with_name("flwr")), "run", str(app), "deployment", "--stream"]
        command += ["--run-config", " ".join(words)]
        if self.simulation:
            cpus = "client-resources-num-cpus=1 init-args-num-cpus=1"
            command += ["--federation-config", f"num-supernodes={self.nodes} {cpus}"]
        done = subprocess.run(command, env=self.made.environment(), capture_output=True, text=True, timeout=seconds)
        return done.stdout + done.stderr

    def logs(self) -> str:
        """What every program has printed."""
        files = sorted(self.made.logs.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')}" for file in files)
