"""The two halves of a method: what a client minimises, and what the server does in a round."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from fnrfl.core.net import Model, Net
from fnrfl.core.options import option as option
from fnrfl.core.types import Batch, Engine, Flat, Out, Shapes, State, Tree


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each example, [B]."""
    # Classes in front: where they are few, a softmax over the last axis takes ten times as long.
    return -logits.mT.log_softmax(-2).gather(-2, y[..., None, :])[..., 0, :]


@dataclass(frozen=True)
class Objective:
    """What one client minimises, and what it does before and after.

    Written for ONE client: no client axis, no side effects, no random draws. Numbers that change between rounds belong
    in `shared` (the same for all) or `own` (the client's memory and what was addressed to it), not in fields.
    """

    registry: ClassVar[dict[str, type[Objective]]] = {}

    def __init_subclass__(cls) -> None:
        Objective.registry[cls.__name__] = cls

    def noise(self, batch: int) -> Shapes:
        """Shapes of the uniform numbers that one step needs; they arrive in `batch.noise`."""
        return {}

    def begin(self, start: State, own: Tree) -> State:
        """Where the client starts, given the model that it received or holds."""
        return start

    def loss(self, out: Out, model: Model, params: Flat, batch: Batch, shared: Tree, own: Tree) -> Tensor:
        """The loss of one batch; `out` is the step's one forward pass, `model.start` the model received."""
        return batch.mean(cross_entropy(out.logits, batch.y))

    def correct(self, grad: Flat, params: Flat, start: Flat, shared: Tree, own: Tree) -> Flat:
        """The gradient that the optimiser is given: weight decay is in it, momentum is not yet."""
        return grad

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        """(what is sent up beside the model, what the client remembers: changed keys only)."""
        return {}, {}


Objective.registry["Objective"] = Objective


def describe(objective: Objective) -> dict[str, Any]:
    """An objective as plain values, by name and fields."""
    values = {f.name: getattr(objective, f.name) for f in fields(objective)}
    return {
        "name": type(objective).__name__,
        **{k: describe(v) if isinstance(v, Objective) else v for k, v in values.items()},
    }


def restore(described: dict[str, Any]) -> Objective:
    """The inverse of `describe`."""
    values = {k: restore(v) if isinstance(v, dict) else v for k, v in described.items() if k != "name"}
    return Objective.registry[described["name"]](**values)


@dataclass(frozen=True)
class Algorithm:
    """A federated method; its fields are its hyper-parameters.

    `needs` may name "features", "head" (a Linear that reads the features), "batchnorm", "public-labels", "distill"
    (public data without labels), "linear-optimiser" (its arithmetic uses `travel`) and "uses-trained" (the server must
    see where private training ended even if the client was refined afterwards).
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    personalised: ClassVar[bool] = False  # clients use models of their own, and `personal` says which
    trains_clients: ClassVar[bool] = True  # False for controls that need no clients: FNR has nobody to refine
    traffic: ClassVar[str] = "1 model down, 1 up"  # of a client in a round, for `fnrfl list algorithms`

    def adapt(self, module: nn.Module, example: Tensor) -> nn.Module:
        """The module that this method trains; for methods that add layers."""
        return module

    def client_state(self, net: Net) -> Tree:
        """What a client remembers before its first round."""
        return {}

    def init(self, net: Net) -> State:
        """The server's state before the first round."""
        return State(*net.flatten())

    def personal(self, net: Net, state: State, client: int, memory: Tree) -> State:
        """The model that a client uses, of what the server knows and the client remembers."""
        return state

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        """One communication round."""
        raise NotImplementedError
