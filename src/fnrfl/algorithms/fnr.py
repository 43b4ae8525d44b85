"""FNR: refine the weakest clients on public data towards the others' feature norms, around any method.

The paper's Algorithms 1 to 3. Its penalty is a number without gradient, so it changes nothing; the penalties here are
functions of the features, and `constant` is the paper's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fnrfl.algorithms.parts.norms import (
    Accuracy,
    ClassAccuracy,
    ClassNorms,
    Recall,
    norm_differences,
    norm_targets,
    num_peers,
    num_refined,
    weakest,
)
from fnrfl.algorithms.parts.penalties import Penalised
from fnrfl.algorithms.parts.spilled import SpilledReplies
from fnrfl.algorithms.parts.watching import RefinementWatch
from fnrfl.core import trees
from fnrfl.core.algorithm import Algorithm, MethodWrapper, Objective
from fnrfl.core.errors import ClientError, FnrflError
from fnrfl.core.training import FnrOptions
from fnrfl.core.types import Decorator, Engine, LocalTask, Replies, State, Training, Tree


@dataclass(frozen=True)
class FNR(FnrOptions, MethodWrapper):
    """The inner method's round on an engine whose clients refine: no method knows about it.

    Refinement changes the model that a client hands over. What the inner method estimates from private training
    (variates, drift, step counts, memory) stays as it was.
    """

    inner: Algorithm
    ranking: Literal["accuracy", "recall"] = "accuracy"  # recall, its mean over classes, with protocol = "paper"
    shuffle: bool = True  # the paper's code reads public data in a fixed order; set by protocol = "paper"
    norm_pass_train_mode: bool = False  # a leak: norms are of a train-mode pass, which overwrites BatchNorm statistics

    @property
    def method(self) -> Algorithm:
        return self.inner

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.inner.needs | {"features", "public-labels"}

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        refining = Refining(engine, self, cohort, state.extra.get("fnr.target"))
        new = self.inner.round(state, cohort, refining)
        if self.trains_clients and not refining.saw_private_training:
            raise FnrflError(
                f"No task of {type(self.inner).__name__} in round {engine.round + 1} was private training, so FNR had "
                "nobody to refine. Leave LocalTask.role out for the clients' training on their own data."
            )
        if self.when == "refine" or refining.norms is None:
            return new
        return replace(new, extra=new.extra | {"fnr.target": refining.norms.mean(0)})


class Refining(Decorator):
    """An engine whose clients end private training by refining the weakest of them."""

    def __init__(self, engine: Engine, fnr: FNR, cohort: Tensor, target: Tensor | None) -> None:
        super().__init__(engine)
        self.fnr, self.cohort, self.target = fnr, cohort, target
        self.saw_private_training = False
        self.norms: Tensor | None = None  # [M, C] of everybody who has been streamed
        self._noted: dict[str, dict[int, object]] = {}
        self._refined: list[int] = []
        self._not_refined: list[int] = []
        self._without_target: list[int] = []
        self._observed: dict[str, list[Tensor]] = {}  # [R, C] of refined clients, before and after
        self._watched: list[object] = []

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        fnr, private = self.fnr, task.is_private_training
        self.saw_private_training |= private
        refines = fnr.when != "local" and num_refined(len(cohort), fnr.share) > 0
        penalises = fnr.when != "refine"
        if not private or not (refines or penalises):
            yield from self.engine.stream(cohort, task)
            return
        # A method that estimates from private training needs both models of a refined client.
        needs_both = fnr.upload == "twice" or "uses-trained" in fnr.inner.needs or not refines
        uploads_before_refining = task.send_model and needs_both
        local = replace(self._local(task), hold_model=True, send_model=uploads_before_refining)
        trained = SpilledReplies(self.engine.stream(cohort, local), keep_models=uploads_before_refining)
        clients, norms = self._measure_norms(trained.clients)
        if refines:
            yield from self._refine_weakest(cohort, trained, clients, norms, task, uploads_before_refining)
        else:
            self._note_per_client(clients, norms=norms)
            yield from trained

    def _measure_norms(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Who has answered, and their class norms, [M, C]; under the leak those of an earlier pass in train mode."""
        if self.fnr.norm_pass_train_mode:
            for _ in self.engine.stream(clients, self._norm_pass()):
                pass
        clients, answers = self.ask(clients, self._norm_probe())
        norms = answers["norms"].cpu()
        bad = (~norms.isfinite().all(1)).nonzero()
        if len(bad):  # targets are made of all norms: one that is not finite would spoil every refinement
            raise ClientError(
                "its feature norms on public data are not finite, although its model is: its features are too large. "
                "Lower client.lr.",
                client=int(clients[bad[0, 0]]),
                round=self.round + 1,
                stage="measure",
            )
        self.norms = norms if self.norms is None else torch.cat([self.norms, norms])
        return clients, norms

    def _refine_weakest(
        self,
        cohort: Tensor,
        trained: SpilledReplies,
        measured: Tensor,
        norms: Tensor,
        task: LocalTask,
        uploads_before_refining: bool,
    ) -> Iterator[Replies]:
        """Rank the clients, refine the weakest of them, and let everybody hand over a model.

        Whoever has trained and does not answer a question is not refined, and hands over the model that it has.
        """
        fnr = self.fnr
        ranking = Recall(self.num_classes) if fnr.ranking == "recall" else Accuracy()
        clients, answers = self.ask(measured, ranking, data="ranking")
        accuracy, norms = answers["accuracy"].cpu(), norms[torch.isin(measured, clients)]
        by_index = clients.argsort()  # so that ties go to the lower client
        refined = by_index[weakest(accuracy[by_index], fnr.share)].sort().values
        target = (norm_differences if fnr.penalty == "constant" else norm_targets)(norms, refined, fnr.target)
        peers = num_peers(len(clients), len(refined), fnr.target)
        self._note_per_client(clients, ranking=accuracy, norms=norms)
        self._note_refined(clients[refined], has_target=peers > 0)
        before = self._observe("refined_before", clients[refined])
        watches = fnr.watch and self.simulated and len(refined)
        watch = self._watch(cohort, clients, refined, task, norms) if watches else None
        for chunk in trained:
            here = torch.isin(clients[refined], chunk.clients)
            refinement = self._refinement(task, peers, {"fnr.target": target[here]})
            delivered = self._refine_chunk(chunk, clients[refined[here]], refinement, uploads_before_refining)
            if len(delivered.clients):
                yield delivered
        after = self._observe("refined_after", clients[refined])
        if watch is not None:
            self._watched.append(watch.told(before, after))
            self.note(watched=self._watched)

    def _refine_chunk(self, chunk: Replies, weak: Tensor, task: LocalTask, uploads_before_refining: bool) -> Replies:
        """The chunk with the models that its clients hand over: refined ones, and the others as they are.

        A client whose refinement does not come hands over the model that it had before.
        """
        parts = list(self.engine.stream(weak, task)) if len(weak) else []
        done = torch.cat([weak[:0], *(part.clients for part in parts)])
        self._note_not_refined(weak[~torch.isin(weak, done)].tolist())
        if not task.send_model:  # the models stay where they are
            return chunk
        rest = (~torch.isin(chunk.clients, done)).nonzero().flatten()
        if uploads_before_refining and not self.fnr.norm_pass_train_mode:  # the server has them already
            parts.append(chunk.pick(rest))
        elif len(rest):
            parts += self.engine.stream(chunk.clients[rest], self._delivery(task))
        return _with_models(chunk, parts)

    # -- the event log ------------------------------------------------------------------------------------------------
    def _note_per_client(self, clients: Tensor, **facts: Tensor) -> None:
        """Note what is known of each client, in cohort order; a clustered method streams its clusters in turn."""
        for name, values in facts.items():
            noted = self._noted.setdefault(name, {})
            noted.update(zip(clients.tolist(), values.tolist(), strict=True))
            self.note(**{name: [noted.get(client) for client in self.cohort.tolist()]})

    def _note_refined(self, clients: Tensor, *, has_target: bool) -> None:
        self._refined += clients.tolist()
        self.note(refined=self._refined)
        if len(clients) and not has_target and self.fnr.weight:
            self._without_target += clients.tolist()
            self.note(refined_without_target=self._without_target)

    def _note_not_refined(self, clients: list[int]) -> None:
        """Note weak clients whose refinement did not come, or not with finite numbers."""
        if clients:
            self._not_refined += clients
            self._refined = [client for client in self._refined if client not in clients]
            self.note(refined=self._refined, not_refined=self._not_refined)

    def _observe(self, name: str, clients: Tensor) -> Tensor:
        """Note the mean over all refined clients of each class's accuracy on ranking data; these clients' is given."""
        if not self.simulated:
            return torch.zeros(0, self.num_classes)
        observed = self._observed.setdefault(name, [])
        if len(clients):  # not if their replies were lost
            observed.append(self.observe(clients, ClassAccuracy(self.num_classes), data="ranking")["accuracy"])
        mean = torch.cat(observed).mean(0).tolist() if observed else []
        self.note(**{name: [None if value != value else value for value in mean]})
        return observed[-1] if len(clients) else torch.zeros(0, self.num_classes)

    def _watch(
        self, cohort: Tensor, clients: Tensor, refined: Tensor, task: LocalTask, norms: Tensor
    ) -> RefinementWatch | None:
        """Look at updates and norms before refinement; None where clients start from the models that they hold."""
        if task.start is None:
            return None
        start = task.start.params
        if start.ndim == 2:  # rows of all who were asked, and some may be lost
            place = {client: m for m, client in enumerate(cohort.tolist())}
            start = start[[place[client] for client in clients.tolist()]]
        return RefinementWatch(self, clients, refined, start, norms, self._norm_probe())

    # -- the tasks ----------------------------------------------------------------------------------------------------
    def _local(self, task: LocalTask) -> LocalTask:
        no_delta = self.fnr.penalty == "constant"  # it has no gradient, and no Delta is printed for private training
        if self.fnr.when == "refine" or self.target is None or no_delta:
            return task
        objective = Penalised(task.objective, self.fnr.penalty, self.fnr.weight, 1)
        return replace(task, objective=objective, shared=task.shared | {"fnr.target": self.target})

    def _refinement(self, task: LocalTask, peers: int, own: Tree) -> LocalTask:
        """What is the client's own, such as FedBN's layers, is not refined."""
        fnr = self.fnr
        objective = Penalised(Objective(), fnr.penalty, fnr.weight, peers)
        training = replace(self._training(), frozen=task.never_sent)
        return LocalTask(
            objective, "refine", own=own, data="public", training=training, remember=False, send_model=task.send_model,
            hold_model=True, on_missing="keep", never_sent=task.never_sent,
        )  # fmt: skip

    def _training(self) -> Training:
        fnr = self.fnr
        return self.engine.training.but(
            epochs=fnr.epochs, batch=fnr.batch, lr=fnr.lr, optimizer=fnr.optimizer, batchnorm=fnr.batchnorm,
            augment=fnr.augment, shuffle=fnr.shuffle,
        )  # fmt: skip

    def _norm_probe(self) -> ClassNorms:
        """The question about class norms; under the leak it is asked in train mode."""
        return ClassNorms(self.num_classes, self._norm_pass().training if self.fnr.norm_pass_train_mode else None)

    def _norm_pass(self) -> LocalTask:
        """A pass over public data that moves nothing but BatchNorm statistics, as the paper's code does by accident."""
        training = replace(
            self._training(), epochs=1, lr=0.0, weight_decay=0.0, batchnorm="updating", augment=False, shuffle=False,
            frozen=frozenset(self.net.shapes),
        )  # fmt: skip
        return LocalTask(
            Objective(),
            "norm-pass",
            data="public",
            training=training,
            remember=False,
            send_model=False,
            hold_model=True,
        )

    def _delivery(self, task: LocalTask) -> LocalTask:
        """No step at all: the client sends the model that it holds."""
        training = replace(self.engine.training, epochs=0)
        return LocalTask(
            Objective(), "deliver", training=training, role="extra", remember=False, never_sent=task.never_sent
        )


def _with_models(chunk: Replies, parts: list[Replies]) -> Replies:
    """The chunk with the models that came in these parts, of the clients that have handed one over.

    `trained` stays: what the server received before, or nothing at all, so that using it would be loud.
    """
    row = {client: i for i, client in enumerate(c for part in parts for c in part.clients.tolist())}
    if len(row) < len(chunk.clients):
        there = [m for m, client in enumerate(chunk.clients.tolist()) if client in row]
        chunk = chunk.pick(torch.tensor(there, dtype=torch.int64))
    if not len(chunk.clients):
        return chunk
    got, order = Replies.stack(parts), torch.tensor([row[client] for client in chunk.clients.tolist()])
    return replace(chunk, refined=got.params[order], buffers=trees.rows(got.buffers, order))
