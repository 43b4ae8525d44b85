"""The client's work: a task in, a reply out. It remembers nothing, so it serves any thread, process or machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fnrfl.core import optim, trees
from fnrfl.core.algorithm import CLASS_WEIGHTS, Objective
from fnrfl.core.errors import ClientError, FnrflError, out_of_memory
from fnrfl.core.messages import MeasureRequest, TrainRequest
from fnrfl.core.net import Net
from fnrfl.core.rng import generator
from fnrfl.core.step import Carry, ReusedMemory
from fnrfl.core.training import BALANCED, NONE, read_class_weights
from fnrfl.core.trees import Tree
from fnrfl.core.values import RandomStream, Replies, Shapes, State
from fnrfl.engines.devices import DevicePool
from fnrfl.engines.job import Job
from fnrfl.engines.runner import Probing, Runner
from fnrfl.process import one_intra_op_thread


@dataclass(frozen=True)
class Trained:
    """What came of a request, before anybody keeps any of it: rows of the clients whose numbers are finite."""

    replies: Replies
    memory: Tree  # [m, ...] the names that these clients remember anew
    not_finite: dict[int, int]  # every other client -> the step at which it went wrong
    missing: dict[int, str] = field(default_factory=dict)  # clients that were not trained, and why


class ClientTrainer(Protocol):
    """Whoever trains clients and answers probes for them, here or elsewhere; it remembers nothing of them."""

    initial: State
    pool: DevicePool  # the server's
    runner: Runner

    def train(self, request: TrainRequest, held: State | None, memory: Tree) -> Trained:
        """Train a chunk of clients; `held` [M, P] is the model that each holds, `memory` [M, ...] its memory."""
        ...

    def measure(self, request: MeasureRequest, held: Callable[[int], State]) -> Tree:
        """Every client's answer to a probe, [M, ...]; `held(client)` is the model that it holds."""
        ...


class Trainer:
    """Takes the steps of clients, a chunk of them at a time, and answers probes about models."""

    def __init__(self, pool: DevicePool, runner: Runner, *, seed: int) -> None:
        self.pool, self.runner, self.seed = pool, runner, seed
        self.net, self.feed = pool.net, pool.feed
        self.initial = State(*self.net.flatten())
        self._examples = self.feed.examples.to(self.net.device)
        self._reused = ReusedMemory() if self.net.device.type == "cpu" else None  # of the clients' models
        # A buffer that is not finite from the start, such as a mask of attention, may stay so.
        self._checked_buffers = {
            k for k, v in self.initial.buffers.items() if v.is_floating_point() and bool(v.isfinite().all())
        }

    def train(self, request: TrainRequest, held: State | None, memory: Tree) -> Trained:
        """Train a chunk of clients; `held` [M, P] is the model that each holds, `memory` [M, ...] its memory."""
        with torch.no_grad(), one_intra_op_thread():
            return self._trained(*self._run(request, held, memory))

    def fit(self, request: TrainRequest) -> State:
        """The server takes a task itself."""
        with torch.no_grad(), one_intra_op_thread():
            job, losses = self._run(request, None, {})
        if not (losses[0].isfinite().all() and job.carry.params.isfinite().all()):
            raise FnrflError(
                f"The server's model is no longer finite (round {request.round + 1}, {request.task.purpose}). Lower "
                "the learning rate of what it trains with."
            )
        return trees.rows(State(job.carry.params, job.carry.buffers), 0)

    def measure(self, request: MeasureRequest, held: Callable[[int], State]) -> Tree:
        """Every client's answer to a probe, [M, ...]; `held(client)` is the model that it holds."""
        shapes = partial(self._noise_shapes, Objective())
        streams = {client: self._stream(request.round, client, "measure") for client in request.clients}
        probing = Probing(request, held, streams, self.initial, partial(_draws, shapes, self.net))
        with torch.no_grad(), one_intra_op_thread(), self.pool.layer_precision():
            answers = self.runner.measure(probing, self.pool)
        return trees.stacked([trees.moved(each, self.net.device) for each in answers])

    def _run(self, request: TrainRequest, held: State | None, memory: Tree) -> tuple[Job, list[Tensor]]:
        job = self._job(request, held, memory)
        blame = partial(_named, round=request.round, purpose=request.task.purpose)
        with self.pool.layer_precision():
            return job, self.runner.run(job, self.pool, blame)

    # -- before the steps ---------------------------------------------------------------------------------------------
    def _job(self, request: TrainRequest, held: State | None, memory: Tree) -> Job:
        device, clients, objective = self.net.device, request.clients, request.task.objective
        task = replace(request.task, shared=trees.moved(request.task.shared, device))
        own = memory | trees.moved(task.own, device) | self._class_weights(request)
        start = held
        if task.start is not None:
            start = State(task.start.params, task.start.buffers).to(device)
            if start.params.ndim == 1:
                start = trees.mapped(lambda t: t.expand(len(clients), *t.shape), start)
        assert start is not None
        if type(objective).begin is not Objective.begin:
            begun = [objective.begin(trees.rows(start, m), trees.rows(own, m)) for m in range(len(clients))]
            start = trees.stacked(
                [State(model.params, {k: model.buffers[k] for k in start.buffers}) for model in begun]
            )
        streams = [self._stream(request.round, client, task.purpose) for client in clients]
        shapes = partial(self._noise_shapes, objective)
        trainings = {epochs: replace(request.training, epochs=epochs) for epochs in {*request.epochs}}
        plans = [
            self.feed.plan(client, task.data, trainings[epochs], stream)
            for client, epochs, stream in zip(clients, request.epochs, streams, strict=True)
        ]
        if request.max_steps is not None:
            plans = [plan.first(request.max_steps) for plan in plans]
        draws = [_draws(shapes, self.net, stream) for stream in streams]
        carry = Carry.new(request.training, start.params, start.buffers, self._reused)
        return Job(clients, task, request.training, start, own, plans, draws, shapes, carry, self.net.scale)

    def _class_weights(self, request: TrainRequest) -> Tree:
        """The weight of each class in the loss of every client, [M, C], if there are weights and the data is its own.

        Balanced weights are a client's own: it counts its examples, and nobody is told.
        """
        text = request.training.class_weights
        if text == NONE or request.task.data != "private":
            return {}
        counts = torch.stack([self.feed.class_counts(client) for client in request.clients]).double()
        if text == BALANCED:
            weights = counts.sum(1, keepdim=True) / ((counts > 0).sum(1, keepdim=True) * counts.clamp(min=1))
        else:
            weights = counts.new_tensor(read_class_weights(text)).expand_as(counts)
        return {CLASS_WEIGHTS: weights.to(self.net.device, self.net.dtype)}

    def _stream(self, round: int, client: int, purpose: str) -> RandomStream:
        return lambda name: generator(self.seed, round, client, purpose, name)

    def _noise_shapes(self, objective: Objective, batch: int) -> Shapes:
        """Uniform numbers that a step needs: the objective's and the dropout masks'."""
        return objective.noise(batch) | {k: (batch, *shape) for k, shape in self.net.drop_shapes.items()}

    # -- after the steps ----------------------------------------------------------------------------------------------
    def _trained(self, job: Job, losses: list[Tensor]) -> Trained:
        end, steps, cohort = State(_clipped(job), job.carry.buffers), job.steps, torch.tensor(job.clients)
        travel = {n: optim.travel(job.training, n) for n in set(steps)}
        replies = Replies(
            clients=cohort,
            examples=self._examples[cohort],
            steps=torch.tensor(steps, device=end.params.device),
            travel=end.params.new_tensor([travel[n] for n in steps]),
            loss=_means(losses),
            trained=end.params,
            buffers=end.buffers,
            extras={},
        )
        extras, memory = _finish(job, end, replies)
        replies = replace(replies, extras=extras)
        not_finite = self._not_finite(job, losses, replies.loss)
        if not not_finite:
            return Trained(replies, memory, {})
        rest = torch.tensor([m for m, client in enumerate(job.clients) if client not in not_finite], dtype=torch.int64)
        return Trained(replies.pick(rest), trees.rows(memory, rest), not_finite)

    def _not_finite(self, job: Job, losses: Sequence[Tensor], mean: Tensor) -> dict[int, int]:
        """Clients whose losses, parameters or buffers are not finite, and the step at which."""
        fine = mean.isfinite() & job.carry.params.sum(1).isfinite()
        for name, buffer in job.carry.buffers.items():
            if name in self._checked_buffers:
                fine &= buffer.reshape(len(buffer), -1).isfinite().all(1)
        wrong = {}
        for m in (~fine).nonzero().flatten().tolist():
            bad = (~losses[m].isfinite()).nonzero()
            wrong[job.clients[m]] = int(bad[0]) if len(bad) else len(losses[m]) - 1
        return wrong


def _draws(shapes: Callable[[int], Shapes], net: Net, stream: RandomStream) -> Callable[[int, int], Tree]:
    """Uniform numbers of some steps; one stream per name: an objective's draws cannot move the dropout masks."""
    streams: dict[str, torch.Generator] = {}

    def draw(steps: int, batch: int) -> Tree:
        wanted = shapes(batch)
        for name in wanted.keys() - streams.keys():
            streams[name] = stream(name)
        # torch.rand takes its numbers one by one, so many steps at once get what they would get in turn.
        return {k: torch.rand(steps, *shape, generator=streams[k]).to(net.dtype) for k, shape in wanted.items()}

    return draw


def _finish(job: Job, end: State, replies: Replies) -> tuple[Tree, Tree]:
    """(what is sent up beside the models, what is remembered), each [M, ...]."""
    objective, start = job.task.objective, job.start
    if type(objective).finish is Objective.finish:
        return {}, {}
    lr = start.params.new_tensor(job.training.lr)
    finished = []
    for m, steps in enumerate(job.steps):
        own = trees.rows(job.own, m) | {"lr_steps": lr * steps}
        ways = trees.rows((start, end, replies.travel, replies.examples), m)
        finished.append(objective.finish(*ways, job.task.shared, own))
    sent, remembered = zip(*finished, strict=True)
    return trees.stacked(sent), trees.stacked(remembered)


def _means(losses: Sequence[Tensor]) -> Tensor:
    """The mean of every client's losses, [M]; 0 for one without steps."""
    if len({len(row) for row in losses}) == 1 and len(losses[0]):
        return torch.stack(list(losses)).mean(1)
    return torch.stack([row.mean() if len(row) else row.new_zeros(()) for row in losses])


def _clipped(job: Job) -> Tensor:
    """The models that the steps came to, none of them further away from its start than `clip_update` allows."""
    params, most = job.carry.params, job.training.clip_update
    if not (most and job.task.is_private_training):
        return params
    update = params - job.start.params
    shrunk: Tensor = update * (most / update.norm(dim=1, keepdim=True)).clamp(max=1.0)
    return job.start.params + shrunk


@contextmanager
def _named(clients: Sequence[int], round: int, purpose: str) -> Iterator[None]:
    """Turn whatever goes wrong inside into an error that names the client, the round and the phase."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FnrflError) or out_of_memory(error):
            raise
        who = "" if len(clients) == 1 else f"one of clients {', '.join(map(str, clients))}: "
        message = f"{who}{type(error).__name__}: {error}"
        raise ClientError(message, client=clients[0], round=round + 1, stage=purpose) from error
