"""FedDC: FedDyn's drift variables together with SCAFFOLD's control variates (Gao et al., CVPR 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fnrfl.algorithms.feddyn import Dynamic, FedDyn
from fnrfl.core.net import Net
from fnrfl.core.types import Flat, LocalTask, State, Tree


@dataclass(frozen=True)
class Decoupled(Dynamic):
    """FedDyn's pull to x - h_i, and steps corrected by g / w_i - g_i."""

    def correct(self, grad: Flat, params: Flat, start: Flat, shared: Tree, own: Tree) -> Flat:
        return super().correct(grad, params, start, shared, own) + (shared["g"] / own["w"] - own["g"])

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        _, kept = super().finish(start, end, travel, examples, shared, own)
        # The authors' code divides everybody's displacement by the mean client's steps and the first round's learning
        # rate. `travel` is the client's own, now, and right with momentum.
        change = (start.params - end.params) / travel - shared["g"] / own["w"]
        return {"g": own["w"] * change}, kept | {"g": own["g"] + change}


@dataclass(frozen=True)
class FedDC(FedDyn):
    """FedDyn, and g <- g + 1/N sum_i w_i (new g_i - old g_i).

    Invariant: g is the mean of all N clients' w_i g_i, whoever takes part.
    """

    traffic: ClassVar[str] = "1 model and P numbers down, as much up"
    needs: ClassVar[frozenset[str]] = frozenset({"linear-optimiser", "uses-trained"})

    def client_state(self, net: Net) -> Tree:
        kept = super().client_state(net)
        return kept | {"g": kept["h"].clone()}

    def task(self, state: State, w: Tensor) -> LocalTask:
        return LocalTask(Decoupled(self.alpha), "local", state, shared={"g": state.extra["g"]}, own={"w": w})
