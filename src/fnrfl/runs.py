"""One run: build, loop over rounds, write one event per round, checkpoint, and give back a Result."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import fnrfl
from fnrfl import checkpoint, events, files
from fnrfl.blame import of_method, of_model
from fnrfl.build import Built, build, build_net, cohort
from fnrfl.config import RunConfig, loads
from fnrfl.core.isolation import isolated
from fnrfl.core.net import Net
from fnrfl.core.types import State, Tree, aligned
from fnrfl.data.batches import WHOLE, scaled
from fnrfl.engines.metered import Metered
from fnrfl.errors import ConfigError
from fnrfl.evaluate import Score, evaluate, pooled
from fnrfl.events import Event
from fnrfl.finite import check_scores, check_shapes, check_state, for_json
from fnrfl.interrupt import interruptible, stoppable
from fnrfl.lock import alone
from fnrfl.rng import elsewhere, generator

log = logging.getLogger("fnrfl")
Progress = Callable[[Event], None]
Phase = Callable[[str], None]
MIB = 2**20


@dataclass(frozen=True)
class Result:
    """What came out of a run: the numbers of every round, and the model."""

    config: RunConfig
    rounds: list[Event]
    weights: Tree  # trained parameters and buffers, by the module's own names
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    run_dir: Path | None

    @cached_property
    @isolated()
    def model(self) -> nn.Module:
        """The model that came out, an ordinary module in eval mode; its data need not be there."""
        net = build_net(self.config, self.input_shape, len(self.classes))
        return net.export(*net.pack(self.weights))

    @cached_property
    def model_sha256(self) -> str:
        """Hash of the model: the bytes of every named parameter and buffer."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.weights.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last round."""
        return float(self.rounds[-1]["accuracy"])

    @property
    def per_class(self) -> list[float]:
        """Recall of every class after the last round."""
        return list(self.rounds[-1]["per_class"])

    @property
    def bytes_up(self) -> int:
        """Bytes from clients to the server, over all rounds."""
        return sum(int(event["bytes_up"]) for event in self.rounds)

    @property
    def bytes_down(self) -> int:
        """Bytes from the server to clients, over all rounds."""
        return sum(int(event["bytes_down"]) for event in self.rounds)

    @property
    def seconds_train(self) -> float:
        """Seconds of training, norm pass, refinement and server, without evaluation."""
        looking = ("evaluate", "observe")
        return float(sum(v for event in self.rounds for k, v in event["seconds"].items() if k not in looking))

    @property
    def kappa(self) -> float:
        """Accuracy * 1e4 per second; comparable only within one device, engine and table."""
        return self.accuracy * 1e4 / self.seconds_train

    @property
    def rho(self) -> float | None:
        """Accuracy * 1e4 per MiB of traffic; None where nothing was sent."""
        sent = self.bytes_up + self.bytes_down
        return self.accuracy * 1e4 / (sent / MIB) if sent else None

    @property
    def accuracy_best(self) -> float | None:
        """Test accuracy of the round that was best on validation data; None without such data."""
        judged = [event for event in self.rounds if event["validation_accuracy"] is not None]
        return float(max(judged, key=lambda e: float(e["validation_accuracy"]))["accuracy"]) if judged else None

    def summary(self) -> dict[str, Any]:
        """The run as one JSON object."""
        last = self.rounds[-1]
        return {
            "algorithm": self.config.algorithm.name,
            "fnr": self.config.fnr,
            "scenario": self.config.scenario,
            "protocol": self.config.protocol,
            "leaks": list(self.config.leaks_on),
            "seed": self.config.seed,
            "rounds": len(self.rounds),
            "accuracy": self.accuracy,
            "accuracy_last3": float(np.mean([event["accuracy"] for event in self.rounds[-3:]])),
            "accuracy_best": self.accuracy_best,
            "accuracy_own": last.get("accuracy_own"),
            "balanced_accuracy": last["balanced_accuracy"],
            "worst_client": min((value for value in last["per_client"] if value is not None), default=None),
            "per_class": self.per_class,
            "seconds_train": self.seconds_train,
            "seconds_eval": sum(event["seconds"]["evaluate"] for event in self.rounds),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "kappa": self.kappa,
            "rho": self.rho,
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "model_sha256": self.model_sha256,
        }


@stoppable()
@isolated()
def run(
    config: RunConfig,
    *,
    out: str | Path | None | Literal[True] = True,
    overwrite: bool = False,
    progress: Progress | None = None,
    phase: Phase | None = None,
    checkpoint_every: float = 30.0,
) -> Result:
    """Run a config from the start. `out` is the run directory: by default runs/<name>-<seed>; None writes nothing.

    `progress` hears of every round when it has ended, `phase` the name of each phase of a round as it begins.
    """
    run_dir = None if out is None else config.run_dir if out is True else Path(out)
    if run_dir is not None and run_dir.exists() and not overwrite:
        raise _exists(run_dir)
    if run_dir is not None and run_dir.exists() and not (run_dir / "config.toml").exists():
        raise ConfigError(f"{run_dir} is not a run, so it is not replaced. Choose another directory with --out.")
    with tempfile.TemporaryDirectory(prefix="fnrfl-") as scratch:
        built = build(config, Path(scratch))
        for notice in built.notices:
            log.warning(notice)
        if run_dir is None:
            return _rounds(built, None, 0, None, [], progress, phase, checkpoint_every)
        _found(run_dir, built, overwrite)
        with alone(run_dir):
            return _rounds(built, run_dir, 0, None, [], progress, phase, checkpoint_every)


@stoppable()
@isolated()
def resume(
    run_dir: str | Path,
    *,
    progress: Progress | None = None,
    phase: Phase | None = None,
    checkpoint_every: float = 30.0,
) -> Result:
    """Go on with a run that was stopped; the result is the uninterrupted run's, bit for bit."""
    run_dir = Path(run_dir)
    config = _config(run_dir)
    if (run_dir / "model.safetensors").exists():
        return load(run_dir)
    with alone(run_dir), tempfile.TemporaryDirectory(prefix="fnrfl-") as scratch:
        built = build(config, Path(scratch))
        saved = checkpoint.load(run_dir, built.engine.store, config.sha256)
        done, state = (0, None) if saved is None else (saved[0], saved[1].to(built.net.device))
        check_shapes(run_dir, state, built.engine)
        log_file = run_dir / "events.jsonl"
        _same(run_dir, events.read(log_file)[:1], built)
        kept = events.truncate(log_file, done)
        return _rounds(built, run_dir, done, state, kept[1:], progress, phase, checkpoint_every)


@isolated()
def load(run_dir: str | Path) -> Result:
    """A finished run from disk."""
    run_dir = Path(run_dir)
    config = _config(run_dir)
    path = run_dir / "model.safetensors"
    if not path.exists():
        raise ConfigError(f"{run_dir} is not finished. Go on with `fnrfl resume {shlex.quote(str(run_dir))}`.")
    header, *rounds = events.read(run_dir / "events.jsonl")
    data = header["data"]
    return Result(config, rounds, checkpoint.read(path), tuple(data["classes"]), tuple(data["input_shape"]), run_dir)


def _rounds(
    built: Built,
    run_dir: Path | None,
    done: int,
    state: State | None,
    rounds: list[Event],
    progress: Progress | None,
    phase: Phase | None,
    checkpoint_every: float,
) -> Result:
    config, engine = built.config, built.engine
    metered = Metered(engine, phase or (lambda name: None), engine.clock)
    with engine, nullcontext(lambda: None) if run_dir is None else interruptible() as stop:
        if state is None:
            with of_method(config, "before the first round"):
                state = built.algorithm.init(built.net)
        engine.warm_up()
        saved = time.monotonic()
        for t in range(done, config.rounds):
            state, event = _round(built, metered, state, t)
            rounds.append(event)
            last = t + 1 == config.rounds
            stopping = None if last else stop()  # asked once: whoever asks later is heard after the next round
            due = run_dir is None or stopping or last or time.monotonic() - saved >= checkpoint_every
            if run_dir is not None:
                events.append(run_dir / "events.jsonl", event)
                if due:
                    _save(run_dir, built, state, t + 1)
                    saved = time.monotonic()
            try:
                if progress is not None:
                    progress(event | {"seconds": sum(event["seconds"].values())})
            except BaseException:  # whoever listens may stop a run as well, such as a pipe that was closed
                if run_dir is not None and not due:
                    _save(run_dir, built, state, t + 1)
                raise
            if stopping:
                raise stopping
    weights = aligned(built.net.unflatten(state.params.cpu()) | {k: v.cpu() for k, v in state.buffers.items()})
    if run_dir is not None:
        part = run_dir / "model.safetensors.part"
        checkpoint.write(part, weights)
        part.replace(run_dir / "model.safetensors")  # its presence says that the run is finished
    return Result(config, rounds, weights, built.dataset.classes, built.dataset.input_shape, run_dir)


def _save(run_dir: Path, built: Built, state: State, done: int) -> None:
    files.sync(run_dir / "events.jsonl")  # the log is never behind the checkpoint
    checkpoint.save(run_dir, done, state, built.engine.store, built.config.sha256)


def _round(built: Built, metered: Metered, state: State, t: int) -> tuple[State, Event]:
    config, engine = built.config, built.engine
    engine.begin(t)
    metered.begin()
    active = cohort(config, t)
    prepared, began = engine.seconds_preparing, engine.clock()
    with of_method(config, f"in round {t + 1}"):
        state = built.algorithm.round(state, active, metered)
    check_state(state, engine.initial, built.algorithm, t)
    trained = engine.clock()
    metered.tell("evaluate")
    with of_model(config, f"could not be scored after round {t + 1}"):
        scores = _scores(built, state)
    check_scores(scores, built.algorithm, t)
    seconds = metered.seconds | {"server": trained - began - sum(metered.seconds.values())}
    return state, {
        "round": t + 1,
        "rounds": config.rounds,
        "cohort": active.tolist(),
        "lr": engine.training.lr,
        **scores,
        "bytes": metered.bytes,
        "bytes_up": sum(count["up"] for count in metered.bytes.values()),
        "bytes_down": sum(count["down"] for count in metered.bytes.values()),
        "seconds": seconds | {"evaluate": engine.clock() - trained},
        "seconds_preparing": engine.seconds_preparing - prepared,
        **for_json(engine.notes),
        "leaks": list(config.leaks_on),
    }


def _scores(built: Built, state: State) -> Event:
    """Test accuracy in all its forms, and validation accuracy.

    With feature noise the test set is what the clients see together: one copy under each client's noise.
    """
    config, partition, classes = built.config, built.partition, built.dataset.num_classes
    clean_only = config.leaks.clean_test_for_fnr and config.fnr is not None

    def noisy(net: Net, client: int, name: str, x: Tensor, y: Tensor) -> Score:
        stream = elsewhere(generator(config.seed, client, name, "feature-noise"), net.device)
        return evaluate(net, state, x, y, classes, lambda xs: built.noise(client, xs, stream))

    def clean(x: Tensor, y: Tensor) -> Score:
        parts = list(zip(x.split(WHOLE), y.split(WHOLE), strict=True))
        return pooled(built.engine.each(len(parts), lambda net, i: evaluate(net, state, *parts[i], classes)))

    def copies(name: str, x: Tensor, y: Tensor) -> list[Score]:
        if partition.noise is None or clean_only:
            return [clean(x, y)]
        return built.engine.each(config.clients, lambda net, client: noisy(net, client, name, x, y))

    if built.algorithm.personalised:
        return _own_scores(built, state)
    test = copies("test", built.splits.test.x, built.splits.test.y)
    whole = pooled(test)
    shares = torch.from_numpy(partition.counts / partition.counts.sum(1, keepdims=True))
    if len(test) == 1:
        per_client = test[0].reweighted(shares).tolist()
    else:
        per_client = [float(score.reweighted(mine)) for score, mine in zip(test, shares, strict=True)]
    validation = built.splits.validation
    judged = pooled(copies("validation", validation.x, validation.y)).accuracy if len(validation) else None
    apart = {"accuracy_clean": clean(built.splits.test.x, built.splits.test.y).accuracy} if len(test) > 1 else {}
    return _told(whole, per_client, judged, apart)


def _own_scores(built: Built, state: State) -> Event:
    """The same where clients use models of their own: each on the whole test set, and on its own distribution.

    With feature noise the test set has every client's noise in it, example by example; a client's own has its own.
    """
    config, partition, splits = built.config, built.partition, built.splits
    noisy = partition.noise is not None and not (config.leaks.clean_test_for_fnr and config.fnr is not None)

    def mixed(name: str, x: Tensor) -> Tensor:
        """Example j under the noise of client j mod N."""
        x = scaled(x, built.net.dtype)
        if noisy:
            x = x.clone()
            for client in range(config.clients):
                stream = generator(config.seed, client, name, "feature-noise")
                x[client :: config.clients] = built.noise(client, x[client :: config.clients], stream)
        return x

    def score(net: Net, client: int, x: Tensor, y: Tensor, own: bool = False) -> Score:
        model = built.algorithm.personal(net, state, client, built.engine.store.get(client))
        stream = elsewhere(generator(config.seed, client, "test", "feature-noise"), net.device)
        noise = (lambda xs: built.noise(client, xs, stream)) if own else None
        return evaluate(net, model, x, y, built.dataset.num_classes, noise)

    def everybody(x: Tensor, y: Tensor, own: bool = False) -> list[Score]:
        return built.engine.each(config.clients, lambda net, client: score(net, client, x, y, own))

    test = everybody(mixed("test", splits.test.x), splits.test.y)
    mine = everybody(splits.test.x, splits.test.y, own=True) if noisy else test
    shares = torch.from_numpy(partition.counts / partition.counts.sum(1, keepdims=True))
    per_client = [float(one.reweighted(part)) for one, part in zip(mine, shares, strict=True)]
    whole, judged = pooled(test), None
    if len(splits.validation):
        judged = pooled(everybody(mixed("validation", splits.validation.x), splits.validation.y)).accuracy
    apart = {"accuracy_clean": pooled(everybody(splits.test.x, splits.test.y)).accuracy} if noisy else {}
    return _told(whole, per_client, judged, apart)


def _told(whole: Score, per_client: list[float], judged: float | None, apart: dict[str, float]) -> Event:
    """Scores as the log has them."""
    return {
        "accuracy": whole.accuracy,
        **apart,
        "balanced_accuracy": whole.balanced,
        "loss": whole.loss,
        "per_class": [_number(value) for value in whole.per_class.tolist()],
        "accuracy_own": _mean(per_client),
        "per_client": [_number(value) for value in per_client],
        "validation_accuracy": judged,
    }


def _mean(values: list[float]) -> float | None:
    """The mean of those that are numbers."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else None


def _number(value: float) -> float | None:
    """JSON has no nan: a class or client that the data says nothing about is null."""
    return None if value != value else value


# -- the run directory ------------------------------------------------------------------------------------------------


def _exists(run_dir: Path) -> ConfigError:
    return ConfigError(
        f"{run_dir} exists already. Go on with `fnrfl resume {shlex.quote(str(run_dir))}`, choose another directory "
        "with --out, or replace it with --overwrite."
    )


def _found(run_dir: Path, built: Built, overwrite: bool) -> None:
    """Make the directory whole, under another name, and then let it appear."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{run_dir.name}-", dir=run_dir.parent))
    try:
        files.write(part / "config.toml", built.config.to_toml())
        manifest = built.partition.manifest() | {"splits": built.splits.manifest()}
        files.write(part / "partition.json", json.dumps(manifest) + "\n")
        events.append(part / "events.jsonl", _header(built))
        os.chmod(part, 0o755)
        if run_dir.exists() and not overwrite:  # another run has made it in the meantime
            raise _exists(run_dir)
        _replace(run_dir, part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    files.sync(run_dir.parent)


def _replace(run_dir: Path, new: Path) -> None:
    """Let a directory appear, in the place of an old one if there is one."""
    if not run_dir.exists():
        new.rename(run_dir)
        return
    old = new.with_name(f"{new.name}-old")
    with alone(run_dir):
        pass  # nobody is still at work in it
    run_dir.rename(old)
    try:
        new.rename(run_dir)
    except BaseException:
        old.rename(run_dir)
        raise
    shutil.rmtree(old)


def _same(run_dir: Path, header: list[Event], built: Built) -> None:
    """Refuse to go on with another config or other data than the run began with."""
    if not header:
        raise ConfigError(f"{run_dir / 'events.jsonl'} has no first line. Run again into another directory.")
    began = header[0]
    if began.get("config_sha256") != built.config.sha256:
        raise ConfigError(
            f"{run_dir} was begun with another config than its config.toml says now. Put that file back as it was, or "
            "run again into another directory."
        )
    if began["data"]["sha256"] != built.dataset.checksum:
        raise ConfigError(
            f'dataset = "{built.config.dataset}" is not the data that {run_dir} was begun with. Put it back as it was, '
            "or run again into another directory."
        )


def _header(built: Built) -> Event:
    return {
        "config": built.config.model_dump(),
        "config_sha256": built.config.sha256,
        "leaks": list(built.config.leaks_on),
        "notices": list(built.notices),
        "versions": {
            "fnrfl": fnrfl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "git": _revision(),
        "device": _device(built.net.device),
        "data": {
            "source": built.dataset.source,
            "sha256": built.dataset.checksum,
            "classes": list(built.dataset.classes),
            "input_shape": list(built.dataset.input_shape),
            "pixels": built.dataset.train.x.dtype == torch.uint8,
        },
        "partition": built.partition.sha256,
        "parameters": built.net.size,
    }


def _device(device: torch.device) -> str:
    cores = f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{torch.cuda.get_device_name(device)}; {cores}" if device.type == "cuda" else cores


def _revision() -> str | None:
    """The git revision of the code, where it runs from a checkout."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def _config(run_dir: Path) -> RunConfig:
    path = run_dir / "config.toml"
    if not path.exists():
        raise ConfigError(
            f"{run_dir} is not a run directory: it has no config.toml. Start one with `fnrfl run -o {run_dir}`."
        )
    return loads(files.read(path, "it must be the config that the run was begun with"), origin=str(path))
