"""What an engine costs beside the training itself: rounds without steps, whole rounds, and what follows for crowds.

    python benchmarks/overhead.py empty          seconds per round for an empty task, on every engine
    python benchmarks/overhead.py images         images/s of a real task with 10 clients: Ray against loop
    python benchmarks/overhead.py crowds         a cost model up to 100,000 clients, and how far off it is

An empty task sends every client the model, takes no step, brings the models back and averages them. Engines take turns,
and a figure is the median of the turns; the spread is the lowest and the highest. One function makes each engine: add
one to `ENGINES`, a context that gives `round() -> None`, and it is in the table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TURNS = 15
ACTORS = 2
SIZES = {"10 thousand": 10_000, "1 million": 1_000_000, "11 million (ResNet-18)": 11_000_000}


@dataclass(frozen=True)
class World:
    """Clients that share two examples and a linear model: enough to send a model there and back."""

    clients: int
    parameters: int

    def parts(self) -> tuple[Any, Any]:
        """(net, pool)."""
        import torch

        from fnrfl.core.net import Net
        from fnrfl.data.batches import Pool

        inputs = max(1, self.parameters // 10 - 1)
        module = torch.nn.utils.skip_init(torch.nn.Linear, inputs, 10)
        with torch.no_grad():
            for part in module.parameters():
                part.fill_(0.5)
        x, y = torch.ones(2, inputs), torch.tensor([0, 1])
        pool = Pool({"private": (x, y)}, [torch.arange(2)] * self.clients, 10, dtype=torch.float32)
        return Net(module, x), pool

    def engine(self, name: str, **more: Any) -> Any:
        """An engine in this world."""
        from fnrfl.core.training import ClientOptions
        from fnrfl.engines.assemble import Layout, assemble

        layout = Layout(threads=ACTORS, clients_at_once=max(16, 200_000_000 // self.parameters))
        return assemble(name, *self.parts(), ClientOptions(), layout=layout, **more)  # type: ignore[arg-type]


def trainer_there(told: bytes) -> Any:
    """The trainer of a Ray actor."""
    from fnrfl.engines.wire import from_bytes

    return World(*from_bytes(told)).engine("loop").server


def empty_round(engine: Any, clients: int) -> Callable[[], None]:
    """A round without steps."""
    import torch

    from fnrfl.core.algorithm import Objective
    from fnrfl.core.values import LocalTask, State
    from fnrfl.process import isolated

    training, state, turn = replace(engine.training, epochs=0), State(*engine.net.flatten()), iter(range(10**9))

    def play() -> None:
        engine.begin(next(turn))
        task = LocalTask(Objective(), "local", replace(state), training=training)  # a new model in every round
        with isolated():
            engine.fold(torch.arange(clients), task, mean=lambda replies: {"model": replies.params})

    return play


# -- engines: a context that gives a round ----------------------------------------------------------------------------


@contextmanager
def loop(world: World) -> Iterator[Callable[[], None]]:
    """Clients in two threads."""
    with world.engine("loop") as engine:
        yield empty_round(engine, world.clients)


@contextmanager
def batched(world: World) -> Iterator[Callable[[], None]]:
    """Clients in vectorised steps, two threads."""
    with world.engine("batched") as engine:
        yield empty_round(engine, world.clients)


@contextmanager
def ray(world: World) -> Iterator[Callable[[], None]]:
    """Clients in two Ray actors on this machine."""
    from fnrfl.core.options import NetworkOptions
    from fnrfl.engines.ray.actors import RayActors
    from fnrfl.engines.wire import to_bytes

    told = lambda: to_bytes((world.clients, world.parameters))  # noqa: E731
    import overhead  # this file as a module that actors can import

    actors = RayActors(ACTORS, NetworkOptions(), overhead.trainer_there, told)
    with world.engine("ray", actors=actors) as engine:
        yield empty_round(engine, world.clients)


ENGINES: dict[str, Callable[[World], AbstractContextManager[Callable[[], None]]]] = {
    "loop": loop,
    "batched": batched,
    "ray": ray,
}


# -- measurements -----------------------------------------------------------------------------------------------------


def timed(rounds: dict[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    """Seconds of each, in turns; the first is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for turn in range(turns + 1):
        for name, play in rounds.items():
            began = time.perf_counter()
            play()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def empty(turns: int) -> None:
    """The table of seconds per round for an empty task with 10 clients."""
    print("| engine |", " | ".join(SIZES), "|\n|---|", "--:|" * len(SIZES))
    rows: dict[str, list[str]] = {name: [] for name in ENGINES}
    for parameters in SIZES.values():
        with ExitStack() as stack:
            world = World(10, parameters)
            rounds = {name: stack.enter_context(make(world)) for name, make in ENGINES.items()}
            for name, seconds in timed(rounds, turns).items():
                low, high = min(seconds), max(seconds)
                rows[name].append(f"{statistics.median(seconds):.4f} ({low:.4f} to {high:.4f})")
    for name, cells in rows.items():
        print(f"| {name} |", " | ".join(cells), "|")


def images(turns: int) -> None:
    """Images/s of rounds of FedAvg with 10 clients: two Ray actors against the loop engine with two threads."""
    from fnrfl.config import load
    from fnrfl.engines.ray.session import connected
    from fnrfl.runs.run import run

    with tempfile.TemporaryDirectory() as folder, connected("", ACTORS):
        data = _pictures(Path(folder))
        keys = [f"dataset={data}", "model=simple-cnn", "clients=10", "scenario=iid", "client.epochs=2", "rounds=3"]
        keys += ["client.batch=64", "dataset.scale=none", f"engine.threads={ACTORS}"]
        speeds: dict[str, list[float]] = {"loop": [], "ray": []}
        for _ in range(turns):
            for name, found in speeds.items():
                result = run(load("digits", [*keys, f"engine={name}"]), out=None)
                seconds = [
                    sum(s for part, s in event["seconds"].items() if part != "evaluate") for event in result.rounds
                ]
                found.append(result.config.client.epochs * _examples(result) / statistics.median(seconds))
    ratios = [there / here for there, here in zip(speeds["ray"], speeds["loop"], strict=True)]
    for name, found in speeds.items():
        print(f"{name}: {statistics.median(found):.0f} images/s ({min(found):.0f} to {max(found):.0f})")
    print(f"ray / loop: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def _pictures(folder: Path) -> Path:
    import numpy as np

    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (4400, 3, 32, 32), dtype=np.uint8), np.arange(4400) % 10
    np.savez(folder / "pictures.npz", x_train=x[:4000], y_train=y[:4000], x_test=x[4000:], y_test=y[4000:])
    return folder / "pictures.npz"


def _examples(result: Any) -> int:
    """Private examples of all clients."""
    config = result.config
    public, validation = config.public.size, config.validation.size
    return int(4000 * (1 - (public if public < 1 else 0) - (validation if validation < 1 else 0)))


def crowds(turns: int) -> None:
    """Fit seconds = fixed + clients * (a + b * bytes of a model) to three rounds, and check it on others.

    The fastest of the turns counts: whoever else uses the machine makes none faster.
    """
    few, many, large = (100, 10_000), (5000, 10_000), (10, 11_000_000)
    measured = {}
    for clients, parameters in (few, many, large, (10, 10_000), (1000, 10_000), (40, 1_000_000)):
        with ray(World(clients, parameters)) as play:
            measured[clients, parameters] = min(timed({"ray": play}, turns)["ray"])
    byte = measured[large] / 10 / (4 * 11_000_000)
    per_client = max(0.0, (measured[many] - measured[few]) / 4900 - byte * 40_000)
    fixed = max(0.0, measured[few] - 100 * (per_client + byte * 40_000))

    def predicted(clients: int, parameters: int) -> float:
        return fixed + clients * (per_client + 4 * parameters * byte)

    print(f"fixed {1000 * fixed:.0f} ms, a = {1000 * per_client:.3f} ms, b = {1e9 * byte:.2f} s for each gigabyte")
    print("| clients | parameters | measured s | computed s |\n|--:|--:|--:|--:|")
    for (clients, parameters), seconds in measured.items():
        print(f"| {clients:,} | {parameters:,} | {seconds:.3f} | {predicted(clients, parameters):.3f} |")
    print("| clients in a round | parameters | GB down and up | server's seconds |\n|--:|--:|--:|--:|")
    for parameters in SIZES.values():
        for clients in (10, 100, 1000, 10_000, 100_000):
            sent, seconds = 8 * clients * parameters / 1e9, predicted(clients, parameters)
            print(f"| {clients:,} | {parameters:,} | {sent:,.4g} | {seconds:,.2f} |")


def main() -> None:
    """The measurements that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["empty", "images", "crowds"], nargs="+")
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # actors import this file
    for what in options.what:
        {"empty": empty, "images": images, "crowds": crowds}[what](options.turns)


if __name__ == "__main__":
    main()
