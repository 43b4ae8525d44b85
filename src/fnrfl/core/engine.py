"""What a method can ask of an engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.errors import MissingClients
from fnrfl.core.fold import Fold, fold, nothing
from fnrfl.core.training import Training
from fnrfl.core.trees import Tree
from fnrfl.core.values import Batch, Data, Folded, LocalTask, Out, Replies, State

if TYPE_CHECKING:
    from fnrfl.core.net import Net

T = TypeVar("T")
Step = Callable[[Any, Any, Any], Tensor]  # (carry, fixed, turn) -> loss; changes the tensors of `carry` in place


class Probe:
    """A question about a model on some data, asked in eval mode and without gradient.

    One about the data alone sets `asks_model = False`: it is handed an empty `out`, and no model is sent or called.
    One with a `training` sees the batches of that training instead, in train mode: BatchNorm uses the batch's
    statistics, and dropout is drawn. The model stays as it is.
    """

    asks_model: ClassVar[bool] = True
    training: Training | None = None
    registry: ClassVar[dict[str, type[Probe]]] = {}

    def __init_subclass__(cls) -> None:
        Probe.registry[cls.__name__] = cls

    def __call__(self, out: Out, batch: Batch) -> Tree:
        """Sums over one batch; the engine adds them up over the data, with `add`."""
        raise NotImplementedError

    def add(self, total: Tree, part: Tree) -> Tree:
        """The sums over some batches and one batch more; `total` is empty before the first."""
        return {k: total[k] + v if k in total else v for k, v in part.items()}

    def finish(self, total: Tree) -> Tree:
        """The client's answer, from the sums over all its data."""
        return total

    def accepts(self, answer: Tree, one: Tree, examples: float) -> bool:
        """Whether a client on another machine can answer so, [1, ...]; `one` is the answer about a single example.

        Names, shapes and types are right, and no number is too large. `examples` are the client's private ones.
        """
        return True


def run_steps(step: Step, carry: Any, fixed: Any, turns: Any) -> Tensor:
    """The losses of `step(carry, fixed, turn)` for one turn after another; `turns` [S, ...]."""
    steps = len(trees.leaves(turns)[0])
    return torch.stack([step(carry, fixed, trees.rows(turns, i)) for i in range(steps)])


class Engine:
    """What a cohort can be asked, and what the server itself has. `stream` is the primitive; decorators override it.

    Rounds are counted from 0.
    """

    net: Net
    num_classes: int
    examples: Tensor  # [N] private examples of every client
    training: Training  # the client's own, at this round's learning rate
    round: int
    simulated: bool = True  # whether the event log can look at clients, which a real server cannot

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        """Train, a chunk of the cohort at a time, in cohort order. Lazy: consume once, to the end."""
        raise NotImplementedError

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public", at: State | None = None) -> Tree:
        """Ask each client about the model that it holds, or is sent with `at`; each value [M, ...]."""
        raise NotImplementedError

    def ask(self, clients: Tensor, probe: Probe, *, data: Data = "public") -> tuple[Tensor, Tree]:
        """(the clients that answer, their answers): the round goes on without the others, if `network` allows it."""
        try:
            return clients, self.measure(clients, probe, data=data)
        except MissingClients as gone:
            there = [client not in gone.reasons for client in clients.tolist()]
            return self.ask(clients[torch.tensor(there)], probe, data=data)

    def observe(self, cohort: Tensor, probe: Probe, *, data: Data = "public") -> Tree:
        """The same as `measure` for the event log alone: no part of the protocol, so it costs no bytes."""
        raise NotImplementedError

    def observe_models(self, cohort: Tensor, question: Callable[[Tensor], T]) -> T:
        """What a question says about the models that clients hold, all in memory, [M, P]; for the event log alone."""
        raise NotImplementedError

    def note(self, **facts: object) -> None:
        """Put facts into this round's line of the event log."""
        raise NotImplementedError

    def fit(self, task: LocalTask) -> State:
        """The server itself takes a task on data that it has: nothing crosses, nobody remembers.

        On "private" data it stands for everybody at once, which only a control may do.
        """
        raise NotImplementedError

    def generator(self, *key: object) -> torch.Generator:
        """The server's random stream of this round for some purpose."""
        raise NotImplementedError

    def repeat(self, key: Hashable, step: Step, carry: Any, fixed: Any, turns: Any) -> Tensor:
        """`step(carry, fixed, turn)` for one turn after another, as the server's own work; turns [S, ...], losses [S].

        `carry`, `fixed` and `turns` are trees. A step changes the tensors of `carry` in place and nothing else, and
        does not look at values: an engine may record it, under a key that says all that the step depends on beside
        the shapes of its arguments.
        """
        return run_steps(step, carry, fixed, turns)

    def pool(self, data: Data) -> tuple[Tensor, Tensor]:
        """(x, y) of data that the server has: everything but "private"."""
        raise NotImplementedError

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


def _of_inner(name: str) -> property:
    return property(lambda self: getattr(self.engine, name))


for _name in (
    "net", "num_classes", "examples", "training", "round", "simulated",
    "stream", "measure", "observe", "observe_models", "note", "fit", "generator", "repeat", "pool",
):  # fmt: skip
    setattr(Decorator, _name, _of_inner(_name))
