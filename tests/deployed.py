"""Deployments for tests: made with the commands of `fnrfl deploy`, on loopback, ended whatever happens."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from fnrfl.flower.deployment import Deployment
from fnrfl.flower.supervisor import alive, start_node, start_superlink

PORTS = int(os.environ.get("FNRFL_TEST_PORTS", "22100"))
PLAIN = ("engine.threads=1", "engine.accelerate=false")  # as nodes and simulator agree on to the bit
HERE = {"PYTHONPATH": str(Path(__file__).parent.parent / "src"), "OMP_NUM_THREADS": "1"}


def fnrfl(*words: object, fails: bool = False, seconds: float = 600) -> str:
    """What a command prints, on both outputs."""
    command = [sys.executable, "-m", "fnrfl", *map(str, words)]
    done = subprocess.run(command, env=os.environ | HERE, capture_output=True, text=True, timeout=seconds)
    assert (done.returncode != 0) == fails, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def free_ports(count: int) -> int:
    """The first of some free ports in a row."""
    for first in range(PORTS, PORTS + 800, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as door:
                    door.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@contextmanager
def federation(folder: Path, *words: object, nodes: int = 3, secure: bool = True) -> Iterator[Deployment]:
    """A running federation with a recipe; afterwards none of its processes is left."""
    fnrfl("deploy", "init", folder, "digits", f"clients={nodes}", *PLAIN, *words)
    if secure:
        fnrfl("deploy", "certs", folder)
    made = Deployment.at(folder)
    try:
        fnrfl("deploy", "up", folder, "--port", free_ports(nodes + 1), *([] if secure else ["--insecure"]))
        yield made
    finally:
        fnrfl("deploy", "down", folder)
        wait_until(lambda: not working_in(made.root), 10)  # also what ends by itself


class Run:
    """`fnrfl deploy run` in the background."""

    def __init__(self, made: Deployment, out: Path, *words: str, resume: bool = False) -> None:
        command = [sys.executable, "-m", "fnrfl", "deploy", "run", str(made.root), *words]
        command += ["--resume" if resume else "-o", str(out)]
        self.out, self.log = out, made.logs / f"run-{out.name}-{len(list(made.logs.iterdir()))}.log"
        told = self.log.open("wb")
        self.process = subprocess.Popen(command, env=os.environ | HERE, stdout=told, stderr=told)

    def wait(self, *, fails: bool = False, seconds: float = 900) -> Path:
        assert (self.process.wait(seconds) != 0) == fails, self.log.read_text()
        return self.out


def letters(made: Deployment, client: int) -> list[str]:
    """What a node has been asked, in words: its worker's log."""
    file = made.node(client) / "worker.log"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [line for line in lines if line.startswith("round ")]


def wait_until(condition: Callable[[], Any], seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it has not happened"
        time.sleep(0.02)


def working_in(folder: Path) -> list[psutil.Process]:
    """The processes that work in a folder, or below it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(folder):
                found.append(process)
    return found


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL, all at once."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, 10)


def server_process(made: Deployment) -> psutil.Process:
    """The process in which the ServerApp runs."""
    return next(one for one in working_in(made.root) if "flwr-serverapp" in " ".join(one.cmdline()))


def kill_node(made: Deployment, client: int) -> None:
    kill(working_in(made.node(client)))


def restart_node(made: Deployment, client: int) -> None:
    """Until the server has missed the killed node's heartbeats, it refuses the key, and Flower's SuperNode ends."""
    log = made.logs / f"node-{client}.log"
    admitted = log.read_text().count("SuperNode ID")
    for _ in range(40):
        node = start_node(made, client)
        wait_until(lambda node=node: node.handle is None or log.read_text().count("SuperNode ID") > admitted)
        if node.handle is not None:
            return
    raise AssertionError("the node is not let in")


def restart_superlink(made: Deployment) -> None:
    """SIGKILL to the SuperLink and what it has started, and another one in its place."""
    (link,) = [one.handle for one in alive(made) if one.name == "superlink"]
    kill([*link.children(recursive=True), link])
    start_superlink(made)


def model(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "model.safetensors").read_bytes()).hexdigest()


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()][1:]


def loop(out: Path, *words: object, nodes: int = 3) -> Path:
    """The same recipe in the simulator."""
    fnrfl("run", "digits", f"clients={nodes}", "engine=loop", *PLAIN, *words, "-q", "-o", out)
    return out


def same_run(deployed: Path, simulated: Path) -> None:
    """The same model to the bit, the same metered bytes, every round once."""
    assert model(deployed) == model(simulated)
    there, here = events(deployed), events(simulated)
    assert [event["round"] for event in there] == [event["round"] for event in here]
    assert [event["bytes"] for event in there] == [event["bytes"] for event in here]
    assert [event["accuracy"] for event in there] == [event["accuracy"] for event in here]
