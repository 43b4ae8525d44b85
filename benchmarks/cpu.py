"""How fast fnrfl is on a CPU, against a tight hand-written loop (`tight.py`) that does the same work.

    python benchmarks/cpu.py                     all of it, about half an hour on two cores
    python benchmarks/cpu.py --only W1 W2        some of it
    python benchmarks/cpu.py --out results/cpu   a line of JSON for each measurement, in a file of that folder
    python benchmarks/cpu.py --against v0.1.0    the source of another commit takes turns as well

Machines are noisy, so fnrfl and the loop take turns (`turns.py`), several rounds each, and the figure is the median of
the ratios of their times in the same turn; the spread is the lowest and the highest. A round is a whole round of
`fnrfl.run`: training, averaging, evaluation, the line of the event log. The loop has one thread.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from turns import Side, in_turns, ratios

PAIRS = 15
CPU, WALL = 0, 1  # the clocks of a turn
ROOT = Path(__file__).parent.parent
BASE = {
    "public": {"size": 0},
    "validation": {"size": 0},
    "client": {"momentum": 0.0, "weight_decay": 0.0, "lr": 0.1},
}
FNR = {"fnr": {"epochs": 5, "batch": 32}, "public": {"size": 0.1, "ranking": 0.2}}


@dataclass(frozen=True)
class Bench:
    """Some work, as keys of a config."""

    name: str
    says: str
    keys: dict[str, Any]
    rounds: int  # in one turn
    tight: str = "fedavg"
    thread_counts: tuple[int | str, ...] = ("auto",)
    like: dict[str, Any] = field(default_factory=dict)
    short: bool = False  # a turn is a run from its first round on, in a new process

    def merged(self, threads: int | str = "auto") -> dict[str, Any]:
        """The keys of this work."""
        keys = {k: {**v} if isinstance(v, dict) else v for k, v in BASE.items()}
        for changes in (self.keys, self.like, {"engine": {"threads": threads}}):
            for key, value in changes.items():
                keys[key] = {**keys.get(key, {}), **value} if isinstance(value, dict) else value
        return keys

    def config(self, threads: int | str = "auto") -> Any:
        """The config of this work."""
        from fnrfl.config import load

        return load(None, self.merged(threads))


W1 = {"dataset": "digits", "model": "mlp(hidden=64)", "clients": 10, "client": {"batch": 32, "epochs": 2}}
W2 = {
    "dataset": "fashion-mnist",
    "model": "mlp(hidden=128)",
    "clients": 100,
    "participation": 0.1,
    "client": {"batch": 64, "epochs": 1},
}
W3 = {"dataset": "W3", "model": "cnn", "clients": 10, "client": {"batch": 64, "epochs": 1}}
W4 = {**W2, "model": "mlp(hidden=32)", "clients": 200, "client": {"batch": 32, "epochs": 2}}
W5 = {**W3, "model": "cnn(norm=batch)", "client": {"batch": 32, "epochs": 1}}
CROWD = {
    "dataset": "fashion-mnist",
    "model": "mlp(hidden=200)",
    "clients": 1000,
    "participation": 0.2,
    "scenario": "quantity-dirichlet(8.0)",
    "client": {"batch": 32, "epochs": 2},
}
CROWD_CNN = {**CROWD, "model": "cnn"}
BN_CROWD = {
    "dataset": "small",
    "model": "cnn(norm=batch)",
    "clients": 2000,
    "participation": 0.2,
    "scenario": "iid",
    "client": {"batch": 16, "epochs": 1},
}
KEEP = {"client": {"last_batch": "keep"}}
EVEN, RAGGED = {"scenario": "iid"}, {"scenario": "label-dirichlet(0.5)"}
BOTH = (1, "auto")

BENCHES = [
    Bench("W1", "10 clients, digits, MLP 64-64-10, batch 32, 2 epochs", W1 | EVEN, 20, thread_counts=BOTH),
    Bench("W1-ragged", "the same, label-dirichlet(0.5)", W1 | RAGGED, 20, thread_counts=BOTH),
    Bench("W1-keep", "W1 with the loop's very batches", W1 | EVEN, 20, like=KEEP),
    Bench("W2", "10 of 100 clients, Fashion-MNIST, MLP 784-128-10, batch 64", W2 | EVEN, 5, thread_counts=BOTH),
    Bench("W2-ragged", "the same, label-dirichlet(0.5)", W2 | RAGGED, 5, thread_counts=BOTH),
    Bench("W3", "10 clients, 12,000 Fashion-MNIST images, CNN 1-16-32, batch 64", W3 | EVEN, 1, thread_counts=BOTH),
    Bench("W3-ragged", "the same, label-dirichlet(0.5)", W3 | RAGGED, 1, thread_counts=BOTH),
    Bench("W4", "20 of 200 clients, Fashion-MNIST, MLP 784-32-10, batch 32, 2 epochs", W4 | EVEN, 3),
    Bench("W5", "W3 with BatchNorm, batch 32", W5 | EVEN, 1),
    Bench("crowd", "200 of 1,000 ragged clients, Fashion-MNIST, MLP 784-200-10", CROWD, 3, thread_counts=BOTH),
    Bench("crowd-keep", "crowd with the loop's very batches", CROWD, 3, like=KEEP, thread_counts=BOTH),
    Bench("cnn-crowd", "crowd with CNN 1-16-32", CROWD_CNN, 1, thread_counts=BOTH),
    Bench("cnn-crowd-keep", "cnn-crowd with the loop's very batches", CROWD_CNN, 1, like=KEEP, thread_counts=BOTH),
    Bench(
        "bn-crowd",
        "400 of 2,000 clients, 16x16 images, CNN with BatchNorm, batch 16, two steps",
        BN_CROWD,
        1,
        thread_counts=BOTH,
    ),
    Bench(
        "W1-short",
        "the first ten rounds of W1 with the loop's very batches",
        W1 | EVEN,
        10,
        like=KEEP,
        short=True,
        thread_counts=(1,),
    ),
    Bench("W3-short", "the first three rounds of W3", W3 | EVEN, 3, short=True, thread_counts=(1,)),
    Bench("W1-scaffold", "W1, SCAFFOLD", W1 | EVEN, 20, "scaffold", like={"algorithm": "scaffold"}),
    Bench("W1-moon", "W1, MOON", W1 | EVEN, 10, "moon", like={"algorithm": "moon"}),
    Bench("W1-fnr", "W1, FedAvg under FNR", W1 | EVEN, 10, "fnr", like=FNR),
    Bench("W3-scaffold", "W3, SCAFFOLD", W3 | EVEN, 1, "scaffold", like={"algorithm": "scaffold"}),
    Bench("W3-moon", "W3, MOON", W3 | EVEN, 1, "moon", like={"algorithm": "moon"}),
    Bench("W3-fnr", "W3, FedAvg under FNR", W3 | EVEN, 1, "fnr", like=FNR),
]


def subset(folder: Path) -> Path:
    """12,000 training and 2,000 test images of Fashion-MNIST."""
    import numpy as np

    some = np.sort(np.random.default_rng(0).permutation(60_000)[:12_000])
    return _images(folder / "fashion-12000.npz", lambda x: x, some)


def small_images(folder: Path) -> Path:
    """Fashion-MNIST with 16 x 16 pixels."""
    import numpy as np

    return _images(folder / "fashion-16.npz", lambda x: x[..., 6:22, 6:22], np.arange(60_000))


def _images(path: Path, change: Callable[[Any], Any], some: Any) -> Path:
    import numpy as np

    from fnrfl.data.datasets import load

    if not path.exists():
        whole = load("fashion-mnist")
        x, test = change(whole.train.x[some].numpy()), change(whole.test.x[:2000].numpy())
        np.savez(path, x_train=x, y_train=whole.train.y[some].numpy(), x_test=test, y_test=whole.test.y[:2000].numpy())
    return path


MADE = {"W3": subset, "small": small_images}  # data sets that a benchmark makes


def _unscaled(file: Path) -> dict[str, str]:
    """A data set of a file, read as the named ones are."""
    return {"name": str(file), "scale": "none"}


def tight_work(keys: dict[str, Any]) -> Any:
    """The same data, split, cohorts and initial weights for the loop."""
    import torch

    import tight
    from fnrfl.config import load
    from fnrfl.data.batches import scaled
    from fnrfl.runs.setup.build import build
    from fnrfl.runs.setup.method import cohort

    config = load(None, keys)
    built = build(config)
    parts, client = built.splits, built.config.client
    memory = lambda split: (scaled(split.x, torch.float32), split.y)  # noqa: E731
    train = parts.train
    return tight.Work(
        net=built.net.export(*built.net.flatten()),
        data=[(scaled(train.x[shard], torch.float32), train.y[shard]) for shard in parts.clients],
        test=memory(parts.test),
        cohorts=[cohort(config, t).tolist() for t in range(config.rounds)],
        lr=client.lr,
        batch=client.batch,
        epochs=client.epochs,
        public=memory(parts.public),
        ranking=memory(parts.ranking),
        public_batch=32,
        public_epochs=5,
    )


def turns(bench: Bench, threads: int | str, pairs: int, before: Path | None) -> dict[str, Any]:
    """fnrfl, the loop and, if there is one, the source `before`, in turn, `bench.rounds` rounds each."""
    ours = Side(bench.merged(threads), bench.rounds, short=bench.short)
    sides = {"fnrfl": ours, "tight": replace(ours, keys=bench.merged(1), loop=bench.tight)}
    sides |= {"before": replace(ours, source=before)} if before is not None else {}
    times = in_turns(sides, pairs)
    speed = ratios(times["tight"], times["fnrfl"], WALL)
    line = {
        "benchmark": bench.name,
        "says": bench.says,
        "threads": threads,
        "pairs": len(speed),
        "rounds_a_turn": bench.rounds,
        "ratio": round(statistics.median(speed), 3),
        "lowest": round(speed[0], 3),
        "highest": round(speed[-1], 3),
        "cpu_of_tight": _median_and_quartiles(ratios(times["fnrfl"], times["tight"], CPU)),
    }
    if before is not None:
        for name, clock in (("cpu_of_before", CPU), ("wall_of_before", WALL)):
            line[name] = _median_and_quartiles(ratios(times["fnrfl"], times["before"], clock))
    for name, found in times.items():
        line[f"ms_{name}"] = round(1e3 * statistics.median(wall for _, wall, _ in found) / bench.rounds, 2)
        line[f"accuracy_{name}"] = found[-1][2]
    return line


def two_threads(bench: Bench, pairs: int) -> dict[str, Any]:
    """fnrfl on two threads and on one, in turn: how many times as fast, by the clock."""
    sides = {name: Side(bench.merged(threads), bench.rounds) for name, threads in (("one", 1), ("two", 2))}
    times = in_turns(sides, pairs)
    speed = _median_and_quartiles(ratios(times["one"], times["two"], WALL))
    return {"benchmark": f"{bench.name}-two-threads", "says": bench.says, "pairs": pairs, "speed_of_one": speed}


def _median_and_quartiles(found: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(found), *statistics.quantiles(found, n=4)[::2])]


def source_of(revision: str, folder: Path) -> Path:
    """The folder `src` of a commit."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder / "src"


# -- A ResNet-18 step -------------------------------------------------------------------------------------------------


def resnet(pairs: int) -> Iterator[dict[str, Any]]:
    """Steps of ResNet-18 at batch 64 on CIFAR-sized images, against a plain PyTorch loop on as many threads."""
    import torch
    from torch import nn

    from fnrfl.algorithms.fedavg import FedAvg
    from fnrfl.core.net import Net
    from fnrfl.core.training import ClientOptions
    from fnrfl.core.types import LocalTask, State
    from fnrfl.data.batches import Pool
    from fnrfl.engines.assemble import Layout, assemble
    from fnrfl.models.catalogue import build_model

    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (256, 3, 32, 32), dtype=torch.uint8, generator=draw)
    labels = torch.randint(10, (256,), generator=draw)
    options = ClientOptions(batch=64, epochs=1, lr=0.01, augment=False)
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.manual_seed(0)
        model = build_model("resnet18", (3, 32, 32), 10)
        net = Net(model, torch.zeros(2, 3, 32, 32), channels_last=True)
        shards = list(torch.arange(256).split(128))[:threads]  # a client with two batches for each thread
        pool = Pool({"private": (images, labels)}, shards, 10)
        engine = assemble("loop", net, pool, options, layout=Layout(threads=threads))
        start = State(*net.flatten())
        plain = net.export(*net.flatten()).train()
        optimiser = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)

        def ours(engine: Any = engine, shards: Any = shards, start: Any = start) -> None:
            engine.train(torch.arange(len(shards)), LocalTask(FedAvg().objective, "local", start))

        def theirs(threads: int = threads, plain: Any = plain, optimiser: Any = optimiser) -> None:
            torch.set_num_threads(threads)
            for i in range(2 * threads):
                x, y = images[64 * i : 64 * i + 64].float().div(255), labels[64 * i : 64 * i + 64]
                optimiser.zero_grad()
                nn.functional.cross_entropy(plain(x), y).backward()
                optimiser.step()

        yield {
            "benchmark": "resnet18-step",
            "says": f"ResNet-18, batch 64, 3x32x32, against a plain loop on {threads} thread(s)",
            "engine": "loop",
            "threads": threads,
            **alternate(ours, theirs, pairs, 2 * threads),
        }


def alternate(ours: Callable[[], None], theirs: Callable[[], None], pairs: int, steps: int) -> dict[str, Any]:
    """Ratios of two functions called in turn."""
    a, b = [], []
    for _ in range(pairs + 1):
        for function, times in ((ours, a), (theirs, b)):
            began = time.perf_counter()
            function()
            times.append((time.perf_counter() - began) / steps)
    ratios = sorted(y / x for x, y in zip(a[1:], b[1:], strict=True))
    return {
        "pairs": pairs,
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(ratios[0], 3),
        "highest": round(ratios[-1], 3),
        "ms_fnrfl": round(1e3 * statistics.median(a[1:]), 1),
        "ms_tight": round(1e3 * statistics.median(b[1:]), 1),
    }


# -- Where the time goes ----------------------------------------------------------------------------------------------


def where(bench: Bench, rounds: int) -> dict[str, Any]:
    """Milliseconds of a round by what they are spent on, on one thread, as a share of the whole round."""
    from fnrfl.engines import one_by_one, vectorised
    from fnrfl.engines.job import Job
    from fnrfl.engines.metered import Metered
    from fnrfl.engines.trainer import Trainer
    from fnrfl.process import one_intra_op_thread
    from fnrfl.runs import run as runs
    from fnrfl.runs.setup.build import build

    spent: dict[str, float] = {}

    def timed(name: str, function: Any) -> Any:
        def wrapped(*args: Any, **keys: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **keys)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

        return wrapped

    from fnrfl.config import loads

    config = loads(bench.config(1).to_toml(), {"rounds": 1000})
    with ExitStack() as patched:
        for place, name, part in (
            (Trainer, "_job", "orders, start"), (Job, "batches", "gathering batches"),
            (runs, "score_round", "evaluation"),
            (one_by_one, "run_steps", "steps"), (vectorised, "run_steps", "steps"),
        ):  # fmt: skip
            patched.enter_context(mock.patch.object(place, name, timed(part, getattr(place, name))))
        built = build(config)
        engine = built.engine
        recorder = engine.server.runner.recorder
        if recorder is not None:
            of = recorder.programs_of
            timed_all = lambda wanted: [found and timed("steps", found) for found in of(wanted)]  # noqa: E731
            patched.enter_context(mock.patch.object(recorder, "programs_of", timed_all))
        metered, state, log = Metered(engine), built.algorithm.init(built.net), runs.RunLog(built, 0.0)
        engine.warm_up()
        with one_intra_op_thread():
            for t in range(3):
                state, _ = runs._train_round(log, metered, state, t)
            spent.clear()
            began = time.perf_counter()
            for t in range(3, 3 + rounds):
                state, _ = runs._train_round(log, metered, state, t)
            whole = time.perf_counter() - began
    parts = {k: round(1e3 * v / rounds, 3) for k, v in spent.items()}
    parts["averaging, the rest"] = round(1e3 * whole / rounds - sum(parts.values()), 3)
    return {"benchmark": f"{bench.name}-where", "says": bench.says, "threads": 1, "ms": parts}


# -- Many clients, start-up and memory: each in a process of its own --------------------------------------------------

CHILD = """
import json, sys, time
began = time.perf_counter()
import fnrfl
imported = time.perf_counter() - began
keys = json.loads(sys.argv[1])
marks = []
result = fnrfl.run(out=None, progress=lambda event: marks.append(time.perf_counter()), **keys)
gaps = sorted(b - a for a, b in zip(marks[2:], marks[3:]))
trained = sorted(sum(event["seconds"].values()) - event["seconds"]["evaluate"] for event in result.rounds[3:])
engine = result.config.engine
print(json.dumps({
    "import_s": round(imported, 3), "first_round_s": round(marks[0] - began, 2), "round_s": gaps[len(gaps) // 2],
    "round_without_evaluation_s": trained[len(trained) // 2],
    "peak_mb": round(next(int(line.split()[1]) for line in open("/proc/self/status") if "VmHWM" in line) / 1024),
    "engine": engine.name, "threads": engine.threads}))
"""


def alone(config: Any) -> dict[str, Any]:
    """Start-up, time of a round and peak memory of a run in a fresh process."""
    keys = config.as_dict()
    keys = {k: v for k, v in keys.items() if k not in ("name", "leaks")} | {"fnr": keys["fnr"] or "off"}
    keys["algorithm"] = config.algorithm.name
    found = subprocess.run([sys.executable, "-c", CHILD, json.dumps(keys)], capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return measured


def processes(benches: list[Bench]) -> Iterator[dict[str, Any]]:
    """Start-up and memory of each work."""
    from fnrfl.config import loads

    for bench in benches:
        rounds = 8 if bench.name == "W3" else 40  # long enough to be recorded
        config = loads(bench.config().to_toml(), {"rounds": rounds})
        yield {"benchmark": f"{bench.name}-process", "says": bench.says, **alone(config)}
        if bench.name == "W2":
            few = loads(config.to_toml(), {"clients": 10, "participation": 1.0})
            yield {"benchmark": "W2-few-process", "says": "W2 with 10 clients, all active", **alone(few)}


def many_clients(pairs: int) -> Iterator[dict[str, Any]]:
    """1,000 clients of 60 examples, 100 sampled, against 10 clients of 60, all active: time for each client."""
    common = {
        "dataset": "fashion-mnist",
        "model": "mlp(hidden=128)",
        "scenario": "iid",
        "client": {"batch": 20, "epochs": 5},
        "rounds": 12,
    }
    many = Bench("many", "", {**common, "clients": 1000, "participation": 0.1}, 1).config()
    few = Bench("few", "", {**common, "clients": 1000, "participation": 0.01}, 1).config()
    whole = [(alone(many), alone(few)) for _ in range(pairs)]
    seconds = "round_without_evaluation_s"  # which is the same for both, and would hide the difference
    ratios = sorted(a[seconds] / 100 / (b[seconds] / 10) for a, b in whole)
    memory = sorted(a["peak_mb"] / b["peak_mb"] for a, b in whole)
    yield {
        "benchmark": "1000-clients",
        "says": "100 of 1,000 clients (60 examples each), Fashion-MNIST, MLP, against 10 of them",
        "pairs": pairs,
        "time_per_client_ratio": round(statistics.median(ratios), 3),
        "lowest": round(ratios[0], 3),
        "highest": round(ratios[-1], 3),
        "memory_ratio": round(statistics.median(memory), 3),
        "peak_mb": statistics.median(a["peak_mb"] for a, _ in whole),
        "engine": whole[0][0]["engine"],
        "threads": whole[0][0]["threads"],
    }


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names, or beginnings of names")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--against", metavar="REV", help="a commit whose source takes turns as well")
    parser.add_argument("--out", type=Path, help="folder for a file of JSON lines")
    arguments = parser.parse_args()
    if arguments.pairs < 2:
        parser.error("--pairs must be 2 or more.")
    import torch

    wanted = lambda name: not arguments.only or any(name.startswith(start) for start in arguments.only)  # noqa: E731
    machine = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": 0,
    }
    out = None
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        out = (arguments.out / f"cpu-{machine['date']}.jsonl").open("a")

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if out is not None:
            out.write(json.dumps(line | machine) + "\n")
            out.flush()

    with tempfile.TemporaryDirectory(prefix="fnrfl-bench-") as folder:
        before = None if arguments.against is None else source_of(arguments.against, Path(folder))
        benches = []
        for bench in BENCHES:
            made = MADE.get(bench.keys["dataset"])
            keys = bench.keys | (
                {} if made is None or not wanted(bench.name) else {"dataset": _unscaled(made(Path(folder)))}
            )
            benches.append(Bench(**{**bench.__dict__, "keys": keys}))
        for bench in benches:
            if wanted(bench.name):
                for threads in bench.thread_counts:
                    say(turns(bench, threads, arguments.pairs, before))
        if wanted("two-threads"):
            say(two_threads(benches[0], arguments.pairs))
        for bench in benches:
            if bench.name in ("W1", "W2", "W3") and wanted("where"):
                say(where(bench, {"W1": 200, "W2": 20, "W3": 3}[bench.name]))
        if wanted("resnet18-step"):
            for line in resnet(arguments.pairs):
                say(line)
        if wanted("process"):
            for line in processes([b for b in benches if b.name in ("W1", "W2", "W3")]):
                say(line)
        if wanted("1000-clients"):
            for line in many_clients(arguments.pairs):
                say(line)


if __name__ == "__main__":
    main()
