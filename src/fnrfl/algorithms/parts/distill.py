"""The server fits a student to soft targets, and keeps the best that validation data has seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fnrfl.core.algorithm import Objective
from fnrfl.core.errors import FnrflError
from fnrfl.core.net import Model, Net
from fnrfl.core.step import Carry, by_transform, local_step
from fnrfl.core.types import Batch, Flat, Out, RandomStream, State, Step, Training, Tree, aligned, run_steps

STEPS_AT_ONCE = 50  # steps whose batches are gathered together where nobody judges in between


@dataclass(frozen=True)
class SoftTargets(Objective):
    """KL(target || softmax(logits / T)), the mean over the batch; labels are not looked at."""

    temperature: float
    clip: float  # the longest gradient; 0: any

    def loss(self, out: Out, model: Model, params: Flat, batch: Batch, shared: Tree, own: Tree) -> Tensor:
        target = shared["target"][batch.index]
        said = (out.logits / self.temperature).log_softmax(-1)
        return batch.mean((torch.special.xlogy(target, target) - target * said).sum(-1))

    def correct(self, grad: Flat, params: Flat, start: Flat, shared: Tree, own: Tree) -> Flat:
        return grad.mul((self.clip / grad.norm()).clamp(max=1.0)) if self.clip else grad


@dataclass(frozen=True)
class Student:
    """What came out of a distillation."""

    model: State
    taken: int  # steps
    chosen: int  # the step after which the model was as it is
    loss: float  # of the last batch


def batch_positions(n: int, batch: int, steps: int, stream: torch.Generator) -> Tensor:
    """Positions of every step, [steps, batch]: the epochs' random orders end to end."""
    batch = min(batch, n)
    orders = [torch.randperm(n, generator=stream) for _ in range(-(-steps * batch // n))]
    return torch.cat(orders)[: steps * batch].view(steps, batch)


def cosine(lr: float, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0: from lr down to almost 0 along half a cosine.

    >>> cosine(1.0, 0, 10), round(cosine(1.0, 5, 10), 6)
    (1.0, 0.5)
    """
    return lr * (1 + math.cos(math.pi * step / steps)) / 2


@torch.no_grad()
def distill(
    net: Net,
    start: State,
    x: Tensor,
    target: Tensor,
    objective: Objective,
    training: Training,
    *,
    steps: int,
    stream: RandomStream,
    judge: Callable[[State], float] | None = None,
    every: int = 1,
    patience: int = 1,
    repeat: Callable[..., Tensor] = lambda key, *work: run_steps(*work),
) -> Student:
    """Take up to `steps` steps towards `target` [n, C] on x; `repeat` is the engine's.

    With a judge, who is asked at the start and after every `every` steps, the model that it liked best is the result
    (the start, if nothing was better), and `patience` steps without a better one are the end. Without, the last is.
    """
    carry = Carry.new(training, start.params, start.buffers)
    now = State(carry.params, carry.buffers)  # changes in place
    best, chosen, taken, loss = start, 0, 0, math.nan
    liked = -math.inf if judge is None else judge(start)
    masks = {} if training.batchnorm == "frozen" else {name: stream(name) for name in net.drop_shapes}
    order = batch_positions(len(x), training.batch, steps, stream("batches")).to(x.device)
    rates = x.new_tensor([cosine(training.lr, step, steps) for step in range(steps)])
    step, fixed = _student_step(net, objective, training), (State(start.params, start.buffers), target)
    key = ("distill", objective, replace(training, lr=0.0))
    at_once = STEPS_AT_ONCE if judge is None else every
    for index, lr in zip(order.split(at_once), rates.split(at_once), strict=True):
        loss = float(repeat(key, step, carry, fixed, (_unlabelled(net, x, index, masks), lr))[-1])
        taken += len(index)
        if judge is None:
            continue
        found = judge(now)
        if found > liked:
            best, chosen, liked = State(carry.params.clone(), aligned(carry.buffers)), taken, found
        elif taken - chosen >= patience:
            break
    if judge is None:
        best, chosen = now, taken
    if not best.params.isfinite().all():
        raise FnrflError("The distilled model has numbers that are not finite. Lower algorithm.lr.")
    return Student(best, taken, chosen, loss)


def _unlabelled(net: Net, x: Tensor, index: Tensor, masks: dict[str, torch.Generator]) -> Batch:
    """Batches of examples without labels, [steps, batch, ...], with the dropout masks of each step."""
    shown = net.laid_out(x[index.flatten()]).unflatten(0, index.shape)
    noise = {
        k: torch.stack([torch.rand(index.shape[1], *net.drop_shapes[k], generator=draw) for _ in index])
        for k, draw in masks.items()
    }
    noise = {k: v.to(x.device, net.dtype) for k, v in noise.items()}  # examples may be whole numbers
    return Batch(shown, torch.full_like(index, -1), index, noise)


def _student_step(net: Net, objective: Objective, training: Training) -> Step:
    def step(student: Carry, fixed: tuple[State, Tensor], turn: tuple[Batch, Tensor]) -> Tensor:
        (begin, target), (batch, lr) = fixed, turn
        return local_step(net, objective, training, student, begin, batch, {"target": target}, {}, lr, by_transform)

    return step
