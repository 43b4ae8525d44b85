"""Play rounds of a method without training: clients answer at once, and their requests are written down.

A forecast counts them. A node compares each request with them (`federation/node.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnrfl.core import trees
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.engine import Engine, Probe, Step
from fnrfl.core.feed import Feed
from fnrfl.core.fold import FOLD_ROWS
from fnrfl.core.net import Net
from fnrfl.core.rng import generator
from fnrfl.core.training import ClientOptions
from fnrfl.core.trees import Tree
from fnrfl.core.values import SERVER, Batch, Data, LocalTask, Out, Replies, State

T = TypeVar("T")


class Rehearsal(Engine):
    """An engine whose clients answer in the right shapes, at once; it writes down the requests.

    No example of a client is read: probes are answered for zeros.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        net: Net,
        feed: Feed,
        options: ClientOptions,
        *,
        seed: int = 0,
        width: int = FOLD_ROWS,
        simulated: bool = True,
    ) -> None:
        """`width` clients answer at a time."""
        self.algorithm, self.net, self.feed, self.options = algorithm, _for_one_example(net), feed, options
        self.seed, self.width, self.simulated = seed, width, simulated
        self.num_classes, self.examples = feed.num_classes, feed.examples.to(net.device)
        self._model, self._memory = State(*net.flatten()), algorithm.client_state(net)
        self.begin(0)

    def begin(self, t: int) -> None:
        """Start round t; requests of an earlier one are forgotten."""
        self.round, self.training = t, self.options.in_round(t)
        self.tasks: list[tuple[Tensor, LocalTask]] = []
        self.probes: list[tuple[Tensor, Probe, Data, State | None]] = []

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        self.tasks.append((cohort, task))
        for i in range(0, len(cohort), self.width):
            yield self._replies(cohort[i : i + self.width], task.rows(slice(i, i + self.width)))

    def _replies(self, cohort: Tensor, task: LocalTask) -> Replies:
        m, model, examples = len(cohort), self._model, self.examples[cohort]
        ones = model.params.new_ones(m)
        extras = rehearsed_extras(task, model, self.examples[cohort[0]], self._memory)
        params, buffers = model.params.expand(m, -1), _expanded(model.buffers, m)  # the same memory for everybody
        return Replies(cohort, examples, ones.long(), ones, ones, params, buffers, _expanded(extras, m))

    def fit(self, task: LocalTask) -> State:
        self.tasks.append((torch.tensor([SERVER]), task))
        return self._model if task.start is None else State(task.start.params, task.start.buffers)

    def generator(self, *key: object) -> torch.Generator:
        return generator(self.seed, self.round, "server", *key)

    def repeat(self, key: object, step: Step, carry: Any, fixed: Any, turns: Any) -> Tensor:
        return torch.zeros(len(trees.leaves(turns)[0]))

    def pool(self, data: Data) -> tuple[Tensor, Tensor]:
        return self.feed.all(data)

    def measure(self, cohort: Tensor, probe: Probe, *, data: Data = "public", at: State | None = None) -> Tree:
        self.probes.append((cohort, probe, data, at))
        return _expanded(rehearsed_answer(probe, self.net, self._model), len(cohort))

    def observe(self, cohort: Tensor, probe: Probe, *, data: Data = "public") -> Tree:
        return self.measure(cohort, probe, data=data)

    def observe_models(self, cohort: Tensor, question: Callable[[Tensor], T]) -> T:
        return question(self._model.params.expand(len(cohort), -1))

    def note(self, **facts: object) -> None:
        """A rehearsal leaves no log."""


def _expanded(tree: Tree, m: int) -> Tree:
    return {k: v.expand(m, *v.shape) for k, v in tree.items()}


def rehearsed_extras(task: LocalTask, model: State, examples: Tensor, memory: Tree) -> Tree:
    """Tensors in the shapes of those that a client sends beside the model."""
    one = model.params.new_ones(())
    own = memory | trees.rows(task.own, 0) | {"lr_steps": one}
    return task.objective.finish(model, model, one, examples, task.shared, own)[0]


@torch.no_grad()
def rehearsed_answer(probe: Probe, net: Net, model: State) -> Tree:
    """The answer to a probe about one example, which is nothing but zeros."""
    zero = torch.zeros(1, dtype=torch.int64, device=net.device)
    x = torch.zeros(1, *net.input_shape, dtype=net.input_dtype, device=net.device)
    batch = Batch(net.laid_out(x), zero, zero)
    out = net.eval_forward(model.params, model.buffers, batch.x) if probe.asks_model else Out.empty(batch)
    return probe.finish(probe.add({}, probe(out, batch)))


def _for_one_example(net: Net) -> Net:
    """The net, which says of all examples what it says of the first: the server's own passes over data cost nothing."""
    quick = copy.copy(net)

    def eval_forward(params: Tensor, buffers: Tree, x: Tensor) -> Out:
        out = net.eval_forward(params, buffers, x[:1])
        return Out(*(part.expand(len(x), *part.shape[1:]) for part in (out.features, out.logits, out.projection)))

    quick.eval_forward = eval_forward  # type: ignore[method-assign]
    return quick
