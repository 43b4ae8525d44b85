"""The method that a config names."""

from __future__ import annotations

from fnrfl.algorithms.fnr import FNR
from fnrfl.config import RunConfig, registry
from fnrfl.core.algorithm import Algorithm


def build_algorithm(config: RunConfig) -> Algorithm:
    """The method that a config names, with FNR around it if that is on."""
    inner = registry.load(config.algorithm.name)(**config.algorithm.options)
    if config.fnr is None:
        return inner
    return FNR(
        inner=inner,
        **config.fnr,  # type: ignore[arg-type]
        ranking="recall" if config.protocol == "paper" else "accuracy",
        shuffle=config.protocol != "paper",
        norm_pass_train_mode=config.leaks.norm_pass_train_mode,
    )
