"""What server optimisers share: a wrapper around another method, whose displacement is the gradient."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fnrfl.algorithms.parts import optimisers
from fnrfl.core.algorithm import Algorithm, MethodWrapper, option
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.net import Net
from fnrfl.core.options import options_of, read_call
from fnrfl.core.types import Engine, Flat, State, Tree


@dataclass(frozen=True)
class Optimised(MethodWrapper):
    """x <- x + step(D) + sum_i p_i (z_i - y_i), D the displacement of the inner method's round.

    Parameters only: buffers, client memory and the inner method's own state are as that method leaves them.
    """

    traffic: ClassVar[str] = "as its inner method"

    inner: str = option("fedavg", "the method, perhaps with options, whose displacement of the model is the gradient")
    refinement: Literal["outside", "inside"] = option(
        "outside", "FNR's part of the displacement: added after the server's step, or seen by it like the rest"
    )

    def __post_init__(self) -> None:
        _check_inner(self.inner)

    def memory(self, params: Flat) -> Tree:
        """The optimiser's memory before the first round; names begin with `server.`."""
        raise NotImplementedError

    def step(self, D: Flat, memory: Tree, t: int) -> tuple[Flat, Tree]:
        """(what is added to the model in round t, counted from 1; the memory after it)."""
        raise NotImplementedError

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        apart = optimisers.Apart(engine)
        new = self.method.round(state, cohort, apart if self.refinement == "outside" else engine)
        D = new.params - state.params
        step, memory = self.step(D, state.extra, engine.round + 1)
        # x + step(D), written so that a step of D itself is the inner method to the last bit.
        return State(new.params + (step - D) + apart.refinement, new.buffers, new.extra | memory)

    @cached_property
    def method(self) -> Algorithm:
        name, options = read_call(self.inner)
        return _class(name)(**options)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.method.needs | ({"uses-trained"} if self.refinement == "outside" else set())

    def init(self, net: Net) -> State:
        state = self.method.init(net)
        return replace(state, extra=state.extra | self.memory(state.params))


@dataclass(frozen=True)
class Adaptive(Optimised):
    """m <- beta1 m + (1 - beta1) D; v as the method says; x <- x + server_lr m / (sqrt(v) + tau)."""

    server_lr: float = option(0.03, "step size of the server: about how far a parameter moves in a round", gt=0.0)
    beta1: float = option(0.9, "how much of the mean displacement is kept", ge=0.0, le=0.9999)
    tau: float = option(1e-3, "displacements far below it are not adapted to; large: like fedavgm", gt=0.0)
    v0: Literal["tau", "zero"] = option("tau", "v before the first round: tau^2 (the paper) or zero (most codes)")

    def memory(self, params: Flat) -> Tree:
        first = self.tau**2 if self.v0 == "tau" else 0.0
        return {"server.m": torch.zeros_like(params), "server.v": torch.full_like(params, first)}

    def step(self, D: Flat, memory: Tree, t: int) -> tuple[Flat, Tree]:
        m = optimisers.average(memory["server.m"], D, self.beta1)
        v = self.second(memory["server.v"], D.square())
        return self.rate(t) * optimisers.adaptive(m, v, self.tau), {"server.m": m, "server.v": v}

    def second(self, v: Flat, square: Flat) -> Flat:
        """The next v, given D^2."""
        raise NotImplementedError

    def rate(self, t: int) -> float:
        """The step size of round t."""
        return self.server_lr


def _check_inner(words: str) -> None:
    """Refuse a name that is no method of the package, and one that is a wrapper itself; its options are checked too."""
    try:
        name, options = read_call(words)
    except ValueError:
        name, options = words, {}
    if name in _stems() and not issubclass(_class(name), MethodWrapper):
        if strange := options.keys() - {known.name for known in options_of(_class(name))}:
            raise CompatibilityError(f'algorithm.inner = "{words}": {name} has no option {sorted(strange)[0]}.')
        return
    choices = [known for known in _stems() if not issubclass(_class(known), MethodWrapper)]
    reason = "goes around a method itself" if name in _stems() else "is not a method of the package"
    raise CompatibilityError(f'algorithm.inner = "{name}" {reason}. Choose one of {", ".join(choices)}.')


def _stems() -> list[str]:
    return sorted(p.stem.replace("_", "-") for p in Path(__file__).parent.glob("*.py") if p.stem[0] != "_")


def _class(name: str) -> type[Algorithm]:
    """The last class of the file that derives from Algorithm, as everywhere."""
    module = importlib.import_module(f"fnrfl.algorithms.{name.replace('-', '_')}")
    here = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    return [c for c in here if issubclass(c, Algorithm)][-1]
