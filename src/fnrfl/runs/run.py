"""One run: build, loop over rounds, write one event per round, checkpoint, and give back a Result."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fnrfl.config import RunConfig
from fnrfl.core.errors import ConfigError
from fnrfl.core.store import CPU
from fnrfl.core.trees import aligned, moved
from fnrfl.core.types import State
from fnrfl.data.datasets import Facts
from fnrfl.data.scaling import Scaling
from fnrfl.engines.metered import Metered
from fnrfl.process import isolated
from fnrfl.rundir import checkpoint, directory, events, files, places
from fnrfl.rundir.directory import RunDir
from fnrfl.rundir.events import Event
from fnrfl.rundir.interrupt import interruptible, stoppable
from fnrfl.runs import run_files
from fnrfl.runs.callbacks import Listeners, log_once
from fnrfl.runs.error_context import check_scores, check_shapes, check_state, for_json, method_errors, model_errors
from fnrfl.runs.passed import NOTHING_PASSED, PassedObjects
from fnrfl.runs.result import Result, models_in_memory, models_on_disk
from fnrfl.runs.scores import score_round
from fnrfl.runs.setup.build import Built, RunParts, build
from fnrfl.runs.setup.engine import ClientNetwork, RunNetwork
from fnrfl.runs.setup.method import build_algorithm, cohort

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
    with tempfile.TemporaryDirectory(prefix="fnrfl-") as scratch:
        connection = None if network is None else RunNetwork(network, uuid.uuid4().hex)
        checkpoint_every = checkpoint_every if network is None else 0.0
        built = build(config, Path(scratch), runs_alike, None, passed, connection, parts)
        log_once(built.notices)
        log_once(built.on_split, logging.INFO)  # how every run begins: a command shows it
        if out is None:
            return _train(built, RunWriter(None, checkpoint_every), Begun(), told, phase)
        with ExitStack() as stack:
            place, header = run_files.create_run_dir(stack, names, built, overwrite=overwrite)
            writer = RunWriter(place, checkpoint_every, events.line(header))
            return _train(built, writer, Begun(header), told, phase)


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
        found = run_files.verify(run_dir, trust=trust)
        header, *rounds = found.events_so_far
        passed.check_resumed(run_dir, found.config)
        connection = None if network is None else RunNetwork(network, header.get("run_at_nodes", ""))
        checkpoint_every = checkpoint_every if network is None else 0.0
        scaling = Scaling.from_json(header.get("scale"))
        built = build(found.config, Path(scratch), runs_alike, scaling, passed, connection, parts)
        run_files.refuse_changed_inputs(run_dir, header, built)
        run_files.warn_of_other_versions(run_dir, header)
        state = None
        if found.saved is not None:
            state = checkpoint.load_checkpoint(run_dir, found.saved, built.engine.memory).to(built.net.device)
            check_shapes(run_dir, state, built.engine)
        logged = b"".join(found.log)
        files.write(run_dir / "events.jsonl", logged)
        writer = RunWriter(place, checkpoint_every, logged)
        return _train(built, writer, Begun(header, rounds, state, True), told, phase)


@isolated()
def load(run_dir: str | Path, *, trust: bool = False, passed: PassedObjects = NOTHING_PASSED) -> Result:
    """Load a finished run from disk; `trust` allows code that its config.toml names.

    Of a run that was given objects, the numbers are there without them; its model needs the model again.
    """
    run_dir = Path(run_dir)
    directory.check_is_run(run_dir)
    if not directory.is_finished(run_dir):
        raise ConfigError(f"{run_dir} is not finished. Go on with `fnrfl resume {shlex.quote(str(run_dir))}`.")
    found = run_files.verify(run_dir, trust=trust)
    config, saved = found.config, found.saved
    if saved is None or saved.round != config.rounds:
        raise ConfigError(
            f"{run_dir} has a model and no checkpoint.json of its last round, so nothing shows that its files belong "
            "together. Put that file back, or run again into another directory."
        )
    passed.check_resumed(run_dir, config)
    header, *rounds = found.events_so_far
    checkpoint.check_files(run_dir, saved)
    weights = checkpoint.model(run_dir, saved)
    personalised = header["personalised"] if "personalised" in header else build_algorithm(config, passed).personalised
    stored = models_on_disk(run_dir, saved) if personalised else None
    return Result(config, rounds, weights, Facts.from_json(header["data"]), run_dir, stored, passed)


@dataclass(frozen=True)
class Begun:
    """How far a run has come: nothing yet, or what a checkpoint holds."""

    header: Event | None = None  # the first line of the log; None: there is no log
    rounds: list[Event] = field(default_factory=list)
    state: State | None = None
    resumed: bool = False

    def facts(self, built: Built, place: RunDir | None) -> dict[str, Any]:
        """Return what a callback is told when the run begins."""
        header = run_files.log_header(built) if self.header is None else self.header
        read = json.loads(events.line(header))  # as a resumed run has it
        known = {key: value for key, value in read.items() if key != "config"}
        where = {"run_dir": None, "folder": None} if place is None else {"run_dir": place.given, "folder": place.path}
        return known | where | {"rounds_done": len(self.rounds), "resumed": self.resumed}


class RunWriter:
    """Writes every round of a run into the log of its directory, if it has one, and a checkpoint from time to time."""

    def __init__(self, place: RunDir | None, checkpoint_every: float, logged: bytes = b"") -> None:
        """`logged` is what the event log has so far."""
        self.place, self.checkpoint_every = place, checkpoint_every
        self._logged = hashlib.sha256(logged)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count the seconds to the next checkpoint from now on."""
        self._saved = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self._saved >= self.checkpoint_every

    def write(self, event: Event) -> None:
        """Add a round to the log."""
        if self.place is not None:
            events.append_event(self.place.path / "events.jsonl", event)
            self._logged.update(events.line(event))

    def save(self, built: Built, rounds: list[Event], state: State) -> None:
        """Write a checkpoint of what the run has come to."""
        if self.place is None:
            return
        files.sync(self.place.path / "events.jsonl")  # the log is never behind the checkpoint
        hashes = {"config": built.config.sha256, "log": self._logged.hexdigest()}
        checkpoint.save_checkpoint(self.place.path, len(rounds), state, built.engine.memory, **hashes)
        self.place.settle()
        self.restart_clock()


def _train(built: Built, writer: RunWriter, begun: Begun, told: Listeners, phase: Phase | None) -> Result:
    """Train all rounds that are still to come."""
    config, engine = built.config, built.engine
    metered = Metered(engine, phase or (lambda name: None), engine.clock)
    rounds, state = list(begun.rounds), begun.state
    with told.hearing(config, lambda: begun.facts(built, writer.place)):
        with engine, nullcontext(lambda: None) if writer.place is None else interruptible() as stop:
            if state is None:
                with method_errors(config, "before the first round"):
                    state = built.algorithm.init(built.net)
            engine.warm_up()
            writer.restart_clock()
            for t in range(len(rounds), config.rounds):
                state, event = _train_round(built, metered, state, t)
                rounds.append(event)
                last = t + 1 == config.rounds
                stopping = None if last else stop()  # a signal that comes later takes effect after the next round
                due = stopping or last or writer.due
                writer.write(event)
                if due:
                    writer.save(built, rounds, state)
                try:
                    told.round(event)
                except BaseException:  # whoever listens may stop a run as well, such as a pipe that was closed
                    if not due:
                        writer.save(built, rounds, state)
                    raise
                if stopping:
                    raise stopping
        result = _result(built, writer.place, rounds, state)
    told.end(result)
    return result


def _result(built: Built, place: RunDir | None, rounds: list[Event], state: State) -> Result:
    """Return what came out after the last round; in a run directory, `model.safetensors` marks the run finished."""
    weights = aligned(moved(built.net.named(state.params, state.buffers), CPU))
    personalised = built.algorithm.personalised
    if place is None:
        stored = models_in_memory(state, built.engine.memory) if personalised else None
    else:
        ended = checkpoint.finish(place.path, weights)
        stored = models_on_disk(place.path, ended) if personalised else None
    return Result(
        built.config, rounds, weights, built.facts, None if place is None else place.given, stored, built.passed
    )


def _train_round(built: Built, metered: Metered, state: State, t: int) -> tuple[State, Event]:
    config, engine = built.config, built.engine
    engine.begin(t)
    metered.begin()
    active = cohort(config, t)
    prepared, began = engine.seconds_preparing, engine.clock()
    with method_errors(config, f"in round {t + 1}"):
        state = built.algorithm.round(state, active, metered)
    check_state(state, engine.server.initial, built.algorithm, t)
    trained = engine.clock()
    metered.tell("evaluate")
    with model_errors(config, f"could not be scored after round {t + 1}"):
        scores = score_round(built, state, last=t + 1 == config.rounds)
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
