"""FedDyn: every client adds up its past drift, and the pull away from it makes all agree (Acar et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fnrfl.core.algorithm import Algorithm, Objective, option
from fnrfl.core.net import Net
from fnrfl.core.types import Engine, Flat, LocalTask, State, Tree


@dataclass(frozen=True)
class Dynamic(Objective):
    """f_i(y) + alpha_i/2 ||y - x + h_i||^2, alpha_i = alpha / w_i, h_i the sum of the client's drifts so far."""

    alpha: float

    def correct(self, grad: Flat, params: Flat, start: Flat, shared: Tree, own: Tree) -> Flat:
        return grad + self.alpha / own["w"] * (params - start + own["h"])  # all of it, before momentum

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        return {}, {"h": own["h"] + (end.params - start.params)}  # the paper's lambda_i is -alpha_i h_i


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """h <- h + 1/N sum_i (y_i - x); x <- 1/m sum_i z_i + h.

    Invariant: h is the mean of all N clients' h_i, whoever takes part. Models and drifts are averaged uniformly; that
    one client has more examples than another enters through alpha_i alone.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"uses-trained"})

    alpha: float = option(0.01, "strength of the pull; the paper's grid is 0.001, 0.01, 0.1", gt=0.0)
    weights: Literal["examples", "uniform"] = option(
        "examples", "alpha_i = alpha / w_i with w_i by examples (finds the pooled optimum) or 1 (the paper's text)"
    )
    smallest: float = option(
        0.01, "a client counts for at least this part of the mean number of examples, which bounds alpha_i", ge=0.0
    )

    def client_state(self, net: Net) -> Tree:
        return {"h": net.zeros()}

    def init(self, net: Net) -> State:
        return State(*net.flatten(), self.client_state(net))

    def task(self, state: State, w: Tensor) -> LocalTask:
        """What the cohort is asked; w is [M]."""
        return LocalTask(Dynamic(self.alpha), "local", state, own={"w": w})

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        x, everybody = state.params, engine.examples
        w = everybody / everybody.mean() if self.weights == "examples" else torch.ones_like(everybody)
        got = engine.fold(
            cohort,
            self.task(state, w.clamp(min=self.smallest).to(x.dtype)[cohort]),
            mean=lambda r: {"moved": r.params - x},
            uniform=True,
            total=lambda r: {"h": r.trained - x} | r.extras,
        )
        kept = {k: state.extra[k] + change / len(everybody) for k, change in got.total.items()}
        engine.note(correction=float(kept["h"].norm()))  # how far the new model is from the mean of the clients'
        return state.step(got, x + got.mean["moved"] + kept["h"], **kept)
