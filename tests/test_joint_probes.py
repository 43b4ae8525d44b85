"""Probes in train mode that many models answer together: each client's answer is its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.parts.norms import ClassNorms
from fnrfl.core.engine import Probe
from fnrfl.core.training import Training
from fnrfl.engines.gpus import Gpus
from fnrfl.engines.runner import Probing
from toys import NUM_CLASSES, NUM_FEATURES, Plain, Run, classification

TRAINING = Training(batch=8, epochs=1, shuffle=False, last_batch="keep")
NORMS = ClassNorms(NUM_CLASSES, TRAINING)
TOGETHER = ["batched", "gpu"]
near = partial(torch.testing.assert_close, atol=1e-9, rtol=0)


def answers(engine: str, probe: Probe = NORMS, data: str = "public", **options: Any) -> dict[str, Tensor]:
    """What clients answer in a run of its own."""
    return asked(Run(FedAvg(), engine, world=classification(module=Plain), **options), probe, data)


def asked(run: Run, probe: Probe = NORMS, data: Any = "public") -> dict[str, Tensor]:
    found: dict[str, Tensor] = run.engine.measure(run.cohort(0), probe, data=data, at=run.state)
    return found


@pytest.mark.parametrize("engine", TOGETHER)
def test_runs_with_inputs_of_another_scale_share_no_number(engine: str) -> None:
    for mean, spread in ((0.0, 1.0), (0.5, 3.0)):
        scale = [mean] * NUM_FEATURES, [spread] * NUM_FEATURES
        near(answers(engine, scale=scale), answers("loop", scale=scale))


@pytest.mark.parametrize("engine", TOGETHER)
def test_one_probe_may_be_asked_about_several_data(engine: str) -> None:
    run, oracle = (Run(FedAvg(), kind, world=classification(module=Plain)) for kind in (engine, "loop"))
    large = ClassNorms(NUM_CLASSES, replace(TRAINING, batch=64))
    for data in ("public", "ranking", "public"):
        for probe in (NORMS, large):
            near(asked(run, probe, data), asked(oracle, probe, data))


@pytest.mark.parametrize(
    ("error", "room_is_made"),
    [
        (torch.OutOfMemoryError("full"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("an operator that has no rule for vmap"), False),
    ],
)
def test_models_that_cannot_be_asked_together_are_asked_one_by_one(error: Exception, room_is_made: bool) -> None:
    ask = Probing.joint_answers

    def full(probing: Any, worker: Any, rows: Any) -> Any:
        if len(rows) > 2:
            raise error
        return ask(probing, worker, rows)

    with (
        mock.patch.object(Probing, "joint_answers", full),
        mock.patch.object(Gpus, "free_memory") as freed,
    ):
        near(answers("gpu"), answers("loop"))
    assert freed.called == room_is_made


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_answers_on_a_gpu() -> None:
    """The last batch is shorter."""
    near(answers("gpu-fast", device="cuda", record=False)["norms"].cpu(), answers("loop")["norms"])
