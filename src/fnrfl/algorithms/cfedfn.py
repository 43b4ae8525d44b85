"""cFedFN-style: clients alike in their feature norms form clusters that train apart (after Wei, Huang, TIP 2023).

Of the paper only the abstract could be read: everything beyond "group clients by feature norms, train groups
separately" is a choice of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.parts.cluster import agglomerate
from fnrfl.algorithms.parts.generator import add_up
from fnrfl.core import trees
from fnrfl.core.algorithm import class_indicator, option
from fnrfl.core.net import Net
from fnrfl.core.types import Batch, Engine, Out, Probe, State, Tree


@dataclass(frozen=True)
class Description(Probe):
    """What a client tells of its private data under the common model: v_i[c] and how many examples each class has.

    Or, with `classes` 0, the mean size of every feature.
    """

    classes: int

    def __call__(self, out: Out, batch: Batch) -> Tree:
        if not self.classes:
            return {"sum": out.features.abs().sum(0), "count": out.features.new_full((1,), len(batch.y))}
        hot = class_indicator(batch.y, self.classes).to(out.features.dtype)
        return {"sum": out.features.norm(dim=-1) @ hot, "count": hot.sum(0)}

    def finish(self, total: Tree) -> Tree:
        return {"norms": total["sum"] / total["count"].clamp(min=1), "counts": total["count"]}

    def accepts(self, answer: Tree, one: Tree, examples: float) -> bool:
        return bool((answer["norms"] >= 0).all()) and add_up(answer["counts"], examples)


def positions(norms: Tensor, counts: Tensor) -> Tensor:
    """u_i[c] = sqrt(n_i^c / n_i) v_i[c] / vbar, with vbar the mean of all norms reported; 0 for absent classes.

    >>> positions(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([[5, 0], [0, 7]]))
    tensor([[0.5000, 0.0000],
            [0.0000, 1.5000]])
    """
    share = counts / counts.sum(1, keepdim=True)
    told = (counts > 0).expand_as(norms)
    return share.sqrt() * norms / norms[told].mean().clamp(min=1e-12)


@dataclass(frozen=True)
class CFedFN(FedAvg):
    """x_k <- x_k + sum_i p_i (y_i - x_k) over the active members i of cluster k, p_i shares of their examples.

    `params` of the state is the average of the clusters' models by their members' examples.
    """

    traffic: ClassVar[str] = "1 model down, 1 up; norms and counts of classes up once"
    needs: ClassVar[frozenset[str]] = frozenset({"features"})
    personalised: ClassVar[bool] = True

    clusters: int | Literal["auto"] = option("auto", "clusters; auto: 4, or half of the clients if that is less", ge=1)
    cut: Literal["number", "gap"] = option(
        "number", "as many clusters as asked for, or at most as many, cut at the largest gap in distance"
    )
    warmup: int = option(1, "rounds of FedAvg before clients are described and divided", ge=1)
    descriptor: Literal["classes", "features"] = option(
        "classes", "what describes a client: feature norms and shares of its classes, or the mean size of each feature"
    )

    def personal(self, net: Net, state: State, client: int, memory: Tree) -> State:
        return self._models(state)[int(state.extra["cluster"][client])] if "cluster" in state.extra else state

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        if engine.round < self.warmup:
            return super().round(state, cohort, engine)
        if "cluster" not in state.extra:
            cluster = self._divide(state, engine)
            models = [replace(state, extra={})] * (int(cluster.max()) + 1)
            engine.note(clusters=cluster.tolist())
        else:
            cluster, models = state.extra["cluster"].cpu(), self._models(state)
        for k in cluster[cohort].unique().tolist():  # the others keep their models
            models[k] = super().round(models[k], cohort[cluster[cohort] == k], engine)
        return self._gathered(state, cluster, models, engine)

    def _divide(self, state: State, engine: Engine) -> Tensor:
        """Every client's cluster, [N]: all of them describe their data under one and the same model."""
        N = len(engine.examples)
        probe = Description(engine.num_classes if self.descriptor == "classes" else 0)
        told = engine.measure(torch.arange(N), probe, data="private", at=state)
        most = max(1, min(4, N // 2)) if self.clusters == "auto" else self.clusters
        return agglomerate(positions(told["norms"], told["counts"]).cpu(), most, gap=self.cut == "gap")

    @staticmethod
    def _models(state: State) -> list[State]:
        models = State.unpacked("models", state.extra)
        return [trees.rows(models, k) for k in range(len(models.params))]

    @staticmethod
    def _gathered(state: State, cluster: Tensor, models: list[State], engine: Engine) -> State:
        """The state after a round; buffers are averaged as FedAvg does it."""
        stacked = trees.stacked([State(model.params, model.buffers) for model in models])
        share = torch.bincount(cluster, engine.examples.cpu(), len(models)) / engine.examples.sum().cpu()

        def average(values: Tensor) -> Tensor:
            if not values.is_floating_point():
                return values.amax(0)
            return torch.einsum("k,k...->...", share.to(values), values)

        mean: State = trees.mapped(average, stacked)
        engine.note(cluster_distance=float((stacked.params - mean.params).norm(dim=1).mean()))
        return State(mean.params, mean.buffers, state.extra | {"cluster": cluster} | stacked.packed("models"))
