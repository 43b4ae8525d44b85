"""A Flower federation of real processes on this machine: a SuperLink, some SuperNodes, and `flwr run`.

    with FlowerProcesses(tmp_path, nodes=2, ports=range(21000, 22000)) as federation:
        output = federation.run(app_folder, {"num-rounds": 2}, seconds=300)

Everything listens on 127.0.0.1, without TLS, and keeps its files in the folder, which is every process's FLWR_HOME. By
that the processes are known again: when the block is left, those that still run are ended by id, so nothing stays
behind. With `simulation=True` the SuperLink runs Flower's simulation, and there are no SuperNodes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

BIN = Path(sys.executable).parent
SOURCE = Path(__file__).parent.parent / "src"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "NO_COLOR": "1",
    "COLUMNS": "400",  # lines of the log are not wrapped
}


def free_ports(count: int, among: Iterable[int]) -> list[int]:
    """Ports that nobody listens on now."""
    found: list[int] = []
    for port in among:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"fewer than {count} ports are free")


def with_home(home: Path) -> list[int]:
    """The processes that run with a FLWR_HOME, by what /proc says; this process is none of them."""
    mark, found = f"FLWR_HOME={home}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):  # empty once it has ended
                    found.append(int(entry.name))
            except OSError:  # it has ended meanwhile, or is somebody else's
                continue
    return found


class FlowerProcesses:
    """A SuperLink and its SuperNodes, while the block lasts; node n has partition-id n."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int,
        ports: Iterable[int],
        simulation: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.num_nodes, self.simulation = folder, nodes, simulation
        self.home = folder / "flwr-home"
        self.port, *self.node_ports = free_ports(1 + nodes, ports)
        python_path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
        self.environment = {
            **os.environ, **QUIET, "FLWR_HOME": str(self.home), "PYTHONPATH": python_path,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **(environment or {}),
        }  # fmt: skip
        self._started: list[subprocess.Popen[bytes]] = []
        self.nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> FlowerProcesses:
        self.home.mkdir(parents=True)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "lo"\n\n[superlink.lo]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        try:
            simulated = ["--simulation"] if self.simulation else []
            address = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
            self.start("superlink", "flower-superlink", *address, *simulated)
            self.wait_for_port(self.port, 90.0)
            self.nodes = [] if simulated else [self.start_node(number) for number in range(self.num_nodes)]
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, program: str, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own; what it prints is in NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / program), *arguments], cwd=cwd or self.folder, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return process

    def start_node(self, number: int) -> subprocess.Popen[bytes]:
        """Start a SuperNode, or start it again."""
        return self.start(
            f"supernode-{number}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}",
            "--host", "127.0.0.1", "--port", str(self.node_ports[number]),
            "--node-config", f"partition-id={number} num-partitions={self.num_nodes}",
        )  # fmt: skip

    def wait_for_port(self, port: int, seconds: float) -> None:
        """Wait until somebody listens on a port."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if self._started[-1].poll() is not None:
                break
            time.sleep(0.2)
        raise RuntimeError(f"Nobody listens on {port}:\n{self.logs()}")

    def run(self, app: Path, config: Mapping[str, object], seconds: float) -> str:
        """Run an app to its end with `flwr run`, and give what that printed."""
        words = [f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in config.items()]
        simulated = f"num-supernodes={self.num_nodes} client-resources-num-cpus=1 init-args-num-cpus=1"
        more = ["--federation-config", simulated] if self.simulation else []
        (self.folder / "run.log").unlink(missing_ok=True)
        process = self.start("run", "flwr", "run", str(app), "lo", "--stream", "--run-config", " ".join(words), *more)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end(process)
            raise RuntimeError(f"The run was not finished in {seconds:g} seconds:\n{self.logs()}") from None
        return (self.folder / "run.log").read_text(errors="replace")

    def logs(self) -> str:
        """What every program has printed."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')}" for file in files)

    def running(self) -> list[int]:
        """The ids of all processes of this federation."""
        return with_home(self.home)

    def end(self, process: subprocess.Popen[bytes], seconds: float = 20.0) -> None:
        """Ask a program to end, and end it if it does not."""
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def stop(self) -> None:
        """End everything, the SuperLink last."""
        for process in reversed(self._started):
            if process.poll() is None:
                process.terminate()
        for process in reversed(self._started):
            self.end(process)
        end = time.monotonic() + 10.0
        while left := self.running():  # what the programs have started
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if time.monotonic() < end else signal.SIGKILL)
            time.sleep(0.2)
