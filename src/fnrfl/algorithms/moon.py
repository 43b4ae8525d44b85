"""MOON: pull features to the server model's and away from the client's previous ones (Li, He, Song, CVPR 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.core.algorithm import Objective, option
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.modules import ProjectionHead, last_linear
from fnrfl.core.net import Model, Net
from fnrfl.core.types import Batch, Flat, Out, State, Tree


@dataclass(frozen=True)
class Contrastive(Objective):
    """Cross-entropy plus mu times the contrast of three projections; both references are frozen, in eval mode."""

    takes_padding: ClassVar[bool] = True
    mu: float
    tau: float

    def loss(self, out: Out, model: Model, params: Flat, batch: Batch, shared: Tree, own: Tree) -> Tensor:
        previous = State.unpacked("previous", own, ".")
        near = cosine_similarity(out.projection, model.frozen(model.start, batch.x).projection)
        far = cosine_similarity(out.projection, model.frozen(previous, batch.x).projection)
        contrast = -torch.stack([near, far], -1).div(self.tau).log_softmax(-1)[..., 0]
        # A client that has never taken part has no previous model, and no contrast.
        return super().loss(out, model, params, batch, shared, own) + self.mu * own["seen"] * batch.mean(contrast)

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        return {}, end.packed("previous", ".") | {"seen": torch.ones_like(own["seen"])}


@dataclass(frozen=True)
class Moon(FedAvg):
    """FedAvg with a contrastive term; the previous model is the one that private training ended in."""

    needs: ClassVar[frozenset[str]] = frozenset({"features"})
    traffic: ClassVar[str] = "1 model down, 1 up, with the projection head if there is one"

    mu: float = option(1.0, "weight of the contrastive term; the paper tunes it in 0.1, 1, 5, 10", ge=0.0)
    tau: float = option(0.5, "temperature", gt=0.0)
    head: int = option(
        0, "width of the projection head (the paper: 256); 0: none, so that all methods share one model", ge=0
    )

    @property
    def objective(self) -> Objective:  # type: ignore[override]
        return Contrastive(self.mu, self.tau)

    def adapt(self, module: nn.Module, example: Tensor) -> nn.Module:
        if not self.head:
            return module
        name = last_linear(module, example)
        if name is None:
            raise CompatibilityError(
                f"moon with algorithm.head = {self.head} replaces the model's last Linear, and this model has none. "
                "Set algorithm.head = 0."
            )
        last = module.get_submodule(name)
        assert isinstance(last, nn.Linear)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, ProjectionHead(last.in_features, self.head, last.out_features))
        return module

    def client_state(self, net: Net) -> Tree:
        model = State(*net.flatten())
        return model.packed("previous", ".") | {"seen": model.params.new_zeros(())}
