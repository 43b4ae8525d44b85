"""FedBN: BatchNorm layers stay with their clients, everything else is averaged (Li et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.algorithm import Algorithm, Objective, option
from fnrfl.core.net import Net
from fnrfl.core.types import Engine, LocalTask, State, Tree


@dataclass(frozen=True)
class OwnNorms(Objective):
    """Cross-entropy on the model received, with the client's own BatchNorm layers in it.

    A client remembers their parameters and buffers, and the parameters' places in the flat vector.
    """

    def begin(self, start: State, own: Tree) -> State:
        return State(
            start.params.index_copy(0, own["places"], own["norms"]), start.buffers | trees.under("buffer", own)
        )

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        buffers = {k: v for k, v in trees.prefixed("buffer", end.buffers).items() if k in own}
        return {}, {"norms": end.params[own["places"]]} | buffers


@dataclass(frozen=True)
class FedBN(Algorithm):
    """x <- x + sum_i p_i (z_i - x) on all that is not BatchNorm; client i uses x with its own BatchNorm layers.

    The server's BatchNorm entries are the cohort's average, for whoever wants one model of a run. No client starts
    from them, and in a deployment the server would not have them unless the clients sent theirs.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"batchnorm"})
    personalised: ClassVar[bool] = True
    traffic: ClassVar[str] = "1 model down, 1 up, both without BatchNorm layers"

    weights: Literal["examples", "uniform"] = option(
        "examples", "weights of the models: by examples, like all methods here, or uniform (the authors' code)"
    )

    def client_state(self, net: Net) -> Tree:
        params, buffers = net.flatten()
        places = net.mask(net.batchnorm).nonzero().flatten()
        statistics = {name: value for name, value in buffers.items() if name in net.batchnorm}
        return {"places": places, "norms": params[places]} | trees.prefixed("buffer", statistics)

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        task = LocalTask(OwnNorms(), "local", state, never_sent=engine.net.batchnorm)
        got = engine.fold(
            cohort, task, mean=lambda r: {"moved": r.params - state.params}, uniform=self.weights == "uniform"
        )
        return state.step(got, state.params + got.mean["moved"])

    def personal(self, net: Net, state: State, client: int, memory: Tree) -> State:
        memory = memory | {"places": net.mask(net.batchnorm).nonzero().flatten()}  # whatever a remote client claims
        return OwnNorms().begin(state, memory)
