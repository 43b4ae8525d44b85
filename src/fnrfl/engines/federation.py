"""The server's side of an engine: it draws who is slow and who is lost, sends requests, and folds replies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.algorithm import Objective
from fnrfl.core.engine import Engine, Probe, Step, run_steps
from fnrfl.core.errors import ClientError, MissingClients, gpu_out_of_memory
from fnrfl.core.fingerprint import content
from fnrfl.core.messages import ClientSide, MeasureRequest, TrainReply, TrainRequest, rows_without
from fnrfl.core.net import Net
from fnrfl.core.options import NetworkOptions
from fnrfl.core.rng import generator
from fnrfl.core.store import ClientMemory
from fnrfl.core.training import ClientOptions, Training
from fnrfl.core.trees import Tree
from fnrfl.core.values import SERVER, Data, LocalTask, Replies, State
from fnrfl.engines.trainer import Trainer

T = TypeVar("T")


class Federation(Engine):
    """An engine: the clients behind requests and replies, and a trainer for the server's own work."""

    def __init__(
        self,
        clients: ClientSide,
        server: Trainer,
        options: ClientOptions,
        *,
        seed: int = 0,
        rounds: int = 1,
        network: NetworkOptions | None = None,
        simulated: bool = True,
        workers: AbstractContextManager[object] | None = None,
    ) -> None:
        """`network` says what becomes of clients that do not answer; `simulated`, whether the log can look at them.

        `workers` are there from the first round to the last.
        """
        self._workers = workers or nullcontext()
        self.network, self.simulated = network or NetworkOptions(), simulated
        self.clients, self.server, self.seed, self.rounds = clients, server, seed, rounds
        self.options = options
        self.net, self.num_classes = server.net, server.feed.num_classes
        self.examples = server.feed.examples.to(server.net.device)
        self.begin(0)

    def begin(self, t: int) -> None:
        """Start round t."""
        self.round = t
        self.training: Training = self.options.in_round(t)
        self.notes: dict[str, Any] = {}

    def note(self, **facts: object) -> None:
        self.notes.update(facts)

    # -- the clients' work --------------------------------------------------------------------------------------------
    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        slow = set[int]()
        if task.is_private_training:
            slow = self.drawn_clients(cohort, self.options.stragglers, "stragglers")
            lost = self.drawn_clients(cohort, self.options.dropout, "dropout")
            self._note_clients("stragglers", slow)
            self._note_clients("dropped", lost)
            rows = rows_without(lost, cohort)
            if rows is not None:  # lost clients are as if they had not been asked
                cohort, task = cohort[rows], task.rows(rows)
        missing: dict[int, str] = {}
        for reply in self.clients.train(self.request(cohort, task, slow)):
            self._check_finite(reply, task.purpose)
            missing |= reply.missing
            self._check_missing(missing, len(cohort), task.purpose, keep=task.on_missing == "keep")
            self.notes.update(reply.notes)
            if len(reply.replies.clients):
                yield reply.replies
            del reply

    def request(self, cohort: Tensor, task: LocalTask, slow: Set[int] = frozenset()) -> TrainRequest:
        """A task as it is sent to a cohort. Who is slow does one epoch at least, and not all."""
        training, clients = task.training or self.training, cohort.tolist()
        epochs = [training.epochs] * len(clients)
        if training.epochs > 1:
            for m, client in enumerate(clients):
                if client in slow:
                    stream = generator(self.seed, self.round, client, "straggler")
                    epochs[m] = int(torch.randint(1, training.epochs, (), generator=stream))
        return TrainRequest(clients, self.round, task, training, epochs)

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public", at: State | None = None) -> Tree:
        try:
            return self.clients.measure(MeasureRequest(cohort.tolist(), self.round, probe, data, at))
        except MissingClients as gone:
            self._check_missing(gone.reasons, len(cohort), "measure")
            raise

    def score_at_sites(self, model: Callable[[int], State]) -> dict[int, int]:
        """Return how many of its test examples each site answers right by the model for it."""
        there: Any = self.clients
        right, missing = there.score(self.round, model)
        self._check_missing(missing, len(right) + len(missing), "score")
        return dict(right)

    def observe(self, cohort: Tensor, probe: Probe, *, data: Data = "public") -> Tree:
        return self.measure(cohort, probe, data=data)  # the simulation can look; a real server could not

    def observe_models(self, cohort: Tensor, question: Callable[[Tensor], T]) -> T:
        training = replace(self.training, epochs=0)  # no step: each client sends the model that it holds
        task = LocalTask(Objective(), "observe", training=training, role="extra", remember=False)
        return question(torch.cat([reply.replies.params for reply in self.clients.train(self.request(cohort, task))]))

    def drawn_clients(self, cohort: Tensor, share: float, purpose: str) -> set[int]:
        """floor(share * m) clients of a cohort, whatever its order, but not all."""
        drawn = num_drawn(len(cohort), share)
        if drawn < 1:  # as a rule: a stream takes a percent of a small round
            return set()
        order = torch.randperm(len(cohort), generator=generator(self.seed, self.round, purpose))
        return set(cohort.sort().values[order[:drawn]].tolist())

    def _check_finite(self, reply: TrainReply, purpose: str) -> None:
        """Clients without finite numbers are an error, or left out and noted, as configured."""
        if reply.not_finite and self.options.nonfinite == "fail":
            client, step = next(iter(reply.not_finite.items()))
            reason = (
                "the loss or the model is no longer finite. Lower the learning rate, or set client.nonfinite = skip to "
                "leave such clients out of the round."
            )
            raise ClientError(reason, client=client, round=self.round + 1, stage=purpose, step=step)
        self._note_clients("skipped", set(reply.not_finite))

    def _check_missing(self, missing: dict[int, str], asked: int, purpose: str, *, keep: bool = False) -> None:
        """Clients that have not answered are an error, or the round goes on without them and the log says so."""
        answered, network = asked - len(missing), self.network
        for client, reason in missing.items():
            if not keep and not network.may_proceed(answered, asked):
                few = f"{answered} of {asked} clients have answered, and network.min_share = {network.min_share:g}."
                reason = f"{reason} {few}" if network.on_missing == "proceed" else reason
                raise ClientError(reason, client=client, round=self.round + 1, stage=purpose)
            self.notes.setdefault("missing", {})[client] = f"{purpose}: {reason}"

    def _note_clients(self, name: str, clients: set[int]) -> None:
        if clients:
            self.notes[name] = sorted({*self.notes.get(name, ()), *clients})

    # -- the server's own work ----------------------------------------------------------------------------------------
    def fit(self, task: LocalTask) -> State:
        training = task.training or self.training
        request = TrainRequest([SERVER], self.round, replace(task, remember=False), training, [training.epochs])
        return self._retry_without_programs(lambda: self.server.fit(request))

    def generator(self, *key: object) -> torch.Generator:
        return generator(self.seed, self.round, "server", *key)

    def repeat(self, key: Hashable, step: Step, carry: Any, fixed: Any, turns: Any) -> Tensor:
        recorder = self.server.runner.recorder
        with self.server.pool.layer_precision():
            if recorder is None:
                return run_steps(step, carry, fixed, turns)
            constants, each = trees.leaves((carry, fixed)), trees.leaves(turns)
            shapes = tuple((t.shape, t.stride(), t.dtype) for t in constants) + tuple(t.shape[1:] for t in each)
            contents = tuple(content(t) for t in trees.leaves(self.net.scale))  # the step may hold them
            example = lambda: (step, carry, fixed, trees.rows(turns, 0))  # noqa: E731
            program = self._retry_without_programs(
                lambda: recorder.program((key, shapes, contents), example, len(each[0]) * self.rounds)
            )
            return run_steps(step, carry, fixed, turns) if program is None else program(carry, fixed, turns)

    def each(self, count: int, work: Callable[[Net, int], T]) -> list[T]:
        """`work(net, i)` for every i below count, side by side, each with a net that nobody else uses."""
        return self.server.pool.each(count, lambda worker, i: work(worker.net, i))

    def pool(self, data: Data) -> tuple[Tensor, Tensor]:
        return self.server.feed.all(data)

    def _retry_without_programs(self, work: Callable[[], T]) -> T:
        """What the server does alone: without the other programs, if it does not fit in memory beside them."""
        try:
            return work()
        except RuntimeError as error:
            if not gpu_out_of_memory(error):
                raise
        self.server.runner.free_programs(self.server.pool)
        return work()

    # -- a run's edges ------------------------------------------------------------------------------------------------
    @property
    def memory(self) -> ClientMemory:
        """What clients remember between rounds."""
        return self.clients.memory

    @property
    def seconds_preparing(self) -> float:
        """Seconds spent on recording, compiling and capturing steps."""
        recorder = self.server.runner.recorder
        return 0.0 if recorder is None else recorder.seconds

    def clock(self) -> float:
        """Seconds of work that is done, from any time on, without those of preparing."""
        self.server.pool.wait()
        return time.perf_counter() - self.seconds_preparing

    def warm_up(self) -> None:
        """Pay now what the first step would pay otherwise, so that a round's seconds are the round's."""
        self.server.runner.warm_up()

    def __enter__(self) -> Federation:
        self._workers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Let the threads and other workers go; whoever is interrupted does not wait for threads."""
        self._workers.__exit__(None, None, None)
        self.server.pool.close(wait=kind is None or issubclass(kind, Exception))


def num_drawn(cohort: int, share: float) -> int:
    """floor(share * m) of m clients, but not all: somebody is left."""
    return min(math.floor(cohort * share + 1e-9), cohort - 1)
