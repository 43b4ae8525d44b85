"""FNR: refine the weakest clients on public data towards the others' feature norms, around any method.

The paper's Algorithms 1 to 3. Its penalty is a number without gradient, so it changes nothing; the penalties here are
functions of the features, and `constant` is the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.errors import ClientError
from fnrfl.core.kept import Kept
from fnrfl.core.net import Model, Net
from fnrfl.core.refinement import FnrOptions
from fnrfl.core.types import (
    Batch,
    Decorator,
    Engine,
    Flat,
    LocalTask,
    Out,
    Probe,
    Replies,
    Shapes,
    State,
    Training,
    Tree,
)

# -- Algorithm 1: class average feature norms -------------------------------------------------------------------------


def feature_norms(features: Tensor) -> Tensor:
    """U_i, the length of each example's features, [B]; with a gradient at zero too."""
    return (features.square().sum(-1) + 1e-12).sqrt()


def indicator(y: Tensor, num_classes: int) -> Tensor:
    """1 where an example is of a class, [B, C]. (torch's one_hot reads values, which vmap cannot.)"""
    return y[:, None] == torch.arange(num_classes, device=y.device)


@dataclass(frozen=True)
class ClassNorms(Probe):
    """F_i^k: the mean feature norm of each class that the data has; 0 for a class that it has not."""

    num_classes: int

    def __call__(self, out: Out, batch: Batch) -> Tree:
        hot = indicator(batch.y, self.num_classes).to(out.features.dtype)
        return {"sum": feature_norms(out.features) @ hot, "count": hot.sum(0)}

    def finish(self, total: Tree) -> Tree:
        return {"norms": total["sum"] / total["count"].clamp(min=1)}


class Accuracy(Probe):
    """A_i: the share of right answers."""

    def __call__(self, out: Out, batch: Batch) -> Tree:
        right = (out.logits.argmax(-1) == batch.y).to(out.logits.dtype)
        return {"right": right.sum(), "count": torch.ones_like(right).sum()}

    def finish(self, total: Tree) -> Tree:
        return {"accuracy": total["right"] / total["count"].clamp(min=1)}


@dataclass(frozen=True)
class ClassAccuracy(Probe):
    """The share of right answers of every class, nan for one that the data has not; for the event log."""

    num_classes: int

    def __call__(self, out: Out, batch: Batch) -> Tree:
        hot = indicator(batch.y, self.num_classes).to(out.logits.dtype)
        return {"right": (out.logits.argmax(-1) == batch.y).to(hot.dtype) @ hot, "count": hot.sum(0)}

    def finish(self, total: Tree) -> Tree:
        return {"accuracy": total["right"] / total["count"]}


# -- Selection, and Algorithm 2: differences of feature norms ---------------------------------------------------------


def num_refined(cohort: int, share: float) -> int:
    """floor(m * p), with 0.7 * 10 taken for 7 although a float says 6.999..."""
    return math.floor(cohort * share + 1e-9)


def weakest(accuracy: Tensor, share: float) -> Tensor:
    """Rows of the floor(m * p) lowest accuracies, ties to the lower row, in ascending order.

    >>> weakest(torch.tensor([0.9, 0.2, 0.5, 0.2]), share=0.5)
    tensor([1, 3])
    """
    return accuracy.argsort(stable=True)[: num_refined(len(accuracy), share)].sort().values


def num_peers(cohort: int, refined: int, target: str) -> int:
    """How many clients' norms the target of a refined one is averaged over."""
    return cohort - refined if target == "others" else cohort - 1


def norm_targets(norms: Tensor, refined: Tensor, target: Literal["others", "all"]) -> Tensor:
    """What the class norms of each refined row should become, [R, C].

    others: the mean over the rows that are not refined, as in the paper; all: over all other rows, as in its code. A
    row that has no other has no target: 0 for every class, which no penalty counts.

    >>> norm_targets(torch.tensor([[2.0], [4.0], [6.0]]), torch.tensor([0]), "others")
    tensor([[5.]])
    """
    if not num_peers(len(norms), len(refined), target):
        return torch.zeros_like(norms[refined])
    weak = torch.zeros(len(norms), dtype=torch.bool, device=refined.device).index_fill(0, refined, True)
    if target == "others":
        return norms[~weak].mean(0).expand(len(refined), -1)
    return (norms.sum(0) - norms[refined]) / (len(norms) - 1)


def norm_differences(norms: Tensor, refined: Tensor, target: Literal["others", "all"]) -> Tensor:
    """Delta_j of Algorithm 2: the sum over the others m of F_m - F_j, for every class, [R, C]."""
    peers = num_peers(len(norms), len(refined), target)
    return peers * (norm_targets(norms, refined, target) - norms[refined])


# -- The penalties J ---------------------------------------------------------------------------------------------------
# Each is a function of the examples' norms u [B], the class indicator hot [B, C], the targets [C] (0: none) and the
# number of peers. rho_l is the share of class l in the batch, as in Algorithm 3.

Penalty = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _live(u: Tensor, hot: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rho, class means of this batch, targets), with rho 0 and harmless values where there is nothing to compare."""
    count = hot.sum(0)
    known = (target > 0) & (count > 0)
    mean = torch.where(known, (u @ hot) / count.clamp(min=1), 1.0)
    return torch.where(known, count, 0.0) / len(u), mean, torch.where(known, target, 1.0)


def relative(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l (F_l / T_l - 1)^2: free of scale, so one weight serves all nets."""
    rho, mean, goal = _live(u, hot, target)
    return rho @ (mean / goal - 1).square()


def squared(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l (F_l - T_l)^2."""
    rho, mean, goal = _live(u, hot, target)
    return rho @ (mean - goal).square()


def absolute(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l |F_l - T_l|."""
    rho, mean, goal = _live(u, hot, target)
    return rho @ (mean - goal).abs()


def huber(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l H(F_l - T_l): squared/2 within 1, absolute outside."""
    rho, mean, goal = _live(u, hot, target)
    gap = (mean - goal).abs()
    return rho @ torch.where(gap < 1, gap.square() / 2, gap - 0.5)


def per_sample(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """mean_i (u_i - T_{y_i})^2: also narrows the spread within a class."""
    goal = hot @ target
    return torch.where(goal > 0, (u - goal).square(), 0.0).mean()


def log_ratio(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l (log F_l - log T_l)^2: the same for twice as long and half as long."""
    rho, mean, goal = _live(u, hot, target)
    return rho @ (mean.log() - goal.log()).square()


def literal(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """-sum_l rho_l Delta[l] F_l with Delta from this very batch, held constant: the gradient the text suggests."""
    rho, mean, goal = _live(u, hot, target)
    return -(rho * peers * (goal - mean).detach()) @ mean


def constant(u: Tensor, hot: Tensor, target: Tensor, peers: int) -> Tensor:
    """sum_l rho_l Delta[l], as printed: a number, so the weights cannot notice it."""
    rho, mean, goal = _live(u, hot, target)
    return (rho @ (peers * (goal - mean))).detach()


PENALTIES: dict[str, Penalty] = {
    "relative": relative,
    "squared": squared,
    "absolute": absolute,
    "huber": huber,
    "per-sample": per_sample,
    "log-ratio": log_ratio,
    "literal": literal,
    "constant": constant,
}


@dataclass(frozen=True)
class Penalised(Objective):
    """Phi = L + lambda * J around any objective; targets come in `own` (refinement) or `shared` (local training)."""

    inner: Objective
    penalty: str
    weight: float
    peers: int

    def noise(self, batch: int) -> Shapes:
        return self.inner.noise(batch)

    def begin(self, start: State, own: Tree) -> State:
        return self.inner.begin(start, own)

    def loss(self, out: Out, model: Model, params: Flat, batch: Batch, shared: Tree, own: Tree) -> Tensor:
        loss = self.inner.loss(out, model, params, batch, shared, own)
        if not self.weight:  # the control: exactly the inner objective
            return loss
        target = (own | shared)["fnr.target"]
        hot = indicator(batch.y, len(target)).to(out.features.dtype)
        return loss + self.weight * PENALTIES[self.penalty](feature_norms(out.features), hot, target, self.peers)

    def correct(self, grad: Flat, params: Flat, start: Flat, shared: Tree, own: Tree) -> Flat:
        return self.inner.correct(grad, params, start, shared, own)

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        return self.inner.finish(start, end, travel, examples, shared, own)


# -- Algorithm 3: the round -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FNR(FnrOptions, Algorithm):
    """The inner method's round on an engine whose clients refine: no method knows about it.

    Refinement changes the model that a client hands over. What the inner method estimates from private training
    (variates, drift, step counts, memory) stays as it was.
    """

    inner: Algorithm
    shuffle: bool = True  # the paper's code reads public data in a fixed order; set by protocol = "paper"
    norm_pass_train_mode: bool = False  # a leak: the norm pass overwrites every client's BatchNorm statistics

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.inner.needs | {"features", "public-labels"}

    def adapt(self, module: nn.Module, example: Tensor) -> nn.Module:
        return self.inner.adapt(module, example)

    @property
    def trains_clients(self) -> bool:  # type: ignore[override]
        return self.inner.trains_clients

    @property
    def personalised(self) -> bool:  # type: ignore[override]
        return self.inner.personalised

    def client_state(self, net: Net) -> Tree:
        return self.inner.client_state(net)

    def init(self, net: Net) -> State:
        return self.inner.init(net)

    def personal(self, net: Net, state: State, client: int, memory: Tree) -> State:
        return self.inner.personal(net, state, client, memory)

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        refining = Refining(engine, self, cohort, state.extra.get("fnr.target"))
        new = self.inner.round(state, cohort, refining)
        if self.when == "refine" or refining.norms is None:
            return new
        return replace(new, extra=new.extra | {"fnr.target": refining.norms.mean(0)})


class Refining(Decorator):
    """An engine whose clients end private training by refining the weakest of them."""

    def __init__(self, engine: Engine, fnr: FNR, cohort: Tensor, target: Tensor | None) -> None:
        super().__init__(engine)
        self.fnr, self.cohort, self.target = fnr, cohort, target
        self.norms: Tensor | None = None  # [M, C] of everybody who has been streamed
        self._noted: dict[str, dict[int, object]] = {}
        self._refined: list[int] = []
        self._without_target: list[int] = []
        self._seen: dict[str, list[Tensor]] = {}  # [R, C] of refined clients, before and after

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        fnr = self.fnr
        refines = fnr.when != "local" and num_refined(len(cohort), fnr.share) > 0
        if task.purpose != "local" or not (refines or fnr.when != "refine"):
            yield from self.engine.stream(cohort, task)
            return
        # A method that estimates from private training needs both models of a refined client.
        early = task.upload and (fnr.upload == "twice" or "uses-trained" in fnr.inner.needs or not refines)
        trained = Kept(self.engine.stream(cohort, replace(self._local(task), hold=True, upload=early)), models=early)
        clients = trained.clients
        if fnr.norm_pass_train_mode:
            for _ in self.engine.stream(clients, self._norm_pass()):
                pass
        norms = self.engine.measure(clients, ClassNorms(self.num_classes))["norms"].cpu()
        self._check_finite(clients, norms)
        self.norms = norms if self.norms is None else torch.cat([self.norms, norms])
        if not refines:
            self._remark(clients, norms=norms)
            yield from trained
            return
        accuracy = self.engine.measure(clients, Accuracy(), data="ranking")["accuracy"].cpu()
        by_index = clients.argsort()  # so that ties go to the lower client
        refined = by_index[weakest(accuracy[by_index], fnr.share)].sort().values
        target = norm_targets(norms, refined, fnr.target)
        self._remark(clients, ranking=accuracy, norms=norms)
        self._refined += clients[refined].tolist()
        self.note(refined=self._refined)
        self._observe("refined_before", clients[refined])
        peers = num_peers(len(clients), len(refined), fnr.target)
        if len(refined) and not peers and fnr.weight:
            self._without_target += clients[refined].tolist()
            self.note(refined_without_target=self._without_target)
        first = 0
        for chunk in trained:
            here = torch.where((refined >= first) & (refined < first + len(chunk.clients)))[0]
            refinement = self._refinement(task, peers, {"fnr.target": target[here]})
            yield self._handed_over(chunk, refined[here] - first, refinement, early)
            first += len(chunk.clients)
        self._observe("refined_after", clients[refined])

    def _check_finite(self, clients: Tensor, norms: Tensor) -> None:
        """Targets are made of all norms: one that is not finite would spoil every refinement."""
        bad = (~norms.isfinite().all(1)).nonzero()
        if len(bad):
            raise ClientError(
                "its feature norms on public data are not finite, although its model is: its features are too large. "
                "Lower client.lr.",
                client=int(clients[bad[0, 0]]),
                round=self.round + 1,
                stage="measure",
            )

    def _remark(self, clients: Tensor, **facts: Tensor) -> None:
        """Note what is known of each client, in cohort order; a clustered method streams its clusters in turn."""
        for name, values in facts.items():
            noted = self._noted.setdefault(name, {})
            noted.update(zip(clients.tolist(), values.tolist(), strict=True))
            self.note(**{name: [noted.get(client) for client in self.cohort.tolist()]})

    def _observe(self, name: str, clients: Tensor) -> None:
        """Note the mean over all refined clients of each class's accuracy on ranking data."""
        seen = self._seen.setdefault(name, [])
        if len(clients):  # not if their replies were lost
            seen.append(self.observe(clients, ClassAccuracy(self.num_classes), data="ranking")["accuracy"])
        mean = torch.cat(seen).mean(0).tolist() if seen else []
        self.note(**{name: [None if value != value else value for value in mean]})

    def _handed_over(self, chunk: Replies, rows: Tensor, task: LocalTask, early: bool) -> Replies:
        """The chunk with the models that its clients hand over: refined ones, and the others as they are."""
        parts = list(self.engine.stream(chunk.clients[rows], task)) if len(rows) else []
        done = {c for part in parts for c in part.clients.tolist()}
        rest = torch.tensor([m for m, c in enumerate(chunk.clients.tolist()) if c not in done], dtype=torch.int64)
        if not task.upload:  # the models stay where they are
            return chunk
        if early and not self.fnr.norm_pass_train_mode:  # the server has them already
            parts.append(chunk.pick(rest))
        elif len(rest):
            parts.append(self.engine.train(chunk.clients[rest], self._delivery(task)))
        got = Replies.stack(parts)
        order = torch.argsort(got.clients)[torch.argsort(torch.argsort(chunk.clients))]
        # `trained` stays: what the server received before, or nothing at all, so that using it would be loud.
        return replace(chunk, params=got.params[order], buffers={k: v[order] for k, v in got.buffers.items()})

    # -- the tasks ----------------------------------------------------------------------------------------------------
    def _local(self, task: LocalTask) -> LocalTask:
        if self.fnr.when == "refine" or self.target is None:
            return task
        objective = Penalised(task.objective, self.fnr.penalty, self.fnr.weight, 1)
        return replace(task, objective=objective, shared=task.shared | {"fnr.target": self.target})

    def _refinement(self, task: LocalTask, peers: int, own: Tree) -> LocalTask:
        """What is the client's own, such as FedBN's layers, is not refined."""
        fnr = self.fnr
        objective = Penalised(Objective(), fnr.penalty, fnr.weight, peers)
        training = replace(self._training(), frozen=task.stays)
        return LocalTask(
            objective, "refine", own=own, data="public", training=training, remember=False, upload=task.upload,
            hold=True, stays=task.stays,
        )  # fmt: skip

    def _training(self) -> Training:
        fnr = self.fnr
        return self.engine.training.but(
            epochs=fnr.epochs, batch=fnr.batch, lr=fnr.lr, optimizer=fnr.optimizer, batchnorm=fnr.batchnorm,
            augment=fnr.augment, shuffle=fnr.shuffle,
        )  # fmt: skip

    def _norm_pass(self) -> LocalTask:
        """A pass over public data that moves nothing but BatchNorm statistics, as the paper's code does by accident."""
        training = replace(
            self._training(), epochs=1, lr=0.0, weight_decay=0.0, batchnorm="updating", augment=False, shuffle=False
        )
        return LocalTask(
            Objective(), "norm-pass", data="public", training=training, remember=False, upload=False, hold=True
        )

    def _delivery(self, task: LocalTask) -> LocalTask:
        """No step at all: the client sends the model that it holds."""
        training = replace(self.engine.training, epochs=0)
        return LocalTask(Objective(), "deliver", training=training, remember=False, stays=task.stays)
