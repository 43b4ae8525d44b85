"""Loggers against the real packages: what is written to disk is read back. `make test-loggers` installs them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fnrfl
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.rundir.configs import flat_config
from fnrfl.rundir.events import read_events
from fnrfl.runs.loggers import MLflow, TensorBoard, WandB, scalars

KEYS: dict[str, Any] = {"rounds": 4, "client": {"epochs": 1}, "clients": 4}
LEAKY: dict[str, Any] = KEYS | {"protocol": "paper", "fnr": "on", "dataset": "digits", "model": "mlp"}
Curves = dict[str, list[tuple[int, float]]]  # (round, value) by name


def needs(module: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed; `make test-loggers` installs it")


tensorboard, mlflow, wandb = needs("tensorboard"), needs("mlflow"), needs("wandb")


pytestmark = pytest.mark.usefixtures("tmp_cwd")


def expected(run_dir: Path, first: int = 1) -> Curves:
    """What a logger must have of a run: the numbers of its log."""
    curves: Curves = defaultdict(list)
    for event in [*read_events(run_dir / "events.jsonl")][1:]:
        for name, value in scalars(event).items():
            if event["round"] >= first:
                curves[name].append((event["round"], value))
    return dict(curves)


def same(found: Curves, wanted: Curves, rel: float = 0.0) -> None:
    assert {name: [step for step, _ in curve] for name, curve in found.items()} == {
        name: [step for step, _ in curve] for name, curve in wanted.items()
    }
    for name, curve in found.items():
        values = [value for _, value in wanted[name]]
        assert [value for _, value in curve] == pytest.approx(values, rel=rel, abs=0), name


class Stop(fnrfl.Callback):
    """Stops after a round as Ctrl-C does, or ends the process at once."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, event: dict[str, Any]) -> None:
        if event["round"] == self.after:
            raise KeyboardInterrupt


def interrupted(logger: Callable[[], Any], after: int = 2) -> Path:
    """A run that was interrupted and resumed, logged all along."""
    with pytest.raises(KeyboardInterrupt):
        fnrfl.run("digits", out="here", callbacks=[logger(), Stop(after)], **KEYS)
    fnrfl.resume("here", callbacks=[logger()])
    return Path("here")


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def read_tensorboard(folder: Path) -> tuple[Curves, dict[str, str]]:
    """(curves, texts) as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0})
    found.Reload()
    tags = {tag.removesuffix("/text_summary"): tag for tag in found.Tags()["tensors"]}
    texts = {name: found.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for name, tag in tags.items()}
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}, texts


@tensorboard
def test_tensorboard_reads_what_was_logged() -> None:
    result = fnrfl.run("digits", out="here", callbacks=[TensorBoard()], fnr="on", **KEYS)
    curves, texts = read_tensorboard(Path("here/tensorboard"))
    same(curves, expected(Path("here")), rel=1e-6)  # float32
    assert {"accuracy", "loss", "bytes/refine/up", "seconds/local"} <= set(curves)
    assert texts["model_sha256"] == result.model_sha256 and texts["leaks"] == "none"
    toml = "\n".join(line.removeprefix("    ") for line in texts["config"].splitlines())
    assert toml.strip() == Path("here/config.toml").read_text().strip()


@tensorboard
def test_tensorboard_goes_on_and_has_no_round_twice() -> None:
    run_dir = interrupted(TensorBoard)
    curves, _ = read_tensorboard(run_dir / "tensorboard")
    same(curves, expected(run_dir), rel=1e-6)
    assert len(list((run_dir / "tensorboard").iterdir())) == 2


@tensorboard
def test_an_overwritten_run_takes_its_curves_with_it() -> None:
    fnrfl.run("digits", out="here", callbacks=[TensorBoard()], **KEYS)
    fnrfl.run("digits", out="here", overwrite=True, callbacks=[TensorBoard()], **KEYS | {"rounds": 2})
    curves, _ = read_tensorboard(Path("here/tensorboard"))
    same(curves, expected(Path("here")), rel=1e-6)
    assert [step for step, _ in curves["accuracy"]] == [1, 2]
    assert [path.name for path in Path().iterdir()] == ["here"]  # nothing was moved aside
    fnrfl.run("digits", out="here", overwrite=True, **KEYS)
    assert not Path("here/tensorboard").exists()


@tensorboard
def test_a_run_that_fails_at_its_beginning_replaces_none() -> None:
    fnrfl.run("digits", out="here", callbacks=[TensorBoard()], **KEYS)
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}

    class Broken(fnrfl.Callback):
        def begin(self, config: Any, facts: Any) -> None:
            raise ValueError

    with pytest.raises(FnrflError, match="The callback Broken"):
        fnrfl.run("digits", out="here", overwrite=True, callbacks=[TensorBoard(), Broken()], **KEYS)
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@tensorboard
def test_tensorboard_in_a_folder_of_ones_own() -> None:
    logger = TensorBoard("logs")
    fnrfl.run("digits", out=None, callbacks=[logger], **KEYS)
    fnrfl.run("digits", out="here", callbacks=[logger], **KEYS)
    assert sorted(path.name for path in Path("logs").iterdir()) == ["digits-fedavg-0", "here"]
    assert not Path("here/tensorboard").exists()
    with pytest.raises(ConfigError, match="give TensorBoard a folder"):
        fnrfl.run("digits", out=None, callbacks=[TensorBoard()], **KEYS)


@tensorboard
def test_a_comparison_logs_each_of_its_runs() -> None:
    command = [sys.executable, "-m", "fnrfl", "compare", "digits", "rounds=2", "client.epochs=1", "--no-report"]
    command += ["--over", "algorithm=fedavg,fedprox", "--seeds", "0", "-o", "both", "--log", "tensorboard"]
    subprocess.run([*command, "--log", "tensorboard"], check=True, timeout=300, capture_output=True)
    for name in ("fedavg-seed-0", "fedprox-seed-0"):
        curves, _ = read_tensorboard(Path("both", name, "tensorboard"))
        same(curves, expected(Path("both", name)), rel=1e-6)
        assert len(list((Path("both", name, "tensorboard")).iterdir())) == 1


# -- MLflow ------------------------------------------------------------------------------------------------------------


def read_mlflow() -> list[tuple[Any, Curves]]:
    """Every run in the store, first begun first, with its curves."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{Path.cwd() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fnrfl")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    history = lambda run, name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]  # noqa: E731
    return [(run, {name: history(run, name) for name in run.data.metrics}) for run in runs]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store, made once: that takes MLflow seconds."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(database: Path, tmp_cwd: Path) -> None:
    shutil.copy(database, tmp_cwd / "mlflow.db")


@mlflow
@pytest.mark.slow
def test_mlflow_reads_what_was_logged(store: None) -> None:
    result = fnrfl.run("digits", out="here", callbacks=[MLflow()], **LEAKY)
    ((run, curves),) = read_mlflow()
    same(curves, expected(Path("here")))
    leaks = ", ".join(result.config.leaks_on)
    assert run.data.params == {key: str(value) for key, value in flat_config(result.config).items()}
    assert run.data.tags["model_sha256"] == result.model_sha256 and run.data.tags["leak"] == leaks
    assert (run.info.status, run.info.run_name) == ("FINISHED", "here")
    assert sorted(path.name for path in Path().iterdir()) == ["here", "mlflow.db"]


@mlflow
@pytest.mark.slow
def test_a_run_that_goes_on_is_a_second_run_of_its_name(store: None) -> None:
    run_dir = interrupted(MLflow)
    (stopped, first), (finished, second) = read_mlflow()
    assert (stopped.info.status, finished.info.status) == ("KILLED", "FINISHED")
    same({name: [*curve, *second[name]] for name, curve in first.items()}, expected(run_dir))


# -- Weights & Biases --------------------------------------------------------------------------------------------------


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: seven bytes of header, then LevelDB's log format in blocks of 32 KiB."""
    assert content[:4] == b":W&B"
    place, whole = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:  # the rest of a block is empty
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            yield whole
            whole = b""


def read_wandb() -> list[dict[str, Any]]:
    """Every offline run, first begun first: its curves, config, tags, summary and exit code."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(Path().glob("wandb/offline-run-*/*.wandb")):
        run: dict[str, Any] = {"curves": defaultdict(list), "config": {}, "summary": {}, "tags": [], "name": ""}
        for data in wandb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run["name"], run["tags"] = record.run.display_name, list(record.run.tags)
                run["config"] |= _items(record.run.config.update)
            elif kind == "history":
                items = _items(record.history.item)
                step = items.get("_step", record.history.step.num)
                for key in items.keys() - {key for key in items if key.startswith("_")}:
                    run["curves"][key].append((step, items[key]))
            elif kind == "summary":
                run["summary"] |= _items(record.summary.update)
            elif kind == "exit":
                run["exit"] = record.exit.exit_code
        found.append(run)
    return found


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@wandb
@pytest.mark.slow
def test_wandb_writes_offline() -> None:
    result = fnrfl.run("digits", out="here", callbacks=[WandB()], **LEAKY)
    (found,) = read_wandb()
    same(dict(found["curves"]), expected(Path("here")))
    config = flat_config(result.config)
    assert {key: found["config"][key] for key in config} == config
    assert found["tags"] == ["leak", *result.config.leaks_on] and found["name"] == "here" and found["exit"] == 0
    assert found["summary"]["model_sha256"] == result.model_sha256
    assert sorted(path.name for path in Path().iterdir()) == ["here", "wandb"]


@wandb
@pytest.mark.slow
def test_wandb_goes_on_in_a_second_run() -> None:
    run_dir = interrupted(WandB)
    first, second = read_wandb()
    assert first["exit"] == 130 and second["exit"] == 0 and first["name"] == second["name"] == "here"
    whole = {name: [*curve, *second["curves"][name]] for name, curve in first["curves"].items()}
    same(whole, expected(run_dir))
    assert [step for step, _ in second["curves"]["accuracy"]] == [3, 4]
    assert second["config"]["rounds_done_before"] == 2


# -- the network -------------------------------------------------------------------------------------------------------

ALONE = """
import socket, sys
real = socket.socket.connect
def connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
        print("connects to", address, flush=True)
        raise OSError("no network")
    return real(self, address)
socket.socket.connect = connect
import fnrfl
callbacks = [getattr(fnrfl.loggers, sys.argv[1])()]
fnrfl.run("digits", out="here", callbacks=callbacks, rounds=2, client={"epochs": 1})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("TensorBoard", marks=tensorboard),
        pytest.param("MLflow", marks=mlflow),
        pytest.param("WandB", marks=wandb),
    ],
)
def test_nobody_is_called(name: str) -> None:
    """Under the same conditions as at home: no variable says that these are tests, and there is no login.

    Where calls of other processes can be seen, as that of W&B, they are.
    """
    home = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "CI", "WANDB", "MLFLOW"))}
    words = [sys.executable, "-c", ALONE, name]
    trace = ["strace", "-f", "-qq", "-e", "trace=connect", "-o", "calls"]
    can_trace = (
        shutil.which("strace") and subprocess.run(["strace", "-qq", "true"], capture_output=True).returncode == 0
    )
    traced = [*trace, *words] if can_trace else words
    got = subprocess.run(traced, env=home | {"HOME": os.getcwd()}, capture_output=True, text=True, timeout=500)
    assert got.returncode == 0, got.stderr
    assert "connects to" not in got.stdout
    calls = Path("calls").read_text().splitlines() if Path("calls").exists() else []
    assert [call for call in calls if "AF_INET" in call and "127.0.0.1" not in call and '"::1"' not in call] == []
