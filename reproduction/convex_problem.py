"""A federated problem whose constants are known: softmax regression with an l2 penalty, few clients, skewed labels.

Phi_i(w) = mean cross-entropy of client i's examples + mu/2 |w|^2, and Phi = sum_i p_i Phi_i. All that the paper's
convergence analysis speaks of can be computed here:

- mu: each Phi_i is mu-strongly convex by its penalty;
- L = mu + 1/2 the largest eigenvalue of a mean of x x': an example adds at most 1/2 x x' to the Hessian;
- G: without the penalty, an example's gradient is at most sqrt(2) X long, with X the longest x. A step of at most 1/mu
  makes w a weighted mean of itself and of a vector that is at most sqrt(2) X / mu long, and averaging makes means too.
  From w = 0 on, w is never longer than that, and G = 2 sqrt(2) X is at least the gradient of every batch on the way;
- w*, Phi* and every Phi_i* by Newton's method, to machine precision.

Features are inputs here: no parameter comes before them. So class norms are the same for all models, and the penalty of
FNR is a constant, as it is in the paper's released code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.core.rng import generator, seeded
from fnrfl.core.training import ClientOptions
from fnrfl.data.batches import Pool
from fnrfl.engines.assemble import Layout, assemble
from fnrfl.method import Algorithm, Net, State
from fnrfl.process import isolated

NUM_CLIENTS, NUM_CLASSES, NUM_INPUTS, NUM_EXAMPLES = 6, 3, 5, 40  # an example's last input is a constant
MU = 0.5
REFINED_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class SoftmaxLoss:
    """The loss of some examples: mean cross-entropy + mu/2 |w|^2; w is [C, d]."""

    x: Tensor  # [n, d]
    y: Tensor  # [n]

    def __call__(self, w: Tensor) -> Tensor:
        rows = (self.x @ w.T).log_softmax(1)
        return -rows.gather(1, self.y[:, None]).mean() + MU / 2 * w.square().sum()

    def gradients(self, w: Tensor) -> Tensor:
        """The gradient of each example, [n, C, d]."""
        wrong = (self.x @ w.T).softmax(1) - nn.functional.one_hot(self.y, NUM_CLASSES)
        return wrong[:, :, None] * self.x[:, None, :] + MU * w

    def gradient(self, w: Tensor) -> Tensor:  # [C, d]
        return self.gradients(w).mean(0)

    def hessian(self, w: Tensor) -> Tensor:  # [C d, C d]
        p = (self.x @ w.T).softmax(1)
        curved = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        mean = torch.einsum("nab,ni,nj->aibj", curved, self.x, self.x) / len(self.x)
        return mean.reshape(w.numel(), w.numel()) + MU * torch.eye(w.numel(), dtype=w.dtype)

    @cached_property
    def minimiser(self) -> Tensor:
        """Where the loss is least, by Newton's method: each turn doubles the digits."""
        w = self.x.new_zeros(NUM_CLASSES, NUM_INPUTS)
        for _ in range(12):
            w = w - torch.linalg.solve(self.hessian(w), self.gradient(w).flatten()).reshape(w.shape)
        return w

    @cached_property
    def least(self) -> float:
        return float(self(self.minimiser))

    @property
    def smoothness(self) -> float:
        """An upper bound of the largest eigenvalue of the Hessian, anywhere."""
        return MU + 0.5 * float(torch.linalg.eigvalsh(self.x.T @ self.x / len(self.x))[-1])

    @property
    def batch(self) -> int:
        """Examples in a batch: more than half of them."""
        return len(self.x) // 2 + 1

    @property
    def batch_variance(self) -> float:
        """An upper bound of E |gradient of a random batch - gradient|^2, at any w; batches without repetition."""
        n = len(self.x)
        spread = 2 * float(self.x.square().sum(1).mean())  # of the examples: each |p - y|^2 is at most 2
        return spread * (n - self.batch) / (self.batch * (n - 1))


class Problem:
    """The clients' losses and the public one, with the constants of the analysis."""

    def __init__(self, clients: Sequence[SoftmaxLoss], public: SoftmaxLoss) -> None:
        everybody = (*clients, public)
        self.clients, self.public = tuple(clients), public
        self.share = 1 / len(clients)  # p_i, the same for every client
        # Phi: clients have equally many examples, so it is the loss of all of them.
        self.whole = SoftmaxLoss(torch.cat([one.x for one in clients]), torch.cat([one.y for one in clients]))
        self.optimum = self.whole.minimiser  # w*
        self.first_distance = float(self.optimum.square().sum())  # |w - w*|^2 at the start, w = 0
        self.L = max(loss.smoothness for loss in everybody)  # smoothness of every loss
        # The longest gradient of any batch at any model that can occur.
        self.G = 2 * 2**0.5 * max(float(loss.x.norm(dim=1).max()) for loss in everybody)
        # Gamma as the paper prints it, Phi(w*) - sum p_i Phi_i(w*), and as it is meant, Phi* - sum p_i Phi_i*.
        at_optimum = self.share * sum(float(one(self.optimum)) for one in clients)
        self.gamma_printed = float(self.whole(self.optimum)) - at_optimum
        self.gamma = self.whole.least - self.share * sum(one.least for one in clients)
        # How far w* is from the best for public data: Phi_public(w*) - Phi_public*.
        self.gamma_public = float(public(self.optimum)) - public.least
        self.noise = sum(self.share**2 * one.batch_variance for one in clients)  # sum p_i^2 (Delta G_i)^2

    def rate(self, step: int) -> float:
        """The decaying step size b / (m + g), with b = 4 / mu and g so that it begins at 1 / (4 L)."""
        return 4 / (MU * step + 16 * self.L)


def skewed_problem(*, public_is_everybodys: bool = False) -> Problem:
    """Six clients with four fifths of their examples in one class; public data has all classes alike.

    With `public_is_everybodys` the public data is a copy of all private data, so that both have the same optimum.
    """
    draw = generator(0, "theory")
    centres = torch.randn(NUM_CLASSES, NUM_INPUTS - 1, generator=draw, dtype=torch.float64)

    def examples(own: Sequence[int]) -> SoftmaxLoss:
        y = torch.tensor([*own, *(i % NUM_CLASSES for i in range(NUM_EXAMPLES - len(own)))])
        x = centres[y] + 0.6 * torch.randn(len(y), NUM_INPUTS - 1, generator=draw, dtype=torch.float64)
        x = torch.cat([0.8 * x / x.norm(dim=1, keepdim=True), x.new_full((len(y), 1), 0.6)], 1)  # of length 1
        return SoftmaxLoss(x, y)

    clients = [examples([i % NUM_CLASSES] * (NUM_EXAMPLES * 4 // 5)) for i in range(NUM_CLIENTS)]
    problem = Problem(clients, examples([]))
    return Problem(clients, problem.whole) if public_is_everybodys else problem


@dataclass(frozen=True)
class Steps:
    """How a round goes: steps of local training, then steps of refinement for the weakest half of the clients."""

    local: int
    refined: int = 0
    one_epoch: bool = False  # all local steps are one epoch, each on all the examples; else each is a random batch

    @property
    def total(self) -> int:  # between two averages
        return self.local + self.refined

    def method(self, problem: Problem) -> Algorithm:
        """The package's own method that takes these steps."""
        refining = FNR(inner=FedAvg(), share=REFINED_SHARE, epochs=self.refined, batch=problem.public.batch)
        return refining if self.refined else refining.inner


@isolated()
def distances(problem: Problem, steps: Steps, rounds: int, seeds: Sequence[int]) -> Tensor:
    """|w - w*|^2 after 0, 1, ... rounds of the package's own FedAvg or FNR from w = 0, [seeds, rounds + 1].

    The step size is that of the round's first step. A batch that is larger than half of the examples, with
    `last_batch = "drop"`, makes every epoch one step on a fresh random batch: unbiased and independent, as the analysis
    asks.
    """
    return torch.stack([_one_run(problem, steps, rounds, seed) for seed in seeds])


def _one_run(problem: Problem, steps: Steps, rounds: int, seed: int) -> Tensor:
    whole, public = problem.whole, problem.public
    with seeded(0, "theory"):
        module = nn.Sequential(nn.Linear(NUM_INPUTS, NUM_CLASSES, bias=False, dtype=torch.float64))
    net, method = Net(module, public.x[:2]), steps.method(problem)
    options = ClientOptions(
        optimizer="sgd",
        lr=problem.rate(0),
        momentum=0.0,
        weight_decay=MU,
        batch=NUM_EXAMPLES if steps.one_epoch else problem.clients[0].batch,
        epochs=1 if steps.one_epoch else steps.local,
        last_batch="drop",
        augment="none",
        shuffle=not steps.one_epoch,
    )
    copies = steps.local if steps.one_epoch else 1  # all of a client's examples for each step, one after another
    shards = [own.repeat(copies) for own in torch.arange(len(whole.x)).split(NUM_EXAMPLES)]
    parts = {"private": (whole.x, whole.y), "public": (public.x, public.y), "ranking": (public.x, public.y)}
    pool = Pool(parts, shards, NUM_CLASSES, dtype=torch.float64)
    state, distances = State(net.zeros(), {}), []
    with assemble("batched", net, pool, options, seed=seed, layout=Layout(record=True)) as engine:
        for t in range(rounds + 1):
            distances.append((state.params.reshape(NUM_CLASSES, NUM_INPUTS) - problem.optimum).square().sum())
            engine.options = replace(options, lr=problem.rate(t * steps.total))
            engine.begin(t)
            if t < rounds:
                state = method.round(state, torch.arange(NUM_CLIENTS), engine)
    return torch.stack(distances)
