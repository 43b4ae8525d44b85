"""Probes in train mode that many models answer together, recorded or not: each client's answer is its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.norms import ClassNorms
from fnrfl.core import trees
from fnrfl.core.engine import Probe
from fnrfl.core.training import Training
from fnrfl.core.values import Batch, Out
from fnrfl.engines import joint_probes
from fnrfl.engines.gpus import Gpus
from toys import NUM_CLASSES, NUM_FEATURES, Plain, Run, classification

TRAINING = Training(batch=8, epochs=1, shuffle=False, last_batch="keep")
NORMS = ClassNorms(NUM_CLASSES, TRAINING)
RECORDED = ["batched-fast", "gpu-fast"]
near = partial(torch.testing.assert_close, atol=1e-9, rtol=0)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_probes, "MIN_BATCHES_FOR_PROGRAM", 1)


def answers(engine: str, probe: Probe = NORMS, data: str = "public", **options: Any) -> dict[str, Tensor]:
    """What clients answer in a run of its own."""
    return asked(Run(FedAvg(), engine, world=classification(module=Plain), **options), probe, data)


def asked(run: Run, probe: Probe = NORMS, data: Any = "public") -> dict[str, Tensor]:
    found: dict[str, Tensor] = run.engine.measure(run.cohort(0), probe, data=data, at=run.state)
    return found


@pytest.mark.parametrize("engine", RECORDED)
def test_runs_with_inputs_of_another_scale_share_a_program_and_no_number(engine: str) -> None:
    for mean, spread in ((0.0, 1.0), (0.5, 3.0)):
        scale = [mean] * NUM_FEATURES, [spread] * NUM_FEATURES
        near(answers(engine, scale=scale), answers("loop", scale=scale))


@pytest.mark.parametrize("engine", ["batched", "gpu", *RECORDED])
def test_one_probe_may_be_asked_about_several_data(engine: str) -> None:
    run, oracle = (Run(FedAvg(), kind, world=classification(module=Plain)) for kind in (engine, "loop"))
    large = ClassNorms(NUM_CLASSES, replace(TRAINING, batch=64))
    for data in ("public", "ranking", "public"):
        for probe in (NORMS, large):
            near(asked(run, probe, data), asked(oracle, probe, data))


def test_a_learning_rate_that_falls_needs_no_new_program() -> None:
    run = Run(FNR(FedAvg(), norm_pass_train_mode=True), "batched-fast", lr_decay=0.9, rounds=200)
    recorded = []
    for _ in range(3):
        run.rounds(1)
        recorded.append(run.engine.server.runner.recorder.num_recorded)
    assert recorded[0] == recorded[2] > 0


@pytest.mark.parametrize("engine", ["gpu", "gpu-fast"])
@pytest.mark.parametrize(
    ("error", "room_is_made"),
    [
        (torch.OutOfMemoryError("full"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("an operator that has no rule for vmap"), False),
    ],
)
def test_models_that_cannot_be_asked_together_are_asked_one_by_one(
    engine: str, error: Exception, room_is_made: bool
) -> None:
    ask = joint_probes._answers

    def full(probing: Any, net: Any, models: Any, batch: Batch) -> Any:
        if len(models.params) > 2:
            raise error
        return ask(probing, net, models, batch)

    with (
        mock.patch.object(joint_probes, "_answers", full),
        mock.patch.object(Gpus, "free_memory") as freed,
    ):
        near(answers(engine), answers("loop"))
    assert freed.called == room_is_made


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("record", [False, True])
def test_answers_on_a_gpu(record: bool) -> None:
    """Captured passes too; the last batch is shorter."""
    near(answers("gpu-fast", device="cuda", record=record)["norms"].cpu(), answers("loop")["norms"])


@dataclass
class Changeable(Probe):
    """A probe of a user's, which cannot be hashed."""

    training: Training | None = None

    def __call__(self, out: Out, batch: Batch) -> dict[str, Tensor]:
        return {"sum": out.logits.sum(), "count": torch.ones_like(out.logits[:, 0]).sum()}


@pytest.mark.parametrize("engine", RECORDED)
def test_a_probe_that_is_no_value_is_not_recorded(engine: str) -> None:
    assert joint_probes._is_a_value(NORMS) and not joint_probes._is_a_value(Changeable(TRAINING))
    near(answers(engine, Changeable(TRAINING)), answers("loop", Changeable(TRAINING)))
    more = ClassNorms(NUM_CLASSES, TRAINING)
    object.__setattr__(more, "seen", 1)
    assert not joint_probes._is_a_value(more)


def test_batches_are_stacked_up_to_a_limit() -> None:
    batch = Batch(torch.zeros(4, 2), torch.zeros(4), torch.zeros(4))
    size = sum(t.numel() * t.element_size() for t in trees.leaves(batch))
    for limit, steps in ((1, [1] * 5), (2 * size, [2, 2, 1]), (100 * size, [5])):
        found = list(joint_probes._some_at_once(iter([batch] * 5), limit))
        assert [len(some.y) for some in found] == steps
