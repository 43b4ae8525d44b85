"""Federated learning in plain PyTorch: what the references of `test_correctness_*.py` are written with.

Nothing of the package is in it but where the data lies and the order of the examples (`Pool.plan`, `generator`): both
sides see the same batches. A model is an `nn.Module`, its weights are one vector, a client is one turn of a loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fnrfl.core.algorithm import Algorithm
from fnrfl.core.rng import generator, seeded
from fnrfl.core.types import Training
from toys import NUM_CLASSES, NUM_FEATURES, Plain, Run, World, classification, distance

TOLERANCE = 1e-10
Buffers = dict[str, Tensor]
Direction = Callable[[Tensor, Tensor], Tensor]  # gradient with weight decay, weights -> what the optimiser is given
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor, int], Tensor]  # model, x, y, positions, number of the step


class Normed(nn.Module):
    """A net with BatchNorm, whose features are never of length 0."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(NUM_FEATURES, 10)
        self.norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, NUM_CLASSES)

    def features(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.hidden(x)).tanh()
        return made

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


MODULES: dict[str, type[nn.Module]] = {"plain": Plain, "batchnorm": Normed}


class Federation:
    """Six unequal clients, four of them active in a round: the data of the toys, in the order of the package."""

    def __init__(self, module: type[nn.Module] = Normed, *, seed: int = 7, active: int = 4, **training: Any) -> None:
        self.world: World = classification(module=module)
        self.training = replace(self.world.training, **{"batch": 15, "epochs": 1} | training)
        self.pool, self.seed, self.active = self.world.pool, seed, active
        self.sizes = [len(shard) for shard in self.pool.shards]
        with seeded(1, "init"):
            self.first = self.world.module()

    def cohort(self, t: int) -> list[int]:
        """The clients of round t."""
        order = torch.randperm(len(self.sizes), generator=generator(self.seed, t, "cohort"))
        return sorted(order[: self.active].tolist())

    def shares(self, clients: list[int]) -> list[float]:
        """Each client's part of the cohort's examples."""
        total = sum(self.sizes[i] for i in clients)
        return [self.sizes[i] / total for i in clients]

    def batches(
        self, t: int, client: int, purpose: str = "local", data: Any = "private", training: Training | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(x, y, positions) of every step."""
        stream = self.stream(t, client, purpose)
        for positions in self.pool.plan(client, data, training or self.training, stream).batches:
            yield *self.pool.take(data, positions), positions

    def stream(self, t: int, client: int, purpose: str) -> Callable[[str], torch.Generator]:
        return lambda name: generator(self.seed, t, client, purpose, name)

    def whole(self, data: Any, client: int | None = None) -> tuple[Tensor, Tensor]:
        """(x, y) of a split, or of a client."""
        if client is not None:
            return self.pool.take("private", self.pool.shards[client])
        return self.pool.all(data)

    def run(self, method: Algorithm, **options: Any) -> Run:
        """The package's own run of a method in this federation."""
        return Run(method, world=self.world, training=self.training, seed=self.seed, active=self.active, **options)


def vector(module: nn.Module) -> Tensor:
    """The weights as one vector."""
    return parameters_to_vector(module.parameters()).detach().clone()


def with_vector(module: nn.Module, weights: Tensor) -> nn.Module:
    """A copy of a module with other weights."""
    made = copy.deepcopy(module)
    vector_to_parameters(weights.clone(), made.parameters())
    return made


def gradient(value: Tensor, module: nn.Module) -> Tensor:
    """The gradient of a value by the weights, as one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(module.parameters()))])


def descend(
    module: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor, Tensor]],
    training: Training,
    *,
    loss: Loss | None = None,
    direction: Direction | None = None,
    after: Tensor | None = None,
) -> int:
    """SGD with momentum and weight decay, in place; returns the number of steps. `after`: a step of its own."""
    w = vector(module)
    v = torch.zeros_like(w)
    steps = 0
    for x, y, positions in batches:
        value = cross_entropy(module(x), y) if loss is None else loss(module, x, y, positions, steps)
        g = gradient(value, module) + training.weight_decay * w
        if direction is not None:
            g = direction(g, w)
        v = training.momentum * v + g
        w = w - training.lr * v
        if after is not None:
            w = w - training.lr * after
        vector_to_parameters(w, module.parameters())
        steps += 1
    return steps


def travel(training: Training, steps: int) -> float:
    """lr * |a|: with momentum rho the gradient of step k is used 1 + rho + ... + rho^(K - 1 - k) times."""
    return training.lr * sum(sum(training.momentum**j for j in range(steps - k)) for k in range(steps))


def floats(module: nn.Module) -> Buffers:
    """BatchNorm's statistics without its counter."""
    return {k: v for k, v in module.named_buffers() if v.is_floating_point()}


def averaged(modules: list[nn.Module], weights: list[float]) -> nn.Module:
    """A module whose weights and statistics are weighted means; its counter is the largest."""
    made = with_vector(modules[0], sum(p * vector(m) for p, m in zip(weights, modules, strict=True)))  # type: ignore[arg-type]
    for name, buffer in made.named_buffers():
        every = [dict(m.named_buffers())[name] for m in modules]
        if buffer.is_floating_point():
            buffer.copy_(sum(p * b for p, b in zip(weights, every, strict=True)))
        else:
            buffer.copy_(torch.stack(every).max())
    return made


def fedavg(fed: Federation, t: int, server: nn.Module, **how: Any) -> tuple[list[int], list[nn.Module], list[int]]:
    """Private training from the server's model: (clients, their modules, their steps)."""
    clients, modules, steps = fed.cohort(t), [], []
    for client in clients:
        module = copy.deepcopy(server).train()
        steps.append(descend(module, fed.batches(t, client), fed.training, **how))
        modules.append(module)
    return clients, modules, steps


def assert_equal(run: Run, module: nn.Module, tolerance: float = TOLERANCE) -> None:
    """A run's model is this module: weights, statistics and counters."""
    assert_model(run.state.params, run.state.buffers, module, tolerance)


def assert_model(params: Tensor, buffers: Buffers, module: nn.Module, tolerance: float = TOLERANCE) -> None:
    assert distance(params, vector(module)) <= tolerance
    for name, buffer in module.named_buffers():
        assert distance(buffers[name], buffer) <= tolerance, name
