"""KT-pFL: personal models teach each other on public data; the server learns who teaches whom (Zhang, NeurIPS 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fnrfl.algorithms.local_only import GoingOn, Keeping, LocalOnly
from fnrfl.algorithms.parts.coefficients import Fit, curvature, gradient, projected, released, weighted_sums
from fnrfl.core.algorithm import option
from fnrfl.core.net import Model
from fnrfl.core.types import Batch, Engine, Flat, LocalTask, Out, Probe, State, Tree, nothing


@dataclass(frozen=True)
class SoftPredictions(Probe):
    """s_i: softmax(logits / T) of every one of `size` examples, in their order."""

    size: int
    temperature: float

    def __call__(self, out: Out, batch: Batch) -> Tree:
        soft = (out.logits / self.temperature).softmax(-1)
        return {"soft": soft.new_zeros(self.size, soft.shape[-1]).index_add(0, batch.index, soft)}

    def accepts(self, answer: Tree, one: Tree, examples: float) -> bool:
        sums = answer["soft"].sum(-1)
        return bool((answer["soft"] >= 0).all() and ((sums - 1).abs() < 1e-3).all())


@dataclass(frozen=True)
class Imitation(Keeping):
    """lam KL(t || softmax(logits / T)), t the client's own teacher; labels are not looked at."""

    lam: float
    temperature: float

    def loss(self, out: Out, model: Model, params: Flat, batch: Batch, shared: Tree, own: Tree) -> Tensor:
        teacher = own["teacher"][batch.index]
        said = (out.logits / self.temperature).log_softmax(-1)
        return self.lam * batch.mean((torch.special.xlogy(teacher, teacher) - teacher * said).sum(-1))


@dataclass(frozen=True)
class Approach(Keeping):
    """w <- w + lam (t - w), buffers too, without a step; integer buffers stay."""

    lam: float

    def begin(self, start: State, own: Tree) -> State:
        params = start.params + self.lam * (own["teacher"] - start.params)
        moved = {k: v + self.lam * (own[f"teacher/{k}"] - v) for k, v in start.buffers.items() if v.is_floating_point()}
        return State(params, start.buffers | moved)


@dataclass(frozen=True)
class KTpFL(LocalOnly):
    """Private training; s_i up; t_i = sum_m c_im s_m down; each client imitates its teacher.

    c_i goes down lam KL(t_i || s_i) + rho ||c_i - 1/N||^2, what the clients go down too, along the simplex. Who has not
    taken part yet teaches nobody; who is not in the cohort teaches by what it said last.
    """

    traffic: ClassVar[str] = "soft predictions on public data up, as much down; or 1 model each way"
    needs: ClassVar[frozenset[str]] = frozenset({"distill"})

    exchange: Literal["logits", "weights"] = option(
        "logits", "what crosses: soft predictions on public data, or models, of which a client gets its own mixture"
    )
    coefficients: Literal["kl", "mse"] = option(
        "kl", "the coefficients' step: the paper's KL along the simplex, or the released code's MSE and softmax"
    )
    rho: float = option(0.7, "pull of coefficients to 1/N", ge=0.0)
    step: float = option(1.0, "step size of the coefficients; mse scales its own", gt=0.0)
    temperature: float = option(10.0, "T, of predictions and imitation", gt=0.0)
    lam: float = option(
        100.0, "weight of imitation; T^2 makes it as strong as at T = 1; weights: share of the way, 1 at most", ge=0.0
    )
    epochs: int = option(1, "R: passes over the public data while imitating", ge=0)
    batch: int = option(256, "examples per step of imitation, at most", ge=1)
    batchnorm: Literal["frozen", "batch", "updating"] = option(
        "updating", "updating: train mode, the released code; batch: batch statistics, none stored; frozen: eval mode"
    )

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        weights = self.exchange == "weights"
        local = LocalTask(GoingOn(), "local", send_model=weights, hold_model=True)
        if weights:
            got = engine.train(cohort, local)
            clients = got.clients
            told = {"": got.params} | {f"/{k}": v for k, v in got.buffers.items() if v.is_floating_point()}
        else:
            clients = engine.fold(cohort, local, mean=nothing).clients
            probe = SoftPredictions(len(engine.pool("distill")[1]), self.temperature)
            clients, answers = engine.ask(clients, probe, data="distill")
            told = {"": answers["soft"]}
        teachers, extra = self._teachers(state.extra, clients, told, len(engine.examples))
        task = replace(self._imitation(engine), own={f"teacher{k}": v for k, v in teachers.items()})
        engine.fold(clients, task, mean=nothing)
        return replace(state, extra=state.extra | extra)

    def _teachers(self, extra: Tree, clients: Tensor, told: Tree, N: int) -> tuple[Tree, Tree]:
        """(each client's teacher, what the server knows now)."""
        birth = told[""].new_full((N, N), 1 / N)
        known = extra.get("known", torch.zeros(N, dtype=torch.bool)).cpu().index_fill(0, clients, True)
        said = {
            k: extra.get(f"said{k}", v.new_zeros(N, *v.shape[1:])).index_copy(0, clients.to(v.device), v)
            for k, v in told.items()
        }
        who = known.nonzero()[:, 0]
        c = extra.get("coefficients", birth).clone()
        rows = c[clients[:, None], who]
        among = rows.sum(1, keepdim=True)  # what those who never spoke have of a row, they keep
        new = self._moved(rows / among, said[""][who], torch.searchsorted(who, clients))
        c[clients[:, None], who] = new * among
        teachers = {k: weighted_sums(new, v[who]) for k, v in said.items()}
        return teachers, {"coefficients": c, "known": known} | {f"said{k}": v for k, v in said.items()}

    def _moved(self, rows: Tensor, said: Tensor, own: Tensor) -> Tensor:
        """Rows of coefficients after their step."""
        fit: Fit = "weights" if self.exchange == "weights" else self.coefficients
        grad = gradient(rows, said, own, fit)
        if self.coefficients == "mse":
            return released(rows, grad, self.rho)
        if fit == "weights":
            return projected(rows, grad, self.rho, self.step)
        steep = (self.lam * curvature(rows, said)).clamp(min=1)
        return projected(rows, self.lam * grad, self.rho, self.step / steep)

    def _imitation(self, engine: Engine) -> LocalTask:
        """Without weight decay, which belongs to private training: who agrees with its teacher stays as it is."""
        none = self.exchange == "weights" or not self.lam
        training = replace(
            engine.training, epochs=0 if none else self.epochs, batch=self.batch, weight_decay=0.0, last_batch="even",
            augment=False, batchnorm=self.batchnorm,
        )  # fmt: skip
        share = min(1.0, self.lam)
        objective = Approach(share) if self.exchange == "weights" else Imitation(self.lam, self.temperature)
        return LocalTask(objective, "imitate", data="distill", training=training, send_model=False)
