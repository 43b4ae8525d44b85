"""Clients in Ray actors: the loop engine's results bit for bit, and actors that die, hang or run out of memory.

What does not need Ray itself is tested with actors that are ordinary objects of this process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fnrfl
import ray_toys
from fnrfl import usercode
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.moon import Moon
from fnrfl.algorithms.parts.norms import ClassNorms
from fnrfl.algorithms.scaffold import Scaffold
from fnrfl.config import load
from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.errors import ClientError, CompatibilityError, ConfigError, FnrflError
from fnrfl.core.messages import Failure
from fnrfl.core.options import NetworkOptions
from fnrfl.core.types import LocalTask, State
from fnrfl.engines.ray import actors as ray_actors
from fnrfl.engines.ray import session as ray_session
from fnrfl.engines.ray.actors import RayActors, answer_part, from_message, to_message
from fnrfl.engines.trainer import Trainer
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.process import isolated
from fnrfl.results import compare as comparing
from fnrfl.runs import workers
from fnrfl.runs.forecast import forecast
from fnrfl.runs.passed import NOTHING_PASSED
from fnrfl.runs.run import resume, run
from fnrfl.runs.setup import engine as setup_engine
from fnrfl.runs.setup.build import build, gather_parts
from settings import with_keys
from toys import SIZES, Run, assert_same, described, named, run_elsewhere


@pytest.fixture
def ray_installed() -> None:
    """Ray, with room for actors: those of other files' runs would stay, and new ones would wait for ever."""
    pytest.importorskip("ray")
    ray_toys.close()


def with_ray(test: Any) -> Any:
    """A test that starts Ray."""
    for mark in (pytest.mark.usefixtures("ray_installed"), pytest.mark.slow, pytest.mark.xdist_group("ray")):
        test = mark(test)
    return test


# -- without Ray: actors in this process ------------------------------------------------------------------------------


class Here:
    """Two actors of this process, which have nothing in common with the run but bytes."""

    count = 2

    def __init__(self, make: Callable[[], Trainer]) -> None:
        self.actors = [make() for _ in range(self.count)]
        self.put_so_far: list[Any] = []
        self.parts: list[slice] = []
        self.waited: list[float | None] = []
        self.lost: set[int] = set()  # rows that have no answer

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    def put(self, message: Any) -> object:
        self.put_so_far.append(message)
        return len(self.put_so_far) - 1

    def ask(
        self, common: Any, message: Callable[[slice], Any], parts: Any, seconds: float | None
    ) -> Iterator[tuple[slice, Any]]:
        self.parts += parts
        self.waited.append(seconds)
        for turn, where in reversed([*enumerate(parts)]):  # they come back in another order
            if self.lost & {*range(where.start, where.stop)}:
                yield where, "it is gone."
                continue
            actor = self.actors[turn % self.count]
            yield where, answer_part(actor, self.put_so_far[common], message(where))


def runs(algorithm: Algorithm, **options: Any) -> tuple[Run, Run, Here]:
    """The same run with the loop engine and with two actors."""
    loop = Run(algorithm, dtype=torch.float32)
    actors = Here(lambda: Run(algorithm, dtype=torch.float32).engine.server)
    return loop, Run(algorithm, dtype=torch.float32, actors=actors, **options), actors


@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold(), FNR(Moon()), FNR(Scaffold())], ids=named)
def test_actors_equal_the_loop_bit_for_bit(algorithm: Algorithm) -> None:
    """Float32, BatchNorm, Dropout, ragged clients: models, memories and bytes, in every round."""
    loop, there, _ = runs(algorithm)
    for _ in range(3):
        assert_same(loop.round(), there.round())
        assert loop.metered.bytes == there.metered.bytes
    for client in range(6):
        mine, theirs = loop.engine.memory.get(client), there.engine.memory.get(client)
        assert all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_the_model_travels_once_for_all_parts_and_chunks_of_a_task() -> None:
    _, there, actors = runs(FedAvg(), clients_at_once=2)
    there.round()
    assert len(actors.put_so_far) == 1
    assert len(actors.parts) == 4  # two chunks of two clients, a part each
    size = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in actors.put_so_far[0])
    model = there.state.params.nbytes + sum(b.nbytes for b in there.state.buffers.values())
    assert model <= size <= model + 4096


@pytest.mark.parametrize(
    ("network", "lost", "said"),
    [
        ({"on_missing": "fail"}, {1}, r"client \d, round 1, stage local: it is gone"),
        ({"on_missing": "proceed", "min_share": 0.9}, {1}, r"client \d, round 1, stage local: it is gone"),
        ({"on_missing": "proceed"}, {0, 1, 2, 3}, "0 of 4 clients"),
        ({"on_missing": "proceed"}, {1}, None),
    ],
)
def test_clients_without_answer_are_left_out_or_stop_the_run(network: Any, lost: set[int], said: str | None) -> None:
    _, there, actors = runs(FedAvg(), network=NetworkOptions(**network))
    actors.lost = lost
    if said is not None:
        with pytest.raises(ClientError, match=said):
            there.round()
        return
    there.round()
    assert there.replies().clients.tolist() == [c for m, c in enumerate(there.cohort(0).tolist()) if m not in lost]
    assert [*there.engine.notes["missing"].values()] == ["local: it is gone."]


def test_each_client_is_asked_about_the_model_that_it_holds() -> None:
    """Here, and in actors that are handed two at a time."""
    for played in runs(FedAvg(), network=NetworkOptions(gpus=0.5))[:2]:
        some, probe = torch.arange(4), ClassNorms(4)
        got = played.engine.train(some, LocalTask(Objective(), "local", played.state, hold_model=True))
        held, sent = (
            played.engine.measure(some, probe, at=at)["norms"] for at in (None, State(got.params, got.buffers))
        )
        torch.testing.assert_close(held, sent)
        assert len(held.unique(dim=0)) == 4


def test_clients_with_most_examples_begin_and_crowds_share_messages() -> None:
    _, there, actors = runs(FedAvg())
    there.round(torch.arange(6))
    assert [SIZES[part.start] for part in actors.parts] == sorted(SIZES, reverse=True)
    trainer = there.engine.clients.trainer  # type: ignore[attr-defined]
    trainer._examples = [1] * 1000
    parts = trainer._parts(list(range(1000)), None)
    assert [row for part in parts for row in range(part.start, part.stop)] == [*range(1000)]
    assert 32 <= len(parts) <= 40


@pytest.mark.parametrize(
    ("task", "seconds"),
    [({}, 3.0), ({"role": "extra"}, 3.0), ({"data": "public", "role": "extra"}, 4.0), ({"data": "public"}, 4.0)],
)
def test_all_work_on_private_data_has_as_long_as_training(task: dict[str, Any], seconds: float) -> None:
    """As on a network: SCAFFOLD's second pass over private data takes as long as training, and no refinement."""
    network = NetworkOptions(train_deadline=3.0, refine_deadline=4.0, on_missing="proceed")
    _, there, actors = runs(FedAvg(), network=network)
    there.engine.train(torch.arange(2), LocalTask(Objective(), "local", there.state, **task))
    assert actors.waited == [seconds]


@pytest.mark.parametrize(("network", "sizes"), [({"train_deadline": 9.0}, [1] * 4), ({"gpus": 0.5}, [2, 2])])
def test_who_has_a_deadline_is_alone_and_who_shares_a_gpu_is_in_a_whole_group(network: Any, sizes: list[int]) -> None:
    """A stand-in: there is no GPU here. Clients of a part step together there, so a part is as large as it can be."""
    _, there, actors = runs(FNR(FedAvg()), network=NetworkOptions(**network))
    there.round()
    assert [part.stop - part.start for part in actors.parts[: len(sizes)]] == sizes


def test_an_actor_with_a_share_of_a_gpu_builds_the_captured_runner(monkeypatch: Any) -> None:
    """A stand-in: there is no GPU here. What an actor would build is the gpu engine's trainer."""
    built: list[Any] = []

    def stop(config: Any, given: Any) -> None:
        built.append(config)
        raise FnrflError("seen")

    monkeypatch.setattr(workers, "gather_parts", stop)
    monkeypatch.setattr(workers, "found_devices", lambda who, way_out: [torch.device("cpu")])
    for gpus, name in ((0.0, "loop"), (0.25, "gpu")):
        config = load("digits", ["engine=ray", "engine.threads=2", f"network.gpus={gpus}", "metrics=none"])
        told = {"config": config.flat(), "scale": None, "init": [], "data": "", "partition": ""}
        with pytest.raises(FnrflError, match="seen"):
            workers.trainer_in_actor(to_bytes(told))
        assert (built[-1].engine.name, built[-1].engine.threads) == (name, 1)


OWN_MODEL = """
from torch import nn

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.out(x if x.mean() > 0 else x * 2)
"""


def told_of_own_model(share: float) -> bytes:
    """What an actor is told of a run whose clients cannot step together."""
    Path("branching.py").write_text(OWN_MODEL)
    usercode.allow("model.name", "branching:Branch")
    config = load("digits", ["engine=ray", "engine.threads=2", f"network.gpus={share}", "model=branching:Branch"])
    parts = gather_parts(with_keys(config, {"network.gpus": 0.0}))
    config = with_keys(parts.config, {"network.gpus": share})
    return to_bytes(workers.told_to_actors(replace(parts, config=config), None, NOTHING_PASSED))


@pytest.mark.usefixtures("tmp_cwd")
def test_an_actor_on_a_gpu_that_cannot_train_a_model_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: there is no GPU here. The trial step is taken on the CPU."""
    for module in (workers, setup_engine):
        monkeypatch.setattr(module, "found_devices", lambda *_: [torch.device("cpu")])
    monkeypatch.setattr(setup_engine, "on_first_gpu", lambda net, compute: net.copy())
    wanted = r'^engine = "ray" with network.gpus = 0.25 .* model = "branching:Branch" .*Set network.gpus = 0,'
    with isolated(), pytest.raises(CompatibilityError, match=wanted) as refused:
        workers.trainer_in_actor(told_of_own_model(0.25))
    assert "loop" not in str(refused.value)
    with isolated():
        assert workers.trainer_in_actor(told_of_own_model(0.0)).pool.devices  # as it says


@pytest.mark.usefixtures("tmp_cwd")
def test_actors_for_which_there_is_no_gpu_say_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted = r'^engine = "ray" with network.gpus = 0.25 needs an NVIDIA GPU.* Set network.gpus = 0'
    with pytest.raises(CompatibilityError, match=wanted):  # where the number of actors is to be found
        gather_parts(load("digits", ["engine=ray", "network.gpus=0.25"]))
    with isolated(), pytest.raises(CompatibilityError, match=wanted):  # on the machine of an actor
        workers.trainer_in_actor(told_of_own_model(0.25))


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_a_run_of_actors_on_gpus_is_forecast_on_the_cpu_and_says_so(precision: str) -> None:
    keys = ["engine=ray", "engine.threads=2", f"engine.precision={precision}", "rounds=1", "client.epochs=1"]
    found = forecast(load("digits", [*keys, "network.gpus=0.5"]))
    chosen = found.config.engine
    assert (chosen.name, chosen.precision) == ("ray", "float32" if precision == "auto" else precision)
    assert any("network.gpus = 0.5" in notice and "CPU" in notice for notice in found.notices)


def test_what_goes_wrong_at_a_client_is_told_and_want_of_memory_is_raised() -> None:
    class Broken:
        runner = Run(FedAvg()).engine.server.runner
        error: Exception = ClientError("no.", client=3, round=1, stage="local")

        def train(self, *_: object) -> None:
            raise self.error

    world = Run(FedAvg())
    request = world.engine.request(world.cohort(0), LocalTask(Objective(), "local", world.state))
    part, common = to_message((request, None, {})), to_message((world.state, {}))
    broken: Any = Broken()
    failure = from_message(answer_part(broken, common, part))
    assert failure == Failure("no.", 3, 1, "local")
    Broken.error = RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory")
    with pytest.raises(MemoryError, match="There is not enough memory"):
        answer_part(broken, common, part)


class NoRoom:
    """A Ray whose cluster has `cpus` cores, and starts no actor before it was asked `asks` times."""

    def __init__(self, cpus: float, asks: float) -> None:
        self.cpus, self.asks = cpus, asks

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def is_initialized(self) -> bool:
        return True

    def wait(self, some: list[Any], *, timeout: float, **_: object) -> tuple[list[Any], list[Any]]:
        time.sleep(timeout)
        self.asks -= 1
        return (some if self.asks < 0 else []), []

    def get(self, answer: Any) -> Any:
        return to_bytes(None) if answer == "starts" else "done"


@pytest.mark.parametrize(("policy", "cpus", "asks"), [("fail", 0.0, 999), ("fail", 1.0, 8), ("wait", 0.0, 8)])
def test_a_cluster_that_has_lost_its_room_is_named(
    policy: Any, cpus: float, asks: int, monkeypatch: Any, caplog: Any
) -> None:
    """Actors that are to replace others are never placed: no machine is left that could have them."""
    monkeypatch.setattr(ray_actors, "LOOK", 0.01)
    monkeypatch.setattr(ray_actors, "SECONDS_FOR_ROOM", 0.02)
    actors = RayActors(1, NetworkOptions(on_missing=policy), faulty_trainer, lambda: b"")
    actor = SimpleNamespace(answer=SimpleNamespace(remote=lambda *_: "answer"))
    actors._ray, actors._starting = NoRoom(cpus, asks), {"starts": actor}
    asked = actors.ask(SimpleNamespace(hex=lambda: "one"), lambda rows: [], [slice(0, 1)], None)
    if asks == 999:
        with pytest.raises(CompatibilityError, match=r"need 1 CPUs \(network\.cpus each\), and the Ray cluster has 0"):
            next(asked)
    else:
        assert [*asked] == [(slice(0, 1), "done")]
    assert caplog.text.count("No Ray actor is there: 1 wait for room") == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("engine=gpu", 'needs 1 GPUs (engine = "gpu"), and the Ray cluster has 0'),
        ("network.gpus=0.5", "needs 0.5 GPUs (network.gpus), and the Ray cluster has 0"),
        ("network.cpus=9", "needs 9 CPUs (network.cpus), and the Ray cluster has 2"),
    ],
)
def test_a_cluster_without_room_for_a_run_names_the_key(keys: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "connected", lambda *_: nullcontext(NoRoom(2.0, 0)))
    config = load("digits", [keys])
    with workers.ray_workers(config, 60.0) as cluster, pytest.raises(CompatibilityError) as refused:
        cluster.submit(config, Path("run"))
    assert said in str(refused.value)


# -- refused in a sentence --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ray_installed")
def test_objects_given_in_python_are_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(CompatibilityError, match=r"model was given as an object \(Sequential .*module:function"):
        fnrfl.run("digits", engine="ray", model=module, out=None)


def test_a_missing_ray_and_the_number_of_actors_are_asked_for(monkeypatch: Any) -> None:
    with pytest.raises(CompatibilityError, match=r"engine\.threads"):
        build(load("digits", ["engine=ray", "network.address=10.0.0.1:6379"]))
    monkeypatch.setattr(workers, "find_spec", lambda name: None)
    with pytest.raises(CompatibilityError, match=r"pip install 'fnrfl\[ray\]'"):
        build(load("digits", ["engine=ray"]))


@pytest.mark.usefixtures("ray_installed")
def test_building_and_forecasting_start_no_ray(monkeypatch: Any) -> None:
    monkeypatch.setattr(ray_session, "connected", lambda *_: pytest.fail("Ray was started"))
    monkeypatch.setattr(ray_actors, "connected", lambda *_: pytest.fail("Ray was started"))
    config = load("digits", ["engine=ray", "rounds=1"])
    build(config)
    assert forecast(config).config.engine.name == "ray"


def test_nothing_but_a_ray_run_imports_ray() -> None:
    code = "import fnrfl, fnrfl.cli, fnrfl.runs.run, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# -- with Ray: whole runs ---------------------------------------------------------------------------------------------

KEYS = ["rounds=3", "clients=5", "participation=0.8", "engine.precision=float32", "client.epochs=1"]


def log_of(folder: Path) -> list[Any]:
    """The rounds of a log, without what is about time."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()[1:]]
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


@with_ray
def test_ray_equals_loop_bit_for_bit(tmp_path: Path) -> None:
    """Two actors; every client is active at least twice in three rounds; logs are equal too, bytes included."""
    methods = ["fedavg", "scaffold", "moon", "fedgen"]
    cells = [[f"algorithm={name}"] for name in methods] + [[f"algorithm={name}", "fnr=on"] for name in methods[:2]]
    with ray_session.connected("", 2):  # started once
        for i, cell in enumerate(cells):
            keys = [*KEYS, *cell, "participation=1.0"]
            loop = run(load("digits", [*keys, "engine=loop", "engine.threads=1"]), out=tmp_path / f"loop{i}")
            ray = run(load("digits", [*keys, "engine=ray", "engine.threads=2"]), out=tmp_path / f"ray{i}")
            assert ray.model_sha256 == loop.model_sha256, cell
            assert log_of(tmp_path / f"ray{i}") == log_of(tmp_path / f"loop{i}"), cell


@with_ray
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(event: Any) -> None:
        if event["round"] == 2:
            raise Stop

    config = load("digits", [*KEYS, "algorithm=scaffold", "fnr=on", "engine=ray", "engine.threads=2"])
    whole = run(config, out=tmp_path / "whole")
    with pytest.raises(Stop):
        run(config, out=tmp_path / "cut", progress=stop)
    assert resume(tmp_path / "cut").model_sha256 == whole.model_sha256
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


@with_ray
def test_code_of_ones_own_and_scaled_columns_reach_the_actors(tmp_cwd: Path) -> None:
    """A model that a config names, data of a file, inputs scaled by what clients have told, first weights."""
    Path("own_net.py").write_text(
        "from torch import nn\n\ndef net(input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Linear(input_shape[0], 8), nn.ReLU(), nn.Linear(8, num_classes))\n"
    )
    rows = [f"{i % 7},{(i * 13) % 11},{(i * 5) % 3}" for i in range(200)]
    Path("table.csv").write_text("a,b,label\n" + "\n".join(rows) + "\n")
    init = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).state_dict()
    keys: Any = dict(dataset="table.csv", model="own_net:net", init=init, clients=4, rounds=2, scenario="iid", out=None)
    loop = fnrfl.run("digits", engine=dict(name="loop", threads=1), **keys)
    assert fnrfl.run("digits", engine=dict(name="ray", threads=2), **keys).model_sha256 == loop.model_sha256


# -- with Ray: faults -------------------------------------------------------------------------------------------------


def faulty_trainer(plain: bytes) -> Trainer:
    """A toy trainer that does something to a client's first or every try; what was tried is a file in a folder."""
    told = from_bytes(plain)
    trainer = run_elsewhere(told["run"]).engine.server
    train, folder = trainer.train, Path(told["folder"])

    def faulty(request: Any, held: Any, memory: Any) -> Any:
        if told["client"] in request.clients:
            tried = folder / f"{len(list(folder.iterdir()))}"
            tried.touch()
            if told["always"] or tried.name == "0":
                _FAULTS[told["fault"]]()
        return train(request, held, memory)

    trainer.train = faulty  # type: ignore[method-assign]
    return trainer


def _out_of_memory() -> None:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, limit[1]))
    torch.zeros(1 << 31, dtype=torch.float64)


_FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hung": lambda: time.sleep(600),
    "memory": _out_of_memory,
}
WORDS = {
    "killed": "its Ray process died before it answered",
    "hung": "it did not answer within 3 seconds",
    "memory": "There is not enough memory",
}


def faulty_run(fault: str, folder: Path, *, always: bool, **network: Any) -> tuple[Run, RayActors]:
    folder.mkdir()
    options = NetworkOptions(train_deadline=3.0 if fault == "hung" else 0.0, **network)
    plain = {"run": described(Scaffold()) | {"seed": 7, "scale": None, "single": True}}
    plain |= {"fault": fault, "folder": str(folder), "client": Run(Scaffold()).cohort(0).tolist()[1], "always": always}
    actors = RayActors(2, options, faulty_trainer, lambda: to_bytes(plain))
    return Run(Scaffold(), dtype=torch.float32, actors=actors, network=options), actors


@with_ray
def test_actors_that_die_hang_or_are_out_of_memory(tmp_path: Path, monkeypatch: Any) -> None:
    """Once: the client is tried again, and nothing has changed. Always: it is left out, or the run stops, by name."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    loop = Run(Scaffold(), dtype=torch.float32)
    loop.rounds(2)
    bad = loop.cohort(0).tolist()[1]
    with ray_session.connected("", 2):
        for fault, words in WORDS.items():
            once, actors = faulty_run(fault, tmp_path / f"{fault}-once", always=False)
            with actors:
                assert_same(loop.state, once.rounds(2))
            fails, actors = faulty_run(fault, tmp_path / f"{fault}-fails", always=True)
            with actors, pytest.raises(ClientError, match=f"client {bad}, round 1, stage local: {words}"):
                fails.round()
            left, actors = faulty_run(fault, tmp_path / f"{fault}-left", always=True, on_missing="proceed", retries=0)
            with actors:
                left.round()
            assert left.engine.notes["missing"].keys() == {bad}
            assert bad not in left.replies().clients.tolist()
            assert bad not in left.engine.memory


@with_ray
def test_a_cluster_that_is_too_small_or_not_there_is_named() -> None:
    keys = [*KEYS, "engine=ray", "engine.threads=2"]
    with (
        ray_session.connected("", 2),
        pytest.raises(CompatibilityError, match=r"need 200 CPUs \(network\.cpus each\), and the Ray cluster has"),
    ):
        run(load("digits", [*keys, "network.cpus=100"]), out=None)
    with pytest.raises(FnrflError, match=r'network\.address = "127\.0\.0\.1:9": there is no Ray cluster'):
        run(load("digits", [*keys, "network.address=127.0.0.1:9"]), out=None)


@with_ray
def test_an_actor_that_finds_other_data_is_refused(monkeypatch: Any) -> None:
    told = workers.told_to_actors
    monkeypatch.setattr(workers, "told_to_actors", lambda *parts: told(*parts) | {"data": "another"})
    with pytest.raises(FnrflError, match=r"data that a Ray actor on .* is not that of this machine"):
        run(load("digits", [*KEYS, "engine=ray", "engine.threads=1"]), out=None)


# -- with Ray: what is left behind ------------------------------------------------------------------------------------


def rays_of(process: int) -> list[str]:
    """The command lines of processes that Ray has started for a process, and that are alive."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes()
                parts = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            mine = int(parts[1]) == process or f"_{process}/".encode() in line or f"_{process}\0".encode() in line
            if mine and b"ray" in line and parts[0] != "Z":
                found.append(line.replace(b"\0", b" ").decode()[:200])
    return found


@with_ray
@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_a_run_no_process_and_no_folder_is_left(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import fnrfl.cli, sys; sys.argv = ['fnrfl', 'run', 'digits', 'engine=ray', 'engine.threads=2',"
        f" 'rounds=100000', 'client.epochs=1', '--out', {str(tmp_path / 'run')!r}]; fnrfl.cli.main()"
    )
    scratch = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    env = os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: (tmp_path / "run" / "events.jsonl").exists() and rounds_of(tmp_path / "run") > 2, 90, child)
        assert rays_of(child.pid)
        child.send_signal(number)
        child.wait(60)
        wait_for(lambda: not rays_of(child.pid), 30)
        if number != signal.SIGKILL:
            assert [*scratch.glob("fnrfl-*")] == []
            assert child.returncode in (130, 143)
    finally:
        child.kill()
        shutil.rmtree(scratch)


def rounds_of(folder: Path) -> int:
    return len((folder / "events.jsonl").read_text().splitlines()) - 1


def wait_for(true: Callable[[], bool], seconds: float, child: subprocess.Popen[bytes] | None = None) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert child is None or child.poll() is None, child.stdout.read().decode()[-2000:] if child.stdout else ""
        assert time.monotonic() < end
        time.sleep(0.1)


@with_ray
def test_a_program_with_a_ray_of_its_own_keeps_it(tmp_path: Path) -> None:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        run(load("digits", [*KEYS, "engine=ray", "engine.threads=2"]), out=None)
        assert ray.is_initialized()
        wait_for(lambda: ray.available_resources().get("CPU") == 2.0, 30)  # the actors are gone
    finally:
        ray.shutdown()


@with_ray
def test_a_cluster_of_two_nodes_equals_the_loop_and_stays(tmp_path: Path) -> None:
    """As in docs/scale.md, with both nodes on this machine and one core each, so that there is an actor on each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scratch = tempfile.mkdtemp(prefix="r", dir="/tmp")
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--disable-usage-stats", "--block"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    keys = [*KEYS, "algorithm=scaffold", "engine.precision=float32"]
    there = [*keys, "engine=ray", "engine.threads=2", f"network.address=127.0.0.1:{port}"]
    code = "from fnrfl.config import load; from fnrfl.runs.run import run\n"
    code += f"print(run(load('digits', {there}), out=None).model_sha256)"
    nodes = []
    try:
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={scratch}"]
        for more in (head, [f"--address=127.0.0.1:{port}"]):
            nodes.append(subprocess.Popen([*ray, *more], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            wait_for(lambda: is_open(port), 60)
        wait_for(lambda: len(rays_of(nodes[1].pid)) > 0, 60)
        said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
        loop = run(load("digits", [*keys, "engine=loop", "engine.threads=1"]), out=None)
        assert said.stdout.split() == [loop.model_sha256], said.stderr[-2000:]
        assert [node.poll() for node in nodes] == [None, None]
    finally:
        for node in reversed(nodes):
            node.terminate()
            node.wait(60)
        shutil.rmtree(scratch, ignore_errors=True)


def is_open(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex(("127.0.0.1", port)) == 0


@with_ray
def test_the_ray_that_a_run_starts_lets_nobody_else_in() -> None:
    code = "import fnrfl.engines.ray.session as s, sys, subprocess, os\n" + (
        "with s.connected('', 1) as ray:\n"
        "    address = ray.get_runtime_context().gcs_address\n"
        "    env = {k: v for k, v in os.environ.items() if 'RAY_AUTH' not in k}\n"
        "    other = f'import ray; ray.init(address={address!r}, log_to_driver=False)'\n"
        "    sys.exit(subprocess.run([sys.executable, '-c', other], env=env, capture_output=True).returncode)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True).returncode == 1


# -- whole runs spread over a cluster ---------------------------------------------------------------------------------


def grid_of(*over: str) -> Any:
    return comparing.grid("digits", ["rounds=2", "client.epochs=1"], list(over), [0, 1])


@with_ray
def test_cells_on_ray_equal_cells_here_and_one_that_fails_is_alone(tmp_path: Path) -> None:
    cells = grid_of("client.lr=0.05,1e30")
    told: list[Any] = []
    with ray_session.connected("", 2):
        there = comparing.compare(cells, tmp_path / "there", on="ray", progress=told.append)
        (tmp_path / "there" / cells[0].name / "model.safetensors").unlink()  # as if it had been stopped before the end
        again = comparing.compare(cells, tmp_path / "there", on="ray", progress=told.append)
    here = comparing.compare(cells, tmp_path / "here")
    assert [notice.what for notice in told].count("failed") == 4  # two cells, in both calls
    assert [notice.what for notice in told].count("kept") == 1
    assert {one.cell for one in there.failed} == {one.cell for one in here.failed}
    assert all("no longer finite" in one.error for one in there.failed)
    for cell in cells[:2]:
        assert log_of(tmp_path / "there" / cell.name) == log_of(tmp_path / "here" / cell.name)
    assert [row.metrics["accuracy"] for row in again.rows] == [row.metrics["accuracy"] for row in here.rows]


@pytest.mark.usefixtures("ray_installed")
def test_what_cannot_be_spread_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match=r"Choose one: leave engine out, or leave --on out"):
        comparing.compare(grid_of("engine=ray"), tmp_path / "one", on="ray")
    with pytest.raises(ConfigError, match="Loggers and callbacks are in this process"):
        comparing.compare(grid_of("rounds=1"), tmp_path / "two", on="ray", callbacks=[object()])
    net = lambda **_: torch.nn.Linear(64, 10)  # noqa: E731
    with pytest.raises(CompatibilityError, match="model was given as an object"):
        fnrfl.compare("digits", over={"rounds": [1, 2]}, model=net, out=tmp_path / "three", on="ray")
    assert [*tmp_path.iterdir()] == []
