"""FedFTG: tune the average on generated images that the clients' models judge otherwise (Zhang et al., CVPR 2022)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fnrfl.algorithms.parts.generator import (
    ConvGenerator,
    Generator,
    LabelCounts,
    descend,
    diversity,
    holders,
    proportional,
    weighted,
)
from fnrfl.core import optim, trees
from fnrfl.core.algorithm import Algorithm, Objective, cross_entropy, option
from fnrfl.core.errors import CompatibilityError, FnrflError
from fnrfl.core.net import Model, Net
from fnrfl.core.step import Carry, by_transform, local_step
from fnrfl.core.types import Batch, Engine, Flat, LocalTask, Out, State, Training, Tree, aligned


@dataclass(frozen=True)
class Ensembled(Objective):
    """Cross-entropy with the ensemble's answer, averaged over examples and classes."""

    def loss(self, out: Out, model: Model, params: Flat, batch: Batch, shared: Tree, own: Tree) -> Tensor:
        return batch.mean(-(shared["target"] * out.logits.log_softmax(-1)).mean(-1))


def disagreement(kind: Literal["kl", "l1"], student: Tensor, teacher: Tensor) -> Tensor:
    """How far apart two models' answers are on every example, [B]; l1 takes the teacher's for constant."""
    if kind == "l1":
        return (student - teacher.detach()).abs().mean(-1)
    return (student.softmax(-1) * (student.log_softmax(-1) - teacher.log_softmax(-1))).sum(-1)


@dataclass(frozen=True)
class FedFTG(Algorithm):
    """x~ = sum_i p_i y_i, then `iterations` of: a harder batch from the generator, and x~ learns the ensemble's answer.

    A client's word counts, class by class, by its part of the cohort's examples of that class.
    """

    traffic: ClassVar[str] = "1 model down, 1 up; label counts up once"

    iterations: int = option(10, "batches that are generated in a round, I", ge=0)
    generator_steps: int = option(1, "passes of the generator over the clients for each batch, one step a client", ge=0)
    student_steps: int = option(5, "steps of the server's model on each batch, I_d", ge=0)
    batch: int = option(50, "generated images in a batch", ge=2)
    lr: float = option(0.1, "learning rate of the server's model", ge=0.0)
    weight_decay: float = option(1e-3, "weight decay of the server's model", ge=0.0)
    generator_lr: float = option(0.01, "learning rate of the generator's Adam, a fresh one each round", ge=0.0)
    decay: float = option(0.998, "factor of both learning rates from round to round", gt=0.0, le=1.0)
    classify: float = option(1.0, "weight of the generator's cross-entropy, lambda_cls", ge=0.0)
    diversity: float = option(1.0, "weight of the generator's diversity, lambda_dis", ge=0.0)
    disagreement: Literal["kl", "l1"] = option(
        "kl", "what the generator maximises: the KL divergence (the paper) or l1 of logits (its code)"
    )
    batchnorm: Literal["frozen", "batch", "updating"] = option(
        "batch", "the server's model on generated images; updating (its code): they enter its statistics"
    )
    noise: int = option(100, "noise inputs of the generator", ge=1)
    hidden: int = option(64, "hidden units, or channels, of the generator", ge=1)
    generator: Literal["auto", "dense", "conv"] = option(
        "auto", "the generator's net; auto: convolutions for images of 16 by 16 pixels and more"
    )
    images: Literal["unit", "standard"] = option(
        "unit", "their range: unit: 0 to 1, as pixels are here; standard (its code): mean 0 and variance 1"
    )

    def init(self, net: Net) -> State:
        keys = ("counts", "generator", *(f"generator.{k}" for k in self._maker(net, 1).statistics))
        return State(*net.flatten(), {key: torch.zeros(0) for key in keys})  # empty until the first round

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        got = engine.fold(
            cohort,
            LocalTask(Objective(), "local", state),
            mean=lambda r: {"moved": r.params - state.params},
            rows=lambda r: State(r.params, r.buffers).packed("model"),
        )
        clients, order = got.clients.sort()  # the generator takes a step for each client: in this order
        teachers = trees.rows(State.unpacked("model", got.rows), order)
        counts = self._counts(state.extra["counts"], clients, engine)
        average = State(state.params + got.mean["moved"], got.buffers, state.extra | {"counts": counts})
        return self._tuned(average, teachers, counts[clients], engine)

    def _maker(self, net: Net, num_classes: int) -> Generator:
        shape = net.input_shape
        if not net.input_dtype.is_floating_point:
            raise CompatibilityError(
                "fedftg generates examples, and cannot generate the whole numbers (tokens) that this model takes. "
                "Choose another method, such as fedavg."
            )
        large = len(shape) == 3 and min(shape[1:]) >= 16
        conv = self.generator == "conv" or (self.generator == "auto" and large)
        if conv and len(shape) != 3:
            raise CompatibilityError(
                f'algorithm.generator = "conv" makes images, and the examples here have the shape {tuple(shape)}. '
                'Set algorithm.generator = "auto".'
            )
        return (ConvGenerator if conv else Generator)(num_classes, self.noise, self.hidden, shape, self.images)

    def _counts(self, known: Tensor, clients: Tensor, engine: Engine) -> Tensor:
        """Label counts of every client, [N, C], -1 where it was never asked; new clients are asked now, once."""
        if not len(known):
            known = torch.full((len(engine.examples), engine.num_classes), -1.0, device=engine.net.device)
        known, new = known.clone(), clients[(known[clients, 0] < 0).cpu()]
        if len(new):
            there, answers = engine.ask(new, LabelCounts(engine.num_classes), data="private")
            known[new] = 0.0  # a client that does not answer is no teacher, and is not asked again
            known[there] = answers["counts"]
        return known

    def _tuned(self, average: State, teachers: State, counts: Tensor, engine: Engine) -> State:
        """The average after `iterations` of a harder batch from the generator and steps on it."""
        net, stream, rate = engine.net, engine.generator("tune"), self.decay**engine.round
        maker, extra = self._maker(net, engine.num_classes), average.extra
        if len(extra["generator"]):
            weights, statistics = extra["generator"].clone(), aligned(trees.under("generator", extra))
        else:
            weights, statistics = maker.new(engine.generator("generator"), average.params)
        adam = Training(optimizer="adam", lr=self.generator_lr * rate, weight_decay=0.0)
        sgd = Training(
            lr=self.lr * rate, momentum=0.0, weight_decay=self.weight_decay, batch=self.batch, batchnorm=self.batchnorm
        )
        generator = Carry(weights, statistics, optim.new_memory(adam, weights))
        student = Carry.new(sgd, average.params, average.buffers)
        shares = holders(counts.to(net.dtype))  # alpha, [M, C]
        labels = proportional(counts.sum(0), self.iterations * self.batch, stream)
        for y in labels.view(self.iterations, self.batch):
            noise = torch.randn(self.batch, self.noise, generator=stream).to(weights)
            self._generator_steps(engine, maker, adam, generator, student, (teachers, shares[:, y]), noise, y)
            x = net.laid_out(maker(weights, statistics, noise, y, training=False)[0])
            target = ensemble(engine, teachers, shares[:, y], x)
            if self.student_steps:
                self._student_steps(engine, sgd, student, average, target, x, y, stream)
        if not student.params.isfinite().all():
            raise FnrflError(
                f"The model that FedFTG tuned has numbers that are not finite (round {engine.round + 1}). Lower "
                'algorithm.lr, or set algorithm.batchnorm = "batch" if it is "frozen".'
            )
        kept = State(weights, statistics).packed("generator", ".")
        return State(student.params, student.buffers, extra | kept)

    def _generator_steps(
        self, engine: Engine, maker: Generator, adam: Training, generator: Carry, student: Carry,
        judges: tuple[State, Tensor], noise: Tensor, y: Tensor,
    ) -> None:  # fmt: skip
        """The generator takes a step against each teacher, `generator_steps` times; judges are teachers and shares."""
        net, (teachers, shares) = engine.net, judges
        M, now = len(teachers.params), State(student.params, student.buffers)

        def step(generator: Carry, fixed: tuple[State, Tensor], turn: tuple[State, Tensor, Tensor, Tensor]) -> Tensor:
            (student, lr), (teacher, share, noise, y) = fixed, turn
            loss = partial(self._harder, net, maker, generator.buffers, (student, teacher), share, noise, y, M)
            return descend(adam, lr, generator, loss)

        each = teachers, shares, noise.expand(M, *noise.shape), y.expand(M, -1)
        for _ in range(self.generator_steps):
            engine.repeat(("hunt", self, M), step, generator, (now, generator.params.new_tensor(adam.lr)), each)

    def _student_steps(
        self, engine: Engine, sgd: Training, student: Carry, average: State, target: Tensor, x: Tensor, y: Tensor,
        stream: torch.Generator,
    ) -> None:  # fmt: skip
        """The server's model takes `student_steps` towards the ensemble's answer, on one batch of images."""
        net, steps = engine.net, self.student_steps

        def step(student: Carry, fixed: tuple[State, Tensor, Tensor], batch: Batch) -> Tensor:
            start, target, lr = fixed
            return local_step(net, Ensembled(), sgd, student, start, batch, {"target": target}, {}, lr, by_transform)

        drawn = [
            {k: torch.rand(self.batch, *shape, generator=stream).to(x) for k, shape in net.drop_shapes.items()}
            for _ in range(steps)
        ]
        batch = Batch(x, y, torch.arange(self.batch, device=y.device))
        again: Batch = trees.mapped(lambda t: t.expand(steps, *t.shape), batch)
        fixed = State(average.params, average.buffers), target, target.new_tensor(sgd.lr)
        engine.repeat(("learn", replace(sgd, lr=0.0)), step, student, fixed, replace(again, noise=trees.stacked(drawn)))

    def _harder(
        self, net: Net, maker: Generator, statistics: Tree, models: tuple[State, State], share: Tensor, noise: Tensor,
        y: Tensor, num_teachers: int, weights: Flat,
    ) -> tuple[Tensor, Tree]:  # fmt: skip
        """What the generator minimises for one teacher: -L_md + lambda_cls L_cls + lambda_dis L_dis / m."""
        x, statistics = maker(weights, statistics, noise, y, training=True)
        student, teacher = (logits_in_eval(net, model, x) for model in models)
        apart = weighted(disagreement(self.disagreement, student, teacher), share)
        right = weighted(cross_entropy(teacher, y), share)
        return self.classify * right - apart + self.diversity * diversity(x, noise) / num_teachers, statistics


def logits_in_eval(net: Net, model: State, x: Tensor) -> Tensor:
    """A model's logits, in eval mode and with its own statistics."""
    return net.apply(model.params, model.buffers, net.laid_out(x), mode="frozen")[0].logits


def ensemble(engine: Engine, teachers: State, shares: Tensor, x: Tensor) -> Tensor:
    """q = sum_i alpha^{i,y} softmax of teacher i's logits, [B, C]; teachers [M, ...], shares [M, B]."""

    def add(q: Tensor, x: Tensor, turn: tuple[State, Tensor]) -> Tensor:
        teacher, share = turn
        q.add_(share[:, None] * logits_in_eval(engine.net, teacher, x).softmax(-1))
        return share.mean()

    q = x.new_zeros(len(x), engine.net.num_logits)
    engine.repeat("ensemble", add, q, x, (teachers, shares))
    return q
