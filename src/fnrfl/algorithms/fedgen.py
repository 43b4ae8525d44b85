"""FedGen: clients also train on features from a generator that all their heads agree with (Zhu et al., ICML 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fnrfl.algorithms.parts.generator import (
    Generator,
    LabelCounts,
    descend,
    diversity,
    labelled,
    weighted,
)
from fnrfl.core import optim, trees
from fnrfl.core.algorithm import Algorithm, Objective, cross_entropy, option
from fnrfl.core.net import Model, Net
from fnrfl.core.step import Carry
from fnrfl.core.types import Batch, Engine, Flat, LocalTask, Out, Shapes, State, Training, Tree, aligned

FLOOR = 1e-4  # a and b fall no lower


@dataclass(frozen=True)
class Generated(Objective):
    """Cross-entropy of the batch, of generated features, and agreement with features generated for the same labels."""

    takes_padding: ClassVar[bool] = True
    size: int  # generated features of a step
    width: int  # of the noise
    hidden: int
    end: Literal["relu", "linear"]
    agree: bool  # whether there is a third term

    def noise(self, batch: int) -> Shapes:
        view = {"generated.view": (batch, self.width)} if self.agree else {}
        return {"generated": (self.size, self.width), "generated.label": (self.size,)} | view

    def loss(self, out: Out, model: Model, params: Flat, batch: Batch, shared: Tree, own: Tree) -> Tensor:
        net = model.net
        maker = Generator(len(shared["labels"]), self.width, self.hidden, (net.num_features,), self.end)
        statistics = {k: shared[f"generator.{k}"] for k in ("0.mean", "0.var")}
        make = lambda noise, y: maker(shared["generator"], statistics, noise, y, training=False)[0]  # noqa: E731
        head = params[net.head_slice]
        y = labelled(shared["labels"], batch.noise["generated.label"])
        made = cross_entropy(net.head(head, make(batch.noise["generated"], y)), y).mean()
        loss = super().loss(out, model, params, batch, shared, own) + shared["a"] * self.size / batch.count * made
        if not self.agree:
            return loss
        view = net.head(head.detach(), make(batch.noise["generated.view"], batch.y)).log_softmax(-1).detach()
        return loss + shared["b"] * batch.mean((view.exp() * (view - out.logits.log_softmax(-1))).sum(-1))


def teaching(logits: Tensor, shares: Tensor, y: Tensor) -> Tensor:
    """sum_i mean_b W[y_b, i] * CE(head_i's logits, y_b); logits [M, B, C], W [M, C] as shares."""
    return weighted(cross_entropy(logits, y.expand(len(logits), -1)), shares[:, y]).sum()


@dataclass(frozen=True)
class FedGen(Algorithm):
    """FedAvg whose clients are sent a generator of features; it learns from their heads before these are averaged."""

    traffic: ClassVar[str] = "1 model and the generator down, 1 model and label counts up"
    needs: ClassVar[frozenset[str]] = frozenset({"features", "head"})

    a: float = option(1.0, "weight of generated features (the paper: 1, its code: 10)", ge=0.0)
    b: float = option(
        0.0, "weight of agreement with the generator's view of a label (the paper: none, code: 10)", ge=0.0
    )
    decay: float = option(0.98, "factor of a, b and the generator's learning rate from round to round", gt=0.0, le=1.0)
    size: int = option(32, "generated features in a client's step", ge=1)
    steps: int = option(50, "steps of the generator in a round", ge=0)
    batch: int = option(32, "features in a step of the generator", ge=2)
    lr: float = option(3e-4, "learning rate of the generator's Adam", ge=0.0)
    weight_decay: float = option(1e-2, "weight decay of the generator", ge=0.0)
    diversity: float = option(1.0, "weight of the generator's diversity", ge=0.0)
    noise: int = option(16, "noise inputs of the generator (its code: 32)", ge=1)
    hidden: int = option(64, "hidden units of the generator (its code: 256)", ge=1)
    features: Literal["relu", "linear"] = option(
        "relu", "last layer of the generator: relu for features that are never negative; linear: its code"
    )

    def init(self, net: Net) -> State:
        keys = ("generator", "generator.0.mean", "generator.0.var", "adam.first", "adam.second", "adam.count", "labels")
        return State(*net.flatten(), {key: torch.zeros(0) for key in keys})  # empty until the first round

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        net, fade = engine.net, self.decay**engine.round
        adam = Training(optimizer="adam", lr=self.lr * fade, weight_decay=self.weight_decay)
        maker = Generator(engine.num_classes, self.noise, self.hidden, (net.num_features,), self.features)
        extra = state.extra if len(state.extra["labels"]) else self._first(maker, adam, engine)
        shared = {k: v for k, v in extra.items() if k.startswith("generator")} | {"labels": edges(extra["labels"])}
        for name, weight in (("a", self.a), ("b", self.b)):  # 0 until the generator has learnt something
            shared[name] = extra["labels"].amax() * max(weight * fade, min(weight, FLOOR))
        objective = Generated(self.size, self.noise, self.hidden, self.features, self.b > 0)
        got = engine.fold(
            cohort,
            LocalTask(objective, "local", state, shared=shared),
            mean=lambda r: {"moved": r.params - state.params},
            rows=lambda r: {"head": r.params[:, net.head_slice].clone()},  # a view would keep all of the model
        )
        clients, order = got.clients.sort()  # sums must not depend on the order in which clients answered
        there, answers = engine.ask(clients, LabelCounts(engine.num_classes), data="private")
        heads = got.rows["head"][order][torch.isin(clients, there)]
        taught = self._taught(maker, adam, extra, heads, answers["counts"].to(net.dtype), engine)
        return state.step(got, state.params + got.mean["moved"], **taught)

    def _first(self, maker: Generator, adam: Training, engine: Engine) -> Tree:
        """A generator that has learnt nothing."""
        weights, statistics = maker.new(engine.generator("generator", "initial"), engine.net.zeros())
        born = Carry(weights, statistics, optim.new_memory(adam, weights))
        return as_extra(born) | {"labels": weights.new_zeros(engine.num_classes)}

    def _taught(
        self, maker: Generator, adam: Training, extra: Tree, heads: Tensor, counts: Tensor, engine: Engine
    ) -> Tree:
        """Train the generator on the cohort's heads, each weighted by its part of every label."""
        seen = engine.training.epochs * counts + 1  # labels in the batches; nobody is quite without weight
        held = (counts.amax(0) > 0).to(counts.dtype)  # labels that somebody has
        known = State.unpacked("generator", extra, ".")
        generator = aligned(Carry(known.params, known.buffers, trees.under("adam", extra)))
        stream = engine.generator("generator")

        def step(generator: Carry, fixed: tuple[Tensor, Tensor, Tensor], turn: tuple[Tensor, Tensor]) -> Tensor:
            heads, shares, lr = fixed
            loss = partial(self._loss, engine.net, maker, generator.buffers, heads, shares, *turn)
            return descend(adam, lr, generator, loss)

        if self.steps:
            drawn = [torch.rand(self.batch, n, generator=stream) for _ in range(self.steps) for n in (self.noise, 1)]
            noise = torch.stack(drawn[::2]).to(counts)
            y = torch.stack([labelled(edges(held), u[:, 0].to(counts)) for u in drawn[1::2]])
            fixed = heads, seen / seen.sum(0), counts.new_tensor(adam.lr)
            engine.repeat(("generator", self), step, generator, fixed, (noise, y))
        return as_extra(generator) | {"labels": torch.maximum(extra["labels"], held)}

    def _loss(
        self, net: Net, maker: Generator, statistics: Tree, heads: Tensor, shares: Tensor, noise: Tensor, y: Tensor,
        weights: Flat,
    ) -> tuple[Tensor, Tree]:  # fmt: skip
        made, statistics = maker(weights, statistics, noise, y, training=True)
        logits = torch.stack([net.head(head, made) for head in heads])
        return teaching(logits, shares, y) + self.diversity * diversity(made, noise), statistics


def as_extra(generator: Carry) -> Tree:
    """A generator and its Adam as the server remembers them."""
    model = State(generator.params, generator.buffers)
    return model.packed("generator", ".") | trees.prefixed("adam", generator.memory)


def edges(labels: Tensor) -> Tensor:
    """Where each label's stretch of [0, 1) ends if those that are 1 share it equally, [C]; all of them if none is."""
    upto = torch.where(labels.amax() > 0, labels, torch.ones_like(labels)).cumsum(0)
    return upto / upto[-1]
