"""A Flower federation of real processes on this machine: a SuperLink, some SuperNodes, and `flwr run`.

Everything listens on 127.0.0.1, without TLS, and keeps its files in the folder, in which all processes work: by that
they are known again, and those that still run when the block is left are ended. With `simulation=True` the SuperLink
runs Flower's simulation, and there are no SuperNodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from deployed import HERE, free_ports, kill, wait_until, working_in
from fnrfl.flower.deployment import FLOWER_QUIET, Address
from fnrfl.flower.supervisor import listens

BIN = Path(sys.executable).parent


class FlowerProcesses:
    """A SuperLink and its SuperNodes, while the block lasts; node n has partition-id n."""

    def __init__(self, folder: Path, *, nodes: int, simulation: bool = False) -> None:
        self.folder, self.num_nodes, self.simulation = folder, nodes, simulation
        self.address = Address("127.0.0.1", free_ports(1 + nodes), secure=False)
        self.environment = os.environ | HERE | FLOWER_QUIET | {
            "FLWR_HOME": str(folder / "flwr-home"), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "NO_COLOR": "1", "COLUMNS": "400",  # lines of the log are not wrapped
        }  # fmt: skip

    def __enter__(self) -> FlowerProcesses:
        (self.folder / "flwr-home").mkdir(parents=True)
        (self.folder / "flwr-home" / "config.toml").write_text(
            f'[superlink]\ndefault = "lo"\n\n[superlink.lo]\naddress = "{self.address}"\ninsecure = true\n'
        )
        words = ["--insecure", "--host", self.address.host, "--port", str(self.address.port)]
        try:
            self.start("superlink", "flower-superlink", *words, *(["--simulation"] if self.simulation else []))
            wait_until(lambda: listens(self.address.host, self.address.port))
            for number in range(0 if self.simulation else self.num_nodes):
                self.start(
                    f"supernode-{number}", "flower-supernode", "--insecure", "--superlink", str(self.address),
                    "--host", self.address.host, "--port", str(self.address.port + 1 + number),
                    "--node-config", f"partition-id={number} num-partitions={self.num_nodes}",
                )  # fmt: skip
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own; what it prints is in NAME.log."""
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [str(BIN / program), *arguments], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def run(self, app: Path, config: Mapping[str, object], seconds: float) -> str:
        """Run an app to its end with `flwr run`, and give what that printed."""
        words = [f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in config.items()]
        simulated = f"num-supernodes={self.num_nodes} client-resources-num-cpus=1 init-args-num-cpus=1"
        more = ["--federation-config", simulated] if self.simulation else []
        process = self.start("run", "flwr", "run", str(app), "lo", "--stream", "--run-config", " ".join(words), *more)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError(f"The run was not finished in {seconds:g} seconds:\n{self.logs()}") from None
        return (self.folder / "run.log").read_text(errors="replace")

    def logs(self) -> str:
        """What every program has printed."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')}" for file in files)

    def stop(self) -> None:
        """End everything."""
        for process in (processes := working_in(self.folder)):
            process.terminate()
        psutil.wait_procs(processes, 20)
        kill(working_in(self.folder))
