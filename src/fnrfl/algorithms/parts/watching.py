"""What `fnr.watch` puts into the event log: how clients differ, pair by pair, before and after refinement.

The paper takes the gap between clients' class norms for the angle between their updates, and says that refinement
helps the classes of which a client has little. This is what is needed to look.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fnrfl.algorithms.parts.generator import LabelCounts
from fnrfl.algorithms.parts.norms import ClassNorms
from fnrfl.core.types import Engine

COLUMNS_AT_ONCE = 2**20  # parameters that are multiplied at once, in float64


def pair_cosines(updates: Tensor) -> Tensor:
    """The cosine of the angle between each two rows, [M (M - 1) / 2]: 0 with 1, 0 with 2, ..., 1 with 2, and so on.

    It is nan for a row of zeros, which has no direction.

    >>> pair_cosines(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]))
    tensor([1., 0., 0.], dtype=torch.float64)
    """
    products = torch.zeros(len(updates), len(updates), dtype=torch.float64, device=updates.device)
    for columns in updates.split(COLUMNS_AT_ONCE, dim=1):
        products += columns.double() @ columns.double().T
    lengths = products.diagonal().sqrt()
    cosines = (products / lengths[:, None] / lengths).clamp(-1, 1)
    return cosines[tuple(torch.triu_indices(len(updates), len(updates), 1))].cpu()


def pair_gaps(norms: Tensor) -> Tensor:
    """The distance between the class norms of each two rows, [M (M - 1) / 2], in the order of `pair_cosines`.

    >>> pair_gaps(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    tensor([5.])
    """
    return torch.pdist(norms)


class RefinementWatch:
    """Looks at the clients before and after some of them are refined; keeps all their updates in memory, [M, P]."""

    def __init__(
        self, engine: Engine, clients: Tensor, refined: Tensor, start: Tensor, norms: Tensor, probe: ClassNorms
    ) -> None:
        self.engine, self.clients, self.weak, self.refined = engine, clients, clients[refined], refined
        self.start, self.norms, self.probe = start, norms, probe
        self.updates = start[..., :0]
        self.cosines = engine.observe_models(clients, self._take_all)

    def _take_all(self, models: Tensor) -> Tensor:
        self.updates = models - self.start.to(models)
        return pair_cosines(self.updates)

    def _take_refined(self, models: Tensor) -> Tensor:
        rows = self.refined.to(self.updates.device)
        start = self.start if self.start.ndim == 1 else self.start[self.refined.to(self.start.device)]
        self.updates[rows] = models - start.to(models)
        return pair_cosines(self.updates)

    def told(self, accuracy_before: Tensor, accuracy_after: Tensor) -> dict[str, list[float]]:
        """Everything that was seen; accuracies are of refined clients by class, [R, C]. To be asked once."""
        norms = self.norms.clone()
        norms[self.refined] = self.engine.observe(self.weak, self.probe)["norms"].to(norms)
        counts = self.engine.observe(self.weak, LabelCounts(self.engine.num_classes), data="private")["counts"]
        seen = {
            "clients": self.clients,
            "refined": self.weak,
            "cosines_before": self.cosines,
            "cosines_after": self.engine.observe_models(self.weak, self._take_refined),
            "gaps_before": pair_gaps(self.norms),
            "gaps_after": pair_gaps(norms),
            "counts": counts.long(),
            "accuracy_before": accuracy_before,
            "accuracy_after": accuracy_after,
        }
        return {name: values.tolist() for name, values in seen.items()}
