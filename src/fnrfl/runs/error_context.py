"""What goes wrong in a round becomes a sentence that names its cause: a method, a model, or numbers too large."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fnrfl import usercode
from fnrfl.algorithms.fnr import FNR
from fnrfl.config import registry
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError, from_system, out_of_memory
from fnrfl.core.types import State
from fnrfl.engines.federation import Federation

if TYPE_CHECKING:
    from fnrfl.config import RunConfig


@contextmanager
def method_errors(config: RunConfig, when: str) -> Iterator[None]:
    """Name the method, and its options, in what it raises inside."""
    try:
        yield
    except (Exception, SystemExit) as error:
        told, method = _told(error), config.algorithm
        usual = {f.name: f.default for f in fields(registry.load_method(method.name))} if method.options else {}
        chosen = {key: value for key, value in method.options.items() if usual.get(key) != value}
        asked = ", ".join(f"algorithm.{key} = {value}" for key, value in chosen.items())
        nearer = "Bring them nearer to their defaults; " if asked and ":" not in method.name else ""
        raise FnrflError(
            f'algorithm = "{method.name}"{f" ({asked})" if asked else ""} failed {when}: {told} {nearer}--debug shows '
            "where."
        ) from error


@contextmanager
def model_errors(config: RunConfig, what: str) -> Iterator[None]:
    """Name the model, and what could not be done, in what it raises inside."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise CompatibilityError(
            f'model = "{config.model.name}" {what}: {_told(error)} Correct its forward, or choose another model; '
            "--debug shows where."
        ) from error


def _told(error: BaseException) -> str:
    """Return what was raised, and where in a user's own code if it was there; raise again what has words already."""
    if isinstance(error, FnrflError) or out_of_memory(error) or from_system(error) is not None:
        raise error
    said, place = str(error).strip().partition("\n")[0], usercode.where(error)
    return (
        f"{type(error).__name__}{f': {said}' if said else ''}{f' ({place})' if place else ''}".removesuffix(".") + "."
    )


# -- numbers -----------------------------------------------------------------------------------------------------------


def check_shapes(run_dir: Path, state: State | None, engine: Federation) -> None:
    """Refuse a checkpoint that does not fit the model: a server's state, or what a client remembers.

    What clients on other machines remember is theirs to check.
    """
    model, memory = engine.server.initial, engine.memory
    wanted = {"params": model.params} | model.buffers
    given = [("the server", {} if state is None else {"params": state.params} | state.buffers, wanted)]
    given += [(f"client {c}", memory.get(c), memory.birth) for c in (memory if engine.simulated else ())]
    for whose, found, like in given:
        for name, tensor in found.items():
            right = f"shape {list(like[name].shape)}" if name in like else "no such values"
            if right != (has := f"shape {list(tensor.shape)}"):
                raise ConfigError(
                    f"The checkpoint in {run_dir} has {name} of {whose} with {has}, and the model has {right}. It "
                    "belongs to another run: put its files back as they were, or run again into another directory."
                )


def check_state(state: State, initial: State, algorithm: Algorithm, t: int) -> None:
    """Refuse a server's state of round t that is not finite: engines have looked at what the clients sent.

    A buffer that was not finite before the first round, such as a mask of attention, may stay so.
    """
    buffers = [v for k, v in state.buffers.items() if k not in initial.buffers or _finite(initial.buffers[k])]
    for what, tensors in (("model", [state.params, *buffers]), ("memory", state.extra.values())):
        if not all(map(_finite, tensors)):
            raise FnrflError(
                f"The server's {what} is no longer finite after round {t + 1}, although the models of the clients "
                f"were. Lower {_steps_of(algorithm)}."
            )


def check_scores(scores: dict[str, Any], algorithm: Algorithm, t: int) -> None:
    """Refuse scores of round t that are not finite: a model of finite numbers may be too large to be asked."""
    for name in ("accuracy", "loss", "validation_accuracy"):
        if scores[name] is not None and not math.isfinite(scores[name]):
            raise FnrflError(
                f"The {name.replace('_', ' ')} after round {t + 1} is not finite, although the server's model is: its "
                f"numbers are too large. Lower {_steps_of(algorithm)}."
            )


def for_json(value: Any) -> Any:
    """Return a value with null in the place of every number that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: for_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _steps_of(algorithm: Algorithm) -> str:
    """Return the keys that say how far the server goes in a round."""
    method = algorithm.inner if isinstance(algorithm, FNR) else algorithm  # FNR has no step of its own
    rates = [f"algorithm.{f.name}" for f in fields(method) if f.name == "lr" or f.name.endswith("_lr")]
    return " or ".join([*rates, "client.lr"])
