"""What a run would cost, without running it: steps, bytes, memory and time.

Steps and bytes are exact (steps up to ten thousand rounds): one rehearsal of the method's own round, in which every
client answers at once with the model that it was given, is counted by the same meter as a run. Memory and time are
estimates from a few steps, thrown away. Nobody is slow or lost in a rehearsal: with client.stragglers steps are upper
bounds, with client.dropout bytes up too.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fnrfl.config import RunConfig
from fnrfl.core.feed import forward_batch
from fnrfl.core.rng import generator
from fnrfl.core.types import SERVER, Data, LocalTask, State, Training
from fnrfl.engines.metered import Metered
from fnrfl.engines.rehearsal import Rehearsal
from fnrfl.process import isolated
from fnrfl.runs.scores import score_model
from fnrfl.runs.setup.build import Built, build
from fnrfl.runs.setup.method import cohort, cohort_size

REHEARSED = 2  # rounds; every later one sends what the second does
COUNTED = 10_000  # rounds whose cohorts are drawn to count steps
TIMED_STEPS = 8  # steps that are timed, unless
SLOW = 0.1  # seconds go into a single one
GLANCE = 100  # examples of a first timed evaluation
COPIES = 8  # of a model that a client in training keeps in memory, roughly


@dataclass(frozen=True)
class Forecast:
    """The cost of a run; `config` is resolved, with the engine that it would use."""

    config: RunConfig
    parameters: int
    steps: dict[str, int]  # optimiser steps of all clients in all rounds, by phase
    sent: tuple[dict[str, int], ...]  # bytes "up" and "down" of the first rounds; all others send what the last does
    seconds: float  # an estimate
    memory: int | None  # bytes, an estimate; None where the system does not say
    notices: tuple[str, ...]

    def bytes_in_all(self, way: str) -> int:
        """Return the bytes "up" or "down" of all rounds."""
        return sum(sent[way] for sent in self.sent) + (self.config.rounds - len(self.sent)) * self.sent[-1][way]

    def summary(self) -> dict[str, Any]:
        """Return the forecast as one JSON object."""
        engine = self.config.engine
        return {
            "engine": engine.name,
            "threads": engine.threads,
            "clients_at_once": engine.clients_at_once,
            "parameters": self.parameters,
            "rounds": self.config.rounds,
            "steps": sum(self.steps.values()),
            "steps_by_phase": self.steps,
            **{f"bytes_{way}": self.bytes_in_all(way) for way in ("up", "down")},
            **{f"bytes_{way}_per_round": self.sent[-1][way] for way in ("up", "down")},
            "memory_estimate": self.memory,
            "seconds_estimate": self.seconds,
            "leaks": list(self.config.leaks_on),
            "notices": list(self.notices),
            "config": self.config.to_toml(),
        }


@isolated()
def forecast(config: RunConfig) -> Forecast:
    """Build what a run would build, and count; write nothing, and keep nothing that is trained."""
    asked, gpus = config.engine, config.network.gpus
    if asked.name == "ray":  # none is started: its actors do what the loop does, those with GPUs in any precision
        timed = "float32" if gpus and asked.precision in ("tf32", "bf16") else asked.precision
        config = replace(config, engine=replace(asked, name="loop", precision=timed))
    with tempfile.TemporaryDirectory(prefix="fnrfl-") as scratch:
        built = build(config, Path(scratch))
        with built.engine:
            before = _peak()
            rehearsal = CountedRehearsal(built)
            sent = rehearsal.bytes()
            steps = rehearsal.steps()
            seconds = _seconds(built, rehearsal, steps)
    memory, chosen, notices = _memory(built, before, _peak()), built.config, (*built.notices, *built.on_split)
    if asked.name == "ray":
        precision = chosen.engine.precision if asked.precision == "auto" else asked.precision
        chosen = replace(chosen, engine=replace(chosen.engine, name="ray", precision=precision))
        if gpus:
            notices += (f"network.gpus = {gpus:g}: Ray actors train on GPUs, and the time is that of this CPU.",)
    return Forecast(chosen, built.net.size, steps, tuple(sent), seconds, memory, notices)


# -- steps and bytes ---------------------------------------------------------------------------------------------------


class CountedRehearsal(Rehearsal):
    """A rehearsal of a run's first rounds, which counts bytes and steps."""

    def __init__(self, built: Built) -> None:
        options, width = built.config.client, int(built.config.engine.clients_at_once)
        super().__init__(built.algorithm, built.net, built.pool, options, seed=built.config.seed, width=width)
        self.built = built
        self._counted: dict[tuple[int, Data, Training], int] = {}

    def bytes(self) -> list[dict[str, int]]:
        """Bytes up and down of the first rounds."""
        built, metered, sent = self.built, Metered(self), []
        once = [] if built.scaling is None else [built.scaling.bytes]
        state = built.algorithm.init(built.net)
        for t in range(min(REHEARSED, built.config.rounds)):
            metered.begin()
            self.begin(t)
            state = built.algorithm.round(state, cohort(built.config, t), metered)
            crossed = [*metered.bytes.values(), *(once if t == 0 else [])]
            sent.append({way: sum(count[way] for count in crossed) for way in ("up", "down")})
        return sent

    def steps(self) -> dict[str, int]:
        """Steps of all rounds by phase; who refines is decided by accuracy, but how many do is not.

        Where everybody takes part, one round is like the other; of very many, the first ones stand for all.
        """
        total: Counter[str] = Counter()
        config = self.built.config
        counted = 1 if cohort_size(config) == config.clients else min(config.rounds, COUNTED)
        for t in range(counted):
            active = cohort(config, t)
            for clients, task in self.tasks:
                federated = task.data == "private" and int(clients[0]) != SERVER
                who = active[: len(clients)] if federated else clients
                total[task.purpose] += sum(self.steps_of(client, task) for client in who.tolist())
        return {purpose: steps * config.rounds // counted for purpose, steps in total.items() if steps}

    def steps_of(self, client: int, task: LocalTask) -> int:
        """Count the steps that a task takes a client."""
        key = (client if task.data == "private" else -1, task.data, training := task.training or self.training)
        if key not in self._counted:
            draw = lambda name: generator(0, "rehearsal", name)  # noqa: E731
            self._counted[key] = self.built.pool.plan(client, task.data, training, draw).steps
        return self._counted[key]


# -- time --------------------------------------------------------------------------------------------------------------


def _seconds(built: Built, rehearsal: CountedRehearsal, steps: dict[str, int]) -> float:
    """Training by phase, then the forward passes of probes and evaluation, all rounds."""
    seconds = 0.0
    for clients, task in rehearsal.tasks:
        if steps.get(task.purpose):
            seconds += steps[task.purpose] * _seconds_per_step(built, clients, task)
    splits = built.splits
    copies = 1 if built.partition.noise is None else built.config.clients + 1
    looked_at = copies * (len(splits.test) + len(splits.validation))
    for clients, _, data, _ in rehearsal.probes:
        looked_at += len(clients) * len(splits.ranking if data == "ranking" else splits.public)
    return seconds + built.config.rounds * looked_at * _seconds_per_look(built)


def _seconds_per_step(built: Built, clients: Tensor, task: LocalTask) -> float:
    """Seconds of a step of one client, timed over clients that work together."""
    config, engine = built.config.engine, built.engine
    width = int(config.threads if config.name == "loop" else config.clients_at_once)
    request = engine.request(clients[:width], task.rows(slice(0, width)))

    def timed(steps: int) -> float:
        began = time.perf_counter()
        replies = [reply.replies for reply in engine.clients.train(replace(request, max_steps=steps))]
        return (time.perf_counter() - began) / sum(int(reply.steps.sum()) for reply in replies)

    if config.name != "loop" or engine.server.runner.recorder is not None:
        timed(1)  # the first vmap of a process takes seconds, and recording a step takes a while
    return _least(timed, 1, TIMED_STEPS)


def _seconds_per_look(built: Built) -> float:
    state, test = State(*built.net.flatten()), built.splits.test

    def timed(count: int) -> float:
        x, y = test.x[:count], test.y[:count]
        began = time.perf_counter()
        score_model(built.net, state, x, y, built.dataset.num_classes)
        return (time.perf_counter() - began) / len(y)

    return _least(timed, GLANCE, forward_batch(built.net.device))


def _least(timed: Callable[[int], float], few: int, many: int) -> float:
    """Return the least seconds for one of `many` of something; where that would take long, for one of a few."""
    once = timed(few)
    return min(once, timed(few)) if few * once > SLOW else min(timed(many) for _ in range(3))


# -- memory ------------------------------------------------------------------------------------------------------------


def _peak() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _memory(built: Built, before: int | None, after: int | None) -> int | None:
    """Estimate memory: what there was before, models of clients trained together, what clients remember."""
    if before is None or after is None:
        return None
    config, at_once = built.config, int(built.config.engine.clients_at_once)
    used = max(after, before + at_once * COPIES * built.net.flatten()[0].nbytes)
    if at_once < cohort_size(config):  # memories are on disk
        return used
    return used + config.clients * sum(tensor.nbytes for tensor in built.algorithm.client_state(built.net).values())
