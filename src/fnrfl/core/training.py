"""How clients train: what a step takes, and the sections `[client]` and `[fnr]` of a config."""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cache
from typing import Literal

from fnrfl.core.errors import ConfigError
from fnrfl.core.options import option

BatchNormMode = Literal["frozen", "batch", "updating"]
NONE, BALANCED = "none", "balanced"  # class weights that are not a list


def read_class_weights(text: str) -> tuple[float, ...]:
    """The numbers in a list of class weights, such as "1, 2, 0.5".

    >>> read_class_weights("[1, 2, 0.5]")
    (1.0, 2.0, 0.5)
    """
    try:
        weights = tuple(float(word) for word in text.strip().removeprefix("[").removesuffix("]").split(","))
    except ValueError:
        weights = ()
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(
            f'client.class_weights = "{text[:100]}" is not allowed: it must be "none", "balanced" or a number above 0 '
            "for each class, as in 1, 2, 0.5."
        )
    return weights


def canonical_class_weights(text: str) -> str:
    """Class weights as they are always written, so that equal ones are equal configs."""
    word = text.strip().lower()
    return word if word in (NONE, BALANCED) else ", ".join(map(repr, read_class_weights(text)))


SCHEDULE = re.compile(r"(?:warmup\((\d+)\))?\+?(constant|cosine|step\((\d+),(0?\.\d+|1)\))?")


@cache
def read_schedule(text: str) -> tuple[int, str, int, float]:
    """Read a schedule of the learning rate: rounds of warm-up, its shape, and every how many rounds which factor.

    >>> read_schedule("warmup(5) + step(20, 0.1)")
    (5, 'step', 20, 0.1)
    """
    words = text.lower().replace(" ", "")
    found = SCHEDULE.fullmatch(words)
    if not words or found is None or words.startswith("+") or words.endswith("+") or found[3] == "0":
        raise ConfigError(
            f'client.schedule = "{text[:100]}" is not allowed: it must be constant, cosine or step(ROUNDS, FACTOR), '
            'where warmup(ROUNDS) may come first, as in "warmup(5) + cosine" or "step(20, 0.1)".'
        )
    return int(found[1] or 0), (found[2] or "constant").partition("(")[0], int(found[3] or 1), float(found[4] or 1)


def canonical_schedule(text: str) -> str:
    """Return the schedule as it is always written, so that equal ones are equal configs."""
    warmup, shape, every, factor = read_schedule(text)
    shape = f"step({every}, {factor!r})" if shape == "step" else shape
    if warmup:
        return f"warmup({warmup})" + (f" + {shape}" if shape != "constant" else "")
    return shape


@dataclass(frozen=True)
class Training:
    """How a client takes its steps: the `[client]` section for local training, part of `[fnr]` for refinement."""

    optimizer: Literal["sgd", "adam", "adamw"] = option(
        "sgd", "new each round; adamw: weight decay beside the gradient"
    )
    lr: float = option(0.01, "learning rate", gt=0)
    _: KW_ONLY
    lr_decay: float = option(1.0, "factor on the learning rate per round", gt=0, le=1)
    schedule: str = option(
        "constant", "of the learning rate over rounds: constant, cosine or step(20, 0.1); also warmup(5) + cosine"
    )
    momentum: float = option(0.9, "of sgd", ge=0, lt=1)
    weight_decay: float = option(1e-5, "added to the gradient", ge=0)
    batch: int = option(64, "examples per step", ge=1)
    epochs: int = option(10, "passes over a client's data per round", ge=1)
    last_batch: Literal["run-on", "keep", "drop", "even"] = "run-on"  # even: for methods that choose it themselves
    augment: Literal["auto", "crop-flip", "none"] | bool = False
    shuffle: bool = True
    batchnorm: BatchNormMode = "updating"
    frozen: frozenset[str] = frozenset()  # parameters that stay as they are
    clip_update: float = 0.0  # of private training; 0: no bound
    class_weights: str = NONE  # in the cross-entropy of steps on the client's own data
    schedule_rounds: int = 0  # of the whole run: where the cosine ends

    def but(self, **options: object) -> Training:
        """The same with other options; "client" leaves one as it is."""
        return replace(self, **{k: v for k, v in options.items() if v != "client"})  # type: ignore[arg-type]

    def steps(self, examples: int) -> int:
        """How many batches there are of so many examples, in all epochs."""
        if self.last_batch == "run-on":
            return -(-self.epochs * examples // self.batch)
        return self.epochs * (examples // self.batch if self.last_batch == "drop" else -(-examples // self.batch))

    def step_options(self) -> Training:
        """What one step depends on; the learning rate is no part of it, nor is how its batches were chosen."""
        return Training(
            self.optimizer, lr=1.0, momentum=self.momentum, weight_decay=self.weight_decay, batchnorm=self.batchnorm,
            frozen=self.frozen, class_weights=self.class_weights,
        )  # fmt: skip

    def in_round(self, t: int) -> Training:
        """The same at the learning rate of round t, counted from 0; that rate changes no more."""
        steps = Training(**{field.name: getattr(self, field.name) for field in fields(Training)})
        lr = self.lr * self.lr_decay**t * self._scheduled(t)
        return replace(steps, lr=lr, lr_decay=1.0, schedule="constant", schedule_rounds=0)

    def _scheduled(self, t: int) -> float:
        """Return the factor of the schedule in round t: after warm-up 1, then what its shape says."""
        warmup, shape, every, factor = read_schedule(self.schedule)
        if t < warmup:
            return (t + 1) / (warmup + 1)
        if shape == "cosine":
            return (1 + math.cos(math.pi * (t - warmup) / max(self.schedule_rounds - warmup, 1))) / 2
        return factor ** ((t - warmup) // every)


@dataclass(frozen=True, kw_only=True)
class ClientOptions(Training):
    """Local training: how every client takes its steps, and which clients are slow, lost or left out."""

    last_batch: Literal["run-on", "keep", "drop"] = option(
        "run-on", "run-on: epochs end to end in full batches; keep a shorter last batch; drop it"
    )
    augment: Literal["auto", "crop-flip", "none"] | bool = option("auto", "auto: crop-flip for colour images")
    class_weights: str = option(
        "none",
        "in the loss: none, balanced (each client by its own counts), or a number for each class: 1, 2, 0.5",
    )
    clip_update: float = option(
        0.0, "largest length of what a client's training of a round may change of its model; 0: no bound", ge=0
    )
    stragglers: float = option(0.0, "share of a cohort that does a random part of the epochs", ge=0, lt=1)
    dropout: float = option(0.0, "share of a cohort whose replies are lost", ge=0, lt=1)
    nonfinite: Literal["fail", "skip"] = option(
        "fail", "when a client's loss is NaN or infinite: stop the run, or leave the client out"
    )


@dataclass(frozen=True, kw_only=True)
class FnrOptions:
    """Whom FNR refines, towards what, and how a refined client takes its steps."""

    share: float = option(
        0.5, "p: floor(p * cohort) clients with the lowest ranking accuracy are refined", ge=0.0, le=1.0
    )
    weight: float = option(0.1, "lambda: weight of the penalty", ge=0.0)
    penalty: Literal["relative", "squared", "absolute", "huber", "per-sample", "log-ratio", "literal", "constant"] = (
        option("relative", "how class norms are compared with their targets; constant is the paper's, without gradient")
    )
    target: Literal["others", "all"] = option(
        "others", "targets averaged over the unrefined clients (the paper) or all other clients (its code)"
    )
    when: Literal["refine", "local", "both"] = option(
        "refine", "penalty in the refinement (the paper), in local training towards the last round's norms, or both"
    )
    epochs: int = option(5, "passes over the public data", ge=0)
    batch: int = option(32, "examples per refinement step", ge=1)
    lr: float | Literal["client"] = option("client", "learning rate of refinement; client: the local one", gt=0.0)
    optimizer: Literal["client", "sgd", "adam", "adamw"] = option(
        "client", "optimiser of refinement; always a fresh one"
    )
    batchnorm: BatchNormMode = option(
        "updating", "updating: train mode, the paper's code; batch: batch statistics, none stored; frozen: eval mode"
    )
    upload: Literal["once", "twice"] = option(
        "once", "once: each client uploads one model, after ranking; twice: the paper's text"
    )
    augment: bool = option(False, "crop and flip public images while refining")
    watch: bool = option(
        False, "log how each pair of clients differs, and each refined client's accuracy by class; changes no model"
    )
