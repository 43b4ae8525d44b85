"""Values that cross the boundary between server and clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.errors import FnrflError
from fnrfl.core.training import Training
from fnrfl.core.trees import Tree

if TYPE_CHECKING:
    from fnrfl.core.algorithm import Objective

Flat = Tensor  # [P] trainable parameters of one model
Shapes = dict[str, tuple[int, ...]]
Data = Literal["private", "public", "ranking", "distill", "validation", "test"]
RandomStream = Callable[[str], torch.Generator]  # a purpose -> the generator that its numbers come from
SERVER = -1  # in the place of a client, where the server does a client's work


@trees.node
@dataclass(frozen=True)
class Batch:
    """One batch of one client.

    An engine may pad a short batch, for objectives that allow it (`Objective.takes_padding`): `marks["real"]` is then 1
    for an example and 0 for a copy of the first one, which counts for nothing.
    """

    x: Tensor  # [B, ...]
    y: Tensor  # [B]
    index: Tensor  # [B] positions in the split
    noise: Tree = field(default_factory=dict)  # uniform numbers, in the shapes that net and objective asked for
    marks: Tree = field(default_factory=dict)

    @property
    def real(self) -> Tensor | None:
        """1 for an example, 0 for padding, [B]; None: there is no padding."""
        return self.marks.get("real")

    @property
    def count(self) -> Tensor | int:
        """How many examples there are; padding is none."""
        return len(self.y) if self.real is None else self.real.sum()

    def mean(self, per_example: Tensor) -> Tensor:
        """Mean over the examples: every objective reduces with this."""
        if self.real is None:
            return per_example.mean()
        return (per_example * self.real).sum() / self.real.sum()


@dataclass(frozen=True)
class Out:
    """The result of a forward pass: features, logits, and the projection that a contrastive method compares."""

    features: Tensor  # [B, F]
    logits: Tensor  # [B, C]
    projection: Tensor  # [B, D]; the features, unless the net has a projection head

    @staticmethod
    def empty(batch: Batch) -> Out:
        """The result where no model was called."""
        nothing = batch.y[:, None][:, :0]
        return Out(nothing, nothing, nothing)


@trees.node
@dataclass(frozen=True)
class State:
    """What the server knows between rounds; also a model to start from (then `extra` is empty)."""

    params: Flat  # [P], or [M, P] when each client starts elsewhere
    buffers: Tree
    extra: Tree = field(default_factory=dict)

    def is_same_model(self, other: State | None) -> bool:
        """Return whether another has the very parameters of this one, so that they need not travel again."""
        return other is not None and self.params is other.params

    def to(self, device: torch.device) -> State:
        """The same on a device."""
        return trees.moved(self, device)

    def step(self, got: Folded, params: Flat, **extra: Tensor) -> State:
        """The state after a round that ended in `params`; buffers are the cohort's average."""
        return State(params, got.buffers, self.extra | extra)

    def packed(self, name: str, joint: str = "/") -> Tree:
        """The model as a part of a tree: parameters under a name, buffers under that name and their own."""
        return {name: self.params} | trees.prefixed(name, self.buffers, joint)

    @staticmethod
    def unpacked(name: str, tree: Tree, joint: str = "/") -> State:
        """The model that was packed into a tree."""
        return State(tree[name], trees.under(name, tree, joint))


@dataclass(frozen=True)
class LocalTask:
    """What the server asks of a cohort."""

    objective: Objective
    purpose: str  # name of the phase, "local" or "refine": part of every random address; bytes and seconds count for it
    start: State | None = None  # None: the model that the client holds
    shared: Tree = field(default_factory=dict)  # the same for every client
    own: Tree = field(default_factory=dict)  # [M, ...], row m addressed to client m
    data: Data = "private"
    training: Training | None = None  # None: the client's own
    role: Literal["train", "extra"] = "train"  # extra: a pass over private data beside the training of the round
    remember: bool = True  # read and write the client's memory
    send_model: bool = True  # False: the model stays with the client
    hold_model: bool = False  # keep the end model for a following probe or task of this round
    on_missing: Literal["network", "keep"] = "network"  # no answer: do as [network] says, or keep the client's model
    never_sent: frozenset[str] = frozenset()  # parameters and buffers that belong to the client alone

    @property
    def is_private_training(self) -> bool:
        """Whether stragglers, dropout and FNR apply: the clients' training of this round, on their own data."""
        return self.role == "train" and self.data == "private"

    def rows(self, where: slice | Tensor) -> LocalTask:
        """The same task for some of the cohort."""
        start = self.start
        if start is not None and start.params.ndim == 2:
            start = trees.rows(State(start.params, start.buffers), where)
        return replace(self, start=start, own=trees.rows(self.own, where))


@trees.node
@dataclass(frozen=True)
class Replies:
    """Answers of some clients, stacked in cohort order; all but `clients` are where the models are.

    Estimate gradients and drift from `trained`; average `params`. Refinement changes `refined` and `buffers` only.
    """

    clients: Tensor  # [M]
    examples: Tensor  # [M] private examples
    steps: Tensor  # [M]
    travel: Tensor  # [M] sum of the coefficients of raw gradients in start - trained; nan where there is none (Adam)
    loss: Tensor  # [M] mean training loss
    trained: Tensor  # [M, P] where private training ended; [M, 0] if the server did not receive it
    buffers: Tree  # [M, ...]
    extras: Tree  # [M, ...]
    refined: Tensor | None = None  # [M, P] the model handed over; None: `trained` is

    @property
    def params(self) -> Tensor:
        """The model handed over, [M, P]."""
        return self.trained if self.refined is None else self.refined

    def pick(self, rows: Tensor | slice) -> Replies:
        """Some of the rows."""
        return trees.rows(self, rows)

    @staticmethod
    def stack(chunks: list[Replies]) -> Replies:
        """All chunks as one."""
        if not chunks:
            raise nobody_answered()
        if any(chunk.refined is not None for chunk in chunks):
            chunks = [replace(chunk, refined=chunk.params) for chunk in chunks]
        return chunks[0] if len(chunks) == 1 else trees.joined(chunks)

    @staticmethod
    def of_nobody(model: State) -> Replies:
        """The replies of no client, to a task with such a model."""
        ids, numbers, models = torch.zeros(0, dtype=torch.int64), model.params.new_zeros(0), model.params[None][:0]
        buffers = {name: value[None][:0] for name, value in model.buffers.items()}
        return Replies(ids, numbers, ids, numbers, numbers, models, buffers, {})


def nobody_answered() -> FnrflError:
    """The error to raise when every client of a cohort was left out."""
    return FnrflError("No client of the cohort ended with finite numbers. Lower client.lr, or fnr.lr if refining.")


@dataclass(frozen=True)
class Folded:
    """What is left of a cohort's replies once the models have been let go."""

    clients: Tensor
    examples: Tensor
    steps: Tensor
    travel: Tensor
    loss: Tensor
    buffers: Tree  # floating ones averaged by examples, integer ones the largest
    mean: Tree  # averaged by examples, or uniformly where the method asked for that
    total: Tree  # plain sums
    rows: Tree  # [M, ...]

    def weigh(self, values: Tensor) -> Tensor:
        """Average of one number per client, by examples."""
        shares = self.examples.to(values.dtype)
        return shares @ values / shares.sum()
