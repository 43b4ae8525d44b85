"""Correctness: methods whose server teaches, generates or mixes, against references in plain loops, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, one_hot

from fnrfl.algorithms.feddf import FedDF
from fnrfl.algorithms.fedftg import FedFTG
from fnrfl.algorithms.fedgen import FedGen
from fnrfl.algorithms.ktpfl import KTpFL
from fnrfl.algorithms.parts.coefficients import projected
from fnrfl.core.rng import generator
from plain_loops import Federation, Normed, assert_equal, assert_model, averaged, descend, fedavg, vector, with_vector
from toys import NUM_CLASSES, NUM_FEATURES, distance

ROUNDS = 3


def answers(module: nn.Module, x: Tensor) -> Tensor:
    """Logits in eval mode, without gradient; the module's mode stays."""
    with torch.no_grad():
        return copy.deepcopy(module).eval()(x)  # type: ignore[no-any-return]


# -- FedDF ------------------------------------------------------------------------------------------------------------


def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((answers(module, x).argmax(1) == y).double().mean())


@pytest.mark.parametrize("teachers", ["logits", "probs"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize(("batchnorm", "weights"), [("frozen", "examples"), ("updating", "uniform")])
def test_feddf_teaches_the_average(teachers: str, temperature: float, batchnorm: str, weights: str) -> None:
    """Adam with a cosine down KL(ensemble || student), validation data every five steps, the best of all is kept."""
    fed = Federation(Normed)
    steps, every, patience, size = 20, 5, 10, 16
    method = FedDF(
        steps=steps, every=every, patience=patience, batch=size, lr=0.01, temperature=temperature,
        teachers=teachers, batchnorm=batchnorm, weights=weights, clip=0.3,
    )  # type: ignore[arg-type]  # fmt: skip
    run = fed.run(method)
    (x, _), (vx, vy) = fed.whole("distill"), fed.whole("validation")
    server = fed.first
    for t in range(ROUNDS):
        clients, modules, _ = fedavg(fed, t, server)
        p = fed.shares(clients) if weights == "examples" else [1 / len(clients)] * len(clients)
        start = averaged(modules, fed.shares(clients))
        student = with_vector(start, vector(averaged(modules, p))).train(batchnorm == "updating")
        said = torch.stack([answers(m, x) for m in modules]) / temperature
        target = said.mean(0).softmax(1) if teachers == "logits" else said.softmax(2).mean(0)
        draw = generator(fed.seed, t, "server", "distill", "batches")
        order = torch.cat([torch.randperm(len(x), generator=draw) for _ in range(math.ceil(steps * size / len(x)))])
        adam = torch.optim.Adam(student.parameters(), lr=0.01)
        best, liked, when = copy.deepcopy(student), accuracy(student, vx, vy), 0
        for step in range(steps):
            index = order[step * size : (step + 1) * size]
            adam.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * step / steps)) / 2
            adam.zero_grad()
            divergence = kl_div((student(x[index]) / temperature).log_softmax(1), target[index], reduction="batchmean")
            divergence.backward()
            length = torch.cat([weight.grad.flatten() for weight in student.parameters()]).norm()
            for weight in student.parameters():
                weight.grad *= min(1.0, 0.3 / float(length))
            adam.step()
            if (step + 1) % every == 0:
                found = accuracy(student, vx, vy)
                if found > liked:
                    best, liked, when = copy.deepcopy(student), found, step + 1
                elif step + 1 - when >= patience:
                    break
        server = best
        run.round()
        assert_equal(run, server)


# -- FedGen -----------------------------------------------------------------------------------------------------------


class Maker(nn.Module):
    """(noise, label) -> features or examples."""

    def __init__(self, noise: int, hidden: int, out: int, draw: torch.Generator, *, end: str) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(noise + NUM_CLASSES, hidden, bias=False), nn.BatchNorm1d(hidden)
        self.leave, self.end = nn.Linear(hidden, out), end
        with torch.no_grad():
            for layer in (self.enter, self.leave):
                uniform = torch.rand(layer.weight.shape, generator=draw)
                layer.weight.copy_((2 * uniform - 1) / math.sqrt(layer.weight.shape[1]))
            self.leave.bias.zero_()
        self.double()

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        hot = one_hot(y, NUM_CLASSES).double()
        made: Tensor = self.leave(self.norm(self.enter(torch.cat([noise, hot], 1))).relu())
        return {"linear": made, "relu": made.relu(), "unit": made.sigmoid()}[self.end]


@contextmanager
def still(module: nn.Module) -> Iterator[nn.Module]:
    """Eval mode, for a while."""
    module.eval()
    yield module
    module.train()


def spread(made: Tensor, noise: Tensor) -> Tensor:
    """exp(-mean over all pairs of |made_a - made_b| * (noise_a - noise_b)^2), pair by pair."""
    total = made.new_zeros(())
    for a in range(len(made)):
        for b in range(len(made)):
            total = total + (made[a] - made[b]).abs().mean() * (noise[a] - noise[b]).square().mean()
    return (-total / len(made) ** 2).exp()


@pytest.mark.parametrize(("end", "a", "b"), [("linear", 2.0, 1.5), ("relu", 1.0, 0.0)])
def test_fedgen_learns_features_from_the_heads(end: str, a: float, b: float) -> None:
    """Clients train on generated features too; the generator learns from their heads, each by its part of a label."""
    fed = Federation(Normed)
    width, hidden, size, steps, batch, decay = 3, 6, 5, 4, 7, 0.9
    method = FedGen(
        a=a, b=b, decay=decay, size=size, steps=steps, batch=batch, lr=0.01, noise=width, hidden=hidden,
        features=end,
    )  # type: ignore[arg-type]  # fmt: skip
    run = fed.run(method)
    server = fed.first
    maker = Maker(width, hidden, 10, generator(fed.seed, 0, "server", "generator", "initial"), end=end)
    adam = torch.optim.Adam(maker.parameters(), weight_decay=1e-2)
    learnt: set[int] = set()
    for t in range(ROUNDS):
        strength = [max(w * decay**t, min(w, 1e-4)) if learnt else 0.0 for w in (a, b)]
        clients, modules = fed.cohort(t), []
        for i in clients:
            stream = fed.stream(t, i, "local")
            draws = {name: stream(name) for name in ("generated", "generated.label", "generated.view")}

            def loss(
                module: Any, x: Tensor, y: Tensor, *_: Any, draws: Any = draws, s: Any = strength, known: Any = learnt
            ) -> Tensor:
                said = module(x)
                value = cross_entropy(said, y)
                noise = torch.rand(size, width, generator=draws["generated"]).double()
                among = sorted(known) or list(range(NUM_CLASSES))
                at = torch.rand(size, generator=draws["generated.label"]).double()
                label = torch.tensor([among[int(u * len(among))] for u in at.tolist()])
                with still(maker), torch.no_grad():
                    made = maker(noise, label)
                value = value + s[0] * size / len(y) * cross_entropy(module.head(made), label)
                if not b:
                    return value
                noise = torch.rand(len(y), width, generator=draws["generated.view"]).double()
                with still(maker), torch.no_grad():
                    view = module.head(maker(noise, y)).softmax(1)
                return value + s[1] * kl_div(said.log_softmax(1), view, reduction="batchmean")

            module = copy.deepcopy(server).train()
            descend(module, fed.batches(t, i), fed.training, loss=loss)
            modules.append(module)
        counts = torch.stack([torch.bincount(fed.whole("private", i)[1], minlength=NUM_CLASSES) for i in clients])
        seen = (fed.training.epochs * counts + 1).double()
        held = sorted({int(k) for k in counts.sum(0).nonzero()})
        draw = generator(fed.seed, t, "server", "generator")
        adam.param_groups[0]["lr"] = 0.01 * decay**t
        for _ in range(steps):
            noise = torch.rand(batch, width, generator=draw).double()
            y = torch.tensor([held[int(u * len(held))] for u in torch.rand(batch, 1, generator=draw)[:, 0].tolist()])
            made = maker(noise, y)
            value = spread(made, noise)
            for m, module in enumerate(modules):
                for k in range(batch):
                    weight = seen[m, y[k]] / seen[:, y[k]].sum()
                    value = value + weight * cross_entropy(module.head(made[k : k + 1]), y[k : k + 1]) / batch
            adam.zero_grad()
            value.backward()
            adam.step()
        learnt |= set(held)
        server = averaged(modules, fed.shares(clients))
        run.round()
        assert_equal(run, server)
        assert distance(run.state.extra["generator"], vector(maker)) <= 1e-10
        assert distance(run.state.extra["generator.0.var"], maker.norm.running_var) <= 1e-10


# -- FedFTG -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("apart", "batchnorm"), [("kl", "batch"), ("l1", "updating")])
def test_fedftg_tunes_the_average_on_hard_examples(apart: str, batchnorm: str) -> None:
    """For each batch: a step of the generator for each client, then steps of the average towards the ensemble."""
    fed = Federation(Normed)
    width, hidden, size, iterations, tuned, decay = 4, 6, 8, 2, 3, 0.9
    method = FedFTG(
        iterations=iterations, generator_steps=2, student_steps=tuned, batch=size, lr=0.1, weight_decay=1e-2,
        generator_lr=0.02, decay=decay, classify=0.7, diversity=0.5, disagreement=apart, batchnorm=batchnorm,
        noise=width, hidden=hidden,
    )  # type: ignore[arg-type]  # fmt: skip
    run = fed.run(method)
    server = fed.first
    maker = Maker(width, hidden, NUM_FEATURES, generator(fed.seed, 0, "server", "generator"), end="unit")
    for t in range(ROUNDS):
        clients, modules, _ = fedavg(fed, t, server)
        teachers = [copy.deepcopy(m).eval() for m in modules]
        student = averaged(modules, fed.shares(clients))
        counts = torch.stack([torch.bincount(fed.whole("private", i)[1], minlength=NUM_CLASSES) for i in clients])
        part = counts.double() / counts.sum(0)
        total, upto = iterations * size, counts.sum(0).cumsum(0).tolist()
        edges = [n * total // upto[-1] for n in upto]
        ordered = torch.tensor([next(k for k, edge in enumerate(edges) if at < edge) for at in range(total)])
        draw = generator(fed.seed, t, "server", "tune")
        labels = ordered[torch.randperm(total, generator=draw)]
        adam = torch.optim.Adam(maker.parameters(), lr=0.02 * decay**t)
        for y in labels.split(size):
            noise = torch.randn(size, width, generator=draw).double()
            for _ in range(2):
                for m, teacher in enumerate(teachers):
                    maker.train()
                    made = maker(noise, y)
                    now = copy.deepcopy(student).eval()(made)
                    said = teacher(made)
                    if apart == "kl":
                        gap = (now.softmax(1) * (now.softmax(1).log() - said.softmax(1).log())).sum(1)
                    else:
                        gap = (now - said.detach()).abs().mean(1)
                    share = part[m, y]
                    right = cross_entropy(said, y, reduction="none")
                    value = 0.7 * (share * right).mean() - (share * gap).mean()
                    value = value + 0.5 * spread(made, noise) / len(teachers)
                    grads = torch.autograd.grad(value, list(maker.parameters()))
                    for weight, grad in zip(maker.parameters(), grads, strict=True):
                        weight.grad = grad
                    adam.step()
            with still(maker), torch.no_grad():
                x = maker(noise, y)
                q = sum(part[m, y][:, None] * teacher(x).softmax(1) for m, teacher in enumerate(teachers))
            for _ in range(tuned):
                before = {k: v.clone() for k, v in student.named_buffers()}
                student.train()
                loss = -(q * student(x).log_softmax(1)).mean()
                slopes = torch.autograd.grad(loss, list(student.parameters()))
                with torch.no_grad():
                    for weight, slope in zip(student.parameters(), slopes, strict=True):
                        weight -= 0.1 * decay**t * (slope + 1e-2 * weight)
                    if batchnorm == "batch":
                        for name, buffer in student.named_buffers():
                            buffer.copy_(before[name])
        server = student
        run.round()
        assert_equal(run, server)
        assert distance(run.state.extra["generator"], vector(maker)) <= 1e-10


# -- KT-pFL -----------------------------------------------------------------------------------------------------------


def nearest(row: Tensor) -> Tensor:
    """The nearest point of the simplex: max(row - threshold, 0), the threshold found by bisection."""
    low, high = float(row.min()) - 1, float(row.max())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((row - middle).clamp(min=0).sum()) > 1 else (low, middle)
    return (row - low).clamp(min=0)


def paper_step(row: Tensor, said: Tensor, own: int, lam: float, rho: float) -> Tensor:
    """Down lam KL(t || s_own) + rho |c - 1/K|^2 along the simplex, the second term taken at the end of the step."""
    K, examples = len(row), said.shape[1]
    c = row.clone().requires_grad_()
    t = torch.einsum("k,knc->nc", c, said)
    (slope,) = torch.autograd.grad(lam * (t * (t.log() - said[own].log())).sum() / examples, c)
    spread = (said - said.mean(0)).square().sum(0)
    a = 1 / max(1.0, lam * float((spread / t.detach()).sum()) / examples)
    return nearest((row - a * slope + 2 * a * rho / K) / (1 + 2 * a * rho))


def released_step(row: Tensor, said: Tensor, own: int, rho: float) -> Tensor:
    """Down MSE(t, s_own) + rho MSE(c, 1/K); about 0.01 long, by powers of 5; then softmax(5 c)."""
    c = row.clone().requires_grad_()
    t = torch.einsum("k,knc->nc", c, said)
    (slope,) = torch.autograd.grad((t - said[own]).square().mean() + rho * (c - 1 / len(c)).square().mean(), c)
    rate, size = 1.0, float(slope.abs().mean())
    for _ in range(5):
        rate = rate / 5 if size * rate > 0.01 else rate
        rate = rate * 5 if size * rate < 0.01 else rate
    return (5 * (row - rate * slope)).softmax(0)


@pytest.mark.parametrize("rule", ["kl", "mse"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ktpfl_mixes_what_clients_say(rule: str, momentum: float) -> None:
    """Private training of one's own model, soft predictions, a step of the coefficients, imitation of one's teacher."""
    fed = Federation(Normed, momentum=momentum)
    N, T, lam, rho = len(fed.sizes), 4.0, 5.0, 0.3
    run = fed.run(KTpFL(coefficients=rule, temperature=T, lam=lam, rho=rho, epochs=2, batch=20))  # type: ignore[arg-type]
    imitation = replace(fed.training, epochs=2, batch=20, weight_decay=0.0, last_batch="even")
    x, _ = fed.whole("distill")
    models: list[nn.Module] = [copy.deepcopy(fed.first) for _ in range(N)]
    c = torch.full((N, N), 1 / N, dtype=torch.float64)
    said: dict[int, Tensor] = {}
    for t in range(ROUNDS):
        clients = fed.cohort(t)
        for i in clients:
            descend(models[i].train(), fed.batches(t, i), fed.training)
            said[i] = (answers(models[i], x) / T).softmax(1)
        who = sorted(said)
        every = torch.stack([said[k] for k in who])
        for i in clients:
            among = c[i, who].sum()
            row, own = c[i, who] / among, who.index(i)
            new = paper_step(row, every, own, lam, rho) if rule == "kl" else released_step(row, every, own, rho)
            c[i, who] = new * among
            teacher = torch.einsum("k,knc->nc", new, every)

            def loss(
                module: nn.Module, seen: Tensor, _: Any, positions: Tensor, *__: Any, teacher: Tensor = teacher
            ) -> Tensor:
                soft = (module(seen) / T).log_softmax(1)
                return lam * kl_div(soft, teacher[positions], reduction="batchmean")

            descend(models[i].train(), fed.batches(t, i, "imitate", "distill", imitation), imitation, loss=loss)
        run.round()
        assert distance(run.state.extra["coefficients"], c) <= 1e-10
        for i in range(N):
            found = run.algorithm.personal(run.net, run.state, i, run.engine.memory.get(i))
            assert_model(found.params, found.buffers, models[i])


def test_ktpfl_step_is_what_scipy_finds_on_the_simplex() -> None:
    """The minimum of <g, c> + |c - c_0|^2 / (2a) + rho |c - 1/K|^2 over the simplex, by SLSQP; 1e-6 is its own."""
    optimize = pytest.importorskip("scipy.optimize")
    draw, a, rho = torch.Generator().manual_seed(5), 0.7, 0.4
    for K in (2, 3, 5, 8):
        row = torch.rand(K, generator=draw, dtype=torch.float64)
        row, slope = row / row.sum(), torch.randn(K, generator=draw, dtype=torch.float64)
        found = projected(row[None], slope[None], rho, a)[0]
        r, g = row.numpy(), slope.numpy()
        result = optimize.minimize(
            lambda c, r=r, g=g, K=K: g @ c + ((c - r) ** 2).sum() / (2 * a) + rho * ((c - 1 / K) ** 2).sum(),
            r,
            method="SLSQP",
            bounds=[(0, 1)] * K,
            constraints={"type": "eq", "fun": lambda c: c.sum() - 1},
            options={"ftol": 1e-16, "maxiter": 500},
        )
        assert distance(found, torch.from_numpy(result.x)) < 1e-6
