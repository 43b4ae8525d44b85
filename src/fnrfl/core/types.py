"""Values that cross the boundary between server and clients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fnrfl.core.errors import FnrflError
from fnrfl.core.training import Training as Training

if TYPE_CHECKING:
    from fnrfl.core.algorithm import Objective
    from fnrfl.core.net import Net

Flat = Tensor  # [P] trainable parameters of one model
Tree = dict[str, Tensor]  # a few named tensors
Shapes = dict[str, tuple[int, ...]]
Data = Literal["private", "public", "ranking", "distill", "validation"]
Part = Tensor | Tree
Step = Callable[..., Tensor]  # of parts, or of leaves; changes some of them in place, returns the loss
CARRY = 3  # arguments of a step that it changes, in front: parameters, buffers, the optimiser's memory
SERVER = -1  # in the place of a client, where the server does a client's work
Stream = Callable[[str], torch.Generator]  # what the numbers are for -> where they come from


def aligned(tree: Tree) -> Tree:
    """Copies in memory of their own.

    Rows of a larger tensor drag all of it along, files refuse them, and fast sums depend on where a tensor begins in
    memory: only copies make a run that was interrupted the same to the last bit as one that was not.
    """
    return {k: v.clone(memory_format=torch.contiguous_format) for k, v in tree.items()}


@dataclass(frozen=True)
class Batch:
    """One batch of one client. There is never padding in it."""

    x: Tensor  # [B, ...]
    y: Tensor  # [B]
    index: Tensor  # [B] positions in the split
    noise: Tree = field(default_factory=dict)  # uniform numbers, in the shapes that net and objective asked for

    def mean(self, per_example: Tensor) -> Tensor:
        """Mean over the examples: every objective reduces with this."""
        return per_example.mean()


@dataclass(frozen=True)
class Out:
    """What a forward pass gives: features and logits, and what a contrastive method compares."""

    features: Tensor  # [B, F]
    logits: Tensor  # [B, C]
    projection: Tensor  # [B, D]; the features, unless the net has a projection head


@dataclass(frozen=True)
class State:
    """What the server knows between rounds; also a model to start from (then `extra` is empty)."""

    params: Flat  # [P], or [M, P] when each client starts elsewhere
    buffers: Tree
    extra: Tree = field(default_factory=dict)

    def to(self, device: torch.device) -> State:
        """The same elsewhere."""
        move = lambda tree: {k: v.to(device) for k, v in tree.items()}  # noqa: E731
        return State(self.params.to(device), move(self.buffers), move(self.extra))

    def step(self, got: Folded, params: Flat, **extra: Tensor) -> State:
        """The state after a round that ended in `params`; buffers are the cohort's average."""
        return State(params, got.buffers, self.extra | extra)


@dataclass(frozen=True)
class LocalTask:
    """What the server asks of a cohort."""

    objective: Objective
    purpose: str  # "local", "refine", ...: part of the random address, and the phase that bytes and seconds count for
    start: State | None = None  # None: the model the client holds
    shared: Tree = field(default_factory=dict)  # broadcast
    own: Tree = field(default_factory=dict)  # [M, ...], row m addressed to client m
    data: Data = "private"
    training: Training | None = None  # None: the client's own
    remember: bool = True  # read and write the client's memory
    upload: bool = True  # False: the model stays with the client
    hold: bool = False  # keep the end model for a following probe or task of this round
    stays: frozenset[str] = frozenset()  # parameters and buffers that are the client's own and never travel

    def rows(self, where: slice) -> LocalTask:
        """The same task for some of the cohort."""
        start = self.start
        if start is not None and start.params.ndim == 2:
            start = State(start.params[where], {k: v[where] for k, v in start.buffers.items()})
        return replace(self, start=start, own={k: v[where] for k, v in self.own.items()})


@dataclass(frozen=True)
class Replies:
    """Answers of some clients, stacked in cohort order; all but `clients` are where the models are.

    Estimate gradients and drift from `trained`; average `params`. Refinement changes `params` and `buffers` only.
    """

    clients: Tensor  # [M]
    examples: Tensor  # [M] private examples
    steps: Tensor  # [M]
    travel: Tensor  # [M] sum of the coefficients of raw gradients in start - trained; nan where there is none (Adam)
    loss: Tensor  # [M] mean training loss
    trained: Tensor  # [M, P] where private training ended; [M, 0] if the server did not receive it
    params: Tensor  # [M, P] the model handed over
    buffers: Tree  # [M, ...]
    extras: Tree  # [M, ...]

    def pick(self, rows: Tensor | slice) -> Replies:
        """Some of the rows."""
        return Replies.stack([self], lambda tensors: tensors[0][rows])

    @staticmethod
    def stack(chunks: list[Replies], join: Callable[[list[Tensor]], Tensor] = torch.cat) -> Replies:
        """All chunks as one."""
        if not chunks:
            raise nobody_answered()
        if len(chunks) == 1 and join is torch.cat:
            return chunks[0]
        joined: dict[str, Any] = {}
        for f in fields(Replies):
            values = [getattr(chunk, f.name) for chunk in chunks]
            tree = isinstance(values[0], dict)
            joined[f.name] = {k: join([v[k] for v in values]) for k in values[0]} if tree else join(values)
        return Replies(**joined)


def nobody_answered() -> FnrflError:
    """What to raise when a whole cohort was left out."""
    return FnrflError("No client of the cohort ended with finite numbers. Lower client.lr, or fnr.lr if refining.")


Fold = Callable[[Replies], Tree]  # some clients' replies -> named [m, ...] values


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


def _add(into: Tree, values: Tree, weights: Tensor) -> None:
    for name, value in values.items():
        part = (weights.to(value.dtype) @ value.reshape(len(value), -1)).view(value.shape[1:])
        into[name] = part if name not in into else into[name].add_(part)


FEW = 16  # clients whose values are computed and summed at once: more would only take memory


def _few(chunks: Iterable[Replies]) -> Iterator[Replies]:
    for chunk in chunks:
        count = len(chunk.clients)
        yield from [chunk] if count <= FEW else (chunk.pick(slice(i, i + FEW)) for i in range(0, count, FEW))


def nothing(_: Replies) -> Tree:
    """The fold that keeps nothing."""
    return {}


def fold(
    chunks: Iterable[Replies], *, mean: Fold, uniform: bool = False, total: Fold = nothing, rows: Fold = nothing
) -> Folded:
    """One pass over the replies; no more than one chunk of models is alive at a time."""
    facts: list[tuple[Tensor, ...]] = []
    kept: dict[str, list[Tensor]] = {}
    sums: Tree = {}
    means: Tree = {}
    floating: Tree = {}
    integer: Tree = {}
    for chunk in _few(chunks):
        ones = torch.ones_like(chunk.examples)
        _add(means, mean(chunk), ones if uniform else chunk.examples)
        _add(sums, total(chunk), ones)
        for name, value in rows(chunk).items():
            kept.setdefault(name, []).append(value)
        _add(floating, {k: v for k, v in chunk.buffers.items() if v.is_floating_point()}, chunk.examples)
        for name, value in chunk.buffers.items():
            if not value.is_floating_point():  # counters: averaging them makes no sense
                top = value.amax(0)
                integer[name] = top if name not in integer else torch.maximum(integer[name], top)
        facts.append((chunk.clients, chunk.examples, chunk.steps, chunk.travel, chunk.loss))
    if not facts:
        raise nobody_answered()
    clients, examples, steps, travel, loss = (torch.cat(f) for f in zip(*facts, strict=True))
    for value in floating.values():
        value.div_(examples.sum())
    for value in means.values():
        value.div_(len(examples) if uniform else examples.sum())
    stacked = {k: torch.cat(values) for k, values in kept.items()}
    return Folded(clients, examples, steps, travel, loss, floating | integer, means, sums, stacked)


class Probe:
    """A question about a model on some data, asked in eval mode and without gradient.

    One about the data alone sets `asks_model = False`: it is handed an empty `out`, and no model is sent or called.
    """

    asks_model: ClassVar[bool] = True

    def __call__(self, out: Out, batch: Batch) -> Tree:
        """Sums over one batch; the engine adds them up over the data."""
        raise NotImplementedError

    def finish(self, total: Tree) -> Tree:
        """What the client answers, from the sums over all its data."""
        return total


def in_turn(step: Step, same: Sequence[Part], turns: Sequence[Part]) -> Tensor:
    """The losses of `step(*same, *turn)` for one turn after another."""
    count = next(len(t) for part in turns for t in (part.values() if isinstance(part, dict) else [part]))
    pick = lambda part, i: {k: v[i] for k, v in part.items()} if isinstance(part, dict) else part[i]  # noqa: E731
    return torch.stack([step(*same, *(pick(part, i) for part in turns)) for i in range(count)])


class Engine(Protocol):
    """What a cohort can be asked, and what the server itself has. `stream` is the primitive; decorators override it.

    Rounds are counted from 0.
    """

    net: Net
    num_classes: int
    examples: Tensor  # [N] private examples of every client
    training: Training  # the client's own, at this round's learning rate
    round: int

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        """Train, a chunk of the cohort at a time, in cohort order. Lazy: consume once, to the end."""
        ...

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public", at: State | None = None) -> Tree:
        """Ask each client about the model that it holds, or is sent with `at`; each value [M, ...]."""
        ...

    def observe(self, cohort: Tensor, probe: Probe, *, data: Data = "public") -> Tree:
        """The same as `measure` for the event log alone: no part of the protocol, so it costs no bytes."""
        ...

    def note(self, **facts: object) -> None:
        """Put facts into this round's line of the event log."""
        ...

    def fit(self, task: LocalTask) -> State:
        """The server itself takes a task on data that it has: nothing crosses, nobody remembers.

        On "private" data it stands for everybody at once, which only a control may do.
        """
        ...

    def generator(self, *key: object) -> torch.Generator:
        """The server's random stream of this round for some purpose."""
        ...

    def repeat(self, key: Hashable, step: Step, same: Sequence[Part], turns: Sequence[Part]) -> Tensor:
        """`step(*same, *turn)` for one turn after another, as the server's own work; turns [S, ...], losses [S].

        A step changes the first `CARRY` of `same` in place and nothing else, and does not look at values: an engine may
        record it, under a key that says all that the step depends on beside the shapes of its arguments.
        """
        return in_turn(step, same, turns)

    def pool(self, data: Data) -> tuple[Tensor, Tensor]:
        """(x, y) of data that the server has: everything but "private"."""
        ...

    def fold(
        self,
        cohort: Tensor,
        task: LocalTask,
        *,
        mean: Fold,
        uniform: bool = False,
        total: Fold = nothing,
        rows: Fold = nothing,
    ) -> Folded:
        """Train and keep averages, sums and small rows: memory does not grow with the cohort's models."""
        return fold(self.stream(cohort, task), mean=mean, uniform=uniform, total=total, rows=rows)

    def train(self, cohort: Tensor, task: LocalTask) -> Replies:
        """Train and keep every model: [M, P] in memory."""
        return Replies.stack(list(self.stream(cohort, task)))


class Decorator(Engine):
    """An engine around another, the same in everything that is not overridden."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def net(self) -> Net:  # type: ignore[override]
        return self.engine.net

    @property
    def round(self) -> int:  # type: ignore[override]
        return self.engine.round

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        return self.engine.num_classes

    @property
    def examples(self) -> Tensor:  # type: ignore[override]
        return self.engine.examples

    @property
    def training(self) -> Training:  # type: ignore[override]
        return self.engine.training

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        return self.engine.stream(cohort, task)

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public", at: State | None = None) -> Tree:
        return self.engine.measure(cohort, probe, data=data, at=at)

    def observe(self, cohort: Tensor, probe: Probe, *, data: Data = "public") -> Tree:
        return self.engine.observe(cohort, probe, data=data)

    def note(self, **facts: object) -> None:
        self.engine.note(**facts)

    def fit(self, task: LocalTask) -> State:
        return self.engine.fit(task)

    def generator(self, *key: object) -> torch.Generator:
        return self.engine.generator(*key)

    def repeat(self, key: Hashable, step: Step, same: Sequence[Part], turns: Sequence[Part]) -> Tensor:
        return self.engine.repeat(key, step, same, turns)

    def pool(self, data: Data) -> tuple[Tensor, Tensor]:
        return self.engine.pool(data)


@dataclass(frozen=True)
class Plan:
    """One client's batches of one task, end to end."""

    order: Tensor  # positions in the pool that `Feed.take` reads
    sizes: list[int]  # of the batches
    crops: Tensor | None = None  # how each example is cropped and flipped; see `augment.draw_crop_flip`
    noise: Callable[[Tensor], Tensor] | None = None  # lays feature noise over a batch; call once for each, in order

    @property
    def steps(self) -> int:
        """How many batches there are."""
        return len(self.sizes)

    @property
    def batches(self) -> tuple[Tensor, ...]:
        """Positions of each batch."""
        parts: tuple[Tensor, ...] = self.order.split(self.sizes)
        return parts

    def stretch(self, first: int, last: int) -> Tensor:
        """Positions of some batches that are of one size, [steps, batch]."""
        return self._batches(self.order, first, last)

    def crops_of(self, first: int, last: int) -> Tensor | None:
        """The same of `crops`."""
        return None if self.crops is None else self._batches(self.crops, first, last)

    def _batches(self, of: Tensor, first: int, last: int) -> Tensor:
        size, before = self.sizes[first], sum(self.sizes[:first])
        return of[before : before + size * (last - first)].view(last - first, size)


class Feed(Protocol):
    """Where engines get examples from."""

    num_classes: int
    examples: Tensor  # [N] private examples of every client

    def plan(self, client: int, data: Data, training: Training, stream: Stream) -> Plan:
        """The batches of a task."""
        ...

    def take(self, data: Data, positions: Tensor, crops: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x, y) at these positions, whatever their shape, cropped and flipped if asked."""
        ...

    def elsewhere(self, device: torch.device) -> Feed:
        """The same examples on another device."""
        ...

    def whole(self, client: int, data: Data, stream: Stream) -> Iterator[Batch]:
        """All of the client's data once, in large batches, as a probe sees it."""
        ...

    def all(self, data: Data) -> tuple[Tensor, Tensor]:
        """(x, y) of a split."""
        ...
