"""One run: build, loop over rounds, write one event per round, checkpoint, and give back a Result."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import fnrfl
from fnrfl.rundir import checkpoint, directory, events, files, places
from fnrfl.runs import personal
from fnrfl.runs.blame import of_method, of_model
from fnrfl.runs.build import Built, build, build_algorithm, build_net, cohort
from fnrfl.config import RunConfig, loads
from fnrfl.core.isolation import isolated
from fnrfl.core.net import Net
from fnrfl.core.types import State, Tree, aligned
from fnrfl.data.batches import WHOLE, scaled
from fnrfl.data.datasets import Facts
from fnrfl.engines.metered import Metered
from fnrfl.core.errors import ConfigError
from fnrfl.runs.evaluate import Score, evaluate, pooled
from fnrfl.rundir.events import Event
from fnrfl.runs.finite import check_scores, check_shapes, check_state, for_json
from fnrfl.rundir.interrupt import interruptible, stoppable
from fnrfl.core.rng import elsewhere, generator
from fnrfl.rundir.directory import RunDir

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
    data: Facts  # about what it was trained on
    run_dir: Path | None
    keeper: personal.Keeper | None = None  # of the clients' models, for methods that give each client its own

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.data.classes

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of an example."""
        return self.data.input_shape

    @cached_property
    @isolated()
    def net(self) -> Net:
        """The net that the run trained, freshly initialised; its data need not be there."""
        return build_net(self.config, self.input_shape, len(self.classes), integers=self.data.tokens)

    @cached_property
    @isolated()
    def model(self) -> nn.Module:
        """The server's model, an ordinary module in eval mode."""
        return self.net.export(*self.net.pack(self.weights))

    @cached_property
    def client_models(self) -> personal.ClientModels | None:
        """The clients' models where the method gives each its own, else None: all use `model`."""
        if self.keeper is None:
            return None
        return personal.ClientModels(build_algorithm(self.config), self.net, self.config.clients, self.keeper)

    def client_model(self, client: int) -> nn.Module:
        """The model that a client uses, an ordinary module in eval mode, for methods that give each its own."""
        if self.client_models is None:
            raise ConfigError(
                f"{self.config.algorithm.name} trains one model for all clients, so client {client} has none of its "
                "own. Use `model`."
            )
        return self.client_models.model(client)

    @cached_property
    def model_sha256(self) -> str:
        """Hash of what was trained: every named parameter and buffer, and of each client's model if it has its own."""
        digest = hashlib.sha256()
        _add_to(digest, self.weights)
        for client, mine in enumerate(self.client_models or ()):
            digest.update(f"client {client}\n".encode())
            _add_to(digest, self.net.unflatten(mine.params) | mine.buffers)
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
            "fnr": self.config.as_dict()["fnr"],
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


def _add_to(digest: hashlib._Hash, named: Tree) -> None:
    """Names, types, shapes and bytes of some tensors."""
    for name, tensor in sorted(named.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().numpy().tobytes())


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
    """Run a config from the start.

    `out` is the run directory; by default the first free one of runs/<name>-<method>-<seed>, then -2 and so on; None
    writes nothing. With `overwrite` a run that has this directory keeps it until the new one has its first checkpoint.
    `progress` hears of every round when it has ended, `phase` the name of each phase of a round as it begins.
    """
    names = () if out is None else _names(config, out, overwrite)
    with tempfile.TemporaryDirectory(prefix="fnrfl-") as scratch:
        built = build(config, Path(scratch))
        for notice in built.notices:
            log.warning(notice)
        if out is None:
            return _rounds(built, None, Progressed(), progress, phase, checkpoint_every)
        header = events.line(_header(built))
        manifest = built.partition.manifest() | {"splits": built.splits.manifest()}
        contents: dict[str, str | bytes] = {
            "config.toml": built.config.to_toml(),
            "partition.json": json.dumps(manifest) + "\n",
            "events.jsonl": header,
        }
        with ExitStack() as stack:
            place = directory.create_first(stack, names, contents, overwrite=overwrite)
            result = _rounds(built, place, Progressed(log=header), progress, phase, checkpoint_every)
            return replace(result, run_dir=place.given)


def _names(config: RunConfig, out: str | Path | Literal[True], overwrite: bool) -> Iterable[Path]:
    """The names that a run may get, in order. A name that was asked for and cannot be had is refused at once."""
    if out is True and not overwrite:
        return places.run_dirs(config)
    run_dir = config.run_dir if out is True else Path(out)
    directory.recover(run_dir)
    if os.path.lexists(run_dir):
        if not overwrite:
            raise places.taken(run_dir, config)
        directory.check_replaceable(run_dir)
    return [run_dir]


@stoppable()
@isolated()
def resume(
    run_dir: str | Path,
    *,
    trust: bool = False,
    progress: Progress | None = None,
    phase: Phase | None = None,
    checkpoint_every: float = 30.0,
) -> Result:
    """Go on with a run that was stopped; the result is the uninterrupted run's, bit for bit."""
    run_dir = Path(run_dir)
    directory.check(run_dir)
    if (run_dir / "model.safetensors").exists():
        return load(run_dir, trust=trust)
    with directory.opened(run_dir) as place, tempfile.TemporaryDirectory(prefix="fnrfl-") as scratch:
        config, saved, kept = _verified(run_dir, trust)
        built = build(config, Path(scratch))
        _refuse_other_data(run_dir, events.parse(run_dir / "events.jsonl", kept)[0], built)
        state = None
        if saved is not None:
            state = checkpoint.load(run_dir, saved, built.engine.store).to(built.net.device)
            check_shapes(run_dir, state, built.engine)
        files.write(run_dir / "events.jsonl", kept)
        rounds = events.parse(run_dir / "events.jsonl", kept)[1:]
        result = _rounds(built, place, Progressed(rounds, state, kept), progress, phase, checkpoint_every)
    return replace(result, run_dir=run_dir)


@isolated()
def load(run_dir: str | Path, *, trust: bool = False) -> Result:
    """A finished run from disk; `trust` allows code that its config.toml names."""
    run_dir = Path(run_dir)
    directory.check(run_dir)
    if not (run_dir / "model.safetensors").exists():
        raise ConfigError(f"{run_dir} is not finished. Go on with `fnrfl resume {shlex.quote(str(run_dir))}`.")
    config, saved, kept = _verified(run_dir, trust)
    if saved is None or saved.round != config.rounds:
        raise ConfigError(
            f"{run_dir} has a model and no checkpoint.json of its last round, so nothing shows that its files belong "
            "together. Put that file back, or run again into another directory."
        )
    header, *rounds = events.parse(run_dir / "events.jsonl", kept)
    told = {"accuracy", "per_class", "per_client", "seconds", "bytes_up", "bytes_down"}
    if not all(told <= event.keys() for event in rounds):
        raise events.damaged(run_dir / "events.jsonl", "a round has no accuracy, bytes or seconds")
    weights = checkpoint.model(run_dir, saved)
    own = header["personalised"] if "personalised" in header else build_algorithm(config).personalised
    keeper = personal.on_disk(run_dir, saved) if own else None
    return Result(config, rounds, weights, Facts.from_json(header["data"]), run_dir, keeper)


@dataclass(frozen=True)
class Progressed:
    """How far a run has come: nothing yet, or what a checkpoint holds."""

    rounds: list[Event] = field(default_factory=list)
    state: State | None = None
    log: bytes = b""  # the lines of the event log so far


def _rounds(
    built: Built,
    place: RunDir | None,
    begun: Progressed,
    progress: Progress | None,
    phase: Phase | None,
    checkpoint_every: float,
) -> Result:
    config, engine = built.config, built.engine
    metered = Metered(engine, phase or (lambda name: None), engine.clock)
    rounds, state, logged = list(begun.rounds), begun.state, hashlib.sha256(begun.log)
    with engine, nullcontext(lambda: None) if place is None else interruptible() as stop:
        if state is None:
            with of_method(config, "before the first round"):
                state = built.algorithm.init(built.net)
        engine.warm_up()
        saved = time.monotonic()
        for t in range(len(rounds), config.rounds):
            state, event = _round(built, metered, state, t)
            rounds.append(event)
            last = t + 1 == config.rounds
            stopping = None if last else stop()  # a signal that comes later takes effect after the next round
            due = stopping or last or time.monotonic() - saved >= checkpoint_every
            if place is not None:
                events.append(place.path / "events.jsonl", event)
                logged.update(events.line(event))
                if due:
                    _save(place, built, rounds, state, logged.hexdigest())
                    saved = time.monotonic()
            try:
                if progress is not None:
                    progress(event | {"seconds": sum(event["seconds"].values())})
            except BaseException:  # whoever listens may stop a run as well, such as a pipe that was closed
                if place is not None and not due:
                    _save(place, built, rounds, state, logged.hexdigest())
                raise
            if stopping:
                raise stopping
    weights = aligned(built.net.unflatten(state.params.cpu()) | {k: v.cpu() for k, v in state.buffers.items()})
    keeper = personal.in_memory(state, engine.store) if built.algorithm.personalised and place is None else None
    if place is not None:
        ended = checkpoint.finish(place.path, weights)
        keeper = personal.on_disk(place.path, ended) if built.algorithm.personalised else None
    return Result(config, rounds, weights, built.facts, None, keeper)


def _save(place: RunDir, built: Built, rounds: list[Event], state: State, logged: str) -> None:
    """Keep what the run has come to; `logged` is the hash of its log."""
    files.sync(place.path / "events.jsonl")  # the log is never behind the checkpoint
    stamp = checkpoint.Stamp(built.config.sha256, logged)
    checkpoint.save(place.path, len(rounds), state, built.engine.store, stamp)
    place.settle()


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
        x = scaled(x, built.net.input_dtype)
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


def _verified(run_dir: Path, trust: bool) -> tuple[RunConfig, checkpoint.Index | None, bytes]:
    """(config, last checkpoint, the log up to it) of a run directory, all of which belong together."""
    text = files.read(run_dir / "config.toml", "it must be the config that the run was begun with")
    config = loads(text, origin=str(run_dir / "config.toml"), trust=trust)
    saved = checkpoint.index(run_dir)
    path = run_dir / "events.jsonl"
    content = files.read(path, "a run directory has an events.jsonl").encode()
    done = 0 if saved is None else saved.round
    lines = content.split(b"\n")[:-1]  # a kill may have left half of one at the end
    kept = b"".join(line + b"\n" for line in lines[: done + 1])
    if len(lines) <= done:
        raise events.damaged(path, f"it has {len(lines)} lines, and the checkpoint beside it comes after round {done}")
    header = events.parse(path, kept)[0]
    if not (_has_text(header, "data", "sha256") and _has_text(header, "partition")):
        raise events.damaged(path, "its first line does not say which data and which split the run has")
    if saved is not None and saved.log is not None and saved.log != hashlib.sha256(kept).hexdigest():
        raise events.damaged(path, "it is not what the run wrote: its sha256 is not the one in checkpoint.json")
    # Version 0.1.0 hashed the text; a hash of the values goes on being right when a later version adds a key.
    hashes = {config.sha256, hashlib.sha256(text.encode()).hexdigest()}
    for name, found in (("events.jsonl", header.get("config_sha256")), ("checkpoint.json", saved and saved.config)):
        if found is not None and found not in hashes:
            raise ConfigError(
                f"{run_dir / name} belongs to another config than the config.toml beside it. Put that file back as it "
                "was, or run again into another directory."
            )
    return config, saved, kept


def _refuse_other_data(run_dir: Path, began: Event, built: Built) -> None:
    """Refuse to go on with other data or another split than the run began with; say if other versions go on."""
    versions, then = _versions(), began.get("versions")
    then = then if isinstance(then, dict) else {}
    other = [f"{name} {then[name]}" for name, now in versions.items() if name in then and then[name] != now]
    by = f" It was begun with {', '.join(other)}; that may be why." if other else ""
    if began["data"]["sha256"] != built.dataset.checksum:
        raise ConfigError(
            f'dataset = "{built.config.dataset}" is not the data that {run_dir} was begun with.{by} Put it back as it '
            "was, or run again into another directory."
        )
    if began["partition"] != built.partition.sha256:
        raise ConfigError(
            f"The split among the clients is not the one that {run_dir} was begun with.{by} Run again into another "
            "directory."
        )
    if other:
        here = ", ".join(f"{name} {now}" for name, now in versions.items() if then.get(name, now) != now)
        log.warning(
            f"{run_dir} was begun with {', '.join(other)} and goes on with {here}: its numbers may differ by rounding "
            "from those of a run that was not interrupted."
        )


def _has_text(tree: object, *keys: str) -> bool:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return isinstance(tree, str)


def _versions() -> dict[str, str]:
    return {
        "fnrfl": fnrfl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _header(built: Built) -> Event:
    return {
        "config": built.config.as_dict(),
        "config_sha256": built.config.sha256,
        "leaks": list(built.config.leaks_on),
        "personalised": built.algorithm.personalised,
        "notices": list(built.notices),
        "versions": _versions(),
        "git": _revision(),
        "device": _device(built.net.device),
        "data": built.facts.as_json(),
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
