"""What every engine in this process shares: chunks, memory, held models, and errors that name the client."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fnrfl.core import optim
from fnrfl.core.algorithm import Objective
from fnrfl.core.errors import ClientError, FnrflError, out_of_memory
from fnrfl.core.isolation import as_worker, one_intra_op_thread
from fnrfl.core.net import Net
from fnrfl.core.rng import generator
from fnrfl.core.step import Carry
from fnrfl.core.store import ClientStore
from fnrfl.core.types import (
    SERVER,
    Batch,
    Data,
    Engine,
    Feed,
    LocalTask,
    Out,
    Part,
    Probe,
    Replies,
    Shapes,
    State,
    Step,
    Stream,
    Training,
    Tree,
    in_turn,
)
from fnrfl.engines.job import Job, model_row, moved, row
from fnrfl.engines.trace import Steps, Tracer, leaves

T = TypeVar("T")


def num_chosen(cohort: int, share: float) -> int:
    """floor(share * m) of m clients, but not all: somebody is left."""
    return min(math.floor(cohort * share + 1e-9), cohort - 1)


class InProcess(Engine):
    """Clients in this process, `clients_at_once` at a time. A subclass says how a chunk is trained.

    `threads` clients work side by side, each with a module of its own: `functional_call` swaps parameters inside the
    module, so two threads that shared one would silently mix clients up. Results do not depend on the number.
    """

    gathered = 4 << 20  # bytes of examples that are gathered at once: many steps of a small net, one of a large

    def __init__(
        self,
        net: Net,
        feed: Feed,
        training: Training,
        *,
        seed: int = 0,
        client_state: Tree | None = None,
        clients_at_once: int | None = None,
        threads: int = 1,
        nonfinite: Literal["fail", "skip"] = "fail",
        folder: Path | None = None,
        trace: bool = False,
        stragglers: float = 0.0,
        dropout: float = 0.0,
        rounds: int = 1,
        participation: float = 1.0,
        home: torch.device | None = None,
    ) -> None:
        self.net, self.feed, self.seed = net, feed, seed
        self.clients_at_once, self.nonfinite = clients_at_once, nonfinite
        self.num_classes, self.examples = feed.num_classes, feed.examples.to(net.device)
        self.stragglers, self.dropout, self.rounds, self.participation = stragglers, dropout, rounds, participation
        self.sizes = [int(n) for n in feed.examples.tolist()]
        self._training = training
        self.store = ClientStore(client_state or {}, folder and _made(folder / "memory"), net.device, home)
        self.held = ClientStore({}, folder and _made(folder / "held"), net.device)
        self.tracer = self._tracer() if trace else None
        self.initial = State(*net.flatten())
        self._finite_buffers = {
            k for k, v in self.initial.buffers.items() if v.is_floating_point() and bool(v.isfinite().all())
        }
        self._threads = threads
        self._nets: SimpleQueue[Net] = SimpleQueue()
        for i in range(threads):
            self._nets.put(self._copy(i))
        self._pool = ThreadPoolExecutor(threads, initializer=as_worker)
        self.begin(0)

    @property
    def seconds_preparing(self) -> float:
        """Seconds spent on recording, compiling and capturing steps."""
        return 0.0 if self.tracer is None else self.tracer.seconds

    def clock(self) -> float:
        """Seconds, from any time on, without those of preparing."""
        return time.perf_counter() - self.seconds_preparing

    def _tracer(self) -> Tracer:
        return Tracer()

    def _copy(self, i: int) -> Net:
        """The net of thread i."""
        return self.net.copy()

    def warm_up(self) -> None:
        """Pay now what the first step would pay otherwise, so that a round's seconds are the round's."""

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Let the threads go; whoever is interrupted does not wait for them."""
        self._pool.shutdown(wait=kind is None or issubclass(kind, Exception), cancel_futures=True)

    def begin(self, t: int) -> None:
        """Start round t."""
        self.round = t
        self.training = self._training.in_round(t)
        self.notes: dict[str, Any] = {}
        self.slow: set[int] = set()  # of the last private training
        self.lost: set[int] = set()
        self.held.clear()

    def note(self, **facts: object) -> None:
        self.notes.update(facts)

    # -- the two verbs ------------------------------------------------------------------------------------------------
    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        if task.purpose == "local":
            self.slow, self.lost = self._some(cohort, self.stragglers), self._some(cohort, self.dropout, "dropout")
            for what, some in (("stragglers", self.slow), ("dropped", self.lost)):
                if some:
                    self.notes[what] = sorted({*self.notes.get(what, ()), *some})
        first = 0
        while first < len(cohort):
            where = slice(first, first + (self.clients_at_once or len(cohort)))
            with torch.no_grad(), one_intra_op_thread():
                replies = self._fitting(cohort[where], task.rows(where))
            if replies is None:
                continue  # the same again, with fewer at once
            first = where.stop
            if len(replies.clients):  # not if all were left out
                yield replies

    def _fitting(self, cohort: Tensor, task: LocalTask) -> Replies | None:
        """A chunk's replies; None if it did not fit in memory and `clients_at_once` is less now."""
        return self._chunk(cohort, task)

    def _some(self, cohort: Tensor, share: float, what: str = "stragglers") -> set[int]:
        """floor(share * m) clients of a cohort, whatever its order, but not all."""
        count = num_chosen(len(cohort), share)
        order = torch.randperm(len(cohort), generator=generator(self.seed, self.round, what))
        return set(cohort.sort().values[order[:count]].tolist())

    def _epochs(self, client: int, task: LocalTask, epochs: int) -> int:
        """A straggler does a random part of the epochs, one at least and not all."""
        if task.purpose != "local" or client not in self.slow or epochs < 2:
            return epochs
        stream = generator(self.seed, self.round, client, "straggler")
        return int(torch.randint(1, epochs, (), generator=stream))

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public", at: State | None = None) -> Tree:
        clients = cohort.tolist()

        def ask(net: Net, m: int) -> Tree:
            model = self._asked(clients[m], m, probe, at)
            total: Tree = {}
            for batch in self._feed(net).whole(clients[m], data, self._stream(clients[m], "measure")):
                if model is None:
                    part = probe(Out(batch.y[:, None][:, :0], batch.y[:, None][:, :0], batch.y[:, None][:, :0]), batch)
                else:
                    held, x = model.to(net.device), net.laid_out(batch.x)
                    part = probe(net.look(held.params, held.buffers, x), batch)
                total = {k: total[k] + v if k in total else v for k, v in part.items()}
            return probe.finish(total)

        with torch.no_grad(), one_intra_op_thread():
            rows = self.each(len(clients), ask)
        return {k: torch.stack([row[k].to(self.net.device) for row in rows]) for k in rows[0]}

    def _feed(self, net: Net) -> Feed:
        """The examples where a net is."""
        return self.feed

    def observe(self, cohort: Tensor, probe: Probe, *, data: Data = "public") -> Tree:
        return self.measure(cohort, probe, data=data)  # everybody is in this process

    def _asked(self, client: int, m: int, probe: Probe, at: State | None) -> State | None:
        """The model that a probe looks at."""
        if not probe.asks_model:
            return None
        if at is None:
            return self._held(client)
        return at if at.params.ndim == 1 else model_row(at, m)

    # -- the server's own ---------------------------------------------------------------------------------------------
    def fit(self, task: LocalTask) -> State:
        with torch.no_grad(), one_intra_op_thread():
            job = self._job([SERVER], replace(task, remember=False))
            losses = self._run(job)
        if not (losses[0].isfinite().all() and job.carry.params.isfinite().all()):
            raise FnrflError(
                f"The server's model is no longer finite (round {self.round + 1}, {task.purpose}). Lower the learning "
                "rate of what it trains with."
            )
        return model_row(State(job.carry.params, job.carry.buffers), 0)

    def generator(self, *key: object) -> torch.Generator:
        return generator(self.seed, self.round, "server", *key)

    def repeat(self, key: Hashable, step: Step, same: Sequence[Part], turns: Sequence[Part]) -> Tensor:
        if self.tracer is None:
            return in_turn(step, same, turns)
        shapes = tuple((t.shape, t.stride(), t.dtype) for t in leaves(same)) + tuple(t.shape[1:] for t in leaves(turns))
        first = [row(part, 0) if isinstance(part, dict) else part[0] for part in turns]
        program = self._recorded((key, shapes), lambda: (step, same, first), len(leaves(turns)[0]) * self.rounds)
        if program is None:
            return in_turn(step, same, turns)
        return program(leaves(same), leaves(turns))

    def _recorded(self, *what: Any) -> Steps | None:
        return None if self.tracer is None else self.tracer.program(*what)

    def pool(self, data: Data) -> tuple[Tensor, Tensor]:
        return self.feed.all(data)

    # -- what a subclass provides -------------------------------------------------------------------------------------
    def _run(self, job: Job) -> list[Tensor]:
        """Take all steps of a job, changing its carry; returns the losses of each client, [steps]."""
        raise NotImplementedError

    def each(self, count: int, work: Callable[[Net, int], T]) -> list[T]:
        """`work(net, m)` for every m below count, side by side, each with a net that nobody else uses."""

        def with_a_net(m: int) -> T:
            net = self._nets.get()
            try:
                with torch.no_grad():  # a thread's own setting
                    return work(net, m)
            finally:
                self._nets.put(net)

        if count == 1 or self._threads == 1:
            with one_intra_op_thread():
                return [with_a_net(m) for m in range(count)]
        begun = [self._pool.submit(with_a_net, m) for m in range(count)]
        for late in wait(begun, return_when=FIRST_EXCEPTION).not_done:
            late.cancel()
        wait(begun)  # nobody is at work any more when an error goes on
        return [each.result() for each in begun if not each.cancelled()]

    def _example(self, job: Job, rows: Sequence[int], size: int, feed: Feed) -> Batch:
        """A batch of some clients, [M, size, ...], that takes nothing from their streams."""
        index = torch.stack([job.plans[m].order[:size] for m in rows])
        x, y = feed.take(job.task.data, index)
        stream = generator(0, "example")
        shapes = self._noise_shapes(job.task.objective, index.shape[1])
        drawn = {k: torch.rand(len(rows), *shape, generator=stream) for k, shape in shapes.items()}
        noise = {k: v.to(x.device, self.net.dtype) for k, v in drawn.items()}  # examples may be whole numbers
        return Batch(x, y, index.to(x.device), noise)

    def _stretches(self, job: Job, first: int, last: int, rows: int) -> Iterator[tuple[int, int]]:
        """(first, last) cut so that the batches of some rows are not too large to be gathered at once."""
        bytes_a_step = rows * job.training.batch * math.prod(self.net.input_shape) * self.net.dtype.itemsize
        most = max(1, self.gathered // bytes_a_step)
        for a in range(first, last, most):
            yield a, min(a + most, last)

    # -- a chunk of the cohort ----------------------------------------------------------------------------------------
    def _chunk(self, cohort: Tensor, task: LocalTask) -> Replies:
        job = self._job(cohort.tolist(), task)
        losses = self._run(job)
        end = State(job.carry.params, job.carry.buffers)
        steps = job.steps
        travel = {n: optim.travel(job.training, n) for n in set(steps)}
        replies = Replies(
            clients=cohort,
            examples=self.examples[cohort],
            steps=torch.tensor(steps, device=end.params.device),
            travel=end.params.new_tensor([travel[n] for n in steps]),
            loss=torch.stack([row.mean() if len(row) else row.new_zeros(()) for row in losses]),
            trained=end.params,
            params=end.params,
            buffers=end.buffers,
            extras={},
        )
        extras, kept = self._finish(job, end, replies.travel)
        replies = replace(replies, extras={k: torch.stack(rows) for k, rows in extras.items()})
        good = self._finite(job, losses, replies.loss)
        if task.purpose == "local" and self.lost:  # as if they had not been asked, but for the bytes down
            good = [m for m in good if job.clients[m] not in self.lost]
        replies = replies if len(good) == len(cohort) else replies.pick(torch.tensor(good, dtype=torch.int64))
        clients = [job.clients[m] for m in good]
        names = {k: [rows[m] for m in good] for k, rows in kept.items()} if task.remember else {}
        remembered = self.store.renewed(clients, names)
        models = [{"params": end.params[m]} | {f"/{k}": v[m] for k, v in end.buffers.items()} for m in good]
        held = [self.held.copied(model) for model in models] if task.hold else []
        # From here on nothing can fail for want of memory, and who has to begin again has changed nothing.
        for client, memory in remembered:
            self.store.keep(client, memory)
        for client, model in zip(clients, held, strict=False):
            self.held.keep(client, model)
        return replies

    def _job(self, clients: list[int], task: LocalTask) -> Job:
        training, device = task.training or self.training, self.net.device
        task = replace(task, shared=moved(task.shared, device))
        own = (self.store.read(clients) if task.remember else {}) | moved(task.own, device)
        start = self._start(clients, task.start)
        if type(task.objective).begin is not Objective.begin:
            begun = [task.objective.begin(model_row(start, m), row(own, m)) for m in range(len(clients))]
            start = State(
                torch.stack([s.params for s in begun]),
                {k: torch.stack([s.buffers[k] for s in begun]) for k in start.buffers},
            )
        streams = [self._stream(client, task.purpose) for client in clients]
        return Job(
            clients,
            task,
            training,
            start,
            own,
            [
                self.feed.plan(c, task.data, replace(training, epochs=self._epochs(c, task, training.epochs)), s)
                for c, s in zip(clients, streams, strict=True)
            ],
            [self._draw(task.objective, stream) for stream in streams],
            Carry.new(training, start.params, start.buffers),
            start.params.new_tensor(training.lr),
        )

    def _start(self, clients: list[int], start: State | None) -> State:
        if start is None:
            rows = [self._held(client) for client in clients]
            buffers = {k: torch.stack([row.buffers[k] for row in rows]) for k in rows[0].buffers}
            return State(torch.stack([row.params for row in rows]), buffers)
        start = start.to(self.net.device)
        if start.params.ndim == 2:
            return start
        M = len(clients)
        return State(start.params.expand(M, -1), {k: v.expand(M, *v.shape) for k, v in start.buffers.items()})

    def _held(self, client: int) -> State:
        if client not in self.held:  # nothing yet: the model that everybody knows from the start
            return self.initial
        model = self.held.get(client)
        return State(model["params"], {k[1:]: v for k, v in model.items() if k != "params"})

    def _stream(self, client: int, purpose: str) -> Stream:
        return lambda name: generator(self.seed, self.round, client, purpose, name)

    def _noise_shapes(self, objective: Objective, batch: int) -> Shapes:
        """Uniform numbers that a step needs: the objective's and the dropout masks'."""
        return objective.noise(batch) | {k: (batch, *shape) for k, shape in self.net.drop_shapes.items()}

    def _draw(self, objective: Objective, stream: Stream) -> Callable[[int, int], Tree]:
        """One stream per name, so that what an objective draws cannot move the dropout masks."""
        streams: dict[str, torch.Generator] = {}

        def draw(steps: int, batch: int) -> Tree:
            shapes = self._noise_shapes(objective, batch)
            for name in shapes.keys() - streams.keys():
                streams[name] = stream(name)
            # torch.rand takes its numbers one by one, so many steps at once get what they would get in turn.
            return {
                k: torch.rand(steps, *shape, generator=streams[k]).to(self.net.dtype) for k, shape in shapes.items()
            }

        return draw

    def _finish(self, job: Job, end: State, travel: Tensor) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
        extras: dict[str, list[Tensor]] = {}
        kept: dict[str, list[Tensor]] = {}
        if type(job.task.objective).finish is Objective.finish:
            return extras, kept
        for m, client in enumerate(job.clients):
            sent, remembered = job.task.objective.finish(
                model_row(job.start, m),
                model_row(end, m),
                travel[m],
                self.examples[client],
                job.task.shared,
                row(job.own, m),
            )
            for into, values in ((extras, sent), (kept, remembered)):
                for name, value in values.items():
                    into.setdefault(name, []).append(value)
        return extras, kept

    def _finite(self, job: Job, losses: Sequence[Tensor], mean: Tensor) -> list[int]:
        """Rows whose losses and parameters are finite; the others are an error or left out, as configured."""
        fine_rows = mean.isfinite() & job.carry.params.sum(1).isfinite()
        for name, buffer in job.carry.buffers.items():
            if name in self._finite_buffers:
                fine_rows &= buffer.reshape(len(buffer), -1).isfinite().all(1)
        finite = fine_rows.tolist()
        for m, fine in enumerate(finite):
            if fine:
                continue
            if self.nonfinite == "fail":
                bad = (~losses[m].isfinite()).nonzero()
                raise ClientError(
                    "the loss or the model is no longer finite. Lower the learning rate, or set client.nonfinite = "
                    "skip to leave such clients out of the round.",
                    client=job.clients[m],
                    round=self.round + 1,
                    stage=job.task.purpose,
                    step=int(bad[0]) if len(bad) else len(losses[m]) - 1,
                )
            self.notes["skipped"] = sorted({*self.notes.get("skipped", ()), job.clients[m]})
        return [m for m, fine in enumerate(finite) if fine]

    @contextmanager
    def _blame(self, job: Job, clients: Sequence[int]) -> Iterator[None]:
        """Whatever goes wrong inside becomes an error that says where."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FnrflError) or out_of_memory(error):
                raise
            who = "" if len(clients) == 1 else f"one of clients {', '.join(map(str, clients))}: "
            raise ClientError(
                f"{who}{type(error).__name__}: {error}", client=clients[0], round=self.round + 1, stage=job.task.purpose
            ) from error


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
