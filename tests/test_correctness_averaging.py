"""Correctness: methods that average models, against references in plain loops, round by round in float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fnrfl.algorithms.fedadagrad import FedAdagrad
from fnrfl.algorithms.fedadam import FedAdam
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fedavgm import FedAvgM
from fnrfl.algorithms.fedbn import FedBN
from fnrfl.algorithms.feddc import FedDC
from fnrfl.algorithms.feddyn import FedDyn
from fnrfl.algorithms.fednova import FedNova
from fnrfl.algorithms.fedprox import FedProx
from fnrfl.algorithms.fedyogi import FedYogi
from fnrfl.algorithms.moon import Moon
from fnrfl.algorithms.scaffold import Scaffold
from plain_loops import (
    MODULES,
    Federation,
    Normed,
    assert_equal,
    assert_model,
    averaged,
    descend,
    fedavg,
    gradient,
    travel,
    vector,
    with_vector,
)
from toys import Plain, distance

ROUNDS = 3
MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.9])
NETS = pytest.mark.parametrize("net", MODULES)


@NETS
@MOMENTA
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_fedavg_and_fedprox_are_plain_loops(net: str, momentum: float, mu: float) -> None:
    """x <- sum of n_i y_i over the sum of n_i; FedProx has the gradient of mu/2 |w - x|^2 in every step."""
    fed = Federation(MODULES[net], momentum=momentum, last_batch="keep")
    run = fed.run(FedProx(mu=mu) if mu else FedAvg())
    server = fed.first
    for t in range(ROUNDS):
        x = vector(server)
        clients, modules, _ = fedavg(fed, t, server, direction=lambda g, w, x=x: g + mu * (w - x))
        server = averaged(modules, fed.shares(clients))
        run.round()
        assert_equal(run, server)


@NETS
@MOMENTA
def test_fednova_averages_normalised_directions(net: str, momentum: float) -> None:
    """x <- x - (sum of p_i |a_i|) * sum of p_i (x - y_i) / |a_i|; clients take unequal numbers of steps."""
    fed = Federation(MODULES[net], momentum=momentum)
    run = fed.run(FedNova())
    server = fed.first
    for t in range(ROUNDS):
        x = vector(server)
        clients, modules, steps = fedavg(fed, t, server)
        assert len(set(steps)) > 1
        p = fed.shares(clients)
        a = [travel(fed.training, K) / fed.training.lr for K in steps]
        tau = sum(p_i * a_i for p_i, a_i in zip(p, a, strict=True))
        directions = [(x - vector(m)) / a_i for m, a_i in zip(modules, a, strict=True)]
        moved = x - tau * sum(p_i * d for p_i, d in zip(p, directions, strict=True))  # type: ignore[operator]
        server = with_vector(averaged(modules, p), moved)  # BatchNorm's statistics are averaged
        run.round()
        assert_equal(run, server)


@MOMENTA
@pytest.mark.parametrize("weights", ["examples", "uniform", "niid-bench"])
@pytest.mark.parametrize(
    ("variates", "correction", "net"),
    [
        ("I", "gradient", "plain"),
        ("II", "gradient", "batchnorm"),
        ("II", "after-momentum", "batchnorm"),
        ("I", "after-momentum", "plain"),
    ],
)
def test_scaffold_corrects_every_step(momentum: float, weights: str, variates: str, correction: str, net: str) -> None:
    """Algorithm 1 with options I and II, and NIID-Bench's form: a step of lr (c - c_i) after the momentum step."""
    fed = Federation(MODULES[net], momentum=momentum)
    lr, N = fed.training.lr, len(fed.sizes)
    run = fed.run(Scaffold(variates=variates, weights=weights, correction=correction, server_lr=0.8))  # type: ignore[arg-type]
    server = fed.first
    c = torch.zeros_like(vector(server))
    own = [c.clone() for _ in range(N)]
    part = [n / sum(fed.sizes) if weights == "examples" else 1 / N for n in fed.sizes]  # of all clients
    for t in range(ROUNDS):
        x, clients, modules, changes = vector(server), fed.cohort(t), [], []
        for i in clients:
            module = copy.deepcopy(server).train()
            if correction == "gradient":
                steps = descend(
                    module, fed.batches(t, i), fed.training, direction=lambda g, w, i=i, c=c: g - own[i] + c
                )
                far = travel(fed.training, steps)
            else:
                steps = descend(module, fed.batches(t, i), fed.training, after=c - own[i])
                far = lr * steps
            if variates == "I":
                seen, labels = fed.whole("private", i)
                new = gradient(cross_entropy(server(seen), labels), server) + fed.training.weight_decay * x
            else:
                new = own[i] - c + (x - vector(module)) / far
            changes.append(new - own[i])
            modules.append(module)
        p = [1 / len(clients)] * len(clients) if weights == "uniform" else fed.shares(clients)
        mean = sum(p_i * (vector(m) - x) for p_i, m in zip(p, modules, strict=True))
        server = with_vector(averaged(modules, fed.shares(clients)), x + 0.8 * mean)
        c = c + sum(part[i] * change for i, change in zip(clients, changes, strict=True))
        for i, change in zip(clients, changes, strict=True):
            own[i] = own[i] + change
        run.round()
        assert_equal(run, server)
        assert distance(run.state.extra["c"], c) <= 1e-10
        assert all(distance(run.engine.memory.get(i)["c"], own[i]) <= 1e-10 for i in range(N))


class Headed(nn.Module):
    """MOON's net by hand: features, two layers of projection, and logits that read the projection."""

    def __init__(self, there: nn.Module, projects: bool) -> None:
        super().__init__()
        self.there, self.projects = copy.deepcopy(there), projects

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(what is compared, logits)."""
        made = self.there.norm(self.there.hidden(x)).tanh()
        if not self.projects:
            return made, self.there.head(made)
        first, _, second = self.there.head.project
        compared = second(first(made).relu())
        return compared, self.there.head.classify(compared)


@MOMENTA
@pytest.mark.parametrize("head", [0, 6])
def test_moon_contrasts_with_the_global_and_the_previous_model(momentum: float, head: int) -> None:
    """CE + mu * mean of -log( e^(near/tau) / (e^(near/tau) + e^(far/tau)) ), references in eval mode."""
    fed = Federation(Normed, momentum=momentum, active=4)
    mu, tau = 2.0, 0.4
    run = fed.run(Moon(mu=mu, tau=tau, head=head))
    server = Headed(run.net.export(*run.net.flatten()), bool(head))
    previous: dict[int, Headed] = {}
    for t in range(ROUNDS):
        clients, modules = fed.cohort(t), []
        for i in clients:
            module = copy.deepcopy(server).train()
            received, before = copy.deepcopy(server).eval(), previous.get(i)

            def loss(module: Any, x: Tensor, y: Tensor, *_: Any, r: Any = received, b: Any = before) -> Tensor:
                compared, logits = module(x)
                if b is None:
                    return cross_entropy(logits, y)
                with torch.no_grad():
                    to, away = r(x)[0], b.eval()(x)[0]
                near, far = cosine_similarity(compared, to) / tau, cosine_similarity(compared, away) / tau
                contrast = -(near.exp() / (near.exp() + far.exp())).log()
                return cross_entropy(logits, y) + mu * contrast.mean()

            descend(module, fed.batches(t, i), fed.training, loss=loss)
            modules.append(module)
        for i, module in zip(clients, modules, strict=True):
            previous[i] = copy.deepcopy(module)
        server = averaged(modules, fed.shares(clients))  # type: ignore[assignment,arg-type]
        run.round()
        assert distance(run.state.params, vector(server)) <= 1e-10
        for name, buffer in server.named_buffers():
            assert distance(run.state.buffers[name.removeprefix("there.")], buffer) <= 1e-10
    assert len(previous) > 4  # some took part again, and some late


@MOMENTA
@pytest.mark.parametrize(("net", "weights"), [("plain", "examples"), ("batchnorm", "examples"), ("plain", "uniform")])
def test_feddyn_adds_up_its_drift(net: str, momentum: float, weights: str) -> None:
    """The authors' form: loss + alpha_i <w, h_i - x> + alpha_i/2 |w|^2, and the server adds the mean of all h_j."""
    fed = Federation(MODULES[net], momentum=momentum)
    N, alpha = len(fed.sizes), 0.2
    run = fed.run(FedDyn(alpha=alpha, weights=weights, smallest=0.0))  # type: ignore[arg-type]
    server = fed.first
    drift = [torch.zeros_like(vector(server)) for _ in range(N)]
    for t in range(ROUNDS):
        x, clients, modules = vector(server), fed.cohort(t), []
        for i in clients:
            share = fed.sizes[i] / sum(fed.sizes) * N if weights == "examples" else 1.0
            linear = drift[i] - x

            def loss(
                module: nn.Module, seen: Tensor, y: Tensor, *_: Any, a: float = alpha / share, b: Tensor = linear
            ) -> Tensor:
                w = torch.cat([p.flatten() for p in module.parameters()])
                return cross_entropy(module(seen), y) + a * (w @ b) + a / 2 * (w @ w)

            module = copy.deepcopy(server).train()
            descend(module, fed.batches(t, i), fed.training, loss=loss)
            modules.append(module)
        for i, module in zip(clients, modules, strict=True):
            drift[i] = drift[i] + vector(module) - x
        mean = sum(vector(m) for m in modules) / len(modules)
        server = with_vector(averaged(modules, fed.shares(clients)), mean + sum(drift) / N)
        run.round()
        assert_equal(run, server)


@MOMENTA
@pytest.mark.parametrize(("net", "weights"), [("plain", "examples"), ("batchnorm", "examples"), ("plain", "uniform")])
def test_feddc_has_drift_and_variates(net: str, momentum: float, weights: str) -> None:
    """Loss + alpha_i/2 |w - (x - h_i)|^2 + <w, G / w_i - G_i>; the divisor of the variates is the client's travel."""
    fed = Federation(MODULES[net], momentum=momentum)
    N, alpha = len(fed.sizes), 0.1
    run = fed.run(FedDC(alpha=alpha, weights=weights, smallest=0.0))  # type: ignore[arg-type]
    server = fed.first
    zero = torch.zeros_like(vector(server))
    drift, own, G = [zero] * N, [zero] * N, zero
    for t in range(ROUNDS):
        x, clients, modules, change = vector(server), fed.cohort(t), [], zero
        for i in clients:
            share = fed.sizes[i] / sum(fed.sizes) * N if weights == "examples" else 1.0
            near, slope = x - drift[i], G / share - own[i]

            def loss(
                module: nn.Module, seen: Tensor, y: Tensor, *_: Any,
                a: float = alpha / share, b: Tensor = near, s: Tensor = slope,
            ) -> Tensor:  # fmt: skip
                w = torch.cat([p.flatten() for p in module.parameters()])
                return cross_entropy(module(seen), y) + a / 2 * ((w - b) ** 2).sum() + w @ s

            module = copy.deepcopy(server).train()
            steps = descend(module, fed.batches(t, i), fed.training, loss=loss)
            moved = vector(module) - x
            new = own[i] - G / share - moved / travel(fed.training, steps)
            change = change + share * (new - own[i])
            own[i], drift[i] = new, drift[i] + moved
            modules.append(module)
        G = G + change / N
        mean = sum(vector(m) for m in modules) / len(modules)
        server = with_vector(averaged(modules, fed.shares(clients)), mean + sum(drift) / N)
        run.round()
        assert_equal(run, server)
        assert distance(run.state.extra["g"], G) <= 1e-10


@MOMENTA
@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_fedbn_keeps_batchnorm_with_the_clients(momentum: float, weights: str) -> None:
    """Everything but the BatchNorm layer is averaged; a client goes on with its own layer, statistics included."""
    fed = Federation(Normed, momentum=momentum)
    run = fed.run(FedBN(weights=weights))  # type: ignore[arg-type]
    server = fed.first
    layers = [copy.deepcopy(server.norm) for _ in fed.sizes]
    for t in range(ROUNDS):
        clients, modules = fed.cohort(t), []
        for i in clients:
            module = copy.deepcopy(server).train()
            module.norm = copy.deepcopy(layers[i])
            descend(module, fed.batches(t, i), fed.training)
            layers[i] = copy.deepcopy(module.norm)
            modules.append(module)
        p = fed.shares(clients) if weights == "examples" else [1 / len(clients)] * len(clients)
        server = averaged(modules, p)
        run.round()
        for i in range(len(fed.sizes)):
            mine = copy.deepcopy(server)
            mine.norm = copy.deepcopy(layers[i])
            found = run.algorithm.personal(run.net, run.state, i, run.engine.memory.get(i))
            assert_model(found.params, found.buffers, mine)


def second_moment(method: str, v: float, d: float) -> float:
    """v after a displacement d, with beta2 = 0.9."""
    if method == "fedadagrad":
        return v + d * d
    if method == "fedadam":
        return 0.9 * v + 0.1 * d * d
    return v - 0.1 * d * d * (1 if v > d * d else -1 if v < d * d else 0)


@NETS
@pytest.mark.parametrize("method", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_fedavgm_fedadagrad_fedadam_fedyogi_step_along_the_mean_displacement(net: str, method: str) -> None:
    """Number by number: m and v of every weight, from the displacement that FedAvg would make."""
    fed = Federation(MODULES[net])
    rate, beta1, tau = 0.05, 0.6, 0.01
    made: dict[str, Any] = {
        "fedavgm": FedAvgM(server_lr=rate, beta=beta1),
        "fedadagrad": FedAdagrad(server_lr=rate, beta1=beta1, tau=tau),
        "fedadam": FedAdam(server_lr=rate, beta1=beta1, beta2=0.9, tau=tau),
        "fedyogi": FedYogi(server_lr=rate, beta1=beta1, beta2=0.9, tau=tau),
    }
    run = fed.run(made[method])
    server = fed.first
    m, v = [0.0] * len(vector(server)), [tau**2] * len(vector(server))
    for t in range(ROUNDS):
        x = vector(server)
        clients, modules, _ = fedavg(fed, t, server)
        mean = averaged(modules, fed.shares(clients))
        new = x.tolist()
        for k, d in enumerate((vector(mean) - x).tolist()):
            if method == "fedavgm":
                m[k] = beta1 * m[k] + d
                new[k] += rate * m[k]
            else:
                m[k] = beta1 * m[k] + (1 - beta1) * d
                v[k] = second_moment(method, v[k], d)
                new[k] += rate * m[k] / (math.sqrt(v[k]) + tau)
        server = with_vector(mean, torch.tensor(new, dtype=torch.float64))
        run.round()
        assert_equal(run, server)


def test_plain_nets_have_no_statistics_and_the_other_has() -> None:
    """Of the instrument: what is compared is there."""
    assert not list(Plain().named_buffers())
    assert len(list(Normed().named_buffers())) == 3
