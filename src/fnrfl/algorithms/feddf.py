"""FedDF: the average is taught by all clients' models, on examples without labels (Lin et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fnrfl.algorithms.parts.distill import SoftTargets, distill
from fnrfl.algorithms.parts.ensemble import accuracy, verdict, votes
from fnrfl.core.algorithm import Algorithm, Objective, option
from fnrfl.core.types import Engine, LocalTask, Replies, State, Training, Tree


@dataclass(frozen=True)
class FedDF(Algorithm):
    """x_0 = x + sum_i w_i (z_i - x), then Adam down KL(softmax(mean of the teachers' logits / T) || softmax(x(u) / T)).

    The teachers are the models that the cohort handed over, each in eval mode with its own statistics, and all count
    alike. The server holds none of them for longer than it takes to ask.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"distill"})

    steps: int = option(200, "most steps of distillation in a round; the paper: 10000", ge=0)
    every: int = option(20, "steps between two looks at validation data; the official code: 100", ge=1)
    patience: int = option(100, "steps without a better validation accuracy that end it; the paper: 1000", ge=1)
    batch: int = option(128, "examples per step", ge=1)
    lr: float = option(0.001, "learning rate of Adam, annealed along a cosine", gt=0.0)
    temperature: float = option(1.0, "T, of teachers and student", gt=0.0)
    clip: float = option(0.0, "longest gradient, 0 for any; the official code: 5", ge=0.0)
    weights: Literal["examples", "uniform"] = option(
        "examples", "weights of the models in the average that learns: by examples, or uniform (the official code's)"
    )
    teachers: Literal["logits", "probs"] = option(
        "logits", "what is averaged over the teachers; probs has the gradient of the official code's avg_losses too"
    )
    batchnorm: Literal["frozen", "batch", "updating"] = option(
        "updating", "updating: train mode, as in the paper and the official code; batch: none stored; frozen: eval mode"
    )

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        x, _ = engine.pool("distill")

        def said(r: Replies) -> Tree:
            return {"said": votes(engine.net, r, x, self.teachers, self.temperature)} if self.steps else {}

        got = engine.fold(
            cohort,
            LocalTask(Objective(), "local", state),
            mean=lambda r: {"moved": r.params - state.params},
            uniform=self.weights == "uniform",
            total=said,
        )
        average = state.step(got, state.params + got.mean["moved"])
        if not self.steps:
            return average
        target = verdict(got.total["said"], len(got.clients), self.teachers, self.temperature)
        return self._taught(average, x, target, engine)

    def _taught(self, average: State, x: Tensor, target: Tensor, engine: Engine) -> State:
        seen, labels = engine.pool("validation")
        training = Training("adam", self.lr, momentum=0.0, weight_decay=0.0, batch=self.batch, batchnorm=self.batchnorm)
        student = distill(
            engine.net, average, x, target, SoftTargets(self.temperature, self.clip), training,
            steps=self.steps, stream=lambda name: engine.generator("distill", name), every=self.every,
            patience=self.patience, judge=(lambda m: accuracy(engine.net, m, seen, labels)) if len(labels) else None,
            repeat=engine.repeat,
        )  # fmt: skip
        engine.note(distill_steps=student.taken, distill_chosen=student.chosen, distill_loss=student.loss)
        return State(student.model.params, student.model.buffers, average.extra)
