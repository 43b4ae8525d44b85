"""One optimiser step of one client: the only local training step in the package.

Engines repeat it, batch it or ship it; nobody else steps a client's model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from fnrfl.core import optim, trees
from fnrfl.core.algorithm import Objective
from fnrfl.core.net import Model, Net
from fnrfl.core.training import Training
from fnrfl.core.trees import Tree
from fnrfl.core.values import Batch, Flat, State
from fnrfl.process import parser_lock

ALIGNMENT = 64  # bytes, as torch has it: sums of numbers that begin elsewhere may round otherwise
LARGEST_KEPT = (32 << 20) - (1 << 16)  # bytes of a block that glibc can keep for later
Loss = Callable[[Flat], tuple[Tensor, Tree]]  # parameters -> (loss, buffers after the forward pass)
Gradient = Callable[[Loss, Flat], tuple[Flat, Tensor, Tree]]  # -> (gradient, loss, buffers)


class ReusedMemory:
    """Memory of the host that is used again once no tensor lies in it any more.

    A system gives a program new pages only when they are first written, and that takes longer than the writing: for the
    models of 200 clients, a tenth of a round.
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._lent: Callable[[], object] = lambda: None  # the part that tensors lie in, None once they are gone
        np.empty(LARGEST_KEPT, np.uint8)  # let go at once: glibc learns that such blocks come and go, and keeps them

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape and type, not written yet."""
        needed = tensor.numel() * tensor.itemsize
        if self._lent() is not None or len(self._bytes) < needed + ALIGNMENT:
            self._bytes = np.empty(needed + ALIGNMENT, np.uint8)
        first = -self._bytes.ctypes.data % ALIGNMENT
        part = self._bytes[first : first + needed]
        self._lent = weakref.ref(part)  # a tensor that lies in an array keeps it, and so do all views of the tensor
        return torch.from_numpy(part).view(tensor.dtype).view(tensor.shape)


@trees.node
@dataclass(frozen=True)
class Carry:
    """The tensors that a step changes in place; with a client axis in front under `vmap`."""

    params: Flat
    buffers: Tree
    memory: Tree  # the optimiser's

    @staticmethod
    def new(training: Training, params: Flat, buffers: Tree, reused: ReusedMemory | None = None) -> Carry:
        """A carry that owns copies of its tensors; `params` is [P] or [M, P], and its copy may lie in `reused`."""
        if reused is None:
            params = params.clone(memory_format=torch.contiguous_format)
        else:
            params = reused.like(params).copy_(params)
        return Carry(params, trees.aligned(buffers), optim.new_memory(training, params))


def by_autograd(loss: Loss, params: Flat) -> tuple[Flat, Tensor, Tree]:
    """Ordinary autograd on a leaf: the fastest for one client."""
    leaf = params.data.requires_grad_()  # detach() would share a version counter with the rows of other threads
    with torch.enable_grad():
        value, buffers = loss(leaf)
    (grad,) = torch.autograd.grad(value, leaf)
    return grad, value.detach(), buffers


_first_transform = threading.RLock()
_transformed = False


def ready_to_transform() -> None:
    """Have torch import what function transforms need: hundreds of modules, which threads must not begin together."""
    global _transformed
    if _transformed:
        return
    with _first_transform, parser_lock:
        vmap(grad(torch.sum))(torch.zeros(1, 1))
        _transformed = True


def by_transform(loss: Loss, params: Flat) -> tuple[Flat, Tensor, Tree]:
    """A function transform: what `vmap` can batch."""
    ready_to_transform()
    grad, (value, buffers) = grad_and_value(loss, has_aux=True)(params)
    return grad, value, buffers


def local_step(
    net: Net,
    objective: Objective,
    training: Training,
    carry: Carry,
    start: State,
    batch: Batch,
    shared: Tree,
    own: Tree,
    lr: float | Tensor,
    gradient: Gradient,
) -> Tensor:
    """Take one step; `carry` changes in place. Returns the loss.

    To be recorded for many rounds, it must be given the learning rate as a tensor, like all that may change.
    """

    def loss(params: Flat) -> tuple[Tensor, Tree]:
        model = Model(net, start, carry.buffers, batch.noise, training.batchnorm, batch.real)
        out = model(params, batch.x)
        return objective.loss(out, model, params, batch, shared, own), model.buffers

    if training.frozen >= net.shapes.keys():  # nothing moves but what BatchNorm remembers, and that takes no gradient
        value, buffers = loss(carry.params)
        _remember(carry, buffers)
        return value
    grad, value, buffers = gradient(loss, carry.params)
    decayed = carry.params if training.weight_decay and training.optimizer == "adamw" else None
    if training.weight_decay and decayed is None:  # coupled: part of the raw gradient
        grad = grad.add(carry.params, alpha=training.weight_decay)
    grad = objective.correct(grad, carry.params, start.params, shared, own)
    if training.frozen:
        grad = grad.masked_fill(net.mask(training.frozen), 0.0)
        decayed = None if decayed is None else decayed.masked_fill(net.mask(training.frozen), 0.0)
    optim.update(training, lr, carry.params, grad, carry.memory, decayed)
    shift = objective.shift(lr, shared, own)
    if shift is not None:
        carry.params.add_(shift.masked_fill(net.mask(training.frozen), 0.0) if training.frozen else shift)
    _remember(carry, buffers)
    return value


def _remember(carry: Carry, buffers: Tree) -> None:
    for name, buffer in carry.buffers.items():
        buffer.copy_(buffers[name])
