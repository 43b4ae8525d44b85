"""Toy worlds for the tests: small enough to know the answer, and run through the real methods and engines.

    state, engine, metered = run(Scaffold(), "batched", rounds=5)          # the classification world
    Run(FedAvg(), world=quadratic(A, b, sizes)).round()                    # a world with a known optimum

Everything is float64 unless asked otherwise, and nothing touches torch's global generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from children import Children
from fake_network import FakeNetwork
from fnrfl.algorithms.fnr import FNR
from fnrfl.config import registry
from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.messages import ClientSide
from fnrfl.core.modules import InputScale
from fnrfl.core.net import Model, Net
from fnrfl.core.options import NetworkOptions
from fnrfl.core.rng import generator, seeded
from fnrfl.core.training import ClientOptions
from fnrfl.core.types import Batch, Decorator, Flat, LocalTask, Out, Replies, State, Training, Tree
from fnrfl.data.batches import Pool
from fnrfl.engines.assemble import Layout, assemble
from fnrfl.engines.federation import Federation
from fnrfl.engines.metered import Metered
from fnrfl.engines.rehearsal import Rehearsal
from fnrfl.engines.wire import to_bytes
from fnrfl.federation.node import AgreedRequests, Node, Participant
from fnrfl.federation.remote_clients import RemoteClients
from fnrfl.process import one_intra_op_thread
from ray_toys import ToyActors

FAST = {"record": True, "threads": 2}  # what "loop-fast" and "batched-fast" add, beside channels-last weights

Loss = Callable[[Objective, Out, Model, Flat, Batch, Tree, Tree], Tensor]


@dataclass(frozen=True)
class World:
    """Data, a model, and how clients train unless told otherwise."""

    module: Callable[[], nn.Module]  # made under a fixed seed, in the dtype of the data
    pool: Pool
    example: Tensor  # [2, ...]
    training: Training
    active: int  # clients in a round
    loss: Loss | None = None  # in place of the cross-entropy of every objective


# -- Classification: the world that everything must work in -----------------------------------------------------------

SIZES = (20, 33, 50, 64, 41, 97)  # examples of the six clients: ragged
NUM_FEATURES, NUM_CLASSES = 12, 4


class Mlp(nn.Module):
    """A small net with BatchNorm and Dropout: state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(NUM_FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.drop(self.norm(self.hidden(x.flatten(1))).relu()))
        return logits


class Plain(nn.Module):
    """The same without BatchNorm and Dropout: its loss is a mean over examples, however they are batched."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(NUM_FEATURES, 16)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(x.flatten(1)).tanh())
        return logits


def classification(dtype: torch.dtype = torch.float64, *, module: Callable[[], nn.Module] = Mlp) -> World:
    """Six clients with ragged shards of a separable problem, four of them active; public data of every kind."""
    draw = generator(0, "toy")
    x = torch.randn(400, NUM_FEATURES, generator=draw, dtype=torch.float64)
    more = torch.randn(80, NUM_FEATURES, generator=generator(0, "toy", "more"), dtype=torch.float64)
    truth = torch.randn(NUM_FEATURES, NUM_CLASSES, generator=draw, dtype=torch.float64)
    private = sum(SIZES)
    ends = {"private": private, "public": private + 55, "ranking": 400, "distill": 448, "validation": 480}
    parts = {k: slice(a, b) for (k, b), a in zip(ends.items(), [0, *ends.values()], strict=False)}
    shards = torch.randperm(private, generator=draw).split(SIZES)
    x = torch.cat([x, more])
    y = (x @ truth).argmax(1)
    return World(
        module=lambda: module().to(dtype),
        pool=Pool({k: (x[s], y[s]) for k, s in parts.items()}, shards, NUM_CLASSES, dtype=dtype),
        example=x[:2].to(dtype),
        training=Training(epochs=2, batch=16, lr=0.05, weight_decay=1e-3),
        active=4,
    )


def with_pool(world: World, shards: Any = None, **options: Any) -> World:
    """The classification world with a pool of its own: other shards, or noise."""
    pool = world.pool
    parts = {k: tuple(t.clone() for t in pool._parts[k]) for k in ("private", "public", "ranking")}
    return replace(world, pool=Pool(parts, shards or pool.shards, NUM_CLASSES, dtype=torch.float64, **options))


# -- Quadratics: f_i(y) = 1/2 y'A_i y - b_i'y, whose optimum is known -------------------------------------------------


class Vector(nn.Module):
    """A model that is nothing but a vector, which it answers for every example."""

    feature_layer = "same"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(size, dtype=torch.float64))
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.same(self.vector.expand(len(x), -1))
        return answer


def quadratic(
    A: Tensor,
    b: Tensor,
    sizes: Sequence[int],
    *,
    steps: int = 1,
    lr: float = 0.1,
    momentum: float = 0.0,
    batch: int = 1000,
    active: int | None = None,
    spread: float = 0.0,
) -> World:
    """Client i has `sizes[i]` examples and the loss of A[i] and b[i]; A = 0 makes it linear.

    An example carries its own (A, b). By default all of a client's are alike and a step sees all of them, so that
    `steps` are as many exact gradient steps; with a smaller `batch` a client takes `steps * ceil(size / batch)`. With
    `spread` the examples' b differ around b[i], and batches matter.
    """
    N, d = b.shape
    rows, labels = [], []
    for i, n in enumerate(sizes):
        around = spread * torch.randn(n, d, generator=generator(0, i, "spread"), dtype=torch.float64)
        rows.append(torch.cat([A[i].reshape(1, -1).expand(n, -1), b[i] + around - around.mean(0)], 1))
        labels.append(torch.zeros(n, dtype=torch.int64))
    x, y = torch.cat(rows), torch.cat(labels)

    def loss(_: Objective, out: Out, model: Model, params: Flat, batch: Batch, shared: Tree, own: Tree) -> Tensor:
        A, b = batch.x[:, : d * d].reshape(-1, d, d), batch.x[:, d * d :]
        v = out.logits
        return batch.mean(0.5 * (v[:, None, :] @ A @ v[:, :, None]).flatten() - (b * v).sum(1))

    return World(
        module=lambda: Vector(d),
        pool=Pool({"private": (x, y)}, torch.arange(len(x)).split(list(sizes)), d, dtype=torch.float64),
        example=x[:2],
        training=Training(
            lr=lr, momentum=momentum, weight_decay=0.0, batch=batch, epochs=steps, last_batch="keep"
        ),  # keep: with a batch above every size, an epoch is one full step
        active=N if active is None else active,
        loss=loss,
    )


def bowls(N: int = 4, d: int = 3) -> tuple[Tensor, Tensor]:
    """Unlike quadratics, well conditioned: A [N, d, d] with eigenvalues within 0.4 to 1.6, b [N, d]."""
    draw = generator(0, "bowls")
    turn = torch.linalg.qr(torch.randn(N, d, d, generator=draw, dtype=torch.float64)).Q
    curvature = 0.4 + 1.2 * torch.rand(N, d, generator=draw, dtype=torch.float64)
    return turn @ torch.diag_embed(curvature) @ turn.mT, 3 * torch.randn(N, d, generator=draw, dtype=torch.float64)


def optimum(A: Tensor, b: Tensor, weights: Sequence[float]) -> Tensor:
    """The minimiser of the weighted mean of the clients' losses."""
    w = torch.tensor(weights, dtype=torch.float64)
    best: Tensor = torch.linalg.solve(torch.einsum("n,nij->ij", w, A), w @ b)
    return best


# -- Runs -------------------------------------------------------------------------------------------------------------


class Passed(NamedTuple):
    """One chunk that crossed the boundary."""

    cohort: Tensor
    task: LocalTask
    replies: Replies


class Recorder(Decorator):
    """An engine that remembers what passed since `passed` was last cleared."""

    def __init__(self, engine: Federation) -> None:
        super().__init__(engine)
        self.passed: list[Passed] = []

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        for replies in self.engine.stream(cohort, task):
            self.passed.append(Passed(cohort, task, replies))
            yield replies


class Run:
    """A run that can be looked at, and changed, between rounds; `round()` plays the next one."""

    def __init__(
        self,
        algorithm: Algorithm,
        engine: str = "loop",
        *,
        world: World | None = None,
        training: Training | None = None,
        active: int | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 7,
        device: str = "cpu",
        scale: tuple[list[float], list[float]] | None = None,  # mean and spread of the inputs, by column
        compute: torch.dtype | None = None,  # of the engine "gpu"; the world's by default
        **options: Any,  # of the engine
    ) -> None:
        self.world = world = world or classification(dtype)
        self.algorithm, self.seed, self.t = algorithm, seed, 0
        self.folder = TemporaryDirectory()  # of nodes
        self.active = active or world.active
        with seeded(1, "init"):
            module = algorithm.adapt(world.module(), world.example).to(world.example.dtype)
        name, _, fast = engine.partition("-")
        self.net = Net(module, world.example, channels_last=bool(fast))
        if scale is not None:
            self.net = self.net.with_input_scale(InputScale(*(world.example.new_tensor(row) for row in scale)))
        if name == "gpu" or device != "cpu":
            self.net = self.net.copy(torch.device(device), compute=compute or self.net.dtype)
            self.net = self.net.with_shared_kernels() if name == "gpu" else self.net
        self.state = algorithm.init(self.net)
        options = (FAST if fast else {}) | options
        kind: Any = "loop" if name in ("children", "network") else name
        plain = described(algorithm) | {"seed": seed, "scale": scale, "single": dtype == torch.float32}
        if name == "ray":
            options["actors"] = ToyActors(lambda: to_bytes(plain))
        self.use(assemble(
            kind, self.net, world.pool.on_device(self.net.device),
            client_options(training or world.training, **_taken(ClientOptions, options)),
            seed=seed, client_memory=algorithm.client_state(self.net), layout=Layout(**_taken(Layout, options)),
            **options,
        ))  # fmt: skip
        if name == "children":
            self.engine.clients = Children(plain)
        if name == "network":
            self.engine.clients = self._on_network(algorithm.client_state(self.net))

    def _on_network(self, birth: Tree) -> RemoteClients:
        """The same clients as nodes of a network inside this process."""
        engine, trainer = self.engine, self.engine.server
        rehearsal = Rehearsal(
            self.algorithm, self.net, self.world.pool, engine.options, seed=self.seed, simulated=False
        )
        agreed = cache(lambda client: AgreedRequests(rehearsal, client, cohort=self.active, rounds=1000))
        engine.simulated = False

        def open_node(client: int, run: str) -> Node:
            participant = Participant(client, trainer, birth, agreed(client), shares_memory=True)
            return Node(participant, Path(self.folder.name), run)

        network, feed = FakeNetwork(open_node), self.world.pool
        return RemoteClients(network, "toys", trainer.net, birth, feed, NetworkOptions(), reads_memory=True)

    def use(self, engine: Federation) -> None:
        """Play on an engine."""
        self.engine = engine
        self.recorder = Recorder(engine)
        self.metered = Metered(self.recorder)

    def cohort(self, t: int) -> Tensor:
        """The clients of a round, ascending."""
        order = torch.randperm(len(self.world.pool.shards), generator=generator(self.seed, t, "cohort"))
        return order[: self.active].sort().values

    def round(self, cohort: Tensor | None = None) -> State:
        """Play one round; bytes, notes and what passed are this round's."""
        self.engine.begin(self.t)
        self.metered.begin()
        self.recorder.passed.clear()
        with self.losses(), one_intra_op_thread():
            self.state = self.algorithm.round(
                self.state, self.cohort(self.t) if cohort is None else cohort, self.metered
            )
        self.t += 1
        return self.state

    def rounds(self, count: int) -> State:
        """Play some rounds."""
        for _ in range(count):
            self.round()
        return self.state

    def losses(self) -> Any:
        """The world's losses in place of the cross-entropy, for as long as this context lasts."""
        return nullcontext() if self.world.loss is None else mock.patch.object(Objective, "loss", self.world.loss)

    def replies(self, purpose: str = "local") -> Replies:
        """What the clients answered to the tasks of a purpose in this round."""
        return Replies.stack([p.replies for p in self.recorder.passed if p.task.purpose == purpose])

    def tasks(self, purpose: str) -> list[LocalTask]:
        """The tasks of a purpose in this round, one for each chunk that was answered."""
        return [p.task for p in self.recorder.passed if p.task.purpose == purpose]


def described(algorithm: Algorithm) -> dict[str, Any]:
    """A method of the package as plain values."""
    values = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}
    inner = {k: described(v) for k, v in values.items() if isinstance(v, Algorithm)}
    return {"method": type(algorithm).__name__, "options": values | inner}


def client_side(plain: dict[str, Any]) -> ClientSide:
    """The client side of a run in the classification world, from plain values: what a child process makes."""
    return run_elsewhere(plain).engine.clients


def run_elsewhere(plain: dict[str, Any]) -> Run:
    """A run in the classification world, from plain values."""
    known = {cls.__name__: cls for cls in (FNR, *(registry.load_method(name) for name in registry.algorithms()))}

    def made(method: dict[str, Any]) -> Algorithm:
        options = {k: made(v) if isinstance(v, dict) else v for k, v in method["options"].items()}
        return known[method["method"]](**options)

    dtype = torch.float32 if plain["single"] else torch.float64
    return Run(made(plain), seed=plain["seed"], scale=plain["scale"], dtype=dtype)


def client_options(training: Training, **options: Any) -> ClientOptions:
    """How clients train, and which of them are slow, lost or left out."""
    return ClientOptions(**{f.name: getattr(training, f.name) for f in fields(training)} | options)


def _taken(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of a dataclass out of some options."""
    return {f.name: options.pop(f.name) for f in fields(kind) if f.name in options}


def run(
    algorithm: Algorithm, engine: str = "loop", rounds: int = 5, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[State, Federation, Metered]:
    """Play `rounds` rounds; `options` go to `Run`, and from there to the engine."""
    played = Run(algorithm, engine, dtype=dtype, **options)
    played.rounds(rounds)
    return played.state, played.engine, played.metered


def named(algorithm: Algorithm) -> str:
    """A short name for test ids: the fields that differ from their defaults."""
    said = [
        named(value) if isinstance(value, Algorithm) else f"{f.name}={value}"
        for f in fields(algorithm)
        if (value := getattr(algorithm, f.name)) != f.default
    ]
    return f"{type(algorithm).__name__}({', '.join(said)})".replace("()", "")


# -- Comparisons ------------------------------------------------------------------------------------------------------


def assert_same(a: State, b: State) -> None:
    """Equal bit for bit: parameters, buffers and everything else that both know."""
    for one, other in zip(_tensors(a, b), _tensors(b, a), strict=True):
        assert torch.equal(one, other), f"off by {(one - other).abs().max():.3g}"


def assert_near(a: State, b: State, atol: float = 1e-12) -> None:
    """Equal but for rounding."""
    for one, other in zip(_tensors(a, b), _tensors(b, a), strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=0)


def _tensors(state: State, other: State) -> list[Tensor]:
    assert state.buffers.keys() == other.buffers.keys()
    common = sorted(state.extra.keys() & other.extra.keys())
    buffers = [state.buffers[k] for k in sorted(state.buffers)]
    return [state.params, *buffers, *(state.extra[k] for k in common)]


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of any entry."""
    return float((a - b).abs().max())
