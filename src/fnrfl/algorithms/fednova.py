"""FedNova: average normalised directions, so that more steps do not mean more weight (Wang et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.types import Engine, LocalTask, Replies, State, Tree


@dataclass(frozen=True)
class FedNova(Algorithm):
    """x <- x + (sum_i p_i t_i) * sum_i p_i (y_i - x) / t_i, with t_i = lr * |a_i| the client's `travel`.

    |a_i| counts how often a gradient entered the displacement, so it is right under momentum. Buffers are averaged
    plainly: these weights extrapolate and could make a running variance negative.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"linear-optimiser", "uses-trained"})
    traffic: ClassVar[str] = "1 model down, 1 up"

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        def parts(r: Replies) -> Tree:
            return {"direction": (r.trained - state.params) / r.travel[:, None], "refinement": r.params - r.trained}

        got = engine.fold(cohort, LocalTask(Objective(), "local", state), mean=parts)
        effective = got.weigh(got.travel)  # tau_eff, with the learning rate in it
        return state.step(got, state.params + effective * got.mean["direction"] + got.mean["refinement"])
