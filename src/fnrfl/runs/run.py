"""One run: build, loop over rounds, write one event per round, checkpoint, and give back a Result.

Its files are written when it begins, and held against each other and against its data when it goes on.
"""

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
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import fnrfl
from fnrfl.config import RunConfig, loads
from fnrfl.config.stopping import best_round
from fnrfl.core.errors import ConfigError
from fnrfl.core.messages import RIGHT
from fnrfl.core.ndarrays import sizes_of
from fnrfl.core.store import CPU
from fnrfl.core.trees import aligned, moved
from fnrfl.core.types import State, Tree
from fnrfl.data.datasets import Facts
from fnrfl.data.scaling import Scaling
from fnrfl.engines.metered import Metered
from fnrfl.process import isolated
from fnrfl.rundir import checkpoint, directory, events, files, places
from fnrfl.rundir.configs import flat_config
from fnrfl.rundir.directory import RunDir
from fnrfl.rundir.events import Event, in_their_round
from fnrfl.rundir.interrupt import interruptible, stoppable
from fnrfl.rundir.origin import read_origin
from fnrfl.rundir.record import Index, checked_rounds
from fnrfl.runs.callbacks import Listeners, log_once
from fnrfl.runs.error_context import check_scores, check_shapes, check_state, for_json, method_errors, model_errors
from fnrfl.runs.metrics import validation_metric
from fnrfl.runs.passed import NOTHING_PASSED, PassedObjects
from fnrfl.runs.quality import leading_metric
from fnrfl.runs.result import Result, models_in_memory, models_on_disk
from fnrfl.runs.scores import score_round, scores_from_sites
from fnrfl.runs.setup.build import Built, RunParts, build
from fnrfl.runs.setup.engine import ClientNetwork, RunNetwork
from fnrfl.runs.setup.method import build_algorithm, cohort
from fnrfl.usercode import source_hashes

logger = logging.getLogger("fnrfl")
Progress = Callable[[Event], None]
Phase = Callable[[str], None]


@stoppable()
@isolated()
def run(
    config: RunConfig,
    *,
    out: str | Path | None | Literal[True] = True,
    overwrite: bool = False,
    progress: Progress | None = None,
    callbacks: Sequence[Any] = (),
    phase: Phase | None = None,
    checkpoint_every: float = 30.0,
    runs_alike: int | None = None,
    passed: PassedObjects = NOTHING_PASSED,
    network: ClientNetwork | None = None,
    parts: RunParts | None = None,
) -> Result:
    """Run a config from the start.

    `out` is the run directory; by default the first free one of runs/<name>-<method>-<seed>, then -2 and so on; None
    writes nothing. With `overwrite` a run that has this directory keeps it until the new one has its first checkpoint.
    `progress` hears of every round when it has ended, `callbacks` of the beginning and the end too, `phase` the name of
    each phase of a round as it begins. This is one of `runs_alike` runs of this process: what is prepared for it serves
    the others too; None: it is alone. `passed` are the objects that the config has labels of. `network` leads to
    clients on other machines, which keep two rounds, so that every round ends with a checkpoint; `parts` is what they
    and the server have agreed on.
    """
    told = Listeners(progress, callbacks)
    names = () if out is None else places.run_dirs(config, out, overwrite=overwrite)
    connection = None if network is None else RunNetwork(network, uuid.uuid4().hex)
    with tempfile.TemporaryDirectory(prefix="fnrfl-") as scratch, ExitStack() as stack:
        built = build(config, Path(scratch), runs_alike, None, passed, connection, parts)
        log_once(built.notices)
        log_once(built.on_split, logging.INFO)  # how every run begins: a command shows it
        log = RunLog(built, checkpoint_every)
        if out is not None:
            contents: dict[str, str | bytes] = {
                "config.toml": built.passed.heading(built.config) + built.config.to_toml(),
                "partition.json": json.dumps(built.manifest()) + "\n",
                "events.jsonl": events.line(log.header),
            }
            log.place = directory.create_first(stack, names, contents, overwrite=overwrite)
        return _train(log, told, phase)


@stoppable()
@isolated()
def resume(
    run_dir: str | Path,
    *,
    trust: bool = False,
    progress: Progress | None = None,
    callbacks: Sequence[Any] = (),
    phase: Phase | None = None,
    checkpoint_every: float = 30.0,
    runs_alike: int | None = None,
    passed: PassedObjects = NOTHING_PASSED,
    network: ClientNetwork | None = None,
    parts: RunParts | None = None,
) -> Result:
    """Go on with a run that was stopped; the result is the uninterrupted run's, bit for bit."""
    run_dir, told = Path(run_dir), Listeners(progress, callbacks)
    directory.check_is_run(run_dir)
    if directory.is_finished(run_dir):
        return load(run_dir, trust=trust, passed=passed)
    with directory.opened(run_dir) as place, tempfile.TemporaryDirectory(prefix="fnrfl-") as scratch:
        found = verify(run_dir, trust=trust)
        header, *rounds = found.events_so_far
        passed.check_resumed(run_dir, found.config)
        connection = None if network is None else RunNetwork(network, header.get("run_at_nodes", ""))
        scaling = Scaling.from_json(header.get("scale"))
        built = build(found.config, Path(scratch), runs_alike, scaling, passed, connection, parts)
        _check_inputs(run_dir, header, built)
        state = None
        if found.saved is not None:
            state = checkpoint.load_checkpoint(run_dir, found.saved, built.engine.memory).to(built.net.device)
            check_shapes(run_dir, state, built.engine)
        logged = b"".join(found.log)
        files.write(run_dir / "events.jsonl", logged)
        best = None if found.saved is None else checkpoint.best_models(run_dir, found.saved)
        log = RunLog(built, checkpoint_every, place, header, rounds, state, logged, best=best)
        return _train(log, told, phase)


@isolated()
def load(run_dir: str | Path, *, trust: bool = False, passed: PassedObjects = NOTHING_PASSED) -> Result:
    """Load a finished run from disk; `trust` allows code that its config.toml names.

    Of a run that was given objects, the numbers are there without them; its model needs the model again.
    """
    run_dir = Path(run_dir)
    directory.check_is_run(run_dir)
    if not directory.is_finished(run_dir):
        raise ConfigError(f"{run_dir} is not finished. Go on with `fnrfl resume {shlex.quote(str(run_dir))}`.")
    found = verify(run_dir, trust=trust)
    config, saved = found.config, found.saved
    header, *rounds = found.events_so_far
    passed.check_resumed(run_dir, config)
    personalised = header["personalised"] if "personalised" in header else build_algorithm(config, passed).personalised
    if saved is None or not is_over(config, rounds, judge_of(personalised)):
        raise ConfigError(
            f"{run_dir} has a model and no checkpoint.json of its last round, so nothing shows that its files belong "
            "together. Put that file back, or run again into another directory."
        )
    checkpoint.check_files(run_dir, saved)
    weights = checkpoint.model(run_dir, saved)
    stored = models_on_disk(run_dir, saved) if personalised else None
    return Result(config, rounds, weights, Facts.from_json(header["data"]), run_dir, stored, passed)


@dataclass(eq=False)
class RunLog:
    """How far a run has come; if it has a directory, each round is logged there, with a checkpoint now and then."""

    built: Built
    checkpoint_every: float
    place: RunDir | None = None
    began: Event | None = None  # the first line of the log of a run that goes on
    rounds: list[Event] = field(default_factory=list)
    state: State | None = None  # of the checkpoint that it goes on from
    logged: bytes = b""  # what its log has so far
    saved_at: float = 0.0
    best: tuple[State, dict[int, Tree]] | None = None  # the models of the best round, if they will be kept

    @cached_property
    def header(self) -> Event:
        """The first line of the log."""
        return self.began or _log_header(self.built)

    @cached_property
    def _sha256(self) -> hashlib._Hash:
        return hashlib.sha256(self.logged or events.line(self.header))

    def facts(self) -> dict[str, Any]:
        """Return what a callback is told when the run begins."""
        read = json.loads(events.line(self.header))  # as a resumed run has it
        known = {key: value for key, value in read.items() if key != "config"}
        place = self.place
        where = {"run_dir": None, "folder": None} if place is None else {"run_dir": place.given, "folder": place.path}
        return known | where | {"rounds_done": len(self.rounds), "resumed": self.began is not None}

    @property
    def is_best(self) -> bool:
        """Whether the last round is the best so far, and its models are to be kept."""
        return self.best is not None and best_round(_judged(self.rounds, self.judge)) == len(self.rounds)

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done, or as many as the rule of the run allows."""
        return is_over(self.built.config, self.rounds, self.judge)

    @property
    def judge(self) -> str:
        """The number of a round that says which is the best."""
        return judge_of(self.built.algorithm.personalised)

    @property
    def personal(self) -> list[int]:
        """Clients whose memory has a model of their own."""
        return list(self.built.engine.memory) if self.built.algorithm.personalised else []

    def add(self, event: Event) -> None:
        """Add a round."""
        self.rounds[-1:] = in_their_round([*self.rounds[-1:], event])
        if self.place is not None:
            events.append_event(self.place.path / "events.jsonl", event)
            self._sha256.update(events.line(event))

    def save(self, state: State) -> None:
        """Write a checkpoint of what the run has come to."""
        if self.place is not None:
            files.sync(self.place.path / "events.jsonl")  # the log is never behind the checkpoint
            hashes = {"config": self.built.config.sha256, "log": self._sha256.hexdigest()}
            memory = self.built.engine.memory
            best = None if self.best is None or self.is_over else self.is_best
            checkpoint.save_checkpoint(self.place.path, len(self.rounds), state, memory, best=best, **hashes)
            self.place.settle()
            self.saved_at = time.monotonic()

    def finish(self, state: State) -> Result:
        """Return what came out after the last round; in a run directory, `model.safetensors` marks the run finished."""
        built, place, personalised = self.built, self.place, self.built.algorithm.personalised
        weights = aligned(moved(built.net.named(state.params, state.buffers), CPU))
        if place is None:
            stored = models_in_memory(state, built.engine.memory) if personalised else None
            return Result(built.config, self.rounds, weights, built.facts, None, stored, built.passed)
        ended = checkpoint.finish(place.path, weights)
        stored = models_on_disk(place.path, ended) if personalised else None
        return Result(built.config, self.rounds, weights, built.facts, place.given, stored, built.passed)


def _train(log: RunLog, told: Listeners, phase: Phase | None) -> Result:
    built, state, config, engine = log.built, log.state, log.built.config, log.built.engine
    metered = Metered(engine, phase or (lambda name: None), engine.clock)
    every = log.checkpoint_every if built.connection is None else 0.0  # clients on other machines keep two rounds
    with told.hearing(config, log.facts):
        with engine, nullcontext(lambda: None) if log.place is None else interruptible() as stop:
            if state is None:
                with method_errors(config, "before the first round"):
                    state = built.algorithm.init(built.net)
            engine.warm_up()
            log.saved_at = time.monotonic()
            while not log.is_over:
                state, event = _train_round(log, metered, state, len(log.rounds))
                log.add(event)
                last = log.is_over
                stopping = None if last else stop()  # a signal that comes later takes effect after the next round
                due = stopping or last or log.is_best or time.monotonic() - log.saved_at >= every
                if due:
                    log.save(state)
                try:
                    told.round(event)
                except BaseException:  # whoever listens may stop a run as well, such as a pipe that was closed
                    if not due:
                        log.save(state)
                    raise
                if stopping:
                    raise stopping
        result = log.finish(state)
    told.end(result)
    return result


def _train_round(log: RunLog, metered: Metered, state: State, t: int) -> tuple[State, Event]:
    built, config, engine = log.built, log.built.config, log.built.engine
    engine.begin(t)
    metered.begin()
    active = cohort(config, t)
    prepared, began = engine.seconds_preparing, engine.clock()
    with method_errors(config, f"in round {t + 1}"):
        state = built.algorithm.round(state, active, metered)
    check_state(state, engine.server.initial, built.algorithm, t)
    right, trained = engine.notes.pop(RIGHT, {}), engine.clock()
    metered.tell("evaluate")
    with model_errors(config, f"could not be scored after round {t + 1}"):
        state, scores = _handed_over(log, state, score_round(built, state, last=t + 1 == config.rounds))
        scores |= scores_from_sites(built, state, right, last=t + 1 == config.rounds or "ended" in scores)
    check_scores(scores, built.algorithm, t)
    crossed = ({"scale": built.scaling.bytes} if built.scaling is not None and t == 0 else {}) | metered.bytes
    seconds = metered.seconds | {"server": trained - began - sum(metered.seconds.values())}
    return state, {
        "round": t + 1,
        "rounds": config.rounds,
        "cohort": active.tolist(),
        "lr": engine.training.lr,
        **scores,
        "bytes": crossed,
        "bytes_up": sum(count["up"] for count in crossed.values()),
        "bytes_down": sum(count["down"] for count in crossed.values()),
        "seconds": seconds | {"evaluate": engine.clock() - trained},
        "seconds_preparing": engine.seconds_preparing - prepared,
        **for_json(engine.notes),
        "leaks": list(config.leaks_on),
    }


# -- its end -----------------------------------------------------------------------------------------------------------


def judge_of(personalised: bool) -> str:
    """Name the number of a round that the rule looks at: validation of the metric that such methods lead with."""
    return validation_metric(leading_metric([personalised]).name)


def is_over(config: RunConfig, rounds: Sequence[Event], judge: str) -> bool:
    """Whether a run that has these rounds has no more to do; `judge` is the number that its rule looks at."""
    rule = config.stop_rule
    return len(rounds) >= config.rounds or (rule.patience is not None and rule.ends(_judged(rounds, judge)))


def _judged(rounds: Sequence[Event], judge: str) -> list[float | None]:
    """Return what the rule looks at; where clients have no validation data of their own, what they have together."""
    return [event["validation_accuracy"] if event.get(judge) is None else event[judge] for event in rounds]


def _handed_over(log: RunLog, state: State, scores: Event) -> tuple[State, Event]:
    """Return the state after a round and its scores: after the last one, those of the model that the run keeps."""
    rule, rounds = log.built.config.stop_rule, [*log.rounds, scores]
    best = 0 if rule.patience is None else best_round(_judged(rounds, log.judge))
    if not is_over(log.built.config, rounds, log.judge):
        if rule.keeps_best and best == len(rounds):
            log.best = state, {client: log.built.engine.memory.get(client) for client in log.personal}
        return state, scores
    ended = []
    if len(rounds) < log.built.config.rounds:
        ended.append(f"{log.judge} has not been better since round {best}")
    if rule.keeps_best and best < len(rounds) and log.best is not None:
        ended.append(f"the model of round {best} is kept, the best by {log.judge}")
        state, memories = log.best
        for client in log.personal:
            log.built.engine.memory.put(client, memories.get(client, log.built.engine.memory.birth))
    if not ended:
        return state, scores
    words = f"after round {len(rounds)} of {log.built.config.rounds}: {'; '.join(ended)}"
    log_once([f'The run follows stop = "{rule}". It has ended {words}.'], logging.INFO)
    return state, score_round(log.built, state) | {"ended": "; ".join(ended)}


# -- its files ---------------------------------------------------------------------------------------------------------


def _log_header(built: Built) -> Event:
    """Return the first line of a run's log, with the keys of `RunHeader`."""
    device, machine = built.net.device, f"{platform.machine()}, {os.cpu_count()} cores"
    return {
        "config": built.config.as_dict(),
        "config_sha256": built.config.sha256,
        "leaks": list(built.config.leaks_on),
        "personalised": built.algorithm.personalised,
        "notices": list(built.notices),
        "versions": versions(),
        "git": _revision(),
        "device": f"{torch.cuda.get_device_name(device)}; {machine}" if device.type == "cuda" else machine,
        "data": built.facts.as_json(),
        "test_counts": torch.bincount(built.splits.test.y, minlength=built.dataset.num_classes).tolist(),
        **({"site_test_counts": sizes_of(tests).tolist()} if (tests := built.splits.site_tests) else {}),
        "partition": built.partition.sha256,
        "parameters": built.net.size,
        **({"given": given} if (given := built.passed.as_json(built.config)) else {}),
        **({"code_sha256": code} if (code := source_hashes(flat_config(built.config))) else {}),
        **({} if built.scaling is None else {"scale": built.scaling.as_json()}),
        **({} if built.connection is None else {"run_at_nodes": built.connection.run}),
        **({"own_metrics": {one.name: one.as_json() for one in built.metrics}} if built.metrics else {}),
    }


def _revision() -> str | None:
    """The git revision of the code, where it runs from a checkout."""
    try:
        # No timeout: it would poll by sleeping, which never ends where the clock is set to before 1970 by a library.
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def versions() -> dict[str, str]:
    """The versions that a result may depend on."""
    return {
        "fnrfl": fnrfl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


@dataclass(frozen=True)
class Verified:
    """What the files of a run directory say, once they have been found to belong together."""

    config: RunConfig
    saved: Index | None  # the last checkpoint
    log: list[bytes]  # the lines of the event log up to it
    events_so_far: list[Event]  # the same: the first line, about the run, and one event for each round


def verify(run_dir: Path, *, trust: bool) -> Verified:
    """Return what a run directory holds; refused if its files do not belong together."""
    found = read_origin(run_dir)
    config = loads(found.toml, origin=str(run_dir / "config.toml"), trust=trust, of_run=True)
    # Version 0.1.0 hashed the text; a hash of the values goes on being right when a later version adds a key.
    hashes = {config.sha256, hashlib.sha256(found.toml.encode()).hexdigest(), None}
    written = {"events.jsonl": found.header["config_sha256"], "checkpoint.json": found.saved and found.saved.config}
    for name, sha256 in written.items():
        if sha256 not in hashes:
            raise ConfigError(
                f"{run_dir / name} belongs to another config than the config.toml beside it. Put that file back as it "
                "was, or run again into another directory."
            )
    log = list(found.log())
    header, *rounds = events.read_events(run_dir / "events.jsonl", log)
    return Verified(config, found.saved, log, [header, *checked_rounds(run_dir, rounds, found.partition)])


def _check_inputs(run_dir: Path, began: Event, built: Built) -> None:
    """Refuse to go on with other data or another split than the run began with; say so of other versions."""
    then, now = began["versions"], versions()
    other = [name for name in now if then.get(name, now[name]) != now[name]]
    before, after = (", ".join(f"{name} {found[name]}" for name in other) for found in (then, now))
    by = f" It was begun with {before}; that may be why." if other else ""
    if began["data"]["sha256"] != built.dataset.checksum:
        raise ConfigError(
            f'dataset = "{built.config.dataset.name}" is not the data that {run_dir} was begun with.{by} Put it '
            "back as it was, or run again into another directory."
        )
    if began["partition"] != built.partition.sha256:
        raise ConfigError(
            f"The split among the clients is not the one that {run_dir} was begun with.{by} Run again into another "
            "directory."
        )
    if other:
        logger.warning(
            f"{run_dir} was begun with {before} and goes on with {after}: its numbers may differ by rounding from "
            "those of a run that was not interrupted."
        )
