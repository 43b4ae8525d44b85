"""The method that a config names."""

from __future__ import annotations

from fnrfl.algorithms.fnr import FNR
from fnrfl.config import RunConfig, registry
from fnrfl.core.algorithm import Algorithm
from fnrfl.data.splits import PublicTo


def build_algorithm(config: RunConfig) -> Algorithm:
    """The method that a config names, with FNR around it if that is on."""
    inner = registry.load(config.algorithm.name)(**config.algorithm.options)
    if config.fnr is None:
        return inner
    return FNR(
        inner=inner,
        **config.fnr,  # type: ignore[arg-type]
        shuffle=config.protocol != "paper",
        norm_pass_train_mode=config.leaks.norm_pass_train_mode,
    )


def public_to(algorithm: Algorithm) -> PublicTo:
    """Who trains on public data, as the method says or the one that it goes around."""
    within = [getattr(algorithm, name, None) for name in ("inner", "method")]
    inside: list[PublicTo] = [public_to(one) for one in within if isinstance(one, Algorithm)]
    said: PublicTo = getattr(algorithm, "public_to", inside[0] if inside else "nobody")
    return said
