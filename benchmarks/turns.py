"""Two or more sides of a comparison in processes of their own, which take turns.

Machines are noisy, so only times of the same turn are divided, and the order changes from turn to turn. A side says how
much time of the CPU and of the clock its turn took. This file is also the program of a side; it uses nothing of fnrfl
but `fnrfl.run`, so that an older source can be a side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Times = tuple[float, float, float]  # seconds of the CPU, seconds of the clock; and the accuracy at the end


@dataclass(frozen=True)
class Side:
    """Some rounds of fnrfl, or of the tight loop, again and again."""

    keys: dict[str, Any]  # of a config
    rounds: int  # a turn
    loop: str = ""  # which tight loop; empty: fnrfl
    source: Path | None = None  # a folder `src` with another fnrfl
    short: bool = False  # a turn is a whole run in a new process, from its first round on

    @contextmanager
    def taking_turns(self, turns: int) -> Iterator[Callable[[], Times]]:
        """A function that has the side take a turn."""
        spec = {"keys": self.keys | {"rounds": self.rounds * turns}, "rounds": self.rounds, "loop": self.loop}
        command = [sys.executable, str(HERE / "turns.py"), json.dumps(spec | {"short": self.short})]
        path = [str(self.source)] if self.source else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes) as process:
            try:
                yield lambda: _turn(process)
            finally:
                process.kill()

    def turn_of_a_new_process(self) -> Times:
        """A turn of a short run."""
        with self.taking_turns(1) as turn:
            return turn()


def _turn(process: subprocess.Popen[str]) -> Times:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    cpu, wall, accuracy = json.loads(process.stdout.readline())
    return cpu, wall, accuracy


def in_turns(sides: Mapping[str, Side], turns: int) -> dict[str, list[Times]]:
    """The times of every side in every turn; of long runs a first turn is left out, which warms up."""
    times: dict[str, list[Times]] = {name: [] for name in sides}
    with ExitStack() as stack:
        take = {
            name: side.turn_of_a_new_process if side.short else stack.enter_context(side.taking_turns(turns + 1))
            for name, side in sides.items()
        }
        for turn in range(turns + 1):
            for name in list(sides) if turn % 2 else reversed(sides):
                times[name].append(take[name]())
    return {name: found[1:] for name, found in times.items()}


def ratios(above: list[Times], below: list[Times], clock: int) -> list[float]:
    """The ratios of the same turn, in order; `clock` is 0 for the CPU's time, 1 for the wall's."""
    return sorted(a[clock] / b[clock] for a, b in zip(above, below, strict=True))


# -- a side ------------------------------------------------------------------------------------------------------------


class Clock:
    """Tells the time of a turn, and waits to be asked for the next one."""

    def begin(self, *_: object) -> None:
        """A turn begins; also the callback of a run that begins, when everything is imported and read."""
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def end(self, accuracy: float) -> None:
        """A turn has ended: print its times, and wait."""
        print(json.dumps([time.process_time() - self.cpu, time.perf_counter() - self.wall, accuracy]), flush=True)
        wait()
        self.begin()


def wait() -> None:
    """Wait until a turn is asked for."""
    if not sys.stdin.readline():
        raise SystemExit


def take_turns(spec: dict[str, Any]) -> None:
    """Rounds of fnrfl, or of a tight loop, a turn for every line of the input."""
    import torch

    clock, rounds = Clock(), spec["rounds"]
    if spec["loop"]:
        import cpu
        import tight

        loop = tight.LOOPS[spec["loop"]](cpu.tight_work(spec["keys"]))
        torch.set_num_threads(1)
        wait()
        clock.begin()
        for t, accuracy in enumerate(loop, 1):
            if t % rounds == 0:
                clock.end(accuracy)
        return
    import fnrfl

    def progress(event: dict[str, Any]) -> None:
        if event["round"] % rounds == 0:
            clock.end(event["accuracy"])

    begin: dict[str, Any] = {}
    if spec["short"]:  # imports count on neither side
        torch.func.vmap(torch.func.grad(torch.sum))(torch.zeros(1, 1))
        begin = {"callbacks": [type("Begin", (), {"begin": clock.begin})()]}
    wait()
    clock.begin()
    fnrfl.run(out=None, progress=progress, **begin, **spec["keys"])


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    take_turns(json.loads(sys.argv[1]))
