"""Bn-recalibrate: FedAvg whose BatchNorm statistics are recomputed on the public data; a control for FNR."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.core.algorithm import option
from fnrfl.core.masks import Masked
from fnrfl.core.net import Net
from fnrfl.core.types import Engine, State, Tree, aligned, run_steps


def recalibrated(
    net: Net,
    model: State,
    parts: tuple[Tensor, ...],
    fresh: bool,
    repeat: Callable[..., Tensor] = lambda key, *work: run_steps(*work),
) -> Tree:
    """The buffers after a pass in train mode, with dropout off; parameters stay, and so do counters.

    fresh: each statistic is the mean over the parts, and nothing is left of the old one; else it goes on from there.
    """
    net = net.with_shared_kernels()  # layers whose steps can be recorded, cumulative averages included
    net.module.train()
    for layer in net.module.modules():
        if isinstance(layer, Masked):
            layer.eval()
        elif isinstance(layer, _BatchNorm) and fresh:
            layer.momentum = None  # torch's cumulative average, by the counter
    counters = {k: v for k, v in model.buffers.items() if k in net.batchnorm and not v.is_floating_point()}
    buffers = aligned(model.buffers | ({k: torch.zeros_like(v) for k, v in counters.items()} if fresh else {}))

    def step(buffers: Tree, params: Tensor, x: Tensor) -> Tensor:
        _, new = net.apply(params, buffers, x, mode="updating")
        for name, old in buffers.items():
            old.copy_(new[name])
        return params.new_zeros(())

    with torch.no_grad():
        for _, alike in groupby(parts, len):  # recorded steps want batches of one size
            shown = torch.stack([net.laid_out(x) for x in alike])
            repeat(("recalibrate", fresh), step, buffers, model.params, shown)
    return buffers | counters


@dataclass(frozen=True)
class BnRecalibrate(FedAvg):
    """What public data gives through BatchNorm statistics alone: the parameters are FedAvg's, and no label is seen."""

    needs: ClassVar[frozenset[str]] = frozenset({"batchnorm", "public-labels"})

    statistics: Literal["fresh", "moving"] = option(
        "fresh", "fresh: of the public data alone; moving: the clients' go on moving, as in FNR's released code"
    )
    batch: int = option(32, "examples per batch of the pass, or some more, so that none is small", ge=2)

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        average = super().round(state, cohort, engine)
        x, _ = engine.pool("public")
        parts = x.tensor_split(max(1, len(x) // self.batch))
        fresh = self.statistics == "fresh"
        return replace(average, buffers=recalibrated(engine.net, average, parts, fresh, engine.repeat))
