"""The method that a config names."""

from __future__ import annotations

from fnrfl.algorithms.fnr import FNR
from fnrfl.config import RunConfig, registry
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.options import values_of
from fnrfl.runs.passed import NOTHING_PASSED, PassedObjects


def build_algorithm(config: RunConfig, passed: PassedObjects = NOTHING_PASSED) -> Algorithm:
    """The method that a config names or that was given, with FNR around it if that is on."""
    inner = passed.find("algorithm", config.algorithm.name)
    inner = inner or registry.load_method(config.algorithm.name)(**config.algorithm.options)
    if config.fnr is None:
        return inner
    return FNR(
        inner=inner,
        **values_of(config.fnr),
        ranking="recall" if config.protocol == "paper" else "accuracy",
        shuffle=config.protocol != "paper",
        norm_pass_train_mode=config.leaks.norm_pass_train_mode,
    )
