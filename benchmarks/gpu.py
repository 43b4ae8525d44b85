"""How fast fnrfl is on a GPU: techniques, models, methods, ragged cohorts, memory, and runs of the paper's size.

    python benchmarks/gpu.py                                everything, about an hour on an H200
    python benchmarks/gpu.py techniques methods             some of it
    python benchmarks/gpu.py --out results/gpu/h200.jsonl   a line of JSON for each measurement, as it is made

Work: CIFAR-10, ten clients, batches of 64, bf16 unless said otherwise. Rates are images per second of private training
over all clients together, the best of the rounds after the first. Seconds of preparing (recording, compiling and
capturing steps) are given apart. Needs the data set (`fnrfl data get cifar10`).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import os
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fnrfl
from fnrfl.algorithms.parts.norms import ClassNorms
from fnrfl.config import RunConfig, load, registry
from fnrfl.engines.metered import Metered
from fnrfl.engines.recorder.cuda_graphs import CudaGraphs
from fnrfl.runs import run as runs
from fnrfl.runs.scores import score_model
from fnrfl.runs.setup.build import Built, build
from fnrfl.runs.setup.method import cohort

CEILINGS = {  # images/s of ResNet-18 measured apart on an H200, torch 2.11: one model at batch 640, and the arithmetic
    "one model at batch 640, captured": 64_000,
    "one model at batch 640, compiled": 86_200,
    "arithmetic limit": 236_000,
}
FAST = ["engine=gpu", "engine.precision=bf16", "engine.deterministic=false"]
RESNET = ["dataset=cifar10", "model=resnet18", "scenario=iid", "public.size=5000", "validation.size=0.05"]
SIMPLE = ["dataset=cifar10", "model=simple-cnn", "scenario=iid", "public.size=0", "validation.size=0"]
HELD_METHODS = ("fedavg", "fedprox", "scaffold", "moon", "feddyn", "feddc")
HELD_SCENARIOS = ("iid", "label-dirichlet(0.5)", "quantity-dirichlet(0.5)", "label-classes(2)")
Row = dict[str, Any]


def config(keys: list[str], recipe: str = "label-skew") -> RunConfig:
    """A recipe with some keys changed."""
    return load(recipe, keys)


def fresh() -> None:
    """Let go of what the last measurement held."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def images(built: Built, t: int = 0) -> int:
    """Images that private training of a round's cohort sees."""
    client, sizes = built.config.client, [len(mine) for mine in built.splits.clients]
    once = [client.epochs * sizes[m] for m in cohort(built.config, t).tolist()]
    return sum(n if client.last_batch == "keep" else -(-n // client.batch) * client.batch for n in once)


def rounds(built: Built, count: int, compile: bool | None = None) -> Iterator[Row]:
    """Play some rounds without evaluation: seconds of each, by phase."""
    engine, state = built.engine, built.algorithm.init(built.net)
    recorder = engine.server.runner.recorder
    if recorder is not None and isinstance(recorder.backend, CudaGraphs):
        recorder.backend.compile = compile
    metered = Metered(engine, clock=engine.clock)
    for t in range(count):
        engine.begin(t)
        metered.begin()
        torch.cuda.synchronize()
        prepared, began = engine.seconds_preparing, engine.clock()
        state = built.algorithm.round(state, cohort(built.config, t), metered)
        torch.cuda.synchronize()
        yield {
            "seconds": engine.clock() - began,
            "phases": dict(metered.seconds),
            "preparing": engine.seconds_preparing - prepared,
            "notes": dict(engine.notes),
        }


def rate(keys: list[str], *, compile: bool | None = None, count: int = 3, recipe: str = "label-skew") -> Row:
    """The best round after the first."""
    fresh()
    built = build(config(keys, recipe))
    played = list(rounds(built, count, compile))
    local, t = min((row["phases"].get("local", row["seconds"]), t) for t, row in enumerate(played) if t)
    return {
        "images": images(built, t),
        "images_per_second": round(images(built, t) / local),
        "seconds_round": round(min(row["seconds"] for row in played[1:]), 3),
        "seconds_local": round(local, 3),
        "seconds_preparing": round(sum(row["preparing"] for row in played), 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "sizes": sorted(map(len, built.splits.clients)),
    }


# -- the measurements -------------------------------------------------------------------------------------------------


def techniques() -> Iterator[Row]:
    """One after another: what each thing brings."""
    epoch = [*RESNET, "client.epochs=1"]
    few = ["clients=1", "participation=1.0"]
    for says, keys, compile in (
        ("eager, tf32, one client", [*few, "engine.precision=tf32", "engine.accelerate=false"], None),
        ("eager, bf16, ten clients grouped", ["engine.accelerate=false"], None),
        ("captured, float32, ten clients grouped", ["engine.precision=float32"], False),
        ("captured, tf32, ten clients grouped", ["engine.precision=tf32"], False),
        ("captured, bf16, one client", few, False),
        ("captured, bf16, ten clients grouped", [], False),
        ("compiled and captured, bf16, one client", few, True),
        ("compiled and captured, bf16, ten clients grouped", [], True),
        ("the same, deterministic", ["engine.deterministic=true"], True),
    ):
        found = rate([*epoch, *FAST, *keys, "rounds=2"], compile=compile, count=2)
        share = {k: round(found["images_per_second"] / v, 3) for k, v in CEILINGS.items()}
        yield {"benchmark": "techniques", "technique": says, **found, "share_of": share}


def simple() -> Iterator[Row]:
    """A small net, whose kernels are too short to fill the GPU."""
    for says, compile in (("captured", False), ("compiled and captured", True)):
        found = rate([*SIMPLE, *FAST, "client.epochs=5", "rounds=3"], compile=compile)
        yield {"benchmark": "fedavg-simplecnn-10x64", "technique": says, **found}


def headline() -> Iterator[Row]:
    """The rate of private training, balanced clients, ten epochs."""
    found = rate([*RESNET, *FAST, "client.epochs=10", "rounds=10"], compile=True, count=2)
    share = {k: round(found["images_per_second"] / v, 3) for k, v in CEILINGS.items()}
    yield {"benchmark": "fedavg-resnet18-10x64", **found, "share_of": share}


def ragged() -> Iterator[Row]:
    """Quantity skew against balanced clients, by the same technique."""
    for says, recipe, keys in (
        ("balanced", "label-skew", ["scenario=iid"]),
        ("quantity-dirichlet(0.5), seed 1", "quantity-skew", ["seed=1"]),
        ("quantity-dirichlet(0.5), seed 2", "quantity-skew", ["seed=2"]),
        ("label-dirichlet(0.5)", "label-skew", []),
    ):
        found = rate(
            ["public.size=5000", *keys, *FAST, "client.epochs=2", "rounds=3"], compile=False, count=2, recipe=recipe
        )
        yield {"benchmark": "ragged", "cohort": says, **found}


def keep() -> Iterator[Row]:
    """Short last batches, which are padded, against batches that run on: label skew, where every client has its own."""
    for says, keys in (("resnet18", [*RESNET, "client.epochs=2"]), ("simple-cnn", [*SIMPLE, "client.epochs=5"])):
        for last in ("run-on", "keep"):
            more = ["scenario=label-dirichlet(0.5)", f"client.last_batch={last}", "rounds=10"]
            yield {"benchmark": "keep", "model": says, "last_batch": last, **rate([*keys, *FAST, *more], compile=True)}


def predicted(built: Built, notes: Row) -> float:
    """Forward passes of one image in a round, a training step counted as three: what the method's card asks for."""
    name, options = built.config.algorithm.name, built.algorithm
    inner: Any = getattr(options, "inner", options) if built.config.fnr is not None else options
    M, N = built.config.clients, images(built)
    splits = built.splits
    public, ranking, distill, validation = map(len, (splits.public, splits.ranking, splits.distill, splits.validation))
    work = 0.0 if name in ("public-only", "centralised") else 3.0 * N
    if name == "moon":
        work += 2 * N
    elif name == "centralised":
        work += 3 * N
    elif name in ("public-only", "public-finetune"):
        work += 3 * inner.epochs * public
    elif name == "feddf":
        looks = 1 + -(-notes["distill_steps"] // inner.every)
        work += M * distill + 3 * notes["distill_steps"] * min(inner.batch, distill) + looks * validation
    elif name == "ktpfl":
        work += M * distill * (1 + 3 * inner.epochs)
    elif name == "fedftg":
        each = inner.generator_steps * M * 4 + M + 3 * inner.student_steps
        work += inner.iterations * inner.batch * each
    elif name == "bn-recalibrate":
        work += public
    if built.config.fnr is not None and inner.trains_clients:
        refined = len(notes.get("refined", ()))
        work += M * (public + ranking) + refined * (2 * ranking + 3 * built.config.fnr.epochs * public)
    return work


def methods(names: list[str] | None = None) -> Iterator[Row]:
    """Every method of the registry, three rounds, and FNR around FedAvg: time against FedAvg's, and what was to be.

    Controls that train one model, which has nobody to share its kernels with, are compared with FedAvg of one client
    too: `ratio_one_model`.
    """
    base: dict[int, Row] = {}
    listed = names or ["one client", *(name for name in registry.algorithms() if name != "fedavg"), "fnr"]
    for says in ["fedavg", *listed]:
        built = played = None  # what the last method held
        fresh()
        name = "fedavg" if says in ("one client", "fnr") else says
        clients, refined = 1 if says == "one client" else 10, says == "fnr"
        more = [f"algorithm={name}", f"clients={clients}", *(["fnr=on"] * refined)]
        about = {"benchmark": "methods", "method": name, "fnr": refined, "clients": clients}
        try:
            built = build(config([*RESNET, *FAST, "client.epochs=1", "rounds=3", *more]))
            played = list(rounds(built, 3, compile=False))
        except Exception as error:
            traceback.print_exc()
            yield about | {"failed": f"{type(error).__name__}: {error}"}
            continue
        seconds, work = played[-1]["seconds"], predicted(built, played[-1]["notes"])
        base.setdefault(built.config.clients, {"seconds": seconds, "work": work})
        local = played[-1]["phases"].get("local")
        time_ratio, work_ratio = seconds / base[10]["seconds"], work / base[10]["work"]
        one = {}
        if 1 in base and not built.algorithm.trains_clients:
            one = {"ratio_one_model": round(seconds / base[1]["seconds"] / (work / base[1]["work"]), 2)}
        yield about | {
            "images_per_second": None if local is None else round(images(built) / local),
            "seconds_round": round(seconds, 3),
            "phases": {k: round(v, 3) for k, v in played[-1]["phases"].items()},
            "seconds_preparing": round(sum(row["preparing"] for row in played), 1),
            "time_against_fedavg": round(time_ratio, 3),
            "work_against_fedavg": round(work_ratio, 3),
            "ratio": round(time_ratio / work_ratio, 2),
            **one,
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        }


def memory() -> Iterator[Row]:
    """Many clients."""
    for says, keys in (
        ("50 clients, all active", ["clients=50"]),
        ("1,000 clients, 50 active", ["clients=1000", "participation=0.05"]),
        ("100 clients, all active", ["clients=100"]),
    ):
        found = rate([*RESNET, *FAST, "client.epochs=1", "rounds=4", *keys], compile=False, count=2)
        host = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1)
        yield {"benchmark": "memory", "cohort": says, **found, "sizes": None, "host_peak_gib": host}


class Stopped(Exception):
    """A run that was ended on purpose."""


def determinism() -> Iterator[Row]:
    """The same seed twice, a run that is stopped and gone on with, and how much slower repeatable kernels are."""
    keys = [*RESNET, "engine=gpu", "engine.precision=bf16", "client.epochs=1", "rounds=4", "algorithm=scaffold"]

    def stop(event: Row) -> None:
        if event["round"] == 2:
            raise Stopped

    with tempfile.TemporaryDirectory() as folder:
        found = [runs.run(config(keys), out=Path(folder) / str(i)).model_sha256 for i in range(2)]
        with suppress(Stopped):
            runs.run(config(keys), out=Path(folder) / "stopped", progress=stop, checkpoint_every=0.0)
        resumed = runs.resume(Path(folder) / "stopped").model_sha256
    yield {"benchmark": "determinism", "same_twice": found[0] == found[1], "resumed_the_same": resumed == found[0]}
    rates = {}
    for repeatable in ("false", "true"):
        keys = [*RESNET, *FAST, f"engine.deterministic={repeatable}", "client.epochs=5", "rounds=10"]
        rates[repeatable] = rate(keys, compile=True, count=2)["images_per_second"]
    slower = round(rates["false"] / rates["true"], 3)
    yield {"benchmark": "determinism", "images_per_second": rates["true"], "fast": rates["false"], "slower": slower}


def told(event: Row) -> None:
    """Show that something happens."""
    print(event["round"], event["accuracy"], flush=True)


def whole(name: str, *keys: str, recipe: str = "label-skew", runs_alike: int | None = None) -> Row:
    """A run as the command line does it, evaluation, log and checkpoints included."""
    fresh()
    made = config(["public.size=5000", *FAST, *keys], recipe)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        result = runs.run(made, out=Path(folder) / "run", progress=told, runs_alike=runs_alike)
        wall = time.perf_counter() - began
    preparing = sum(event["seconds_preparing"] for event in result.rounds)
    spent: dict[str, float] = {}
    for event in result.rounds:
        for phase, seconds in event["seconds"].items():
            spent[phase] = round(spent.get(phase, 0.0) + seconds, 2)
    return {
        "benchmark": name,
        "keys": list(keys),
        "seed": made.seed,
        "rounds": made.rounds,
        "epochs": made.client.epochs,
        "precision": made.engine.precision,
        "accuracy": round(result.accuracy, 4),
        "accuracies": [round(event["accuracy"], 4) for event in result.rounds],
        "seconds": round(wall - preparing, 1),
        "seconds_preparing": round(preparing, 1),
        "phases": spent,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def widths() -> Iterator[Row]:
    """How the rate of a step depends on the number of clients in it."""
    for clients in (10, 5, 3, 2, 1):
        keys = [f"clients={clients}", "participation=1.0", "client.epochs=2", "rounds=3"]
        yield {"benchmark": "widths", "clients": clients, **rate([*RESNET, *FAST, *keys], compile=True)}


def forward() -> Iterator[Row]:
    """Forward passes: ten clients' class norms on 5,000 public images, and the evaluation of one model."""
    built = build(config([*RESNET, *FAST, "public.ranking=0", "rounds=3"]))
    engine, state = built.engine, built.algorithm.init(built.net)
    everybody, test = torch.arange(built.config.clients), built.splits.test
    asked = len(built.splits.public) * built.config.clients
    probe = lambda: engine.measure(everybody, ClassNorms(10), at=state)  # noqa: E731
    evaluation = lambda: score_model(built.net, state, test.x, test.y, 10)  # noqa: E731
    for says, work, count in (("class norms", probe, asked), ("evaluation", evaluation, len(test.y))):
        seconds = []
        for _ in range(4):
            began = engine.clock()
            work()
            seconds.append(engine.clock() - began)
        yield {"benchmark": "forward", "what": says, "images": count, "images_per_second": round(count / min(seconds))}


def grid() -> Iterator[Row]:
    """Cells of a grid in one process: five seeds of FedAvg and five of FNR, ten rounds of two epochs."""
    for method in ("fnr=off", "fnr=on"):
        for seed in range(1, 6):
            keys = [method, *(["fnr.epochs=1"] if method == "fnr=on" else []), "client.epochs=2", f"seed={seed}"]
            yield whole("grid", *keys, runs_alike=10)


def held(methods: tuple[str, ...] = HELD_METHODS, scenarios: tuple[str, ...] = HELD_SCENARIOS) -> Iterator[Row]:
    """What a process holds after each of many different cells of one short round: memory must not grow for ever."""
    for place, (scenario, method) in enumerate(itertools.product(scenarios, methods), 1):
        keys = [f"algorithm={method}", f"scenario={scenario}", "client.epochs=1", "rounds=1"]
        refined = ["fnr=on", "fnr.epochs=1"] if method == "fedavg" else []
        row = whole("held", *keys, *refined)
        yield {"benchmark": "held", "place": place, "keys": [*keys, *refined], "accuracy": row["accuracy"]} | {
            "seconds_preparing": row["seconds_preparing"],
            "memory": memory_held(),
        }


def memory_held() -> dict[str, int]:
    """Return what the process holds after a run: megabytes on the host and on the GPU."""
    held, statm = {"process": os.getpid()}, Path("/proc/self/statm")
    if statm.exists():  # Linux
        held["host_mb"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 10**6
    if torch.cuda.is_available():
        held["gpu_mb"] = torch.cuda.memory_reserved() // 10**6
    return held


def fedavg() -> Iterator[Row]:
    """The paper's size: ten rounds of ten epochs under label skew."""
    yield whole("fedavg-run")


def fnr() -> Iterator[Row]:
    """The same with refinement on 5,000 public images."""
    yield whole("fnr-run", "fnr=on")


def precision() -> Iterator[Row]:
    """Accuracy of bf16 against float32: three seeds, clients alike, where the spread over seeds is small."""
    for kind in ("bf16", "float32"):
        for seed in range(3):
            keys = ["scenario=iid", "client.epochs=2", "rounds=5", f"engine.precision={kind}", f"seed={seed}"]
            yield whole("precision", *keys, runs_alike=3)


MEASUREMENTS: dict[str, Callable[[], Iterator[Row]]] = {
    f.__name__: f
    for f in (
        techniques,
        headline,
        simple,
        widths,
        ragged,
        keep,
        forward,
        methods,
        memory,
        determinism,
        grid,
        held,
        fedavg,
        fnr,
        precision,
    )
}


def main() -> None:
    """Measure, and write each line as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[[], *MEASUREMENTS], help="what to measure; everything by default")
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="those that `methods` is about; also: fnr, 'one client'"
    )
    parser.add_argument("--out", type=Path, help="a file of JSON lines to add to")
    given = parser.parse_args()
    about = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "fnrfl": fnrfl.__version__,
    }
    if given.methods:
        MEASUREMENTS["methods"] = partial(methods, given.methods)
    for name in given.names or MEASUREMENTS:
        began = time.perf_counter()
        try:
            for row in MEASUREMENTS[name]():
                line = json.dumps(row | about)
                print(line, flush=True)
                if given.out is not None:
                    given.out.parent.mkdir(parents=True, exist_ok=True)
                    with given.out.open("a") as file:
                        file.write(line + "\n")
        except Exception:  # the next measurement may still be possible
            traceback.print_exc()
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
