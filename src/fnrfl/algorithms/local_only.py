"""Local-only: every client trains a model of its own and nothing is sent, the lower bound; a control."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.net import Net
from fnrfl.core.types import Engine, LocalTask, State, Tree, nothing


@dataclass(frozen=True)
class GoingOn(Objective):
    """Private training from the client's own model."""

    def begin(self, start: State, own: Tree) -> State:
        return State.unpacked("model", own)


@dataclass(frozen=True)
class Keeping(Objective):
    """A task whose end is the client's own model from now on."""

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        return {}, end.packed("model")


@dataclass(frozen=True)
class LocalOnly(Algorithm):
    """w_i <- where private training from w_i ended; the server's model stays as it was born."""

    traffic: ClassVar[str] = "none"
    personalised: ClassVar[bool] = True

    def client_state(self, net: Net) -> Tree:
        return State(*net.flatten()).packed("model")

    def personal(self, net: Net, state: State, client: int, memory: Tree) -> State:
        return State.unpacked("model", memory)

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        got = engine.fold(cohort, LocalTask(GoingOn(), "local", send_model=False, hold_model=True), mean=nothing)
        # Without a step: what is kept is the model held, and refinement may have changed that after training.
        still = replace(engine.training, epochs=0)
        engine.fold(
            got.clients, LocalTask(Keeping(), "keep", training=still, role="extra", send_model=False), mean=nothing
        )
        return state
