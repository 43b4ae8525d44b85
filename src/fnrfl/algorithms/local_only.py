"""Local-only: every client trains a model of its own and nothing is sent, the lower bound; a control."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.net import Net
from fnrfl.core.types import Engine, LocalTask, State, Tree, nothing


def as_memory(model: State) -> Tree:
    """A model as a client remembers it."""
    return {"model": model.params} | {f"model/{k}": v for k, v in model.buffers.items()}


def remembered(memory: Tree, like: State) -> State:
    """The model that a client remembers, with the buffers that `like` has."""
    return State(memory["model"], {k: memory[f"model/{k}"] for k in like.buffers})


@dataclass(frozen=True)
class GoingOn(Objective):
    """Private training from the client's own model."""

    def begin(self, start: State, own: Tree) -> State:
        return remembered(own, start)


@dataclass(frozen=True)
class Keeping(Objective):
    """A task whose end is the client's own model from now on."""

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        return {}, as_memory(end)


@dataclass(frozen=True)
class LocalOnly(Algorithm):
    """w_i <- where private training from w_i ended; the server's model stays as it was born."""

    traffic: ClassVar[str] = "none"
    personalised: ClassVar[bool] = True

    def client_state(self, net: Net) -> Tree:
        return as_memory(State(*net.flatten()))

    def personal(self, net: Net, state: State, client: int, memory: Tree) -> State:
        return remembered(memory, state)

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        got = engine.fold(cohort, LocalTask(GoingOn(), "local", upload=False, hold=True), mean=nothing)
        # Without a step: what is kept is the model held, and refinement may have changed that after training.
        still = replace(engine.training, epochs=0)
        engine.fold(got.clients, LocalTask(Keeping(), "keep", training=still, upload=False), mean=nothing)
        return state
