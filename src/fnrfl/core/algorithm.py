"""The two halves of a method: what a client minimises, and what the server does in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fnrfl.core.engine import Engine
from fnrfl.core.net import Model, Net
from fnrfl.core.options import option as option
from fnrfl.core.trees import Tree
from fnrfl.core.values import Batch, Flat, Out, Shapes, State

# Who trains on public data besides the server: no client, every client, or for each example one client of its class.
PublicTo = Literal["nobody", "everybody", "owners"]


CLASS_WEIGHTS = "class_weights"  # in `own`: [C]; whoever trains on private data is given them by the engine


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each example, [B]."""
    # Classes in front: where they are few, a softmax over the last axis takes ten times as long.
    return -logits.mT.log_softmax(-2).gather(-2, y[..., None, :])[..., 0, :]


def class_indicator(y: Tensor, num_classes: int) -> Tensor:
    """1 where an example is of a class, [B, C]. (torch's one_hot reads values, which vmap cannot.)"""
    return y[:, None] == torch.arange(num_classes, device=y.device)


@dataclass(frozen=True)
class Objective:
    """What one client minimises, and what it does before and after.

    Written for ONE client: no client axis, no side effects, no random draws. Numbers that change between rounds belong
    in `shared` (the same for all) or `own` (the client's memory and what was addressed to it), not in fields.
    """

    registry: ClassVar[dict[str, type[Objective]]] = {}
    # Whether `loss` looks at the examples of a batch through `batch.mean` alone, so that padding changes nothing. A
    # class with a loss of its own, or of a class beside it, says it for itself: it does not inherit the answer.
    takes_padding: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        Objective.registry[cls.__name__] = cls
        first = lambda name: next(i for i, base in enumerate(cls.__mro__) if name in vars(base))  # noqa: E731
        if first("loss") < first("takes_padding"):
            cls.takes_padding = False

    def noise(self, batch: int) -> Shapes:
        """Shapes of the uniform numbers that one step needs; they arrive in `batch.noise`."""
        return {}

    def begin(self, start: State, own: Tree) -> State:
        """Where the client starts, given the model that it received or holds."""
        return start

    def loss(self, out: Out, model: Model, params: Flat, batch: Batch, shared: Tree, own: Tree) -> Tensor:
        """The loss of one batch; `out` is the step's one forward pass, `model.start` the model received.

        Under `client.class_weights`, `own` has a weight for each class, and the mean is weighted as torch does it:
        sum_i w[y_i] l_i / sum_i w[y_i].
        """
        losses = cross_entropy(out.logits, batch.y)
        if CLASS_WEIGHTS not in own:
            return batch.mean(losses)
        weights = own[CLASS_WEIGHTS].gather(0, batch.y)
        weights = weights if batch.real is None else weights * batch.real
        return (weights * losses).sum() / weights.sum()

    def correct(self, grad: Flat, params: Flat, start: Flat, shared: Tree, own: Tree) -> Flat:
        """The gradient that the optimiser is given: weight decay is in it, momentum is not yet."""
        return grad

    def shift(self, lr: float | Tensor, shared: Tree, own: Tree) -> Flat | None:
        """A displacement added after the optimiser's step, so that momentum does not carry it on; None: no such one."""
        return None

    def finish(
        self, start: State, end: State, travel: Tensor, examples: Tensor, shared: Tree, own: Tree
    ) -> tuple[Tree, Tree]:
        """(what is sent up beside the model, what the client remembers: changed keys only).

        Here `own` also has `lr_steps`, the learning rate times the number of steps.
        """
        return {}, {}


Objective.registry["Objective"] = Objective


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
    public_to: ClassVar[PublicTo] = "nobody"  # who trains on public data too
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


@dataclass(frozen=True)
class MethodWrapper(Algorithm):
    """A method around another: everything that it does not say itself is as the inner method says."""

    @property
    def method(self) -> Algorithm:
        """The inner method."""
        raise NotImplementedError

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.method.needs

    @property
    def personalised(self) -> bool:  # type: ignore[override]
        return self.method.personalised

    @property
    def trains_clients(self) -> bool:  # type: ignore[override]
        return self.method.trains_clients

    @property
    def public_to(self) -> PublicTo:  # type: ignore[override]
        return self.method.public_to

    def adapt(self, module: nn.Module, example: Tensor) -> nn.Module:
        return self.method.adapt(module, example)

    def client_state(self, net: Net) -> Tree:
        return self.method.client_state(net)

    def init(self, net: Net) -> State:
        return self.method.init(net)

    def personal(self, net: Net, state: State, client: int, memory: Tree) -> State:
        return self.method.personal(net, state, client, memory)
