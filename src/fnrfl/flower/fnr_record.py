"""What FNR writes between a Flower server and its clients, and whom the server refines; Flower is not needed here.

A record is a dict of numbers, names and lists of numbers, and travels as one ConfigRecord beside the records of the
app, under the name `RECORD_NAME`. It carries no code: penalties and modes are names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import torch

from fnrfl.algorithms.parts.norms import norm_differences, norm_targets, num_peers, weakest
from fnrfl.config.keys import Key
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.core.options import options_of
from fnrfl.core.training import BatchNormMode, FnrOptions, Training

RECORD_NAME = "fnrfl"
MEASURE, REFINE = "measure", "refine"  # the phases of a round
REFINE_OPTIONS = ("penalty", "weight", "epochs", "lr", "momentum", "weight_decay", "batchnorm", "peers")  # of `refine`

FnrRecord = dict[str, Any]

_STEPS = {option.name: option for option in options_of(Training) if option.name in ("lr", "momentum", "weight_decay")}
_OPTIONS = {option.name: option for option in options_of(FnrOptions)} | _STEPS


@dataclass(frozen=True, kw_only=True)
class RefinementTerms:
    """Whom the server refines, towards what, and how a refined client takes its steps."""

    share: float
    weight: float
    penalty: str
    target: Literal["others", "all"]
    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    batchnorm: BatchNormMode

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            key = Key.of(name, _OPTIONS[name])
            try:
                key.checked(value)
            except ValueError as error:
                raise ConfigError(f"{name} = {value!r} is not allowed: it must be {key.rule}.") from error


@dataclass(frozen=True)
class Measured:
    """A client's measurement of the model that it has trained."""

    node: int
    norms: tuple[float, ...]  # of each class, on public data
    accuracy: float  # on ranking data
    counts: tuple[int, ...] = ()  # of the examples of each class in its public data


def read_measured(node: int, record: FnrRecord) -> Measured:
    """Return the class norms and the accuracy in a client's record; raise if they cannot be."""
    if "problem" in record:
        raise FnrflError(str(record["problem"]))
    norms, counts, accuracy = record.get("norms"), record.get("counts"), record.get("accuracy")
    if not isinstance(norms, list) or not norms or not all(_is_number(norm) and norm >= 0 for norm in norms):
        raise FnrflError("its class norms are not a list of finite numbers that are 0 or more")
    if not isinstance(counts, list) or len(counts) != len(norms) or not all(map(_is_number, counts)):
        raise FnrflError("it has not counted the public examples of each class")
    if not _is_number(accuracy) or not 0 <= accuracy <= 1:
        raise FnrflError("its accuracy is not a number from 0 to 1")
    return Measured(node, tuple(map(float, norms)), float(accuracy), tuple(map(int, counts)))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def other_public_data(measured: Sequence[Measured]) -> list[int]:
    """Return the nodes whose public data has other numbers of labels than that of most nodes."""
    usual = Counter(one.counts for one in measured).most_common(1)
    return [one.node for one in measured if one.counts != usual[0][0]]


def refinement_targets(measured: Sequence[Measured], terms: RefinementTerms) -> tuple[dict[int, list[float]], int]:
    """Return the norms for each node that is refined, and over how many peers they were averaged.

    Of clients with equal accuracy the one that comes first is refined.
    """
    norms = torch.tensor([one.norms for one in measured], dtype=torch.float64)  # [M, C]
    refined = weakest(torch.tensor([one.accuracy for one in measured], dtype=torch.float64), terms.share)
    towards = norm_differences if terms.penalty == "constant" else norm_targets
    targets = towards(norms, refined, terms.target).tolist()
    nodes = [measured[row].node for row in refined.tolist()]
    return dict(zip(nodes, targets, strict=True)), num_peers(len(measured), len(refined), terms.target)
