"""SCAFFOLD: control variates remove client drift (Karimireddy et al., ICML 2020, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fnrfl.core.algorithm import Algorithm, Objective, option
from fnrfl.core.net import Model, Net
from fnrfl.core.types import Batch, Engine, Flat, LocalTask, Out, State, Training, Tree


@dataclass(frozen=True)
class Controlled(Objective):
    """Local steps corrected by c - c_i, inside the gradient or after the step."""

    renew: bool  # c_i from this very training (option II)
    after_momentum: bool = False

    def correct(self, grad: Flat, params: Flat, start: Flat, shared: Tree, own: Tree) -> Flat:
        if self.after_momentum:
            return grad
        return grad - own["c"] + shared["c"]  # line 10; inside the gradient, so that momentum carries it too

    def shift(self, lr: float | Tensor, shared: Tree, own: Tree) -> Flat | None:
        return lr * (own["c"] - shared["c"]) if self.after_momentum else None

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        if not self.renew:
            return {}, {}
        # Line 12 (ii). The paper divides by K * lr, which is how far c - c_i goes after the momentum step. Inside the
        # gradient it goes as far as `travel` says; K * lr would make the variates grow without bound there.
        travel = own["lr_steps"] if self.after_momentum else travel
        new = own["c"] - shared["c"] + (start.params - end.params) / travel
        return {"delta_c": new - own["c"]}, {"c": new}


@dataclass(frozen=True)
class AtStart(Objective):
    """The gradient of the client's whole loss at the model received, collected by unit steps: line 12 (i)."""

    weight_decay: float

    def loss(self, out: Out, model: Model, params: Flat, batch: Batch, shared: Tree, own: Tree) -> Tensor:
        here = model.start.params + (params - params.detach())  # its value stays at x, its gradient flows to y
        return len(batch.y) * super().loss(model(here, batch.x), model, here, batch, shared, own)

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        new = (start.params - end.params) / examples + self.weight_decay * start.params
        return {"delta_c": new - own["c"]}, {"c": new}


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """x <- x + server_lr * mean(y_i - x); c <- c + (the cohort's part of all clients) * mean(c_i^+ - c_i).

    Invariant: c is the mean of all c_i, weighted as `weights` says, whoever takes part: by examples or evenly.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"linear-optimiser", "uses-trained"})
    traffic: ClassVar[str] = "1 model and P numbers down, as much up"

    variates: Literal["I", "II"] = option(
        "II", "new c_i from: I (an extra pass over the data at the server model), II (the steps taken)"
    )
    weights: Literal["examples", "uniform", "niid-bench"] = option(
        "examples",
        "weights of models and variates: by examples (finds the pooled optimum), uniform (the paper's) or niid-bench "
        "(models by examples, variates evenly)",
    )
    server_lr: float = option(1.0, "step size of the server, eta_g", gt=0.0)
    correction: Literal["gradient", "after-momentum"] = option(
        "gradient", "where c - c_i enters: the gradient (the paper) or after the momentum step (NIID-Bench)"
    )

    def client_state(self, net: Net) -> Tree:
        return {"c": net.zeros()}

    def init(self, net: Net) -> State:
        return State(*net.flatten(), {"c": net.zeros()})

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        objective = Controlled(self.variates == "II", self.correction == "after-momentum")
        task = LocalTask(objective, "local", state, shared={"c": state.extra["c"]})
        got = engine.fold(
            cohort,
            task,
            mean=lambda r: {"moved": r.trained - state.params, "refinement": r.params - r.trained} | r.extras,
            total=lambda r: r.extras,
            uniform=self.weights == "uniform",
        )
        new = got
        if self.variates == "I":
            gradients = self._gradients(state, engine.training)
            new = engine.fold(got.clients, gradients, mean=lambda r: r.extras, total=lambda r: r.extras)
        everybody = engine.examples
        if self.weights == "examples":
            change = new.examples.sum() / everybody.sum() * new.mean["delta_c"]
        else:
            change = new.total["delta_c"] / len(everybody)
        params = state.params + self.server_lr * got.mean["moved"] + got.mean["refinement"]  # line 17
        return state.step(got, params, c=state.extra["c"] + change)  # line 17

    def _gradients(self, state: State, training: Training) -> LocalTask:
        once = replace(
            training, optimizer="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, epochs=1, last_batch="even",
            shuffle=False, augment=False, batchnorm="batch",
        )  # fmt: skip
        return LocalTask(
            AtStart(training.weight_decay), "gradient", state, training=once, role="extra", send_model=False
        )
